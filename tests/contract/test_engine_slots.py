"""Engines that a run wants, on both databases: who has one, what it is granted, how it leaves."""

from __future__ import annotations

import pytest

from strawflow.errors import (
    ConflictError,
    EngineQuarantinedError,
    IllegalTransitionError,
    LeaseLostError,
    NotFoundError,
)
from strawflow.flow import claim, engines, rescue
from strawflow.flow.claim import Grant, PromptShelf
from strawflow.flow.engines import EngineStanding
from strawflow.flow.session import WorkerSession
from strawflow.index import events, units
from strawflow.states import EngineState
from strawflow.testing.runs import SmallRun

URL = "http://127.0.0.1:9"


def claimed(small: SmallRun, session: WorkerSession, limit: int = 1) -> list[Grant]:
    return claim.claim(session, PromptShelf(session), limit=limit, serving_version_id=small.serving())


def only(small: SmallRun) -> EngineStanding:
    (found,) = engines.standing(small.run, with_gone=True)
    return found


def attempts(small: SmallRun) -> set[int]:
    with small.run.index.read() as connection:
        return {u.attempts for u in units.listed(connection, small.run.branch)}


def test_those_of_the_configuration_are_made_once(small: SmallRun) -> None:
    assert [(s.slot_id, s.url, s.state) for s in engines.wanted(small.run)] == [
        (1, None, EngineState.STARTING)
    ]
    assert engines.drain(small.run, 1) is EngineState.GONE
    assert engines.wanted(small.run) == []
    assert engines.add(small.run, count=2) == [2, 3]
    assert engines.add(small.run, url=f"{URL}/") == [4]
    assert [s.url for s in engines.wanted(small.run)] == [None, None, URL]
    with pytest.raises(ConflictError, match="starting already"):
        engines.add(small.run, url=URL)
    with pytest.raises(NotFoundError, match=r"no engine 7; the run has 2, 3, 4"):
        engines.drain(small.run, 7)
    with pytest.raises(IllegalTransitionError, match="not quarantined"):
        engines.release(small.run, 4)


def test_a_quarantine_gives_all_back_and_nothing_is_granted_until_it_serves_again(small: SmallRun) -> None:
    small.trainer()
    session = small.session("rollout")
    slot = engines.take(session, slot_id=None, url=URL)
    engines.serve(session, slot.slot_id)
    held = claimed(small, session, limit=2)
    assert (only(small).state, only(small).num_units) == (EngineState.SERVING, 2)
    engines.quarantine(session, slot.slot_id, reason="nan")
    assert (only(small).state, only(small).reason, only(small).num_units) == (
        EngineState.QUARANTINED,
        "nan",
        0,
    )
    assert attempts(small) == {0}
    assert claimed(small, session) == []
    with small.run.index.read() as connection:
        (told,) = events.latest(connection, limit=1, name_prefix="engine.")
    assert (told["name"], told["facts"]["units"]) == ("engine.quarantined", [g.unit_id for g in held])

    rescue.declare_lost(small.run, session.session_id, reason="it ended")
    with pytest.raises(EngineQuarantinedError, match="engine release"):
        engines.take(small.session("second"), slot_id=None, url=URL)
    engines.release(small.run, slot.slot_id)
    third = small.session("third")
    assert engines.take(third, slot_id=slot.slot_id, url=None).strikes == 1
    engines.serve(third, slot.slot_id)
    assert len(claimed(small, third)) == 1


def test_a_quarantine_by_a_worker_that_was_lost_changes_nothing(small: SmallRun) -> None:
    session = small.session("rollout")
    (slot_id,) = engines.add(small.run, url=URL)
    engines.take(session, slot_id=slot_id, url=None)
    rescue.declare_lost(small.run, session.session_id, reason="late")
    with pytest.raises(LeaseLostError):
        engines.quarantine(session, slot_id, reason="nan")
    with pytest.raises(LeaseLostError):
        engines.take(session, slot_id=slot_id, url=None)
    assert {e.slot_id: e.state for e in engines.standing(small.run)}[slot_id] is EngineState.STARTING


def test_a_draining_engine_is_granted_nothing_and_is_gone_with_its_worker(small: SmallRun) -> None:
    small.trainer()
    session = small.session("rollout")
    slot = engines.take(session, slot_id=None, url=URL)
    engines.serve(session, slot.slot_id)
    assert len(claimed(small, session)) == 1
    assert engines.drain(small.run, slot.slot_id) is EngineState.DRAINING
    assert claimed(small, session) == []
    assert only(small).num_units == 1, "what it holds is its own to park"
    engines.serve(session, slot.slot_id)
    assert only(small).state is EngineState.DRAINING
    session.end()
    assert only(small).state is EngineState.GONE
    with pytest.raises(IllegalTransitionError, match="engine add"):
        engines.take(small.session("second"), slot_id=slot.slot_id, url=None)


def test_a_removed_engine_gives_back_at_once(small: SmallRun) -> None:
    small.trainer()
    session = small.session("rollout")
    slot = engines.take(session, slot_id=None, url=None)
    assert len(claimed(small, session, limit=3)) == 3
    engines.remove(small.run, slot.slot_id)
    assert only(small).state is EngineState.GONE
    assert attempts(small) == {0}
    assert claimed(small, session) == []


def test_an_engine_whose_worker_is_lost_starts_again_or_is_gone_if_the_worker_came_by_hand(
    small: SmallRun,
) -> None:
    (slot_id,) = engines.add(small.run, url=URL)
    session, by_hand = small.session("rollout"), small.session("by_hand")
    engines.take(session, slot_id=slot_id, url=None)
    engines.serve(session, slot_id)
    own = engines.take(by_hand, slot_id=None, url=None)
    engines.serve(by_hand, own.slot_id)
    with pytest.raises(ConflictError, match="another worker"):
        engines.take(by_hand, slot_id=slot_id, url=None)
    for lost in (session, by_hand):
        rescue.declare_lost(small.run, lost.session_id, reason="it ended")
    states = {e.slot_id: e.state for e in engines.standing(small.run, with_gone=True)}
    assert states[slot_id] is EngineState.STARTING
    assert states[own.slot_id] is EngineState.GONE


def test_each_quarantine_in_a_row_rests_longer_and_serving_well_forgets_them(small: SmallRun) -> None:
    session = small.session("rollout")
    engines.wanted(small.run)
    engines.take(session, slot_id=1, url=None)
    waits = []
    for _ in range(7):
        engines.quarantine(session, 1, reason="nan")
        waits.append(round(engines.wanted(small.run)[0].retry_in_s))
    assert waits == [1, 5, 30, 120, 600, 600, 600]
    engines.serve(session, 1)
    engines.note(session, 1, num_garbage=3, tokens_per_s=7.5, last_error="slow", serves_well=True)
    (slot,) = engines.wanted(small.run)
    assert (slot.strikes, slot.num_garbage, slot.tokens_per_s, slot.last_error) == (0, 3, 7.5, "slow")
