"""The rollout worker: admits what is due, leases units, generates and scores them, completes them.

1. Demonstrations need no engine and are answered while it starts.
2. Units are claimed only while the engine serves weights fresh enough for the next batch to be planned. What happens to
   units in flight when there are newer weights is the policy rollout.on_new_weights; evaluation is bound to its weights and
   always finished first.
3. Finished units of one moment are completed together, those broken off are parked together: one append, one sync, one
   transaction each.
4. How far units in flight have come is saved every rollout.save_every_s seconds or save_every_tokens tokens: a worker that is
   killed loses no more than that.
5. While there are groups enough for every worker, as many again are leased ahead: one begins the moment another has its
   responses, before its rewards and the store. They are given back before other weights are loaded, when groups get scarce,
   and when nothing is to begin for a while.
6. An engine that died or goes on refusing ends the worker; what it held is rescued with its attempts refunded. A unit
   that fails while the engine lives has used an attempt.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from strawflow.errors import CommitUnknownError, ConfigError, EngineError, WorkerFailedError
from strawflow.flow import (
    admit,
    claim,
    complete,
    continuation,
    eval_consumer,
    progress,
    publish_weights,
    rescue,
)
from strawflow.flow.claim import Grant, PromptShelf
from strawflow.flow.progress import Standing
from strawflow.flow.run import identity_of
from strawflow.flow.session import WorkerSession
from strawflow.flow.trajectory import PARTIAL, UnitResult
from strawflow.ids import new_id
from strawflow.index.leases import Wanted
from strawflow.index.weights import WeightVersion
from strawflow.states import EngineState
from strawflow_workers.drain import Drain
from strawflow_workers.rollout.demonstrations import demonstration
from strawflow_workers.rollout.engine import ServedEngine
from strawflow_workers.rollout.generate import RolloutHooks, UnitGenerator
from strawflow_workers.rollout.hooks.mixed import mixing_hooks
from strawflow_workers.rollout.hooks.whole import GatheredClaim
from strawflow_workers.rollout.profile_rewards import ProfileRewards
from strawflow_workers.rollout.reserve import Reserve
from strawflow_workers.rollout.sglang_client import EngineUnavailableError
from strawflow_workers.rollout.tokens import PromptTokenizer

log = logging.getLogger(__name__)

IDLE_S = 0.03
"""Pause of the main loop when nothing is to do."""
LOOK_S = 0.05
"""How often, while there is work, weights and progress are looked at: each look is some reads in the way of responses."""
UPKEEP_S = 1.0
"""How often expired sessions are looked for."""
EVAL_UNITS_FACTOR = 8
"""Evaluation groups are small: this many times the usual number may be in flight."""
DEMONSTRATIONS_AT_ONCE = 256
BREAK_OFF_S = 15.0
"""How long a drain waits for requests to end, of the 30 s until a worker that was told to drain is killed."""
MAX_ENGINE_FAILURES = 8
"""Refused requests in a row after which an engine that fails its health check is ended."""

T = TypeVar("T")


@dataclass(frozen=True)
class _Seen:
    """The last look at the index."""

    at: float
    target: WeightVersion | None
    standing: Standing
    is_scarce: bool
    """Groups wait in reserve here, and none is left for others."""


class RolloutLoop:
    """Work until everything is planned and evaluated, or the worker is told to drain."""

    def __init__(
        self,
        session: WorkerSession,
        drain: Drain,
        *,
        engine_url: str | None = None,
        slot_id: int | None = None,
    ) -> None:
        """`slot_id` is the number of an engine that the run wants. `engine_url` names one that runs already; without both the
        worker starts one of its own."""
        self._session, self._drain = session, drain
        self._run = session.run
        self._config = session.run.config
        self._shelf = PromptShelf(session)
        self._engine = ServedEngine(session, num_connections=1024, url=engine_url, slot_id=slot_id)
        self._in_flight: dict[asyncio.Task[UnitResult], Grant] = {}
        self._being_scored: set[int] = set()
        """Units in flight that ask nothing of the engine any more."""
        self._reserve = Reserve(self._config.rollout.units_in_flight)
        self._finished: list[UnitResult] = []
        self._broken_off: list[UnitResult] = []
        self._upkeep_at = 0.0
        self._demonstrations_left = self._config.warm_start.steps > 0
        self._failures_in_a_row = 0
        self._claims_from = 0.0
        self._seen: _Seen | None = None
        self._saved_at = time.monotonic()

    async def run(self) -> None:
        """Work until done.

        Raises:
            LeaseLostError: this session was declared lost; start again.
            EngineError: the engine died or serves wrong weights; start again.
            ConfigError: a reward or hook cannot be used.
        """
        hooks = RolloutHooks.of(
            self._config, model_path=str(self._run.model_path), run_id=identity_of(self._run.root)
        )
        self._mixing = mixing_hooks(self._config, model_path=str(self._run.model_path))
        version = await self._first_version()
        if version is None:
            return
        self._tokenizer = PromptTokenizer(self._run.model_path)
        starting = asyncio.create_task(self._engine.start(version))
        try:
            async with ProfileRewards(self._config) as rewards:
                self._generator = UnitGenerator(
                    self._engine, rewards, self._tokenizer, hooks, on_sampled=self._go_on
                )
                await self._work(starting)
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            for task in self._in_flight:
                task.cancel()
            await asyncio.gather(*self._in_flight, return_exceptions=True)
            await self._engine.stop()

    async def _work(self, starting: asyncio.Task[None]) -> None:
        while not self._drain.requested:
            self._session.require_live()
            self._session.mark_progress()
            await self._upkeep()
            busy = await self._answer_demonstrations()
            if starting.done():
                starting.result()
                busy |= await self._serve()
            if not busy:
                if not self._in_flight and await self._blocking(lambda: progress.rollout_is_done(self._run)):
                    await self._blocking(lambda: eval_consumer.collect(self._run))
                    return
                await asyncio.sleep(IDLE_S)
        await self._give_back()

    async def _serve(self) -> bool:
        """One round with a ready engine; True when something moved."""
        self._engine.require_trusted()
        if not self._engine.alive():
            raise EngineError("the engine's process ended; this worker starts again with a new one")
        await self._gather_done()
        await self._save_if_due()
        if self._seen is None or time.monotonic() - self._seen.at >= LOOK_S:
            self._seen = await self._blocking(self._look)
        seen = self._seen
        is_current = seen.target is None or seen.target.version_id == self._engine.serving
        may_begin = is_current and self._is_fresh(seen.standing) and not self._is_backing_off
        if seen.is_scarce or not may_begin:
            await self._release(self._reserve.give_up())
        if seen.target is None or is_current:
            return await self._store_and_fill(seen.standing)
        moved = await self._store()
        if await self._make_way():
            await (self._engine.reload_inside if self._in_flight else self._engine.reload)(seen.target)
            # A load may take minutes: what may be begun now depends on how far the run is by now.
            self._seen = None
            return True
        return moved

    def _look(self) -> _Seen:
        """Admit what is due and see which weights to serve and how far the run is; index work, in a thread.

        Admission comes before the look at the weights: what newer weights allow is never claimed for older ones.
        """
        admit.admit_due(self._session, self._mixing)
        target = publish_weights.version_to_serve(self._run)
        standing = progress.standing(self._run)
        is_scarce = len(self._reserve) > 0 and not claim.any_left(self._run)
        return _Seen(time.monotonic(), target, standing, is_scarce)

    async def _make_way(self) -> bool:
        """Bring what is in flight to where other weights may be loaded; False while it is waited for."""
        policy = self._config.rollout.on_new_weights
        if not self._in_flight and not self._finished:
            return True
        if policy == "finish" or any(g.profile.purpose == "eval" for g in self._in_flight.values()):
            return False
        if policy == "continue" and self._engine.can_continue:
            return not self._finished
        await self._break_off()
        return True

    async def _break_off(self) -> None:
        """End every request and store what came of it: whole groups are completed, others parked or given back."""
        self._engine.is_interrupted = True
        try:
            while self._in_flight:
                # Again and again: a request may still have been on its way when the others were ended.
                self._engine.require_healthy()
                await self._engine.client.abort()
                await self._gather_done()
                await self._store()
                self._session.mark_progress()
        finally:
            self._engine.is_interrupted = False

    async def _gather_done(self) -> None:
        """Wait a moment for responses; units whose generation failed end their attempt with the error."""
        if self._in_flight:
            done, _ = await asyncio.wait(self._in_flight, timeout=IDLE_S, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                grant = self._in_flight.pop(task)
                self._being_scored.discard(grant.unit_id)
                await self._settle(task, grant)
                self._generator.forget(grant)

    async def _save_if_due(self) -> None:
        config = self._config.rollout
        if not config.saves_progress:
            return
        most = self._generator.most_unsaved
        is_due = 0 < config.save_every_s <= time.monotonic() - self._saved_at
        if is_due or 0 < config.save_every_tokens <= most:
            self._saved_at = time.monotonic()
            if most or self._generator.has_turns:
                await self._save(list(self._in_flight.values()))

    async def _save(self, grants: Sequence[Grant]) -> None:
        """Save how far units have come; those that others hold by now are ended."""
        so_far = self._generator.progress(grants)
        if not so_far:
            return
        receipt, _ = await self._hand_in(
            "save", lambda i: complete.save(self._session, so_far, submission_id=i)
        )
        for task, grant in self._in_flight.items():
            if grant.unit_id in receipt.lost:
                task.cancel()

    async def _store(self, wanted: Wanted | None = None) -> bool:
        """Complete what is finished and park what was broken off; completing leases what is `wanted` next, too."""
        moved = bool(self._finished or self._broken_off)
        if self._broken_off:
            progress, self._broken_off = self._broken_off, []
            await self._hand_in("park", lambda i: complete.park(self._session, progress, submission_id=i))
        if self._finished:
            results, self._finished = self._finished, []
            _, grants = await self._hand_in(
                "complete",
                lambda i: complete.complete(self._session, results, submission_id=i, wanted=wanted),
            )
            if wanted is not None:
                await self._take_in(grants, wanted)
        return moved

    async def _settle(self, task: asyncio.Task[UnitResult], grant: Grant) -> None:
        if task.cancelled():  # others hold the unit
            return
        error = task.exception()
        self._engine.require_trusted()  # what it said last is not believed either
        if error is None:
            self._failures_in_a_row = 0
            await self._sort(task.result(), grant)
            return
        beyond_this_unit = not isinstance(error, Exception) or isinstance(
            error, ConfigError | WorkerFailedError
        )
        if beyond_this_unit or not self._engine.alive():
            raise error
        assert isinstance(error, Exception)
        if isinstance(error, EngineUnavailableError):
            if self._config.rollout.saves_progress:
                await self._save([grant])
            await self._back_off(error)
        # Whatever else went wrong is this unit's own (a prompt the template refuses, say): its attempt failed.
        log.warning("unit %d: %s: %s", grant.unit_id, type(error).__name__, error)
        await self._fail(grant, error)

    async def _sort(self, result: UnitResult, grant: Grant) -> None:
        """Put a result to those that are whole or broken off; give its group back when there is nothing to keep."""
        result = replace(result, seq=grant.chain.next_seq)  # it may have been saved since it was made
        if all(m.status != PARTIAL for m in result.members):
            self._finished.append(result)
        elif self._config.rollout.partial_rollout and any(m.is_worth_keeping for m in result.members):
            self._broken_off.append(result)
        else:
            await self._release([grant])

    async def _release(self, grants: Sequence[Grant]) -> int:
        """Give leases back unworked; returns how many were still held."""
        return await self._blocking(lambda: claim.release(self._session, grants)) if grants else 0

    async def _fail(self, grant: Grant, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        await self._blocking(
            lambda: complete.fail(self._session, grant.unit_id, fence=grant.fence, error=text)
        )

    async def _back_off(self, error: EngineUnavailableError) -> None:
        """Claim nothing for a while; an engine that goes on refusing is ended, which refunds what it holds."""
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= MAX_ENGINE_FAILURES and not await self._engine.client.health():
            raise EngineError(f"the engine refused {self._failures_in_a_row} requests in a row: {error}")
        self._claims_from = time.monotonic() + min(0.1 * 2**self._failures_in_a_row, 5.0)

    @property
    def _is_backing_off(self) -> bool:
        return time.monotonic() < self._claims_from

    async def _hand_in(
        self, what: str, hand_in: Callable[[str], complete.Receipt]
    ) -> tuple[complete.Receipt, list[Grant]]:
        """Hand in under a submission id, once more under the same when the answer is lost; returns what was leased, too."""
        submission_id = new_id(what)

        def submit() -> tuple[complete.Receipt, list[Grant]]:
            receipt = hand_in(submission_id)
            return receipt, claim.grants_of(self._session, self._shelf, receipt.granted)

        try:
            receipt, grants = await self._blocking(submit)
        except CommitUnknownError as error:  # the same id gets the same receipt, committed before or not
            log.warning("what was sampled is handed in again: %s", error)
            receipt, grants = await self._blocking(submit)
        if receipt.lost:
            log.warning("leases of units %s had been taken over; their results are not taken", receipt.lost)
        return receipt, grants

    async def _store_and_fill(self, standing: Standing) -> bool:
        """Store what there is, lease up to the room left, and begin."""
        wanted = self._wanted(standing)
        if self._finished or wanted is None:
            return await self._store(wanted)
        moved = await self._store()
        grants = await self._claim(wanted.limit, wanted.purposes or ())
        await self._take_in(grants, wanted)
        return bool(grants) or moved

    def _wanted(self, standing: Standing) -> Wanted | None:
        is_fresh = self._is_fresh(standing)
        limit = self._room(standing)
        if self._finished and is_fresh and not self._generator.gathers_claims:
            limit += self._reserve.room
        if limit <= 0 or self._engine.serving is None or self._is_backing_off:
            return None
        return Wanted(limit, self._engine.serving, ("eval", "train") if is_fresh else ("eval",))

    def _is_fresh(self, standing: Standing) -> bool:
        """Whether what the engine serves may sample the next batch to be planned."""
        return self._engine.serving_step >= standing.planned - self._config.rollout.max_staleness

    def _room(self, standing: Standing) -> int:
        """How many more groups may be begun: those that wait for their rewards leave theirs to others, up to as many again."""
        most = self._config.rollout.units_in_flight * (EVAL_UNITS_FACTOR if standing.evaluating else 1)
        return max(0, most - len(self._in_flight) + min(most, len(self._being_scored)))

    async def _take_in(self, grants: list[Grant], wanted: Wanted) -> None:
        """Start generating for what was leased, as far as there is room; the rest waits in reserve."""
        assert self._seen is not None
        room = self._room(self._seen.standing)
        begin, scarce = self._reserve.sort(grants, asked=wanted.limit, room=room)
        await self._release(scarce)
        if any(grant.continuation is not None for grant in begin):
            begin = await self._blocking(lambda: continuation.without_outdated(self._session, begin))
        together = self._generator.gathered(len(begin))
        for grant in begin:
            self._begin(grant, together)

    def _begin(self, grant: Grant, together: GatheredClaim | None = None) -> None:
        task = asyncio.create_task(self._generator.generate(grant, together))
        self._in_flight[task] = grant

    def _go_on(self, sampled: Grant) -> None:
        """Begin a group of the reserve in the place of one that has its responses."""
        self._being_scored.add(sampled.unit_id)
        if self._engine.is_interrupted or self._drain.requested or self._is_backing_off:
            return
        if self._seen is not None and self._room(self._seen.standing):
            grant = self._reserve.take()
            if grant is not None:
                self._begin(grant)

    async def _claim(self, limit: int, purposes: Sequence[str]) -> list[Grant]:
        serving = self._engine.serving
        return await self._blocking(
            lambda: claim.claim(
                self._session, self._shelf, limit=limit, serving_version_id=serving, purposes=purposes
            )
        )

    async def _answer_demonstrations(self) -> bool:
        if not self._demonstrations_left:
            return False
        grants = await self._claim(DEMONSTRATIONS_AT_ONCE, ["demo"])
        results = []
        for grant in grants:
            try:
                results.append(demonstration(grant, self._tokenizer))
            except Exception as error:  # the row's own fault: its attempt failed, the others go on
                await self._fail(grant, error)
        if results:
            await self._hand_in(
                "complete", lambda i: complete.complete(self._session, results, submission_id=i)
            )
        return bool(grants)

    async def _upkeep(self) -> None:
        if time.monotonic() - self._upkeep_at >= UPKEEP_S:
            self._upkeep_at = time.monotonic()
            if await self._engine.look_after() in (EngineState.DRAINING, EngineState.GONE):
                self._drain.request()
            await self._blocking(lambda: rescue.rescue_expired(self._run))
            await self._blocking(lambda: eval_consumer.collect(self._run))
            if self._demonstrations_left:
                await self._blocking(lambda: admit.admit_due(self._session, self._mixing))
                self._seen = None  # what was admitted may be for newer weights
                planned = (await self._blocking(lambda: progress.standing(self._run))).planned
                self._demonstrations_left = planned < self._config.warm_start.steps

    async def _give_back(self) -> None:
        """Drain: store what is finished and what was generated of the rest; what nothing came of is given back."""
        released = await self._release(self._reserve.give_up())
        await self._gather_done()
        await self._store()
        if self._in_flight and self._engine.alive():
            try:
                await asyncio.wait_for(self._break_off(), BREAK_OFF_S)
            except (EngineError, TimeoutError) as error:
                log.warning("the engine did not end its requests: %s", error)
        released += await self._release(list(self._in_flight.values()))
        log.info("drained: %d units released", released)

    async def _first_version(self) -> WeightVersion | None:
        while not self._drain.requested:
            self._session.mark_progress()
            await self._blocking(lambda: rescue.rescue_expired(self._run))
            version = await self._blocking(lambda: publish_weights.version_to_serve(self._run))
            if version is not None:
                return version
            await asyncio.sleep(0.1)
        return None

    async def _blocking(self, call: Callable[[], T]) -> T:
        """Run index and disk work in a thread, so that responses keep flowing."""
        return await asyncio.to_thread(call)
