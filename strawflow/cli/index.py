"""`strawflow index`: bring an index to this program's revision, check all promises of a run, back it up, restore it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strawflow.cli import output
from strawflow.cli.group import QuickGroup
from strawflow.cli.options import JsonFlag, RunArgument, opened, run_folder
from strawflow.plural import counted

if TYPE_CHECKING:
    from strawflow.flow.quarantine import QuarantineReport
    from strawflow.flow.reconstruct import Reconstruction
    from strawflow.flow.restore import Restoration

app = typer.Typer(
    cls=QuickGroup,
    help="Upgrade, check, back up, restore, rebuild, repair an index.",
    no_args_is_help=True,
)

YesFlag = Annotated[bool, typer.Option("--yes", help="Do it; without, only say what would be done.")]
LossyFlag = Annotated[
    bool, typer.Option("--lossy", help="Go on where the journal has holes, and tell what is lost by it.")
]


@app.command()
def upgrade(run: RunArgument, as_json: JsonFlag = False) -> None:
    """Bring the index to this program's revision. Stop all workers before."""
    from strawflow import config as configuration
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
        output.say(f"the index is at revision {after}, nothing to do")
    else:
        output.say(f"the index went from revision {before or 'none'} to {after}")


@app.command()
def check(run: RunArgument, as_json: JsonFlag = False) -> None:
    """Read every extent and ask every promise of the index. Exits with 11 when one is broken."""
    from strawflow.errors import CorruptPackError
    from strawflow.flow.check import check as check_run

    with opened(run) as found:
        report = check_run(found)
    if as_json:
        output.print_json({"is_sound": report.is_sound, **output.plain(report)})
    else:
        output.say(
            f"{run_folder(run)}: read {counted(report.num_extents, 'extent')} of {counted(report.num_packs, 'pack')}, "
            f"{counted(report.num_rows, 'row')}, {output.size(report.num_bytes)}"
        )
        output.say(
            f"no row names {counted(report.num_unnamed, 'message')} in packs ({output.size(report.unnamed_bytes)}) and "
            f"{counted(report.num_unnamed_files, 'file')} ({output.size(report.unnamed_file_bytes)}); "
            f"{counted(report.num_quarantined, 'damaged extent that nothing needs is', 'damaged extents that nothing needs are')} "
            "in quarantine"
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
    """Write the whole index into a folder. As it stands at one instant; workers may go on meanwhile."""
    from strawflow.flow.backup import backup as back_up

    with opened(run) as found:
        made = back_up(found, to=Path(to) if to else None, keep=keep or None)
    if as_json:
        output.print_json(made)
        return
    manifest = made.manifest
    output.say(
        f"{made.folder}: {counted(manifest.num_rows, 'row')} of {counted(len(manifest.tables), 'table')}, {output.size(manifest.num_bytes)}, "
        f"revision {manifest.revision}, incarnation {manifest.incarnation}"
    )
    for folder in made.removed:
        output.say(f"removed {folder}")


@app.command("backups")
def list_backups(run: RunArgument, as_json: JsonFlag = False) -> None:
    """List the backups inside a run, the oldest first.

    Each by the number and name that `index restore --from` takes; one that cannot be used with the reason.
    """
    from strawflow.cli.worker import existing_run
    from strawflow.errors import StrawflowError
    from strawflow.flow.backup import backups_of, read_manifest

    rows: list[dict[str, Any]] = []
    for number, folder in enumerate(backups_of(existing_run(run)), start=1):
        try:
            found, problem = read_manifest(folder), None
        except StrawflowError as error:
            found, problem = None, error.message
        rows.append(
            {
                "number": number,
                "name": folder.name,
                "rows": None if found is None else found.num_rows,
                "num_bytes": None if found is None else found.num_bytes,
                "incarnation": None if found is None else found.incarnation,
                "problem": problem,
            }
        )
    if as_json:
        output.print_json(rows)
        return
    output.print_table(
        ("number", "name", "rows", "bytes", "incarnation", "problem"),
        [
            (
                row["number"],
                row["name"],
                row["rows"],
                None if row["num_bytes"] is None else output.size(row["num_bytes"]),
                row["incarnation"],
                row["problem"],
            )
            for row in rows
        ],
        empty=f"no backups in {run_folder(run)}; `strawflow index backup {run}` makes one",
    )


@app.command()
def restore(
    run: RunArgument,
    source: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="BACKUP",
            envvar="STRAWFLOW_INDEX_RESTORE_FROM",
            help="Folder of the backup, or name or number of one of RUN/backups (`strawflow index backups`).",
        ),
    ],
    replace: Annotated[
        bool, typer.Option("--replace", help="Let the backup take the place of an index that is not empty.")
    ] = False,
    lossy: LossyFlag = False,
    yes: YesFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Bring the index back to a backup, and on to what packs tell.

    All workers must be stopped. Exits with 11 when packs are missing.
    """
    from strawflow.cli.worker import existing_run
    from strawflow.flow import restore as restoring
    from strawflow.flow.backup import find_backup

    verb = restoring.restore if yes else restoring.plan
    root = existing_run(run)
    outcome = verb(root, find_backup(root, source), may_replace=replace, lossy=lossy)
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
    there = "unreadable" if outcome.num_rows_replaced is None else counted(outcome.num_rows_replaced, "row")
    output.say(f"{outcome.folder}: sound, taken {manifest.created_at} from {manifest.dialect}")
    output.say(
        f"{'restored' if outcome.done else 'would restore'} its {counted(manifest.num_rows, 'row')} into {outcome.index} "
        f"({outcome.found}, {there}); incarnation {outcome.incarnation}"
    )
    if outcome.replayed is not None:
        _print_reconstruction(outcome.replayed)
    if not outcome.done:
        output.say("nothing was changed; --yes does it")
        return
    output.say(
        f"{counted(outcome.num_sessions_lost, 'session was', 'sessions were')} declared lost, "
        f"{counted(outcome.num_units_ready, 'unit is', 'units are')} offered again"
    )
    if outcome.kept is not None:
        output.say(f"the damaged index is kept as {outcome.kept}")
    if outcome.replayed is not None:
        _print_next(run, outcome.replayed)


def _print_next(run: Path, found: Reconstruction) -> None:
    if found.num_missing:
        output.say(
            f"{counted(found.num_missing, 'pack that the index names is', 'packs that the index names are')} missing or too short: put the files back from a copy, or "
            f"`strawflow index quarantine {run} --yes` sets aside what they held and `--reopen` has it generated again"
        )
    output.say(
        f"nothing is swept until packs and index were matched; next: strawflow storage reconcile {run}"
    )


@app.command()
def rebuild(
    run: RunArgument, lossy: LossyFlag = False, yes: YesFlag = False, as_json: JsonFlag = False
) -> None:
    """Build a lost index anew from the run's other files. All workers must be stopped."""
    from strawflow.cli.worker import existing_run
    from strawflow.flow import rebuild as rebuilding

    verb = rebuilding.rebuild if yes else rebuilding.plan
    outcome = verb(existing_run(run), lossy=lossy)
    if as_json:
        output.print_json(outcome)
        _exit_if_missing(outcome.rebuilt)
        return
    output.say(
        f"{'rebuilt' if outcome.done else 'would rebuild'} {outcome.index} ({outcome.found}); "
        f"incarnation {outcome.incarnation}"
    )
    _print_reconstruction(outcome.rebuilt)
    output.print_table(("units", "number"), list(outcome.units.items()), empty="no units")
    output.say("no pack holds, and so is gone: " + "; ".join(outcome.not_kept))
    if outcome.kept is not None:
        output.say(f"the damaged index is kept as {outcome.kept}")
    if outcome.done:
        _print_next(run_folder(run), outcome.rebuilt)
    else:
        output.say("nothing was changed; --yes does it")
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
    """Find damaged extents, contain them, tell what they held.

    And what becomes of it.

    A group that a consumer has trained or dropped is never generated again: that consumer would get it twice. With
    --reopen it is dropped, for ever, for each consumer that still waits for it; without, that consumer stops at it.
    Restore the file from a copy and run this again instead if such a consumer must have it.
    A consumer made later is not offered what is in quarantine; what is given back is offered to it then.
    """
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

    would = "" if report.done else "would be "
    output.print_table(
        ("extent", "kind", "pack", "what is wrong", "prompts", "units", "batches"),
        [
            (d.extent_id, d.kind, d.path, d.reason, len(d.prompts), len(d.units), len(d.batches))
            for d in report.damaged
        ],
        empty="every extent that is named matches its checksum",
    )
    unit = ("unit", "units")
    told = [
        (("extent", "extents"), f"{would}given back from quarantine", report.given_back),
        (unit, f"{would}generated again", report.reopened),
        *(
            (unit, f"{would}dropped for {line}, being trained or dropped by another consumer", unit_ids)
            for line, unit_ids in report.dropped.items()
        ),
        (unit, "left as found; --reopen has what they gave generated again", report.left_open),
        *(
            (
                unit,
                f"left waiting for {line}, trained or dropped by another consumer; --reopen drops for it what waits",
                unit_ids,
            )
            for line, unit_ids in report.left_waiting.items()
        ),
        (unit, "with a fate, of no use to anybody any more", report.trained),
        (unit, "whose weights are gone, so that nothing can generate them again", report.unservable),
    ]
    for (one, many), what, ids in told:
        if ids:
            shown = f"{', '.join(map(str, ids[:20]))}{' ...' if len(ids) > 20 else ''}"
            output.say(f"{counted(len(ids), one, many)} {what}: {shown}")
    for line, steps in report.voided.items():
        output.say(f"batches of {line} {would}taken back: steps {', '.join(map(str, steps))}")
    for what in report.beside:
        output.say(what)
    for what in report.stopped:
        output.say(f"the run cannot go on without {what}")
    if report.has_work and not report.done:
        output.say("nothing was changed; --yes does it")
    elif report.damaged and not report.has_work:
        output.say("all of it is in quarantine already: nothing was left to do")


def _print_reconstruction(found: Reconstruction) -> None:

    output.say(
        f"from {counted(found.num_entries, 'journal entry', 'journal entries')}: {counted(found.num_segments, 'segment')} with "
        f"{counted(found.num_rows, 'prompt')}, {counted(found.num_units, 'unit')}, "
        f"{counted(found.num_batches, 'batch', 'batches')}, {counted(found.num_drops, 'drop')}, "
        f"{counted(found.num_returned, 'unit')} that came back, "
        f"{counted(found.num_checkpoints, 'checkpoint')}, {counted(found.num_weights, 'weight version')}, "
        f"{counted(found.num_branches, 'branch', 'branches')}"
    )
    output.say(
        f"from packs: {counted(found.num_results, 'result')} and {counted(found.num_parked, 'parked group')} in "
        f"{counted(found.num_packs, 'pack')} without a row; {counted(found.num_unverified, 'message')} of them only by "
        "form, checksums being lost"
    )
    for line, (position, planned) in found.positions.items():
        output.say(f"consumer {line}: position {position}, planned {planned}")
    output.print_table(
        ("lost", "subject", "what is known"),
        [(loss.what, loss.subject, loss.message) for loss in found.losses],
        empty="nothing that should be there is missing",
    )
