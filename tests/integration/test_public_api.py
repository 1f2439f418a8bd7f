"""What the package root offers, used as its users would: examples as programs, threads, asyncio, forks, spawned processes."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import strawflow
from strawflow.errors import AlreadyExistsError, ConfigError, CorruptCheckpointError, InvalidInputError
from strawflow.flow import backup, rescue
from strawflow.flow.check import check
from strawflow.flow.run import open_run
from strawflow.flow.status import unit_detail
from strawflow.index import packs, sessions, units
from strawflow.states import UnitState

EXAMPLES = Path(__file__).parents[2] / "examples"
PROMPTS = [{"prompt": f"prompt {n}", "label": str(n)} for n in range(24)]
LONG_ON_POSTGRESQL = pytest.mark.parametrize(
    "index_url", ["sqlite", pytest.param("postgresql", marks=pytest.mark.long)], indirect=True
)
"""For tests of whole programs, which take seconds."""


def make(folder: Path, *, index_url: str = "") -> strawflow.Store:
    settings = {"rollout.samples_per_prompt": "2", "run.durability": "process", "run.index_url": index_url}
    return strawflow.create(folder, prompts=PROMPTS, settings=settings)


@pytest.fixture
def store(tmp_path: Path, index_url: str) -> Iterator[strawflow.Store]:
    with make(tmp_path / "run", index_url=index_url) as made:
        yield made
        report = check(made.run)
        assert report.findings == [], report.findings


def answers(grant: strawflow.Grant) -> list[strawflow.Member]:
    tokens = np.arange(5, dtype=np.int32) + grant.unit_id
    return [
        strawflow.Member(n, "finished", tokens, np.full(5, -0.5, np.float32), "", "stop", float(n))
        for n in range(grant.profile.num_samples)
    ]


def example(name: str, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name), *map(str, arguments)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


# ---- what callers get wrong


def test_an_error_text_that_no_database_takes_is_kept_readable(store: strawflow.Store) -> None:
    store.admit(1)
    with store.worker() as worker:
        (grant,) = worker.claim(1)
        worker.fail(grant, "half \ud800 of a pair, NUL \0, " + "x" * 20_000)
    with store.run.index.read() as connection:
        (unit,) = units.listed(connection, store.run.branch)
    assert unit.last_error is not None
    assert unit.last_error.startswith(r"half \ud800 of a pair, NUL \x00, xxx")
    assert len(unit.last_error) < 11_000
    backup.backup(store.run)


def test_numbers_that_cannot_be_meant_are_refused_and_plan_nothing(store: strawflow.Store) -> None:
    store.admit(6)
    with store.worker() as worker:
        grants = worker.claim(6)
        with pytest.raises(InvalidInputError, match="retry_after_s is nan"):
            worker.fail(grants[0], "why", retry_after_s=float("nan"))
        with pytest.raises(InvalidInputError, match="reward is nan"):
            worker.complete([grants[0].result([replace(answers(grants[0])[0], reward=float("nan"))])])
        worker.complete([grant.result(answers(grant)) for grant in grants])
    with store.consumer() as trainer:
        for number, least in ((-1, None), (0, None), (2, 0), (2, 3)):
            with pytest.raises(InvalidInputError, match="1 <= at_least <= num_groups"):
                trainer.next_batch(number, at_least=least)
        first = trainer.next_batch(2)
        assert first is not None
        assert (first.step, first.num_groups) == (1, 2)
    for count in (-1, 1.5, 2**70):
        with pytest.raises(InvalidInputError, match="give a whole number from 0 to"):
            store.admit(count)  # type: ignore[arg-type]


def test_a_store_is_neither_made_nor_opened_at_an_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for door in (strawflow.create, strawflow.open):
        with pytest.raises(ConfigError, match="memory://run is an address, and a run lies in a folder"):
            door("memory://run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", "a/b", "a\0", "ü", "x" * 65, "\ud800"])
def test_a_worker_name_that_is_no_file_name_is_refused_before_it_has_a_session(
    store: strawflow.Store, name: str
) -> None:
    with pytest.raises(InvalidInputError, match="use up to 64 of"):
        store.worker(name)
    with store.run.index.read() as connection:
        assert [s.kind for s in sessions.listed(connection) if s.kind == name] == []


@pytest.mark.parametrize("row", [{"prompt": "\ud800"}, {"prompt": "x", "label": {1}}, "text"])
def test_a_row_that_is_no_json_is_told_by_its_number(store: strawflow.Store, row: Any) -> None:
    with pytest.raises(InvalidInputError, match="row 2 "):
        store.enqueue([{"prompt": "sound"}, row])


def test_a_value_that_the_database_refuses_is_the_callers_error(store: strawflow.Store) -> None:
    if store.run.index.dialect == "postgresql":  # SQLite takes NUL
        with pytest.raises(InvalidInputError, match="the index takes no such value"):
            store.enqueue([{"prompt": "x"}], dataset="a\0")


def test_a_store_whose_own_session_was_lost_goes_on_with_another(store: strawflow.Store) -> None:
    store.admit(2)
    with store.run.index.read() as connection:
        (first,) = [s.session_id for s in sessions.listed(connection, live_only=True) if s.kind == "store"]
    rescue.declare_lost(store.run, first, reason="it made no call for long")
    with pytest.raises(strawflow.LeaseLostError):
        store.admit(2)
    store._session.mark_lost()  # type: ignore[union-attr]  # what the next heartbeat does
    assert store.admit(2) == 2


def test_threads_that_write_first_share_one_session_of_the_store(store: strawflow.Store) -> None:
    with strawflow.open(store.run.root) as other:
        with ThreadPoolExecutor(8) as threads:
            assert list(threads.map(lambda _: other.admit(1), range(24))) == [1] * 24
        with store.run.index.read() as connection:
            living = [s for s in sessions.listed(connection, live_only=True) if s.kind == "store"]
        assert len(living) == 2  # that of each store


def test_a_consumer_that_says_so_is_taken_to_work_on(store: strawflow.Store) -> None:
    with store.consumer() as trainer:
        trainer._session._progressed_at -= 10_000
        trainer.mark_progress()
        assert time.monotonic() - trainer._session._progressed_at < 60


def test_a_run_with_the_index_of_another_is_refused_before_a_sweep_takes_its_packs(tmp_path: Path) -> None:
    for name in ("mine", "other"):
        make(tmp_path / name).close()
    shutil.copy(tmp_path / "other" / "index.sqlite", tmp_path / "mine" / "index.sqlite")
    with pytest.raises(strawflow.ConflictError, match="is that of another run"):
        strawflow.open(tmp_path / "mine")


def test_a_database_that_holds_an_index_is_refused_and_fresh_removes_nothing_for_it(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'elsewhere.sqlite'}"
    make(tmp_path / "run", index_url=url).close()
    before = sorted((tmp_path / "run").rglob("*"))
    for folder in ("run", "second"):
        with pytest.raises(AlreadyExistsError, match="holds the index of a run already"):
            strawflow.create(tmp_path / folder, fresh=True, settings={"run.index_url": url})
    assert sorted((tmp_path / "run").rglob("*")) == before
    assert not (tmp_path / "second").exists()


# ---- the root


def test_the_root_offers_at_most_fifteen_names_and_each_is_documented() -> None:
    assert len(strawflow.__all__) <= 15
    for name in strawflow.__all__:
        if name != "__version__":
            assert (getattr(strawflow, name).__doc__ or "").strip(), name
    with pytest.raises(AttributeError, match="nothing"):
        strawflow.nothing  # noqa: B018


def test_importing_the_root_loads_nothing_heavy() -> None:
    code = "import sys, strawflow; print(sorted({m.split('.')[0] for m in sys.modules} & {'pyarrow', 'sqlalchemy', 'numpy'}))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_rows_of_a_batch_can_be_had_with_every_token_told(store: strawflow.Store) -> None:
    store.admit(4)
    with store.worker() as worker, store.consumer("trainer") as trainer:
        for grant in worker.claim(2):  # stored apart: the rows of the batch are of several messages
            worker.complete([grant.result(answers(grant))])
        batch = trainer.next_batch(2)
        assert batch is not None
        assert batch.rows["loss_mask"].null_count == batch.rows.num_rows == 4
        whole = batch.with_every_token()
        assert whole["loss_mask"].to_pylist() == [[1] * 5] * 4
        assert whole["token_versions"].to_pylist() == [[-1] * 5] * 4
        assert whole.drop(["loss_mask", "token_versions"]) == batch.rows.drop(["loss_mask", "token_versions"])
        trainer.advance()


def test_prompts_given_as_rows_name_the_api_and_their_number(store: strawflow.Store) -> None:
    store.admit(24)
    with store.worker() as worker:
        shown = [unit_detail(store.run, grant.unit_id).prompt or {} for grant in worker.claim(24)]
    told = {prompt["prompt"]: (prompt["source"], prompt["source_line"]) for prompt in shown}
    assert told == {f"prompt {n}": ("api", n + 1) for n in range(24)}
    with pytest.raises(InvalidInputError, match="api:2: 'prompt' is null"):
        store.enqueue([{"prompt": "one more"}, {"prompt": None}])


# ---- the examples, as programs


def test_the_examples_are_twenty_lines_of_work_each() -> None:
    for path in EXAMPLES.glob("*.py"):
        code = path.read_text().split('"""')[2]
        lines = [
            line for line in code.splitlines() if line.strip() and not line.startswith(("import", "from"))
        ]
        assert len(lines) <= 25, path.name


@LONG_ON_POSTGRESQL
def test_the_examples_go_through_a_run_and_two_consumers_do_not_disturb_each_other(
    store: strawflow.Store, tmp_path: Path
) -> None:
    store.admit(12)
    folder = store.run.root
    assert "completed" in example("producer.py", folder).stdout
    exported = example("export.py", folder, tmp_path / "out")
    assert exported.stdout == "exported up to step 1\n", exported.stderr
    trained = example("consumer.py", folder)
    assert json.loads(trained.stdout.splitlines()[-1]) == {"step": 3, "reward": 12.0}, trained.stderr
    rows = pq.read_table(tmp_path / "out")
    assert sorted(set(rows["unit_id"].to_pylist())) == list(range(1, 13))
    assert rows["loss_mask"].to_pylist() == [[1] * len(r) for r in rows["response_tokens"].to_pylist()]
    assert rows["token_versions"].null_count == 0
    store.admit(4)
    example("producer.py", folder)
    assert example("export.py", folder, tmp_path / "out").stdout == "exported up to step 2\n"
    assert pq.read_table(tmp_path / "out").num_rows == 32


@LONG_ON_POSTGRESQL
@pytest.mark.parametrize(
    "fault", ["checkpoint.after_files:2", "checkpoint.after_commit:2", "assemble.before_plan:3"]
)
def test_a_killed_consumer_goes_on_with_the_same_batches(
    tmp_path: Path, store: strawflow.Store, fault: str
) -> None:
    store.admit(12)
    example("producer.py", store.run.root)
    killed = example("consumer.py", store.run.root, STRAWFLOW_FAULT=fault)
    assert killed.returncode == -signal.SIGKILL
    before = dict(line.split(" digest ") for line in killed.stdout.splitlines() if " digest " in line)
    again = example("consumer.py", store.run.root)
    after = dict(line.split(" digest ") for line in again.stdout.splitlines() if " digest " in line)
    assert before.items() & after.items() == before.items() & after.items()
    assert all(after.get(step, digest) == digest for step, digest in before.items())
    assert json.loads(again.stdout.splitlines()[-1]) == {"step": 3, "reward": 12.0}, again.stderr


@LONG_ON_POSTGRESQL
@pytest.mark.parametrize("fault", ["commit.before:1", "commit.after:2", "pack.after_append:1"])
def test_a_killed_producer_loses_and_repeats_no_prompt(store: strawflow.Store, fault: str) -> None:
    store.admit(20)
    killed = example("producer.py", store.run.root, STRAWFLOW_FAULT=fault)
    assert killed.returncode == -signal.SIGKILL
    assert example("producer.py", store.run.root).returncode == 0
    with store.consumer("trainer") as trainer:
        batch = trainer.next_batch(100, at_least=20)
        assert batch is not None
        assert sorted(set(batch.rows["unit_id"].to_pylist())) == list(range(1, 21))
        assert batch.rows.num_rows == 40


# ---- worker and consumer


def test_completing_and_claiming_the_next_are_one_call(store: strawflow.Store) -> None:
    store.admit(10)
    with store.worker() as worker:
        grants, seen = worker.claim(4), []
        while grants:
            seen += [g.unit_id for g in grants]
            grants = worker.complete([g.result(answers(g)) for g in grants], claim=4).grants
    assert seen == list(range(1, 11))


def test_parked_groups_come_back_first_with_their_progress(store: strawflow.Store) -> None:
    store.admit(6)
    with store.worker() as worker:
        grants = worker.claim(2)
        first = answers(grants[0])[0]
        partial = strawflow.Member(
            1, "partial", [7, 8], [-0.1, -0.2], "", "abort", None, environment=b"board"
        )
        assert worker.park([grants[0].result([first, partial])]).accepted == (1,)
    with store.worker("another") as other:
        (back,) = other.claim(1)
        assert (back.unit_id, back.fence, back.unit.attempts, back.unit.parks) == (1, 2, 1, 1)
        assert back.continuation is not None
        rows = back.continuation.to_pylist()
        assert [(r["status"], r["response_tokens"]) for r in rows] == [
            ("finished", [1, 2, 3, 4, 5]),
            ("partial", [7, 8]),
        ]
        assert rows[1]["environment"] == b"board"
        assert other.complete([back.result(answers(back))]).accepted == (1,)


def test_an_attempt_that_failed_is_offered_again_only_after_its_delay(store: strawflow.Store) -> None:
    store.admit(1)
    with store.worker() as worker:
        (grant,) = worker.claim(1)
        assert worker.fail(grant, "engine overloaded", retry_after_s=0.3) is UnitState.READY
        assert worker.claim(1) == []
        (again,) = worker.claim(1, wait_s=20)
        assert (again.unit_id, again.unit.last_error) == (1, "engine overloaded")


def test_a_repeated_submission_gets_the_same_answer_and_other_content_is_a_conflict(
    store: strawflow.Store,
) -> None:
    store.admit(3)
    with store.worker() as worker:
        grants = worker.claim(1)
        results = [g.result(answers(g)) for g in grants]
        first = worker.complete(results, claim=1, submission_id="one")
        again = worker.complete(results, claim=1, submission_id="one")
        assert (again.accepted, again.lost) == (first.accepted, first.lost) == ((1,), ())
        assert [g.unit_id for g in again.grants] == [g.unit_id for g in first.grants] == [2]
        other = [g.result([m.__class__(**{**m.__dict__, "reward": 9.0}) for m in answers(g)]) for g in grants]
        with pytest.raises(strawflow.ConflictError, match="other content"):
            worker.complete(other, claim=1, submission_id="one")


def test_one_process_at_a_time_is_a_consumer_and_batches_come_in_order(store: strawflow.Store) -> None:
    store.admit(8)
    with store.worker() as worker:
        worker.complete([g.result(answers(g)) for g in worker.claim(8)])
    with store.consumer("trainer") as trainer:
        with pytest.raises(strawflow.LeaseLostError, match="another process is consumer"):
            store.consumer("trainer")
        digests = []
        while (batch := trainer.next_batch(4)) is not None:
            digests.append((batch.step, batch.digest))
        trainer.advance(1)
        with pytest.raises(strawflow.ConflictError, match="was not handed out"):
            trainer.advance(3)
    with store.consumer("trainer") as trainer:
        assert trainer.position == 1
        again = trainer.next_batch(4)
        assert again is not None
        assert (again.step, again.digest) == digests[1]
        trainer.advance()
        trainer.advance(2)
        assert trainer.position == 2


def test_weights_published_by_a_consumer_date_what_is_sampled_from_them(
    store: strawflow.Store, tmp_path: Path
) -> None:
    from safetensors.numpy import save_file

    save_file({"w": np.ones(3, np.float32)}, tmp_path / "w.safetensors")
    store.admit(1)
    with store.consumer("trainer") as trainer, store.worker() as worker:
        version = trainer.publish_weights(3, tmp_path / "w.safetensors")
        (grant,) = worker.claim(1)
        member = strawflow.Member(0, "finished", [1], [-0.1], version, "stop", 1.0)
        with pytest.raises(InvalidInputError, match="unknown weights 'v9'"):
            worker.complete([grant.result([strawflow.Member(0, "finished", [1], [-0.1], "v9", "stop", 1.0)])])
        worker.complete([grant.result([member])])
        batch = trainer.next_batch(1)
        assert batch is not None
        assert batch.rows["weight_versions"].to_pylist() == [[version]]


def test_rows_that_are_no_prompts_are_refused_by_number(store: strawflow.Store) -> None:
    with pytest.raises(InvalidInputError, match="row 2 has unknown fields"):
        store.enqueue([{"prompt": "a"}, {"prompt": "b", "reply": "c"}])
    with pytest.raises(InvalidInputError, match="row 1 has no prompt"):
        store.enqueue([{"label": "c"}])
    assert store.enqueue(PROMPTS) == 0
    assert store.enqueue([{"prompt": "new"}]) == 1


# ---- threads, asyncio, processes


def test_many_threads_share_windows_and_each_group_is_completed_once(store: strawflow.Store) -> None:
    store.admit(24)
    seen: list[int] = []
    lock = threading.Lock()

    with store.worker() as worker:

        def work(_: int) -> None:
            grants = worker.claim(1)
            while grants:
                with lock:
                    seen.extend(g.unit_id for g in grants)
                grants = worker.complete([g.result(answers(g)) for g in grants], claim=1).grants

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
        exchange = worker._session.exchange
        assert exchange.num_windows < exchange.num_submissions
    assert sorted(seen) == list(range(1, 25))


def test_an_event_loop_works_through_threads(store: strawflow.Store) -> None:
    store.admit(24)

    async def work(worker: strawflow.Worker) -> int:
        done = 0
        while grants := await asyncio.to_thread(worker.claim, 2):
            settled = await asyncio.to_thread(worker.complete, [g.result(answers(g)) for g in grants])
            done += len(settled.accepted)
        return done

    async def all_of_them() -> int:
        with store.worker() as worker:
            return sum(await asyncio.gather(*(work(worker) for _ in range(6))))

    assert asyncio.run(all_of_them()) == 24


def test_a_store_inherited_over_a_fork_is_refused_and_the_parent_goes_on(store: strawflow.Store) -> None:
    store.admit(4)
    with store.worker() as worker:
        grants = worker.claim(2)
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:  # the child tells what it met and is gone, without pytest's own farewell
            told = []
            for call in (
                lambda: worker.claim(1),
                lambda: worker.complete([grants[0].result(answers(grants[0]))]),
                lambda: store.admit(1),
            ):
                try:
                    call()
                    told.append("did it")
                except strawflow.StorageError as error:
                    told.append(type(error).__name__ + str("process" in error.message))
                except BaseException as error:
                    told.append(repr(error))
            os.write(writer, json.dumps(told).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as told_by_child:
            assert json.loads(told_by_child.read()) == ["StorageErrorTrue"] * 3
        os.waitpid(pid, 0)
        assert worker.complete([g.result(answers(g)) for g in grants]).accepted == (1, 2)


def in_child(store: strawflow.Store, number: int) -> int:
    """Complete what can be claimed; run in a spawned process that was given the store itself."""
    done = 0
    with store, store.worker(f"child{number}") as worker:
        while grants := worker.claim(2):
            done += len(worker.complete([g.result(answers(g)) for g in grants]).accepted)
    return done


def test_a_store_can_be_given_to_a_spawned_process(store: strawflow.Store) -> None:
    store.admit(12)
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert sum(pool.starmap(in_child, [(store, 0), (store, 1)])) == 12


# ---- what goes wrong, and is told


def completed(store: strawflow.Store, count: int) -> None:
    store.admit(count)
    with store.worker() as worker:
        worker.complete([g.result(answers(g)) for g in worker.claim(count)])


def test_a_consumer_left_by_an_error_gives_its_name_back_at_once(store: strawflow.Store) -> None:
    completed(store, 4)
    dead = store.consumer("trainer")
    first = dead.next_batch(2)
    assert first is not None
    with pytest.raises(ZeroDivisionError), dead:
        raise ZeroDivisionError
    with store.run.index.read() as connection:
        states = {s.session_id: s.state for s in sessions.listed(connection)}
        assert packs.open_without_writer(connection) == []  # what it wrote is sealed
    assert states[dead.session_id] == "lost"
    with store.consumer("trainer") as trainer:
        again = trainer.next_batch(2)
        assert again is not None
        assert (again.step, again.digest) == (first.step, first.digest)
        for late in (dead.advance, dead.next_batch):
            with pytest.raises(strawflow.LeaseLostError):
                late()
        trainer.advance()


def test_a_consumer_that_cannot_be_made_holds_nothing(tmp_path: Path) -> None:
    with make(tmp_path / "run"):
        pass
    tight = open_run(tmp_path / "run")
    storage = tight.config.storage.model_copy(update={"quota_bytes": 1})
    config = tight.config.model_copy(update={"storage": storage})
    with strawflow.Store(replace(tight, config=config)) as store:
        with pytest.raises(strawflow.StorageError, match="quota"):
            store.consumer("export")
        with store.run.index.read() as connection:
            assert sessions.listed(connection, live_only=True) == []


def test_prompts_that_cannot_be_admitted_are_an_error_and_not_none(store: strawflow.Store) -> None:
    with pytest.raises(InvalidInputError, match=r"'nope' holds no prompts: .* \('prompts'\)"):
        store.admit(5, dataset="nope")
    with pytest.raises(InvalidInputError, match="-1 prompts cannot be admitted"):
        store.admit(-1)
    assert store.admit(0) == 0


def with_checkpoints(store: strawflow.Store, name: str) -> list[Path]:
    """Commit three checkpoints of a consumer; returns their folders."""
    folders = []
    with store.consumer(name) as consumer:
        for step in (1, 2, 3):
            assert consumer.next_batch(1) is not None
            folder = consumer.checkpoint_folder()
            (folder / "state").write_text(f"state after step {step}")
            consumer.commit_checkpoint()
            folders.append(folder)
        assert consumer.newest_checkpoint() == (3, folders[-1])
    return folders


def test_a_damaged_checkpoint_is_never_handed_out_and_the_way_on_is_named(store: strawflow.Store) -> None:
    completed(store, 3)
    first, second, third = with_checkpoints(store, "trainer")
    whole = (third / "state").read_bytes()
    (third / "state").write_bytes(whole[:-1] + b"4")
    (second / "state").write_bytes(b"")
    with store.consumer("trainer") as trainer:
        with pytest.raises(CorruptCheckpointError) as refused:
            trainer.newest_checkpoint()
        told = f"strawflow branch create RUN --from {first.name} NAME"
        for word in (str(third / "state"), "restore the folder from a copy", told):
            assert word in refused.value.message
        shutil.move(third, third.with_suffix(".away"))
        with pytest.raises(CorruptCheckpointError, match=f"{third.name}/manifest.json: is missing"):
            trainer.newest_checkpoint()
        shutil.move(third.with_suffix(".away"), third)
        (third / "state").write_bytes(whole)
        assert trainer.newest_checkpoint() == (3, third)
        (third / "state").unlink()
        (first / "state").unlink()
        with pytest.raises(CorruptCheckpointError, match="there is no older checkpoint that is whole"):
            trainer.newest_checkpoint()
        for folder, content in ((first, "1"), (second, "2"), (third, "3")):  # the check that ends the test
            (folder / "state").write_text(f"state after step {content}")


def test_a_damaged_checkpoint_of_another_consumer_names_the_older_folder(store: strawflow.Store) -> None:
    completed(store, 3)
    _, second, third = with_checkpoints(store, "export")
    (third / "state").unlink()
    with store.consumer("export") as export, pytest.raises(CorruptCheckpointError) as refused:
        export.newest_checkpoint()
    assert f"the newest one before it that is whole is {second}" in refused.value.message
