"""Admission: turn prompts into ready units and move the dataset cursors, in one transaction.

    cursors read ▸ ids taken ▸ journal entry durable ▸ transaction(units, cursors, what the draws go on from)

1. What is admitted follows from the cursors that were read; the transaction asks whether they still stand there, and if
   another worker moved one the admission is planned anew.
2. Unit ids grow in the order of admission; ids that were taken for a refused admission leave a gap.
3. Prompt sets that are mixed by weight, or made by hooks, are flow.mixture's part; their bounds and their transaction are here.

How far admission may run ahead is bounded by staleness: step s is applied to weights of step s - 1, so with weights w
the newest published and a lag of at most m, groups of steps up to w + 1 + m may be sampled; with schedule `sync` only those
of step w + 1, and in both `over_provision` groups more. The bound holds for all prompt sets together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from strawflow import eval_datasets, faults
from strawflow.errors import ConflictError, InvalidInputError
from strawflow.flow import journal, mixture, quota
from strawflow.flow.admission import AT_ONCE, Admission, Schedule, SourceStep, from_segments
from strawflow.flow.mixture import NO_HOOKS, Drawn, Hooks
from strawflow.flow.run import Run
from strawflow.flow.session import WorkerSession
from strawflow.index import consumers, datasets, events, mixtures, units, weights
from strawflow.index.engine import Connection

DEMONSTRATIONS = eval_datasets.DEMONSTRATIONS
PROMPTS = eval_datasets.PROMPTS
HELD_OUT = eval_datasets.HELD_OUT

MAX_ADMITTED = 1_000_000
"""Groups admitted in one call: all of them are made in memory and written in one transaction."""


@dataclass(frozen=True)
class Demand:
    """How many groups of a profile may be admitted, of some datasets together."""

    datasets: tuple[str, ...]
    profile: str
    limit: int
    """How many may have been admitted by now."""
    is_mixed: bool = False
    """Whether they are the run's prompt sets, drawn from by weight or made by hooks."""
    is_further: bool = False
    """Whether `limit` counts from what has been admitted. A bound made of that number, read before, would lack what others
    admitted between the two reads."""

    def room(self, connection: Connection, branch_id: str) -> int:
        """Return how many more may be."""
        if self.is_further:
            return self.limit
        return self.limit - sum(datasets.num_admitted(connection, branch_id, name) for name in self.datasets)


Limits = Callable[[Connection], list[Demand]]


def admit_due(session: WorkerSession, hooks: Hooks = NO_HOOKS) -> int:
    """Admit every group that staleness allows now; returns how many were admitted. Safe to call from any worker.

    A unit dropped outside any batch is owed a replacement of its purpose.

    Raises:
        ConfigError: a hook of the run failed, or its prompts are made by one and `hooks` has none for them, or a prompt set of
            weight above 0 holds no prompts.
    """
    return _admit(session, lambda connection: _limits(connection, session.run), hooks=hooks)


def _limits(connection: Connection, run: Run) -> list[Demand]:
    config, warm = run.config, run.config.warm_start
    newest = weights.newest(connection, run.branch)
    if newest is None:
        return []

    def dropped(purpose: str) -> int:
        return consumers.num_dropped(connection, run.branch, run.consumer, purpose=purpose)

    limits: list[Demand] = []
    if warm.steps:
        # Demonstrations are sampled by no weights, so nothing about them goes stale.
        limit = warm.steps * warm.prompts_per_step + dropped("demo")
        limits.append(Demand((DEMONSTRATIONS,), "demo", limit))
    if newest.step >= warm.steps:
        rollout = config.rollout
        ahead = rollout.max_staleness if rollout.schedule == "async" else 0
        num_steps = newest.step - warm.steps + 1 + ahead
        # What the last step leaves over would go on for a step that never comes.
        num_groups = min(
            num_steps * rollout.prompts_per_step + rollout.over_provision,
            config.trainer.steps * rollout.prompts_per_step,
        )
        limits.append(_of_prompt_sets(run, "train", num_groups + dropped("train")))
    return limits


def _of_prompt_sets(run: Run, profile: str, limit: int) -> Demand:
    names = tuple(one.name for one in run.config.prompt_sets())
    return Demand(names, profile, limit, is_mixed=mixture.is_mixed(run))


def admit_more(
    session: WorkerSession,
    *,
    count: int,
    dataset_id: str | None = None,
    profile: str = "train",
    schedule: Schedule = AT_ONCE,
) -> int:
    """Admit the next `count` prompts in epoch order, running into further epochs; returns how many were admitted.

    Without a dataset those of the run's prompt sets, by weight. For a run whose trainer is not ours: nothing bounds it but
    the caller. 0 while too little disk is left to admit any.

    Raises:
        InvalidInputError: the count is no whole number from 0 to MAX_ADMITTED, nothing was ever enqueued to the dataset, or
            the schedule cannot be.
        ConfigError: as of `admit_due`.
    """
    schedule.require_valid()
    demand = _of_prompt_sets(session.run, profile, count)
    if dataset_id is not None or not demand.is_mixed:
        demand = Demand((dataset_id or demand.datasets[0],), profile, count)
    _require_admissible(session.run, count, demand)
    further = replace(demand, is_further=True)
    return _admit(session, lambda _: [further], schedule)


def admit_rest(
    session: WorkerSession, step: SourceStep, *, dataset_id: str, schedule: Schedule = AT_ONCE
) -> int:
    """Admit all prompts of a dataset that were never admitted, the source's state in the same transaction.

    Returns how many. Nothing is stored where there is nothing to admit, or too little disk is left.

    Raises:
        ConflictError: something was admitted from the dataset since the state before was read; nothing changed.
        InvalidInputError: the schedule cannot be.
    """
    branch = session.run.branch
    schedule.require_valid()

    def limits(connection: Connection) -> list[Demand]:
        at = datasets.cursor(connection, branch, dataset_id)
        if at.version != step.version:
            raise SourceMovedError(
                f"prompts of dataset {dataset_id!r} were admitted by another since its source was read: read it again",
                dataset_id=dataset_id,
            )
        rest = datasets.num_unadmitted(connection, branch, dataset_id)
        return [Demand((dataset_id,), "train", min(rest, MAX_ADMITTED), is_further=True)]

    return _admit(session, limits, schedule, step)


class SourceMovedError(ConflictError):
    """Planning the admission anew would store a state that does not belong to it."""


def _require_admissible(run: Run, count: int, demand: Demand) -> None:
    if not isinstance(count, int) or not 0 <= count <= MAX_ADMITTED:
        raise InvalidInputError(
            f"{count} prompts cannot be admitted at once: give a whole number from 0 to {MAX_ADMITTED:,}"
        )
    if demand.is_mixed:
        return  # each set is looked at when it is drawn from
    dataset_id = demand.datasets[0]
    with run.index.read() as connection:
        purpose = datasets.purpose_of(connection, dataset_id)
        if purpose == "eval" or dataset_id in run.config.eval_datasets():
            raise InvalidInputError(
                f"dataset {dataset_id!r} is for evaluation: its prompts are admitted with the weights that they test, and "
                "never trained on"
            )
        if datasets.segments_of(connection, dataset_id):
            return
        known = ", ".join(repr(d.dataset_id) for d in datasets.listed(connection, run.branch) if d.num_rows)
    raise InvalidInputError(
        f"dataset {dataset_id!r} holds no prompts: enqueue some first, or name one that does ({known or 'none yet'})"
    )


def _admit(
    session: WorkerSession,
    limits: Limits,
    schedule: Schedule = AT_ONCE,
    source: SourceStep | None = None,
    hooks: Hooks = NO_HOOKS,
) -> int:
    run = session.run
    while True:
        admissions: list[Admission] = []
        looks: list[mixture.Look] = []
        with run.index.read() as connection:  # almost always there is nothing to do
            for demand in limits(connection):
                count = demand.room(connection, run.branch)
                if count <= 0:
                    continue
                if demand.is_mixed:
                    found = mixture.look(
                        connection, run, count=count, profile=demand.profile, schedule=schedule
                    )
                    looks.append(found)
                elif planned := _planned(connection, run, demand, count, schedule, source):
                    admissions.append(planned)
        if not (admissions or looks) or quota.gauge(run).watch():
            return 0
        drawn = [each for found in looks if (each := mixture.draw(session, found, hooks)) is not None]
        groups = [[admission] for admission in admissions] + [list(each.admissions) for each in drawn]
        admissions, num_units = [], 0
        for group in groups:
            admissions += [admission.placed_after(num_units) for admission in group]
            num_units += sum(len(admission.units) for admission in group)
        if not num_units:
            return 0
        with run.index.begin() as connection:
            first_id = units.take_ids(connection, num_units)
        try:
            _commit(session, admissions, drawn, first_id, limits)
        except SourceMovedError:
            raise
        except ConflictError:
            continue  # another worker admitted meanwhile: each round lost is one that another won
        return num_units


def _planned(
    connection: Connection,
    run: Run,
    demand: Demand,
    count: int,
    schedule: Schedule,
    source: SourceStep | None,
) -> Admission | None:
    (dataset_id,) = demand.datasets
    before = datasets.cursor(connection, run.branch, dataset_id)
    segments = datasets.segments_of(connection, dataset_id)
    if not segments:
        return None
    planned = from_segments(
        connection, run, before, segments, count, profile=demand.profile, schedule=schedule
    )
    return planned if source is None else replace(planned, source_state=source.state)


def _commit(
    session: WorkerSession,
    admissions: Sequence[Admission],
    drawn: Sequence[Drawn],
    first_id: int,
    limits: Limits,
) -> None:
    run = session.run
    entries = [entry for admission in admissions for entry in admission.entries(run, first_id=first_id)]
    with journal.recorded(session, entries) as record, run.index.begin() as connection:
        record.name(connection)
        made = {
            admission.before.dataset_id: admission.made.add(connection, session, [admission.identities])
            for admission in admissions
            if admission.made is not None
        }
        units.require_unused(connection, first_id)
        _require_allowed(connection, run, admissions, limits)
        for each in drawn:
            mixtures.replace(connection, run.branch, expected=each.before, new=each.after)
        for admission in admissions:
            dataset_id = admission.before.dataset_id
            new = admission.units
            if dataset_id in made:
                new = [replace(unit, segment_id=made[dataset_id].segment_id) for unit in new]
            units.admit(connection, run.branch, new, ids=admission.ids(first_id))
            datasets.move_cursor(
                connection, run.branch, admission.after, expected_version=admission.before.version
            )
            if admission.source_state is not None:
                datasets.put_source_state(connection, run.branch, dataset_id, admission.source_state)
            events.record(
                connection,
                "units.admitted",
                dataset_id=dataset_id,
                num_units=len(new),
                epoch=admission.after.epoch,
            )
        faults.at("admit.before_commit")  # crash here: the entry and made rows of what never became true
    faults.at("admit.after_commit")  # crash here: it is admitted, nobody was told


def _require_allowed(
    connection: Connection, run: Run, admissions: Sequence[Admission], limits: Limits
) -> None:
    """Hold the cursors of what is admitted; raise ConflictError where one was moved, or the bound is exceeded now."""
    count_of: dict[str, int] = {}
    for admission in admissions:
        dataset_id = admission.before.dataset_id
        held = datasets.cursor_for_update(connection, run.branch, dataset_id)
        if held.version != admission.before.version:
            raise ConflictError("the dataset cursor was moved meanwhile", dataset_id=dataset_id)
        count_of[dataset_id] = len(admission.units)
    for demand in limits(connection):
        count = sum(count_of.pop(name, 0) for name in demand.datasets)
        if count > demand.room(connection, run.branch):
            raise ConflictError("as much was admitted meanwhile as may be", dataset_id=demand.datasets[0])
    if count_of:
        raise ConflictError("nothing of this may be admitted any more", dataset_id=min(count_of))
