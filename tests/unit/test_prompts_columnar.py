"""Reading Parquet and Arrow prompt files, plain and compressed."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from strawflow.errors import InvalidInputError
from strawflow.prompts import PromptKeys, PromptRow, PromptSource, ReadReport, count_records, read_prompts

ALL_KEYS = PromptKeys("prompt", "label", "meta")


def write_parquet(table: pa.Table, path: Path) -> None:
    pq.write_table(table, path, row_group_size=700)


def write_arrow_file(table: pa.Table, path: Path) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=700)


def write_arrow_stream(table: pa.Table, path: Path) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=700)


FORMS = [
    pytest.param(write_parquet, "p.parquet", id="parquet"),
    pytest.param(write_arrow_file, "p.arrow", id="arrow file"),
    pytest.param(write_arrow_file, "p.feather", id="feather"),
    pytest.param(write_arrow_stream, "p.ipc", id="arrow stream"),
]
Write = Callable[[pa.Table, Path], None]


def read(path: Path | str, keys: PromptKeys = ALL_KEYS, **options: Any) -> list[PromptRow]:
    return list(read_prompts(PromptSource.parse(str(path)), keys, **options))


def table(count: int = 2000) -> pa.Table:
    return pa.table(
        {
            "unused": pa.array([b"\xff"] * count),
            "meta": pa.array([{"n": number, "s": None, "f": 1.5} for number in range(count)]),
            "prompt": pa.array([f"p{number}\u2028" for number in range(count)]),
            "label": pa.array([None] * (count - 1) + ["late"], pa.string()),
        }
    )


@pytest.mark.parametrize("write, name", FORMS)
@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
def test_columnar_rows_come_with_their_row_numbers(
    write: Write, name: str, compression: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    write(table(), path)
    if compression:
        compress = gzip.compress if compression == ".gz" else zstandard.compress
        path = tmp_path / (name + compression)
        path.write_bytes(compress((tmp_path / name).read_bytes()))
    rows = read(path)
    assert [(row.prompt, row.source_line) for row in rows] == [(f"p{n}\u2028", n + 1) for n in range(2000)]
    assert [row.label for row in rows] == [None] * 1999 + ["late"]
    assert rows[7].metadata == '{"n":7,"s":null,"f":1.5}'
    assert count_records(PromptSource(path)) == 2000


@pytest.mark.parametrize("write, name", FORMS)
@pytest.mark.parametrize(
    "start, stop", [(None, 3), (699, 702), (-2, None), (1500, -498), (5, 2), (None, None)]
)
def test_a_slice_is_what_python_would_take(
    write: Write, name: str, start: int | None, stop: int | None, tmp_path: Path
) -> None:
    write(table(), tmp_path / name)
    rows = list(read_prompts(PromptSource(tmp_path / name, start, stop), ALL_KEYS))
    assert [row.source_line for row in rows] == list(range(1, 2001))[start:stop]


@pytest.mark.parametrize("write, name", FORMS)
def test_the_same_content_has_the_same_digest_in_every_format(
    write: Write, name: str, tmp_path: Path
) -> None:
    messages = [{"role": "user", "content": "Grüße"}, {"role": "assistant", "content": "\u2029"}]
    content = [{"prompt": messages, "label": [1, 2], "meta": {"a": 1}}] * 2
    write(pa.Table.from_pylist(content), tmp_path / name)
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    assert [row.content_digest for row in read(tmp_path / name)] == [
        row.content_digest for row in read(tmp_path / "p.jsonl")
    ]


def test_metadata_may_be_json_text_and_map_and_dictionary_columns_read_as_their_values(
    tmp_path: Path,
) -> None:
    rows = pa.table(
        {
            "prompt": pa.array(["a", "b"]).dictionary_encode(),
            "label": pa.array([[("k", 1)], [("k", 2)]], pa.map_(pa.string(), pa.int64())),
            "meta": pa.array(['{"b": 1.50, "a": null}', None]),
        }
    )
    write_arrow_file(rows, tmp_path / "p.arrow")
    first, second = read(tmp_path / "p.arrow")
    assert (first.prompt, first.label, first.metadata) == ("a", '{"k":1}', '{"b":1.50,"a":null}')
    assert (second.prompt, second.label, second.metadata) == ("b", '{"k":2}', None)


def test_bad_columnar_rows_are_located_or_skipped_with_counts(tmp_path: Path) -> None:
    rows = pa.table({"prompt": ["a", None, "", "b"], "label": [1.0, 2.0, 3.0, float("nan")]})
    write_parquet(rows, tmp_path / "p.parquet")
    keys = PromptKeys("prompt", "label")
    with pytest.raises(InvalidInputError, match=r"p\.parquet:2: 'prompt' is null"):
        read(tmp_path / "p.parquet", keys)
    report = ReadReport()
    kept = read(
        tmp_path / "p.parquet", keys, on_bad_row="skip", report=report, reject_path=tmp_path / "r.jsonl"
    )
    assert [(row.prompt, row.label, row.label_format) for row in kept] == [("a", "1.0", "json")]
    assert report.rejected == {"null_prompt": 1, "empty_prompt": 1, "non_finite_number": 1}
    assert len((tmp_path / "r.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize("values", [[b"raw"], [1], [True]])
def test_a_prompt_column_of_another_type_is_a_bad_row(values: list[Any], tmp_path: Path) -> None:
    write_parquet(pa.table({"prompt": values}), tmp_path / "p.parquet")
    with pytest.raises(InvalidInputError, match=r"p\.parquet:1: 'prompt' is .*must be a string"):
        read(tmp_path / "p.parquet", PromptKeys())


def test_a_label_that_json_has_no_form_for_is_refused_with_advice(tmp_path: Path) -> None:
    import datetime

    write_parquet(pa.table({"prompt": ["a"], "label": [datetime.date(2026, 1, 1)]}), tmp_path / "p.parquet")
    with pytest.raises(
        InvalidInputError, match=r"p\.parquet:1: 'label' holds a value with no JSON form.*as text"
    ):
        read(tmp_path / "p.parquet", PromptKeys("prompt", "label"))


@pytest.mark.parametrize("write, name", FORMS)
def test_an_absent_column_is_an_error_of_the_file_under_either_policy(
    write: Write, name: str, tmp_path: Path
) -> None:
    write(table(3), tmp_path / name)
    with pytest.raises(InvalidInputError, match=r"no column 'question'; it has unused, meta, prompt, label"):
        read(tmp_path / name, PromptKeys("question"), on_bad_row="skip")


def test_a_column_that_stands_twice_is_refused(tmp_path: Path) -> None:
    twice = pa.table([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
    write_arrow_file(twice, tmp_path / "p.arrow")
    with pytest.raises(InvalidInputError, match="more than one column 'prompt'"):
        read(tmp_path / "p.arrow", PromptKeys())


@pytest.mark.parametrize("write, name", FORMS)
def test_a_damaged_columnar_file_is_one_clear_error(write: Write, name: str, tmp_path: Path) -> None:
    write(table(), tmp_path / name)
    whole = (tmp_path / name).read_bytes()
    for broken in (whole[: len(whole) // 2], b"", b"{}\n", b"PAR1"):
        (tmp_path / name).write_bytes(broken)
        with pytest.raises(InvalidInputError, match=rf"{name} cannot be read as"):
            read(tmp_path / name)
