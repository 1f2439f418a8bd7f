"""Every rank of a trainer but the first: does what the first one tells, and ends with it.

1. It holds no lease and writes nothing to the index; it reads its own share of each batch from the store.
2. Signals to end are the first rank's to hear: it tells when it is over. A rank that fails ends, and all with it (launch).
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from strawflow.errors import IllegalTransitionError
from strawflow.flow.run import open_run
from strawflow.packs.reader import PackReader
from strawflow_workers.trainer.team import Team


def follow(root: Path) -> int:
    """Do what the first rank tells until it says that it is over; returns the process's exit code.

    Raises:
        StorageError: the first rank is gone.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    run = open_run(root)
    try:
        team = Team(run, PackReader(run.root))
        while (told := team.ranks.tell())["verb"] != "end":
            _do(team, told)
    finally:
        run.close()
    return 0


def _do(team: Team, told: dict[str, Any]) -> None:
    match told["verb"]:
        case "train":
            team.train_step(told["step"], digest=told["digest"], left_out=told["left_out"])
        case "load":
            team.load(Path(told["path"]))
        case "save":
            team.save(Path(told["path"]))
        case "export":
            team.export(Path(told["path"]))
        case "state_digest":
            team.state_digest()
        case "weights_digest":
            team.weights_digest()
        case "wait":
            pass
        case verb:
            raise IllegalTransitionError(f"the first rank told {verb!r}, which this program does not know")
