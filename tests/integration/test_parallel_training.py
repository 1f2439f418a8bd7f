"""Trainers of several ranks against one process: losses, gradient norms, log-probabilities, weights, decisions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.integration.megatron_cases import VOCABULARY, make_hf
from tests.integration.parallel_cases import Case, Found, Resumed, train, train_in_ranks

pytestmark = pytest.mark.alone

MODELS = {
    "tied": {"tied": True},
    "untied": {"tied": False},
    "odd": {"tied": False, "vocab_size": VOCABULARY + 1},
}
"""`odd`: two ranks cannot share its vocabulary equally."""

OF_TWO = {
    "tp2": {"tensor": 2},
    "tp2_sequence": {"tensor": 2, "sequence": True},
    "pp2": {"pipeline": 2},
    "dp2": {"ranks": 2},
    "cp2": {"context": 2},
    "dp2_distributed_optimizer": {"ranks": 2, "distributed_optimizer": True},
    "dp2_overlapped": {
        "ranks": 2,
        "distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    },
    "dp2_overlapped_reduce": {"ranks": 2, "overlap_grad_reduce": True},
}
OF_FOUR = {
    "tp2_dp2": {"tensor": 2},
    "tp2_pp2": {"tensor": 2, "pipeline": 2},
    "tp2_pp2_sequence": {"tensor": 2, "pipeline": 2, "sequence": True},
    "pp2_dp2": {"pipeline": 2},
    "tp2_cp2": {"tensor": 2, "context": 2},
    "tp2_cp2_sequence": {"tensor": 2, "context": 2, "sequence": True},
    "cp2_dp2": {"context": 2},
    "cp4": {"context": 4},
    "pp2_cp2": {"pipeline": 2, "context": 2},
    "dp4": {"ranks": 4},
    "dp4_distributed_optimizer": {"ranks": 4, "distributed_optimizer": True},
    "tp2_dp2_distributed_optimizer": {"tensor": 2, "distributed_optimizer": True},
    "tp2_dp2_sequence_full": {"tensor": 2, "sequence": True, "recompute": "full"},
    "tp2_dp2_selective": {"tensor": 2, "recompute": "selective"},
    "pp2_dp2_overlapped": {
        "pipeline": 2,
        "distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "recompute": "full",
    },
}


def check_equal(found: Found, alone: Found, folder: Path, case: Case) -> None:
    """Check what ranks came to against one process: 1e-5, and weights to what three steps of that make of them."""
    assert found.losses == pytest.approx(alone.losses, rel=1e-5, abs=1e-6), case.name
    assert found.grad_norms == pytest.approx(alone.grad_norms, rel=1e-5), case.name
    assert found.gaps == pytest.approx(alone.gaps, rel=1e-5), case.name
    assert found.logprobs == pytest.approx(alone.logprobs, abs=1e-4), case.name
    assert (found.num_tokens, found.skipped) == (alone.num_tokens, 1), case.name
    ours, reference = (
        load_file(folder / f"out-{name}" / "model.safetensors") for name in (case.name, f"alone-{case.model}")
    )
    assert ours.keys() == reference.keys(), case.name
    start = load_file(folder / case.model / "model.safetensors")
    for name, tensor in reference.items():
        # Adam divides by the gradient's size: where that is tiny, rounding turns into a step of up to the learning rate.
        far = (ours[name] - tensor).abs()
        moved = (tensor - start[name]).abs().mean()
        assert far.mean() < 2e-3 * moved, (case.name, name, far.mean(), moved)
        assert far.max() < 2e-3, (case.name, name)


def compare(folder: Path, size: int, cases: list[Case]) -> dict[str, Found | Resumed]:
    """Check every case that trains against one process; return what all came to."""
    alone = {}
    for model in sorted({case.model for case in cases}):
        make_hf(folder / model, **MODELS[model])
        if any(case.model == model and not case.resumes for case in cases):
            alone[model] = train(Case(f"alone-{model}", model, num_steps=cases[0].num_steps), folder)
    results = train_in_ranks(folder, size, cases)
    for case in cases:
        found = results[case.name]
        if isinstance(found, Found):
            check_equal(found, alone[case.model], folder, case)
    return results


def check_resumed(found: Found | Resumed, name: str) -> None:
    assert isinstance(found, Resumed), name
    assert found.resumed == found.straight, name
    assert found.at_once == [True, True], name
    assert "was written by" in found.refusal, name


def test_four_ranks_train_as_one_process_does_and_go_on_from_their_checkpoint_bit_for_bit(
    tmp_path: Path,
) -> None:
    names = {"tp2_dp2": "odd", "pp2_dp2": "tied", "tp2_cp2_sequence": "odd"}
    cases = [Case(name, model, OF_FOUR[name], num_steps=2) for name, model in names.items()]
    again = Case("again", "tied", {"tensor": 2, "distributed_optimizer": True}, resumes=True)
    check_resumed(compare(tmp_path, 4, [*cases, again])["again"], "again")


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("model", sorted(MODELS))
@pytest.mark.parametrize(("size", "layouts"), [(2, OF_TWO), (4, OF_FOUR)], ids=["two", "four"])
def test_every_layout_of_ranks_trains_as_one_process_does(
    tmp_path: Path, size: int, layouts: dict[str, dict[str, Any]], model: str
) -> None:
    compare(tmp_path, size, [Case(name, model, parallel) for name, parallel in layouts.items()])


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("size", "layouts"), [(2, OF_TWO), (4, OF_FOUR)], ids=["two", "four"])
def test_every_layout_goes_on_from_its_checkpoint_bit_for_bit(
    tmp_path: Path, size: int, layouts: dict[str, dict[str, Any]], precision: str
) -> None:
    cases = [
        Case(name, "odd", {**parallel, "precision": precision}, resumes=True)
        for name, parallel in layouts.items()
        if name not in ("dp2", "dp4", "dp2_overlapped_reduce")  # the layout that the others are refused by
    ]
    for name, found in compare(tmp_path, size, cases).items():
        check_resumed(found, name)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_ranks_in_bfloat16_stay_near_one_process_in_bfloat16(tmp_path: Path) -> None:
    make_hf(tmp_path / "odd", **MODELS["odd"])
    alone = train(Case("alone", "odd", {"precision": "bf16"}), tmp_path)
    exact = train(Case("exact", "odd"), tmp_path)
    cases = [
        Case(name, "odd", {**OF_FOUR[name], "precision": "bf16"})
        for name in ("tp2_dp2_sequence_full", "pp2_dp2_overlapped", "tp2_cp2")
    ]
    assert alone.losses == pytest.approx(exact.losses, rel=0.02)
    assert alone.losses != pytest.approx(exact.losses, rel=1e-6)
    for name, found in train_in_ranks(tmp_path, 4, cases).items():
        assert isinstance(found, Found)
        assert found.losses == pytest.approx(alone.losses, rel=0.02), name
        assert found.grad_norms == pytest.approx(alone.grad_norms, rel=0.05), name
