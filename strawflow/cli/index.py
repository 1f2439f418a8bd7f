"""`strawflow index`: bring an index to this program's revision, check all promises of a run, back it up, restore it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from strawflow.cli.group import QuickGroup
from strawflow.cli.options import JsonFlag, RunArgument, opened, run_folder

if TYPE_CHECKING:
    from strawflow.flow.quarantine import QuarantineReport
    from strawflow.flow.reconstruct import Reconstruction
    from strawflow.flow.restore import Restoration

app = typer.Typer(
    cls=QuickGroup,
    help="Upgrade, check, back up, restore, rebuild or repair the index of a run.",
    no_args_is_help=True,
)

YesFlag = Annotated[bool, typer.Option("--yes", help="Do it; without, only say what would be done.")]
LossyFlag = Annotated[
    bool, typer.Option("--lossy", help="Go on where the journal has holes, and tell what is lost by it.")
]


@app.command()
def upgrade(run: RunArgument, as_json: JsonFlag = False) -> None:
    """Bring the index to the revision this program works with; stop all workers before."""
    from strawflow import config as configuration
    from strawflow.cli import output
    from strawflow.cli.worker import existing_run
    from strawflow.flow.run import CONFIG_FILE, open_index
    from strawflow.index import migrate

    root = existing_run(run)
    path = root / CONFIG_FILE
    config = configuration.from_json(path.read_text(encoding="utf-8"), path=str(path))
    index = open_index(root, config)
    try:
        before, after = migrate.upgrade(index)
    finally:
        index.close()
    if as_json:
        output.print_json({"before": before, "after": after, "changed": before != after})
    elif before == after:
        print(f"the index is at revision {after}, nothing to do")
    else:
        print(f"the index went from revision {before or 'none'} to {after}")


@app.command()
def check(run: RunArgument, as_json: JsonFlag = False) -> None:
    """Read every stored extent and ask every promise of the index; exit 11 when one is broken."""
    from strawflow.cli import output
    from strawflow.errors import CorruptPackError
    from strawflow.flow.check import check as check_run

    with opened(run) as found:
        report = check_run(found)
    if as_json:
        output.print_json({"is_sound": report.is_sound, **output.plain(report)})
    else:
        print(
            f"{run_folder(run)}: read {report.num_extents} extents of {report.num_packs} packs, "
            f"{report.num_rows} rows, {output.size(report.num_bytes)}"
        )
        print(
            f"no row names {report.num_unnamed} messages in packs ({output.size(report.unnamed_bytes)}) and "
            f"{report.num_unnamed_files} files ({output.size(report.unnamed_file_bytes)}); "
            f"{report.num_quarantined} damaged extents that nothing needs are in quarantine"
        )
        output.print_table(
            ("check", "subject", "what is wrong"),
            [(f.check, f.subject, f.message) for f in report.findings],
            empty="sound: every promise that can be asked holds",
        )
    if not report.is_sound:
        raise typer.Exit(CorruptPackError.exit_code)


@app.command()
def backup(
    run: RunArgument,
    to: Annotated[
        str,
        typer.Option(
            metavar="FOLDER", help="New or empty folder for the backup; default: one in RUN/backups."
        ),
    ] = "",
    keep: Annotated[
        int, typer.Option(metavar="N", help="Remove the oldest of RUN/backups beyond N afterwards; 0: none.")
    ] = 0,
    as_json: JsonFlag = False,
) -> None:
    """Write the whole index, as it stands at one instant, into a folder; workers may go on meanwhile."""
    from strawflow.cli import output
    from strawflow.flow.backup import backup as back_up

    with opened(run) as found:
        made = back_up(found, to=Path(to) if to else None, keep=keep or None)
    if as_json:
        output.print_json(made)
        return
    manifest = made.manifest
    print(
        f"{made.folder}: {manifest.num_rows} rows of {len(manifest.tables)} tables, {output.size(manifest.num_bytes)}, "
        f"revision {manifest.revision}, incarnation {manifest.incarnation}"
    )
    for folder in made.removed:
        print(f"removed {folder}")


@app.command()
def restore(
    run: RunArgument,
    source: Annotated[
        str,
        typer.Option(
            "--from", metavar="FOLDER", envvar="STRAWFLOW_INDEX_RESTORE_FROM", help="Folder of the backup."
        ),
    ],
    replace: Annotated[
        bool, typer.Option("--replace", help="Let the backup take the place of an index that is not empty.")
    ] = False,
    lossy: LossyFlag = False,
    yes: YesFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Bring the index back to a backup and on to what the packs tell since, all workers stopped; exit 11 when packs are missing."""
    from strawflow.cli import output
    from strawflow.cli.worker import existing_run
    from strawflow.flow import restore as restoring

    verb = restoring.restore if yes else restoring.plan
    outcome = verb(existing_run(run), Path(source).absolute(), may_replace=replace, lossy=lossy)
    if as_json:
        output.print_json(outcome)
    else:
        _print_restoration(run_folder(run), outcome)
    if outcome.replayed is not None:
        _exit_if_missing(outcome.replayed)


def _exit_if_missing(found: Reconstruction) -> None:
    from strawflow.errors import CorruptPackError

    if found.num_missing:
        raise typer.Exit(CorruptPackError.exit_code)


def _print_restoration(run: Path, outcome: Restoration) -> None:
    manifest = outcome.manifest
    there = "unreadable" if outcome.num_rows_replaced is None else f"{outcome.num_rows_replaced} rows"
    print(f"{outcome.folder}: sound, taken {manifest.created_at} from {manifest.dialect}")
    print(
        f"{'restored' if outcome.done else 'would restore'} its {manifest.num_rows} rows into {outcome.index} "
        f"({outcome.found}, {there}); incarnation {outcome.incarnation}"
    )
    if outcome.replayed is not None:
        _print_reconstruction(outcome.replayed)
    if not outcome.done:
        print("nothing was changed; --yes does it")
        return
    print(
        f"{outcome.num_sessions_lost} sessions were declared lost, {outcome.num_units_ready} units are offered again"
    )
    if outcome.kept is not None:
        print(f"the damaged index is kept as {outcome.kept}")
    if outcome.replayed is not None:
        _print_next(run, outcome.replayed)


def _print_next(run: Path, found: Reconstruction) -> None:
    if found.num_missing:
        print(
            f"{found.num_missing} packs that the index names are missing or too short: put the files back from a copy, or "
            f"`strawflow index quarantine {run} --yes` sets aside what they held and `--reopen` has it generated again"
        )
    print(f"nothing is swept until packs and index were matched; next: strawflow storage reconcile {run}")


@app.command()
def rebuild(
    run: RunArgument, lossy: LossyFlag = False, yes: YesFlag = False, as_json: JsonFlag = False
) -> None:
    """Build a lost index anew from packs, journal, checkpoints and weights, all workers stopped."""
    from strawflow.cli import output
    from strawflow.cli.worker import existing_run
    from strawflow.flow import rebuild as rebuilding

    verb = rebuilding.rebuild if yes else rebuilding.plan
    outcome = verb(existing_run(run), lossy=lossy)
    if as_json:
        output.print_json(outcome)
        _exit_if_missing(outcome.rebuilt)
        return
    print(
        f"{'rebuilt' if outcome.done else 'would rebuild'} {outcome.index} ({outcome.found}); "
        f"incarnation {outcome.incarnation}"
    )
    _print_reconstruction(outcome.rebuilt)
    output.print_table(("units", "number"), list(outcome.units.items()), empty="no units")
    print("no pack holds, and so is gone: " + "; ".join(outcome.not_kept))
    if outcome.kept is not None:
        print(f"the damaged index is kept as {outcome.kept}")
    if outcome.done:
        _print_next(run_folder(run), outcome.rebuilt)
    else:
        print("nothing was changed; --yes does it")
    _exit_if_missing(outcome.rebuilt)


@app.command()
def quarantine(
    run: RunArgument,
    reopen: Annotated[
        bool,
        typer.Option(
            "--reopen",
            help="Have groups that no consumer trained or dropped generated again, if what they gave is damaged; the "
            "others drop for the consumers that still wait for them.",
        ),
    ] = False,
    yes: YesFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Find damaged extents, contain them, and say what each of them held and what becomes of it.

    A group that a consumer has trained or dropped is never generated again: that consumer would get it twice. With
    --reopen it is dropped, for ever, for each consumer that still waits for it; without, that consumer stops at it.
    Restore the file from a copy and run this again instead if such a consumer must have it.
    A consumer made later is not offered what is in quarantine; what is given back is offered to it then.
    """
    from strawflow.cli import output
    from strawflow.errors import CorruptPackError
    from strawflow.flow.quarantine import quarantine_damage

    with opened(run) as found:
        report = quarantine_damage(found, do=yes, reopen=reopen)
    if as_json:
        output.print_json(report)
    else:
        _print_quarantine(report)
    if report.stopped:
        raise typer.Exit(CorruptPackError.exit_code)


def _print_quarantine(report: QuarantineReport) -> None:
    from strawflow.cli import output

    would = "" if report.done else "would be "
    output.print_table(
        ("extent", "kind", "pack", "what is wrong", "prompts", "units", "batches"),
        [
            (d.extent_id, d.kind, d.path, d.reason, len(d.prompts), len(d.units), len(d.batches))
            for d in report.damaged
        ],
        empty="every extent that is named matches its checksum",
    )
    told = [
        (f"extents {would}given back from quarantine", report.given_back),
        (f"units {would}generated again", report.reopened),
        *(
            (f"units {would}dropped for {line}: another consumer has trained or dropped them", unit_ids)
            for line, unit_ids in report.dropped.items()
        ),
        ("units left as they are; --reopen generates them again", report.left_open),
        *(
            (
                f"units wait for {line}, another consumer has trained or dropped them; --reopen drops them for it",
                unit_ids,
            )
            for line, unit_ids in report.left_waiting.items()
        ),
        ("units that have their fate and need nothing any more", report.trained),
        ("units whose weights are gone, so that they cannot be generated again", report.unservable),
    ]
    for what, ids in told:
        if ids:
            print(f"{len(ids)} {what}: {', '.join(map(str, ids[:20]))}{' ...' if len(ids) > 20 else ''}")
    for line, steps in report.voided.items():
        print(f"batches of {line} {would}taken back: steps {', '.join(map(str, steps))}")
    for what in report.beside:
        print(what)
    for what in report.stopped:
        print(f"the run cannot go on without {what}")
    if report.has_work and not report.done:
        print("nothing was changed; --yes does it")
    elif report.damaged and not report.has_work:
        print("all of it is in quarantine already: nothing was left to do")


def _print_reconstruction(found: Reconstruction) -> None:
    from strawflow.cli import output

    print(
        f"from {found.num_entries} journal entries: {found.num_segments} segments with {found.num_rows} prompts, "
        f"{found.num_units} units, {found.num_batches} batches, {found.num_drops} drops, {found.num_returned} units that came back, "
        f"{found.num_checkpoints} checkpoints, {found.num_weights} weight versions, {found.num_branches} branches"
    )
    print(
        f"from packs: {found.num_results} results and {found.num_parked} parked groups in {found.num_packs} packs without "
        f"a row; {found.num_unverified} messages of them only by their form, their checksums being lost"
    )
    for line, (position, planned) in found.positions.items():
        print(f"consumer {line}: position {position}, planned {planned}")
    output.print_table(
        ("lost", "subject", "what is known"),
        [(loss.what, loss.subject, loss.message) for loss in found.losses],
        empty="nothing that should be there is missing",
    )
