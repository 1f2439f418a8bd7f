"""A second consumer beside the trainer: every completed group goes to one Parquet file of the run's line, whatever ends it.

python examples/export.py RUN FOLDER

A file is named by the step and digest of its batch. Files of batches that a branch left behind stay as they are: those on
the line are the ones that `strawflow batch list RUN --consumer export --json` tells.
"""

import sys
from pathlib import Path

import pyarrow.parquet as pq

import strawflow

folder = Path(sys.argv[2])
folder.mkdir(exist_ok=True)
with strawflow.open(sys.argv[1]) as store, store.consumer("export", wait_s=60) as export:
    while batch := export.next_batch(1000, at_least=1):
        # A batch that comes again after a crash is the same one and overwrites its own file; no other has its digest.
        pq.write_table(batch.with_every_token(), folder / f"{batch.step:06d}-{batch.digest}.parquet")
        export.advance()
    print("exported up to step", export.position)
