"""Real SGLang on this machine: its answers agree with transformers, and nothing of it outlives who started it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from strawflow_workers.rollout.sglang_client import (
    EngineResponseError,
    EngineUnavailableError,
    GenerateRequest,
    Generation,
    SglangClient,
)
from strawflow_workers.rollout.sglang_server import EngineStartError, SglangOptions, SglangServer
from strawflow_workers.rollout.tokens import PromptTokenizer
from tests.integration import own_hooks
from tests.integration.test_turns import unbroken_and_broken

pytestmark = [pytest.mark.alone, pytest.mark.timeout(900)]

PROMPTS = [[256, 5, 7, 9, 11], [256, 40], [256, *range(60, 100)], [256, 5, 7, 9, 13], [256, 3, 3, 3, 3, 3, 3]]
LABELS = {"first": "main.f1.0.aa", "second": "main.f1.1.bb"}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    config = Qwen3Config(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=258,
        initializer_range=0.2,
    )
    folders = {}
    for seed, name in enumerate(LABELS):
        torch.manual_seed(seed)
        folders[name] = tmp_path_factory.mktemp("checkpoints") / name
        Qwen3ForCausalLM(config).float().save_pretrained(folders[name])
    return folders


@pytest.fixture(scope="module")
def server(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangServer]:
    log = tmp_path_factory.mktemp("logs") / "engine.log"
    options = SglangOptions(
        model_path=checkpoints["first"],
        log_path=log,
        device="cpu",
        weight_version=LABELS["first"],
        extra_args=("--incremental-streaming-output", "--stream-interval", "8"),
    )
    with SglangServer(options) as running:
        yield running


def request(prompt: list[int], **params: Any) -> GenerateRequest:
    return GenerateRequest(
        input_ids=prompt, sampling_params={"max_new_tokens": 12, "temperature": 1.0, **params}
    )


def reference_logprobs(
    model: Qwen3ForCausalLM, prompt: list[int], found: Generation, temperature: float
) -> list[float]:
    tokens = torch.tensor([[*prompt, *found.output_ids]])
    with torch.no_grad():
        logits = model(tokens).logits[0, len(prompt) - 1 : -1]
    logprobs = (logits / temperature).log_softmax(-1)
    return [float(row[token]) for row, token in zip(logprobs, found.output_ids, strict=True)]


async def ask_together(server: SglangServer, **params: Any) -> list[list[Generation]]:
    async with SglangClient(server.url) as client:
        return list(await asyncio.gather(*(client.generate(request(prompt, **params)) for prompt in PROMPTS)))


async def serve(server: SglangServer, folder: Path, label: str) -> None:
    async with SglangClient(server.url) as client:
        await client.update_weights_from_disk(folder, label)


@pytest.mark.parametrize("truncation", [{}, {"top_p": 0.8, "top_k": 20}], ids=["full", "truncated"])
def test_log_probabilities_are_those_of_the_tempered_distribution_before_truncation(
    server: SglangServer, checkpoints: dict[str, Path], truncation: dict[str, Any]
) -> None:
    asyncio.run(serve(server, checkpoints["first"], LABELS["first"]))
    model = Qwen3ForCausalLM.from_pretrained(checkpoints["first"])
    groups = asyncio.run(ask_together(server, temperature=0.7, n=4, **truncation))
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for found in group:
            assert found.logprobs == pytest.approx(reference_logprobs(model, prompt, found, 0.7), abs=1e-3)
            assert found.weight_versions == [LABELS["first"]] * len(found.output_ids)
            assert found.prompt_tokens == len(prompt)


def test_the_samples_of_one_request_are_drawn_independently(server: SglangServer) -> None:
    groups = asyncio.run(ask_together(server, n=16))
    for group in groups:
        assert len({tuple(found.output_ids) for found in group}) >= 15


def test_generation_ends_at_the_end_token_or_by_length(server: SglangServer) -> None:
    async def run() -> list[Generation]:
        async with SglangClient(server.url) as client:
            return await client.generate(request(PROMPTS[0], n=64, max_new_tokens=40))

    found = asyncio.run(run())
    assert {"stop", "length"} >= {generation.finish_reason for generation in found}
    for generation in found:
        assert (generation.output_ids[-1] == 257) == (generation.finish_reason == "stop")
        assert len(generation.output_ids) == 40 or generation.finish_reason == "stop"


def test_reloaded_weights_answer_under_their_label_and_a_bad_path_leaves_the_old_ones(
    server: SglangServer, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    asyncio.run(serve(server, checkpoints["second"], LABELS["second"]))
    model = Qwen3ForCausalLM.from_pretrained(checkpoints["second"])
    with pytest.raises(EngineResponseError):
        asyncio.run(serve(server, tmp_path / "absent", "never"))
    (found, *_), *_ = asyncio.run(ask_together(server, n=2))
    assert set(found.weight_versions) == {LABELS["second"]}
    assert found.logprobs == pytest.approx(reference_logprobs(model, PROMPTS[0], found, 1.0), abs=1e-3)


def test_an_aborted_request_answers_with_what_it_has(server: SglangServer) -> None:
    async def run() -> Generation:
        async with SglangClient(server.url) as client:
            long = GenerateRequest(
                input_ids=PROMPTS[0],
                sampling_params={"max_new_tokens": 1900, "ignore_eos": True},
                rid="u1.f1",
            )
            running = asyncio.create_task(client.generate(long))
            while not running.done():
                await asyncio.wait([running], timeout=0.3)
                await client.abort("u1.f1")
            return (await running)[0]

    found = asyncio.run(run())
    assert found.finish_reason == "abort"
    assert len(found.output_ids) == len(found.logprobs) == len(found.weight_versions) < 1900


def test_a_broken_off_response_goes_on_with_its_tokens_in_the_prompt_as_if_never_broken(
    server: SglangServer, checkpoints: dict[str, Path]
) -> None:
    limits = {"temperature": 0.0, "max_new_tokens": 60, "ignore_eos": True}

    async def run() -> None:
        async with SglangClient(server.url) as client:
            await client.update_weights_from_disk(checkpoints["first"], LABELS["first"])
            (whole,) = await client.generate(request(PROMPTS[0], **limits))
            lengths = []
            for after_s in (0.05, 0.15, 0.3):
                task = asyncio.create_task(client.generate(request(PROMPTS[0], **limits)))
                await asyncio.sleep(after_s)
                while not task.done():
                    await client.abort()
                    await asyncio.wait([task], timeout=0.05)
                (part,) = task.result()
                left = limits | {"max_new_tokens": 60 - len(part.output_ids)}
                (rest,) = (
                    await client.generate(request([*PROMPTS[0], *part.output_ids], **left))
                    if left["max_new_tokens"]
                    else (part,)
                )
                done = part.output_ids if part is rest else [*part.output_ids, *rest.output_ids]
                assert done == whole.output_ids, f"broken off after {len(part.output_ids)} tokens"
                lengths.append(len(part.output_ids))
            assert any(0 < length < 60 for length in lengths), lengths

    asyncio.run(run())


def test_a_streamed_answer_is_the_same_one_told_in_parts(
    server: SglangServer, checkpoints: dict[str, Path]
) -> None:
    told: dict[int, list[tuple[list[int], list[float], list[str]]]] = {}

    def note(place: int, found: Generation) -> None:
        told.setdefault(place, []).append(
            (list(found.output_ids), list(found.logprobs), list(found.weight_versions))
        )

    async def run() -> None:
        async with SglangClient(server.url) as client:
            await client.update_weights_from_disk(checkpoints["first"], LABELS["first"])
            asked = request(PROMPTS[0], temperature=0.0, max_new_tokens=60, ignore_eos=True, n=2)
            whole = await client.generate(asked)
            streamed = await client.generate(asked, on_progress=note)
            for place, (expected, found) in enumerate(zip(whole, streamed, strict=True)):
                assert found.output_ids == expected.output_ids
                assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
                assert found.weight_versions == [LABELS["first"]] * 60
                assert found.finish_reason == "length"
                parts = told[place]
                assert len(parts) > 5
                for tokens, logprobs, versions in parts:
                    assert tokens == found.output_ids[: len(tokens)]
                    assert len(logprobs) == len(versions) == len(tokens)

            # Broken off: what was told before is the beginning of what it answers with.
            told.clear()
            long = GenerateRequest(
                input_ids=PROMPTS[0],
                sampling_params={"max_new_tokens": 1900, "ignore_eos": True},
                rid="u1.f2",
            )
            task = asyncio.create_task(client.generate(long, on_progress=note))
            while not task.done():
                await asyncio.wait([task], timeout=0.3)
                await client.abort("u1.f2")
            (ended,) = task.result()
            assert ended.finish_reason == "abort"
            assert 0 < len(ended.output_ids) < 1900
            assert told[0][0][0] == ended.output_ids[: len(told[0][0][0])]
            with pytest.raises(EngineResponseError, match="HTTP 400"):
                await client.generate(request([7] * 3000), on_progress=note)

    asyncio.run(run())


def test_a_rollout_parked_at_every_turn_boundary_is_bit_for_bit_the_unbroken_one_and_samples_after_the_very_tokens(
    server: SglangServer,
    checkpoints: dict[str, Path],
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(own_hooks, "FLUSHES", [True])
    folder = shutil.copytree(checkpoints["first"], tmp_path / "model")
    shutil.copy(tiny_model / "tokenizer.json", folder)
    rows = unbroken_and_broken(folder, tmp_path, engine_url=server.url)
    model, tokenizer = Qwen3ForCausalLM.from_pretrained(folder), PromptTokenizer(folder)
    for row in rows:
        prompt, response = row["prompt_tokens"], row["response_tokens"]
        with torch.no_grad():
            likeliest = model(torch.tensor([[*prompt, *response]])).logits[0].argmax(-1)[len(prompt) - 1 :]
        sampled = [at for at, mask in enumerate(row["loss_mask"]) if mask]
        assert [int(likeliest[at]) for at in sampled] == [response[at] for at in sampled]
    response = rows[0]["response_tokens"]
    assert tokenizer.encode_text(tokenizer.decode(response)) != response, "its text would have done as well"


def test_weights_loaded_inside_a_request_are_told_for_exactly_the_tokens_they_sampled(
    server: SglangServer, checkpoints: dict[str, Path]
) -> None:
    models = {LABELS[name]: Qwen3ForCausalLM.from_pretrained(folder) for name, folder in checkpoints.items()}

    async def run() -> Generation:
        async with SglangClient(server.url) as client:
            await client.update_weights_from_disk(checkpoints["first"], LABELS["first"])
            running = request(PROMPTS[0], max_new_tokens=300, ignore_eos=True)
            task = asyncio.create_task(client.generate(running))
            await asyncio.sleep(0.3)
            await client.pause()
            await client.update_weights_from_disk(checkpoints["second"], LABELS["second"])
            await client.resume()
            (found,) = await task
            return found

    found = asyncio.run(run())
    assert found.tells_spans
    assert len(found.output_ids) == 300
    assert found.weight_versions == sorted(found.weight_versions, key=list(LABELS.values()).index)
    assert set(found.weight_versions) == set(LABELS.values())
    # The proof is in the log-probabilities: each is that of the model its label names, and not that of the other.
    whole = {label: reference_logprobs(model, PROMPTS[0], found, 1.0) for label, model in models.items()}
    for place, (label, logprob) in enumerate(zip(found.weight_versions, found.logprobs, strict=True)):
        assert logprob == pytest.approx(whole[label][place], abs=1e-3), f"token {place} of {label}"


def test_requests_it_refuses_and_its_own_description_are_told_plainly(server: SglangServer) -> None:
    async def run() -> None:
        async with SglangClient(server.url) as client:
            with pytest.raises(EngineResponseError, match="HTTP 400"):
                await client.generate(request([7] * 3000))
            assert await client.health()
            await client.flush_cache()
            assert (await client.server_info())["version"] == "0.5.23"

    asyncio.run(run())


def test_a_start_that_fails_quotes_the_log(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    options = SglangOptions(
        model_path=checkpoints["first"],
        log_path=tmp_path / "log",
        device="cpu",
        extra_args=("--no-such-flag",),
    )
    with pytest.raises(EngineStartError, match="no-such-flag"), SglangServer(options):
        raise AssertionError("it must not become ready")


def group_members(group: int) -> list[int]:
    """Live processes of the server's group, and of the session it leads."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgrp, session = stat.read_text().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if group in (int(pgrp), int(session)) and state != "Z":
            found.append(int(stat.parent.name))
    return found


def wait_until_gone(group: int, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while remaining := group_members(group):
        assert time.monotonic() < deadline, f"processes {remaining} of the server remain"
        time.sleep(0.05)


STARTER = """
import json, sys
from pathlib import Path
from strawflow_workers.rollout.sglang_server import SglangOptions, SglangServer
server = SglangServer(SglangOptions(model_path=Path(sys.argv[1]), log_path=Path(sys.argv[2]), device="cpu"))
server.start()
server.wait_ready()
print(json.dumps(server.pid), flush=True)
sys.stdin.read()
"""


@pytest.mark.long
def test_killing_the_starting_process_leaves_no_process_of_the_tree(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    command = [sys.executable, "-c", STARTER, str(checkpoints["first"]), str(tmp_path / "log")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        group = json.loads(starter.stdout.readline())
        assert len(group_members(group)) >= 3  # launcher, scheduler, detokenizer
        os.kill(starter.pid, signal.SIGKILL)
        wait_until_gone(group, within_s=10)


def scheduler_of(group: int) -> int:
    for pid in group_members(group):
        if Path(f"/proc/{pid}/comm").read_text().startswith("sglang::sch"):  # the kernel cuts the name here
            return pid
    raise AssertionError("no scheduler found")


@pytest.mark.long
def test_a_killed_scheduler_or_launcher_ends_the_server_and_it_can_be_started_again(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    options = SglangOptions(model_path=checkpoints["first"], log_path=tmp_path / "log", device="cpu")
    server = SglangServer(options)
    with server:
        first = server.pid
        assert first is not None
        os.kill(scheduler_of(first), signal.SIGKILL)
        wait_until_gone(first, within_s=20)
        assert not server.alive()
        with pytest.raises(EngineUnavailableError):
            asyncio.run(ask_together(server))
        server.start()
        server.wait_ready()
        second = server.pid
        assert second is not None
        assert len(asyncio.run(ask_together(server))) == len(PROMPTS)
        os.kill(second, signal.SIGKILL)
        wait_until_gone(second, within_s=10)
        assert not server.alive()
    assert (tmp_path / "log").read_text().count("sglang.launch_server") >= 2
