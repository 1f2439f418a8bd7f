"""The section `algorithm`: how rewards become advantages, what loss a token has, and how token losses add up.

1. `advantage`, `loss` and `aggregation` are names of ours or a hook `package.module:function`.
2. Combinations that cannot mean anything, and those that need data which a run does not have, are refused when the run is
   created, with the reason (`refuse_senseless`).
3. The defaults are what runs did before the section existed: GRPO, clipped surrogate, every trained token the same weight.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, field_validator

from strawflow.dotted_path import is_dotted_path
from strawflow.errors import ConfigError
from strawflow.section import Section

ADVANTAGES = ("grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "reward", "none")
COMPARING = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline")
"""Advantages that compare the samples of a prompt: a group of equal rewards has none."""
LOSSES = ("ppo", "gspo", "cispo", "reinforce")
AGGREGATIONS = ("token", "rollout", "prompt", "constant")

_LACKING = {
    "gae": "values of a critic, which no worker of a run makes (the formula is trainer.advantages.gae)",
    "dpo": "pairs of one chosen and one rejected response and reference log-probabilities, which a batch does not hold (the "
    "formula is trainer.losses.dpo_loss)",
    "value": "values of a critic, which no worker of a run makes (the formula is trainer.losses.value_loss)",
}
"""Names that are known and cannot run, with what each needs."""


class AlgorithmSection(Section):
    advantage: str = "grpo"
    """How rewards become advantages: `grpo`, `dr_grpo`, `rloo`, `reinforce_pp`, `reinforce_pp_baseline`, `reward` (as it is),
    `none` (0: what the teacher says alone), or a hook `package.module:function`."""
    overlong_buffer: int = Field(default=0, ge=0)
    """Responses that come nearer than so many tokens to their longest allowed length lose reward in proportion (DAPO's soft
    punishment), before advantages are made of it; 0: none does."""
    overlong_penalty: float = Field(default=1.0, ge=0)
    """What a response of the longest allowed length loses then."""
    mask_truncated: bool = False
    """Responses that were cut off at the longest allowed length are not trained; their rewards count in the baseline."""
    loss: str = "ppo"
    """Loss of a token: `ppo` (clipped surrogate: GRPO, DAPO), `gspo`, `cispo`, `reinforce`, or a hook
    `package.module:function`. The bounds are trainer.clip_low and trainer.clip_high."""
    dual_clip: float = Field(default=0.0, ge=0)
    """Loss `ppo`: a token of negative advantage A loses at most -dual_clip * A; above 1. 0: no such bound."""
    aggregation: str = "token"
    """What weighs the same in an update: every trained `token`, every `rollout` (its segments share its weight), every `prompt`;
    `constant`: tokens divided by rollout.max_response_tokens, as in Dr. GRPO; or a hook `package.module:function`."""
    old_logprobs: Literal["rollout", "recomputed"] = "rollout"
    """Whose log-probabilities the ratio is taken against: the engine's, or the trainer's own, computed before the first update
    of a step."""
    mismatch: Literal["none", "token", "sequence", "geometric"] = "none"
    """Corrects for an engine whose probabilities are not the trainer's, with `old_logprobs` recomputed: by the ratio of each token,
    of its whole sequence, or by the geometric mean of the sequence's ratios."""
    mismatch_mode: Literal["truncate", "mask"] = "truncate"
    """`truncate`: the token's loss is multiplied by the ratio, at most mismatch_high (truncated importance sampling); `mask`: by 0
    where the ratio lies outside [mismatch_low, mismatch_high], else by 1."""
    mismatch_low: float = Field(default=0.5, ge=0)
    mismatch_high: float = Field(default=2.0, gt=0)
    kl: Literal["none", "loss", "reward"] = "none"
    """Where the divergence from the reference model counts: nowhere; in the loss of a token; or in its advantage, which loses what
    the tokens from it on diverge by."""
    kl_coefficient: float = Field(default=0.0, ge=0)
    kl_estimator: Literal["k1", "k2", "k3", "unbiased"] = "k3"
    """Schulman's estimators; `unbiased` is k3 weighted by the probability ratio, so that its gradient is that of the divergence."""
    reference: str = ""
    """Hugging Face checkpoint folder of the reference model, same vocabulary; empty: the one that the run starts from. The trainer
    loads it beside its own model when `kl` asks for it."""
    teacher: str = ""
    """Hugging Face checkpoint folder of a teacher, same vocabulary: on-policy distillation. Empty: none."""
    distill_coefficient: float = Field(default=1.0, gt=0)
    """With a teacher, the advantage of a token gains so much times its log-probability there less that in the rollout."""
    entropy_coefficient: float = 0.0
    """So much times the entropy of each trained token's distribution is taken from the loss."""
    measure_entropy: bool = False
    """Tell the mean entropy of each step also without a coefficient; takes a second pass over the logits."""

    @field_validator("advantage", "loss", "aggregation")
    @classmethod
    def _is_known(cls, name: str, given: Any) -> str:
        known: Sequence[str] = {"advantage": ADVANTAGES, "loss": LOSSES, "aggregation": AGGREGATIONS}[
            given.field_name
        ]
        if name in known or is_hook(name):
            return name
        if name in _LACKING:
            raise ConfigError(f"{name!r} needs {_LACKING[name]}; choose one of {', '.join(known)}")
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{name!r} is none of {', '.join(known)}, nor package.module:function{hint}")

    @property
    def needs_reference(self) -> bool:
        """Whether the reference model's log-probabilities enter a step."""
        return self.kl != "none"


def is_hook(name: str) -> bool:
    """Tell a hook's dotted path from a name of ours."""
    return is_dotted_path(name)


def refuse_senseless(a: AlgorithmSection, *, clip_low: float, mini_batches: int) -> None:
    """Raise ConfigError for settings that contradict each other or would do nothing, with the reason and what to do."""
    for wrong, reason in _contradictions(a, clip_low=clip_low, mini_batches=mini_batches):
        if wrong:
            raise ConfigError(reason)


def refuse_single_samples(a: AlgorithmSection, *, samples_per_prompt: int) -> None:
    """Raise ConfigError where advantages compare the samples of a prompt, and there is one."""
    if samples_per_prompt == 1 and a.advantage in COMPARING:
        raise ConfigError(
            f"algorithm.advantage {a.advantage} compares the samples of a prompt, and rollout.samples_per_prompt is 1: every "
            "group would be without signal; choose reinforce_pp or reward, or sample more"
        )


def _contradictions(a: AlgorithmSection, *, clip_low: float, mini_batches: int) -> list[tuple[bool, str]]:
    """Return (does it hold, what is wrong with it) for each."""
    return [
        (
            0 < a.dual_clip <= 1,
            f"algorithm.dual_clip {a.dual_clip}: the bound must be above 1, or 0 for none",
        ),
        (
            a.dual_clip > 0 and a.loss != "ppo",
            f"algorithm.dual_clip bounds the loss `ppo`, and algorithm.loss is {a.loss}: leave dual_clip at 0",
        ),
        (
            a.loss in ("ppo", "gspo") and clip_low > 1,
            f"trainer.clip_low {clip_low} with algorithm.loss {a.loss}: a ratio is never below 0; choose at most 1",
        ),
        (
            a.mismatch != "none" and a.old_logprobs == "rollout",
            f"algorithm.mismatch {a.mismatch} corrects from the engine's log-probabilities to the trainer's own: set "
            "algorithm.old_logprobs to recomputed",
        ),
        (
            a.mismatch != "none" and a.mismatch_mode == "mask" and a.mismatch_low >= a.mismatch_high,
            f"algorithm.mismatch_low {a.mismatch_low} >= algorithm.mismatch_high {a.mismatch_high}: every token would be masked",
        ),
        (
            a.mismatch == "none" and a.mismatch_mode != "truncate",
            "algorithm.mismatch_mode without algorithm.mismatch does nothing: name token, sequence or geometric",
        ),
        (
            (a.kl == "none") != (a.kl_coefficient == 0),
            f"algorithm.kl {a.kl} with algorithm.kl_coefficient {a.kl_coefficient}: set both, or neither",
        ),
        (
            bool(a.reference) and a.kl == "none",
            "algorithm.reference is used by algorithm.kl alone, which is none: set kl to loss or reward",
        ),
        (
            a.kl == "reward" and a.kl_estimator == "unbiased",
            "algorithm.kl_estimator unbiased is weighted by the ratio of the update, and in the reward there is none yet: choose "
            "k1, k2 or k3",
        ),
        (
            a.kl == "loss" and a.kl_estimator == "k1",
            "algorithm.kl_estimator k1 in the loss has a gradient whose mean is 0, so it would only add noise: choose k2, k3 or "
            "unbiased, or kl reward",
        ),
        (
            a.advantage == "none" and not a.teacher,
            "algorithm.advantage none leaves nothing to learn from: name algorithm.teacher, or another advantage",
        ),
        (
            a.loss == "reinforce" and mini_batches > 1,
            f"algorithm.loss reinforce is right for the policy that sampled, and assemble.mini_batches {mini_batches} moves it "
            "within a step: set mini_batches to 1, or choose ppo or cispo",
        ),
    ]


LATER_NAMES = {"assemble.advantage": "algorithm.advantage"}
"""Earlier names of settings: read from files and stored configurations, not taken as flags."""


def moved(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration tree with `assemble.advantage`, its earlier name, as `algorithm.advantage`.

    Raises:
        ConfigError: both are given and differ.
    """
    assemble = tree.get("assemble")
    if not isinstance(assemble, Mapping) or "advantage" not in assemble:
        return dict(tree)
    earlier = assemble["advantage"]
    algorithm = tree.get("algorithm") or {}
    if isinstance(algorithm, Mapping) and algorithm.get("advantage", earlier) != earlier:
        raise ConfigError(
            f"assemble.advantage {earlier!r} is the earlier name of algorithm.advantage, which says "
            f"{algorithm['advantage']!r}: leave it out"
        )
    return {
        **tree,
        "assemble": {name: value for name, value in assemble.items() if name != "advantage"},
        "algorithm": {**algorithm, "advantage": earlier},
    }
