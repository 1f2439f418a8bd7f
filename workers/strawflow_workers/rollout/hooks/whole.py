"""Calling the hook that makes all rollouts of one claim, `rollout.generate_groups`.

    generate(group) ─┐
    generate(group) ─┼─ gathered until every group of the claim is there ▸ one call ▸ each takes its members
    generate(group) ─┘

1. What comes back is checked group by group and member by member, as for `rollout.generate`; what is wrong with one fails that one.
   A call that raised, or whose answer has another nesting than it was asked for, fails every member of the claim.
2. A second try of failed members, and members of a group that was parked, come in a call of their own group alone.
3. Broken off, every member comes back as its session saved it last; without one it starts again from its prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from strawflow.flow.trajectory import Member
from strawflow_workers.rollout.engine import ServedEngine
from strawflow_workers.rollout.hooks.generated import CalledHook, MemberEngine
from strawflow_workers.rollout.hooks.interfaces import Interrupted, Sample
from strawflow_workers.rollout.tokens import PromptTokenizer


@dataclass(frozen=True)
class Asked:
    """One member to be made: what the hook is told, the name of its requests, and what was saved of it."""

    sample: Sample
    rid: str
    saved: Member | None = None


class GroupEngines:
    """The engine as a hook of whole claims sees it (`interfaces.Engines`)."""

    def __init__(
        self, engine: ServedEngine, tokenizer: PromptTokenizer, handles: Sequence[MemberEngine]
    ) -> None:
        self._engine, self._tokenizer = engine, tokenizer
        self._handles = {handle.key: handle for handle in handles}
        self._served_from = max(0, len(engine.served) - 1)
        self.url = engine.client.url
        self.eos_id = tokenizer.eos_id

    @property
    def served(self) -> Sequence[str]:
        """See `interfaces.Engines`."""
        return self._engine.served[self._served_from :]

    def of(self, sample: Sample) -> MemberEngine:
        """See `interfaces.Engines`."""
        return self._handles[sample.unit_id, sample.member]

    def encode(self, text: str) -> list[int]:
        """See `interfaces.Engines`."""
        return self._tokenizer.encode_text(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """See `interfaces.Engines`."""
        return self._tokenizer.decode(tokens)


class GatheredClaim:
    """The groups of one claim on their way into one call; each is handed in, or withdrawn, once."""

    def __init__(self, rollouts: WholeRollouts, num_groups: int) -> None:
        self._rollouts, self._left = rollouts, num_groups
        self._groups: list[Sequence[Asked]] = []
        self._call: asyncio.Task[list[list[Member]]] | None = None
        self._is_complete = asyncio.Event()

    def withdraw(self) -> None:
        """Do not wait for one of the groups: it failed before it was handed in."""
        self._left -= 1
        if self._left == 0:
            if self._groups:
                self._call = asyncio.create_task(self._rollouts.call(self._groups))
            self._is_complete.set()

    async def members(self, asked: Sequence[Asked]) -> list[Member]:
        """Hand a group in and return its members once the call of all is done; raises as `WholeRollouts.call`."""
        place = len(self._groups)
        self._groups.append(asked)
        self.withdraw()
        await self._is_complete.wait()
        assert self._call is not None
        try:
            return (await asyncio.shield(self._call))[place]
        except asyncio.CancelledError:
            self._call.cancel()
            raise


class WholeRollouts(CalledHook):
    """Samples members by a hook of whole claims; safe for many claims at a time on one event loop."""

    setting = "generate_groups"

    def gathered(self, num_groups: int) -> GatheredClaim:
        """Return what gathers the groups of one claim."""
        return GatheredClaim(self, num_groups)

    async def call(self, groups: Sequence[Sequence[Asked]]) -> list[list[Member]]:
        """Return the members of groups, as the hook made them in one call; rewards are None, unless it gave them.

        Raises:
            EngineUnavailableError: the engine does not answer.
        """
        handles = [[self._handle(a.sample, a.rid, a.saved) for a in group] for group in groups]
        if self._engine.is_interrupted:
            return [[handle.saved for handle in group] for group in handles]
        flat = [handle for group in handles for handle in group]
        engines = GroupEngines(self._engine, self._tokenizer, flat)
        samples = [[asked.sample for asked in group] for group in groups]
        asked_of = [group for group in samples if group]  # of one that was parked nothing may be left to make
        try:
            with self._in_flight.during(flat):
                found = await self._call(asked_of, engines)
            made = iter(checked_nesting(found, asked_of))
            rollouts = [next(made) if group else [] for group in samples]
        except Interrupted:
            return [[handle.saved for handle in group] for group in handles]
        except Exception as error:  # whatever user code raises is the outcome of these members
            return [[self._ended(handle, error) for handle in group] for group in handles]
        return [
            [self._member(handle, one) for handle, one in zip(of_group, own, strict=True)]
            for of_group, own in zip(handles, rollouts, strict=True)
        ]

    def _member(self, handle: MemberEngine, found: object) -> Member:
        return handle.saved if isinstance(found, Interrupted) else super()._member(handle, found)


def checked_nesting(found: object, samples: Sequence[Sequence[Sample]]) -> list[list[object]]:
    """Return what a hook of whole claims returned, as one list for each group with one item for each member.

    Raises:
        TypeError: it is nested otherwise.
    """
    wanted = [len(group) for group in samples]
    if isinstance(found, list | tuple) and all(isinstance(group, list | tuple) for group in found):
        if (told := [len(group) for group in found]) == wanted:
            return [list(group) for group in found]
        raise TypeError(f"groups of {told} members came back for groups of {wanted}")
    raise TypeError(f"a list with a list for each group must come back, got {found!r:.200}")
