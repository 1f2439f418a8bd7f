"""The signatures of hooks, and the values that go in and out of them. Users import this module; it imports no other of ours.

1. A hook is named by dotted path, `package.module:function`, and looked at when a worker starts: parameters by these protocols.
2. Hooks run in the worker: a generate hook on its event loop, so it awaits and never blocks; filters are plain functions.
3. A hook that raises fails what it was called for, with the text: one member, or (a group filter) the assembler.
4. Lists of one segment (tokens, log-probabilities, versions, mask) are equally long: one item a response token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    images: Sequence[bytes] = ()
    """Image files of the row as they are (PNG, JPEG ...), in the order of the prompt."""


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
        self,
        prompt_tokens: Sequence[int],
        sampling: Mapping[str, Any] | None = None,
        *,
        images: Sequence[bytes] | None = None,
    ) -> Generated:
        """Sample once after these token ids; `sampling` replaces single values of the sample's own.

        `images` are image files that the token ids have places for; None: the sample's.

        Raises:
            EngineResponseError: the answer cannot be used; uncaught it fails the member.
            Interrupted: the group is being broken off; let it pass.
        """
        ...

    def session(self) -> Session:
        """Return this member's session: fresh, or as its last saved turn left it before the group was broken off."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens added."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, without a closing end of sequence."""
        ...


class Interrupted(BaseException):
    """The group is broken off (drain, new weights): the member goes on from the last turn that its session saved, or, without
    one, starts again from its prompt.

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
    tensors: Mapping[str, Any] | None = None
    """numpy arrays that the trainer needs beside the tokens (pixel_values, ...), stored bit for bit; None: those that the
    checkpoint's processor made of the prompt, if it has images."""

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


@dataclass(frozen=True, kw_only=True)
class TurnKey:
    """Names one call of a tool. The same call, made again after a kill or a break, has the same key."""

    run_id: str
    unit_id: int
    member: int
    turn: int
    """How many turns were saved before it."""
    call: int
    """From 0 within the turn."""
    content: str
    """32 hexadecimal digits: a hash of all token ids before the call. Equal keys but for this: the turn was sampled anew, and
    the call may be another."""

    def __str__(self) -> str:
        return f"{self.run_id}.u{self.unit_id}.m{self.member}.t{self.turn}.c{self.call}.{self.content}"


class Session(Protocol):
    """A rollout of several turns that outlives breaks: what `save` was told last is stored with the group when it is parked
    (drain, newer weights), and any worker goes on there. Token ids go in and come out; nothing is tokenised anew."""

    @property
    def turn(self) -> int:
        """Turns saved so far; a fresh session has 0."""
        ...

    @property
    def state(self) -> Any:
        """What the last `save` was given: a JSON value or bytes. None in a fresh session."""
        ...

    @property
    def segments(self) -> Sequence[Segment]:
        """What was made so far; the last is being written."""
        ...

    @property
    def tokens_left(self) -> int:
        """How many response tokens, the environment's included, the present segment may still take: `max_new_tokens` of the
        sample's settings in all."""
        ...

    async def sample(
        self,
        sampling: Mapping[str, Any] | None = None,
        *,
        trained: bool = True,
        images: Sequence[bytes] | None = None,
    ) -> Generated:
        """Sample after all tokens of the present segment, and append the answer.

        `sampling` replaces single values of the sample's own; `max_new_tokens` is never more than `tokens_left`, and with none
        left the answer is empty, of finish reason `length`. `images` are image files that the tokens have places for; None: the
        sample's. Raises as `Engine.generate`.
        """
        ...

    def add_environment(self, tokens: Sequence[int]) -> None:
        """Append tokens that no weights sampled (a tool's answer, a user's turn): they are never trained."""
        ...

    def begin_segment(self, prompt_tokens: Sequence[int]) -> None:
        """Go on in a further segment with a prompt of its own (a context that was shortened, say)."""
        ...

    async def call(self, tool: Callable[..., Any], *arguments: Any) -> Any:
        """Return `tool(*arguments, key=TurnKey)`: awaited where it is `async`, else run in a thread.

        A tool whose effects must not be repeated looks the key up: after a kill the turn is played again.

        Raises:
            Interrupted: the group is being broken off; the tool was not called.
        """
        ...

    def save(self, state: Any = None) -> None:
        """End a turn: from here on a break loses nothing of what was made until now. Atomic: a break before it goes on from the
        turn before. `state` is what the environment goes on from: a JSON value, or bytes.

        Raises:
            ValueError, TypeError: the state is no JSON value.
            InvalidInputError: the segments' lists are not parallel, or a mask trains what was not sampled.
        """
        ...


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


@dataclass(frozen=True, kw_only=True)
class PostProcessed:
    """What a group's rewards became: one item for each member that did not fail, in the order of members."""

    rewards: Sequence[float] | None = None
    """What the members are rewarded with in this batch; None: as they were. What is stored stays."""
    advantages: Sequence[float] | None = None
    """What every trained token of the member is weighted by; None: from the rewards, by `assemble.advantage`."""


@dataclass(kw_only=True)
class TrainingRow:
    """One sequence as it is trained; `of` begins from a stored segment. The five lists of the response are equally long."""

    member: int
    segment: int
    prompt_tokens: Sequence[int]
    response_tokens: Sequence[int]
    loss_mask: Sequence[int]
    """1 = trained; a token that no weights sampled is never trained."""
    logprobs: Sequence[float]
    token_versions: Sequence[int]
    """Places in the `weight_versions` of the stored segment; -1 where no weights sampled the token."""
    advantages: float | Sequence[float] | None = None
    """For the whole response or one item a token; None: the member's, from the rewards of the group."""
    reward: float | None = None
    """The rollout's, the same in all its rows; None: as it was stored."""

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> TrainingRow:
        """Return a stored segment (`GroupMember.segments`) as it would be trained without a hook."""
        return cls(
            member=row["member"],
            segment=row["segment"],
            prompt_tokens=row["prompt_tokens"],
            response_tokens=row["response_tokens"],
            loss_mask=row["loss_mask"],
            logprobs=row["logprobs"],
            token_versions=row["token_versions"],
        )


class GenerateHook(Protocol):
    """`rollout.generate`: one sample in; one segment, several that share a rollout (`session.segments`), or a `Rollout` out."""

    async def __call__(self, sample: Sample, engine: Engine) -> Segment | Sequence[Segment] | Rollout: ...


class Engines(Protocol):
    """The engine, as a hook that makes all rollouts of a claim sees it."""

    url: str
    """SGLang's address, for what is not offered here."""
    eos_id: int

    @property
    def served(self) -> Sequence[str]:
        """Ids of the weights that the engine served since the call began, in order."""
        ...

    def of(self, sample: Sample) -> Engine:
        """Return the engine that knows which member it is used for, with its session."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens added."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, without a closing end of sequence."""
        ...


class GenerateGroupsHook(Protocol):
    """`rollout.generate_groups`: the groups of one claim in, each a list of its members' samples; for each sample what a
    `GenerateHook` returns, nested alike, out. What it is given may be fewer members of a group (a second try, a group that was
    parked), and train and eval together."""

    async def __call__(
        self, groups: Sequence[Sequence[Sample]], engines: Engines
    ) -> Sequence[Sequence[Segment | Sequence[Segment] | Rollout]]: ...


class SampleFilter(Protocol):
    """`rollout.sample_filter`: called once for each finished rollout, before its reward; dropped, it is a failed member with
    the reason, which is not sampled again."""

    def __call__(self, sample: Sample, rollout: Rollout) -> Verdict: ...


class GroupFilter(Protocol):
    """`assemble.group_filter`: called for each closed group before it takes a place in a batch; dropped, it is owed a
    replacement. Called again for the same group after a restart of the assembler, so it should depend on the group alone."""

    def __call__(self, group: CompletedGroup) -> Verdict: ...


class PostProcess(Protocol):
    """`assemble.post_process`: called for each group of a batch when it is planned. Unlike `rollout.reward_post_process`, which makes
    the rewards that are stored, it may give the advantages, and what it makes is stored with the batch alone."""

    def __call__(self, group: CompletedGroup) -> PostProcessed: ...


class Convert(Protocol):
    """`assemble.convert`: turns a group into the rows that are trained, when its batch is planned and after `post_process`. It
    returns at most one row for each stored segment; one that it leaves out is recorded as filtered, with the reason
    `conversion`. A group without any row is dropped with it."""

    def __call__(self, group: CompletedGroup) -> Sequence[TrainingRow]: ...


class LogHook(Protocol):
    """`assemble.log`: called once a batch is planned, in the assembler. `rows` are the trajectories of its groups, by the columns
    of the schema, each with outcome, reason, advantage and staleness; `metrics` are numbers of the whole, and under `drops`
    how many groups were dropped for which reason since the batch before.

    A crash right after planning may leave a batch untold; none is told twice. What it raises is a warning in the worker's log.
    """

    def __call__(self, step: int, rows: Sequence[Mapping[str, Any]], metrics: Mapping[str, Any]) -> None: ...
