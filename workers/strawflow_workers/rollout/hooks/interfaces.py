"""The signatures of hooks, and the values that go in and out of them. Users import this module; it imports no other of ours.

1. A hook is named by dotted path, `package.module:function`, and looked at when a worker starts: parameters by these protocols.
2. Hooks run in the worker: a generate hook on its event loop, so it awaits and never blocks; filters are plain functions.
3. A hook that raises fails what it was called for, with the text: one member, or (a group filter) the assembler.
4. Lists of one segment (tokens, log-probabilities, versions, mask) are equally long: one item a response token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What a generate hook is asked for: one rollout, the `member`-th of its group."""

    unit_id: int
    member: int
    """From 0 to the group's size - 1."""
    prompt: str
    """The text, or the JSON of chat messages (`prompt_format`)."""
    prompt_format: Literal["text", "messages"]
    prompt_tokens: Sequence[int]
    """Token ids of the prompt; of messages by the checkpoint's chat template."""
    sampling: Mapping[str, Any]
    """Sampling parameters under SGLang's names: temperature, top_p, max_new_tokens, stop, ..."""
    purpose: Literal["train", "eval"]
    label: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The row's metadata; empty without any."""


@dataclass(frozen=True, kw_only=True)
class Generated:
    """One answer of the engine: three lists of equal length."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    """log-softmax(logits / temperature) of each token in the pass that sampled it."""
    versions: Sequence[str]
    """Id of the weights of that pass, for each token."""
    finish_reason: Literal["stop", "length"]


class Engine(Protocol):
    """The engine, as a hook sees it; it knows which member it is used for."""

    url: str
    """SGLang's address, for what is not offered here."""
    eos_id: int

    @property
    def served(self) -> Sequence[str]:
        """Ids of the weights that the engine served since this rollout began, in order."""
        ...

    async def generate(
        self, prompt_tokens: Sequence[int], sampling: Mapping[str, Any] | None = None
    ) -> Generated:
        """Sample once after these token ids; `sampling` replaces single values of the sample's own.

        Raises:
            EngineResponseError: the answer cannot be used; uncaught it fails the member.
            Interrupted: the group is being broken off; let it pass.
        """
        ...

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens added."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, without a closing end of sequence."""
        ...


class Interrupted(BaseException):
    """The group is broken off (drain, new weights): what the member had is given up, it starts again from its prompt.

    No Exception, so that a hook's own error handling does not take it for one.
    """


@dataclass(kw_only=True)
class Segment:
    """One training sequence: a prompt and a response, of which some tokens may come from an environment."""

    tokens: list[int] = field(default_factory=list)
    """Response token ids."""
    logprobs: list[float] = field(default_factory=list)
    """0.0 where no weights sampled the token."""
    versions: list[str] = field(default_factory=list)
    """Ids of the weights that sampled each token; "" where none did."""
    loss_mask: list[int] | None = None
    """1 = trained; None: whatever was sampled is. A token that was not sampled must not be trained."""
    prompt_tokens: Sequence[int] | None = None
    """None: the sample's prompt."""
    finish_reason: str = "stop"
    """`stop`, or `length` where the response was cut."""
    text: str | None = None
    """What a reward reads; None: the tokens' text."""

    def add_generated(self, generated: Generated, *, trained: bool = True) -> None:
        """Append an engine's answer."""
        self._add(generated.tokens, generated.logprobs, generated.versions, trained=trained)
        self.finish_reason = generated.finish_reason

    def add_environment(self, tokens: Sequence[int]) -> None:
        """Append tokens that no weights sampled (a tool's answer, a user's turn): they are never trained."""
        self._add(tokens, [0.0] * len(tokens), [""] * len(tokens), trained=False)

    def _add(
        self, tokens: Sequence[int], logprobs: Sequence[float], versions: Sequence[str], *, trained: bool
    ) -> None:
        if self.loss_mask is None:
            self.loss_mask = [int(bool(version)) for version in self.versions]
        self.tokens += tokens
        self.logprobs += logprobs
        self.versions += versions
        self.loss_mask += [int(trained)] * len(tokens)


@dataclass(kw_only=True)
class Rollout:
    """One member's result: segments that share one reward, count once in the baseline and stay in one mini-batch."""

    segments: Sequence[Segment]
    reward: float | None = None
    """None: the run's reward reads the text of the last segment."""
    failure: str | None = None
    """Why the rollout is no result; then it is a failed member with this reason."""


@dataclass(frozen=True)
class Verdict:
    """What a filter says."""

    keep: bool
    reason: str = ""
    """Why not, in one or a few words (`too_easy`): counted and shown under it."""


@dataclass(frozen=True, kw_only=True)
class GroupMember:
    """A member as it was stored."""

    member: int
    status: Literal["finished", "truncated", "failed"]
    segments: Sequence[Mapping[str, Any]]
    """Its rows, by the columns of the trajectory schema."""
    reward: float | None
    """None where it failed."""
    score: float | None
    failure: str | None

    @property
    def num_tokens(self) -> int:
        """Response tokens of all segments."""
        return sum(len(row["response_tokens"]) for row in self.segments)


@dataclass(frozen=True, kw_only=True)
class CompletedGroup:
    """What a group filter judges: a closed group that has members enough to be trained."""

    unit_id: int
    members: Sequence[GroupMember]

    @property
    def rewards(self) -> list[float]:
        """One reward for each member that did not fail."""
        return [m.reward for m in self.members if m.reward is not None]


@dataclass(frozen=True, kw_only=True)
class PromptSetMetrics:
    """How one prompt set stands."""

    weight: float
    """Its share by the weights of the last admission, or the configured ones before the first; those of all sets sum to 1."""
    num_rows: int
    """Rows enqueued; of a data source's set those it made so far."""
    num_admitted: int
    """Groups admitted on this branch, over all epochs."""
    epoch: int
    num_groups: int
    """How many of the newest completed groups (of all sets together 8 batches' worth) are of this set."""
    mean_reward: float | None
    """Of these groups; None without any."""


@dataclass(frozen=True, kw_only=True)
class Mix:
    """What a curriculum says: how the groups of this admission are drawn."""

    weights: Mapping[str, float]
    """Of sets by name, relative to one another, from 0; sets left out have 0. One at least is above 0."""
    state: Any = None
    """JSON, at most 1 MiB: what the curriculum is given next time, stored with the groups of this admission."""
    priorities: Mapping[str, int] = field(default_factory=dict)
    """Of the groups of a set: higher is granted first; sets left out have that of their enqueue."""
    difficulties: Mapping[str, Any] = field(default_factory=dict)
    """For the data source of a set, as it is: `PromptRequest.difficulty`."""


@dataclass(frozen=True, kw_only=True)
class PromptRequest:
    """What a data source is asked for."""

    name: str
    """Of its prompt set."""
    count: int
    """How many prompts are wanted, at most."""
    num_made: int
    """How many of its prompts were admitted on this branch so far."""
    step: int
    """Of the newest published weights; 0 are those the run starts from."""
    difficulty: Any = None
    """What the curriculum said for this set; None without one."""


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """What a data source made."""

    rows: Sequence[Mapping[str, Any]]
    """Each with `prompt` (text or chat messages) and, if wanted, `label` and `metadata` (a JSON object). Fewer than wanted where
    there are no more now; the other sets go on meanwhile."""
    state: Any = None
    """JSON, at most 1 MiB: what it is given next time, stored in the transaction that admits the rows."""


class Curriculum(Protocol):
    """`rollout.curriculum`: called when groups are about to be admitted, in a thread of the worker: it may block, but the worker
    leases and stores nothing meanwhile, and is taken for stuck after 10 minutes.

    `step` is that of the newest published weights, `state` what it returned for the last admission of this branch, None before
    the first. If another worker admits meanwhile, what it said is thrown away and it is asked again: what it remembers must be
    in `state`. It goes back with a branch and comes back with a rebuild. What it raises ends the worker.
    """

    def __call__(self, step: int, sets: Mapping[str, PromptSetMetrics], state: Any) -> Mix: ...


class DataSource(Protocol):
    """`source` of a set in `data.prompts`: makes prompts as the run goes on, in a thread of the worker, as a curriculum.

    Rows and state are stored in one transaction, or neither; then it is asked again from the state before, be it by another
    worker: what it remembers must be in `state`, None at first. A prompt made twice is two prompts. It goes back with a branch
    and comes back with a rebuild. What it raises ends the worker.
    """

    def __call__(self, request: PromptRequest, state: Any) -> Prompts: ...


class GenerateHook(Protocol):
    """`rollout.generate`: one sample in; one segment, several that share a rollout, or a `Rollout` out."""

    async def __call__(self, sample: Sample, engine: Engine) -> Segment | Sequence[Segment] | Rollout: ...


class SampleFilter(Protocol):
    """`rollout.sample_filter`: called once for each finished rollout, before its reward; dropped, it is a failed member with
    the reason, which is not sampled again."""

    def __call__(self, sample: Sample, rollout: Rollout) -> Verdict: ...


class GroupFilter(Protocol):
    """`assemble.group_filter`: called for each closed group before it takes a place in a batch; dropped, it is owed a
    replacement. Called again for the same group after a restart of the assembler, so it should depend on the group alone."""

    def __call__(self, group: CompletedGroup) -> Verdict: ...


class LogHook(Protocol):
    """`assemble.log`: called once a batch is planned, in the assembler. `rows` are the trajectories of its groups, by the columns
    of the schema, each with outcome, reason, advantage and staleness; `metrics` are numbers of the whole, and under `drops`
    how many groups were dropped for which reason since the batch before.

    A crash right after planning may leave a batch untold; none is told twice. What it raises is a warning in the worker's log.
    """

    def __call__(self, step: int, rows: Sequence[Mapping[str, Any]], metrics: Mapping[str, Any]) -> None: ...
