"""Images and processor inputs through every hop, bit for bit, in batches where only some samples have them."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import AutoTokenizer, CLIPImageProcessor, LlavaProcessor

from strawflow.errors import ConfigError, CorruptPackError, InvalidInputError
from strawflow.flow import admit, claim, complete, consume
from strawflow.flow.chain import saved_members
from strawflow.flow.claim import Prompt
from strawflow.flow.payload import arrays_of
from strawflow.flow.run import Run
from strawflow.flow.session import WorkerSession
from strawflow.flow.trajectory import PARTIAL, Member, UnitResult, failed_member, to_record_batch
from strawflow.index import batches, weights
from strawflow.packs.reader import PackReader
from strawflow.prompts.images import data_address
from strawflow.store import Store
from strawflow_workers.rollout.sglang_client import GenerateRequest, request_body
from strawflow_workers.rollout.sglang_server import SglangOptions, launch_environment
from strawflow_workers.rollout.tokens import PromptTokenizer
from strawflow_workers.trainer.team import to_mini_batches
from tests.integration import own_hooks, rollout_runs
from tests.integration.rollout_runs import NUM_SAMPLES, NUM_UNITS, Worker, completed, trainer_of
from tests.integration.test_hooks import units_of
from tests.integration.test_stale_groups import assembler, fates

pytestmark = pytest.mark.alone

HERE = "tests.integration.own_hooks:"
PLACE = 300
"""The token that stands for an image."""


def image(seed: int, kind: str = "PNG") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


IMAGES = {"a.png": image(0), "folder/b.jpg": image(1, "JPEG"), "c.png": image(2)}


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a real processor beside it."""
    folder = shutil.copytree(tiny_model, tmp_path_factory.mktemp("seeing") / "model")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    LlavaProcessor(
        image_processor=CLIPImageProcessor(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8}),
        tokenizer=tokenizer,
        patch_size=4,
        image_token=tokenizer.convert_ids_to_tokens(PLACE),
        vision_feature_select_strategy="full",
    ).save_pretrained(folder)
    return folder


def rows_with_images(folder: Path, model: Path) -> list[dict[str, Any]]:
    """Write the image files; returns rows with none, one and two of them, one of them as it is."""
    for name, content in IMAGES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    place = AutoTokenizer.from_pretrained(model).convert_ids_to_tokens(PLACE)
    told = [None, "a.png", ["a.png", "folder/b.jpg"], [data_address(IMAGES["c.png"])]]
    return [
        {"prompt": f"{place * (len(t) if isinstance(t, list) else bool(t))}what {n}?\n", "images": t}
        for n, t in enumerate(told)
    ]


EXPECTED = {"0": (), "1": ("a.png",), "2": ("a.png", "folder/b.jpg"), "3": ("c.png",)}
"""The images of the prompt with this number."""


def images_of(prompt: str) -> list[bytes]:
    return [IMAGES[name] for name in EXPECTED[prompt.strip()[-2]]]


def packed(run: Run, step: int = 1) -> list[tuple[list[int], int, int, dict[str, Any] | None]]:
    """(tokens, unit, member, arrays) of each packed sequence, message by message as a rank reads them."""
    with run.index.read() as connection:
        batch = batches.require(connection, run.branch, run.consumer, step)
    with closing(PackReader(run.root)) as reader:
        messages = [rows for _, rows in consume.read_batch(run, reader, batch)]
    return [
        found
        for rows in messages
        for found in zip(
            *(rows.column(name).to_pylist() for name in ("tokens", "unit_id", "member")),
            arrays_of(rows.column("tensors")),
            strict=True,
        )
    ]


def assert_same(found: dict[str, Any] | None, expected: dict[str, Any] | None) -> None:
    if expected is None or found is None:
        assert found is expected
        return
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        told = found[name]
        assert (told.dtype, told.shape, told.tobytes()) == (array.dtype, array.shape, array.tobytes()), name


def test_images_and_what_the_processor_makes_of_them_survive_every_hop(tmp_path: Path, model: Path) -> None:
    rows = rows_with_images(tmp_path, model)
    run = rollout_runs.make_run(
        tmp_path,
        model,
        steps=1,
        rows=rows,
        max_response_tokens=6,
        assemble={"max_tokens_per_micro_batch": 64},
    )
    with trainer_of(run) as publish, Worker(run) as worker:
        publish(0)
        with assembler(run):
            worker.wait(lambda: bool(fates(run)))
        with run.index.read() as connection:
            (engine,) = weights.engines_listed(connection)
        with urllib.request.urlopen(f"{engine.url}/requests", timeout=10) as answer:
            asked = json.loads(answer.read())
    tokenizer = PromptTokenizer(model)
    prompts = {
        tuple(inputs.tokens): (row["prompt"], inputs.tensors)
        for row in rows
        for inputs in [
            tokenizer.inputs(Prompt(row["prompt"], "text", None, None, None, images_of(row["prompt"])))
        ]
    }
    for request in asked:
        expected = [data_address(file) for file in images_of(prompts[tuple(request["input_ids"])][0])]
        several = request["sampling_params"]["n"] > 1
        assert request.get("image_data") == (([expected] if several else expected) if expected else None)
    seen = 0
    for tokens, _, _, arrays in packed(run):
        (prompt, tensors) = next(v for k, v in prompts.items() if tuple(tokens[: len(k)]) == k)
        num_images = len(images_of(prompt))
        assert_same(arrays, dict(tensors) if tensors is not None else None)
        assert (arrays is None) == (num_images == 0)
        if arrays is not None:
            assert arrays["pixel_values"].shape == (num_images, 3, 8, 8)
            seen += 1
    assert 0 < seen < len(packed(run))
    with run.index.read() as connection:
        batch = batches.require(connection, run.branch, run.consumer, 1)
    with (
        closing(PackReader(run.root)) as reader,
        pytest.raises(ConfigError, match=r"step 1 has sequences with tensors .* trains text models alone"),
    ):
        to_mini_batches(batch, consume.read_batch(run, reader, batch))
    run.close()


def test_arrays_that_a_hook_makes_for_some_members_reach_a_consumer(tmp_path: Path, tiny_model: Path) -> None:
    rows = [{**row, "prompt": f"what {n}?\n"} for n, row in enumerate(rows_with_images(tmp_path, tiny_model))]
    run = rollout_runs.make_run(tmp_path, tiny_model, steps=1, rows=rows, generate=HERE + "with_arrays")
    with trainer_of(run) as publish, Worker(run) as worker:
        publish(0)
        worker.wait(lambda: len(completed(run)) == NUM_UNITS)
        with run.index.read() as connection:
            (engine,) = weights.engines_listed(connection)
        with urllib.request.urlopen(f"{engine.url}/requests", timeout=10) as answer:
            asked = json.loads(answer.read())
    tokenizer = PromptTokenizer(tiny_model)
    numbers = {tuple(tokenizer.encode_text(row["prompt"])): row["prompt"] for row in rows}
    with Store(run) as store, store.consumer("reader") as reader:
        batch = reader.next_batch(NUM_UNITS)
        assert batch is not None
        members = batch.rows.column("member").to_pylist()
        told = batch.rows.column("prompt_tokens").to_pylist()
        assert len(members) == NUM_UNITS * NUM_SAMPLES
        for prompt, member, arrays in zip(told, members, batch.tensors(), strict=True):
            assert_same(arrays, own_hooks.arrays_of_member(member, images_of(numbers[tuple(prompt)])))
        data = [cell and [t["data"] for t in cell] for cell in batch.rows.column("tensors").to_pylist()]
    by_group = {tuple(t): [d for t2, d in zip(told, data, strict=True) if t2 == t and d] for t in told}
    for held in by_group.values():
        first, second = held
        assert None not in first
        assert [d is None for d in second].count(False) == 1, "equal arrays of a group are stored once"
    for request in asked:
        files = images_of(numbers[tuple(request["input_ids"])])
        given = request.get("image_data")
        assert given in (None, [data_address(file) for file in files])
    assert sum("image_data" in request for request in asked) == (NUM_UNITS - 1) * (NUM_SAMPLES - 1)


READ_BY_SGLANG = """
import json, sys
import numpy as np
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.utils.common import load_image
for body in json.load(sys.stdin):
    request = GenerateReqInput(**body)
    request.normalize_batch_and_arguments()
    num_samples = body["sampling_params"]["n"]
    of_samples = [request] if request.is_single else [request[n] for n in range(num_samples)]
    read = [[np.asarray(load_image(one)[0].convert("RGB")).tolist() for one in r.image_data] for r in of_samples]
    print(json.dumps(read))
"""


@pytest.mark.long
def test_sglang_itself_reads_every_image_of_a_request_for_every_sample() -> None:
    files = list(IMAGES.values())[:2]
    bodies = [
        request_body(
            GenerateRequest(input_ids=[1, 2], sampling_params={"n": n, "temperature": 1.0}, images=files)
        )
        for n in (1, 3)
    ]
    done = subprocess.run(
        [sys.executable, "-c", READ_BY_SGLANG],
        input=json.dumps(bodies),
        env=launch_environment(SglangOptions(model_path=Path("model"), log_path=Path("log")), os.environ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    expected = [np.asarray(Image.open(io.BytesIO(file)).convert("RGB")).tolist() for file in files]
    assert [json.loads(line) for line in done.stdout.splitlines()[-2:]] == [[expected], [expected] * 3]


def test_images_for_a_checkpoint_without_a_processor_fail_the_group_with_what_to_do(
    make_run: Callable[..., Run], tmp_path: Path, tiny_model: Path
) -> None:
    run = make_run(rows=rows_with_images(tmp_path, tiny_model)[1:2], steps=1, max_attempts=1)
    with trainer_of(run) as publish, Worker(run) as worker:
        publish(0)
        worker.wait(lambda: any(u.state == "failed" for u in units_of(run)))
    unit = next(u for u in units_of(run) if u.state == "failed")
    assert "has no processor" in (unit.last_error or "")


def test_what_was_saved_of_a_parked_member_has_its_arrays(make_run: Callable[..., Run]) -> None:
    run = make_run(prompts=1, steps=1)
    arrays = own_hooks.arrays_of_member(1, [b"abc"])
    with trainer_of(run) as publish, WorkerSession(run, "rollout") as session:
        version = publish(0)
        admit.admit_due(session)
        shelf = claim.PromptShelf(session)
        (grant,) = claim.claim(session, shelf, limit=1, serving_version_id=version)
        member = replace(failed_member(0, ""), status=PARTIAL, failure=None, tensors=arrays)
        second = replace(member, member=1, siblings=(replace(member, tensors=None),))
        complete.park(session, [grant.result([member, second])], submission_id="parked")
        (again,) = claim.claim(session, shelf, limit=1, serving_version_id=version)
    saved = saved_members(again.continuation)
    assert [[s.tensors is None for s in m.segments] for m in saved.values()] == [[False], [False, True]]
    for found in saved.values():
        assert_same(dict(found.tensors or {}), arrays)


def test_arrays_that_cannot_be_stored_are_refused_and_damaged_ones_never_handed_out() -> None:
    member = replace(failed_member(0, "no"), tensors={"pixels": np.array(["text"])})
    with pytest.raises(InvalidInputError, match="tensor 'pixels' is <U4"):
        member.check()
    column = stored([np.arange(3), np.arange(3)]).column("tensors")
    assert [a["x"].tolist() for a in arrays_of(column) if a] == [[0, 1, 2]] * 2
    with pytest.raises(CorruptPackError, match="says that a row before holds its data"):
        arrays_of(column.slice(1))
    (cell, _) = column.to_pylist()
    spoilt = [{**cell[0], "data": cell[0]["data"][:-1] + b"\x01"}]
    with pytest.raises(CorruptPackError, match="does not match its digest"):
        arrays_of(type(column).from_pandas([spoilt], type=column.type))


def stored(arrays: list[Any]) -> Any:
    from strawflow.config import RunConfig

    members = [
        Member(n, "finished", [5], [-0.1], "v", "stop", 1.0, tensors={"x": array})
        for n, array in enumerate(arrays)
    ]
    return to_record_batch([UnitResult(1, 1, 1, [1], members, RunConfig().profiles()["train"], "")])
