"""What the trainer tells of its steps: to the index, to TensorBoard, to traces; and that telling changes nothing."""

from __future__ import annotations

import gzip
import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from strawflow.errors import ConfigError
from strawflow.flow import history
from strawflow.flow.run import Run
from strawflow_workers.trainer.flops import step_flops, work_of
from strawflow_workers.trainer.megatron import MegatronTrainer
from strawflow_workers.trainer.replay import replay
from strawflow_workers.trainer.sinks import Sinks, TensorBoardSink, open_sinks, steps_in
from tests.integration.megatron_cases import GRPO, make_hf
from tests.integration.stored_batches import SEQUENCE_TOKENS, stored_batches, train

pytestmark = pytest.mark.alone


def plotted(folder: Path, tag: str) -> list[tuple[int, float]]:
    """Return what TensorBoard would plot of a tag: every value in every event file, in the order of the files."""
    from tensorboardX.proto import event_pb2

    from strawflow_workers.trainer.sinks import _records

    found = []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        for record in _records(path.read_bytes()):
            event = event_pb2.Event.FromString(record)
            found += [(event.step, v.simple_value) for v in event.summary.value if v.tag == tag]
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of five steps that drained after step 3, one after its checkpoint, and went on."""
    folder = tmp_path_factory.mktemp("trained")
    run = stored_batches(
        folder,
        steps=5,
        settings={"trainer.tensorboard": "tb", "trainer.profile_steps": "2:3", "trainer.peak_tflops": "0.5"},
    )
    with pytest.MonkeyPatch.context() as monkeypatch:
        train(run, monkeypatch, drain_after=3)
        train(run, monkeypatch)
    return run


def test_every_step_is_measured_by_the_numbers_of_its_batch(trained: Run, tmp_path: Path) -> None:
    steps = history.steps(trained)
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5]
    lengths = [*SEQUENCE_TOKENS] * 4
    for step in steps:
        assert step["total_tokens"] == sum(lengths)
        assert (step["prompt_tokens_mean"], step["response_tokens_mean"]) == (3, 2.5)
        assert (step["response_tokens_max"], step["sequence_tokens_max"]) == (3, 6)
        assert (step["staleness_mean"], step["staleness_max"]) == (0, 0)
        assert step["reward_by_set"] == {"prompts": 0.5}
        assert step["tokens_per_second"] == pytest.approx(sum(lengths) / step["seconds"])
        assert step["mfu"] == pytest.approx(step["flops"] / step["seconds"] / 0.5e12)
        whole = step["plan_wait_s"] + step["read_wait_s"] + step["seconds"]
        assert step["read_wait_share"] == pytest.approx(step["read_wait_s"] / whole)
    # Six for each weight that a token is multiplied with: of a tied model every matrix, the embedding as output.
    model = make_hf(tmp_path / "hf")
    weights = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    attention = 3 * 2 * 4 * (16 + 16) * sum(length**2 for length in lengths)
    assert steps[0]["flops"] == 6 * weights * sum(lengths) + attention


def test_a_restart_writes_no_step_twice_into_tensorboard_and_the_index_keeps_both(trained: Run) -> None:
    recorded = {step["step"]: step["loss"] for step in history.steps(trained)}
    points = plotted(trained.root / "tb/main", "train/loss")
    assert [step for step, _ in points] == [1, 2, 3, 4, 5]
    assert [value for _, value in points] == pytest.approx(list(recorded.values()), rel=1e-6)
    assert len(list((trained.root / "tb/main").iterdir())) == 2, "a file for each start"
    sets = plotted(trained.root / "tb/main", "train/reward_by_set/prompts")
    assert sets == [(step, 0.5) for step in (1, 2, 3, 4, 5)]


def test_the_steps_of_the_window_are_traced_and_no_others(trained: Run) -> None:
    # The first start traced both; the second trained step 3 again, and a window's rest is traced.
    names = sorted(path.name for path in (trained.root / "profiles").iterdir())
    assert names == ["steps-2-3.json.gz", "steps-3-3.json.gz"]
    trace = json.loads(gzip.decompress((trained.root / "profiles/steps-2-3.json.gz").read_bytes()))
    operations = {event.get("name") for event in trace["traceEvents"]}
    assert "aten::mm" in operations or "aten::linear" in operations


def test_reading_ahead_and_telling_change_no_bit_of_what_is_trained(trained: Run) -> None:
    replayed = list(replay(trained))  # reads each batch when it is wanted, tells nobody
    assert [step.is_equal for step in replayed] == [True] * 5
    assert [step.state_equal for step in replayed] == [None, True, None, True, True]


def test_a_sink_is_caught_up_with_steps_it_never_saw_also_after_a_record_that_was_cut_off(
    trained: Run,
) -> None:
    folder = trained.root / "tb/main"
    newest = max(folder.iterdir())
    newest.write_bytes(newest.read_bytes()[:-3])
    assert max(steps_in(folder)) == 4
    with open_sinks(trained) as sinks:
        sinks.catch_up(history.steps(trained), up_to=5)
    assert sorted(step for step, _ in plotted(folder, "train/loss")) == [1, 2, 3, 4, 5]


class Failing:
    name = "failing"

    def __init__(self) -> None:
        self.asked: list[int] = []

    def last_step(self) -> int:
        return 0

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.asked.append(step)
        raise OSError("no space left")

    def close(self) -> None:
        raise OSError("no space left")


def test_a_sink_that_fails_is_given_up_with_a_warning_and_the_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failing = Failing()
    with caplog.at_level(logging.WARNING), Sinks([failing, TensorBoardSink(tmp_path)]) as sinks:
        for step in (1, 2):
            sinks.write(step, {"loss": 0.5})
    assert failing.asked == [1]
    assert "failing failed at step 1 and is given up" in caplog.text
    assert [step for step, _ in plotted(tmp_path, "train/loss")] == [1, 2]


def test_a_sink_that_cannot_start_ends_the_worker_before_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in-the-way").write_text("a file")
    run = stored_batches(tmp_path, steps=1, settings={"trainer.tensorboard": str(tmp_path / "in-the-way")})
    with pytest.raises(ConfigError, match=r"trainer\.tensorboard: .*in-the-way.* cannot be written"):
        train(run, monkeypatch)
    assert history.steps(run) == []
    asked = run.config.trainer.model_copy(update={"tensorboard": "", "wandb": "project"})
    wants_wandb = Run(run.root, run.config.model_copy(update={"trainer": asked}), run.index)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(
        ConfigError, match=r"trainer\.wandb needs wandb, which is not installed; install it with"
    ):
        open_sinks(wants_wandb)
    run.close()


def test_the_work_of_a_real_model_is_that_of_its_parameters(tmp_path: Path) -> None:
    model = make_hf(tmp_path / "hf", tied=False)
    trainer = MegatronTrainer(tmp_path / "hf", GRPO, seed=1)
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed_tokens" not in name]
    config = trainer._model.module.config
    work = work_of(config, vocab_size=model.config.vocab_size)
    assert work.weights_per_token == sum(p.numel() for p in matrices)
    import numpy as np

    assert step_flops(work, np.array([10])) == 60 * work.weights_per_token + 3 * 2 * 4 * (16 + 16) * 100
