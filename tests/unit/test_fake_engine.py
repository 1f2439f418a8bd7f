"""The fake engine answers as predicted, misbehaves as asked, and the client turns every bad answer into an error."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from strawflow import processes
from strawflow.errors import ConfigError, InvalidInputError
from strawflow.testing.fake_engine import (
    DEATH_EXIT_CODE,
    FakeEngine,
    FakeEngineOptions,
    Faults,
    expected_generation,
)
from strawflow_workers.rollout.sglang_client import (
    EngineResponseError,
    EngineUnavailableError,
    GarbageAnswerError,
    GenerateRequest,
    Generation,
    Patience,
    SglangClient,
    StreamedSample,
    parse_generation,
    refuse_original_logprobs,
)

PROMPT = [256, 49, 43, 50, 61]


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with FakeEngine(FakeEngineOptions(weight_version="v0")) as running:
        yield running


@asynccontextmanager
async def client_of(engine: FakeEngine, **options: Any) -> AsyncIterator[SglangClient]:
    async with SglangClient(engine.url, **options) as client:
        yield client


def predicted(sample: int, version: str = "v0", max_new_tokens: int = 6) -> Any:
    return expected_generation(
        PROMPT, sample=sample, weight_version=version, vocab_size=320, eos=257, max_new_tokens=max_new_tokens
    )


def checkpoint(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def request(n: int = 1, **params: Any) -> GenerateRequest:
    return GenerateRequest(input_ids=PROMPT, sampling_params={"max_new_tokens": 6, "n": n, **params})


def test_answers_are_the_predicted_ones_whatever_the_request_is_called(engine: FakeEngine) -> None:
    async def run() -> None:
        async with client_of(engine) as client:
            for rid in (None, "a", "b"):
                found = await client.generate(
                    GenerateRequest(input_ids=PROMPT, sampling_params={"max_new_tokens": 6, "n": 8}, rid=rid)
                )
                for index, generation in enumerate(found):
                    assert generation.output_ids == predicted(index).output_ids
                    assert generation.logprobs == predicted(index).logprobs
                    assert generation.finish_reason == predicted(index).finish_reason
                    assert generation.weight_versions == ["v0"] * len(generation.output_ids)

    asyncio.run(run())


def test_samples_differ_end_with_eos_or_by_length_and_stay_in_the_vocabulary() -> None:
    found = [predicted(index) for index in range(200)]
    assert len({tuple(sample.output_ids) for sample in found}) > 150
    assert {sample.finish_reason for sample in found} == {"stop", "length"}
    for sample in found:
        assert (sample.output_ids[-1] == 257) == (sample.finish_reason == "stop")
        assert 257 not in sample.output_ids[:-1]
        assert all(0 <= token < 320 for token in sample.output_ids)
        assert 1 <= len(sample.output_ids) <= 6


def test_an_update_changes_label_and_answers_and_a_bad_path_changes_nothing(
    engine: FakeEngine, tmp_path: Path
) -> None:
    async def run() -> None:
        async with client_of(engine) as client:
            with pytest.raises(EngineResponseError, match=r"no config\.json"):
                await client.update_weights_from_disk(tmp_path / "absent", "v1")
            assert await client.weight_version() == "v0"
            await client.update_weights_from_disk(checkpoint(tmp_path / "m"), "v1")
            (found,) = await client.generate(request())
            assert found.output_ids == predicted(0, "v1").output_ids
            assert set(found.weight_versions) == {"v1"}
            with pytest.raises(InvalidInputError, match="label"):
                await client.update_weights_from_disk(tmp_path / "m", "")

    asyncio.run(run())


def test_an_update_that_leaves_the_old_label_is_an_error(engine: FakeEngine, tmp_path: Path) -> None:
    async def run() -> None:
        engine.set_faults(wrong_version=True)
        async with client_of(engine) as client:
            with pytest.raises(EngineResponseError, match="reports weight version 'v0'"):
                await client.update_weights_from_disk(checkpoint(tmp_path / "m"), "v1")

    asyncio.run(run())


@pytest.mark.parametrize(
    ("fault", "message"), [("short_logprobs", "log-probabilities for"), ("nan_logprobs", "is nan")]
)
def test_spoiled_log_probabilities_of_every_second_request_are_errors(
    engine: FakeEngine, fault: str, message: str
) -> None:
    async def run() -> None:
        engine.set_faults(**{fault: 2})
        async with client_of(engine) as client:
            for number in range(1, 7):
                if number % 2 == 0:
                    with pytest.raises(EngineResponseError, match=message) as caught:
                        await client.generate(request(4))
                    assert message in caught.value.reason
                else:
                    assert len(await client.generate(request(4))) == 4

    asyncio.run(run())


def test_a_failing_request_and_a_silent_engine_count_as_unavailable(engine: FakeEngine) -> None:
    async def run() -> None:
        async with client_of(engine, patience=Patience(generate_s=0.3)) as client:
            engine.set_faults(error_rate_every_nth=2)
            await client.generate(request())
            with pytest.raises(EngineUnavailableError, match="HTTP 500"):
                await client.generate(request())
            engine.set_faults(error_rate_every_nth=0, hang=True)
            with pytest.raises(EngineUnavailableError, match="no answer"):
                await client.generate(request())
            assert await client.health()
        async with SglangClient("http://127.0.0.1:9") as nobody:
            assert not await nobody.health()
            with pytest.raises(EngineUnavailableError):
                await nobody.server_info()

    asyncio.run(run())


def test_an_abort_ends_a_waiting_request_with_what_it_has(engine: FakeEngine) -> None:
    async def run() -> None:
        engine.set_faults(hang=True)
        async with client_of(engine) as client:
            waiting = asyncio.create_task(
                client.generate(
                    GenerateRequest(input_ids=PROMPT, sampling_params={"max_new_tokens": 6}, rid="u1")
                )
            )
            while not waiting.done():
                await client.abort("other")
                await client.abort("u1")
                await asyncio.wait([waiting], timeout=0.02)
            (found,) = waiting.result()
            assert (found.finish_reason, found.output_ids, found.logprobs) == ("abort", [], [])

    asyncio.run(run())


def test_requests_from_before_and_after_a_change_of_faults_are_each_ended_by_their_own_name(
    engine: FakeEngine,
) -> None:
    async def run() -> None:
        async with client_of(engine) as client:
            waiting = []
            for name in ("u1", "u2"):  # each the first request of its set of faults: counts begin anew
                engine.set_faults(hang=True)
                asked = GenerateRequest(input_ids=PROMPT, sampling_params={"max_new_tokens": 6}, rid=name)
                waiting.append(asyncio.create_task(client.generate(asked)))
                while engine.num_generated < 1:
                    await asyncio.sleep(0.01)
            await client.abort("u2")
            (second,) = await waiting[1]
            assert not waiting[0].done()
            await client.abort("u1")
            (first,) = await waiting[0]
            assert (first.finish_reason, second.finish_reason) == ("abort", "abort")

    asyncio.run(run())


def test_a_streamed_answer_is_told_in_parts_and_is_the_predicted_one() -> None:
    told: dict[int, list[int]] = {}

    async def run() -> list[Generation]:
        with FakeEngine(FakeEngineOptions(weight_version="v0", stream_interval=2)) as engine:
            async with client_of(engine) as client:
                return await client.generate(
                    request(3),
                    on_progress=lambda place, g: told.setdefault(place, []).append(len(g.output_ids)),
                )

    found = asyncio.run(run())
    for sample, generation in enumerate(found):
        expected = predicted(sample)
        assert generation.output_ids == expected.output_ids
        assert generation.logprobs == expected.logprobs
        assert generation.finish_reason == expected.finish_reason
        assert generation.weight_versions == ["v0"] * len(expected.output_ids)
        assert told[sample] == sorted(told[sample])
        assert told[sample][-1] == len(expected.output_ids)


def test_a_stream_that_breaks_off_counts_as_unavailable_and_a_spoiled_one_as_unsound() -> None:
    async def run(**faults: Any) -> None:
        options = FakeEngineOptions(mean_tokens=1000, stream_interval=2, faults=Faults(**faults))
        with FakeEngine(options) as engine:
            async with client_of(engine) as client:
                await client.generate(request(2), on_progress=lambda place, g: None)

    with pytest.raises(EngineUnavailableError, match="broke off"):
        asyncio.run(run(cut_stream_after=3))
    for fault in ("short_logprobs", "nan_logprobs"):
        with pytest.raises(EngineResponseError, match="log-probabilit"):
            asyncio.run(run(**{fault: 1}))
    with pytest.raises(EngineUnavailableError, match="HTTP 500"):
        asyncio.run(run(error_rate_every_nth=1))


def chunk(output_ids: list[int], total: int, *, ends: bool = False, **meta: Any) -> dict[str, Any]:
    return {
        "output_ids": output_ids,
        "meta_info": {
            "completion_tokens": total,
            "finish_reason": {"type": "stop"} if ends else None,
            "output_token_logprobs": [[-0.5, token, None] for token in output_ids],
            "weight_version": "v1",
            **meta,
        },
    }


@pytest.mark.parametrize("parts", [[[1, 2], [3], [4, 5]], [[1, 2], [1, 2, 3], [1, 2, 3, 4, 5]]])
def test_chunks_of_all_so_far_and_of_what_is_new_make_the_same_sample(parts: list[list[int]]) -> None:
    sample = StreamedSample()
    spans = [{"version": "v0", "start": 0, "end": 4}, {"version": "v1", "start": 4, "end": 5}]
    for part, total in zip(parts, (2, 3, 5), strict=True):
        found = sample.add(
            chunk(part, total, ends=total == 5, **({"weight_versions": spans} if total == 5 else {}))
        )
        assert sample.has_ended == (total == 5)
    assert found.output_ids == [1, 2, 3, 4, 5]
    assert found.logprobs == [-0.5] * 5
    assert found.weight_versions == ["v0"] * 4 + ["v1"]  # what was told last, and knows


def test_a_chunk_that_leaves_tokens_out_is_unsound() -> None:
    sample = StreamedSample()
    sample.add(chunk([1, 2], 2))
    with pytest.raises(EngineResponseError, match="1 tokens after 2 makes 4"):
        sample.add(chunk([4], 4))


def test_two_hundred_requests_at_once_are_all_answered(engine: FakeEngine) -> None:
    async def run() -> None:
        async with client_of(engine) as client:
            engine.set_faults(delay_s=0.05)
            found = await asyncio.gather(*(client.generate(request(8)) for _ in range(200)))
            assert all(len(group) == 8 for group in found)

    asyncio.run(run())


def test_one_seed_for_several_samples_is_refused(engine: FakeEngine) -> None:
    async def run() -> None:
        async with client_of(engine) as client:
            with pytest.raises(InvalidInputError, match="n seeds"):
                await client.generate(request(2, sampling_seed=3))

    asyncio.run(run())


def sample_answer() -> dict[str, Any]:
    return {
        "output_ids": [5, 6],
        "meta_info": {
            "finish_reason": {"type": "stop"},
            "prompt_tokens": 3,
            "weight_version": "b",
            "weight_versions": [
                {"version": "a", "start": 0, "end": 1},
                {"version": "b", "start": 1, "end": 2},
            ],
            "output_token_logprobs": [[-0.5, 5, None], [-0.25, 6, None]],
        },
    }


def test_version_spans_are_expanded_to_one_label_per_token() -> None:
    assert parse_generation(sample_answer()).weight_versions == ["a", "b"]
    without_spans = sample_answer()
    del without_spans["meta_info"]["weight_versions"]
    assert parse_generation(without_spans).weight_versions == ["b", "b"]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("output_token_logprobs", None, "missing"),
        ("output_token_logprobs", [[-0.5, 5, None]], "1 log-probabilities for 2 tokens"),
        ("output_token_logprobs", [[-0.5, 5, None], [float("nan"), 6, None]], "1 is nan"),
        ("output_token_logprobs", [[None, 5, None], [-0.1, 6, None]], "0 is None"),
        ("output_token_logprobs", [[-9999.0, 5, None], [-0.1, 6, None]], "0 is -9999"),
        ("output_token_logprobs", [[float("-inf"), 5, None], [-0.1, 6, None]], "0 is -inf"),
        ("output_token_logprobs", [[0.01, 5, None], [-0.1, 6, None]], "0 is 0.01"),
        ("output_token_logprobs", [[-0.5, 7, None], [-0.1, 6, None]], "of token 7, not 5"),
        ("output_token_logprobs", [-0.5, -0.1], "instead of"),
        ("weight_versions", [{"version": "a", "start": 0, "end": 1}], "1 tokens for 2"),
        ("weight_versions", [{"version": "a", "start": 1, "end": 2}], "do not follow"),
        ("output_token_logprobs", 5, "malformed"),
        ("output_token_logprobs", [[-0.5, 5, None], [[-0.1], 6, None]], "malformed"),
        ("output_token_logprobs", [[-(10**400), 5, None], [-0.1, 6, None]], "malformed"),
        ("weight_versions", 5, "malformed"),
        ("weight_versions", [{"version": "a", "start": 0}], "malformed"),
        ("weight_versions", [{"version": "a", "start": 0, "end": float("nan")}], "malformed"),
        ("prompt_tokens", float("inf"), "malformed"),
        ("finish_reason", None, "malformed"),
    ],
)
def test_an_unsound_answer_is_an_error_with_its_reason(field: str, value: Any, message: str) -> None:
    answer = sample_answer()
    answer["meta_info"][field] = value
    with pytest.raises(GarbageAnswerError, match=message):
        parse_generation(answer)


@pytest.mark.parametrize(
    "meta",
    [
        {"weight_version": None},
        {"output_token_logprobs": 7},
        {"finish_reason": {}},
        {"weight_versions": 5},
        {"completion_tokens": float("inf")},
    ],
)
def test_a_malformed_chunk_is_garbage(meta: dict[str, Any]) -> None:
    sample = StreamedSample()
    sample.add(chunk([1, 2], 2))
    with pytest.raises(GarbageAnswerError):
        sample.add(chunk([3], 3, **meta))


def test_the_environment_that_would_change_the_log_probabilities_is_refused() -> None:
    refuse_original_logprobs({})
    refuse_original_logprobs({"SGLANG_RETURN_ORIGINAL_LOGPROB": "0"})
    with pytest.raises(ConfigError, match="unset it"):
        refuse_original_logprobs({"SGLANG_RETURN_ORIGINAL_LOGPROB": "true"})


def start_process(*flags: str) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "strawflow.testing.fake_engine", "--port", "0", *flags],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())["url"]


def test_as_a_process_it_takes_its_first_label_from_the_model_folder_and_dies_when_told_to(
    tmp_path: Path,
) -> None:
    first, second = checkpoint(tmp_path / "v7"), checkpoint(tmp_path / "v8")
    process, url = start_process("--model-path", str(first), "--die_on_update", "2", "--delay-s", "0.01")

    async def run() -> None:
        async with SglangClient(url) as client:
            assert await client.weight_version() == "v7"
            assert (await client.server_info())["version"] == "fake"
            await client.update_weights_from_disk(second, "v8")
            with pytest.raises(EngineUnavailableError):
                await client.update_weights_from_disk(first, "v9")

    with process:
        asyncio.run(run())
        assert process.wait(timeout=10) == DEATH_EXIT_CODE


def test_as_a_process_it_dies_with_its_killed_parent() -> None:
    script = (
        "import os, subprocess, sys\n"
        "command = [sys.executable, '-m', 'strawflow.testing.fake_engine', '--die-with-parent', str(os.getpid())]\n"
        "subprocess.Popen(command).wait()\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = json.loads(parent.stdout.readline())["pid"]
        os.kill(parent.pid, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while processes.started_at(pid) is not None:
            assert time.monotonic() < deadline, "the fake engine outlived its parent"
            time.sleep(0.02)
