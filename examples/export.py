"""A second consumer beside the trainer: every completed group goes to a Parquet file, exactly once, whatever ends it.

python examples/export.py RUN FOLDER
"""

import sys
from pathlib import Path

import pyarrow.parquet as pq

import strawflow

folder = Path(sys.argv[2])
folder.mkdir(exist_ok=True)
with strawflow.open(sys.argv[1]) as store, store.consumer("export", wait_s=60) as export:
    while batch := export.next_batch(1000, at_least=1):
        # Named by step: a batch that comes again after a crash is the same one and overwrites its own file.
        pq.write_table(batch.rows, folder / f"{batch.step:06d}.parquet")
        export.advance()
    print("exported up to step", export.position)
