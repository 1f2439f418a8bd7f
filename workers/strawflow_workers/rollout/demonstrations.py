"""Demonstrations: labelled prompts as finished units of the supervised warm start; they need no engine."""

from __future__ import annotations

from strawflow.flow.claim import Grant
from strawflow.flow.trajectory import Member, UnitResult, failed_member
from strawflow_workers.rollout.tokens import PromptTokenizer


def demonstration(grant: Grant, tokenizer: PromptTokenizer) -> UnitResult:
    """Return a labelled prompt as a finished member: the label's tokens and the end of sequence, sampled by no weights."""
    label, inputs = grant.prompt.label, tokenizer.inputs(grant.prompt)
    if label is None:
        member = failed_member(0, "the demonstration has no label")
    else:
        tokens = [*tokenizer.encode_text(label), tokenizer.eos_id]
        member = Member(
            member=0,
            status="finished",
            response_tokens=tokens,
            logprobs=[0.0] * len(tokens),
            token_versions=[""] * len(tokens),
            finish_reason="stop",
            reward=1.0,
            response_text=label,
            tensors=inputs.tensors,
        )
    return grant.result([member], prompt_tokens=inputs.tokens, engine="demonstration")
