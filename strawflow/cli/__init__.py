"""The command line: one module per noun, each command parses, calls one use case and renders.

Nothing here imports torch, ray, sglang or the workers; workers are started by replacing this process (`worker.py`).
Heavy imports (pyarrow, sqlalchemy, pydantic) stay inside the commands, so that every --help answers at once.
"""
