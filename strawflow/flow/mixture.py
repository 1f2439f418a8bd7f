"""Drawing prompts from several sets by weight: what is asked of the user's hooks, and what is admitted for it.

    look (one read) ▸ curriculum: weights ▸ draws ▸ data sources: prompts ▸ bytes durable ▸ [flow.admit commits all of it]

1. Hooks are called outside any transaction, from the state that the look found. If another worker admitted meanwhile, what
   they said is thrown away and they are asked again: their states are stored with the work that came of them, or not at all.
2. What a data source makes is added to its dataset, admitted, and its state stored, in one transaction.
3. A data source that has nothing now is passed over; a set of prompts that are enqueued never is: it starts its next epoch.
4. It knows hooks as functions, not as dotted paths.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from strawflow.errors import ConfigError, InvalidInputError
from strawflow.flow import mixer
from strawflow.flow.admission import AT_ONCE, Admission, Schedule, from_segments, take_segment
from strawflow.flow.mixer import Mixture
from strawflow.flow.new_segment import NewSegment
from strawflow.flow.run import Run
from strawflow.flow.session import WorkerSession
from strawflow.index import datasets, mixtures, weights
from strawflow.index.datasets import Cursor, Segment
from strawflow.index.engine import Connection
from strawflow.index.units import require_priority
from strawflow.prompt_sets import PromptSet, refuse_nothing_to_draw
from strawflow.prompts.mappings import KEYS, written_down
from strawflow.prompts.reader import read_prompts
from strawflow.prompts.row import PromptRow, to_record_batch

MAX_STATE_BYTES = 1 << 20
METRIC_BATCHES = 8
"""Rewards are told of so many batches' worth of groups: those completed that were admitted last."""


@dataclass(frozen=True)
class SetStanding:
    """A prompt set as a curriculum is told of it."""

    weight: float
    """Its share by the weights of the last draws, or those of the configuration before the first; they sum to 1."""
    num_rows: int
    """Rows of its dataset; of a data source's those made so far."""
    num_admitted: int
    """Groups admitted of it on this branch, over all epochs."""
    epoch: int
    num_groups: int
    """How many of the newest completed groups (8 batches' worth of all sets) are of it."""
    mean_reward: float | None
    """Of these; None without any."""


@dataclass(frozen=True)
class Steering:
    """What a curriculum says."""

    weights: Mapping[str, float]
    """Of sets by name; those it leaves out have 0."""
    state: Any = None
    priorities: Mapping[str, int] = field(default_factory=dict)
    difficulties: Mapping[str, Any] = field(default_factory=dict)
    """Handed to data sources as it is."""


@dataclass(frozen=True)
class Order:
    """What a data source is asked for."""

    name: str
    """Of its prompt set."""
    count: int
    """How many prompts are wanted."""
    num_made: int
    """How many groups it made on this branch so far."""
    step: int
    """Of the newest weights."""
    difficulty: Any = None
    """What the curriculum said for this set."""


@dataclass(frozen=True)
class Hooks:
    """The user's functions; each raises ConfigError where it fails."""

    curriculum: Callable[[int, Mapping[str, SetStanding], Any], Steering] | None = None
    sources: Mapping[str, Callable[[Order, Any], tuple[Sequence[Mapping[str, Any]], Any]]] = field(
        default_factory=dict
    )
    """By prompt set: returns at most as many rows as ordered, and the state after them."""


NO_HOOKS = Hooks()


@dataclass(frozen=True)
class Look:
    """What one read found."""

    count: int
    """Groups that may be admitted."""
    profile: str
    schedule: Schedule
    stored: str | None
    """What the draws go on from, as it stands in the index."""
    cursors: Mapping[str, Cursor]
    segments: Mapping[str, list[Segment]]
    states: Mapping[str, Any]
    """Of data sources."""
    standings: Mapping[str, SetStanding]
    step: int

    @property
    def mixture(self) -> Mixture:
        return Mixture.from_text(self.stored)


@dataclass(frozen=True)
class Drawn:
    """What is to be admitted, and what the draws go on from before and after."""

    admissions: Sequence[Admission]
    before: str | None
    after: str


def is_mixed(run: Run) -> bool:
    """Tell whether prompts are drawn by weight or made by hooks; else they are one set's, in epoch order."""
    sets = run.config.prompt_sets()
    return len(sets) > 1 or any(one.source for one in sets) or bool(run.config.rollout.curriculum)


def look(connection: Connection, run: Run, *, count: int, profile: str, schedule: Schedule = AT_ONCE) -> Look:
    """Read all that an admission of `count` groups follows from."""
    sets = run.config.prompt_sets()
    cursors = {one.name: datasets.cursor(connection, run.branch, one.name) for one in sets}
    states = {one.name: datasets.source_state(connection, run.branch, one.name) for one in sets if one.source}
    newest = weights.newest(connection, run.branch)
    return Look(
        count=count,
        profile=profile,
        schedule=schedule,
        stored=mixtures.find(connection, run.branch),
        cursors=cursors,
        segments={one.name: datasets.segments_of(connection, one.name) for one in sets if not one.source},
        states={name: None if text is None else json.loads(text) for name, text in states.items()},
        standings=standings(connection, run),
        step=0 if newest is None else newest.step,
    )


def standings(connection: Connection, run: Run) -> dict[str, SetStanding]:
    """Return how each prompt set stands on the run's branch."""
    sets = run.config.prompt_sets()
    mixture = Mixture.from_text(mixtures.find(connection, run.branch))
    weight_of = _shares(mixture.weights or {one.name: one.weight for one in sets})
    latest = mixtures.latest_rewards(
        connection, run.branch, num_groups=METRIC_BATCHES * run.config.rollout.prompts_per_step
    )
    found = {}
    for one in sets:
        at = datasets.cursor(connection, run.branch, one.name)
        num_groups, mean_reward = latest.get(one.name, (0, None))
        found[one.name] = SetStanding(
            weight=weight_of.get(one.name, 0.0),
            num_rows=datasets.num_rows_if_any(connection, one.name),
            num_admitted=at.num_admitted,
            epoch=at.epoch,
            num_groups=num_groups,
            mean_reward=mean_reward,
        )
    return found


def _shares(weights_: Mapping[str, float]) -> dict[str, float]:
    total = sum(weights_.values())
    return {name: weight / total for name, weight in weights_.items()}


def draw(session: WorkerSession, found: Look, hooks: Hooks) -> Drawn | None:
    """Decide what a look leads to; None where no set has anything now. Rows that data sources made are durable after it.

    Raises:
        ConfigError: a hook failed, or what it said cannot be; a set of weight above 0 holds no prompts.
        InvalidInputError: a row that a data source made is wrong.
    """
    run = session.run
    sets = {one.name: one for one in run.config.prompt_sets()}
    session.mark_progress()
    steering = _steered(run, found, sets, hooks)
    _refuse_empty(found, sets, steering.weights)
    order, lags, made = _drawn(session, found, sets, steering, hooks)
    if not order:
        return None
    mixture = Mixture(found.mixture.version + 1, steering.weights, lags, steering.state)
    text = mixture.to_text()
    admissions = []
    for name, count in Counter(order).items():
        priority = steering.priorities.get(name)
        schedule = found.schedule if priority is None else replace(found.schedule, priority=priority)
        if name in made:
            rows, state = made[name]
            admission = _of_made_rows(session, found, sets[name], rows, state, schedule)
        else:
            with run.index.read() as connection:
                admission = from_segments(
                    connection,
                    run,
                    found.cursors[name],
                    found.segments[name],
                    count,
                    profile=found.profile,
                    schedule=schedule,
                )
        places = [place for place, drawn in enumerate(order) if drawn == name]
        admissions.append(replace(admission, places=places, mixture=text))
    return Drawn(admissions, found.stored, text)


Made = dict[str, tuple[list[PromptRow], str]]
"""By prompt set: what its data source made, and its state after it."""


def _drawn(
    session: WorkerSession,
    found: Look,
    sets: Mapping[str, PromptSet],
    steering: Steering,
    hooks: Hooks,
) -> tuple[list[str], dict[str, int], Made]:
    """Return the set of each group, the lags after them, and what was made; again without those that had too little."""
    order: list[str] = []
    lags = dict(found.mixture.lags)
    made: Made = {}
    open_sets = dict(steering.weights)
    while len(order) < found.count:
        drawn, lags = mixer.draw(open_sets, lags, found.count - len(order))
        if not drawn:
            break
        is_short = False
        for name, count in Counter(drawn).items():
            if not sets[name].source:
                continue
            difficulty = steering.difficulties.get(name)
            session.mark_progress()
            rows, state = _made(session.run, found, sets[name], hooks, count, difficulty, made.get(name))
            if rows:
                before, _ = made.get(name, ([], ""))
                made[name] = [*before, *rows], state
            if len(rows) < count:
                is_short = True
                open_sets.pop(name)
                for _ in range(count - len(rows)):
                    del drawn[len(drawn) - 1 - drawn[::-1].index(name)]
        order += drawn
        if not is_short:
            break
    return order, lags, made


def _steered(run: Run, found: Look, sets: Mapping[str, PromptSet], hooks: Hooks) -> Steering:
    before = found.mixture
    if hooks.curriculum is None:
        # Who has no curriculum at hand (a program of the user's that admits) goes on with what it said last.
        by_weight = {one.name: one.weight for one in sets.values()}
        was_steered = run.config.rollout.curriculum and before.version
        return Steering(before.weights if was_steered else by_weight, before.curriculum)
    steering = hooks.curriculum(found.step, found.standings, before.curriculum)
    text_of(steering.state, of="the curriculum")
    for told in (steering.weights, steering.priorities, steering.difficulties):
        if unknown := sorted(told.keys() - sets.keys()):
            raise ConfigError(
                f"rollout.curriculum spoke of {unknown[0]!r}; the prompt sets are {', '.join(sets)}"
            )
    for name, weight in steering.weights.items():
        if not 0 <= weight < float("inf"):
            raise ConfigError(
                f"rollout.curriculum gave {name!r} the weight {weight!r}; weights are numbers from 0"
            )
    for priority in steering.priorities.values():
        require_priority(priority)
    refuse_nothing_to_draw(
        {name: steering.weights.get(name, 0.0) for name in sets}, where="rollout.curriculum"
    )
    return steering


def _refuse_empty(found: Look, sets: Mapping[str, PromptSet], by_name: Mapping[str, float]) -> None:
    for name, one in sets.items():
        if by_name.get(name, 0) > 0 and not one.source and not found.segments[name]:
            raise ConfigError(
                f"prompt set {name!r} has weight {by_name[name]:g} and holds no prompts: enqueue some with --dataset {name}, or "
                "give it weight 0"
            )


def _made(
    run: Run,
    found: Look,
    one: PromptSet,
    hooks: Hooks,
    count: int,
    difficulty: Any,
    before: tuple[list[PromptRow], str] | None,
) -> tuple[list[PromptRow], str]:
    """Have a data source make up to `count` prompts, after those it made before in this round; returns them, checked, and its
    state after them as JSON."""
    source_hook = hooks.sources.get(one.name)
    if source_hook is None:
        raise ConfigError(
            f"the prompts of {one.name!r} are made by {one.source}: a rollout worker of ours calls it and admits them"
        )
    num_made, state = found.cursors[one.name].num_admitted, found.states[one.name]
    if before is not None:
        num_made, state = num_made + len(before[0]), json.loads(before[1])
    given, after = source_hook(Order(one.name, count, num_made, found.step, difficulty), state)
    text = text_of(after, of=f"data source {one.source}")
    if len(given) > count:
        raise ConfigError(
            f"data source {one.source} made {len(given)} prompts where {count} were wanted; keep what is left over in its state"
        )
    if not given:
        return [], text
    with written_down(given, name=one.source) as source:
        return list(read_prompts(source, KEYS, row_rewards=run.config.rollout.row_rewards)), text


def _of_made_rows(
    session: WorkerSession,
    found: Look,
    one: PromptSet,
    rows: Sequence[PromptRow],
    state: str,
    schedule: Schedule,
) -> Admission:
    """Make rows durable and return their admission; whoever makes the same prompt again makes another occurrence of it."""
    run, cursor = session.run, found.cursors[one.name]
    with run.index.read() as connection:
        seq = datasets.next_segment_seq(connection, one.name)
        seen = datasets.known_occurrences(connection, one.name, list({row.content_digest for row in rows}))
    identities: list[tuple[bytes, int]] = []
    for row in rows:
        occurrence = seen.get(row.content_digest, 0)
        seen[row.content_digest] = occurrence + 1
        identities.append((row.content_digest, occurrence))
    batch = to_record_batch(rows, first_position=0, occurrences=[occurrence for _, occurrence in identities])
    extent = session.packs.append(
        "prompt", batch
    )  # crash before the transaction: orphan bytes, named by nothing
    made = NewSegment(one.name, "train", seq, len(rows), one.source, [(0, extent)])
    purpose = run.config.profiles()[found.profile].purpose
    segment = Segment(0, one.name, seq, len(rows), one.source)
    new, after = take_segment(cursor, segment, make=schedule.maker(purpose, found.profile))
    return Admission(
        found.profile,
        cursor,
        after,
        new,
        num_segments=seq + 1,
        read=[[seq, len(rows), extent.digests[:16].hex()]],
        schedule=schedule,
        source_state=state,
        made=made,
        identities=identities,
    )


def text_of(state: Any, *, of: str) -> str:
    """Return a state as it is stored.

    Raises:
        InvalidInputError: it is no JSON, or longer than 1 MiB.
    """
    try:
        text = json.dumps(state, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"the state of {of} must be JSON: {error}") from None
    if len(text) > MAX_STATE_BYTES:
        raise InvalidInputError(
            f"the state of {of} has {len(text)} bytes, at most {MAX_STATE_BYTES} are kept: store large ones in a file"
        )
    return text
