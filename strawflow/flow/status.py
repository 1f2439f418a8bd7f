"""Looking at a run without touching it: the snapshot behind `strawflow status`, and close-ups of batches and units.

1. Everything here reads; nothing is rescued, renewed or repaired by looking.
2. A snapshot is taken in one read transaction; disk use is measured beside it, without a lock.
3. It knows what the index says. Whether the bytes are good is `flow.check`'s part; a close-up comes upon damage, and shows
   it in place of the rows that lie there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from strawflow.errors import CorruptPackError, NotFoundError, StorageError
from strawflow.flow import evaluation, mixture, quota, retire
from strawflow.flow.chain import read_chains
from strawflow.flow.engines import EngineStanding, standing_of
from strawflow.flow.evaluation import EvalResult
from strawflow.flow.index_place import SWEEP_BLOCKED
from strawflow.flow.mixture import SetStanding
from strawflow.flow.placed import read_extent
from strawflow.flow.run import Run
from strawflow.ids import Extent
from strawflow.index import (
    batches,
    checkpoints,
    consumers,
    datasets,
    events,
    meta,
    packs,
    quarantine,
    sessions,
    units,
    weights,
)
from strawflow.index.batches import Batch
from strawflow.index.checkpoints import Checkpoint
from strawflow.index.consumers import Assignment, Consumer
from strawflow.index.datasets import DatasetSize
from strawflow.index.engine import Connection
from strawflow.index.sessions import Session
from strawflow.index.units import Unit
from strawflow.index.weights import Engine, WeightVersion
from strawflow.packs.reader import PackReader
from strawflow.states import UnitState


@dataclass(frozen=True)
class UnitCount:
    purpose: str
    state: str
    num_units: int


@dataclass(frozen=True)
class OutcomeCount:
    outcome: str
    reason: str | None
    num_units: int


@dataclass(frozen=True)
class RoleHolder:
    role: str
    fence: int
    session_id: str | None
    is_live: bool


@dataclass(frozen=True)
class Drops:
    """Groups dropped outside any batch since the last one was planned."""

    step: int
    """The step that is being planned."""
    num_units: int
    drop_rate: float
    """Their share of the training groups that are dropped or wait, judged or not; 0 without any."""
    reasons: dict[str, int]
    is_starved: bool
    """They are as many as assemble.starved_after_batches allows: the run was stopped, or will be at the next drop."""


@dataclass(frozen=True)
class Progress:
    """Where a run stands, in steps: position <= trained <= planned <= total, of a run that our trainer trains."""

    stage: str
    """`not started`, `warm start`, `rl` or `finished`; `api`: it is moved on through the public API, by no trainer of ours."""
    position: int
    """Last step a checkpoint covers: a crash goes back to here."""
    trained: int
    """Last step the trainer applied."""
    planned: int
    """Last step whose batch is stored; of `api` that of the consumer that is furthest, as is the position."""
    total: int | None
    """None of `api`: how far it goes is the business of whoever moves it on."""
    warm_start_steps: int


@dataclass(frozen=True)
class RunStatus:
    """One look at a run."""

    name: str
    root: str
    index_url: str
    branch: str
    progress: Progress
    consumers: tuple[Consumer, ...]
    """Every consumer of the branch, with its position and the last step planned for it."""
    datasets: tuple[DatasetSize, ...]
    prompt_sets: dict[str, SetStanding]
    """What is trained on, by dataset: the share that each set has now, what was admitted of it, its newest rewards."""
    units: tuple[UnitCount, ...]
    offered: dict[str, int]
    """Completed units waiting to be planned, by purpose."""
    num_failed: int
    failed: tuple[Unit, ...]
    """The first few units set aside as failed, with their last errors."""
    outcomes: tuple[OutcomeCount, ...]
    drops: Drops
    sessions: tuple[Session, ...]
    """Live sessions; one that is past its expiry waits to be declared lost."""
    roles: tuple[RoleHolder, ...]
    engines: tuple[Engine, ...]
    """What engines of live workers reported."""
    wanted_engines: tuple[EngineStanding, ...]
    """The engines that the run wants, and how each does."""
    newest_weights: WeightVersion | None
    checkpoints: tuple[Checkpoint, ...]
    last_batch: Batch | None
    last_metrics: dict[str, Any] | None
    """What the trainer recorded of its last step."""
    evaluations: tuple[EvalResult, ...]
    """The newest result of each dataset, sampled and greedy."""
    events: tuple[dict[str, Any], ...]
    """Newest first."""
    disk_bytes: dict[str, int]
    shortage: str | None
    """Why nothing is admitted or claimed now: too little room on the disk, or beneath the quota."""
    num_quarantined: int
    """Damaged extents in quarantine."""
    sweep_blocked: str | None
    """Why nothing is swept: the index was restored or rebuilt, and was not matched against the packs since."""


def snapshot(run: Run, *, num_events: int = 8, num_failed: int = 5) -> RunStatus:
    """Return what an operator needs to know about a run now."""
    with run.index.read() as connection:
        consumer = consumers.find(connection, run.branch, run.consumer)
        steps = checkpoints.steps_recorded(connection, run.branch, run.consumer)
        live = sessions.listed(connection, live_only=True)
        counts = units.count_by_state(connection, run.branch)
        outcomes = consumers.count_outcomes(connection, run.branch, run.consumer)
        failed = units.listed(connection, run.branch, state=UnitState.FAILED, limit=num_failed)
        newest = weights.newest(connection, run.branch)
        return RunStatus(
            name=run.name,
            root=str(run.root),
            index_url=run.index.shown_url,
            branch=run.branch,
            progress=_progress(connection, run, newest, trained=steps[-1]["step"] if steps else 0),
            consumers=tuple(consumers.listed(connection, run.branch)),
            datasets=tuple(datasets.listed(connection, run.branch)),
            prompt_sets=mixture.standings(connection, run),
            units=tuple(UnitCount(*key, count) for key, count in sorted(counts.items())),
            offered=consumers.num_offered(connection, run.branch, run.consumer),
            num_failed=sum(n for (_, state), n in counts.items() if state == UnitState.FAILED),
            failed=tuple(failed),
            outcomes=tuple(
                OutcomeCount(*key, count)
                for key, count in sorted(outcomes.items(), key=lambda item: (item[0][0], item[0][1] or ""))
            ),
            drops=_drops(connection, run, step=consumer.planned + 1),
            sessions=tuple(live),
            roles=_roles(connection, run, {s.session_id for s in live}),
            engines=tuple(weights.engines_listed(connection)),
            wanted_engines=tuple(standing_of(connection)),
            newest_weights=newest,
            checkpoints=tuple(checkpoints.listed(connection, run.branch, run.consumer)),
            last_batch=batches.find(connection, run.branch, run.consumer, consumer.planned),
            last_metrics=steps[-1] if steps else None,
            evaluations=tuple(evaluation.latest(evaluation.recorded_of(connection, run.branch))),
            events=tuple(events.latest(connection, limit=num_events)),
            disk_bytes=quota.disk_use(run),
            shortage=quota.measure(run).shortage,
            num_quarantined=len(quarantine.listed(connection)),
            sweep_blocked=meta.find(connection, SWEEP_BLOCKED),
        )


def _drops(connection: Connection, run: Run, *, step: int) -> Drops:
    reasons = consumers.drops_while_planning(connection, run.branch, run.consumer, step=step)
    num_units = sum(reasons.values())
    waiting = consumers.num_offered(connection, run.branch, run.consumer).get("train", 0)
    limit = run.config.assemble.starved_after_batches * run.config.rollout.prompts_per_step
    return Drops(
        step=step,
        num_units=num_units,
        drop_rate=num_units / (num_units + waiting) if num_units else 0.0,
        reasons=dict(sorted(reasons.items(), key=lambda item: -item[1])),
        is_starved=num_units >= limit,
    )


def progress_of(run: Run) -> tuple[Progress, int]:
    """Return where a run stands and how many workers live: the line of a list of runs."""
    with run.index.read() as connection:
        steps = checkpoints.steps_recorded(connection, run.branch, run.consumer)
        newest = weights.newest(connection, run.branch)
        live = sessions.listed(connection, live_only=True)
        progress = _progress(connection, run, newest, trained=steps[-1]["step"] if steps else 0)
    return progress, len(live)


BY_API = "api"


def _progress(connection: Connection, run: Run, newest: WeightVersion | None, *, trained: int) -> Progress:
    config = run.config
    consumer = consumers.find(connection, run.branch, run.consumer)
    if newest is None:
        # Our own trainer publishes weights before anything is admitted.
        if any(d.num_admitted for d in datasets.listed(connection, run.branch)):
            furthest = max(consumers.listed(connection, run.branch), key=lambda c: (c.planned, c.position))
            return Progress(BY_API, furthest.position, trained, furthest.planned, None, 0)
        stage = "not started"
    elif consumer.position >= config.total_steps:
        stage = "finished"
    elif newest.step < config.warm_start.steps:
        stage = "warm start"
    else:
        stage = "rl"
    # A crash may leave steps recorded beyond what a trainer that went back has applied; they are trained again.
    return Progress(
        stage, consumer.position, trained, consumer.planned, config.total_steps, config.warm_start.steps
    )


def _roles(connection: Connection, run: Run, live: set[str]) -> tuple[RoleHolder, ...]:
    return tuple(
        RoleHolder(role, fence, session_id, session_id in live)
        for role, fence, session_id in consumers.roles_listed(connection, run.branch)
    )


@dataclass(frozen=True)
class BatchDetail:
    """One batch, opened."""

    batch: Batch
    units: tuple[dict[str, Any], ...]
    """Unit id, outcome and reason of every unit given to this batch."""
    members: tuple[dict[str, Any], ...]
    """The stored plan rows, each with its prompt and response length where the member was packed."""
    micro_batches: tuple[dict[str, Any], ...]
    """Place, sequences, tokens and file of each micro-batch; its damage instead where it cannot be read."""
    damage: str | None = None
    """Why the plan, and so no member, can be shown."""


def batch_detail(run: Run, step: int) -> BatchDetail:
    """Read one batch whole: plan and packed rows. What is damaged of it is told in its place.

    Raises:
        NotFoundError: no batch of that step.
    """
    with run.index.read() as connection:
        batch = batches.require(connection, run.branch, run.consumer, step)
        places = batches.places(connection, batch.batch_id)
        assigned = batches.units_of(connection, [batch.batch_id])
    reader = PackReader(run.root)
    lengths: _Lengths = {}
    micro_batches = [
        {
            "mini_batch": place.mini_batch,
            "slice": place.slice,
            "micro_batch": place.micro_batch,
            **_packed(_read(run, reader, place.extent_id), lengths),
        }
        for place in places
    ]
    plan = _read(run, reader, batch.plan_extent_id)
    members = []
    for row in plan.to_pylist():
        prompt, response = lengths.get((row["unit_id"], row["member"], row["segment"]), (None, None))
        members.append({**row, "prompt_length": prompt, "response_length": response})
    fates = [{"unit_id": u, "outcome": outcome, "reason": reason} for _, u, outcome, reason in assigned]
    return BatchDetail(batch, tuple(fates), tuple(members), tuple(micro_batches), plan.damage)


_Lengths = dict[tuple[int, int, int], tuple[int, int]]
"""(unit, member, segment) to (prompt length, response length)."""


@dataclass(frozen=True)
class _Stored:
    """An extent as it was found: its place and rows, or what is wrong with it."""

    extent: Extent | None = None
    rows: pa.RecordBatch | None = None
    damage: str | None = None

    def to_pylist(self, start: int = 0, count: int | None = None) -> list[dict[str, Any]]:
        return [] if self.rows is None else self.rows.slice(start, count).to_pylist()


def _read(run: Run, reader: PackReader, extent_id: int) -> _Stored:
    try:
        with run.index.read() as connection:
            extent = packs.find_extents(connection, [extent_id])[extent_id]
        return _Stored(extent, read_extent(run, reader, extent))
    except (CorruptPackError, StorageError) as error:
        return _Stored(damage=error.message)


def _packed(stored: _Stored, lengths: _Lengths) -> dict[str, Any]:
    """Return what is shown of a micro-batch; `lengths` is told its members'."""
    rows, extent = stored.rows, stored.extent
    if rows is not None:
        columns = ["unit_id", "member", "segment", "prompt_length", "tokens"]
        for row in rows.select(columns).to_pylist():
            key = (row["unit_id"], row["member"], row["segment"])
            lengths[key] = (row["prompt_length"], len(row["tokens"]) - row["prompt_length"])
    return {
        "num_sequences": None if rows is None else rows.num_rows,
        "num_tokens": None if rows is None else len(rows.column("tokens").flatten()),
        "path": None if extent is None else extent.path,
        "offset": None if extent is None else extent.offset,
        "length": None if extent is None else extent.length,
        "damage": stored.damage,
    }


@dataclass(frozen=True)
class UnitDetail:
    """One unit, opened."""

    unit: Unit
    dataset: str
    """Of its prompt."""
    prompt: dict[str, Any] | None
    """None when its bytes are damaged."""
    members: tuple[dict[str, Any], ...]
    """Its accepted trajectories: status, reward, lengths, text; empty unless completed and whole."""
    fates: tuple[dict[str, Any], ...]
    events: tuple[dict[str, Any], ...]
    is_retired: bool = False
    """Whether it left the index: its row and fates are read from the history, its trajectories are gone."""
    prompt_damage: str | None = None
    """Why the prompt cannot be shown."""
    damage: str | None = None
    """Why its trajectories cannot be shown."""


def unit_detail(run: Run, unit_id: int) -> UnitDetail:
    """Read one unit whole: its prompt, its accepted trajectories, what became of it and its events.

    What is damaged of it is told in its place.

    Raises:
        NotFoundError: no such unit.
    """
    with run.index.read() as connection:
        is_there = units.is_there(connection, unit_id)
    retired = None if is_there else retire.find_retired(run, unit_id)
    with run.index.read() as connection:
        if retired is None:
            unit = units.find(connection, unit_id)
            fates = consumers.fates_of(connection, unit.branch_id, unit_id)
        else:
            unit, fates = _from_history(retired)
        steps = {b.batch_id: b.step for b in batches.listed(connection, unit.branch_id, run.consumer)}
        history = events.of_unit(connection, unit_id, limit=50)
        dataset = datasets.of_segments(connection, [unit.segment_id]).get(unit.segment_id, "")
        places = [
            p for p in datasets.segment_extent_ids(connection, unit.segment_id) if p[0] <= unit.position
        ]
        if not places:
            raise NotFoundError(f"unit {unit_id} names a prompt that its segment does not hold")
        first_row, prompt_extent = places[-1]
    reader = PackReader(run.root)
    asked = _read(run, reader, prompt_extent)
    prompt = next(iter(asked.to_pylist(unit.position - first_row, 1)), None)
    if prompt is not None:
        prompt.pop("content_digest")
        prompt["images"] = [f"{len(image)} bytes" for image in prompt["images"] or ()] or None
    given = _given(run, reader, unit)
    return UnitDetail(
        unit=unit,
        dataset=dataset,
        prompt=prompt,
        members=tuple(_member(row) for row in given.to_pylist()),
        fates=tuple(
            {
                "consumer": consumer,
                "epoch": fate.epoch,
                "outcome": fate.outcome,
                "reason": fate.reason,
                "step": None if batch_id is None else steps.get(batch_id),
            }
            for consumer, fate, batch_id in fates
        ),
        events=tuple(history),
        is_retired=retired is not None,
        prompt_damage=asked.damage,
        damage=given.damage,
    )


def _given(run: Run, reader: PackReader, unit: Unit) -> _Stored:
    """Return the rows of a unit's result, or of what is saved of it."""
    if unit.extent_id is None:
        return _Stored()
    if unit.state is UnitState.COMPLETED:
        stored = _read(run, reader, unit.extent_id)
        rows = stored.rows
        return (
            stored if rows is None else replace(stored, rows=rows.slice(unit.row_start or 0, unit.row_count))
        )
    try:
        return _Stored(rows=read_chains(run, reader, [unit])[unit.unit_id])
    except (CorruptPackError, StorageError) as error:
        return _Stored(damage=error.message)


def _from_history(row: dict[str, Any]) -> tuple[Unit, list[tuple[str, Assignment, int | None]]]:
    """Return a retired unit as it was, and its (consumer, assignment, batch id)."""
    fields: dict[str, Any] = {name: row.get(name) for name in Unit.__dataclass_fields__}
    fields["state"] = UnitState(row["state"])
    columns = (row[name] for name in ("consumers", "outcomes", "reasons", "batch_ids"))
    fates = [
        (consumer, Assignment(row["epoch"], row["unit_id"], outcome, reason), batch_id)
        for consumer, outcome, reason, batch_id in zip(*columns, strict=True)
    ]
    return Unit(**fields), fates


def _member(row: dict[str, Any]) -> dict[str, Any]:
    kept = ("member", "segment", "status", "failure", "reward", "score", "finish_reason", "response_text")
    return {
        **{name: row[name] for name in (*kept, "weight_versions", "engine")},
        "num_prompt_tokens": len(row["prompt_tokens"]),
        "num_response_tokens": len(row["response_tokens"]),
    }
