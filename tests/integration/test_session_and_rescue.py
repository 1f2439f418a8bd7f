"""Sessions, rescue and recovery of packs on a real run: what a dead or silent worker held comes back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.ipc as ipc
import pytest
import sqlalchemy as sa

from strawflow.config import RunConfig
from strawflow.errors import ConflictError, LeaseLostError
from strawflow.flow import admit, claim, complete, consume, publish_weights, rescue
from strawflow.flow.branch import create_branch
from strawflow.flow.enqueue import EnqueueRequest, enqueue
from strawflow.flow.run import Run, create_run, open_run
from strawflow.flow.session import WorkerSession
from strawflow.flow.trajectory import Member, UnitResult
from strawflow.index import packs, sessions, tables, units
from strawflow.packs.reader import PackReader
from strawflow.prompts.row import PromptKeys
from strawflow.prompts.source import PromptSource
from strawflow.states import PackState, UnitState
from strawflow.testing.runs import small_run
from tests.contract.stored import end_sessions

VERSION = "v0"


def make_run(root: Path, *, num_units: int = 8, **lease: float) -> Run:
    config = RunConfig.model_validate(
        {
            "rollout": {"prompts_per_step": num_units, "samples_per_prompt": 2},
            "trainer": {"steps": 1},
            "lease": {"ttl_s": 1.0, "heartbeat_s": 0.2, "margin_s": 0.1, "grace_s": 0.1, **lease},
        }
    )
    run = create_run(root, config)
    path = root / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{i}"}) + "\n" for i in range(num_units)))
    with WorkerSession(run, "enqueue") as session:
        source = PromptSource.parse(str(path))
        enqueue(session, EnqueueRequest(admit.PROMPTS, "train", source, PromptKeys("prompt")))
    with WorkerSession(run, "train") as session:
        resumption = consume.take_over(session)
        assert resumption is not None
        folder = run.root / publish_weights.weights_path(VERSION)
        folder.mkdir()
        (folder / "model.safetensors").touch()
        publish_weights.publish_weights(session, resumption.role, step=0, version_id=VERSION, digest="0")
        assert admit.admit_due(session) == num_units
    return run


def result_of(grant: claim.Grant) -> UnitResult:
    members = [
        Member(m, "finished", [5, 6 + m], [-0.1, -0.2], [VERSION] * 2, "stop", float(m)) for m in range(2)
    ]
    return UnitResult(grant.unit_id, grant.fence, 1, [1, 2], members, grant.profile, "test")


def state_of(run: Run, unit_id: int) -> units.Unit:
    with run.index.read() as connection:
        return units.find(connection, unit_id)


def wait_until_expired(run: Run, *, seconds: float = 10.0) -> int:
    deadline = time.monotonic() + seconds
    while not (rescued := rescue.rescue_expired(run)):
        assert time.monotonic() < deadline, "the session never expired"
        time.sleep(0.05)
    return rescued


CHILD = """
import os, signal, sys
from pathlib import Path
from strawflow.flow import claim, complete
from strawflow.flow.run import open_run
from strawflow.flow.session import WorkerSession
from tests.integration.test_session_and_rescue import result_of, VERSION
run = open_run(Path(sys.argv[1]))
session = WorkerSession(run, "rollout")
grants = claim.claim(session, claim.PromptShelf(session), limit=4, serving_version_id=VERSION)
complete.complete(session, [result_of(grants[0])], submission_id="child")
print("holding", flush=True)
os.kill(os.getpid(), signal.SIGSTOP if sys.argv[2] == "stop" else signal.SIGKILL)
try:
    complete.complete(session, [result_of(g) for g in grants[1:]], submission_id="late")
    print("accepted", flush=True)
except Exception as error:
    print(type(error).__name__, flush=True)
os._exit(0)
"""


def start_child(run: Run, how: str) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(run.root), how], stdout=subprocess.PIPE, text=True, env=os.environ
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "holding\n"
    return child


def test_units_of_a_killed_worker_come_back_when_its_lease_ends(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    child = start_child(run, "kill")
    child.wait()
    assert wait_until_expired(run) == 3
    with run.index.read() as connection:
        counts = units.count_by_state(connection, run.branch)
    assert counts == {("train", "ready"): 7, ("train", "completed"): 1}


def test_units_of_a_dead_process_come_back_at_once_when_the_host_knows(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", ttl_s=600.0)
    child = start_child(run, "kill")
    child.wait()
    assert rescue.rescue_expired(run) == 0
    assert rescue.declare_dead_processes_lost(run) == 3


def test_a_stopped_worker_that_wakes_after_its_lease_can_change_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    child = start_child(run, "stop")
    assert wait_until_expired(run) == 3
    with WorkerSession(run, "rollout") as other:
        grants = claim.claim(other, claim.PromptShelf(other), limit=8, serving_version_id=VERSION)
        assert len(grants) == 7
        child.send_signal(signal.SIGCONT)
        assert child.stdout is not None
        assert child.stdout.readline() == "LeaseLostError\n"
        child.wait()
        receipt = complete.complete(other, [result_of(g) for g in grants], submission_id="other")
        assert len(receipt.accepted) == 7


def test_an_expired_but_not_superseded_lease_may_still_complete(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", heartbeat_s=3600.0)
    with WorkerSession(run, "rollout") as session:
        (grant, *_) = claim.claim(session, claim.PromptShelf(session), limit=1, serving_version_id=VERSION)
        time.sleep(1.5)
        receipt = complete.complete(session, [result_of(grant)], submission_id="slow")
        assert receipt.accepted == (grant.unit_id,)
        with pytest.raises(LeaseLostError):
            session.require_live()


def test_a_hung_work_loop_loses_its_leases_like_a_dead_one(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    session = WorkerSession(run, "rollout", stall_s=0.3)
    claim.claim(session, claim.PromptShelf(session), limit=2, serving_version_id=VERSION)
    assert wait_until_expired(run) == 2
    session._stop.set()


def test_a_unit_that_kills_its_worker_alone_is_set_aside_after_max_attempts(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_units=1, ttl_s=600.0)
    for attempt in range(1, 4):
        session = WorkerSession(run, "rollout")
        (grant,) = claim.claim(session, claim.PromptShelf(session), limit=4, serving_version_id=VERSION)
        assert grant.unit.attempts == attempt
        rescue.declare_lost(run, session.session_id, reason="its process 1 is gone")
        session._stop.set()
    unit = state_of(run, grant.unit_id)
    assert unit.state is UnitState.FAILED
    assert unit.last_error == "its process 1 is gone"


def test_innocent_units_of_crashed_workers_keep_their_attempts_and_the_culprit_is_found_alone(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path / "run", num_units=4, ttl_s=600.0)
    culprit = 1
    for _ in range(40):
        session = WorkerSession(run, "rollout")
        grants = claim.claim(session, claim.PromptShelf(session), limit=4, serving_version_id=VERSION)
        if not grants:
            session.end()
            break
        if any(g.unit_id == culprit for g in grants):
            rescue.declare_lost(run, session.session_id, reason="killed by a unit")
            session._stop.set()
        else:
            complete.complete(session, [result_of(g) for g in grants], submission_id=session.session_id)
            session.end()
    assert state_of(run, culprit).state is UnitState.FAILED
    assert [state_of(run, u).state for u in (2, 3, 4)] == [UnitState.COMPLETED] * 3


def test_the_pack_of_a_killed_worker_is_sealed_under_a_new_name_with_equal_rows(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    start_child(run, "kill").wait()
    completed = next(u for u in range(1, 9) if state_of(run, u).state is UnitState.COMPLETED)
    with run.index.read() as connection:
        extent_id = state_of(run, completed).extent_id
        assert extent_id is not None
        before = packs.find_extents(connection, [extent_id])[extent_id]
    rows = PackReader(run.root).read(before)
    rescue.declare_dead_processes_lost(run)
    with WorkerSession(run, "supervise") as session:
        assert rescue.recover_packs(session) == 1
        assert rescue.recover_packs(session) == 0
    with run.index.read() as connection:
        after = packs.find_extents(connection, [extent_id])[extent_id]
        assert packs.listed(connection, state=PackState.OPEN) == []
    assert after.path != before.path
    assert not (run.root / before.path).exists()
    assert PackReader(run.root).read(after).equals(rows)
    assert ipc.open_file(run.root / after.path).read_all().num_rows == rows.num_rows


def test_a_session_declared_lost_is_granted_nothing_more(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", ttl_s=600.0)
    session = WorkerSession(run, "rollout")
    rescue.declare_lost(run, session.session_id, reason="taken for dead")
    with pytest.raises(LeaseLostError, match="no longer live"):
        claim.claim(session, claim.PromptShelf(session), limit=4, serving_version_id=VERSION)
    session._stop.set()
    with run.index.read() as connection:
        assert units.count_by_state(connection, run.branch) == {("train", "ready"): 8}


def test_a_heartbeat_that_comes_in_time_saves_a_session_that_was_seen_expired(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", ttl_s=600.0)
    with WorkerSession(run, "rollout") as session:
        assert not rescue.declare_lost(run, session.session_id, reason="expired", if_expired_for_s=0.0)
        session.require_live()


def test_a_reused_pid_does_not_keep_a_dead_session_alive(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", ttl_s=600.0)
    session = WorkerSession(run, "rollout")
    claim.claim(session, claim.PromptShelf(session), limit=4, serving_version_id=VERSION)
    session._stop.set()
    assert rescue.declare_dead_processes_lost(run) == 0
    with run.index.begin() as connection:  # as if this pid had belonged to an earlier process
        connection.execute(sa.update(tables.sessions).values(process_started=1))
    assert rescue.declare_dead_processes_lost(run) == 4


def test_a_run_opens_again_with_everything_it_held(tmp_path: Path) -> None:
    make_run(tmp_path / "run").close()
    run = open_run(tmp_path / "run")
    with run.index.read() as connection:
        assert units.count_by_state(connection, run.branch) == {("train", "ready"): 8}


# ---- who stands in the way of a branch

GONE = """
import os, sys, strawflow
worker = strawflow.open(sys.argv[1]).worker("generator")
assert worker.claim(1)
os._exit(0)  # as a kill: nothing is closed
"""


def test_a_branch_is_made_though_a_session_is_live_whose_process_is_gone(tmp_path: Path) -> None:
    with small_run(tmp_path) as small:
        small.advance(1)
        end_sessions(small)
        subprocess.run([sys.executable, "-c", GONE, str(small.run.root)], check=True)
        with small.run.index.read() as connection:
            (left,) = sessions.listed(connection, live_only=True)
        assert left.expires_in_s > 10
        assert create_branch(small.run, checkpoint="1", name="second").branch_id == "second"


def test_a_branch_refused_names_who_is_at_work_and_how_to_end_it(tmp_path: Path) -> None:
    with small_run(tmp_path) as small:
        small.advance(1)
        end_sessions(small, *(kind for kind in small.sessions if kind != "rollout"))
        living = small.session("rollout").session_id
        with pytest.raises(ConflictError) as refused:
            create_branch(small.run, checkpoint="1", name="second")
    for told in (f"{living} (process {os.getpid()} on ", f"`strawflow worker fence RUN {living}`"):
        assert told in refused.value.message
