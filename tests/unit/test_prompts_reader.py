"""Reading prompt text files: encodings, physical lines, slices, compression, and both policies for bad rows."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from strawflow.errors import InvalidInputError
from strawflow.prompts import (
    PromptKeys,
    PromptRow,
    PromptSource,
    ReadReport,
    count_records,
    from_record_batch,
    read_prompts,
    to_json_line,
    to_record_batch,
)

PROMPT_ONLY = PromptKeys()
ALL_KEYS = PromptKeys("prompt", "label", "meta")

Reader = Callable[..., list[PromptRow]]


@pytest.fixture
def read(tmp_path: Path) -> Reader:
    """Write bytes to a file and read it."""

    def write_and_read(
        content: bytes, *, name: str = "p.jsonl", at: str = "", **options: Any
    ) -> list[PromptRow]:
        (tmp_path / name).write_bytes(content)
        keys = options.pop("keys", PROMPT_ONLY)
        return list(read_prompts(PromptSource.parse(f"{tmp_path / name}{at}"), keys, **options))

    return write_and_read


def lines(*prompts: str) -> bytes:
    return b"".join(json.dumps({"prompt": prompt}).encode() + b"\n" for prompt in prompts)


def prompts(rows: list[PromptRow]) -> list[str]:
    return [row.prompt for row in rows]


# --- line ends and encodings (S35, S36)


def test_a_thousand_rows_with_unicode_line_breaks_survive_storage_and_export_with_equal_digests(
    read: Reader, tmp_path: Path
) -> None:
    breaks = ["\u2028", "\u2029", "\u0085", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\r", "\r\n", "\n"]
    draw = random.Random(35)
    content = [
        {
            "prompt": f"row {number} " + "".join(draw.choices(breaks, k=5)) + "end",
            "label": draw.choice(breaks),
            "meta": {draw.choice(breaks): [number, draw.choice(breaks)]},
        }
        for number in range(1000)
    ]
    written = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in content).encode()
    assert "\u2028".encode() in written
    rows = read(written, keys=ALL_KEYS)
    assert prompts(rows) == [row["prompt"] for row in content]
    assert [row.source_line for row in rows] == list(range(1, 1001))

    stored = list(from_record_batch(to_record_batch(rows, first_position=0, occurrences=[0] * 1000)))
    exported = "".join(to_json_line(row, ALL_KEYS) + "\n" for row in stored).encode()
    again = read(exported, name="again.jsonl", keys=ALL_KEYS)
    assert [row.content_digest for row in again] == [row.content_digest for row in rows]
    assert len({row.content_digest for row in rows}) == 1000


@pytest.mark.parametrize(
    "encode",
    [
        pytest.param(lambda text: b"\xef\xbb\xbf" + text.encode(), id="utf-8 with a mark"),
        pytest.param(lambda text: text.replace("\n", "\r\n").encode(), id="crlf"),
        pytest.param(lambda text: text.rstrip("\n").encode(), id="no final newline"),
        pytest.param(lambda text: b"\xff\xfe" + text.encode("utf-16-le"), id="utf-16 le"),
        pytest.param(lambda text: b"\xfe\xff" + text.encode("utf-16-be"), id="utf-16 be"),
        pytest.param(lambda text: b"\xff\xfe\0\0" + text.encode("utf-32-le"), id="utf-32 le"),
        pytest.param(lambda text: b"\0\0\xfe\xff" + text.encode("utf-32-be"), id="utf-32 be"),
        pytest.param(
            lambda text: b"\xef\xbb\xbf" + (text + "\ufeff" + text).encode(), id="two marked files joined"
        ),
    ],
)
def test_every_marked_encoding_and_line_end_gives_the_same_rows(
    read: Reader, encode: Callable[[str], bytes]
) -> None:
    text = '{"prompt":"Grüße \U0001f600\u2028x"}\n{"prompt":"two"}\n'
    rows = read(encode(text))
    assert prompts(rows)[:2] == ["Grüße \U0001f600\u2028x", "two"]
    assert [row.source_line for row in rows][:2] == [1, 2]


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_unmarked_wide_text_is_one_error_that_says_how_to_convert(read: Reader, encoding: str) -> None:
    with pytest.raises(InvalidInputError, match=r"p\.jsonl:1: starts like UTF-16 or UTF-32.*iconv"):
        read(lines("a").decode().encode(encoding), on_bad_row="skip")


def test_broken_utf_16_names_the_physical_line(read: Reader) -> None:
    text = "".join(f'{{"prompt":"{number}"}}\n' for number in range(5000))
    content = b"\xff\xfe" + text.encode("utf-16-le") + b"\x00\xdc" + "\n".encode("utf-16-le")
    with pytest.raises(InvalidInputError, match=r"p\.jsonl:5001: .*not UTF-16"):
        read(content)


def test_latin_1_bytes_name_file_physical_line_and_byte(read: Reader) -> None:
    content = b"\n" + lines("a") + b'{"prompt":"caf\xe9"}\n'
    with pytest.raises(
        InvalidInputError, match=r"p\.jsonl:3: byte 0xE9 at byte 15 of the line is not UTF-8.*iconv"
    ):
        read(content)
    report = ReadReport()
    assert prompts(read(content + lines("b"), on_bad_row="skip", report=report)) == ["a", "b"]
    assert report.rejected == {"not_utf8": 1}


def test_an_escaped_nul_is_kept_and_a_raw_one_is_refused(read: Reader) -> None:
    assert prompts(read(rb'{"prompt":"a\u0000b"}')) == ["a\0b"]
    with pytest.raises(InvalidInputError, match=r"p\.jsonl:1: not JSON: Invalid control character"):
        read(b'{"prompt":"a\0b"}')
    with pytest.raises(InvalidInputError, match=r"p\.jsonl:2: not JSON"):
        read(lines("a") + b"\0" * 4096)


def test_blank_lines_are_no_records_but_count_as_lines(read: Reader) -> None:
    report = ReadReport()
    rows = read(b"\n \t\r\n" + lines("a") + b"\n\n" + lines("b") + b"\n", report=report)
    assert [(row.prompt, row.source_line) for row in rows] == [("a", 3), ("b", 6)]
    assert (report.num_records, report.num_accepted, report.num_rejected) == (2, 2, 0)


def test_a_file_without_rows_has_none(read: Reader) -> None:
    assert (
        read(b"")
        == read(b"\n\n")
        == read(b"\xef\xbb\xbf")
        == read(gzip.compress(b""), name="e.jsonl.gz")
        == []
    )


def test_a_line_above_the_limit_is_refused_by_line_and_limit_or_skipped(read: Reader) -> None:
    content = lines("a", "x" * 5000, "b") + b'{"prompt":"' + b"y" * 5000
    with pytest.raises(
        InvalidInputError, match=r"p\.jsonl:2: the line is longer than the limit of 2048 bytes"
    ):
        read(content, max_line_bytes=2048)
    report = ReadReport()
    rows = read(content, max_line_bytes=2048, on_bad_row="skip", report=report)
    assert [(row.prompt, row.source_line) for row in rows] == [("a", 1), ("b", 3)]
    assert report.rejected == {"line_too_long": 2}


@pytest.mark.parametrize("spare", [0, 1])
def test_a_line_of_exactly_the_limit_is_read(read: Reader, spare: int) -> None:
    content = lines("x" * 100)
    assert len(read(content, max_line_bytes=len(content) + spare)) == 1
    assert len(read(content[:-1], max_line_bytes=len(content) - 1 + spare)) == 1


# --- verbatim values whatever the order of rows (S37)


def test_a_field_null_for_a_hundred_thousand_rows_may_then_be_text(read: Reader) -> None:
    null = b'{"prompt":"p","label":null,"meta":null}\n'
    rows = read(null * 100_000 + b'{"prompt":"p","label":"late","meta":{"a":1}}\n', keys=ALL_KEYS)
    assert len(rows) == 100_001
    assert (rows[0].label, rows[0].metadata) == (None, None)
    assert (rows[-1].label, rows[-1].metadata) == ("late", '{"a":1}')


def test_rows_of_mixed_shapes_are_kept_verbatim_and_shuffling_them_changes_nothing(read: Reader) -> None:
    texts = [
        '{"prompt":"p","label":[[0,4,"x"]],"meta":{"v":1}}',
        '{"prompt":"p","label":"x","meta":{"v":"1"}}',
        '{"prompt":"p","label":1.0,"meta":{"v":1.0}}',
        '{"prompt":[{"role":"user","content":{"a":1}}],"label":{"b":1,"a":2},"meta":null}',
        '{"prompt":[{"role":"user","content":["a",1]}],"label":true,"meta":{}}',
        '{"prompt":[{"role":"user","content":"a"}],"label":null,"meta":{"b":null,"a":[1,"a",null]}}',
    ]

    def digests(order: list[str]) -> dict[str, bytes]:
        rows = read("\n".join(order).encode(), keys=ALL_KEYS)
        assert [to_json_line(row, ALL_KEYS) for row in rows] == order
        return {text: row.content_digest for text, row in zip(order, rows, strict=True)}

    first = digests(texts)
    assert len(set(first.values())) == len(texts)
    for seed in range(5):
        assert digests(random.Random(seed).sample(texts, k=len(texts))) == first


# --- bad rows (S38)

BAD = (
    b'{"prompt":"one"}\n'
    b"not json\n"
    b"\n"
    b"[1,2]\n"
    b'{"text":"x"}\n'
    b'{"prompt":null}\n'
    b'{"prompt":""}\n'
    b'{"prompt":"a","prompt":"b"}\n'
    b'{"prompt":"a","x":NaN}\n'
    b'{"prompt":"two"}\n'
)


def test_the_first_bad_row_stops_a_strict_read_with_file_and_physical_line(
    read: Reader, tmp_path: Path
) -> None:
    for expected in (
        r"p\.jsonl:2: not JSON: Expecting value at column 1",
        r"p\.jsonl:3: the row is a list, not an object",
        r"p\.jsonl:4: no key 'prompt'; the row has text",
        r"p\.jsonl:5: 'prompt' is null",
        r"p\.jsonl:6: 'prompt' is blank",
        r"p\.jsonl:7: key 'prompt' stands twice",
        r"p\.jsonl:8: NaN is not a JSON number",
    ):
        number = int(expected.split(":")[1])
        content = [line for line in BAD.splitlines(keepends=True) if line.strip()]
        with pytest.raises(InvalidInputError, match=expected):
            read(content[0] * (number - 1) + content[number - 1])
    assert list(tmp_path.iterdir()) == [tmp_path / "p.jsonl"]


def test_skipping_keeps_the_good_rows_and_counts_and_files_the_bad_ones(read: Reader, tmp_path: Path) -> None:
    rejects, report = tmp_path / "out" / "rejects.jsonl", ReadReport()
    rows = read(BAD, on_bad_row="skip", reject_path=rejects, report=report)
    assert [(row.prompt, row.source_line) for row in rows] == [("one", 1), ("two", 10)]
    assert report.rejected == {
        "not_json": 1,
        "not_object": 1,
        "missing_key": 1,
        "null_prompt": 1,
        "empty_prompt": 1,
        "duplicate_key": 1,
        "non_finite_number": 1,
    }
    assert (report.num_records, report.num_accepted, report.num_rejected) == (9, 2, 7)
    entries = [json.loads(line) for line in rejects.read_text().splitlines()]
    assert [entry["line"] for entry in entries] == [2, 4, 5, 6, 7, 8, 9]
    assert entries[1] == {
        "source": str(tmp_path / "p.jsonl"),
        "line": 4,
        "reason": "not_object",
        "detail": "the row is a list, not an object; write one object per line",
        "row": "[1,2]",
    }


def test_a_long_bad_row_is_cut_in_the_reject_file(read: Reader, tmp_path: Path) -> None:
    rejects = tmp_path / "rejects.jsonl"
    assert read(b"\xff" + b"x" * 10_000, on_bad_row="skip", reject_path=rejects) == []
    assert len(json.loads(rejects.read_text())["row"]) == 500


def test_no_reject_file_appears_without_a_bad_row(read: Reader, tmp_path: Path) -> None:
    read(lines("a"), on_bad_row="skip", reject_path=tmp_path / "rejects.jsonl")
    assert not (tmp_path / "rejects.jsonl").exists()


def test_an_unknown_policy_is_refused(read: Reader) -> None:
    with pytest.raises(InvalidInputError, match="'fail' or 'skip'"):
        read(lines("a"), on_bad_row="ignore")


# --- slices and compression


@pytest.mark.parametrize("name", ["p.jsonl", "p.ndjson.gz", "p.json-lines.zst"])
@pytest.mark.parametrize(
    "at", ["[:]", "[2:5]", "[:3]", "[7:]", "[-3:]", "[:-3]", "[-4:-2]", "[5:2]", "[0:0]", "[8:99]"]
)
def test_a_slice_is_what_python_would_take(read: Reader, name: str, at: str) -> None:
    content = lines(*"abcdefghij").replace(b"\n", b"\n\n")
    if name.endswith(".gz"):
        content = gzip.compress(content[:50]) + gzip.compress(content[50:])
    if name.endswith(".zst"):
        content = zstandard.compress(content[:50]) + zstandard.compress(content[50:])
    start, stop = (int(bound) if bound else None for bound in at[1:-1].split(":"))
    rows = read(content, name=name, at=f"@{at}")
    assert prompts(rows) == list("abcdefghij"[start:stop])
    assert [row.source_line for row in rows] == list(range(1, 20, 2))[start:stop]


def test_bad_rows_hold_their_place_in_a_slice_and_do_not_matter_outside_it(
    read: Reader, tmp_path: Path
) -> None:
    content = lines("a") + b"bad\n" + lines("b", "c")
    assert prompts(read(content, at="@[0:3]", on_bad_row="skip")) == ["a", "b"]
    assert prompts(read(content, at="@[-2:]")) == ["b", "c"]
    assert count_records(PromptSource(tmp_path / "p.jsonl")) == 4


@pytest.mark.parametrize("name", ["p.jsonl.gz", "p.jsonl.zst"])
def test_a_damaged_or_cut_short_compressed_file_is_one_clear_error(read: Reader, name: str) -> None:
    draw = random.Random(1)
    content = lines(*(f"{draw.getrandbits(64)}" for _ in range(20_000)))
    whole = (
        gzip.compress(content)
        if name.endswith("gz")
        else zstandard.ZstdCompressor(write_checksum=True).compress(content)
    )
    assert len(read(whole, name=name)) == 20_000
    damaged = whole[: len(whole) // 2] + b"\0" * 64 + whole[len(whole) // 2 + 64 :]
    for broken in (whole[:-1], whole[: len(whole) // 2], damaged, whole + b"garbage", b"", b"{}"):
        with pytest.raises(InvalidInputError, match=rf"{name} .*(damaged or cut short|is empty)"):
            read(broken, name=name, on_bad_row="skip")
