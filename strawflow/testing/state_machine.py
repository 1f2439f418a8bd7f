"""A store against a plain model: Hypothesis calls the verbs in any order, and after each the two must agree.

1. The model is dictionaries and sorted lists; it knows the rules of claims, attempts, fences, offers and positions, and
   nothing of SQL, packs or transactions.
2. Workers die at any point and come back as zombies; replies are lost and calls repeated; consumers crash and reopen.
3. At the end every byte is read and every promise that can be asked of the rows is asked.

Use it on an index of your own: subclass `StoreMachine`, override `index_url`, and run its `TestCase` (see
tests/contract/test_state_machine.py). Needs the package hypothesis.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from strawflow.consumer import Consumer
from strawflow.errors import ConflictError, LeaseLostError, StorageError, StrawflowError
from strawflow.flow import rescue
from strawflow.flow.check import check
from strawflow.flow.claim import Grant
from strawflow.flow.order import place_in_epoch
from strawflow.flow.trajectory import Member
from strawflow.index import checkpoints, consumers, leases, units
from strawflow.states import UnitState
from strawflow.store import Store, create
from strawflow.worker import Worker

MAX_ATTEMPTS = 3
NUM_PROMPTS = 7
CONSUMERS = ("trainer", "export")


@dataclass
class ModelUnit:
    """What the model knows of one unit."""

    place: tuple[int, int]
    """(epoch, row)."""
    state: UnitState = UnitState.READY
    fence: int = 0
    attempts: int = 0
    crashes: int = 0
    parks: int = 0
    is_parked: bool = False
    holder: int | None = None


@dataclass
class ModelWorker:
    """A worker session, alive or declared lost, and the grants it remembers."""

    worker: Worker
    number: int
    is_live: bool = True
    remembered: list[Grant] = field(default_factory=list)


@dataclass
class ModelConsumer:
    """A named consumer: its committed position, its planned batches and what waits for it."""

    position: int = 0
    planned: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    """Of each step: digest and units."""
    offered: list[int] = field(default_factory=list)
    handed_out: int = 0
    checkpoints: dict[int, ModelCheckpoint] = field(default_factory=dict)
    """By step."""


@dataclass(frozen=True)
class ModelCheckpoint:
    """What was committed, by whom and under which id."""

    state: str
    session_id: str
    checkpoint_id: str


class StoreMachine(RuleBasedStateMachine):
    """See the module."""

    workers = Bundle("workers")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="strawflow-machine-"))
        self.units: dict[int, ModelUnit] = {}
        self.all_workers: list[ModelWorker] = []
        self.answers: list[tuple[ModelWorker, str, list[Any], Any]] = []
        self.consumers = {name: ModelConsumer() for name in CONSUMERS}
        self.open_consumers: dict[str, Consumer] = {}
        self.num_admitted = 0

    def index_url(self) -> str:
        """Return the address of an empty index; empty: SQLite in the run's folder."""
        return ""

    @initialize(target=workers)
    def create_store(self) -> MultipleResults[ModelWorker]:
        settings = {
            "run.index_url": self.index_url(),
            "run.durability": "process",
            "run.seed": "3",
            "rollout.samples_per_prompt": "2",
            "rollout.max_attempts": str(MAX_ATTEMPTS),
            "lease.ttl_s": "3600",
            "lease.heartbeat_s": "3000",
        }
        prompts = [{"prompt": f"prompt {n}"} for n in range(NUM_PROMPTS)]
        self.store: Store = create(self.folder / "run", prompts=prompts, settings=settings)
        for name in CONSUMERS:
            self.open_consumers[name] = self.store.consumer(name)
        self.admit(4)
        return multiple(self._start_worker(), self._start_worker())

    def teardown(self) -> None:
        if hasattr(self, "store"):
            for consumer in self.open_consumers.values():
                consumer.close()
            report = check(self.store.run)
            dangling = [f for f in report.findings if "which is not live" not in f.message]
            for known in self.all_workers:
                if known.is_live:
                    known.worker.close()
            self.store.close()
            assert dangling == [], dangling
        shutil.rmtree(self.folder, ignore_errors=True)

    # ---- prompts

    @rule(count=st.integers(1, 4))
    def admit(self, count: int) -> None:
        """Prompts come in epoch order, each once an epoch."""
        assert self.store.admit(count) == count
        with self.store.run.index.read() as connection:
            found = {u.unit_id: u for u in units.listed(connection, self.store.run.branch, limit=10_000)}
        new = sorted(found.keys() - self.units.keys())
        assert len(new) == count
        for unit_id in new:
            epoch, position = divmod(self.num_admitted, NUM_PROMPTS)
            row = place_in_epoch(position, num_rows=NUM_PROMPTS, seed=3, epoch=epoch, segment_seq=0)
            unit = found[unit_id]
            assert (unit.epoch, unit.position) == (epoch, row)
            self.units[unit_id] = ModelUnit((epoch, row))
            self.num_admitted += 1

    # ---- workers

    @rule(target=workers)
    @precondition(lambda self: len(self.all_workers) < 5)
    def start_worker(self) -> ModelWorker:
        return self._start_worker()

    def _start_worker(self) -> ModelWorker:
        made = ModelWorker(self.store.worker("worker"), len(self.all_workers))
        self.all_workers.append(made)
        return made

    @rule(
        known=workers,
        limit=st.integers(1, 4),
        data=st.data(),
        how=st.sampled_from(("complete", "park", "fail")),
    )
    def claim_and_settle(self, known: ModelWorker, limit: int, data: st.DataObject, how: str) -> None:
        """What most workers do, so that histories get far."""
        self.claim(known, limit)
        if how == "complete":
            self.complete(known, data, claim=0, loses_reply=False)
        else:
            (self.park if how == "park" else self.fail)(known, data)

    @rule(known=workers, limit=st.integers(1, 4))
    def claim(self, known: ModelWorker, limit: int) -> None:
        expected = self._next_claimed(known, limit)
        if not known.is_live:
            if any(u.state is UnitState.READY for u in self.units.values()):
                self._refused(lambda: known.worker.claim(limit))
            return
        self._granted(known, known.worker.claim(limit), expected)

    @rule(known=workers, data=st.data(), claim=st.integers(0, 2), loses_reply=st.booleans())
    def complete(self, known: ModelWorker, data: st.DataObject, claim: int, loses_reply: bool) -> None:
        """Results of remembered grants, some of which may have gone to others meanwhile."""
        grants = self._draw(data, known)
        if not grants:
            return
        results = [g.result(_members(g)) for g in grants]
        submission_id = f"s-{len(self.answers)}-{known.number}"
        if not known.is_live:
            self._refused(lambda: known.worker.complete(results, submission_id=submission_id))
            return
        held = self._held(known, grants)
        settled = known.worker.complete(results, claim=claim, submission_id=submission_id)
        assert set(settled.accepted) == held
        assert set(settled.lost) == {g.unit_id for g in grants} - held
        for unit_id in held:
            unit = self.units[unit_id]
            unit.state, unit.holder = UnitState.COMPLETED, None
            for consumer in self.consumers.values():
                consumer.offered.append(unit_id)
        self._granted(known, settled.grants, self._next_claimed(known, claim))
        self.answers.append((known, submission_id, results, settled))
        if loses_reply:
            again = known.worker.complete(results, claim=claim, submission_id=submission_id)
            assert (again.accepted, again.lost) == (settled.accepted, settled.lost)
            assert [(g.unit_id, g.fence) for g in again.grants] == [
                (g.unit_id, g.fence) for g in settled.grants
            ]

    @rule(known=workers, data=st.data())
    def park(self, known: ModelWorker, data: st.DataObject) -> None:
        grants = self._draw(data, known)
        if not grants or not known.is_live:
            return
        held = self._held(known, grants)
        settled = known.worker.park([g.result(_members(g, status="partial")) for g in grants])
        assert set(settled.accepted) == held
        for unit_id in held:
            unit = self.units[unit_id]
            unit.state, unit.holder, unit.is_parked = UnitState.READY, None, True
            unit.attempts -= 1
            unit.parks += 1

    @rule(known=workers, data=st.data())
    def fail(self, known: ModelWorker, data: st.DataObject) -> None:
        grants = self._draw(data, known)
        if not grants or not known.is_live:
            return
        unit = self.units[grants[0].unit_id]
        is_held = bool(self._held(known, grants[:1]))
        state = known.worker.fail(grants[0], "the engine said no")
        if not is_held:
            assert state is None
            return
        unit.holder = None
        unit.state = UnitState.FAILED if unit.attempts >= MAX_ATTEMPTS else UnitState.READY
        assert state is unit.state

    @rule(known=workers, data=st.data())
    def release(self, known: ModelWorker, data: st.DataObject) -> None:
        grants = self._draw(data, known)
        if not grants or not known.is_live:
            return
        held = self._held(known, grants)
        assert known.worker.release(grants) == len(held)
        for unit_id in held:
            self.units[unit_id].state, self.units[unit_id].holder = UnitState.READY, None
            self.units[unit_id].attempts -= 1

    @rule(known=workers)
    def lose_worker(self, known: ModelWorker) -> None:
        """Its process is seen dead, or its lease expired; it may live on as a zombie."""
        held = [u for u in self.units.values() if u.holder == known.number]
        returned = rescue.declare_lost(self.store.run, known.worker.session_id, reason="killed")
        assert returned == (len(held) if known.is_live else 0)
        for unit in held:
            unit.holder = None
            unit.state = UnitState.READY
            if len(held) > 1:
                unit.attempts -= 1
                unit.crashes += 1
            elif unit.attempts >= MAX_ATTEMPTS:
                unit.state = UnitState.FAILED
        known.is_live = False

    @rule(known=workers)
    def close_worker(self, known: ModelWorker) -> None:
        if known.is_live:
            known.worker.close()
            known.is_live = False
            for unit in self.units.values():
                if unit.holder == known.number:
                    unit.holder, unit.state = None, UnitState.READY
                    unit.attempts -= 1

    # ---- consumers

    @rule(name=st.sampled_from(CONSUMERS), num_groups=st.integers(1, 3))
    def next_batch(self, name: str, num_groups: int) -> None:
        model, consumer = self.consumers[name], self.open_consumers[name]
        batch = consumer.next_batch(num_groups)
        if model.handed_out < len(model.planned):
            digest, unit_ids = model.planned[model.handed_out]
            assert batch is not None
            assert batch.digest == digest
        elif len(model.offered) < num_groups:
            assert batch is None
            return
        else:
            assert batch is not None
            unit_ids = tuple(sorted(model.offered)[:num_groups])
            model.offered = [u for u in model.offered if u not in unit_ids]
            model.planned.append((batch.digest, unit_ids))
        model.handed_out += 1
        assert batch.step == model.handed_out
        assert tuple(dict.fromkeys(batch.rows["unit_id"].to_pylist())) == unit_ids

    @rule(name=st.sampled_from(CONSUMERS), back=st.integers(0, 2))
    def advance(self, name: str, back: int) -> None:
        model, consumer = self.consumers[name], self.open_consumers[name]
        step = model.handed_out - back
        if model.position <= step and step > 0:
            consumer.advance(step)
            model.position = step
        elif step > 0:
            try:
                consumer.advance(step)
            except ConflictError:
                return
            raise AssertionError(f"advanced back to {step} from {model.position}")

    @rule(name=st.sampled_from(CONSUMERS), state=st.sampled_from("ab"))
    def checkpoint(self, name: str, state: str) -> None:
        """One a step for each consumer: nobody may write it again; the session that committed it gets its id again."""
        model, consumer = self.consumers[name], self.open_consumers[name]
        step = model.handed_out
        if step == 0:
            return
        known = model.checkpoints.get(step)
        if known is not None:
            self._refused(consumer.checkpoint_folder, ConflictError)  # before anything can be written there
            if known.session_id == consumer.session_id:
                assert consumer.commit_checkpoint() == known.checkpoint_id
            return
        (consumer.checkpoint_folder() / "state").write_text(state)
        made = consumer.commit_checkpoint()
        model.checkpoints[step] = ModelCheckpoint(state, consumer.session_id, made)
        model.position = step

    @rule(
        known=workers,
        data=st.data(),
        names=st.lists(st.sampled_from(CONSUMERS), min_size=1, max_size=2, unique=True),
        state=st.sampled_from("ab"),
    )
    def sample_and_train(self, known: ModelWorker, data: st.DataObject, names: list[str], state: str) -> None:
        """What most consumers do, beside each other, so that histories hold checkpoints of equal steps."""
        self.claim_and_settle(known, 1, data, "complete")
        for name in names:
            self.next_batch(name, 1)
            self.checkpoint(name, state)

    @rule(name=st.sampled_from(CONSUMERS), dies=st.booleans())
    def reopen_consumer(self, name: str, dies: bool) -> None:
        """The batches after the committed position come again."""
        old = self.open_consumers[name]
        if dies:
            rescue.declare_lost(self.store.run, old.session_id, reason="killed")
        else:
            old.close()
        self.open_consumers[name] = self.store.consumer(name)
        model = self.consumers[name]
        assert self.open_consumers[name].position == model.position
        if dies and model.handed_out > model.position:
            self._refused(old.advance)
        model.handed_out = model.position

    # ---- upkeep

    @rule()
    def recover(self) -> None:
        self.store.rescue()

    # ---- what must hold

    @invariant()
    def states_agree(self) -> None:
        if not hasattr(self, "store"):
            return
        with self.store.run.index.read() as connection:
            found = {u.unit_id: u for u in units.listed(connection, self.store.run.branch, limit=10_000)}
            waiting = {
                name: sum(consumers.num_offered(connection, self.store.run.branch, name).values())
                for name in CONSUMERS
            }
        told = {
            unit_id: (u.state, u.fence, u.attempts, u.crashes, u.parks) for unit_id, u in self.units.items()
        }
        assert told == {
            unit_id: (u.state, u.fence, u.attempts, u.crashes, u.parks) for unit_id, u in found.items()
        }
        assert waiting == {name: len(model.offered) for name, model in self.consumers.items()}

    @invariant()
    def consumers_agree(self) -> None:
        """Each consumer stands where the model says, with its own checkpoints and their content, and no other's."""
        if not hasattr(self, "store"):
            return
        for name, model in self.consumers.items():
            run = replace(self.store.run, consumer=name)
            with run.index.read() as connection:
                found = consumers.find(connection, run.branch, name)
                kept = checkpoints.listed(connection, run.branch, name)
            assert (found.position, found.planned) == (model.position, len(model.planned))
            assert {c.step: (c.checkpoint_id, (run.root / c.path / "state").read_text()) for c in kept} == {
                step: (c.checkpoint_id, c.state) for step, c in model.checkpoints.items()
            }

    # ---- the model's rules

    def _next_claimed(self, known: ModelWorker, limit: int) -> list[int]:
        """Return the units a claim must grant: parked before fresh, first in; suspects only alone."""
        ready = [
            (not u.is_parked, unit_id) for unit_id, u in self.units.items() if u.state is UnitState.READY
        ]
        order = [unit_id for _, unit_id in sorted(ready)]
        sound = [u for u in order if self.units[u].crashes < leases.CRASHES_BEFORE_ALONE]
        if sound or limit == 0:
            return sound[:limit]
        holds_any = any(u.holder == known.number for u in self.units.values())
        return [] if holds_any else order[:1]

    def _granted(self, known: ModelWorker, grants: list[Grant], expected: list[int]) -> None:
        assert [g.unit_id for g in grants] == expected
        for grant in grants:
            unit = self.units[grant.unit_id]
            unit.state, unit.holder = UnitState.LEASED, known.number
            unit.fence += 1
            unit.attempts += 1
            assert grant.fence == unit.fence
            assert (grant.continuation is not None) == unit.is_parked
        known.remembered += grants

    def _held(self, known: ModelWorker, grants: list[Grant]) -> set[int]:
        return {
            g.unit_id
            for g in grants
            if self.units[g.unit_id].holder == known.number and self.units[g.unit_id].fence == g.fence
        }

    def _draw(self, data: st.DataObject, known: ModelWorker) -> list[Grant]:
        """Return some remembered grants, one of each unit at most, the newest or an older one."""
        if not known.remembered:
            return []
        newest_first = range(len(known.remembered) - 1, -1, -1)
        drawn = data.draw(st.lists(st.sampled_from(newest_first), min_size=1, max_size=3))
        by_unit = {known.remembered[at].unit_id: known.remembered[at] for at in drawn}
        return list(by_unit.values())

    def _refused(self, call: Any, *errors: type[StrawflowError]) -> None:
        """Check that a call is refused; without `errors`, since its session is gone."""
        gone = (LeaseLostError, StorageError)  # lost: refused by the index; closed: by its own pack store
        expected = errors or gone
        try:
            call()
        except expected:
            return
        raise AssertionError("what must be refused was not")


def _members(grant: Grant, *, status: str = "finished") -> list[Member]:
    return [
        Member(n, status, [grant.unit_id, grant.fence, n], [-0.5] * 3, "", "stop", float(n))
        for n in range(grant.profile.num_samples)
    ]
