"""Hooks at admission: data sources whose rows and state come with the work, curricula whose state does."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import strawflow
from strawflow import faults
from strawflow.errors import ConfigError, ConflictError, InvalidInputError
from strawflow.flow import admit, journal, rebuild
from strawflow.flow.backup import backup
from strawflow.flow.branch import create_branch
from strawflow.flow.check import check
from strawflow.flow.claim import PromptShelf
from strawflow.flow.mixer import Mixture
from strawflow.flow.mixture import Hooks, Order, SetStanding, Steering
from strawflow.flow.restore import restore
from strawflow.flow.run import Run, create_run, open_run
from strawflow.flow.session import WorkerSession
from strawflow.index import datasets, mixtures, units
from strawflow.testing.runs import SmallRun, prompt_lines, small_config
from tests.contract.lost_index import lose_index, on_sqlite

Rows = Sequence[Mapping[str, Any]]


def counts_up(order: Order, state: Any) -> tuple[Rows, Any]:
    """Prompts of a source whose state is the next number."""
    first = 0 if state is None else state["next"]
    numbers = range(first, first + order.count)
    return [{"prompt": f"made {number}"} for number in numbers], {"next": first + order.count}


ALONE = [{"name": "made", "source": "mine:counts_up"}]
BESIDE_A_FILE = [*ALONE, {"name": "prompts", "weight": 1.0}]
HOOKS = Hooks(sources={"made": counts_up})


@pytest.fixture
def make(tmp_path: Path, settings: dict[str, str]) -> Iterator[Callable[..., SmallRun]]:
    made: list[SmallRun] = []

    def create(sets: Sequence[Mapping[str, Any]] = BESIDE_A_FILE, **more: str) -> SmallRun:
        own = {"data.prompts": json.dumps(sets), "rollout.prompts_per_step": "4", **more}
        small = SmallRun(create_run(tmp_path / "run", small_config({**settings, **own})))
        made.append(small)
        path = tmp_path / "prompts.jsonl"
        path.write_text(prompt_lines(16), encoding="utf-8")
        if any(one["name"] == "prompts" for one in sets):
            small.enqueue(path)
        small.publish(0, admit_due=False)
        return small

    yield create
    for small in made:
        small.close()


def due(small: SmallRun, hooks: Hooks = HOOKS) -> int:
    return admit.admit_due(small.session("rollout"), hooks)


def prompts_of(run: Run) -> list[str]:
    """Return the prompts of the units of the run's branch, in order of admission."""
    with run.index.read() as connection:
        found = units.listed(connection, run.branch, limit=10_000)
    with WorkerSession(run, "reader") as session:
        shelf = PromptShelf(session)
        return [shelf.read(u.segment_id, u.position).prompt for u in found]


def made_in(prompts: Sequence[str]) -> list[int]:
    return [int(p.removeprefix("made ")) for p in prompts if p.startswith("made ")]


def state_of(run: Run) -> Any:
    with run.index.read() as connection:
        stored = datasets.source_state(connection, run.branch, "made")
    return None if stored is None else json.loads(stored)


def test_rows_state_and_groups_come_together_and_go_on_after_a_restart(
    make: Callable[..., SmallRun],
) -> None:
    small = make(ALONE)
    assert due(small) == 8
    assert (prompts_of(small.run), state_of(small.run)) == ([f"made {n}" for n in range(8)], {"next": 8})
    root = small.run.root
    small.close()
    with SmallRun(open_run(root)) as again:
        again.trainer()
        orders: list[Order] = []

        def tells(order: Order, state: Any) -> tuple[Rows, Any]:
            orders.append(order)
            return counts_up(order, state)

        again.publish(1, admit_due=False)
        assert due(again, Hooks(sources={"made": tells})) == 4
        assert orders == [Order("made", 4, num_made=8, step=1)]
        assert made_in(prompts_of(again.run)) == list(range(12))
        assert check(again.run).findings == []


@on_sqlite
def test_a_source_and_a_file_are_mixed_by_weight(make: Callable[..., SmallRun]) -> None:
    small = make()
    assert due(small) == 8
    found = prompts_of(small.run)
    assert made_in(found) == [0, 1, 2, 3]
    assert [p.startswith("made") for p in found] == [True, False] * 4


def test_what_a_refused_admission_had_made_is_not_there_and_is_made_again(
    make: Callable[..., SmallRun],
) -> None:
    small = make(ALONE)
    other = SmallRun(open_run(small.run.root))
    states: list[Any] = []

    def is_overtaken(order: Order, state: Any) -> tuple[Rows, Any]:
        states.append(state)
        if len(states) == 1:
            assert admit.admit_more(other.session("rollout"), count=0) == 0
            assert due(other) == 8
        return counts_up(order, state)

    try:
        assert due(small, Hooks(sources={"made": is_overtaken})) == 0
    finally:
        other.close()
    assert states == [None]
    small.publish(1, admit_due=False)
    assert due(small) == 4
    assert made_in(prompts_of(small.run)) == list(range(12))


@on_sqlite
def test_a_source_that_has_too_little_loses_its_turns_and_the_others_go_on(
    make: Callable[..., SmallRun],
) -> None:
    small = make()

    def has_one(order: Order, state: Any) -> tuple[Rows, Any]:
        return ([{"prompt": "made 0"}], True) if state is None else ([], state)

    assert due(small, Hooks(sources={"made": has_one})) == 8
    found = prompts_of(small.run)
    assert made_in(found) == [0]
    small.publish(1, admit_due=False)
    assert due(small, Hooks(sources={"made": has_one})) == 4
    assert made_in(prompts_of(small.run)) == [0]
    assert len(prompts_of(small.run)) == 12


@on_sqlite
def test_alone_and_with_nothing_it_is_waited_for(make: Callable[..., SmallRun]) -> None:
    small = make(ALONE)
    assert due(small, Hooks(sources={"made": lambda order, state: ([], state)})) == 0
    assert (prompts_of(small.run), state_of(small.run)) == ([], None)
    assert due(small) == 8


def test_the_same_prompt_made_again_is_another_one(make: Callable[..., SmallRun]) -> None:
    small = make(ALONE)

    def always(order: Order, state: Any) -> tuple[Rows, Any]:
        return [{"prompt": "again"}] * order.count, None

    assert due(small, Hooks(sources={"made": always})) == 8
    small.publish(1, admit_due=False)
    assert due(small, Hooks(sources={"made": always})) == 4
    assert prompts_of(small.run) == ["again"] * 12
    assert check(small.run).findings == []


WRONG: list[tuple[Rows, Any, str]] = [
    ([{"prompt": str(n)} for n in range(9)], None, "made 9 prompts where 8 were wanted"),
    ([{"prompt": "1"}, {"label": "2"}], None, "row 2 has no prompt"),
    ([{"prompt": ""}], None, "mine:counts_up"),
    ([{"prompt": "1"}], {1, 2}, "the state of data source mine:counts_up must be JSON"),
    ([{"prompt": "1"}], "x" * (1 << 20), "at most 1048576 are kept"),
]


@on_sqlite
def test_what_a_source_does_wrong_is_told_and_nothing_is_stored(make: Callable[..., SmallRun]) -> None:
    small = make(ALONE)
    for rows, state, told in WRONG:
        made = (rows, state)
        with pytest.raises((ConfigError, InvalidInputError), match=told):
            due(small, Hooks(sources={"made": lambda order, before, made=made: made}))
    assert (prompts_of(small.run), state_of(small.run)) == ([], None)
    with small.run.index.read() as connection:
        assert datasets.segments_of(connection, "made") == []


@on_sqlite
def test_nobody_else_fills_the_set_of_a_source(make: Callable[..., SmallRun], tmp_path: Path) -> None:
    small = make(ALONE)
    with pytest.raises(ConfigError, match="are made by mine:counts_up: a rollout worker of ours calls it"):
        due(small, Hooks())
    path = tmp_path / "more.jsonl"
    path.write_text(prompt_lines(3))
    with pytest.raises(InvalidInputError, match="are made by mine:counts_up as the run goes on"):
        small.enqueue(path, dataset="made")


def test_a_branch_goes_back_to_the_state_of_its_checkpoint_and_a_rebuild_brings_all_of_it_back(
    make: Callable[..., SmallRun],
) -> None:
    small = make()
    small.hooks = HOOKS
    due(small)
    small.advance(1)
    assert due(small) == 0, "advance published, and admitted what that allowed"
    before, root = prompts_of(small.run), small.run.root
    assert len(before) == 12
    small.close()
    lose_index(small.run)
    assert rebuild.rebuild(root).rebuilt.losses == []
    with SmallRun(open_run(root)) as again:
        assert (prompts_of(again.run), state_of(again.run)) == (before, {"next": 6})
        again.session("reader").end()
        again.sessions.clear()
        create_branch(again.run, checkpoint="1", name="second")
    with SmallRun(open_run(root)) as second:
        assert second.run.branch == "second"
        assert state_of(second.run) == {"next": 4}

        second.publish(1, admit_due=False)
        assert due(second, Hooks(sources={"made": other_numbers})) == 4
        found = prompts_of(second.run)
        assert found[:4] == before[4:8], "admitted by the checkpoint and not trained"
        assert made_in(found[4:]) == [400, 500], "none of the future that was left"
        assert state_of(second.run) == {"next": 6}
    lose_index(second.run)
    assert rebuild.rebuild(root).rebuilt.losses == []
    with SmallRun(open_run(root)) as second:
        assert (prompts_of(second.run), state_of(second.run)) == (found, {"next": 6})
        assert check(second.run).findings == []


@on_sqlite
def test_an_index_restored_from_before_goes_on_where_the_journal_ends(make: Callable[..., SmallRun]) -> None:
    small = make()
    due(small)
    saved = backup(small.run).folder
    small.sample()
    small.publish(1, admit_due=False)
    due(small)
    before, stood, root = prompts_of(small.run), mixture_of(small.run), small.run.root
    assert stood.version == 2
    small.close()
    restore(root, saved, may_replace=True)
    with SmallRun(open_run(root)) as again:
        assert (prompts_of(again.run), state_of(again.run)) == (before, {"next": 6})
        assert mixture_of(again.run) == stood
        assert check(again.run).findings == []


def other_numbers(order: Order, state: Any) -> tuple[Rows, Any]:
    rows, after = counts_up(order, state)
    return [{"prompt": f"{row['prompt']}00"} for row in rows], after


@on_sqlite
@pytest.mark.parametrize("is_met", [True, False], ids=["answered", "never seen"])
def test_of_two_that_made_the_same_segment_a_rebuild_takes_the_one_that_was_committed(
    make: Callable[..., SmallRun], monkeypatch: pytest.MonkeyPatch, is_met: bool
) -> None:
    small = make(ALONE)
    with monkeypatch.context() as patch:
        # As a kill does it: the entries are durable, the transaction is not, and nothing withdraws them.
        patch.setattr(journal, "_withdraw", lambda session, entries: None)
        patch.setenv(faults.VARIABLE, "admit.before_commit:1:raise")
        with pytest.raises(faults.InjectedFaultError):
            due(small, Hooks(sources={"made": other_numbers}))
    faults.reset()
    assert due(small) == 8
    if is_met:
        small.sample()
    before, root = prompts_of(small.run), small.run.root
    small.close()
    lose_index(small.run)
    assert rebuild.rebuild(root).rebuilt.losses == []
    with SmallRun(open_run(root)) as again:
        assert (prompts_of(again.run), state_of(again.run)) == (before, {"next": 8})
        again.trainer()
        again.publish(1, admit_due=False)
        assert due(again) == 4
        assert made_in(prompts_of(again.run)) == list(range(12)), "the rows of the killed one are nobody's"
        assert check(again.run).findings == []


# ---- curricula

TWO = [{"name": "prompts", "weight": 1.0}, {"name": "hard", "weight": 0.0}]


def with_hard(small: SmallRun, tmp_path: Path) -> SmallRun:
    path = tmp_path / "hard.jsonl"
    path.write_text(prompt_lines(16, first=100), encoding="utf-8")
    small.enqueue(path, dataset="hard")
    return small


def drawn(run: Run) -> list[str]:
    with run.index.read() as connection:
        found = units.listed(connection, run.branch, limit=10_000)
        dataset_of = datasets.of_segments(connection, (u.segment_id for u in found))
    return [dataset_of[u.segment_id] for u in found]


def mixture_of(run: Run) -> Mixture:
    with run.index.read() as connection:
        return Mixture.from_text(mixtures.find(connection, run.branch))


def test_a_curriculum_sees_rewards_by_set_and_its_weights_and_state_hold_from_then_on(
    make: Callable[..., SmallRun], tmp_path: Path
) -> None:
    small = with_hard(make(TWO, **{"rollout.curriculum": "mine:harder"}), tmp_path)
    asked: list[tuple[int, Mapping[str, SetStanding], Any]] = []

    def harder(step: int, sets: Mapping[str, SetStanding], state: Any) -> Steering:
        asked.append((step, sets, state))
        level = 0 if state is None else state["level"] + 1
        return Steering({"prompts": 1 - level / 2, "hard": level / 2}, {"level": level}, {"hard": 7})

    hooks = Hooks(harder)
    assert due(small, hooks) == 8
    assert drawn(small.run) == ["prompts"] * 8
    assert due(small, hooks) == 0
    assert len(asked) == 1, "it is asked when there is something to admit, and only then"
    small.sample()
    small.publish(1, admit_due=False)
    assert due(small, hooks) == 4
    assert Counter(drawn(small.run)[8:]) == {"prompts": 2, "hard": 2}
    step, sets, state = asked[-1]
    assert (step, state) == (1, {"level": 0})
    assert sets == {
        "prompts": SetStanding(1.0, 16, 8, 0, num_groups=8, mean_reward=0.5),
        "hard": SetStanding(0.0, 16, 0, 0, num_groups=0, mean_reward=None),
    }
    with small.run.index.read() as connection:
        new = units.listed(connection, small.run.branch, limit=100)[8:]
    of_hard = [u.unit_id for u, name in zip(new, drawn(small.run)[8:], strict=True) if name == "hard"]
    assert [g.unit_id for g in small.claim(2)] == of_hard, "granted first: it gave them priority"
    assert mixture_of(small.run).curriculum == {"level": 1}
    assert mixture_of(small.run).weights == {"prompts": 0.5, "hard": 0.5}


def test_draws_from_what_another_drew_on_from_are_refused(
    make: Callable[..., SmallRun], tmp_path: Path
) -> None:
    small = with_hard(make(TWO), tmp_path)
    assert due(small) == 8
    with small.run.index.read() as connection:
        stood = mixtures.find(connection, "main")
    with pytest.raises(ConflictError), small.run.index.begin() as connection:
        mixtures.replace(connection, "main", expected=None, new="{}")
    with small.run.index.begin() as connection:
        mixtures.replace(connection, "main", expected=stood, new=Mixture(2).to_text())
    with pytest.raises(ConflictError), small.run.index.begin() as connection:
        mixtures.replace(connection, "main", expected=stood, new="{}")
    assert mixture_of(small.run) == Mixture(2)


def test_the_state_of_a_curriculum_goes_back_with_a_branch_and_comes_back_with_a_rebuild(
    make: Callable[..., SmallRun], tmp_path: Path
) -> None:
    small = with_hard(make(TWO, **{"rollout.curriculum": "mine:counts"}), tmp_path)
    hooks = Hooks(lambda step, sets, state: Steering({"prompts": 1.0}, (state or 0) + 1))
    due(small, hooks)
    small.sample()
    batch = small.plan()
    assert batch is not None
    small.train(1)  # its publish admits without the hook: by the weights and with the state that stand
    assert mixture_of(small.run).curriculum == 1
    small.publish(2, admit_due=False)
    root = small.run.root
    small.close()
    lose_index(small.run)
    assert rebuild.rebuild(root).rebuilt.losses == []
    with SmallRun(open_run(root)) as again:
        stood = mixture_of(again.run)
        assert (stood.version, stood.curriculum) == (2, 1)
    with SmallRun(open_run(root)) as again:
        create_branch(again.run, checkpoint="1", name="second")
    with SmallRun(open_run(root)) as second:
        assert (mixture_of(second.run).version, mixture_of(second.run).curriculum) == (1, 1)
        second.publish(1, admit_due=False)
        assert due(second, hooks) == 4
        assert mixture_of(second.run).curriculum == 2


@on_sqlite
def test_difficulties_reach_the_data_source_of_their_set(make: Callable[..., SmallRun]) -> None:
    small = make(ALONE, **{"rollout.curriculum": "mine:deep"})
    seen: list[Any] = []

    def source(order: Order, state: Any) -> tuple[Rows, Any]:
        seen.append(order.difficulty)
        return counts_up(order, state)

    hooks = Hooks(
        lambda step, sets, state: Steering({"made": 1.0}, difficulties={"made": {"digits": step + 3}}),
        {"made": source},
    )
    assert due(small, hooks) == 8
    assert seen == [{"digits": 3}]


LEAVE_NOTHING: list[tuple[dict[str, float], str]] = [
    ({"prompts": 0.0, "hard": 0}, r"rollout.curriculum: the weights are 0 \(prompts\) \+ 0 \(hard\) = 0"),
    ({}, "nothing could be drawn"),
    ({"prompts": -1.0, "hard": 2.0}, "gave 'prompts' the weight -1"),
    ({"prompts": float("nan")}, "the weight nan"),
    ({"words": 1.0}, "spoke of 'words'; the prompt sets are prompts, hard"),
    ({"prompts": 0.5, "hard": 0.5}, "prompt set 'hard' has weight 0.5 and holds no prompts"),
]


@on_sqlite
def test_weights_that_leave_nothing_to_draw_are_refused_with_the_arithmetic(
    make: Callable[..., SmallRun],
) -> None:
    small = make(TWO, **{"rollout.curriculum": "mine:wrong"})
    for weights, told in LEAVE_NOTHING:
        steering = Steering(weights)
        with pytest.raises(ConfigError, match=told):
            due(small, Hooks(lambda step, sets, state, steering=steering: steering))
    assert drawn(small.run) == []


@on_sqlite
def test_programs_that_admit_by_themselves_go_on_with_what_the_curriculum_said_last(
    make: Callable[..., SmallRun], tmp_path: Path
) -> None:
    small = with_hard(make(TWO, **{"rollout.curriculum": "mine:hard_alone"}), tmp_path)
    due(small, Hooks(lambda step, sets, state: Steering({"hard": 1.0}, "met")))
    with strawflow.open(small.run.root) as store:
        assert store.admit(3) == 3
    assert drawn(small.run) == ["hard"] * 11
