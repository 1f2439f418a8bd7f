"""A store against a plain model: Hypothesis calls the verbs in any order, and after each the two must agree.

1. The model (strawflow.testing.model) is dictionaries and sorted lists; it knows the rules of claims, attempts, fences,
   offers, positions and forks, and nothing of SQL, packs or transactions.
2. Workers die at any point and come back as zombies; replies are lost and calls repeated; consumers crash and reopen, some
   are first made when much is read already; groups are sent back and failed ones retried; the run goes on on a branch
   from any checkpoint of the line.
3. Whatever happened, every admitted prompt of the line is in one place for every consumer.
4. At the end every byte is read and every promise that can be asked of the rows is asked.

Use it on an index of your own: subclass `StoreMachine`, override `index_url`, and run its `TestCase` (see
tests/contract/test_state_machine.py). Needs the package hypothesis.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable
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
from strawflow.flow import assemble, rescue
from strawflow.flow.branch import create_branch
from strawflow.flow.chain import saved_members
from strawflow.flow.check import check
from strawflow.flow.claim import Grant
from strawflow.flow.order import place_in_epoch
from strawflow.flow.retry import retry_failed
from strawflow.flow.session import WorkerSession
from strawflow.flow.trajectory import Member
from strawflow.index import checkpoints, consumers, datasets, leases, units
from strawflow.states import UnitState
from strawflow.store import Store, create
from strawflow.store import open as open_store
from strawflow.testing.model import (
    ModelBatch,
    ModelBranch,
    ModelCheckpoint,
    ModelConsumer,
    ModelUnit,
    forked,
    places_of,
    plan_fork,
    settled_before,
    take_up,
)
from strawflow.worker import Worker

MAX_ATTEMPTS = 3
SETS = {"prompts": (4, 3.0), "more": (3, 1.0)}
"""Prompt sets: how many rows and which weight each has."""
CONSUMERS = ("trainer", "export")
"""There from the start."""
LATE = ("late", "later")
"""Made somewhere on the way."""
MAX_BRANCHES = 4


PICK = st.integers(0, 11)
"""Which of the consumers that there are."""


def _places(count: int) -> list[tuple[str, int, int]]:
    """Return (set, epoch, row) of the first `count` prompts of a line: the set that lags its share most goes first."""
    drawn: Counter[str] = Counter()
    places = []
    total = sum(weight for _, weight in SETS.values())
    for number in range(1, count + 1):
        # Of two sets the one that is owed more is the one that must go first.
        name = max(SETS, key=lambda one: SETS[one][1] * number / total - drawn[one])
        num_rows = SETS[name][0]
        epoch, position = divmod(drawn[name], num_rows)
        places.append(
            (name, epoch, place_in_epoch(position, num_rows=num_rows, seed=3, epoch=epoch, segment_seq=0))
        )
        drawn[name] += 1
    return places


def _row_of_all(name: str, row: int) -> int:
    """Return a row's number among those of all sets."""
    return 100 * list(SETS).index(name) + row


@dataclass
class ModelWorker:
    """A worker session, alive or declared lost, and the grants it remembers."""

    worker: Worker
    number: int
    is_live: bool = True
    is_gone: bool = False
    """Whether it was of a branch that was left: nobody hears of it again."""
    remembered: list[Grant] = field(default_factory=list)


class StoreMachine(RuleBasedStateMachine):
    """See the module."""

    workers = Bundle("workers")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="strawflow-machine-"))
        self.here = ModelBranch("main")
        self.branches = {"main": self.here}
        self.all_workers: list[ModelWorker] = []
        self.answers: list[tuple[ModelWorker, str, list[Any], Any]] = []
        self.open_consumers: dict[str, Consumer] = {}

    @property
    def units(self) -> dict[int, ModelUnit]:
        return self.here.units

    @property
    def consumers(self) -> dict[str, ModelConsumer]:
        return self.here.consumers

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
            "data.prompts": json.dumps([{"name": n, "weight": weight} for n, (_, weight) in SETS.items()]),
        }
        self.store: Store = create(self.folder / "run", settings=settings)
        for name, (num_rows, _) in SETS.items():
            self.store.enqueue([{"prompt": f"prompt {n}"} for n in range(num_rows)], dataset=name)
        for name in CONSUMERS:
            self.open_consumers[name] = self.store.consumer(name)
            self.consumers[name] = ModelConsumer()
        self.admit(4)
        return multiple(self._start_worker(), self._start_worker())

    def teardown(self) -> None:
        if hasattr(self, "store"):
            for consumer in self.open_consumers.values():
                consumer.close()
            lines = [
                replace(self.store.run, branch=branch.name, consumer=name)
                for branch in self.branches.values()
                for name in (branch.consumers if branch is self.here else ("trainer",))
            ]
            dangling = [
                f for line in lines for f in check(line).findings if "which is not live" not in f.message
            ]
            for known in self.all_workers:
                if known.is_live:
                    known.worker.close()
            self.store.close()
            assert dangling == [], dangling
        shutil.rmtree(self.folder, ignore_errors=True)

    # ---- prompts

    @rule(count=st.integers(1, 4))
    def admit(self, count: int) -> None:
        """Prompts come from each set by its weight and in epoch order, each once an epoch."""
        assert self.store.admit(count) == count
        new = self._new_ids(count)
        places = _places(self.here.num_admitted + count)[-count:]
        for unit_id, (name, epoch, row) in zip(new, places, strict=True):
            with self.store.run.index.read() as connection:
                unit = units.find(connection, unit_id)
                dataset = datasets.of_segments(connection, [unit.segment_id])[unit.segment_id]
            assert (dataset, unit.epoch, unit.position) == (name, epoch, row)
            self.units[unit_id] = ModelUnit((epoch, _row_of_all(name, row)))
        self.here.num_admitted += count

    def _new_ids(self, count: int) -> list[int]:
        """Return the ids of units that the branch has and the model does not know yet, in order."""
        with self.store.run.index.read() as connection:
            found = units.listed(connection, self.store.run.branch, limit=10_000)
        new = [u.unit_id for u in found if u.unit_id not in self.units]
        assert len(new) == count
        return new

    # ---- workers

    @rule(target=workers)
    @precondition(lambda self: sum(not w.is_gone for w in self.all_workers) < 5)
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
        if known.is_gone:
            return
        self.claim(known, limit)
        if how == "complete":
            self.complete(known, data, claim=0, loses_reply=False)
        else:
            (self.park if how == "park" else self.fail)(known, data)

    @rule(known=workers, limit=st.integers(1, 4))
    def claim(self, known: ModelWorker, limit: int) -> None:
        if known.is_gone:
            return
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
            unit.sampled_as = unit_id, unit.fence
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
        progress = {g.unit_id: g.result(_members(g, status="partial")) for g in grants}
        settled = known.worker.park(list(progress.values()))
        assert set(settled.accepted) == held
        for unit_id in held:
            unit = self.units[unit_id]
            unit.state, unit.holder, unit.is_parked = UnitState.READY, None, True
            unit.attempts -= 1
            unit.parks += 1
            unit.saved = _tokens(progress[unit_id].members)

    @rule(known=workers, data=st.data(), num_tokens=st.integers(1, 3))
    def save(self, known: ModelWorker, data: st.DataObject, num_tokens: int) -> None:
        """How far groups have come, at times shorter than before: what was saved last is what the next holder gets."""
        grants = self._draw(data, known)
        if not grants or not known.is_live:
            return
        held = self._held(known, grants)
        progress = [(g, g.result(_members(g, status="partial", num_tokens=num_tokens))) for g in grants]
        settled = known.worker.save(progress)
        assert set(settled.accepted) <= held
        assert not set(settled.lost) & held
        for grant, result in progress:
            if grant.unit_id in settled.accepted:
                unit = self.units[grant.unit_id]
                unit.is_parked = True
                unit.saved = _tokens(result.members)
            elif grant.unit_id in held:  # nothing was new
                assert self.units[grant.unit_id].saved == _tokens(result.members)

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
        if known.is_gone:
            return
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

    @rule(pick=PICK, num_groups=st.integers(1, 3))
    def next_batch(self, pick: int, num_groups: int) -> None:
        name, model, consumer = self._picked(pick)
        batch = consumer.next_batch(num_groups)
        if model.handed_out < len(model.planned):
            expected = model.planned[model.handed_out]
            assert batch is not None
            assert batch.digest == expected.digest
        elif len(model.offered) < num_groups:
            assert batch is None
            return
        else:
            assert batch is not None
            unit_ids = sorted(model.offered)[:num_groups]
            found = [self.units[u] for u in unit_ids]
            expected = ModelBatch(
                batch.digest, tuple(u.sampled_as for u in found), tuple(u.place for u in found)
            )
            model.offered = [u for u in model.offered if u not in unit_ids]
            model.planned.append(expected)
            model.fates |= dict.fromkeys(unit_ids, len(model.planned))
        model.handed_out += 1
        assert batch.step == model.handed_out, name
        rows = zip(*(batch.rows[column].to_pylist() for column in ("unit_id", "fence")), strict=True)
        assert tuple(dict.fromkeys(rows)) == expected.rows

    def _picked(self, pick: int) -> tuple[str, ModelConsumer, Consumer]:
        name = sorted(self.consumers)[pick % len(self.consumers)]
        return name, self.consumers[name], self.open_consumers[name]

    @rule(pick=PICK, back=st.integers(0, 2))
    def advance(self, pick: int, back: int) -> None:
        _, model, consumer = self._picked(pick)
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

    @rule(pick=PICK, state=st.sampled_from("ab"))
    def checkpoint(self, pick: int, state: str) -> None:
        """One a step for each consumer: nobody may write it again; the session that committed it gets its id again."""
        _, model, consumer = self._picked(pick)
        step = model.handed_out
        if step == 0:
            return
        known = model.checkpoints.get(step)
        if known is not None or step == model.start:
            self._refused(consumer.checkpoint_folder, ConflictError)  # before anything can be written there
            if known is not None and known.session_id == consumer.session_id:
                assert consumer.commit_checkpoint() == known.checkpoint_id
            return
        (consumer.checkpoint_folder() / "state").write_text(state)
        made = consumer.commit_checkpoint()
        model.checkpoints[step] = ModelCheckpoint(
            state=state,
            session_id=consumer.session_id,
            checkpoint_id=made,
            branch=self.here.name,
            num_admitted=self.here.num_admitted,
            last_unit_id=max(u for branch in self.branches.values() for u in branch.units),
        )
        model.position = step

    @rule(
        known=workers,
        data=st.data(),
        picks=st.lists(PICK, min_size=1, max_size=2, unique=True),
        state=st.sampled_from("ab"),
    )
    def sample_and_train(self, known: ModelWorker, data: st.DataObject, picks: list[int], state: str) -> None:
        """What most consumers do, beside each other, so that histories hold checkpoints of equal steps."""
        self.claim_and_settle(known, 1, data, "complete")
        for pick in picks:
            self.next_batch(pick, 1)
            self.checkpoint(pick, state)

    @rule(pick=PICK, dies=st.booleans())
    def reopen_consumer(self, pick: int, dies: bool) -> None:
        """The batches after the committed position come again."""
        name, model, old = self._picked(pick)
        if dies:
            rescue.declare_lost(self.store.run, old.session_id, reason="killed")
        else:
            old.close()
        self.open_consumers[name] = self.store.consumer(name)
        assert self.open_consumers[name].position == model.position
        if dies and model.handed_out > model.position:
            self._refused(old.advance)
        model.handed_out = model.position

    @rule(name=st.sampled_from(LATE))
    def make_consumer(self, name: str) -> None:
        """One that is first opened now gets all that its line holds: what was settled before the branch, and the branch's own."""
        if name in self.consumers:
            return
        before = settled_before(self.branches, self.here.name)
        self.open_consumers[name] = self.store.consumer(name)
        take_up(self.here, dict(zip(self._new_ids(len(before)), before, strict=True)))
        completed = [u for u, unit in self.units.items() if unit.state is UnitState.COMPLETED]
        self.consumers[name] = ModelConsumer(offered=completed)

    @rule(pick=PICK, count=st.integers(1, 2))
    def send_back(self, pick: int, count: int) -> None:
        """Offered groups go back to be sampled afresh; what another consumer has its fate of is dropped for this one."""
        name, model, consumer = self._picked(pick)
        unit_ids = sorted(model.offered)[:count]
        if not unit_ids:
            return
        consumer.close()
        session = WorkerSession(replace(self.store.run, consumer=name), "judge")
        role = assemble.take_role(session)
        assert role is not None
        assemble.requeue(session, role, unit_ids, reason="stale")
        session.end()
        self.open_consumers[name] = self.store.consumer(name)
        model.handed_out = model.position
        for unit_id in unit_ids:
            unit = self.units[unit_id]
            if any(unit_id in c.fates or unit_id in c.seen for c in self.consumers.values()):
                model.offered.remove(unit_id)
                model.fates[unit_id] = model.dropped[unit.place] = len(model.planned) + 1
                continue
            for other in self.consumers.values():
                other.offered.remove(unit_id)
            unit.state, unit.attempts, unit.is_parked = UnitState.READY, 0, False
            unit.requeues += 1

    # ---- branches

    @rule(target=workers, pick=PICK, back=st.integers(0, 3), reuse=st.booleans())
    @precondition(
        lambda self: len(self.branches) < MAX_BRANCHES and any(c.checkpoints for c in self.consumers.values())
    )
    def branch(self, pick: int, back: int, reuse: bool) -> MultipleResults[ModelWorker]:
        """The run goes on from a checkpoint of its line; what came later is never read."""
        names = sorted(name for name, c in self.consumers.items() if c.checkpoints)
        name = names[pick % len(names)]
        steps = sorted(self.consumers[name].checkpoints, reverse=True)
        step = steps[back % len(steps)]
        made_from = self.consumers[name].checkpoints[step]
        parent = self.branches[made_from.branch]
        self._leave()
        expected = plan_fork(parent, name, step, reuse=reuse)
        here = f"branch-{len(self.branches)}"
        made = create_branch(
            replace(self.store.run, consumer=name),
            checkpoint=made_from.checkpoint_id,
            name=here,
            reuse_trajectories=reuse,
        )
        assert (dict(made.positions), made.num_again, made.num_pristine + made.num_reused) == (
            expected.starts,
            len(expected.carried) - expected.num_unsettled,
            expected.num_unsettled,
        )
        self.store.close()
        self.store = open_store(self.folder / "run")
        assert self.store.run.branch == here
        self.here = ModelBranch(here)
        ids = self._new_ids(len(expected.carried))
        self.here = self.branches[here] = forked(parent, here, expected, (name, step), ids)
        for consumer, model in self.consumers.items():
            self.open_consumers[consumer] = self.store.consumer(consumer)
            assert self.open_consumers[consumer].position == model.position
        return multiple(self._start_worker(), self._start_worker())

    def _leave(self) -> None:
        """End everybody: a branch is made while nobody is at work."""
        for consumer in self.open_consumers.values():
            consumer.close()
        self.open_consumers.clear()
        for known in self.all_workers:
            self.close_worker(known)
            known.is_gone = True
            known.remembered.clear()
        self.store.close()
        self.store = open_store(self.folder / "run")

    # ---- upkeep

    @rule()
    def retry_failed(self) -> None:
        failed = {u for u, unit in self.units.items() if unit.state is UnitState.FAILED}
        assert set(retry_failed(self.store.run)) == failed
        for unit_id in failed:
            unit = self.units[unit_id]
            unit.state, unit.attempts, unit.crashes = UnitState.READY, 0, 0

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
                for name in self.consumers
            }
        told = {
            unit_id: (u.state, u.fence, u.attempts, u.crashes, u.parks, u.requeues)
            for unit_id, u in self.units.items()
        }
        assert told == {
            unit_id: (u.state, u.fence, u.attempts, u.crashes, u.parks, u.requeues)
            for unit_id, u in found.items()
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

    @invariant()
    def nothing_is_lost_or_repeated(self) -> None:
        """Every admitted prompt of the line is in one place for each consumer, whatever branches it came through."""
        if not hasattr(self, "store"):
            return
        admitted = _places(self.here.num_admitted)
        expected = sorted((epoch, _row_of_all(name, row)) for name, epoch, row in admitted)
        for name in self.consumers:
            assert places_of(self.here, name) == expected, name

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
            if unit.is_parked:
                assert _tokens(saved_members(grant.continuation).values()) == unit.saved
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


def _members(grant: Grant, *, status: str = "finished", num_tokens: int = 3) -> list[Member]:
    return [
        Member(
            n,
            status,
            [grant.unit_id, grant.fence, n][:num_tokens],
            [-0.5] * num_tokens,
            "",
            "stop",
            float(n),
        )
        for n in range(grant.profile.num_samples)
    ]


def _tokens(members: Iterable[Member]) -> list[list[int]]:
    return [list(m.response_tokens) for m in members]
