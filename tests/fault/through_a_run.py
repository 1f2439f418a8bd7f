"""The child of test_crash_points: goes through a small run from wherever it stands to its third step, and ends.

python -m tests.fault.through_a_run FOLDER [INDEX_URL [mixed]]

`mixed` draws its prompts from two files and a data source, by weight.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from strawflow.flow import admit, consume, publish_weights, rescue
from strawflow.flow.run import create_run, is_run, open_run
from strawflow.testing.runs import SmallRun, prompt_lines, small_config
from strawflow_workers.rollout.hooks.mixed import mixing_hooks
from tests.fault.mixed_prompts import NUM_WORDS, prompt_sets

NUM_STEPS = 3


def main(folder: Path, index_url: str = "", mixed: str = "") -> None:
    root, prompts, words = folder / "run", folder / "prompts.jsonl", folder / "words.jsonl"
    if not is_run(root):
        settings = {"run.index_url": index_url, "lease.ttl_s": "3600", "lease.heartbeat_s": "3000"}
        if mixed:
            settings["data.prompts"] = json.dumps(prompt_sets())
            words.write_text(prompt_lines(NUM_WORDS, first=100), encoding="utf-8")
        create_run(root, small_config(settings)).close()
        prompts.write_text(prompt_lines(16), encoding="utf-8")
    run = open_run(root)
    with SmallRun(run, hooks=mixing_hooks(run.config)) as small:
        rescue.declare_dead_processes_lost(small.run)
        rescue.recover_packs(small.session("rescue"))
        small.enqueue(prompts)
        if mixed:
            small.enqueue(words, dataset="words")
        small.trainer()
        assert small.resumption is not None
        position = small.resumption.step
        if publish_weights.published_version(small.run, position) is None:
            small.publish(position)
        for step in range(position + 1, NUM_STEPS + 1):
            admit.admit_due(small.session("rollout"), small.hooks)
            small.sample()
            if consume.batch_of_step(small.run, step) is None:
                assert small.plan() is not None
            small.train(step)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
