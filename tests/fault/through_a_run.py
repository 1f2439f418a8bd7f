"""The child of test_crash_points: goes through a small run from wherever it stands to its third step, and ends.

python -m tests.fault.through_a_run FOLDER [INDEX_URL]
"""

from __future__ import annotations

import sys
from pathlib import Path

from strawflow.flow import admit, consume, publish_weights, rescue
from strawflow.flow.run import create_run, is_run, open_run
from strawflow.testing.runs import SmallRun, prompt_lines, small_config

NUM_STEPS = 3


def main(folder: Path, index_url: str = "") -> None:
    root, prompts = folder / "run", folder / "prompts.jsonl"
    if not is_run(root):
        settings = {"run.index_url": index_url, "lease.ttl_s": "3600", "lease.heartbeat_s": "3000"}
        create_run(root, small_config(settings)).close()
        prompts.write_text(prompt_lines(16), encoding="utf-8")
    with SmallRun(open_run(root)) as small:
        rescue.declare_dead_processes_lost(small.run)
        rescue.recover_packs(small.session("rescue"))
        small.enqueue(prompts)
        small.trainer()
        assert small.resumption is not None
        position = small.resumption.step
        if publish_weights.published_version(small.run, position) is None:
            small.publish(position)
        for step in range(position + 1, NUM_STEPS + 1):
            admit.admit_due(small.session("rollout"))
            small.sample()
            if consume.batch_of_step(small.run, step) is None:
                assert small.plan() is not None
            small.train(step)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
