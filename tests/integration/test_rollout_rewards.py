"""The rollout worker and its rewards: rows that name their own, groups scored as a whole, servers, post-processing."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from strawflow.config import RunConfig
from strawflow.errors import InvalidInputError
from strawflow.flow import admit
from strawflow.flow.enqueue import EnqueueRequest, enqueue
from strawflow.flow.run import Run, create_run
from strawflow.flow.session import WorkerSession
from strawflow.index import units
from strawflow.prompts.row import PromptKeys
from strawflow.prompts.source import PromptSource
from strawflow.states import UnitState
from tests.integration.rollout_runs import NUM_SAMPLES, NUM_UNITS, Worker, completed, rows_of, trainer_of

KEYS = PromptKeys("prompt", "label", "metadata")


@pytest.fixture
def make_run_of(tmp_path: Path, tiny_model: Path) -> Iterator[Callable[..., Run]]:
    made: list[Run] = []

    def make(rows: list[dict[str, Any]], **rollout: Any) -> Run:
        config = RunConfig.model_validate(
            {
                "run": {"durability": "process"},
                "model": {"path": str(tiny_model)},
                "rollout": {
                    "engine": "fake",
                    "prompts_per_step": len(rows),
                    "samples_per_prompt": NUM_SAMPLES,
                    "max_response_tokens": 5,
                    "reward_shape": "raw",
                    "reward_timeout_s": 20.0,
                    **rollout,
                },
                "trainer": {"steps": 1},
            }
        )
        run = create_run(tmp_path / "run", config)
        made.append(run)
        enqueue_rows(run, tmp_path, rows)
        return run

    yield make
    for run in made:
        run.close()


def enqueue_rows(run: Run, folder: Path, rows: list[dict[str, Any]]) -> None:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"label": None, "metadata": None, **row}) + "\n" for row in rows))
    with WorkerSession(run, "enqueue") as session:
        source = PromptSource.parse(str(path))
        enqueue(session, EnqueueRequest(admit.PROMPTS, "train", source, KEYS))


def run_until(run: Run, num_completed: int) -> list[dict[str, Any]]:
    with trainer_of(run) as publish:
        publish(0)
        with Worker(run) as worker:
            worker.wait(lambda: len(completed(run)) >= num_completed)
    return rows_of(run)


def by_unit(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    groups: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["unit_id"]].append(row)
    return list(groups.values())


def test_rows_are_scored_by_the_rewards_they_name(make_run_of: Callable[..., Run]) -> None:
    rows = [
        {"prompt": "a\n", "label": "no response is this"},
        {"prompt": "b\n", "metadata": {"reward": "tests.fault.rewards:even_share"}},
        {"prompt": "c\n", "metadata": {"reward": "multiple_choice"}},  # and has no label
    ]
    run = make_run_of(rows, reward="exact", row_rewards=["tests.fault.rewards:even_share"])
    exact, share, failed = (
        [group for group in by_unit(run_until(run, len(rows))) if chosen(group)]
        for chosen in (
            lambda group: {row["reward"] for row in group} == {0.0},
            lambda group: any(row["reward"] for row in group),
            lambda group: all("no label" in (row["failure"] or "") for row in group),
        )
    )
    assert [len(found) for found in (exact, share, failed)] == [1, 1, 1]
    assert {row["status"] for row in failed[0]} == {"failed"}


def test_a_groups_reward_and_post_processing_see_all_its_members(make_run_of: Callable[..., Run]) -> None:
    run = make_run_of(
        [{"prompt": f"word{n}\n"} for n in range(2)],
        reward="group:tests.fault.rewards:places",
        reward_post_process="tests.fault.rewards:minus_mean",
    )
    groups = by_unit(run_until(run, 2))
    for group in groups:
        assert sorted(row["score"] for row in group) == [0.0, 1.0, 2.0, 3.0]
        assert [row["reward"] for row in group] == [row["score"] - 1.5 for row in group]


def test_a_group_that_was_broken_off_is_scored_whole_by_whoever_ends_it(make_run: Callable[..., Run]) -> None:
    """Members that had ended before wait, stored and without a reward, for those that go on."""
    run = make_run(
        engine_options={"token-s": "0.05", "mean-tokens": "10"},
        max_response_tokens=60,
        reward="group:tests.fault.rewards:places",
        reward_post_process="tests.fault.rewards:minus_mean",
        reward_timeout_s=20.0,
    )
    with trainer_of(run) as publish:
        publish(0)
        with Worker(run) as worker:
            worker.wait(lambda: leased(run) == NUM_UNITS)
            worker.sleep(0.4)
        with run.index.read() as connection:
            parks = {u.unit_id: u.parks for u in units.listed(connection, run.branch)}
        assert any(parks.values())
        with Worker(run) as worker:
            worker.wait(lambda: len(completed(run)) >= NUM_UNITS)
    for group in by_unit(rows_of(run)):
        assert [row["score"] for row in sorted(group, key=lambda row: row["member"])] == [0.0, 1.0, 2.0, 3.0]
        assert [row["reward"] for row in group] == [row["score"] - 1.5 for row in group]


def leased(run: Run) -> int:
    with run.index.read() as connection:
        return len(units.listed(connection, run.branch, state=UnitState.LEASED))


def test_a_server_scores_what_the_engine_sampled(make_run_of: Callable[..., Run]) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            content = json.dumps({"score": len(body["response"])}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        run = make_run_of([{"prompt": "a\n"}], reward=f"remote:http://127.0.0.1:{server.server_port}/score")
        rows = run_until(run, 1)
        server.shutdown()
        thread.join()
    assert len(rows) == NUM_SAMPLES
    assert [row["reward"] for row in rows] == [float(len(row["response_text"])) for row in rows]


@pytest.mark.parametrize(
    "reward, told",
    [
        ("maths", "'metadata.reward': reward 'maths' is unknown; did you mean 'math'?"),
        ("os:getcwd", "'metadata.reward': reward 'os:getcwd' is named by a row, and the run's"),
        (1, "'metadata.reward' is a number; it must name the reward that scores this row"),
    ],
)
def test_a_row_with_a_reward_that_cannot_be_is_refused_when_it_is_enqueued(
    make_run_of: Callable[..., Run], tmp_path: Path, reward: Any, told: str
) -> None:
    run = make_run_of([{"prompt": "good"}])
    with pytest.raises(InvalidInputError) as caught:
        enqueue_rows(run, tmp_path, [{"prompt": "fine"}, {"prompt": "bad", "metadata": {"reward": reward}}])
    assert f"prompts.jsonl:2: {told}" in caught.value.message
