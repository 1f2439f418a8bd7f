"""Engines that fail in every way they can while a run goes on: nothing lost, nothing twice, and batches come again after each
fault; events tell what happened."""

from __future__ import annotations

import json
import random
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from strawflow.flow.progress import standing
from strawflow.flow.run import Run, open_run
from strawflow.index import events, weights
from strawflow.testing.invariants import check_batches_unchanged, check_exactly_once
from tests.fault.kill_run import SupervisedRun, check_finished, make_run, standing_still, wait_until

pytestmark = pytest.mark.alone

FAULTS: dict[str, dict[str, Any]] = {
    "errors": {"error_rate_every_nth": 2},
    "stalls": {"hang": True},
    "slow": {"delay_s": 1.0},
    "disconnects": {"cut_stream_after": 3},
    "short": {"short_logprobs": 3},
    "nan": {"nan_logprobs": 3},
    "masked": {"masked_logprobs": 3},
    "positive": {"positive_logprobs": 3},
    "odd version": {"odd_version": 3},
    "another version alone": {"odd_version": 1},
    "wrong version": {"wrong_version": True},
    "dies at an update": {"die_on_update": 1},
}
SOUND = {
    "error_rate_every_nth": 0,
    "hang": False,
    "delay_s": 0.0,
    "cut_stream_after": 0,
    "short_logprobs": 0,
    "nan_logprobs": 0,
    "masked_logprobs": 0,
    "positive_logprobs": 0,
    "odd_version": 0,
    "wrong_version": False,
    "die_on_update": 0,
}
LASTS_S = (0.5, 2.5)
RECOVERS_S = 60.0


def engine_url(run: Run) -> str:
    """Return the address of the engine that reported last; "" while none has."""
    with run.index.read() as connection:
        found = [e.url for e in weights.engines_listed(connection) if e.url]
    return found[-1] if found else ""


def set_faults(run: Run, **faults: Any) -> bool:
    """Switch faults of the engine that serves; False when it is not there just now."""
    url = engine_url(run)
    if not url:
        return False
    request = urllib.request.Request(f"{url}/faults", data=json.dumps(faults).encode(), method="POST")
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:  # URLError is one
        return False


@pytest.mark.long
def test_engines_that_fail_in_every_way_lose_and_repeat_nothing(tmp_path: Path) -> None:
    names, steps = list(FAULTS) * 4, 240
    root = tmp_path / "run"
    make_run(
        root,
        engine="fake",
        steps=steps,
        seed=11,
        engine_options={"token-s": "0.02", "mean-tokens": "10"},
        max_response_tokens=12,
        stream_interval=2,
        save_every_s=0.3,
        on_new_weights="park",
        max_staleness=2,
        max_attempts=30,
        health_timeout_s=3.0,
        answer_timeout_s=4.0,
        load_timeout_s=4.0,
    ).close()
    rng = random.Random(11)
    rng.shuffle(names)
    supervised = SupervisedRun(root)
    supervised.start()
    run = open_run(root)
    digests: dict[int, str] = {}
    recovered_s: list[float] = []
    wait_until(lambda: standing(run).planned >= 3, seconds=90, what="the third step")
    for name in names:
        wait_until(lambda name=name: set_faults(run, **FAULTS[name]), seconds=60, what="an engine")
        time.sleep(rng.uniform(*LASTS_S))
        before, healed_at = standing(run).planned, time.monotonic()
        assert before < steps - 2, "the run is too short for its faults"
        # The engine may be another by now, which began without a fault.
        set_faults(run, **SOUND)
        wait_until(
            lambda before=before: set_faults(run, **SOUND) and standing(run).planned >= before + 2,
            seconds=RECOVERS_S,
            what=f"batches after {name}",
        )
        recovered_s.append(time.monotonic() - healed_at)
        with standing_still(root):
            digests = check_batches_unchanged(digests, run)
            check_exactly_once(run, finished=False)
    supervised.finish(seconds=600)
    with run.index.read() as connection:
        told = Counter(events.count_by_name(connection))
    run.close()
    check_finished(root, digests)
    assert told["units.saved"] > 0
    assert told["unit.attempt_failed"] > 0
    assert told["engine.quarantined"] > 0
    print(
        f"{len(names)} faults; two batches came {max(recovered_s):.1f} s after the last of each at the latest; {dict(told)}"
    )
