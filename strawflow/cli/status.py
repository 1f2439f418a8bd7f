"""`strawflow status`: where a run stands, for whoever is woken by it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from strawflow.cli.options import JsonFlag, RunArgument, opened
from strawflow.plural import counted

if TYPE_CHECKING:
    from strawflow.flow.status import RunStatus


_IN_JSON_ALONE = frozenset(
    {
        *("fence", "flops", "total_tokens", "plan_wait_s", "read_wait_s", "staleness_max"),
        *("prompt_tokens_mean", "response_tokens_max", "sequence_tokens_max"),
    }
)
"""Numbers of a step that the line of the last step leaves out."""


def status(
    run: RunArgument,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again and again until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks of --watch.")] = 2.0,
    as_json: JsonFlag = False,
) -> None:
    """Show where a run stands, what is stuck and why.

    Progress, units, failures, workers, engines, weights, checkpoints, disk.
    """
    from strawflow.cli import output
    from strawflow.flow.status import snapshot

    with opened(run) as found:
        if not watch:
            seen = snapshot(found)
            if as_json:
                output.print_json(seen)
            else:
                output.console().print(render(seen))
        elif as_json:
            _repeat(interval, lambda: output.print_json(snapshot(found), one_line=True))
        else:
            from rich.live import Live

            with Live(render(snapshot(found)), console=output.console(), auto_refresh=False) as live:
                _repeat(interval, lambda: live.update(render(snapshot(found)), refresh=True))


def _repeat(interval: float, show: Any) -> None:
    import threading

    pause = threading.Event()
    while True:  # Ctrl-C ends it
        show()
        pause.wait(interval)


def render(s: RunStatus) -> Any:
    """Return the snapshot as rich shows it."""
    from rich.console import Group
    from rich.text import Text

    from strawflow.flow.status import BY_API

    stage = "moved on through the API" if s.progress.stage == BY_API else s.progress.stage
    parts: list[Any] = [Text(f"{s.name}: {stage}", style="bold"), _facts(s)]
    for part in (_units(s), _sessions(s), _engines(s), _failed(s), _events(s)):
        parts += ["", part] if part else []
    return Group(*parts)


def _facts(s: RunStatus) -> Any:
    from strawflow.cli.layout import Facts
    from strawflow.cli.output import cell, size

    facts = [
        ("run", f"{s.root}  (branch {s.branch}, index {s.index_url})"),
        ("steps", _steps(s)),
    ]
    if s.last_batch is not None:
        b = s.last_batch
        facts.append(
            (
                "last batch",
                f"step {b.step} ({b.objective}): mean reward {cell(b.mean_reward)}, {counted(b.num_sequences, 'sequence')}, "
                f"{counted(b.num_tokens, 'token')}, staleness up to {b.max_staleness}",
            )
        )
    if s.last_metrics is not None:
        measured = {
            k: v for k, v in s.last_metrics.items() if isinstance(v, int | float) and k not in _IN_JSON_ALONE
        }
        facts.append(("last step", ", ".join(f"{k} {cell(v)}" for k, v in measured.items())))
    facts += [("evaluation", f"step {step}: {told}") for step, told in _evaluations(s)]
    facts += [
        (
            d.dataset_id,
            f"{counted(d.num_rows, 'row')} in {counted(d.num_segments, 'segment')}, {d.num_admitted} admitted"
            + _share(s, d.dataset_id),
        )
        for d in s.datasets
    ]
    waiting = ", ".join(f"{count} {purpose}" for purpose, count in sorted(s.offered.items())) or "none"
    facts.append(("waiting", f"{waiting} (completed groups not planned yet)"))
    fates = ", ".join(f"{o.num_units} {o.outcome}{' ' + o.reason if o.reason else ''}" for o in s.outcomes)
    facts.append(("outcomes", fates or "none yet"))
    newest = s.newest_weights
    facts.append(
        ("weights", "none published" if newest is None else f"{newest.version_id} ({newest.created_at})")
    )
    last = s.checkpoints[-1] if s.checkpoints else None
    facts.append(
        (
            "checkpoints",
            "none"
            if last is None
            else f"{len(s.checkpoints)}, newest {last.checkpoint_id} ({last.created_at})",
        )
    )
    facts += _alarms(s)
    facts.append(("disk", ", ".join(f"{name} {size(used)}" for name, used in s.disk_bytes.items())))
    return Facts(facts)


def _share(s: RunStatus, dataset_id: str) -> str:
    """Return what is told of a prompt set among several."""
    from strawflow.cli.output import cell

    one = s.prompt_sets.get(dataset_id)
    if one is None or len(s.prompt_sets) == 1:
        return ""
    rewards = "" if one.mean_reward is None else f", mean reward {cell(one.mean_reward)}"
    return f", weight {one.weight:.1%}{rewards}"


def _evaluations(s: RunStatus) -> list[tuple[int, str]]:
    """Return what the newest evaluations came to, by step."""
    by_step: dict[int, list[str]] = {}
    for result in s.evaluations:
        passed = ", ".join(f"pass@{k} {value:.1%}" for k, value in result.pass_at.items())
        failed = f", {result.num_failed} failed" if result.num_failed else ""
        name = f"{result.dataset} (greedy)" if result.is_greedy else result.dataset
        by_step.setdefault(result.step, []).append(f"{name}: {passed}{failed}")
    return [(step, "; ".join(told)) for step, told in sorted(by_step.items())]


def _steps(s: RunStatus) -> str:
    p = s.progress
    if p.total is None:
        told = [f"{c.consumer} {c.planned} planned, {c.position} committed" for c in s.consumers]
        return f"{'; '.join(told)} (made through the API: no trainer's steps are planned)"
    warm = f" ({p.warm_start_steps} of them warm start)" if p.warm_start_steps else ""
    return (
        f"{p.trained} trained, {p.planned} planned, {p.position} covered by a checkpoint, of {p.total}{warm}"
    )


def _alarms(s: RunStatus) -> list[tuple[str, str]]:
    """Return what somebody has to do something about, with the command that helps."""
    found = []
    if s.shortage is not None:
        found.append(("STORAGE", f"nothing is admitted or claimed: {s.shortage}"))
    if s.drops.is_starved:
        reasons = ", ".join(f"{count} {why}" for why, count in s.drops.reasons.items())
        found.append(
            (
                "STARVED",
                f"{s.drops.num_units} groups ({s.drops.drop_rate:.0%}) were dropped while step {s.drops.step} was planned: "
                f"{reasons}; mend what drops them, then `strawflow resume {s.root}`",
            )
        )
    quarantined = [e for e in s.wanted_engines if e.state == "quarantined"]
    if quarantined:
        told = "; ".join(f"{e.slot_id} ({e.url or 'our own'}): {e.reason}" for e in quarantined)
        waits = any(e.is_attached for e in quarantined)
        helps = (
            f"; mend it, then `strawflow engine release {s.root} {quarantined[0].slot_id}`" if waits else ""
        )
        found.append(
            (
                "ENGINES",
                f"{len(quarantined)} of {len(s.wanted_engines)} in quarantine, granted nothing: {told}{helps}",
            )
        )
    if s.last_metrics is not None and s.last_metrics.get("disagreement"):
        step, told = s.last_metrics["step"], s.last_metrics["disagreement"]
        found.append(("AGREEMENT", f"engine and trainer differ at step {step}: {told}"))
    if s.num_quarantined:
        held = counted(s.num_quarantined, "damaged extent")
        found.append(("QUARANTINE", f"{held}; `strawflow index quarantine {s.root}` tells what they held"))
    if s.sweep_blocked is not None:
        why = s.sweep_blocked
        found.append(
            ("SWEEP", f"nothing is swept ({why}); `strawflow storage reconcile {s.root}` allows it again")
        )
    return found


def _units(s: RunStatus) -> Any:
    from strawflow.cli.output import table

    if not s.units:
        return "no units admitted yet"
    states = ("ready", "leased", "completed", "failed")
    counts = {(u.purpose, u.state): u.num_units for u in s.units}
    purposes = sorted({u.purpose for u in s.units})
    return table(
        ("units", *states),
        [(purpose, *(counts.get((purpose, state), 0) for state in states)) for purpose in purposes],
    )


def _sessions(s: RunStatus) -> Any:
    from strawflow.cli.output import table
    from strawflow.flow.status import BY_API

    if not s.sessions:
        return (
            f"no live worker; `strawflow resume {s.root}` starts them"
            if s.progress.stage not in ("finished", BY_API)
            else None
        )
    roles: dict[str | None, list[str]] = {}
    for r in s.roles:
        roles.setdefault(r.session_id, []).append(f"{r.role} (fence {r.fence})")
    return table(
        ("live worker", "host", "pid", "lease", "roles"),
        [
            (
                x.session_id,
                x.host,
                x.pid,
                f"expires in {x.expires_in_s:.0f} s"
                if x.expires_in_s > 0
                else f"EXPIRED {-x.expires_in_s:.0f} s ago",
                ", ".join(roles.get(x.session_id, [])),
            )
            for x in s.sessions
        ],
    )


def _engines(s: RunStatus) -> Any:
    from strawflow.cli.output import table

    newest = None if s.newest_weights is None else s.newest_weights.version_id
    return s.engines and table(
        ("engine", "url", "build", "serves", "newest", "reported at"),
        [
            (e.engine_id, e.url, e.build, e.version_id or "nothing yet", e.version_id == newest, e.updated_at)
            for e in s.engines
        ],
    )


def _failed(s: RunStatus) -> Any:
    from strawflow.cli.output import clipped, table

    rows = [(u.unit_id, u.purpose, u.attempts, clipped(u.last_error, 110)) for u in s.failed]
    return rows and table((f"failed ({s.num_failed})", "purpose", "attempts", "last error"), rows)


def _events(s: RunStatus) -> Any:
    import json

    from strawflow.cli.output import clipped, clock_time, table

    rows = [
        (clock_time(e["at"]), e["name"], e["unit_id"], clipped(json.dumps(e["facts"]), 90)) for e in s.events
    ]
    return rows and table(("last events", "event", "unit", "facts"), rows)
