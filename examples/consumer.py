"""A durable trainer: gets batches in order and commits how far it came together with its checkpoint.

Kill it at any instant and start it again: the batches after the last checkpoint come again, same groups, same bytes.

    python examples/consumer.py RUN
"""

import json
import sys

import pyarrow.compute as pc

import strawflow

with strawflow.open(sys.argv[1]) as store, store.consumer("trainer", wait_s=60) as trainer:
    state = {"step": 0, "reward": 0.0}
    if newest := trainer.newest_checkpoint():
        state = json.loads((newest[1] / "state.json").read_text())
    while batch := trainer.next_batch(4):
        state = {"step": batch.step, "reward": state["reward"] + pc.sum(batch.rows["reward"]).as_py()}
        (trainer.checkpoint_folder() / "state.json").write_text(json.dumps(state))
        trainer.commit_checkpoint()  # files and position, or neither
        print("step", batch.step, "groups", batch.num_groups, "digest", batch.digest)
    print(json.dumps(state))
