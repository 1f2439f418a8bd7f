"""Prompt sources: how `path@[a:b]` is parsed, and which names say which format."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strawflow.errors import InvalidInputError, NotFoundError
from strawflow.prompts import PromptKeys, PromptSource, read_prompts


@pytest.mark.parametrize(
    "text, start, stop",
    [
        ("a.jsonl", None, None),
        ("a.jsonl@[2:5]", 2, 5),
        ("a.jsonl@[:5]", None, 5),
        ("a.jsonl@[2:]", 2, None),
        ("a.jsonl@[:]", None, None),
        ("a.jsonl@[-3:-1]", -3, -1),
        ("a.jsonl@[ 1 : 2 ]", 1, 2),
    ],
)
def test_a_slice_is_parsed_with_either_end_open(text: str, start: int | None, stop: int | None) -> None:
    assert PromptSource.parse(text) == PromptSource(Path("a.jsonl"), start, stop)


@pytest.mark.parametrize(
    "text", ["a.jsonl@[1]", "a.jsonl@[1:2:3]", "a.jsonl@[x:]", "a.jsonl@[-:2]", "a.jsonl@[]"]
)
def test_what_is_no_slice_is_refused_with_the_syntax(text: str) -> None:
    with pytest.raises(InvalidInputError, match=r"not a slice of records; write path@\[a:b\]"):
        PromptSource.parse(text)


def test_a_file_whose_own_name_looks_like_a_slice_is_taken_as_it_is(tmp_path: Path) -> None:
    odd = tmp_path / "a.jsonl@[0:1]"
    odd.write_text("")
    assert PromptSource.parse(str(odd)) == PromptSource(odd)
    assert PromptSource.parse(f"{odd}@[2:3]") == PromptSource(odd, 2, 3)


@given(st.integers(-12, 12) | st.none(), st.integers(-12, 12) | st.none())
def test_a_source_prints_as_it_parses(start: int | None, stop: int | None) -> None:
    source = PromptSource(Path("d/a.jsonl.gz"), start, stop)
    assert PromptSource.parse(str(source)) == source


@pytest.mark.parametrize(
    "name, layout",
    [
        ("a.jsonl", ("json_lines", None)),
        ("a.b.NDJSON", ("json_lines", None)),
        ("a.json-lines.gz", ("json_lines", "gzip")),
        ("a.jsonl.zst", ("json_lines", "zstd")),
        ("a.parquet", ("parquet", None)),
        ("a.feather.zst", ("arrow", "zstd")),
        ("a.ipc", ("arrow", None)),
        ("a.arrow", ("arrow", None)),
    ],
)
def test_the_suffixes_name_container_and_compression(name: str, layout: tuple[str, str | None]) -> None:
    assert PromptSource(Path(name)).layout() == layout


@pytest.mark.parametrize("name", ["a", "a.json", "a.gz", "a.txt.gz", "jsonl"])
def test_an_unknown_suffix_is_refused_with_the_known_ones(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(InvalidInputError, match=r"\.jsonl.*\.parquet.*\.arrow.*\.gz or \.zst"):
        list(read_prompts(PromptSource(tmp_path / name), PromptKeys()))


def test_an_absent_file_and_a_folder_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"absent\.jsonl does not exist"):
        list(read_prompts(PromptSource(tmp_path / "absent.jsonl"), PromptKeys()))
    with pytest.raises(InvalidInputError, match="not a regular file"):
        list(read_prompts(PromptSource(tmp_path), PromptKeys()))


def test_two_fields_cannot_share_a_key() -> None:
    with pytest.raises(InvalidInputError, match="must be different"):
        PromptKeys("text", "text")
