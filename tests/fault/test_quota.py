"""Too little room: claims and admission stop first, leased work completes into the reserve, then appends say what to do."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from strawflow.errors import StorageError
from strawflow.flow import admit, quota, retain
from strawflow.flow import compact as compacting
from strawflow.flow.check import check
from strawflow.flow.run import open_run
from strawflow.flow.session import WorkerSession
from strawflow.flow.status import snapshot
from strawflow.flow.submission import Submission
from strawflow.flow.sweep import sweep
from strawflow.index import events, meta, units
from strawflow.index.leases import Wanted
from strawflow.testing.pack_rows import made_up_rows
from strawflow.testing.runs import SmallRun, prompt_lines, small_run
from tests.conftest import CliResult
from tests.contract.stored import end_sessions, upkeep
from tests.fault.test_disk_full import PAGE, SmallDisk
from tests.fault.test_disk_full import disk as disk

ALL = {"rollout.prompts_per_step": "64", "rollout.samples_per_prompt": "1", "lease.ttl_s": "600"}
ELSEWHERE = "run.index_url"


def look_again(small: SmallRun) -> None:
    """Forget the last look at the disk, as if it had been a second ago."""
    quota.gauge(small.run)._good_until = 0.0


def told(small: SmallRun) -> list[str]:
    with small.run.index.read() as connection:
        return [e["name"] for e in events.latest(connection, limit=100, name_prefix="storage.")][::-1]


def num_ready(small: SmallRun) -> int:
    with small.run.index.read() as connection:
        return units.count_by_state(connection, "main").get(("train", "ready"), 0)


def on_small_disk(disk: SmallDisk, tmp_path: Path) -> dict[str, str]:
    return {**ALL, ELSEWHERE: f"sqlite:///{tmp_path / 'index.sqlite'}"}


def test_a_disk_that_runs_short_stops_claims_then_appends_and_everything_goes_on_with_room(
    tmp_path: Path, disk: SmallDisk, cli: Callable[..., CliResult]
) -> None:
    with small_run(disk.place, num_prompts=64, settings=on_small_disk(disk, tmp_path)) as small:
        reserve = quota.measure(small.run).reserve_bytes
        assert 300_000 < reserve < 500_000  # 5 % of 8 MiB
        held = small.claim(4)
        ready = num_ready(small)

        disk.fill(but=reserve * 3 // 4 // PAGE * PAGE)
        look_again(small)
        assert small.claim(4) == []
        asking = Submission("claims beside results", wanted=Wanted(4))
        assert small.session("rollout").exchange.submit(asking).granted == ()
        assert admit.admit_more(small.session("rollout"), count=4) == 0
        assert num_ready(small) == ready
        seen = snapshot(small.run)
        assert seen.shortage is not None
        assert "storage.min_free_bytes" in seen.shortage
        assert "nothing is admitted or claimed" in cli("status", small.run.root).out
        assert "nothing is admitted or claimed" in cli("storage", "usage", small.run.root).out
        assert small.complete(held[:2], submission_id="into the reserve").accepted == (1, 2)

        disk.fill(but=reserve // 4 // PAGE * PAGE)
        look_again(small)
        for _ in range(2):
            with pytest.raises(
                StorageError, match=r"strawflow storage retain .*strawflow storage sweep"
            ) as raised:
                small.complete(held[2:], submission_id="later")
            assert raised.value.facts["free_bytes"] < reserve / 2
        with small.run.index.read() as connection:
            assert meta.find(connection, quota.SHORTAGE) is not None
        assert told(small) == ["storage.short"], "the shortage is told once"

        disk.free()
        look_again(small)
        assert small.complete(held[2:], submission_id="later").accepted == (3, 4)
        while small.sample(16):
            pass
        assert told(small) == ["storage.short", "storage.recovered"]
        assert snapshot(small.run).shortage is None
        assert small.plan() is not None
        assert check(small.run).findings == []


def test_a_quota_holds_however_much_the_disk_has_and_retention_makes_room_beneath_it(tmp_path: Path) -> None:
    settings = {"storage.sweep_grace_s": "0", "storage.keep_checkpoints": "1", "trainer.steps": "20"}
    with small_run(tmp_path, num_prompts=64, settings=settings) as small:
        small.advance(4)
        ballast = small.run.root / "checkpoints/c000001-main.trainer-f1/optimizer"
        ballast.write_bytes(bytes(4_000_000))  # the oldest checkpoint is what takes the room
        root = small.run.root
        end_sessions(small)
        small.run.close()
        used = sum(quota.disk_use(small.run).values())
        config = root / "config.json"
        text = config.read_text(encoding="utf-8")
        config.write_text(text.replace('"quota_bytes": 0', f'"quota_bytes": {used}'), encoding="utf-8")
    with SmallRun(open_run(root)) as small:
        assert small.claim(4) == []
        path = tmp_path / "more.jsonl"
        path.write_text(prompt_lines(4, first=100), encoding="utf-8")
        with pytest.raises(StorageError, match="of its quota") as raised:
            small.enqueue(path)
        assert raised.value.facts["quota_bytes"] == used
        assert raised.value.facts["used_bytes"] >= used * 0.95
        with upkeep(small.run) as session:  # what makes room may write while nobody else may
            retain.retain(session, retain.policy_of(small.run.config))
            compacting.compact(session)
            sweep(session)
        look_again(small)
        assert small.enqueue(path) == 4
        small.advance(2)
        assert [name for name in told(small) if name != "storage.swept"] == [
            "storage.short",
            "storage.recovered",
        ]
        assert check(small.run).findings == []


def test_workers_that_notice_at_once_tell_it_once(tmp_path: Path, disk: SmallDisk) -> None:
    with small_run(disk.place, num_prompts=64, settings=on_small_disk(disk, tmp_path)) as small:
        disk.fill(but=10 * PAGE)
        others = [open_run(small.run.root) for _ in range(3)]
        look_again(small)
        for run in (small.run, *others):
            assert quota.gauge(run).watch()
            assert quota.gauge(run).watch()
        assert told(small) == ["storage.short"]
        disk.free()
        for run in (small.run, *others):
            quota.gauge(run)._good_until = 0.0
            assert not quota.gauge(run).watch()
            run.close()
        with SmallRun(open_run(small.run.root)) as again:
            assert told(again) == ["storage.short", "storage.recovered"]
            end_sessions(small)


def test_compaction_refuses_to_begin_without_room_for_its_copies(tmp_path: Path, disk: SmallDisk) -> None:
    settings = {**on_small_disk(disk, tmp_path), "storage.sweep_grace_s": "0"}
    with small_run(disk.place, num_prompts=64, settings=settings) as small:
        for _ in range(4):
            small.sample(8)
            end_sessions(small, "rollout")
        disk.fill()
        with upkeep(small.run) as session:
            with pytest.raises(StorageError, match="compaction needs"):
                compacting.compact(session)
            disk.free()
            assert compacting.compact(session).items
        assert check(small.run).findings == []


def test_the_disk_is_looked_at_once_a_second_whoever_asks_how_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []
    real = quota.measure
    monkeypatch.setattr(quota, "measure", lambda run: (looks.append(1), real(run))[1])
    with small_run(tmp_path, settings={"storage.quota_bytes": str(10**9)}) as small:
        looks.clear()
        started = time.monotonic()
        for _ in range(5000):
            quota.gauge(small.run).require_room()
        small.sample(4)
        assert len(looks) <= 1 + (time.monotonic() - started)


def test_no_reserve_and_no_quota_let_everything_through(tmp_path: Path, disk: SmallDisk) -> None:
    settings = {**on_small_disk(disk, tmp_path), "storage.min_free_bytes": "0"}
    with small_run(disk.place, num_prompts=64, settings=settings) as small:
        disk.fill(but=64 * PAGE)
        look_again(small)
        assert small.sample(4) == 4
        disk.free()


def test_the_index_on_another_disk_counts_too(tmp_path: Path, disk: SmallDisk) -> None:
    settings = {**ALL, ELSEWHERE: f"sqlite:///{disk.place / 'index.sqlite'}"}
    with small_run(tmp_path, num_prompts=64, settings=settings) as small:
        assert quota.measure(small.run).reserve_bytes < 500_000
        disk.fill(but=16 * PAGE)
        look_again(small)
        assert small.claim(1) == []
        disk.free()
        look_again(small)
        assert len(small.claim(1)) == 1


def test_a_session_that_makes_room_may_write_into_the_last_of_it(tmp_path: Path, disk: SmallDisk) -> None:
    with small_run(disk.place, num_prompts=64, settings=on_small_disk(disk, tmp_path)) as small:
        disk.fill(but=32 * PAGE)
        look_again(small)
        with WorkerSession(small.run, "rollout") as worker, pytest.raises(StorageError, match="in reserve"):
            worker.packs.append("plan", made_up_rows("plan", 3))
        with upkeep(small.run) as session:
            assert session.packs.append("plan", made_up_rows("plan", 3)).num_rows == 3
        disk.free()
