"""The engines of a run: which are wanted, what each one itself reported to serve, and which are not trusted.

1. What an operator decides and what a worker finds out is a row; workers and supervisors follow the rows.
2. An engine that served wrong weights or garbage is quarantined in the transaction that gives its units back, their
   attempts refunded; nothing is granted to it until it is started again and answered its probes (one of our own), or an
   operator releases it (one that others started).
"""

from __future__ import annotations

from dataclasses import dataclass

from strawflow.errors import (
    ConflictError,
    EngineQuarantinedError,
    IllegalTransitionError,
    InvalidInputError,
    NotFoundError,
)
from strawflow.flow.run import Run
from strawflow.flow.session import WorkerSession
from strawflow.index import events, leases, meta, sessions, slots, weights
from strawflow.index.engine import Connection
from strawflow.index.slots import Slot
from strawflow.index.weights import Engine
from strawflow.reward_names import is_address
from strawflow.states import EngineState
from strawflow.topology import POLICY, Topology, placements

RETRY_AFTER_S = (1.0, 5.0, 30.0, 120.0, 600.0)
"""How long one of our own rests after its first, second ... quarantine."""
_SEEDED = "engines_seeded"


def report(session: WorkerSession, *, engine_id: str, url: str, build: str, version_id: str | None) -> None:
    """Store an engine's own word on the weights it serves.

    Raises:
        LeaseLostError: the session was declared lost.
    """
    with session.run.index.begin() as connection:
        sessions.require_live(connection, session.session_id)
        weights.report_engine(
            connection,
            engine_id,
            session_id=session.session_id,
            url=url,
            build=build,
            version_id=version_id,
        )


def listed(run: Run) -> list[Engine]:
    """Return the engines of live workers and what each reported to serve."""
    with run.index.read() as connection:
        return weights.engines_listed(connection)


@dataclass(frozen=True)
class EngineStanding:
    """One engine that a run wants, and how it does."""

    slot_id: int
    model: str
    url: str | None
    is_attached: bool
    state: EngineState
    version_id: str | None
    """What it reported to serve."""
    num_units: int
    """Groups in flight."""
    tokens_per_s: float | None
    num_garbage: int
    """Answers that could not be used, ever."""
    last_error: str | None
    reason: str | None
    """Why it is quarantined."""
    session_id: str | None


def standing(run: Run, *, with_gone: bool = False) -> list[EngineStanding]:
    """Return every engine that the run wants, in the order they were added."""
    with run.index.read() as connection:
        return standing_of(connection, with_gone=with_gone)


def standing_of(connection: Connection, *, with_gone: bool = False) -> list[EngineStanding]:
    reported = {e.session_id: e for e in weights.engines_listed(connection)}
    found = []
    for slot in slots.listed(connection, with_gone=with_gone):
        engine = reported.get(slot.session_id or "")
        held = 0 if slot.session_id is None else leases.num_leased(connection, slot.session_id)
        found.append(
            EngineStanding(
                slot_id=slot.slot_id,
                model=slot.model,
                url=slot.url or (None if engine is None else engine.url or None),
                is_attached=slot.url is not None,
                state=slot.state,
                version_id=None if engine is None or not engine.url else engine.version_id,
                num_units=held,
                tokens_per_s=slot.tokens_per_s,
                num_garbage=slot.num_garbage,
                last_error=slot.last_error,
                reason=slot.reason,
                session_id=slot.session_id,
            )
        )
    return found


def wanted(run: Run) -> list[Slot]:
    """Return the slots that a supervisor is to keep a worker for; those that the configuration names are made first."""
    with run.index.read() as connection:
        if meta.find(connection, _SEEDED) is not None:
            return _supervised(connection)
    with run.index.begin() as connection:
        _seed(connection, run)
        return _supervised(connection)


def _supervised(connection: Connection) -> list[Slot]:
    return [slot for slot in slots.listed(connection) if not slot.is_by_hand]


def _seed(connection: Connection, run: Run) -> None:
    """Make the slots that the configuration names, once in the life of a run."""
    meta.hold(connection, "engines")  # two at once would both make them
    if meta.find(connection, _SEEDED) is not None:
        return
    rollout = run.config.rollout
    if isinstance(rollout.topology, Topology):
        for number, placement in enumerate(placements(rollout.topology)):
            slots.add(connection, model=placement.model, placement=number)
    else:
        for url in rollout.engine_urls or [None] * rollout.engines:
            slots.add(connection, model=POLICY, url=None if url is None else _address(url))
    meta.put(connection, _SEEDED, "1")


def add(run: Run, *, url: str | None = None, count: int = 1) -> list[int]:
    """Want further engines: `count` of our own, or one that runs at an address; returns their numbers.

    The supervisor starts a rollout worker for each. An attached one that is quarantined is released instead.

    Raises:
        InvalidInputError: the address is none of a server. ConflictError: the run has an engine there already.
    """
    if url is not None and not is_address(url):
        raise InvalidInputError(f"{url!r} is no address of an engine; write http://HOST:PORT")
    with run.index.begin() as connection:
        _seed(connection, run)
        if url is None:
            return [slots.add(connection, model=POLICY) for _ in range(count)]
        known = slots.attached(connection, _address(url))
        if known is None:
            return [slots.add(connection, model=POLICY, url=_address(url))]
        if known.state is not EngineState.QUARANTINED:
            raise ConflictError(f"{known.name} is {known.state} already", slot_id=known.slot_id)
        _release(connection, known)
        return [known.slot_id]


def release(run: Run, slot_id: int) -> None:
    """Let a quarantined engine be tried again now: it serves once it answered its probes.

    Raises:
        NotFoundError: no such engine. IllegalTransitionError: it is not quarantined.
    """
    with run.index.begin() as connection:
        slot = _found(connection, slot_id)
        if slot.state is not EngineState.QUARANTINED:
            raise IllegalTransitionError(f"{slot.name} is {slot.state}, not quarantined", slot_id=slot_id)
        _release(connection, slot)


def drain(run: Run, slot_id: int) -> EngineState:
    """Let an engine leave: it is granted nothing more, its worker parks what it holds; returns its state now.

    Raises:
        NotFoundError: no such engine.
    """
    with run.index.begin() as connection:
        slot = _found_or_seeded(connection, run, slot_id)
        if slot.state in (EngineState.DRAINING, EngineState.GONE):
            return slot.state
        slots.move(connection, slot_id, EngineState.DRAINING, of={slot.state})
        events.record(connection, "engine.draining", session_id=slot.session_id, slot_id=slot_id)
    return EngineState.GONE if slot.session_id is None and leave(run, slot_id) else EngineState.DRAINING


def leave(run: Run, slot_id: int) -> bool:
    """Say that a draining engine has no worker any more; False if it has one."""
    with run.index.begin() as connection:
        slot = _found(connection, slot_id)
        if slot.state is not EngineState.DRAINING or slot.session_id is not None:
            return False
        slots.move(connection, slot_id, EngineState.GONE, of={EngineState.DRAINING})
        events.record(connection, "engine.gone", slot_id=slot_id)
    return True


def remove(run: Run, slot_id: int) -> None:
    """End an engine's part in a run at once: what its worker holds goes back with its last saved progress.

    Raises:
        NotFoundError: no such engine.
    """
    with run.index.begin() as connection:
        slot = _found_or_seeded(connection, run, slot_id)
        if slot.state is EngineState.GONE:
            return
        if slot.session_id is not None:
            _take_units_back(connection, slot.session_id)
        slots.move(connection, slot_id, EngineState.GONE, of={slot.state})
        events.record(connection, "engine.gone", session_id=slot.session_id, slot_id=slot_id)


def take(session: WorkerSession, *, slot_id: int | None, url: str | None) -> Slot:
    """Become the worker of an engine: of a slot, or, started by hand, of the engine at an address or one of its own.

    Raises:
        ConflictError: another live worker has it.
        EngineQuarantinedError: others started it, and it is quarantined.
        IllegalTransitionError: it is draining or gone.
        LeaseLostError: the session was declared lost.
    """
    with session.run.index.begin() as connection:
        sessions.require_live(connection, session.session_id)
        if slot_id is None:
            meta.hold(connection, "engines")
            known = None if url is None else slots.attached(connection, _address(url))
            slot_id = (
                known.slot_id
                if known is not None
                else slots.add(
                    connection,
                    model=POLICY,
                    url=None if url is None else _address(url),
                    is_by_hand=True,
                )
            )
        slots.hold(connection, slot_id)
        slot = _found(connection, slot_id)
        if slot.session_id not in (None, session.session_id):
            raise ConflictError(
                f"{slot.name} serves another worker already; an engine has one, which loads its weights",
                session_id=slot.session_id,
            )
        if slot.state in (EngineState.DRAINING, EngineState.GONE):
            raise IllegalTransitionError(f"{slot.name} is {slot.state}; `strawflow engine add` adds another")
        if slot.state is EngineState.QUARANTINED and slot.url is not None:
            raise EngineQuarantinedError(
                f"{slot.name} is quarantined: {slot.reason}; `strawflow engine release {session.run.root} {slot_id}` lets it "
                "be tried again"
            )
        slots.take(connection, slot_id, session_id=session.session_id)
        return slot


def serve(session: WorkerSession, slot_id: int) -> None:
    """Say that the engine reported the right weights, and answered its probes if it was to."""
    with session.run.index.begin() as connection:
        sessions.require_live(connection, session.session_id)
        before = {EngineState.STARTING, EngineState.QUARANTINED}
        if slots.move(connection, slot_id, EngineState.SERVING, of=before):
            events.record(connection, "engine.serving", session_id=session.session_id, slot_id=slot_id)


def quarantine(session: WorkerSession, slot_id: int, *, reason: str) -> None:
    """Trust the engine of a worker no longer, and give back all that the worker holds, the attempts refunded.

    Raises:
        LeaseLostError: the session was declared lost.
    """
    with session.run.index.begin() as connection:
        released = _take_units_back(connection, session.session_id)
        sessions.require_live(connection, session.session_id)
        slots.hold(connection, slot_id)
        slot = _found(connection, slot_id)
        retry_after_s = RETRY_AFTER_S[min(slot.strikes, len(RETRY_AFTER_S) - 1)]
        if slots.quarantine(connection, slot_id, reason=reason, retry_after_s=retry_after_s):
            events.record(
                connection,
                "engine.quarantined",
                session_id=session.session_id,
                slot_id=slot_id,
                reason=reason,
                units=released,
            )


def note(
    session: WorkerSession,
    slot_id: int,
    *,
    num_garbage: int,
    tokens_per_s: float | None,
    last_error: str | None,
    serves_well: bool,
) -> None:
    """Store what a worker saw of its engine since its last note."""
    with session.run.index.begin() as connection:
        slots.note(
            connection,
            slot_id,
            num_garbage=num_garbage,
            tokens_per_s=tokens_per_s,
            last_error=last_error,
            serves_well=serves_well,
        )


def tell_error(run: Run, slot_id: int, error: str) -> None:
    """Store why the worker of an engine ended."""
    with run.index.begin() as connection:
        slots.note(
            connection, slot_id, num_garbage=0, tokens_per_s=None, last_error=error[:1000], serves_well=False
        )


def state_of(run: Run, slot_id: int) -> EngineState:
    """Return the state of an engine: what an operator decided is in it."""
    with run.index.read() as connection:
        return _found(connection, slot_id).state


def _take_units_back(connection: Connection, session_id: str) -> list[int]:
    # Alone with its row: a grant under way is settled before, and the next one is refused.
    sessions.hold(connection, session_id)
    return leases.release_all(connection, session_id)


def _release(connection: Connection, slot: Slot) -> None:
    slots.move(connection, slot.slot_id, EngineState.STARTING, of={EngineState.QUARANTINED})
    events.record(connection, "engine.released", slot_id=slot.slot_id)


def _found(connection: Connection, slot_id: int) -> Slot:
    slot = slots.find(connection, slot_id)
    if slot is None:
        known = ", ".join(str(s.slot_id) for s in slots.listed(connection)) or "none"
        raise NotFoundError(f"there is no engine {slot_id}; the run has {known}")
    return slot


def _found_or_seeded(connection: Connection, run: Run, slot_id: int) -> Slot:
    """Return a slot, of a run that was not started yet as well."""
    if slots.find(connection, slot_id) is None:
        _seed(connection, run)
    return _found(connection, slot_id)


def _address(url: str) -> str:
    return url.rstrip("/")
