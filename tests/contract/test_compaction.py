"""Compaction: what is named moves together with its bytes and digests unchanged, while readers go on and kills spoil nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest

from strawflow import faults
from strawflow.errors import ConflictError, InvalidInputError
from strawflow.flow import assemble, consume, history, pins, rescue
from strawflow.flow import compact as compacting
from strawflow.flow import sweep as sweeping
from strawflow.flow.claim import PromptShelf
from strawflow.flow.index_place import SWEEP_BLOCKED
from strawflow.flow.placed import read_extent, read_extents
from strawflow.flow.run import Run
from strawflow.flow.session import WorkerSession
from strawflow.flow.sweep import Item
from strawflow.ids import Extent
from strawflow.index import meta, packs
from strawflow.index.pins import PinKind
from strawflow.packs import writer
from strawflow.packs.reader import PackReader
from strawflow.packs.writer import PackWriter
from strawflow.records import SCHEMAS
from strawflow.states import PackState
from strawflow.testing.invariants import batch_digests
from strawflow.testing.pack_rows import made_up_rows
from strawflow.testing.runs import SmallRun, small_run
from tests.conftest import CliResult
from tests.contract.stored import (
    NO_GRACE,
    assert_sound,
    end_sessions,
    kill_cli,
    pack_files,
    packs_of,
    upkeep,
    with_storage,
)


@pytest.fixture
def settings(settings: dict[str, str]) -> dict[str, str]:
    return {**NO_GRACE, "trainer.steps": "6", **settings}


@pytest.fixture
def small(tmp_path: Path, settings: dict[str, str]) -> Iterator[SmallRun]:
    with small_run(tmp_path, num_prompts=32, settings=settings) as made:
        yield made
        assert_sound(made.run)


def half_dead(small: SmallRun) -> str:
    """Complete eight units one by one and take five results back; returns the path of the pack, sealed."""
    for _ in range(8):
        small.sample(1)
    role, session = small.assembler(), small.session("assemble")
    offered = assemble.offered(session, purpose="train", limit=100)
    assemble.requeue(session, role, [u.unit_id for u in offered[:5]], reason="told to by the test")
    end_sessions(small, "rollout")
    (pack,) = packs_of(small.run, "trajectory")
    return pack.path


def extents_of(run: Run, kind: str) -> dict[int, Extent]:
    with run.index.read() as connection:
        return {
            e.extent_id: e
            for pack in packs.listed(connection)
            if pack.kind == kind
            for e in packs.extents_of_pack(connection, pack.pack_id)
        }


def rows_of(run: Run, kind: str) -> dict[int, pa.RecordBatch]:
    return dict(read_extents(run, PackReader(run.root), extents_of(run, kind)))


def of_kind(items: list[Item], kind: str) -> list[Item]:
    return [item for item in items if item.subject.startswith(f"packs/{kind}/")]


def compact(run: Run, *, min_live: float = 0.5, kind: str = "trajectory") -> list[Item]:
    """Compact; returns what was done to packs of one kind."""
    with upkeep(run) as session:
        return of_kind(compacting.compact(session, min_live=min_live).items, kind)


def sweep(run: Run) -> list[Item]:
    with upkeep(run) as session:
        return sweeping.sweep(session).items


# ---- what moves


def test_named_extents_keep_ids_rows_and_digests_and_the_file_goes_with_a_sweep(small: SmallRun) -> None:
    path = half_dead(small)
    sweep(small.run)
    before, rows = extents_of(small.run, "trajectory"), rows_of(small.run, "trajectory")
    assert len(before) == 3
    size = (small.run.root / path).stat().st_size
    planned = compacting.plan_compaction(small.run)
    assert [i.subject for i in planned.items] == [path]
    assert extents_of(small.run, "trajectory") == before
    assert compact(small.run) == planned.items
    after = extents_of(small.run, "trajectory")
    assert {e.path for e in after.values()}.isdisjoint({path})
    told = [(i, e.digests, e.length, e.num_rows) for i, e in after.items()]
    assert told == [(i, e.digests, e.length, e.num_rows) for i, e in before.items()]
    assert rows_of(small.run, "trajectory") == rows
    assert path in pack_files(small.run)
    assert [(i.what, i.subject, i.num_bytes) for i in sweep(small.run)] == [("file", path, size)]
    (new,) = packs_of(small.run, "trajectory")
    assert (new.state, new.num_rows) == (PackState.SEALED, 6)
    with pa.ipc.open_file(small.run.root / new.path) as file:  # an ordinary Arrow file
        assert file.read_all().num_rows == 6
    assert compact(small.run) == []


def test_extents_that_nothing_names_are_left_behind(small: SmallRun) -> None:
    half_dead(small)
    compact(small.run)
    assert len(extents_of(small.run, "trajectory")) == 3


def test_batches_keep_their_digests_and_are_trained_after_it(small: SmallRun) -> None:
    small.advance(1)
    small.session("assemble").packs.append("batch", made_up_rows("batch", 50))  # named by nothing
    small.sample()
    planned = small.plan()
    assert planned is not None
    end_sessions(small, "assemble", "rollout")
    before = batch_digests(history.batches(small.run))
    (path,) = pack_files(small.run, "batch")
    assert [i.subject for i in compact(small.run, kind="batch")] == [path]
    sweep(small.run)
    assert path not in pack_files(small.run)
    assert batch_digests(history.batches(small.run)) == before
    assert_sound(small.run)
    small.train(planned.step)
    small.advance(2)


def test_small_packs_of_finished_workers_are_merged_so_that_files_stay_few(small: SmallRun) -> None:
    for _ in range(8):
        small.sample(1)
        end_sessions(small, "rollout")
    before = rows_of(small.run, "trajectory")
    assert len(pack_files(small.run, "trajectory")) == 8
    compact(small.run)
    sweep(small.run)
    assert len(pack_files(small.run, "trajectory")) == 1
    assert rows_of(small.run, "trajectory") == before
    for _ in range(3):  # however often it is done, what is merged is not written again for nothing
        assert compact(small.run) == []


def test_what_a_live_worker_wrote_just_now_and_what_is_pinned_stays_as_it_is(small: SmallRun) -> None:
    for _ in range(4):
        small.sample(1)
        end_sessions(small, "rollout")
    pinned, *_ = sorted(pack_files(small.run, "trajectory"))
    made = pins.pin(small.run, PinKind.PACK, pinned, reason="polars reads it")
    small.sample(1)
    small.session("rollout").packs.seal("trajectory")
    assert compact(small.run) == []  # three are small and quiet, too few to merge
    pins.unpin(small.run, made.pin_id)
    assert len(compact(small.run)) == 4


def test_an_extent_that_would_be_written_in_other_bytes_stays_where_it_is(
    small: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:  # as another release of Arrow would have written it
        patched.setitem(writer.COMPRESSION, "trajectory", "zstd")
        path = half_dead(small)
    sweep(small.run)
    before = extents_of(small.run, "trajectory")
    assert [i.subject for i in compacting.plan_compaction(small.run).items] == [path]
    assert compact(small.run) == []
    assert extents_of(small.run, "trajectory") == before
    assert pack_files(small.run, "trajectory") == {path}


def test_a_damaged_extent_stays_and_the_others_of_its_pack_move(small: SmallRun) -> None:
    path = half_dead(small)
    sweep(small.run)
    damaged = list(extents_of(small.run, "trajectory").values())[1]
    place = small.run.root / path
    sound = place.read_bytes()
    place.write_bytes(bytes(b ^ (at == damaged.offset + 99) for at, b in enumerate(sound)))
    assert compact(small.run) == []
    after = extents_of(small.run, "trajectory")
    assert {i for i, e in after.items() if e.path == path} == {damaged.extent_id}
    assert after[damaged.extent_id] == damaged
    place.write_bytes(sound)
    assert [i.subject for i in compact(small.run)] == [path]


@pytest.mark.parametrize("kind", sorted(SCHEMAS))
def test_rows_of_every_kind_are_written_in_the_same_bytes_again(tmp_path: Path, kind: str) -> None:
    def write(name: str, batches: list[pa.RecordBatch]) -> list[Extent]:
        path = f"packs/{kind}/{name}.arrow"
        target = PackWriter(tmp_path, pack_id=1, path=path, kind=kind, durability="process")
        extents = [target.append(batch) for batch in batches]
        target.seal()
        return extents

    first = write("first", [made_up_rows(kind, n, seed=n, list_length=200) for n in (1, 7, 300)])
    reader = PackReader(tmp_path)
    second = write("second", [reader.read(extent) for extent in first])
    assert [(e.length, e.digests) for e in second] == [(e.length, e.digests) for e in first]


# ---- readers


def test_readers_with_an_old_place_find_the_new_one(small: SmallRun) -> None:
    path = half_dead(small)
    sweep(small.run)
    before, rows = extents_of(small.run, "trajectory"), rows_of(small.run, "trajectory")
    reader = PackReader(small.run.root)
    compact(small.run)
    assert {i: reader.read(e) for i, e in before.items()} == rows  # the old file serves them still
    reader.close()
    sweep(small.run)
    assert path not in pack_files(small.run)
    fresh = PackReader(small.run.root)
    assert {i: read_extent(small.run, fresh, e) for i, e in before.items()} == rows


def test_a_trainer_in_the_middle_of_a_batch_and_a_worker_at_its_prompts_go_on(
    tmp_path: Path, settings: dict[str, str]
) -> None:
    with small_run(tmp_path, num_prompts=32, settings=settings) as small:
        small.advance(1)
        shelf = PromptShelf(small.session("late"))
        prompts = [shelf.read(1, position) for position in range(32)]
        for _ in range(3):  # further packs of prompts, so that there are some to merge
            path = tmp_path / "more.jsonl"
            path.write_text('{"prompt": "more", "label": "1", "metadata": {}}\n')
            end_sessions(small, "enqueue")
            small.enqueue(path, dataset=f"more-{len(packs_of(small.run))}")
        end_sessions(small, "enqueue", "assemble", "rollout")
        batch = history.batches(small.run)[0]
        reading = consume.read_batch(small.run, PackReader(small.run.root), batch)
        fresh = PromptShelf(small.session("late"))
        fresh._places = dict(shelf._places)
        with upkeep(small.run) as session:
            compacting.compact(session, min_live=1.0)
            sweeping.sweep(session)
        assert [rows.num_rows for _, rows in reading] == [batch.num_sequences]
        assert [fresh.read(1, position) for position in range(32)] == prompts
        assert_sound(small.run)


# ---- races and kills


def test_a_pin_made_while_the_copies_are_written_keeps_the_pack_as_it_is(
    small: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = half_dead(small)
    sweep(small.run)
    before = extents_of(small.run, "trajectory")
    real = faults.at

    def pin_in_between(point: str) -> None:
        real(point)
        if point == "compact.before_commit" and not pins.listed(small.run):
            pins.pin(small.run, PinKind.PACK, path, reason="polars begins to read it")

    with monkeypatch.context() as patched:
        patched.setattr(faults, "at", pin_in_between)
        assert compact(small.run) == []
    assert extents_of(small.run, "trajectory") == before
    sweep(small.run)
    assert pack_files(small.run, "trajectory") == {path}
    pins.unpin(small.run, pins.listed(small.run)[0].pin_id)
    assert [i.subject for i in compact(small.run)] == [path]


def test_two_compactions_at_once_lose_and_double_nothing(small: SmallRun) -> None:
    half_dead(small)
    sweep(small.run)
    rows = rows_of(small.run, "trajectory")
    gate = threading.Barrier(2)
    with upkeep(small.run) as one, upkeep(small.run) as other, ThreadPoolExecutor(2) as pool:

        def at_once(session: WorkerSession) -> list[Item]:
            gate.wait()
            return compacting.compact(session).items

        list(pool.map(at_once, (one, other)))
    sweep(small.run)
    assert rows_of(small.run, "trajectory") == rows
    assert {e.path for e in extents_of(small.run, "trajectory").values()} == pack_files(
        small.run, "trajectory"
    )


@pytest.mark.parametrize("point", ["compact.before_commit", "compact.after_commit"])
def test_a_compaction_killed_on_its_way_loses_nothing_and_leaves_nothing(tmp_path: Path, point: str) -> None:
    with small_run(tmp_path, num_prompts=32, settings={**NO_GRACE, "trainer.steps": "6"}) as small:
        path = half_dead(small)
        sweep(small.run)
        rows = rows_of(small.run, "trajectory")
        kill_cli("storage", "compact", small.run.root, "--yes", at=point)
        assert_sound(small.run)
        assert rows_of(small.run, "trajectory") == rows
        rescue.declare_dead_processes_lost(small.run)
        rescue.recover_packs(small.session("supervise"))
        compact(small.run)
        sweep(small.run)
        assert rows_of(small.run, "trajectory") == rows
        assert path not in pack_files(small.run)
        assert len(pack_files(small.run, "trajectory")) == 1
        assert {p.state for p in packs_of(small.run, "trajectory")} == {PackState.SEALED}
        assert_sound(small.run)


def test_nothing_is_compacted_while_sweeping_is_blocked_or_the_share_is_none(small: SmallRun) -> None:
    path = half_dead(small)
    with small.run.index.begin() as connection:
        meta.put(connection, SWEEP_BLOCKED, "restored by the test")
    with pytest.raises(ConflictError, match="restored by the test"):
        compact(small.run)
    with small.run.index.begin() as connection:
        meta.remove(connection, SWEEP_BLOCKED)
    for share in (-0.1, 1.1):
        with pytest.raises(InvalidInputError, match="from 0 to 1"):
            compact(small.run, min_live=share)
    assert path in pack_files(small.run)


def test_the_command_says_and_does_the_same(small: SmallRun, cli: Callable[..., CliResult]) -> None:
    path = half_dead(small)
    sweep(small.run)
    dry = cli("storage", "compact", small.run.root, "--json").json
    assert (dry["done"], [i["subject"] for i in dry["items"]]) == (False, [path])
    assert cli("storage", "compact", small.run.root, "--min-live", "0.01").out.strip() == "nothing to compact"
    done = cli("storage", "compact", small.run.root, "--yes", "--json").json
    assert (done["done"], done["items"]) == (True, dry["items"])
    assert cli("storage", "compact", small.run.root, "--yes").out.strip() == "nothing to compact"


def test_rows_say_what_moves_and_what_it_frees_and_a_sweep_when_the_files_go(
    tmp_path: Path, settings: dict[str, str], cli: Callable[..., CliResult]
) -> None:
    with small_run(tmp_path, settings={**settings, "storage.sweep_grace_s": "3600"}) as small:
        path = half_dead(small)
        size = (small.run.root / path).stat().st_size
        sweep(with_storage(small.run, sweep_grace_s=0.0))
        (item,) = compacting.plan_compaction(with_storage(small.run, sweep_grace_s=0.0)).items
        assert 0 < item.later_bytes < size
        compact(with_storage(small.run, sweep_grace_s=0.0))
        told = cli("storage", "sweep", small.run.root)
        assert "1 condemned pack waits" in told.out
        waiting = cli("storage", "sweep", small.run.root, "--json").json["waiting"]
        assert (waiting["num_packs"], waiting["num_bytes"]) == (1, size)
        assert 3000 < waiting["first_in_s"] <= 3600
        assert waiting["last_in_s"] == pytest.approx(
            waiting["first_in_s"], abs=1e-3
        )  # each rounded by itself
    assert "3 named extents move to another pack" in item.why


def test_the_grace_holds_for_compacted_packs_too(small: SmallRun) -> None:
    path = half_dead(small)
    patient = with_storage(small.run, sweep_grace_s=3600.0)
    compact(patient)
    sweep(patient)
    assert path in pack_files(small.run)
    sweep(small.run)
    assert path not in pack_files(small.run)
