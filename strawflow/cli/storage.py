"""`strawflow storage`: what a run takes on the disk, what may go, and what must stay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from strawflow.cli.group import QuickGroup
from strawflow.cli.options import JsonFlag, RunArgument, opened, run_folder
from strawflow.plural import counted

if TYPE_CHECKING:
    from strawflow.flow.sweep import Collected
    from strawflow.flow.usage import Usage
    from strawflow.index.liveness import Waiting

app = typer.Typer(
    cls=QuickGroup,
    help="Show what a run takes on disk; pin, retain, compact, sweep.",
    no_args_is_help=True,
)

KindName = Literal["pack", "batch", "checkpoint", "weights"]
YesFlag = Annotated[bool, typer.Option("--yes", help="Do it; without, only say what would be done.")]


@app.command()
def usage(run: RunArgument, as_json: JsonFlag = False) -> None:
    """Show bytes by kind, the index, quota and free space. Also how much of each kind is named."""
    from strawflow.cli import output
    from strawflow.flow.usage import usage_of

    with opened(run) as found:
        seen = usage_of(found)
    if as_json:
        shares = [{"kind": kind.kind, "live_share": kind.live_share} for kind in seen.kinds]
        output.print_json({**output.plain(seen), "live_shares": shares})
    else:
        _print_usage(seen)


@app.command()
def pin(
    run: RunArgument,
    kind: Annotated[KindName, typer.Argument(help="What to pin.")],
    subject: Annotated[
        str,
        typer.Argument(
            help="A pack's id or path, a batch's step, a checkpoint's or weight version's id or step."
        ),
    ],
    reason: Annotated[str, typer.Option(help="Why; shown to whoever wonders.")],
    session: Annotated[
        str, typer.Option(metavar="ID", help="Worker session that the pin ends with; none: it stands.")
    ] = "",
    as_json: JsonFlag = False,
) -> None:
    """Keep a pack, batch, checkpoint or weight version. Its files, or a batch's rows, are not removed then."""
    from strawflow.cli import output
    from strawflow.flow import pins
    from strawflow.index.pins import PinKind

    with opened(run) as found:
        made = pins.pin(found, PinKind(kind), subject, reason=reason, session_id=session or None)
    if as_json:
        output.print_json(made)
    else:
        print(
            f"pin {made.pin_id} holds {made.subject_kind} {made.subject}; `strawflow storage unpin` removes it"
        )


@app.command()
def unpin(
    run: RunArgument,
    pin_id: Annotated[int, typer.Argument(metavar="PIN", help="Number of the pin.")],
    as_json: JsonFlag = False,
) -> None:
    """Remove a pin."""
    from strawflow.cli import output
    from strawflow.flow import pins

    with opened(run) as found:
        pins.unpin(found, pin_id)
    if as_json:
        output.print_json({"removed": pin_id})
    else:
        print(f"pin {pin_id} is removed")


@app.command("pins")
def list_pins(run: RunArgument, as_json: JsonFlag = False) -> None:
    """List the pins. Void ones belong to worker sessions that are gone, and hold nothing."""
    from strawflow.cli import output
    from strawflow.flow import pins

    with opened(run) as found:
        listed = pins.listed(found)
    if as_json:
        output.print_json(listed)
        return
    output.print_table(
        ("pin", "holds", "subject", "reason", "session", "made at", "void"),
        [(p.pin_id, p.subject_kind, p.subject, p.reason, p.session_id, p.at, p.is_void) for p in listed],
        empty="nothing is pinned",
    )


@app.command()
def sweep(run: RunArgument, yes: YesFlag = False, as_json: JsonFlag = False) -> None:
    """Remove what nothing names.

    Rows of extents that nothing names, packs without any other, files and folders without a row.
    """
    from strawflow.flow import quota
    from strawflow.flow import sweep as sweeping
    from strawflow.flow.session import WorkerSession

    with opened(run) as found:
        if yes:
            with WorkerSession(found, quota.UPKEEP) as session:
                collected = sweeping.sweep(session)
        else:
            collected = sweeping.plan_sweep(found)
    _print(collected, as_json=as_json, empty="nothing to sweep")
    if collected.waiting is not None and not as_json:
        _print_waiting(collected.waiting)


@app.command()
def compact(
    run: RunArgument,
    min_live: Annotated[
        float,
        typer.Option(
            min=0.0, max=1.0, help="Packs of which a smaller share of bytes is named are rewritten."
        ),
    ] = 0.5,
    yes: YesFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Copy what half-empty and small packs hold into new ones. The old files go with a sweep."""
    from strawflow.flow import compact as compacting
    from strawflow.flow import quota
    from strawflow.flow.session import WorkerSession

    with opened(run) as found:
        if yes:
            with WorkerSession(found, quota.UPKEEP) as session:
                collected = compacting.compact(session, min_live=min_live)
        else:
            collected = compacting.plan_compaction(found, min_live=min_live)
        grace_s = found.config.storage.sweep_grace_s
    _print(
        collected,
        as_json=as_json,
        empty="nothing to compact",
        later=f"with a sweep {grace_s:.0f} s from then",
    )


@app.command()
def retain(
    run: RunArgument,
    keep_checkpoints: Annotated[
        int | None, typer.Option(min=0, help="In place of storage.keep_checkpoints.")
    ] = None,
    keep_checkpoints_every: Annotated[
        int | None, typer.Option(min=0, help="In place of storage.keep_checkpoints_every.")
    ] = None,
    keep_weights_every: Annotated[
        int | None, typer.Option(min=0, help="In place of storage.keep_weights_every.")
    ] = None,
    keep_steps: Annotated[int | None, typer.Option(min=0, help="In place of storage.keep_steps.")] = None,
    event_age_s: Annotated[float | None, typer.Option(min=0, help="In place of storage.event_age_s.")] = None,
    yes: YesFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Let what grew old leave, as section storage says.

    Checkpoints, weights, batches, trajectories, units, receipts, events.
    """
    from dataclasses import replace

    from strawflow.flow import quota
    from strawflow.flow import retain as retaining
    from strawflow.flow.session import WorkerSession

    given: dict[str, Any] = {
        "keep_checkpoints": keep_checkpoints,
        "keep_checkpoints_every": keep_checkpoints_every,
        "keep_weights_every": keep_weights_every,
        "keep_steps": keep_steps,
        "event_age_s": event_age_s,
    }
    with opened(run) as found:
        policy = replace(
            retaining.policy_of(found.config),
            **{name: value for name, value in given.items() if value is not None},
        )
        if yes:
            with WorkerSession(found, quota.UPKEEP) as session:
                collected = retaining.retain(session, policy)
        else:
            collected = retaining.plan_retention(found, policy)
    _print(collected, as_json=as_json, empty="nothing is old enough to leave")


@app.command()
def reconcile(
    run: RunArgument,
    accept_missing: Annotated[
        bool,
        typer.Option("--accept-missing", help="Allow it even though bytes that the index names are missing."),
    ] = False,
    yes: YesFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Match the packs against a restored or rebuilt index. Allows sweeping again; exits with 7 when it is not allowed."""
    from strawflow.cli import output
    from strawflow.errors import ConflictError
    from strawflow.flow.reconcile import reconcile as match

    with opened(run) as found:
        collected = match(found, accepts=yes, accepts_missing=accept_missing)
    if as_json:
        output.print_json(collected)
    else:
        _print_items(collected, empty="packs and index match")
        print("sweeping is allowed" if collected.done else f"nothing was changed; {_way_on(run, collected)}")
    if yes and not collected.done:
        raise typer.Exit(ConflictError.exit_code)


def _way_on(run: str, collected: Collected) -> str:
    """Say what allows sweeping again."""
    from strawflow.flow.reconcile import MISSING

    if not any(item.what == MISSING for item in collected.items):
        return "--yes allows sweeping again"
    return (
        "--yes will not do while bytes are missing: put the files back from a copy, or contain the loss with `strawflow index "
        f"quarantine {run_folder(run)} --yes` and reconcile again, or allow sweeping all the same with --accept-missing --yes"
    )


def _print_waiting(waiting: Waiting) -> None:
    from datetime import UTC, datetime, timedelta

    from strawflow.cli import output

    now = datetime.now(UTC)
    first, last = (f"{now + timedelta(seconds=s):%H:%M:%S}" for s in (waiting.first_in_s, waiting.last_in_s))
    until = f"until {first}" if first == last else f"the first until {first}, the last until {last}"
    packs = counted(waiting.num_packs, "condemned pack waits", "condemned packs wait")
    output.say(
        f"{packs} ({output.size(waiting.num_bytes)}), {until} UTC; a sweep after that removes their files"
    )


def _print(collected: Collected, *, as_json: bool, empty: str, later: str = "with a later sweep") -> None:
    from strawflow.cli import output

    if as_json:
        sums = {"num_bytes": collected.num_bytes, "later_bytes": collected.later_bytes}
        output.print_json({**output.plain(collected), **sums})
        return
    _print_items(collected, empty=empty)
    if not collected.items:
        return
    packs = [item for item in collected.items if item.what == "pack"]
    told = [f"{output.size(collected.num_bytes)} {'freed' if collected.done else 'would be freed'}"]
    if packs:
        would = "" if collected.done else "would "
        freed = output.size(collected.later_bytes)
        told.append(
            f"{counted(len(packs), 'pack')} {would}go {later}, which {would or ''}{'free' if would else 'frees'} {freed}"
        )
    if not collected.done:
        told.append("nothing was changed, --yes does it")
    output.say("; ".join(told))


def _print_items(collected: Collected, *, empty: str) -> None:
    from strawflow.cli import output

    columns = ["what", "which", "why"]
    rows: list[list[Any]] = [[item.what, item.subject, item.why] for item in collected.items]
    # A column of zeros says nothing.
    for name, sizes in (
        ("bytes", [item.num_bytes for item in collected.items]),
        ("frees", [item.later_bytes for item in collected.items]),
    ):
        if any(sizes):
            columns.append(name)
            rows = [[*row, output.size(num_bytes)] for row, num_bytes in zip(rows, sizes, strict=True)]
    output.print_table(columns, rows, empty=empty)


def _print_usage(seen: Usage) -> None:
    from strawflow.cli import output

    output.print_table(
        ("kind", "files", "bytes", "named", "live share"),
        [
            (
                kind.kind,
                kind.num_files,
                output.size(kind.num_bytes),
                output.size(kind.named_bytes),
                kind.live_share,
            )
            for kind in seen.kinds
        ],
        empty="no packs yet",
    )
    output.say(", ".join(f"{name} {output.size(used)}" for name, used in seen.disk_bytes.items()))
    if seen.unknown_files or seen.condemned_bytes:
        output.say(
            f"for the sweep: {counted(seen.unknown_files, 'file')} ({output.size(seen.unknown_bytes)}) without a row, "
            f"condemned packs {output.size(seen.condemned_bytes)}"
        )
    room = seen.room
    quota = output.size(room.quota_bytes) if room.quota_bytes else "none"
    output.say(
        f"in all {output.size(room.used_bytes)}, quota {quota}; free {output.size(room.free_bytes)}, "
        f"{output.size(room.reserve_bytes)} of it kept in reserve"
    )
    if seen.shortage is not None:
        print(f"nothing is admitted or claimed: {seen.shortage}")
