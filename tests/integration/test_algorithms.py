"""Every loss, correction and divergence through the Megatron trainer, against the same objective told in plain torch."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from strawflow.config_algorithm import AlgorithmSection
from strawflow.errors import ConfigError
from strawflow_workers.rollout.hooks.interfaces_algorithm import LossTokens
from strawflow_workers.trainer.batches import MiniBatch, PackedMicroBatch, TrainSettings
from strawflow_workers.trainer.megatron import MegatronTrainer
from tests.integration.megatron_cases import GRPO, make_hf, make_pack, make_step

LOW, HIGH = 0.1, 0.2


def squared_gap(tokens: LossTokens) -> torch.Tensor:
    """A loss of a user: half the squared distance to the rollout's log-probabilities, weighted by the advantage."""
    return tokens.advantages * (tokens.logprobs - tokens.rollout_logprobs) ** 2 / 2


OWN = f"{__name__}:squared_gap"
RECOMPUTED = {"old_logprobs": "recomputed"}
MASK = {**RECOMPUTED, "mismatch_mode": "mask", "mismatch_low": 0.8, "mismatch_high": 1.25}
KL = {"kl": "loss", "kl_coefficient": 0.3}
CASES: dict[str, dict[str, Any]] = {
    "ppo": {},
    "dual clip": {"dual_clip": 1.1},
    "gspo": {"loss": "gspo"},
    "cispo": {"loss": "cispo"},
    "reinforce": {"loss": "reinforce"},
    "a hook": {"loss": OWN},
    "recomputed": RECOMPUTED,
    "truncated by token": {**RECOMPUTED, "mismatch": "token", "mismatch_high": 1.1},
    "truncated by sequence": {**RECOMPUTED, "mismatch": "sequence", "mismatch_high": 1.3},
    "masked by token": {**MASK, "mismatch": "token"},
    "masked by sequence": {**MASK, "mismatch": "sequence"},
    "masked by geometric mean": {
        **MASK,
        "mismatch": "geometric",
        "mismatch_low": 0.99,
        "mismatch_high": 1.1,
        "loss": "gspo",
    },
    "k2": {**KL, "kl_estimator": "k2"},
    "k3": {**KL, "kl_estimator": "k3"},
    "unbiased": {**KL, "kl_estimator": "unbiased"},
    "kl in reward": {"kl": "reward", "kl_coefficient": 0.05, "kl_estimator": "k1"},
    "k3 in reward": {"kl": "reward", "kl_coefficient": 0.05, "kl_estimator": "k3"},
    "entropy": {"entropy_coefficient": 0.2},
    "distilled": {"teacher": "reference", "distill_coefficient": 0.5},
}
SHORT = ("dual clip", "gspo", "a hook", "masked by geometric mean", "unbiased", "k3 in reward", "entropy")
"""What the gate takes: each part of the objective once."""


@dataclass
class World:
    trainer: MegatronTrainer
    model: Qwen3ForCausalLM
    other: Qwen3ForCausalLM
    root: Path
    pack: PackedMicroBatch


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A trainer, its model and another one in plain torch, and a pack whose ratios lie on both sides of the bounds."""
    root = tmp_path_factory.mktemp("algorithms")
    model, other = make_hf(root / "hf"), make_hf(root / "reference", seed=5)
    trainer = MegatronTrainer(root / "hf", GRPO, seed=1)
    rng = np.random.default_rng(3)
    pack = make_pack(rng, [9, 2, 14, 6], temperature=0.8)
    noise = rng.normal(0, 0.25, pack.tokens.size).astype(np.float32)
    pack = replace(pack, rollout_logprobs=np.minimum(trainer.logprobs(pack) + noise, -1e-3))
    pack.loss_mask[pack.boundaries[2] + 8 :] *= 0.5  # weights other than 1
    return World(trainer, model, other, root, pack)


def stage(world: World, algorithm: dict[str, Any], **more: Any) -> TrainSettings:
    """Settings that train nothing: with a rate of 0 every case begins from the same weights."""
    folders = {name: str(world.root / value) for name, value in algorithm.items() if name == "teacher"}
    if algorithm.get("kl"):
        folders["reference"] = str(world.root / "reference")
    section = AlgorithmSection.model_validate({**algorithm, **folders})
    return replace(GRPO, lr=0.0, clip_low=LOW, clip_high=HIGH, algorithm=section, **more)


def logprobs_of(model: Qwen3ForCausalLM, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
    """Log-softmax of every distribution that predicts a token of a sequence, [n - 1, vocabulary]."""
    return (model(input_ids=tokens[None]).logits[0, :-1] / temperature).log_softmax(-1)


def plain_loss(world: World, a: AlgorithmSection) -> torch.Tensor:
    """The sum over sequences of the weighted losses of their trained tokens, told sequence by sequence."""
    pack, total = world.pack, torch.zeros(())
    for index, (start, end) in enumerate(itertools.pairwise(pack.boundaries.tolist())):
        ids = torch.from_numpy(pack.tokens[start:end].astype(np.int64))
        temperature = float(pack.temperatures[index])
        keep = torch.from_numpy(pack.loss_mask[start + 1 : end] != 0)
        weights, rollout, advantages = (
            torch.from_numpy(column[start + 1 : end])[keep]
            for column in (pack.loss_mask, pack.rollout_logprobs, pack.advantages)
        )
        table = logprobs_of(world.model, ids, temperature)[keep]
        new = table.gather(1, ids[1:][keep][:, None])[:, 0]
        with torch.no_grad():
            other = logprobs_of(world.other, ids, temperature)[keep].gather(1, ids[1:][keep][:, None])[:, 0]
        total = total + (weights * plain_token_losses(a, new, rollout, advantages, other, table)).sum()
    return total


def plain_token_losses(
    a: AlgorithmSection,
    new: torch.Tensor,
    rollout: torch.Tensor,
    advantages: torch.Tensor,
    other: torch.Tensor,
    table: torch.Tensor,
) -> torch.Tensor:
    if a.teacher:
        advantages = advantages + a.distill_coefficient * (other - rollout)
    if a.kl == "reward":
        each = rollout - other if a.kl_estimator == "k1" else (other - rollout).exp() - 1 - (other - rollout)
        advantages = advantages - a.kl_coefficient * each.flip(0).cumsum(0).flip(0)
    old = new.detach() if a.old_logprobs == "recomputed" else rollout
    ratio = (new - old).exp()
    if a.loss == "gspo":
        of_all = (new - old).mean().exp().detach()
        ratio = of_all * (new - new.detach()).exp()
    if a.loss == "cispo":
        found = -(ratio.detach().clip(1 - LOW, 1 + HIGH) * advantages * new)
    elif a.loss == "reinforce":
        found = -(advantages * new)
    elif a.loss == OWN:
        found = advantages * (new - rollout).square() * 0.5
    else:
        found = torch.max(-ratio * advantages, -ratio.clip(1 - LOW, 1 + HIGH) * advantages)
        if a.dual_clip:
            found = torch.where(advantages < 0, found.minimum(-a.dual_clip * advantages), found)
    if a.mismatch != "none":
        gap = new.detach() - rollout
        level = {"token": gap, "sequence": gap.sum(), "geometric": gap.mean()}[a.mismatch].exp()
        if a.mismatch_mode == "truncate":
            found = found * level.clip(max=a.mismatch_high)
        else:
            found = found * ((level >= a.mismatch_low) & (level <= a.mismatch_high)).float()
    if a.kl == "loss":
        k3 = (other - new).exp() - 1 - (other - new)
        values = {"k2": (other - new).square() / 2, "k3": k3, "unbiased": (new - old).exp() * k3}
        found = found + a.kl_coefficient * values[a.kl_estimator]
    if a.entropy_coefficient:
        found = found + a.entropy_coefficient * (table.exp() * table).sum(-1)
    return found


def check_against_plain(world: World, name: str) -> None:
    settings = stage(world, CASES[name])
    world.trainer.begin_stage(settings)
    metrics = world.trainer.train_step([MiniBatch((world.pack,), 7.0)])
    world.model.zero_grad()
    expected = plain_loss(world, settings.algorithm) / 7.0
    expected.backward()
    norm = torch.stack([p.grad.norm() for p in world.model.parameters() if p.grad is not None]).norm()
    assert metrics.loss is not None, f"{name}: the update was not applied"
    assert metrics.loss == pytest.approx(expected.item(), rel=2e-4, abs=2e-6), name
    assert metrics.grad_norm == pytest.approx(norm.item(), rel=2e-4), name
    assert norm.item() > 1e-3, f"{name}: nothing is learnt, so nothing is compared"


def test_losses_corrections_and_divergences_are_those_of_plain_torch(world: World) -> None:
    for name in SHORT:
        check_against_plain(world, name)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in CASES if name not in SHORT])
def test_every_further_setting_is_that_of_plain_torch(world: World, name: str) -> None:
    check_against_plain(world, name)


def test_entropy_divergence_and_corrected_share_are_told_where_they_are_asked_for(world: World) -> None:
    world.trainer.begin_stage(stage(world, {**MASK, **KL, "mismatch": "token", "measure_entropy": True}))
    metrics = world.trainer.train_step([MiniBatch((world.pack,), 7.0)])
    found: dict[str, list[float]] = {"entropy": [], "kl": [], "corrected": []}
    pack = world.pack
    with torch.no_grad():
        for start, end in itertools.pairwise(pack.boundaries.tolist()):
            ids = torch.from_numpy(pack.tokens[start:end].astype(np.int64))
            keep = pack.loss_mask[start + 1 : end] != 0
            table = logprobs_of(world.model, ids, 0.8)
            new = table.gather(1, ids[1:, None])[:, 0].numpy()[keep]
            other = logprobs_of(world.other, ids, 0.8).gather(1, ids[1:, None])[:, 0].numpy()[keep]
            found["entropy"] += (-(table.exp() * table).sum(-1)).numpy()[keep].tolist()
            found["kl"] += (np.exp(other - new) - 1 - (other - new)).tolist()
            ratio = np.exp(new - pack.rollout_logprobs[start + 1 : end][keep])
            found["corrected"] += ((ratio < 0.8) | (ratio > 1.25)).tolist()
    assert metrics.entropy == pytest.approx(np.mean(found["entropy"]), rel=1e-4)
    assert metrics.reference_kl == pytest.approx(np.mean(found["kl"]), rel=1e-3)
    assert metrics.corrected_fraction == pytest.approx(np.mean(found["corrected"]))
    assert 0 < np.mean(found["corrected"]) < 1
    world.trainer.begin_stage(stage(world, {}))
    plain = world.trainer.train_step([MiniBatch((world.pack,), 7.0)])
    assert (plain.entropy, plain.reference_kl, plain.corrected_fraction) == (None, None, None)


def test_with_gspo_the_clipped_share_is_that_of_sequences(world: World) -> None:
    world.trainer.begin_stage(stage(world, {"loss": "gspo"}))
    metrics = world.trainer.train_step([MiniBatch((world.pack,), 7.0)])
    pack, new = world.pack, world.trainer.logprobs(world.pack)
    outside = []
    for start, end in itertools.pairwise(pack.boundaries.tolist()):
        keep = pack.loss_mask[start:end] != 0
        ratio = np.exp((new - pack.rollout_logprobs)[start:end][keep].mean())
        outside += [not 1 - LOW <= ratio <= 1 + HIGH] * int(keep.sum())
    assert metrics.clip_fraction == pytest.approx(np.mean(outside))
    world.trainer.begin_stage(stage(world, {}))
    by_token = world.trainer.train_step([MiniBatch((world.pack,), 7.0)])
    assert by_token.clip_fraction is not None
    assert abs(by_token.clip_fraction - metrics.clip_fraction) > 0.05


def test_old_log_probabilities_are_those_before_the_first_update_of_the_step(world: World) -> None:
    settings = replace(stage(world, RECOMPUTED), lr=0.01)
    first, second = make_step(4)
    trainer, told = (MegatronTrainer(world.root / "hf", settings, seed=1) for _ in range(2))
    trainer.train_step([first, second])
    # The same with the columns given: ratios against what the first weights say of both.
    told.begin_stage(replace(settings, algorithm=AlgorithmSection()))
    given = [
        replace(
            mini,
            micro_batches=tuple(replace(p, rollout_logprobs=told.logprobs(p)) for p in mini.micro_batches),
        )
        for mini in (first, second)
    ]
    before = told.weights_digest()
    told.train_step(given)
    assert told.weights_digest() != before
    found, expected = trainer._rank_state().tensors, told._rank_state().tensors
    for name, tensor in found.items():
        if name.startswith("parameter/"):
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6)


def test_settings_go_with_a_checkpoint_and_come_back(world: World, tmp_path: Path) -> None:
    settings = stage(world, {**KL, "loss": "gspo", "entropy_coefficient": 0.1})
    trainer = MegatronTrainer(world.root / "hf", replace(settings, lr=1e-3), seed=1)
    trainer.train_step(make_step(0))
    trainer.save_checkpoint(tmp_path / "checkpoint")
    again = MegatronTrainer(world.root / "hf", GRPO, seed=1)
    again.load_checkpoint(tmp_path / "checkpoint")
    assert again.settings == trainer.settings
    for each in (trainer, again):
        each.train_step(make_step(1))
    assert again.state_digest() == trainer.state_digest()


def test_a_reference_of_another_vocabulary_and_a_loss_that_cannot_be_loaded_are_refused_at_the_start(
    world: World, tmp_path: Path
) -> None:
    make_hf(tmp_path / "small", vocab_size=64)
    section = AlgorithmSection(kl="loss", kl_coefficient=0.1, reference=str(tmp_path / "small"))
    with pytest.raises(ConfigError, match=r"algorithm.reference: .* vocabulary of 64, the trained one 96"):
        MegatronTrainer(world.root / "hf", replace(GRPO, algorithm=section), seed=1)
    with pytest.raises(ConfigError, match="has no 'sqared_gap'; did you mean 'squared_gap'"):
        MegatronTrainer(
            world.root / "hf",
            replace(GRPO, algorithm=AlgorithmSection(loss=f"{__name__}:sqared_gap")),
            seed=1,
        )


def test_an_update_above_the_bound_is_left_out_and_what_was_decided_is_decided_again(world: World) -> None:
    good, large, last = make_step(6, num_updates=3)
    large = replace(large, denominator=large.denominator / 1e4)
    digests = {}
    for name, options in {
        "bound": {"max_grad_norm": 50.0},
        "decided": {"left_out": [1]},
        "set aside": {"max_grad_norm": 50.0, "sets_aside": True},
        "only the first": {"left_out": [1, 2]},
        "decided that none is": {"max_grad_norm": 50.0, "left_out": []},
        "no bound": {},
    }.items():
        bound = options.pop("max_grad_norm", 0.0)
        trainer = MegatronTrainer(world.root / "hf", replace(GRPO, max_grad_norm=bound), seed=1)
        metrics = trainer.train_step([good, large, last], **options)
        digests[name] = (metrics.left_out, trainer.updates, trainer.state_digest())
    assert digests["bound"][:2] == ((1,), 2)
    assert digests["decided"] == digests["bound"]
    assert digests["set aside"][:2] == ((1, 2), 1)
    assert digests["only the first"] == digests["set aside"]
    assert digests["no bound"][:2] == ((), 3)
    assert digests["decided that none is"] == digests["no bound"]
    assert len({digest for *_, digest in digests.values()}) == 3
