"""When an engine is blamed for garbage: several groups in a row, never one prompt alone."""

from __future__ import annotations

from strawflow_workers.rollout.engine_trust import SOUND_AFTER_QUARANTINE, EngineTrust


def test_garbage_in_answers_to_several_groups_in_a_row_is_the_engines() -> None:
    trust = EngineTrust(limit=3)
    assert trust.garbage("u1.7.m0-4", "nan") is None
    assert trust.garbage("u2.8.m0-4", "nan") is None
    assert trust.garbage("u3.9.m0-4", "-9999") == "garbage in answers to 3 groups in a row, the last: -9999"


def test_however_often_one_prompt_is_answered_with_garbage_it_is_the_prompts() -> None:
    trust = EngineTrust(limit=2)
    assert {trust.garbage(f"u1.7.m{number}-1", "nan") for number in range(50)} == {None}
    assert trust.garbage("u2.7.m0-1", "nan") is not None


def test_one_sound_answer_ends_the_row() -> None:
    trust = EngineTrust(limit=2)
    trust.garbage("u1.7.m0-4", "nan")
    trust.sound(num_tokens=10)
    assert trust.garbage("u2.8.m0-4", "nan") is None


def test_without_a_limit_no_engine_is_blamed() -> None:
    trust = EngineTrust(limit=0)
    assert {trust.garbage(f"u{number}.1.m0", "nan") for number in range(50)} == {None}


def test_what_was_seen_is_told_once_and_quarantines_are_forgotten_after_a_while() -> None:
    trust = EngineTrust(limit=3)
    trust.garbage("u1.7.m0-4", "nan")
    trust.sound(num_tokens=10)
    first, second = trust.seen(), trust.seen()
    assert (first.num_garbage, first.last_error, first.serves_well) == (1, "nan", False)
    assert first.tokens_per_s > 0
    assert (second.num_garbage, second.last_error, second.tokens_per_s) == (0, None, 0)
    for _ in range(SOUND_AFTER_QUARANTINE):
        trust.sound(num_tokens=1)
    assert trust.seen().serves_well
