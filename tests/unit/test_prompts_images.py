"""Images of prompt rows: read once, stored as they are, and a row whose image is missing is a bad one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from strawflow import store
from strawflow.errors import InvalidInputError
from strawflow.flow.enqueue import EnqueueRequest, enqueue
from strawflow.flow.session import WorkerSession
from strawflow.index import liveness
from strawflow.prompts import (
    PromptKeys,
    PromptRow,
    PromptSource,
    from_record_batch,
    read_prompts,
    to_json_line,
)
from strawflow.prompts.images import data_address
from strawflow.prompts.row import to_record_batch

KEYS = PromptKeys("prompt", images_key="images")
A, B = b"\x89PNG\r\n\x1a\n\x00\xff", b"\xff\xd8\xffjpeg"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.png").write_bytes(A)
    (tmp_path / "deep/b.jpg").write_bytes(B)
    return tmp_path


def read(folder: Path, *images: Any, keys: PromptKeys = KEYS) -> list[PromptRow]:
    path = folder / "p.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"p{n}", "images": one}) + "\n" for n, one in enumerate(images))
    )
    return list(read_prompts(PromptSource.parse(str(path)), keys))


def test_paths_addresses_and_lists_of_them_are_read_relative_to_the_file_and_come_back_as_json(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    told = [
        None,
        [],
        "a.png",
        ["a.png", "deep/b.jpg"],
        data_address(B),
        [str(folder / "a.png")],
        {"path": "a.png"},
    ]
    rows = read(folder, *told)
    assert [row.images for row in rows] == [None, None, (A,), (A, B), (B,), (A,), (A,)]
    batch = to_record_batch(rows, first_position=0, occurrences=[0] * len(rows))
    assert list(from_record_batch(batch)) == rows
    again = [json.loads(to_json_line(row, KEYS)) for row in rows]
    assert [row.images for row in read(folder, *[row["images"] for row in again])] == [
        row.images for row in rows
    ]
    with pytest.raises(InvalidInputError, match="no place for its label, metadata or images"):
        to_json_line(rows[2], PromptKeys("prompt"))


def test_rows_differ_by_their_images_and_one_without_is_what_it_always_was(folder: Path) -> None:
    digests = [
        replace(row, prompt="").content_digest
        for images in (None, "a.png", "deep/b.jpg", ["a.png", "deep/b.jpg"], ["deep/b.jpg", "a.png"])
        for row in read(folder, images)
    ]
    assert len(set(digests)) == 5
    (plain,) = read(folder, "a.png", keys=PromptKeys())
    assert (plain.images, plain.content_digest) == (None, digests[0])


@pytest.mark.parametrize(
    "image, told",
    [
        ("absent.png", "images[0]: there is no file {folder}/absent.png"),
        (["a.png", "absent.png"], "images[1]: there is no file {folder}/absent.png"),
        (["a.png", None], "images[1] is null"),
        ("deep", "{folder}/deep cannot be read"),
        ("", "cannot be read"),
        ("empty.png", "images[0] has no bytes"),
        (7, "images[0] is of type"),
        ("data:image/png,abc", "other than data:...;base64,..."),
        ("data:image/png;base64,a", "is no base64"),
        ("a\0.png", "cannot be read"),
    ],
)
def test_a_missing_image_stops_the_enqueue_naming_file_and_line(folder: Path, image: Any, told: str) -> None:
    (folder / "empty.png").touch()
    with pytest.raises(InvalidInputError) as caught:
        read(folder, "a.png", None, image)
    assert caught.value.message.startswith(f"{folder}/p.jsonl:3: ")
    assert told.format(folder=folder) in caught.value.message


def test_a_row_without_the_field_is_a_bad_one(folder: Path) -> None:
    (folder / "p.jsonl").write_text('{"prompt": "p"}\n')
    with pytest.raises(InvalidInputError, match="no key 'images'"):
        list(read_prompts(PromptSource.parse(str(folder / "p.jsonl")), KEYS))


@pytest.mark.parametrize(
    "kind, values",
    [
        (pa.binary(), [A, None]),
        (pa.list_(pa.large_binary()), [[A, B], None]),
        (
            pa.struct({"bytes": pa.binary(), "path": pa.string()}),
            [{"bytes": A, "path": "x"}, {"path": "deep/b.jpg"}],
        ),
    ],
)
def test_columnar_files_hold_bytes_or_what_hugging_face_has(
    folder: Path, kind: pa.DataType, values: list[Any]
) -> None:
    pq.write_table(pa.table({"prompt": ["p", "q"], "images": pa.array(values, kind)}), folder / "p.parquet")
    rows = list(read_prompts(PromptSource.parse(str(folder / "p.parquet")), KEYS))
    expected = {"binary": [(A,), None], "list": [(A, B), None], "struct": [(A,), (B,)]}
    assert [row.images for row in rows] == expected[str(kind).partition("<")[0]]


def test_images_lie_in_packs_of_a_few_mib_and_never_in_the_index(folder: Path) -> None:
    big = [bytes([n]) * (3 << 20) for n in range(1, 5)]
    with store.create(folder / "run", settings={"run.durability": "process"}) as made:
        assert made.enqueue([{"prompt": f"p{n}", "images": [one]} for n, one in enumerate(big)]) == 4
        assert (
            made.enqueue([{"prompt": "p0", "images": big[0]}, {"prompt": "p0", "images": folder / "a.png"}])
            == 1
        )
        with pytest.raises(InvalidInputError, match=r"api:2: 'images'|api:2: images\[0\]: there is no file"):
            made.enqueue([{"prompt": "x", "images": None}, {"prompt": "y", "images": [Path("absent.png")]}])
        made.admit(5)
        with made.worker() as worker:
            found = [(grant.prompt.prompt, grant.prompt.images) for grant in worker.claim(5)]
        with made.run.index.read() as connection:
            num_extents = len(liveness.extent_ids_of_kind(connection, "prompt"))
        assert num_extents == 3, (
            "two of 3 MiB pass the 4 MiB of an extent; the row of the second file is another"
        )
    assert sorted(found) == sorted([*((f"p{n}", [one]) for n, one in enumerate(big)), ("p0", [A])])
    assert (folder / "run/index.sqlite").stat().st_size < 1 << 20


def test_a_file_is_enqueued_with_the_field_that_the_run_names(folder: Path) -> None:
    path = folder / "p.jsonl"
    path.write_text('{"prompt": "p", "label": "l", "picture": "a.png"}\n')
    settings = {"run.durability": "process", "data.images_key": "picture"}
    with store.create(folder / "run", prompts=path, settings=settings) as made:
        made.admit(1)
        with made.worker() as worker:
            assert [grant.prompt.images for grant in worker.claim(1)] == [[A]]
    request = EnqueueRequest("prompts", "train", PromptSource.parse(str(path)), PromptKeys("prompt"))
    with store.open(folder / "run") as made, WorkerSession(made.run, "enqueue") as session:
        assert enqueue(session, request).num_added == 1, "without its picture it is another row"
