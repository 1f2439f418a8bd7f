"""Trainer checkpoints: a resumed run equals an uninterrupted one bit for bit, and a damaged checkpoint is
refused by name."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from strawflow.errors import AlreadyExistsError, CorruptCheckpointError, IncompatibleFormatError, StorageError
from strawflow_workers.trainer import checkpoints
from strawflow_workers.trainer.megatron import MegatronTrainer
from tests.integration.megatron_cases import GRPO, SFT, make_hf, make_step

pytestmark = pytest.mark.alone

PLAN = ("sft", "sft", "save", "sft", "stage", "grpo", "save", "grpo", "grpo")
"""A run: training steps by objective, the change of stage, and the two places where a checkpoint is taken."""


def run_plan(trainer: MegatronTrainer, start: int, saves: Path | None) -> str:
    """Carry out the plan from `start`; a step's batches depend on its place in the plan only."""
    for place, action in enumerate(PLAN[start:], start):
        if action == "stage":
            trainer.begin_stage(GRPO)
        elif action == "save" and saves is not None:
            trainer.save_checkpoint(saves / f"at-{place}")
        elif action != "save":
            trainer.train_step(make_step(place))
    return trainer.state_digest()


def resume_everywhere(directory: Path) -> None:
    """Run in a new process: resume from each checkpoint with a trainer that knew nothing, print the digests
    of the ends."""
    found = {}
    for path in sorted(directory.glob("at-*")):
        trainer = MegatronTrainer(directory / "hf", GRPO, seed=77)
        trainer.load_checkpoint(path)
        found[path.name] = [
            run_plan(trainer, int(path.name.removeprefix("at-")) + 1, None),
            trainer.weights_digest(),
        ]
    print(json.dumps(found))


def test_steps_then_save_new_process_load_and_steps_equal_all_steps_straight_bit_for_bit(
    tmp_path: Path,
) -> None:
    make_hf(tmp_path / "hf")
    straight = MegatronTrainer(tmp_path / "hf", SFT, seed=1)
    expected = [run_plan(straight, 0, tmp_path), straight.weights_digest()]
    ran = subprocess.run(
        [sys.executable, "-m", "tests.integration.test_megatron_checkpoints", str(tmp_path)],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
        timeout=200,
        check=True,
    )
    assert json.loads(ran.stdout.splitlines()[-1]) == {"at-2": expected, "at-6": expected}


@pytest.fixture
def saved(tmp_path: Path) -> tuple[MegatronTrainer, Path]:
    make_hf(tmp_path / "hf")
    trainer = MegatronTrainer(tmp_path / "hf", SFT, seed=1)
    trainer.train_step(make_step(0))
    trainer.save_checkpoint(tmp_path / "point")
    return trainer, tmp_path / "point"


def test_loading_restores_everything_that_was_saved(saved: tuple[MegatronTrainer, Path]) -> None:
    trainer, path = saved
    before = trainer.state_digest()
    drawn = (random.random(), np.random.random(), torch.rand(1).item())
    trainer.train_step(make_step(1))
    trainer.begin_stage(GRPO)
    trainer.load_checkpoint(path)
    assert (trainer.stage, trainer.updates, trainer.settings) == (0, 2, SFT)
    assert trainer.state_digest() == before
    assert (random.random(), np.random.random(), torch.rand(1).item()) == drawn


def test_each_parameter_has_its_own_step_counter_in_the_file_and_after_loading(
    saved: tuple[MegatronTrainer, Path],
) -> None:
    trainer, path = saved
    stored = load_file(path / "rank-00000.safetensors")
    parameters = [name for name in stored if name.startswith("parameter/")]
    steps = [name for name in stored if name.startswith("optimizer/") and name.endswith("/step")]
    assert len(steps) == len(parameters)
    assert {stored[name].item() for name in steps} == {2.0}
    trainer.load_checkpoint(path)
    counters = [slot["step"] for slot in trainer._optimizer.optimizer.state.values()]
    assert len({counter.data_ptr() for counter in counters}) == len(parameters)


def test_a_checkpoint_before_the_first_update_can_be_resumed(tmp_path: Path) -> None:
    make_hf(tmp_path / "hf")
    trainer = MegatronTrainer(tmp_path / "hf", GRPO, seed=1)
    trainer.save_checkpoint(tmp_path / "point")
    trainer.train_step(make_step(0))
    expected = trainer.state_digest()
    trainer.load_checkpoint(tmp_path / "point")
    trainer.train_step(make_step(0))
    assert trainer.state_digest() == expected


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "rank-00000.json", "manifest.json"])
def test_a_missing_or_shortened_or_changed_file_is_refused_by_name_and_changes_nothing(
    saved: tuple[MegatronTrainer, Path], name: str
) -> None:
    trainer, path = saved
    before = trainer.state_digest()
    whole = (path / name).read_bytes()
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    for damaged in (whole[:middle], flipped, None):
        (path / name).unlink()
        if damaged is not None:
            (path / name).write_bytes(damaged)
        with pytest.raises(CorruptCheckpointError, match=r"rank-00000|manifest") as caught:
            trainer.load_checkpoint(path)
        if name != "manifest.json":
            assert name in str(caught.value)
        (path / name).write_bytes(whole)
        assert trainer.state_digest() == before
    trainer.load_checkpoint(path)


def test_a_directory_that_is_no_checkpoint_and_one_of_another_format_are_refused(
    saved: tuple[MegatronTrainer, Path],
) -> None:
    trainer, path = saved
    with pytest.raises(CorruptCheckpointError, match=r"manifest\.json: is missing"):
        trainer.load_checkpoint(path.parent)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(IncompatibleFormatError, match="format 99"):
        trainer.load_checkpoint(path)


def test_a_checkpoint_of_another_model_is_refused_before_anything_is_touched(
    saved: tuple[MegatronTrainer, Path], tmp_path: Path
) -> None:
    make_hf(tmp_path / "wider", intermediate_size=64)
    other = MegatronTrainer(tmp_path / "wider", GRPO, seed=1)
    before = other.state_digest()
    with pytest.raises(CorruptCheckpointError, match=r"mlp\.linear_fc1.*another model"):
        other.load_checkpoint(saved[1])
    assert other.state_digest() == before
    assert other.settings == GRPO


def test_a_checkpoint_replaces_nothing(saved: tuple[MegatronTrainer, Path]) -> None:
    trainer, path = saved
    with pytest.raises(AlreadyExistsError, match="point exists"):
        trainer.save_checkpoint(path)
    trainer.load_checkpoint(path)


def test_a_write_that_fails_in_the_middle_leaves_nothing_under_the_name(tmp_path: Path) -> None:
    def fill_half_then_fail() -> None:
        with checkpoints.new_directory(tmp_path / "point") as partial:
            (partial / "half").write_text("half")
            assert not (tmp_path / "point").exists()
            raise OSError(28, "No space left on device")

    with pytest.raises(StorageError, match="No space left"):
        fill_half_then_fail()
    assert list(tmp_path.iterdir()) == []


if __name__ == "__main__":
    resume_everywhere(Path(sys.argv[1]))
