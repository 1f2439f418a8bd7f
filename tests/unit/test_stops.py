"""A response that was broken off anywhere ends where it would have ended: at its first stop text, also across the joint."""

from __future__ import annotations

import pytest

from strawflow.config import SamplingProfile
from strawflow_workers.quickstart.model import TINY, make_model
from strawflow_workers.rollout.stops import first_stop, is_at_end
from strawflow_workers.rollout.tokens import PromptTokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PromptTokenizer:
    return PromptTokenizer(make_model(tmp_path_factory.mktemp("model") / "tiny", seed=0, shape=TINY))


def profile(*stop: str, stop_token_ids: tuple[int, ...] = ()) -> SamplingProfile:
    return SamplingProfile(
        purpose="train",
        num_samples=1,
        temperature=1.0,
        top_p=1.0,
        max_response_tokens=100,
        stop=stop,
        stop_token_ids=stop_token_ids,
    )


@pytest.mark.parametrize(
    "text", ["so be it</answer> and on", "\u00e4\u20ac</answer>\u00f6 x", "<</answer></answer>"]
)
def test_every_break_before_or_inside_a_stop_text_ends_at_the_same_token(
    tokenizer: PromptTokenizer, text: str
) -> None:
    tokens = tokenizer.encode_text(text)
    whole = first_stop(tokens, start=0, profile=profile("</answer>"), decode=tokenizer.decode)
    assert whole is not None
    assert tokenizer.decode(tokens[:whole]).endswith("</answer>")
    assert tokenizer.decode(tokens[:whole]).count("</answer>") == 1
    for start in range(whole):
        kept = first_stop(tokens, start=start, profile=profile("</answer>"), decode=tokenizer.decode)
        assert kept == whole, f"broken off after {start} tokens"


def test_a_stop_text_that_the_response_had_already_passed_ends_nothing(tokenizer: PromptTokenizer) -> None:
    tokens = tokenizer.encode_text("one. two")
    assert first_stop(tokens, start=4, profile=profile("."), decode=tokenizer.decode) is None
    assert first_stop(tokens, start=0, profile=profile(), decode=tokenizer.decode) is None


def test_of_several_stop_texts_the_first_to_end_counts(tokenizer: PromptTokenizer) -> None:
    tokens = tokenizer.encode_text("abcdef")
    kept = first_stop(tokens, start=1, profile=profile("ef", "bcd"), decode=tokenizer.decode)
    assert kept is not None
    assert tokenizer.decode(tokens[:kept]) == "abcd"


def test_a_response_saved_with_its_ending_token_has_ended(tokenizer: PromptTokenizer) -> None:
    eos = tokenizer.eos_id
    assert is_at_end([5, eos], profile=profile(), eos_id=eos)
    assert is_at_end([5, 7], profile=profile(stop_token_ids=(7,)), eos_id=eos)
    assert not is_at_end([5, 7], profile=profile(), eos_id=eos)
    assert not is_at_end([], profile=profile(), eos_id=eos)
