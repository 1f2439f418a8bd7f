"""`strawflow enqueue`: append a prompt file to a dataset of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from strawflow.cli.options import JsonFlag, RunArgument, opened
from strawflow.plural import counted

if TYPE_CHECKING:
    from strawflow.flow.run import Run


def enqueue(
    run: RunArgument,
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE[@[a:b]]",
            help="JSONL, Parquet or Arrow, plain, .gz or .zst; @[a:b] takes a slice of its records.",
        ),
    ],
    dataset: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="What the rows are for: prompts (training) or a prompt set of data.prompts, demonstrations (warm start), "
            "held_out (evaluation), or an evaluation dataset of eval.datasets.",
        ),
    ] = "prompts",
    input_key: Annotated[
        str | None, typer.Option(help="Key of the prompt; the run's data.input_key if left out.")
    ] = None,
    label_key: Annotated[
        str | None, typer.Option(help="Key of the label, '' if the file has none; else data.label_key.")
    ] = None,
    metadata_key: Annotated[
        str | None, typer.Option(help="Key of the metadata, '' if the file has none; else data.metadata_key.")
    ] = None,
    images_key: Annotated[
        str | None, typer.Option(help="Key of the images, '' if the file has none; else data.images_key.")
    ] = None,
    on_bad_row: Annotated[
        Literal["fail", "skip"] | None,
        typer.Option(
            help="fail: a bad row stops it and nothing is enqueued; skip: set aside. Else data.on_bad_row."
        ),
    ] = None,
    reject_file: Annotated[
        str | None, typer.Option(help="Where skipped rows go; FILE.rejected.jsonl if left out.")
    ] = None,
    priority: Annotated[
        int, typer.Option(help="Of those that wait, groups of the highest priority are granted first.")
    ] = 0,
    as_json: JsonFlag = False,
) -> None:
    """Append a prompt file to a dataset, all of it or nothing.

    Rows that the dataset holds already add nothing.
    """
    from pathlib import Path

    from strawflow.cli import output
    from strawflow.errors import InvalidInputError
    from strawflow.flow.enqueue import EnqueueRequest, purpose_of
    from strawflow.flow.enqueue import enqueue as enqueue_file
    from strawflow.flow.session import WorkerSession
    from strawflow.prompts.row import PromptKeys
    from strawflow.prompts.source import PromptSource

    source = PromptSource.parse(file)
    with opened(run) as found:
        configured = found.config.data
        purpose = purpose_of(found.config, dataset)
        if purpose is None:
            raise InvalidInputError(_unknown(dataset, found))
        policy = on_bad_row or configured.on_bad_row
        rejects = Path(reject_file) if reject_file else Path(f"{source.path}.rejected.jsonl")
        request = EnqueueRequest(
            dataset_id=dataset,
            purpose=purpose,
            source=source,
            keys=PromptKeys(
                input_key=configured.input_key if input_key is None else input_key,
                label_key=(configured.label_key if label_key is None else label_key) or None,
                metadata_key=(configured.metadata_key if metadata_key is None else metadata_key) or None,
                images_key=(configured.images_key if images_key is None else images_key) or None,
            ),
            on_bad_row=policy,
            reject_path=rejects if policy == "skip" else None,
            priority=priority,
        )
        session = WorkerSession(found, "enqueue")
        try:
            report = enqueue_file(session, request)
        finally:
            # Ended after a refusal too: nothing it appended is named, and nobody should wait for its expiry.
            session.end()
    if as_json:
        output.print_json(report)
        return
    output.say(
        f"{dataset}: {counted(report.num_added, 'row')} added of {report.num_records} in {source} "
        f"({report.num_known} already there, {report.num_rejected} rejected)"
    )
    for reason, count in sorted(report.rejected.items()):
        print(f"  rejected {count}: {reason}")
    if report.reject_path:
        print(f"  see {report.reject_path}")
    print(f"next: strawflow resume {run}")


def _unknown(dataset: str, run: Run) -> str:
    import difflib

    from strawflow.eval_datasets import DEMONSTRATIONS

    known = [*(one.name for one in run.config.prompt_sets()), DEMONSTRATIONS, *run.config.eval_datasets()]
    near = difflib.get_close_matches(dataset, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}."
    return (
        f"--dataset {dataset}: {run.root} has no such dataset, neither for training nor for evaluation; {hint} Both are "
        "named when a run is created: --data.prompts NAME=FILE:WEIGHT,... and --eval.datasets FILE.yaml"
    )
