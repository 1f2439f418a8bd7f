"""The contract tests of hooks of the algorithm: asked with made-up groups, sizes and tokens, twice, and with a part of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from strawflow.errors import ConfigError
from strawflow_workers.rollout.hooks.check_prompts import Finding
from strawflow_workers.rollout.hooks.interfaces_algorithm import (
    Advantage,
    Loss,
    LossTokens,
    Reducer,
    RolloutSize,
)
from strawflow_workers.rollout.hooks.load_algorithm import checked_advantage, checked_loss, checked_reducer
from strawflow_workers.rollout.hooks.made_up import groups, stored_rows

LENGTHS = (3, 1, 4)
_SAME = "says the same of the same"


def check_advantage(hook: Advantage) -> list[Finding]:
    """Ask for the advantages of groups of equal and different rewards, with a failed member and with two segments."""
    asked = [(number, stored_rows(group)) for number, group in enumerate(groups())]
    found, findings = _asked("returns an advantage for each member", lambda: checked_advantage(hook)(asked))
    if found is None:
        return findings
    told = "; ".join(" ".join(f"{value:g}" for value in of_group) for of_group in found)
    same = all(np.array_equal(*pair) for pair in zip(found, checked_advantage(hook)(asked), strict=True))
    return [*findings[:-1], Finding(findings[-1].requirement, True, told), _is_same(same)]


def check_reducer(hook: Reducer) -> list[Finding]:
    """Ask for the weights of two mini-batches, one of a single rollout."""
    asked = [[RolloutSize(1, 0, 3), RolloutSize(1, 1, 5), RolloutSize(2, 0, 1)], [RolloutSize(2, 1, 4)]]
    found, findings = _asked("returns weights and a denominator", lambda: checked_reducer(hook)(asked))
    if found is None:
        return findings
    told = "; ".join(f"{list(r.weights)} / {r.denominator:g}" for r in found)
    return [
        *findings[:-1],
        Finding(findings[-1].requirement, True, told),
        _is_same(found == checked_reducer(hook)(asked)),
    ]


def check_loss(hook: Loss) -> list[Finding]:
    """Ask for the losses of three sequences, differentiate them, and ask for those of the first sequence alone."""
    ask = checked_loss(hook)
    tokens = _tokens()
    try:
        found = ask(tokens)
        found.sum().backward()  # type: ignore[no-untyped-call]
    except ConfigError as error:
        return [Finding("returns the loss of each token, with a gradient", False, error.message)]
    except RuntimeError as error:  # what torch says of a graph that cannot be differentiated
        return [Finding("returns the loss of each token, with a gradient", False, str(error))]
    gradient = tokens.logprobs.grad
    is_finite = bool(found.isfinite().all()) and gradient is not None and bool(gradient.isfinite().all())
    again = ask(_tokens())
    first = ask(_tokens(LENGTHS[:1]))
    is_own = bool(np.allclose(first.detach().numpy(), found.detach().numpy()[: LENGTHS[0]], rtol=1e-5))
    return [
        Finding(
            "returns the loss of each token, with a gradient", True, f"sum {float(found.detach().sum()):g}"
        ),
        Finding("loss and gradient are finite", is_finite),
        _is_same(bool((found == again).all())),
        Finding(
            "the loss of a sequence does not depend on others",
            is_own,
            ""
            if is_own
            else "others may be in another micro-batch: leave means and counts to algorithm.aggregation",
        ),
    ]


def _tokens(lengths: tuple[int, ...] = LENGTHS) -> LossTokens:
    """Return tokens of the first sequences of a made-up micro-batch."""
    import torch

    num = sum(lengths)
    generator = np.random.default_rng(0)
    table = generator.uniform(-2.0, -0.1, (sum(LENGTHS), 4)).astype(np.float32)[:num]
    logprobs, old, rollout, reference = (torch.from_numpy(table[:, at].copy()) for at in range(4))
    advantages = torch.from_numpy(np.linspace(-1, 1, sum(LENGTHS), dtype=np.float32)[:num].copy())
    return LossTokens(
        logprobs=logprobs.requires_grad_(),
        old_logprobs=old,
        rollout_logprobs=rollout,
        advantages=advantages,
        lengths=torch.tensor(lengths),
        reference_logprobs=reference,
    )


def _asked(requirement: str, ask: Callable[[], Any]) -> tuple[Any, list[Finding]]:
    try:
        return ask(), [Finding(requirement, True)]
    except ConfigError as error:
        return None, [Finding(requirement, False, error.message)]


def _is_same(same: bool) -> Finding:
    return Finding(_SAME, same, "" if same else "it is asked again after a restart and on replay")
