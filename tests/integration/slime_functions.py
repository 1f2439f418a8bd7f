"""A user's file for slime, as its interfaces ask for it: it imports nothing of ours, and asks the engine over HTTP."""

from __future__ import annotations

import asyncio
import copy
from types import SimpleNamespace
from typing import Any

import aiohttp

NUM_SEEN: list[int] = []


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """One turn, a word of the environment, another turn."""
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    num_prompt_tokens = len(sample.tokens)
    sample.loss_mask, sample.rollout_log_probs = [], []
    async with aiohttp.ClientSession() as session:
        for turn in range(2):
            body = {"input_ids": sample.tokens, "sampling_params": sampling_params, "return_logprob": True}
            async with session.post(url, json=body) as answer:
                output = await answer.json()
            found = output["meta_info"]["output_token_logprobs"]
            sample.tokens = sample.tokens + [token for _, token, *_ in found]
            sample.rollout_log_probs += [logprob for logprob, *_ in found]
            sample.loss_mask += [1] * len(found)
            sample.response += output.get("text") or "?"
            if output["meta_info"]["finish_reason"]["type"] == "abort":
                sample.status = sample.Status.ABORTED
                return sample
            if turn == 0:
                sample.tokens = [*sample.tokens, 65, 66]
                sample.rollout_log_probs += [0.0, 0.0]
                sample.loss_mask += [0, 0]
    sample.response_length = len(sample.tokens) - num_prompt_tokens
    sample.status = sample.Status.COMPLETED
    sample.turns = 2
    return sample


async def generate_several(
    args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False
) -> Any:
    assert not evaluation
    return [await generate(args, copy.deepcopy(sample), sampling_params) for _ in range(1 + sample.index)]


async def reward(args: Any, sample: Any, **kwargs: Any) -> float:
    return float(len(sample.response) % 3) + float(sample.label is None)


def keeps_members_before_3(args: Any, sample: Any, *, rollout_id: Any, evaluation: bool) -> Any:
    return sample if sample.index < 3 else None


def keeps_even_groups(args: Any, group: list[Any], **kwargs: Any) -> Any:
    NUM_SEEN.append(len(group))
    flat = [s for m in group for s in (m if isinstance(m, list) else [m])]
    assert all(len(s.rollout_log_probs) == s.response_length for s in flat)
    return SimpleNamespace(
        keep=flat[0].group_index % 2 == 0, reason="odd_group", keep_when_insufficient=False
    )


async def forgets_logprobs(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    sample = await generate(args, sample, sampling_params)
    sample.rollout_log_probs = None
    return sample


async def asks_for_more(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    return args.megatron_path


def centres_rewards(args: Any, samples: list[Any]) -> Any:
    raw = [sample.get_reward_value(args) for sample in samples]
    mean = sum(raw) / len(raw)
    return raw, [value - mean for value in raw]


def to_train_data(args: Any, samples: list[Any]) -> dict[str, Any]:
    """What slime's own conversion makes, with the last response token masked."""
    return {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": [float(sample.index) for sample in samples],
        "raw_reward": [0.5 for _ in samples],
        "truncated": [int(sample.status == sample.Status.TRUNCATED) for sample in samples],
        "sample_indices": [sample.index for sample in samples],
        "loss_masks": [[*(sample.loss_mask or [1] * sample.response_length)[:-1], 0] for sample in samples],
        "rollout_log_probs": [sample.rollout_log_probs for sample in samples],
    }


def adds_a_row(args: Any, samples: list[Any]) -> dict[str, Any]:
    made = to_train_data(args, samples)
    return {name: [*values, values[-1]] for name, values in made.items()}


def changes_the_response(args: Any, samples: list[Any]) -> dict[str, Any]:
    made = to_train_data(args, samples)
    made["tokens"] = [[*tokens[:-1], tokens[-1] + 1] for tokens in made["tokens"]]
    return made


def needs_a_teacher(args: Any, samples: list[Any]) -> dict[str, Any]:
    return {**to_train_data(args, samples), "teacher_log_probs": [[0.0] for _ in samples]}


def postprocesses_tensors(args: Any, rollout_id: int, rollout_data: Any) -> None:
    """slime's rollout_data_postprocess."""


ASKED: list[tuple[int, int, bool, float]] = []
"""(groups, samples of a group, evaluation, temperature) of each call."""


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    groups = data_source.get_samples(args.rollout_batch_size)
    ASKED.append((len(groups), args.n_samples_per_prompt, evaluation, args.rollout_temperature))
    params = {"max_new_tokens": args.rollout_max_response_len, "temperature": args.rollout_temperature}

    async def all_of_them() -> list[list[Any]]:
        flat = [generate(args, sample, params) for group in groups for sample in group]
        made = iter(await asyncio.gather(*flat))
        return [[next(made) for _ in group] for group in groups]

    return SimpleNamespace(samples=asyncio.run(all_of_them()), metrics=None)


def samples_beyond_the_claim(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    return data_source.get_samples(args.rollout_batch_size + 1)


def keeps_for_later(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    made = generate_rollout(args, rollout_id, data_source)
    data_source.add_samples(made.samples)
    return made.samples


def leaves_out_a_sample(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    return [
        [s for s in group if s.index != 2]
        for group in generate_rollout(args, rollout_id, data_source).samples
    ]


async def rewards_by_rank(args: Any, samples: list[Any]) -> list[float]:
    assert args.group_rm
    return [float(place) for place, _ in enumerate(samples)]


def sets_rewards(args: Any, samples: list[Any]) -> None:
    for place, sample in enumerate(samples):
        sample.reward = {"score": 10.0 + place}
