"""Functions written for slime's interfaces, called as they expect and understood as strawflow needs. A thin adapter:

    async (args, sample, sampling_params[, evaluation]) -> Sample | list[Sample]     rollout.generate
    async (args, sample) -> number | dict                                            rollout.reward
    async (args, samples) -> [number | dict]                                         rollout.reward, of a whole group
    (args, sample[, *, rollout_id, evaluation]) -> Sample | None                     rollout.sample_filter
    (args, group, **more) -> {keep, reason}                                          assemble.group_filter

1. A function is taken for slime's by the name of its first parameter, `args`. It gets a `Sample` with slime's field names; any
   object with these fields may come back.
2. `args` holds what strawflow can answer for (`arguments`); asking for anything else raises and names what there is.
3. slime tells one weight version a turn. Where the engine served one version during the rollout, every trained token is that
   version's; where it served more, the sample must name a single one, or it fails: versions are never guessed.
4. Tokens that slime masks are stored as not sampled: slime does not tell a tool's answer from a masked turn.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

from strawflow.config import RunConfig
from strawflow_workers.rollout.hooks import interfaces
from strawflow_workers.rollout.hooks.interfaces import (
    CompletedGroup,
    Engine,
    GroupMember,
    Interrupted,
    Rollout,
    Segment,
    Verdict,
)

Function = Callable[..., Any]


@dataclass
class Sample:
    """A sample under slime's field names; further attributes may be set."""

    class Status(Enum):
        """What became of it."""

        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list)
    """Prompt and response."""
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    """One item a response token; None: all are trained."""
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0

    def get_reward_value(self, args: Any) -> Any:
        """Return the reward, or what stands in it under `args.reward_key`."""
        key = getattr(args, "reward_key", None)
        return self.reward[key] if key and isinstance(self.reward, dict) else self.reward

    @property
    def effective_response_length(self) -> int:
        """Response tokens that are trained."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def to_dict(self) -> dict[str, Any]:
        """Return every attribute, the status as its word."""
        return {**self.__dict__, "status": self.status.value}

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> Sample:
        """Return the sample of `to_dict`."""
        names = {f.name for f in dataclasses.fields(cls)}
        sample = cls(**{name: value for name, value in told.items() if name in names})
        sample.status = cls.Status(told.get("status", "pending"))
        for name in told.keys() - names:
            setattr(sample, name, told[name])
        return sample


class Arguments(SimpleNamespace):
    """slime's `args`, as far as strawflow has an answer."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"strawflow gives slime's functions no args.{name}; given: {', '.join(vars(self))}"
        )


def arguments(config: RunConfig, *, model_path: str = "", engine_url: str = "") -> Arguments:
    """Return `args` for a run; of its engine where one is asked."""
    rollout = config.rollout
    address = urlsplit(engine_url)
    return Arguments(
        hf_checkpoint=model_path or config.model.path,
        sglang_router_ip=address.hostname,
        sglang_router_port=address.port,
        n_samples_per_prompt=rollout.samples_per_prompt,
        rollout_batch_size=rollout.prompts_per_step,
        rollout_temperature=rollout.temperature,
        rollout_top_p=rollout.top_p,
        rollout_top_k=-1,
        rollout_max_response_len=rollout.max_response_tokens,
        rollout_stop=list(rollout.stop) or None,
        rollout_stop_token_ids=list(rollout.stop_token_ids) or None,
        rollout_seed=config.run.seed,
        seed=config.run.seed,
        advantage_estimator="grpo",
        rewards_normalization=True,
        grpo_std_normalization=config.algorithm.advantage == "grpo",
        partial_rollout=False,
        group_rm=False,
        reward_key=None,
        eval_reward_key=None,
        ci_test=False,
    )


def is_slimes(function: Function) -> bool:
    """Tell by its first parameter whether a function was written for slime."""
    try:
        return next(iter(inspect.signature(function).parameters), "") == "args"
    except (TypeError, ValueError):
        return False


def keywords(function: Function, offered: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the offered keyword arguments that a function has a parameter for."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in offered.items() if name in parameters}


def generate_hook(function: Function, args: Arguments) -> interfaces.GenerateHook:
    """Return slime's custom generate function as a generate hook."""

    async def generate(sample: interfaces.Sample, engine: Engine) -> Rollout:
        address = urlsplit(engine.url)
        own = Arguments(
            **{**vars(args), "sglang_router_ip": address.hostname, "sglang_router_port": address.port}
        )
        # What slime's own defaults send along: texts keep their special tokens and stops.
        params = {
            "top_k": -1,
            "skip_special_tokens": False,
            "no_stop_trim": True,
            "spaces_between_special_tokens": False,
            **{name: value for name, value in sample.sampling.items() if name != "n"},
        }
        told = keywords(function, {"evaluation": sample.purpose == "eval"})
        found = await function(own, asked_sample(sample), params, **told)
        return rollout_of(found if isinstance(found, list) else [found], engine.served, own)

    return generate


def rollout_of(samples: Sequence[Any], served: Sequence[str], args: Arguments) -> Rollout:
    """Return the finished samples of one rollout; `served` are the versions that may have sampled it.

    Raises:
        Interrupted: one was aborted.
        ValueError: as `segment_of`, or their rewards differ.
    """
    statuses = [_status(s) for s in samples]
    if "aborted" in statuses:
        raise Interrupted
    if "failed" in statuses:
        return Rollout(segments=[], failure="the function returned a failed sample")
    return Rollout(segments=[segment_of(s, served) for s in samples], reward=_one_reward(samples, args))


def sample_filter(function: Function, args: Arguments) -> interfaces.SampleFilter:
    """Return slime's sample hook as a sample filter; what else it changes of the sample is not taken over."""

    def judge(sample: interfaces.Sample, rollout: Rollout) -> Verdict:
        last = rollout.segments[-1]
        told = asked_sample(sample)
        prompt = list(sample.prompt_tokens if last.prompt_tokens is None else last.prompt_tokens)
        told.tokens, told.response_length = [*prompt, *last.tokens], len(last.tokens)
        told.response, told.rollout_log_probs = last.text or "", list(last.logprobs)
        told.loss_mask, told.weight_versions = last.loss_mask, sorted({v for v in last.versions if v})
        told.status = Sample.Status.TRUNCATED if last.finish_reason == "length" else Sample.Status.COMPLETED
        told.reward = rollout.reward
        # Which step will train it is decided when its batch is planned, not now.
        more = keywords(function, {"rollout_id": None, "evaluation": sample.purpose == "eval"})
        found = function(args, told, **more)
        is_kept = found is not None and not getattr(found, "remove_sample", False)
        return Verdict(is_kept, "removed by the sample filter")

    return judge


def group_filter(function: Function, args: Arguments) -> interfaces.GroupFilter:
    """Return slime's dynamic sampling filter as a group filter. Failed members are left out of the group that it sees; a
    member of several segments is a list of samples in it."""

    def judge(group: CompletedGroup) -> Verdict:
        members = [stored_samples(group.unit_id, m) for m in group.members if m.status != "failed"]
        found = function(args, [m[0] if len(m) == 1 else m for m in members])
        if isinstance(found, bool):
            found = {"keep": found}
        told = found if isinstance(found, Mapping) else vars(found)
        return Verdict(bool(told["keep"]), str(told.get("reason") or "dropped by the group filter"))

    return judge


def reward(function: Function) -> Function:
    """Return slime's reward function as one that a reward process calls; there `args` tells `reward_key` alone."""
    args = Arguments(reward_key=None)

    def score(
        response_text: str, *, prompt: str, label: str | None, metadata: Mapping[str, Any] | None
    ) -> Any:
        sample = Sample(
            prompt=prompt,
            response=response_text,
            label=label,
            metadata=dict(metadata or {}),
            status=Sample.Status.COMPLETED,
        )
        found = function(args, sample)
        sample.reward = asyncio.run(found) if inspect.isawaitable(found) else found  # type: ignore[arg-type]
        return _number(sample, args)

    return score


def takes_samples(function: Function) -> bool:
    """Tell by its second parameter whether a reward function of slime's takes the samples of a group."""
    return list(inspect.signature(function).parameters)[1:2] == ["samples"]


def group_reward(function: Function) -> Function:
    """Return slime's reward function of groups (`group_rm`) as one that a reward process calls."""
    args = Arguments(reward_key=None, group_rm=True)

    def score(
        response_texts: Sequence[str], *, prompt: str, label: str | None, metadata: Mapping[str, Any] | None
    ) -> list[float]:
        samples = [
            Sample(
                index=place,
                prompt=prompt,
                response=text,
                label=label,
                metadata=dict(metadata or {}),
                status=Sample.Status.COMPLETED,
            )
            for place, text in enumerate(response_texts)
        ]
        found = function(args, samples)
        rewards: Any = asyncio.run(found) if inspect.isawaitable(found) else found  # type: ignore[arg-type]
        if rewards is not None:  # else it set them itself
            if len(rewards) != len(samples):
                raise ValueError(f"{len(rewards)} rewards for a group of {len(samples)}")
            for sample, value in zip(samples, rewards, strict=True):
                sample.reward = value
        return [_number(sample, args) for sample in samples]

    return score


def asked_sample(sample: interfaces.Sample) -> Sample:
    """Return what slime's functions are asked for."""
    is_text = sample.prompt_format == "text"
    return Sample(
        group_index=sample.unit_id,
        index=sample.member,
        rollout_id=sample.member,
        prompt=sample.prompt if is_text else json.loads(sample.prompt),
        tokens=list(sample.prompt_tokens),
        label=sample.label,
        metadata=dict(sample.metadata),
        session_id=f"{sample.unit_id}.{sample.member}",
    )


def stored_samples(unit_id: int, member: GroupMember) -> list[Sample]:
    """Return the segments of a stored member as samples."""
    return [
        Sample(
            group_index=unit_id,
            index=member.member,
            rollout_id=member.member,
            tokens=[*row["prompt_tokens"], *row["response_tokens"]],
            response=row["response_text"] or "",
            response_length=len(row["response_tokens"]),
            reward=member.reward,
            loss_mask=list(row["loss_mask"]),
            weight_versions=list(row["weight_versions"]),
            rollout_log_probs=list(row["logprobs"]),
            status=Sample.Status.TRUNCATED if member.status == "truncated" else Sample.Status.COMPLETED,
        )
        for row in member.segments
    ]


def _status(sample: Any) -> str:
    """Return the word of a status of whichever class the function's own samples have."""
    status = getattr(sample, "status", None)
    word = str(getattr(status, "value", status))
    if word not in ("completed", "truncated", "aborted", "failed"):
        raise ValueError(f"the function returned a sample of status {word!r}; set completed or truncated")
    return word


def segment_of(sample: Any, served: Sequence[str]) -> Segment:
    """Return a finished sample as a segment; `served` are the versions that may have sampled it.

    Raises:
        ValueError: its lists are not of one length, it is not finished, or its version is not told.
    """
    length = int(sample.response_length)
    tokens, logprobs = list(sample.tokens), sample.rollout_log_probs
    if not 0 <= length <= len(tokens):
        raise ValueError(f"response_length {length} of {len(tokens)} tokens")
    finish_reason = "length" if _status(sample) == "truncated" else "stop"
    if logprobs is None or len(logprobs) != length:
        told = "none" if logprobs is None else str(len(logprobs))
        raise ValueError(
            f"{told} of {length} rollout_log_probs; ask the engine with return_logprob, and append 0.0 for other tokens"
        )
    mask = [1] * length if sample.loss_mask is None else [int(m) for m in sample.loss_mask]
    if len(mask) != length:
        raise ValueError(f"{len(mask)} items of loss_mask for {length} response tokens")
    version = _one_version(sample, served)
    versions = [version if m else "" for m in mask]
    if getattr(sample, "remove_sample", False):
        mask = [0] * length
    return Segment(
        tokens=tokens[len(tokens) - length :],
        logprobs=[float(p) for p in logprobs],
        versions=versions,
        loss_mask=mask,
        prompt_tokens=tokens[: len(tokens) - length],
        finish_reason=finish_reason,
        text=sample.response or None,
    )


def _one_version(sample: Any, served: Sequence[str]) -> str:
    named = {str(v) for v in getattr(sample, "weight_versions", None) or ()}
    candidates = named or set(served)
    if len(candidates) != 1:
        raise ValueError(
            f"which of the weights {sorted(candidates)} sampled which token is not told; "
            "use rollout.on_new_weights 'finish' or 'park' with functions of slime"
        )
    return candidates.pop()


def _one_reward(samples: Sequence[Any], args: Arguments) -> float | None:
    """Return the rollout's reward, if a sample has one: all of one rollout share it."""
    found = {_number(s, args) for s in samples if getattr(s, "reward", None) is not None}
    if len(found) > 1:
        raise ValueError(f"the samples of one rollout have rewards {sorted(found)}; they share one")
    return found.pop() if found else None


def _number(sample: Any, args: Arguments) -> float:
    value = sample.reward
    if isinstance(value, Mapping):
        key = args.reward_key or "score"
        if key not in value:
            raise ValueError(f"the reward is an object without {key!r}: {value!r:.200}")
        value = value[key]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"the reward is no number: {value!r:.200}")
    return float(value)
