"""Updates of the Megatron trainer against an independent trainer in plain torch, and what an update must
never do."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3ForCausalLM

from strawflow.errors import InvalidInputError
from strawflow_workers.trainer.batches import MiniBatch, PackedMicroBatch, TrainSettings
from strawflow_workers.trainer.megatron import MegatronTrainer
from tests.integration.megatron_cases import GRPO, SFT, VOCABULARY, make_hf, make_pack, make_step


class PlainTrainer:
    """The same training told in plain torch: one sequence at a time, torch's AdamW, clip_grad_norm_, explicit
    warm-up."""

    def __init__(self, model: Qwen3ForCausalLM, settings: TrainSettings) -> None:
        self.model, self.settings, self.updates = model.train(), settings, 0
        decayed = [p for p in model.parameters() if p.ndim > 1]
        free = [p for p in model.parameters() if p.ndim == 1]
        groups = [{"params": decayed}, {"params": free, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(
            groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay
        )

    def update(self, mini_batch: MiniBatch) -> tuple[float, float]:
        self.updates += 1
        warm = self.settings.lr_warmup_updates
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.lr * (min(1.0, self.updates / warm) if warm else 1.0)
        self.optimizer.zero_grad()
        total = sum(self._sequence_losses(pack) for pack in mini_batch.micro_batches) / mini_batch.denominator
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip_grad)
        self.optimizer.step()
        return total.item(), norm.item()

    def _sequence_losses(self, pack: PackedMicroBatch) -> torch.Tensor:
        total = torch.zeros(())
        for index, (start, end) in enumerate(itertools.pairwise(pack.boundaries.tolist())):
            ids = torch.from_numpy(pack.tokens[start:end].astype(np.int64))
            logits = self.model(input_ids=ids[None]).logits[0, :-1] / float(pack.temperatures[index])
            new = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            mask, old, advantage = (
                torch.from_numpy(column[start + 1 : end])
                for column in (pack.loss_mask, pack.rollout_logprobs, pack.advantages)
            )
            if self.settings.objective == "sft":
                total = total - (new * mask).sum()
                continue
            ratio = (new - old).exp()
            bounded = ratio.clip(1 - self.settings.clip_low, 1 + self.settings.clip_high)
            total = total - (torch.min(ratio * advantage, bounded * advantage) * mask).sum()
        return total


def weights(trainer: MegatronTrainer, directory: Path) -> dict[str, torch.Tensor]:
    trainer.export_hf(directory)
    return load_file(directory / "model.safetensors")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("settings", [SFT, replace(GRPO, clip_low=0.1, clip_high=0.3)], ids=["sft", "grpo"])
def test_six_updates_follow_a_plain_torch_trainer(
    tmp_path: Path, settings: TrainSettings, tied: bool
) -> None:
    plain = PlainTrainer(make_hf(tmp_path / "hf", tied=tied), settings)
    trainer = MegatronTrainer(tmp_path / "hf", settings, seed=1)
    for step in range(3):
        mini_batches = make_step(step)
        metrics = trainer.train_step(mini_batches)
        expected = [plain.update(mini_batch) for mini_batch in mini_batches]
        losses, norms = zip(*expected, strict=True)
        assert metrics.loss == pytest.approx(np.mean(losses), rel=1e-4, abs=1e-5)
        assert metrics.grad_norm == pytest.approx(np.mean(norms), rel=1e-4)
    assert trainer.updates == 6
    reference = plain.model.state_dict()
    for name, found in weights(trainer, tmp_path / "out").items():
        torch.testing.assert_close(found, reference[name], rtol=0, atol=2e-4)


def test_sequences_of_different_temperatures_train_as_in_plain_torch(tmp_path: Path) -> None:
    plain = PlainTrainer(make_hf(tmp_path / "hf"), GRPO)
    trainer = MegatronTrainer(tmp_path / "hf", GRPO, seed=1)
    pack = make_pack(np.random.default_rng(0), [9, 12, 6])
    pack.temperatures[:] = [0.7, 1.0, 1.3]
    metrics = trainer.train_step([MiniBatch((pack,), 12.0)])
    loss, norm = plain.update(MiniBatch((pack,), 12.0))
    assert metrics.loss == pytest.approx(loss, rel=1e-5)
    assert metrics.grad_norm == pytest.approx(norm, rel=1e-5)


def test_two_trainers_with_the_same_start_and_batches_end_bit_equal(tmp_path: Path) -> None:
    make_hf(tmp_path / "hf")
    digests = set()
    for _ in range(2):
        trainer = MegatronTrainer(tmp_path / "hf", GRPO, seed=1)
        for step in range(3):
            trainer.train_step(make_step(step))
        digests.add(trainer.state_digest())
    assert len(digests) == 1


def test_the_gradient_depends_on_the_sequences_and_not_on_how_they_are_cut_into_micro_batches(
    tmp_path: Path,
) -> None:
    make_hf(tmp_path / "hf")
    rng = np.random.default_rng(0)
    parts = [make_pack(rng, [5, 9]), make_pack(rng, [14, 3])]
    columns = ("tokens", "loss_mask", "advantages", "rollout_logprobs", "temperatures")
    joined = PackedMicroBatch(
        boundaries=np.array([0, 5, 14, 28, 31], dtype=np.int32),
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in columns},
    )
    found = []
    for packs in ((joined,), tuple(parts)):
        metrics = MegatronTrainer(tmp_path / "hf", GRPO, seed=1).train_step([MiniBatch(packs, 16.0)])
        found.append(
            (metrics.loss, metrics.grad_norm, metrics.kl, metrics.logprob_gap_max, metrics.num_tokens)
        )
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_the_given_denominator_divides_loss_and_gradient(tmp_path: Path) -> None:
    make_hf(tmp_path / "hf")
    pack = make_pack(np.random.default_rng(0), [9, 12])
    first, second = (
        MegatronTrainer(tmp_path / "hf", GRPO, seed=1).train_step([MiniBatch((pack,), denominator)])
        for denominator in (11.0, 33.0)
    )
    assert first.loss is not None
    assert second.loss is not None
    assert first.grad_norm is not None
    assert second.grad_norm is not None
    assert first.loss == pytest.approx(3 * second.loss, rel=1e-5)
    assert first.grad_norm == pytest.approx(3 * second.grad_norm, rel=1e-5)


def test_untrained_tokens_may_hold_anything_and_change_nothing(tmp_path: Path) -> None:
    make_hf(tmp_path / "hf")
    digests = set()
    for filler in (0.0, np.nan):
        pack = make_pack(np.random.default_rng(0), [9, 12])
        pack.advantages[pack.loss_mask == 0] = filler
        pack.rollout_logprobs[pack.loss_mask == 0] = filler
        trainer = MegatronTrainer(tmp_path / "hf", GRPO, seed=1)
        trainer.train_step([MiniBatch((pack,), 9.0)])
        digests.add(trainer.state_digest())
    assert len(digests) == 1


def test_the_gap_to_the_rollout_is_measured_before_the_first_update(tmp_path: Path) -> None:
    make_hf(tmp_path / "hf")
    trainer = MegatronTrainer(tmp_path / "hf", replace(GRPO, lr=0.05), seed=1)
    step = make_step(0)
    for mini_batch in step:
        for pack in mini_batch.micro_batches:
            pack.rollout_logprobs[:] = trainer.logprobs(pack)
    step[0].micro_batches[0].rollout_logprobs[step[0].micro_batches[0].loss_mask != 0] += 0.25
    metrics = trainer.train_step(step)
    assert metrics.logprob_gap_mean == pytest.approx(0.25, abs=1e-5)
    assert metrics.logprob_gap_max == pytest.approx(0.25, abs=1e-5)
    assert metrics.clip_fraction is not None
    assert metrics.clip_fraction > 0


def test_an_update_that_is_not_finite_is_left_out_whole_and_the_others_are_applied(tmp_path: Path) -> None:
    make_hf(tmp_path / "hf")
    good, bad = make_step(0), make_step(1)
    broken = bad[0].micro_batches[0]
    broken.rollout_logprobs[np.flatnonzero(broken.loss_mask)[0]] = -1e4  # the ratio overflows
    broken.advantages[:] = -1.0
    trainer, clean = (MegatronTrainer(tmp_path / "hf", GRPO, seed=1) for _ in range(2))
    metrics = trainer.train_step([good[0], bad[0], good[1]])
    assert metrics.skipped
    assert metrics.skipped_updates == 1
    assert metrics.loss is not None
    assert np.isfinite(metrics.loss)
    clean.train_step(good)
    assert trainer.updates == clean.updates == 2
    assert trainer.state_digest() == clean.state_digest()


def test_a_step_of_which_nothing_was_applied_reports_no_loss_and_moves_nothing(tmp_path: Path) -> None:
    make_hf(tmp_path / "hf")
    pack = make_pack(np.random.default_rng(0), [9])
    pack.rollout_logprobs[np.flatnonzero(pack.loss_mask)[0]] = -1e4
    pack.advantages[:] = -1.0
    trainer = MegatronTrainer(tmp_path / "hf", GRPO, seed=1)
    before = trainer.state_digest()
    metrics = trainer.train_step([MiniBatch((pack,), 4.0)])
    assert (metrics.loss, metrics.grad_norm, metrics.kl, metrics.skipped_updates) == (None, None, None, 1)
    assert trainer.state_digest() == before
    assert trainer.updates == 0


def test_a_new_stage_keeps_the_weights_and_forgets_the_optimizer_and_its_schedule(tmp_path: Path) -> None:
    make_hf(tmp_path / "hf")
    trainer = MegatronTrainer(tmp_path / "hf", SFT, seed=1)
    warm = [trainer.train_step(make_step(seed)) for seed in range(3)]
    assert [metrics.lr for metrics in warm] == pytest.approx([SFT.lr / 2, SFT.lr, SFT.lr])
    assert warm[0].clip_fraction is warm[0].kl is warm[0].logprob_gap_mean is None
    trainer.export_hf(tmp_path / "warm")
    trainer.begin_stage(GRPO)
    fresh = MegatronTrainer(tmp_path / "warm", GRPO, seed=1)
    assert trainer.weights_digest() == fresh.weights_digest()
    assert (trainer.stage, trainer.updates) == (1, 0)
    for each in (trainer, fresh):
        assert each.train_step(make_step(9)).lr == GRPO.lr
    assert trainer.state_digest() == fresh.state_digest()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"boundaries": np.array([0, 4, 4, 9], dtype=np.int32)}, "boundaries: must rise"),
        ({"boundaries": np.array([0, 4, 8], dtype=np.int32)}, "boundaries: must run from 0"),
        ({"loss_mask": np.ones(9, dtype=np.float32)}, "first token of a sequence"),
        ({"advantages": np.zeros(8, dtype=np.float32)}, "advantages: has shape"),
        ({"rollout_logprobs": np.full(9, np.nan, dtype=np.float32)}, "rollout_logprobs: a trained token"),
        ({"temperatures": np.zeros(2, dtype=np.float32)}, "temperatures: every sequence"),
        ({"temperatures": np.ones(3, dtype=np.float32)}, "temperatures: has shape"),
    ],
)
def test_a_malformed_pack_is_refused_when_it_is_made(change: dict[str, np.ndarray], message: str) -> None:
    pack = make_pack(np.random.default_rng(0), [4, 5])
    with pytest.raises(InvalidInputError, match=message):
        replace(pack, **change)


@pytest.mark.parametrize("token", [-1, VOCABULARY])
def test_a_token_outside_the_vocabulary_is_refused_even_as_the_last_of_a_sequence(
    tmp_path: Path, token: int
) -> None:
    make_hf(tmp_path / "hf")
    trainer = MegatronTrainer(tmp_path / "hf", GRPO, seed=1)
    pack = make_pack(np.random.default_rng(0), [4, 5])
    pack.tokens[-1] = token
    with pytest.raises(InvalidInputError, match=f"vocabulary has {VOCABULARY}"):
        trainer.train_step([MiniBatch((pack,), 4.0)])
