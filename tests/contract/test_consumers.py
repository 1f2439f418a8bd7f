"""Several consumers over the same trajectories: what one sends back, drops or publishes does not disturb the others."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import sqlalchemy as sa

from strawflow.consumer import Batch, Consumer
from strawflow.errors import ConflictError, InvalidInputError
from strawflow.flow import assemble, consume, rebuild
from strawflow.flow.check import check
from strawflow.flow.run import open_run
from strawflow.index import consumers, leases, tallies, units, weights
from strawflow.index import tables as t
from strawflow.index.consumers import Assignment
from strawflow.index.engine import Connection
from strawflow.index.leases import Outcome
from strawflow.states import WeightState
from strawflow.store import Store
from strawflow.testing.postgres import PostgresServer
from strawflow.testing.runs import SmallRun, made_up_plan, small_run
from tests.contract.lost_index import all_ready_again, die, essence_of, lose_index
from tests.contract.stored import await_blocked, end_sessions


@pytest.fixture
def small(tmp_path: Path, settings: dict[str, str]) -> Iterator[SmallRun]:
    with small_run(
        tmp_path, settings={**settings, "lease.heartbeat_s": "3000", "lease.ttl_s": "3600"}
    ) as made:
        yield made


def requeue(small: SmallRun, unit_id: int) -> None:
    assemble.requeue(small.session("assemble"), small.assembler(), [unit_id], reason="stale")


def next_of(consumer: Consumer, num_groups: int = 1) -> Batch:
    batch = consumer.next_batch(num_groups)
    assert batch is not None
    return batch


def units_in(batch: Batch) -> list[int]:
    return list(dict.fromkeys(batch.rows["unit_id"].to_pylist()))


def fates(small: SmallRun, unit_id: int) -> dict[str, tuple[str, str | None]]:
    with small.run.index.read() as connection:
        found = consumers.fates_of(connection, small.run.branch, unit_id)
    return {consumer: (a.outcome, a.reason) for consumer, a, _ in found}


def offered(small: SmallRun, consumer: str) -> list[int]:
    with small.run.index.read() as connection:
        found = consumers.offered(connection, small.run.branch, consumer, purpose="train", limit=100)
    return [u.unit_id for u in found]


def test_packed_batches_are_told_for_every_token_as_they_are(small: SmallRun) -> None:
    small.sample()
    assert small.plan() is not None
    end_sessions(small)
    with Store(small.run).consumer("trainer") as trainer:
        batch = next_of(trainer)
        assert batch.rows["loss_mask"].null_count == 0
        with pytest.raises(InvalidInputError, match="take its `rows`"):
            batch.with_every_token()


# ---- sending back


def test_a_unit_sent_back_is_taken_from_all_and_offered_to_all_once_it_is_sampled_again(
    small: SmallRun,
) -> None:
    with Store(small.run).consumer("export") as export:
        small.sample(2)
        requeue(small, 1)
        assert (offered(small, "trainer"), offered(small, "export")) == ([2], [2])
        assert units_in(next_of(export)) == [2]
        assert export.next_batch(1) is None
        assert small.sample(1) == 1
        assert offered(small, "trainer") == [1, 2]
        assert units_in(next_of(export)) == [1]
        assert export.next_batch(1) is None
    end_sessions(small)
    assert check(small.run).findings == []


def test_a_unit_that_another_consumer_trained_keeps_its_trajectories_and_is_dropped_here(
    small: SmallRun,
) -> None:
    with Store(small.run).consumer("export") as export:
        small.sample(2)
        first = next_of(export)
        requeue(small, 1)
        assert fates(small, 1) == {"export": ("trained", None), "trainer": ("dropped", "stale")}
        requeue(small, 2)
        assert fates(small, 2) == {}
        small.sample()
    with Store(small.run).consumer("export") as export:
        again, second = next_of(export), next_of(export)
        assert again.rows.equals(first.rows)
        assert units_in(second) == [2]
        assert second.rows["fence"].to_pylist() == [2, 2]
    with small.run.index.read() as connection:
        assert consumers.num_dropped(connection, "main", "trainer", purpose="train") == 1
    before = all_ready_again(essence_of(small.run.index))
    die(small)
    root = lose_index(small.run)
    rebuild.rebuild(root)
    with SmallRun(open_run(root)) as rebuilt:
        after = essence_of(rebuilt.run.index)
        assert {name for name in before if before[name] != after[name]} == set()


def test_a_batch_or_a_drop_of_a_unit_that_was_sent_back_is_refused(small: SmallRun) -> None:
    small.sample()
    session, role = small.session("assemble"), small.assembler()
    groups = assemble.offered(session, purpose="train", limit=4)
    rows = assemble.read_trajectories(session, groups)
    requeue(small, groups[-1].unit_id)
    with pytest.raises(ConflictError, match="sent back"):
        assemble.plan_batch(session, role, made_up_plan(1, groups, rows))
    with pytest.raises(ConflictError, match="sent back"):
        assemble.drop(session, role, [Assignment(0, groups[-1].unit_id, "dropped", "failed_members")])
    with pytest.raises(ConflictError, match="sent back"):
        requeue(small, groups[-1].unit_id)
    assert fates(small, groups[-1].unit_id) == {}
    assert assemble.last_planned(session) == 0


@pytest.mark.parametrize("first", ["requeue", "export"])
def test_of_a_requeue_and_another_consumers_fate_the_second_waits_on_postgresql(
    tmp_path: Path, postgres_server: PostgresServer, first: str
) -> None:
    settings = {"run.index_url": postgres_server.new_url()}
    with small_run(tmp_path, settings=settings) as small, ExitStack() as opened:
        export = opened.enter_context(Store(small.run).consumer("export"))
        small.sample(1)
        small.assembler()
        pool = opened.enter_context(ThreadPoolExecutor(1))
        with small.run.index.begin() as connection:
            if first == "requeue":
                assert consumers.hold_unfated(connection, "main", [1]) == {1: None}
                consumers.withdraw_from_all(connection, "main", [1])
                second = pool.submit(export.next_batch, 1)
            else:
                assert consumers.withdraw(connection, "main", "export", [1]) == 1
                dropped = [Assignment(0, 1, "dropped", "no use")]
                consumers.assign(connection, "main", "export", dropped, batch_id=None, at_step=1)
                second = pool.submit(requeue, small, 1)
            await_blocked(postgres_server, small.run)
            assert not second.done()
        if first == "requeue":
            assert second.result(timeout=30) is None
            assert fates(small, 1) == {}
            assert offered(small, "export") == []
        else:
            second.result(timeout=30)
            assert fates(small, 1) == {"export": ("dropped", "no use"), "trainer": ("dropped", "stale")}


@pytest.mark.parametrize("what", ["completed", "sent back"])
def test_a_consumer_made_beside_a_change_sees_what_came_of_it_on_postgresql(
    tmp_path: Path, postgres_server: PostgresServer, what: str
) -> None:
    settings = {"run.index_url": postgres_server.new_url()}
    with small_run(tmp_path, settings=settings) as small, ThreadPoolExecutor(1) as pool:
        small.sample(2)
        small.claim(1)
        with small.run.index.begin() as connection:
            if what == "completed":
                complete_like(connection, small, 3, like=1)
                consumers.offer(connection, [3])
            else:
                consumers.hold_unfated(connection, "main", [1])
                consumers.withdraw_from_all(connection, "main", [1])
                units.requeue(connection, 1, reason="stale")
            making = pool.submit(lambda: Store(small.run).consumer("export").close())
            await_blocked(postgres_server, small.run)
        making.result(timeout=30)
        assert offered(small, "export") == ([1, 2, 3] if what == "completed" else [2])
        assert offered(small, "export") == offered(small, "trainer")


def complete_like(connection: Connection, small: SmallRun, unit_id: int, *, like: int) -> None:
    """Complete a leased unit with the trajectories of another."""
    u, leased = units.find(connection, like), units.find(connection, unit_id)
    assert u.extent_id is not None
    result = Outcome(unit_id, leased.fence, 1, u.extent_id, u.row_start or 0, u.row_count or 0, 0, 0.5, 5)
    assert leases.complete(connection, small.session("rollout").session_id, [result]) == {unit_id}


class Undone(Exception):
    """Rolls a transaction back."""


@pytest.mark.parametrize("seconds", [2, pytest.param(15, marks=pytest.mark.long)])
def test_consumers_that_take_and_send_back_the_same_units_never_deadlock_on_postgresql(
    tmp_path: Path, postgres_server: PostgresServer, seconds: int
) -> None:
    settings = {"run.index_url": postgres_server.new_url(), "rollout.prompts_per_step": "32"}
    with small_run(tmp_path, settings=settings, num_prompts=64) as small:
        with small.run.index.begin() as connection:
            consumers.ensure(connection, "main", "export")
        grants = small.claim(64)
        for grant in reversed(grants):  # offers lie in the table in another order than in their key
            small.complete([grant])
        with small.run.index.begin() as connection:
            connection.execute(
                sa.text("ANALYZE")
            )  # as it does by itself in time: plans follow the number of rows
        ends = time.monotonic() + seconds

        def often(act: Callable[[Connection, list[int]], int]) -> int:
            """Repeat what a transaction does with all units, in any order, and undo it; returns how often it was done."""
            order, times = random.Random(seconds), 0
            while time.monotonic() < ends:
                units = order.sample([g.unit_id for g in grants], len(grants))
                with suppress(Undone), small.run.index.begin() as connection:
                    assert act(connection, units) == len(grants)
                    raise Undone
                times += 1
            return times

        def take(consumer: str) -> Callable[[Connection, list[int]], int]:
            return lambda connection, units: consumers.withdraw(connection, "main", consumer, units)

        def send_back(connection: Connection, units: list[int]) -> int:
            held = consumers.hold_unfated(connection, "main", units)
            consumers.withdraw_from_all(connection, "main", units)
            return len(held)

        with ThreadPoolExecutor(4) as pool:
            running = [
                pool.submit(often, act) for act in (take("export"), take("export"), send_back, send_back)
            ]
            assert min(r.result() for r in running) > 0


# ---- weights


def states_of(small: SmallRun) -> dict[int, WeightState]:
    with small.run.index.read() as connection:
        rows = connection.execute(sa.select(t.weight_versions.c.version_id, t.weight_versions.c.step))
        return {
            row.step: found.state
            for row in rows.all()
            if (found := weights.find(connection, row.version_id)) is not None
        }


def test_a_consumer_that_only_reads_leaves_the_weights_alone(small: SmallRun) -> None:
    small.advance(2)
    serving = small.serving()
    with Store(small.run).consumer("export"):
        assert small.serving() == serving
    assert set(states_of(small).values()) == {WeightState.PUBLISHED}


@pytest.mark.parametrize("told", ["told", "as an earlier program left it"])
def test_weights_that_no_checkpoint_covers_die_when_their_own_trainer_is_followed(
    small: SmallRun, told: str
) -> None:
    small.advance(1)
    small.publish(2, content="covered by no checkpoint", admit_due=False)
    if told != "told":
        with small.run.index.begin() as connection:
            connection.execute(sa.delete(t.tallies).where(t.tallies.c.name.startswith("published/")))
    end_sessions(small)
    with Store(small.run).consumer("export"):
        assert states_of(small)[2] is WeightState.PUBLISHED
    assert consume.take_over(small.session("train")) is not None
    assert states_of(small) == {
        0: WeightState.PUBLISHED,
        1: WeightState.PUBLISHED,
        2: WeightState.DEAD,
    }


def test_a_rebuilt_index_knows_whose_the_weights_are(small: SmallRun) -> None:
    small.advance(1)
    die(small)
    root = lose_index(small.run)
    rebuild.rebuild(root)
    with SmallRun(open_run(root)) as again, again.run.index.read() as connection:
        assert consumers.publishers(connection, "main") == {"trainer"}


def test_tallies_are_told_by_their_whole_prefix(small: SmallRun) -> None:
    with small.run.index.begin() as connection:
        tallies.add(connection, "main", "dropped/a_b/train", 1)
        tallies.add(connection, "main", "dropped/a-b/train", 2)
        assert tallies.starting_with(connection, "main", "dropped/a_b/") == {"dropped/a_b/train": 1}
