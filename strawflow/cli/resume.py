"""`strawflow resume`: go on with a run on this host, whatever ended it."""

from __future__ import annotations

from strawflow.cli.options import JsonFlag, RunArgument
from strawflow.cli.worker import existing_run, json_arguments, replace_by_worker


def resume(run: RunArgument, as_json: JsonFlag = False) -> None:
    """Start all workers of a run here and keep them running until its last step; goes on after any crash."""
    replace_by_worker("supervise", [str(existing_run(run)), *json_arguments(as_json)])
