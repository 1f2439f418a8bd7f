"""Identity and stored forms of prompt rows: what is kept verbatim, and what makes two rows the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strawflow import records
from strawflow.errors import InvalidInputError
from strawflow.prompts import PromptKeys, PromptRow, from_record_batch, to_json_line, to_record_batch
from strawflow.prompts.check_row import BadRowError, RowRules
from strawflow.prompts.row import content_digest
from strawflow.prompts.strict_json import StrictJsonError, dump, parse

KEYS = PromptKeys("prompt", "label", "meta")
RULES = RowRules(KEYS, "memory.jsonl")


def check(line: str) -> PromptRow:
    return RULES.check(parse(line), line=1)


@pytest.mark.parametrize(
    "text",
    [
        '{"b":1.50,"a":[0,4,"x"],"c":{"z":1e5,"y":-0,"x":-0.0}}',
        '{"many":123456789012345678901234567890,"digits":0.1234567890123456789012345,"huge":1e999}',
        '{"u":"\u2028\u2029\u0085","e":"\\u0000\\n\\"","t":[true,false,null,{},[]]}',
        "[" + "9" * 5000 + "]",
    ],
)
def test_json_is_kept_to_the_letter_of_its_numbers_and_the_order_of_its_keys(text: str) -> None:
    assert dump(parse(text)) == text


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=20,
    )
)
def test_any_json_value_survives_parse_and_dump(value: Any) -> None:
    text = json.dumps(value, ensure_ascii=True)
    assert json.loads(dump(parse(text))) == value
    assert dump(parse(dump(parse(text)))) == dump(parse(text))


@pytest.mark.parametrize(
    "text, reason",
    [
        ("{", "not_json"),
        ("{} {}", "not_json"),
        ('{"a":"\n"}', "not_json"),
        ('{"a":"\x00"}', "not_json"),
        ('{"a":1,"a":2}', "duplicate_key"),
        ('{"o":{"a":1,"b":0,"a":1}}', "duplicate_key"),
        ("[NaN]", "non_finite_number"),
        ("[-Infinity]", "non_finite_number"),
        ("[" * 100_000, "nested_too_deeply"),
        (r'"\ud83d"', "lone_surrogate"),
        (r'{"\uDE00":1.50}', "lone_surrogate"),
    ],
)
def test_what_is_not_strict_json_is_refused_by_reason(text: str, reason: str) -> None:
    with pytest.raises(StrictJsonError) as caught:
        parse(text)
    assert caught.value.reason == reason


def test_a_whole_surrogate_pair_is_one_character() -> None:
    assert parse(r'"\ud83d\ude00"') == "\U0001f600"


def test_a_number_label_keeps_its_text_and_differs_from_the_string_of_it() -> None:
    number, string = (
        check('{"prompt":"p","label":1.50,"meta":null}'),
        check('{"prompt":"p","label":"1.50","meta":null}'),
    )
    assert (number.label, number.label_format) == ("1.50", "json")
    assert (string.label, string.label_format) == ("1.50", "text")
    assert number.content_digest != string.content_digest


def test_the_digest_sees_which_field_holds_what() -> None:
    def digest(prompt: str, label: str | None, metadata: str | None) -> bytes:
        return content_digest(
            prompt, "text", label=label, label_format=None if label is None else "text", metadata=metadata
        )

    contents = [("ab", None, None), ("a", "b", None), ("a", None, "b"), ("ab", "", None), ("ab", None, "")]
    digests = {digest(*content) for content in contents}
    assert len(digests) == len(contents)
    assert all(len(one) == 16 for one in digests)
    as_messages = content_digest("ab", "messages", label=None, label_format=None, metadata=None)
    assert as_messages not in digests


def test_the_digest_of_known_rows_never_changes() -> None:
    """Row identity is stored: another value here would enqueue every old file again."""
    row = check('{"prompt":"Spell\u2028this","label":[0,4,"x"],"meta":{"b":1.50,"a":null}}')
    assert row.content_digest.hex() == "9da3a0562fd989517e03a3142a0dd805"
    plain = content_digest("p", "text", label=None, label_format=None, metadata=None)
    assert plain.hex() == "a243efeaf844cb1972e51d6e54b0c978"


def test_white_space_between_json_tokens_is_not_content() -> None:
    spaced = check('{ "prompt" : "p" , "label" : [ 1 , 2 ] , "meta" : { "a" : 1 } }')
    assert spaced.content_digest == check('{"prompt":"p","label":[1,2],"meta":{"a":1}}').content_digest


@pytest.mark.parametrize(
    "line, reason",
    [
        ("[1]", "not_object"),
        ('"text"', "not_object"),
        ("null", "not_object"),
        ('{"label":1,"meta":null}', "missing_key"),
        ('{"prompt":"p","meta":null}', "missing_key"),
        ('{"prompt":"p","label":null}', "missing_key"),
        ('{"prompt":null,"label":null,"meta":null}', "null_prompt"),
        ('{"prompt":"","label":null,"meta":null}', "empty_prompt"),
        ('{"prompt":" \\n\\t","label":null,"meta":null}', "empty_prompt"),
        ('{"prompt":[],"label":null,"meta":null}', "empty_prompt"),
        ('{"prompt":[{"role":"user","content":""}],"label":null,"meta":null}', "empty_prompt"),
        ('{"prompt":3,"label":null,"meta":null}', "wrong_type"),
        ('{"prompt":1.50,"label":null,"meta":null}', "wrong_type"),
        ('{"prompt":{"role":"user"},"label":null,"meta":null}', "wrong_type"),
        ('{"prompt":"p","label":null,"meta":[1]}', "wrong_type"),
        ('{"prompt":"p","label":null,"meta":"no json"}', "wrong_type"),
        ('{"prompt":["hello"],"label":null,"meta":null}', "malformed_messages"),
        ('{"prompt":[{"content":"x"}],"label":null,"meta":null}', "malformed_messages"),
        ('{"prompt":[{"role":"user"}],"label":null,"meta":null}', "malformed_messages"),
        ('{"prompt":[{"role":"user","content":7}],"label":null,"meta":null}', "malformed_messages"),
        (
            '{"prompt":[{"role":"u","content":"x"},{"role":"a","content":null}],"label":null,"meta":null}',
            "malformed_messages",
        ),
    ],
)
def test_a_bad_row_is_refused_by_reason(line: str, reason: str) -> None:
    with pytest.raises(BadRowError) as caught:
        check(line)
    assert caught.value.reason == reason
    assert caught.value.detail


def test_messages_are_kept_verbatim_whatever_the_shape_of_their_content() -> None:
    for content in ('"text"', '[{"type":"text","text":"hi"}]', '{"text":"hi","n":1.0}'):
        messages = f'[{{"role":"user","content":{content},"name":"x"}}]'
        row = check(f'{{"prompt":{messages},"label":null,"meta":null}}')
        assert (row.prompt, row.prompt_format) == (messages, "messages")


def test_an_assistant_turn_of_tool_calls_needs_no_content() -> None:
    row = check(
        '{"prompt":[{"role":"assistant","content":null,"tool_calls":[{"id":"1"}]}],"label":null,"meta":null}'
    )
    assert row.prompt_format == "messages"


def test_blank_prompts_pass_when_asked_for_but_null_ones_never() -> None:
    rules = RowRules(PromptKeys(), "m", allow_empty=True)
    assert rules.check({"prompt": " "}, line=1).prompt == " "
    assert rules.check({"prompt": []}, line=1).prompt == "[]"
    with pytest.raises(ValueError, match="is null"):
        rules.check({"prompt": None}, line=1)


def test_rows_survive_arrow_and_json_lines_with_the_same_digests() -> None:
    lines = [
        '{"prompt":"a\u2028b\\u0000","label":null,"meta":null}',
        '{"prompt":[{"role":"user","content":"x"}],"label":[[0,4,"x"]],"meta":{"n":1.50}}',
        '{"prompt":"p","label":"null","meta":{}}',
    ]
    rows = [check(line) for line in lines]
    batch = to_record_batch(rows, first_position=40, occurrences=[0, 0, 2])
    records.check_schema(batch.schema, "prompt", path="memory")
    batch.validate(full=True)
    assert batch.column("position").to_pylist() == [40, 41, 42]
    assert batch.column("occurrence").to_pylist() == [0, 0, 2]
    assert list(from_record_batch(batch)) == rows
    assert [to_json_line(row, KEYS) for row in rows] == lines


def test_no_rows_make_an_empty_batch() -> None:
    assert to_record_batch([], first_position=0, occurrences=[]).num_rows == 0


def test_a_batch_with_too_few_occurrence_numbers_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="1 prompt rows came with 0"):
        to_record_batch([check('{"prompt":"p","label":null,"meta":null}')], first_position=0, occurrences=[])


def test_a_row_is_not_written_without_a_place_for_its_label(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="no place"):
        to_json_line(check('{"prompt":"p","label":"l","meta":null}'), PromptKeys("prompt"))
