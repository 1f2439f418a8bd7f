"""`strawflow eval`: what the evaluations of a run came to."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from strawflow.cli.group import QuickGroup
from strawflow.cli.options import JsonFlag, RunArgument, opened

app = typer.Typer(cls=QuickGroup, help="Show evaluations.", no_args_is_help=True)


@app.callback()
def root() -> None:
    """Take what stands before the verb."""


@app.command("list")
def list_evaluations(
    run: RunArgument,
    dataset: Annotated[str, typer.Option(metavar="NAME", help="Only this dataset.")] = "",
    as_json: JsonFlag = False,
) -> None:
    """List the evaluations of the run's branch by step and dataset.

    Those of what the branch started from as well. An evaluation is listed once all of its prompts are answered or given up.
    """
    from strawflow.cli import output
    from strawflow.errors import InvalidInputError
    from strawflow.flow.evaluation import results

    with opened(run) as found:
        known = found.config.eval_datasets()
        if dataset and dataset not in known:
            raise InvalidInputError(
                f"--dataset {dataset}: this run evaluates no such dataset; it knows {', '.join(known)}"
            )
        listed = [result for result in results(found) if dataset in ("", result.dataset)]
    if as_json:
        output.print_json(listed)
        return
    ks = sorted({k for result in listed for k in result.pass_at})
    output.print_table(
        ("step", "dataset", "answers", "prompts", "mean reward", "failed", *(f"pass@{k}" for k in ks)),
        [
            (
                result.step,
                result.dataset,
                "greedy" if result.is_greedy else f"{max(result.pass_at, default=0)} sampled",
                result.num_prompts,
                result.mean_reward,
                share(result.num_failed, result.num_answers),
                *(result.pass_at.get(k) for k in ks),
            )
            for result in listed
        ],
        empty="nothing was evaluated yet",
    )


def share(part: int, whole: int) -> Any:
    """Return a share as tables show it."""
    return f"{part / whole:.1%}" if whole else None
