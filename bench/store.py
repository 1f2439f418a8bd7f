"""How fast the durable loop is, against the raw device in the same run.

    python bench/store.py [--quick] [--json] [--folder DIR]

Each row: name, value, unit, against (what it is compared with, measured interleaved in this run), ratio, target, ok.
Figures are medians of at least five rounds. A row without a target is for orientation.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from strawflow.config import RunConfig
from strawflow.flow import admit, claim, complete, consume, publish_weights
from strawflow.flow.enqueue import EnqueueRequest, enqueue
from strawflow.flow.run import Run, create_run
from strawflow.flow.session import WorkerSession
from strawflow.flow.trajectory import Member, UnitResult
from strawflow.prompts.row import PromptKeys
from strawflow.prompts.source import PromptSource

RECORD_BYTES = 16 * 1024
NUM_TOKENS = RECORD_BYTES // 8  # a token and its log-probability: 4 bytes each


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer cycles, two minutes at most")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--folder", type=Path, help="where to work; default: a temporary folder")
    arguments = parser.parse_args()
    cycles = 60 if arguments.quick else 300
    with tempfile.TemporaryDirectory(prefix="strawflow-bench-", dir=arguments.folder) as folder:
        rows = measure(Path(folder), cycles=cycles, rounds=5)
    if arguments.json:
        print(json.dumps(rows, indent=2))
    else:
        show(rows)
    return 0 if all(row["ok"] is not False for row in rows) else 1


def measure(folder: Path, *, cycles: int, rounds: int) -> list[dict[str, object]]:
    bulk = 16 * cycles
    run = make_run(folder, num_units=rounds * (cycles + bulk) + bulk)
    rates: dict[str, list[float]] = {"cycle": [], "bulk": [], "append": []}
    with WorkerSession(run, "rollout") as session:
        shelf = claim.PromptShelf(session)
        for number in range(rounds):
            rates["append"].append(rate(lambda: append_and_sync(folder / "raw.bin", cycles), cycles))
            rates["cycle"].append(rate(lambda: one_by_one(session, shelf, cycles), cycles))
            at_once = lambda n=number: in_chunks(session, shelf, bulk, tag=f"bulk{n}")  # noqa: E731
            rates["bulk"].append(rate(at_once, bulk))
    run.close()
    append = statistics.median(rates["append"])
    return [
        row("claim + publish 16 KiB + complete, one by one", rates["cycle"], "cycles/s", append),
        row("the same in batches of 256", rates["bulk"], "units/s", append),
        row("append 16 KiB + fdatasync (raw device)", rates["append"], "appends/s", None),
    ]


def make_run(folder: Path, *, num_units: int) -> Run:
    config = RunConfig.model_validate(
        {"rollout": {"prompts_per_step": num_units, "samples_per_prompt": 1}, "trainer": {"steps": 1}}
    )
    run = create_run(folder / "run", config)
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"prompt {i}"}) + "\n" for i in range(num_units)))
    with WorkerSession(run, "enqueue") as session:
        source = PromptSource.parse(str(path))
        enqueue(session, EnqueueRequest(admit.PROMPTS, "train", source, PromptKeys("prompt")))
    with WorkerSession(run, "train") as session:
        resumption = consume.take_over(session)
        assert resumption is not None
        publish_weights.publish_weights(session, resumption.role, step=0, version_id="v0", digest="0")
        admit.admit_due(run)
    return run


def result_of(grant: claim.Grant) -> UnitResult:
    tokens = [7] * NUM_TOKENS
    member = Member(0, "finished", tokens, [-0.5] * NUM_TOKENS, ["v0"] * NUM_TOKENS, "stop", 1.0)
    return UnitResult(grant.unit_id, grant.fence, 1, [1, 2, 3], [member], grant.profile, "bench")


def one_by_one(session: WorkerSession, shelf: claim.PromptShelf, cycles: int) -> None:
    for _ in range(cycles):
        (grant,) = claim.claim(session, shelf, limit=1, serving_version_id="v0")
        complete.complete(session, [result_of(grant)], submission_id=f"one-{grant.unit_id}")


def in_chunks(session: WorkerSession, shelf: claim.PromptShelf, num_units: int, *, tag: str) -> None:
    done = 0
    while done < num_units:
        grants = claim.claim(session, shelf, limit=min(256, num_units - done), serving_version_id="v0")
        complete.complete(session, [result_of(g) for g in grants], submission_id=f"{tag}-{done}")
        done += len(grants)


def append_and_sync(path: Path, cycles: int) -> None:
    record = os.urandom(RECORD_BYTES)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for _ in range(cycles):
        os.write(descriptor, record)
        os.fdatasync(descriptor)
    os.close(descriptor)


def rate(work: Callable[[], None], count: int) -> float:
    started = time.perf_counter()
    work()
    return count / (time.perf_counter() - started)


def row(name: str, rates: list[float], unit: str, against: float | None) -> dict[str, object]:
    value = statistics.median(rates)
    return {
        "name": name,
        "value": round(value, 1),
        "unit": unit,
        "against": None if against is None else f"append + fdatasync {against:.0f}/s",
        "ratio": None if against is None else round(value / against, 3),
        "target": None,
        "ok": None,
    }


def show(rows: list[dict[str, object]]) -> None:
    for line in rows:
        ratio = "" if line["ratio"] is None else f"   {line['ratio']} of {line['against']}"
        print(f"{line['name']:48s} {line['value']:>10} {line['unit']:10s}{ratio}")


if __name__ == "__main__":
    raise SystemExit(main())
