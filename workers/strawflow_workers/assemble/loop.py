"""The assembler: takes closed groups as they are offered and plans the next batch, one step at a time.

1. It is a leased singleton; without the role it waits.
2. Groups sampled from weights that are no longer on the branch's line wait for the replay to decide, then go on or go
   back pristine. What becomes of tokens staler than the limit is the policy assemble.stale, decided here once and stored.
3. The group filter judges a closed group once, before it takes a place in a batch; one that is dropped is owed a
   replacement, and its trajectories leave with retention like those of any that has its fate.
4. Too many groups dropped in a row means starvation: the run stops with the counts, it does not generate for ever.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from strawflow.errors import ConflictError, WorkerFailedError
from strawflow.flow import assemble, rescue
from strawflow.flow.assemble import UNIT_FAILED, Lineage
from strawflow.flow.session import WorkerSession
from strawflow.index.consumers import Assignment, Role
from strawflow.index.units import Unit
from strawflow_workers.assemble.groups import Group, is_usable, rows_of
from strawflow_workers.assemble.packing import FAILED_MEMBERS, STALE, build_batch
from strawflow_workers.drain import Drain
from strawflow_workers.rollout.hooks.converted import GroupShaper
from strawflow_workers.rollout.hooks.filtered import judge_group
from strawflow_workers.rollout.hooks.load import load_group_filter, load_log, load_shaper
from strawflow_workers.rollout.hooks.load_algorithm import load_algorithm_hooks
from strawflow_workers.rollout.hooks.logged import tell_batch

log = logging.getLogger(__name__)


class AssemblerLoop:
    """Plan batches until the last step is planned or the worker is told to drain."""

    def __init__(self, session: WorkerSession, drain: Drain) -> None:
        self._session, self._drain = session, drain
        self._config = session.run.config
        self._version_steps: dict[str, int] = {}
        self._dropped: Counter[str] = Counter()
        self._group_filter = load_group_filter(self._config)
        self._log_hook = load_log(self._config)
        self._shaper = load_shaper(self._config)
        self._algorithm_hooks = load_algorithm_hooks(self._config)
        self._passed: set[tuple[int, int]] = set()
        self._read: dict[tuple[int, int], Group] = {}

    def run(self) -> None:
        """Work until done.

        Raises:
            LeaseLostError: another session took over; start again.
            WorkerFailedError: the run is starved.
        """
        role = self._wait_for(lambda: assemble.take_role(self._session))
        while role is not None and not self._drain.requested:
            self._session.require_live()
            self._session.mark_progress()
            step = assemble.last_planned(self._session) + 1
            if step > self._config.total_steps:
                return
            if not self._plan(role, step):
                self._drain.wait(0.05)

    def _wait_for(self, attempt: Callable[[], Role | None]) -> Role | None:
        while not self._drain.requested:
            self._session.mark_progress()
            rescue.rescue_expired(self._session.run)  # the holder may be gone without anyone to say so
            if (found := attempt()) is not None:
                return found
            self._drain.wait(0.2)
        return None

    def _plan(self, role: Role, step: int) -> bool:
        """Plan `step` if enough groups are ready; True when something changed."""
        try:
            return self._plan_once(role, step)
        except ConflictError as error:
            # A resume killed weights, or another consumer took a group back, meanwhile: the groups are judged again.
            log.warning("step %d is built again: %s", step, error)
            return False

    def _plan_once(self, role: Role, step: int) -> bool:
        warm = self._config.warm_start
        is_warm_start = step <= warm.steps
        purpose = "demo" if is_warm_start else "train"
        wanted = warm.prompts_per_step if is_warm_start else self._config.rollout.prompts_per_step
        if num_failed := assemble.drop_failed(self._session, role, purpose=purpose):
            self._count_drops(UNIT_FAILED, num_failed, example="see unit list --state failed")
        # Some of the offered may be waiting for the replay: look a batch further.
        units = assemble.offered(self._session, purpose=purpose, limit=2 * wanted)
        if len(units) < wanted:
            return False
        groups = self._ready_groups(role, step, units)
        if not is_warm_start:
            groups = self._filtered(role, groups)
        if len(groups) < wanted:
            return False
        chosen = groups[:wanted]
        if not is_warm_start and self._shaper is not None:
            chosen = [self._shaped(self._shaper, group) for group in chosen]
        plan = build_batch(
            chosen,
            step=step,
            objective="sft" if is_warm_start else "grpo",
            version_steps=self._version_steps,
            config=self._config,
            hooks=self._algorithm_hooks,
        )
        batch = assemble.plan_batch(self._session, role, plan)
        if self._log_hook is not None:
            planned = [row for group in chosen for row in group.rows]
            tell_batch(self._log_hook, batch, plan, planned, self._dropped)
        self._dropped.clear()
        self._passed.clear()
        self._read.clear()
        log.info(
            "planned step %d: %d sequences, %d tokens, mean reward %s",
            step,
            batch.num_sequences,
            batch.num_tokens,
            batch.mean_reward,
        )
        return True

    def _ready_groups(self, role: Role, step: int, units: list[Unit]) -> list[Group]:
        groups = self._read_groups(units)
        lineage = assemble.lineage(self._session)
        stale: list[Unit] = []
        off_line: list[int] = []
        ready: list[Group] = []
        for group in groups:
            verdict = self._judge(group, step, lineage)
            if verdict == "ready":
                ready.append(group)
            elif verdict == "stale":
                stale.append(group.unit)
            elif verdict != "wait":
                off_line.append(group.unit.unit_id)
        if off_line:
            assemble.requeue(self._session, role, off_line, reason="off_lineage")
        self._give_up_stale(role, stale)
        return self._without_unusable(role, ready)

    def _give_up_stale(self, role: Role, stale: list[Unit]) -> None:
        """Have stale groups sampled afresh as often as the policy allows, and drop the others."""
        policy = self._config.assemble
        again = [u.unit_id for u in stale if policy.stale == "requeue" and u.requeues < policy.max_requeues]
        dropped = [Assignment(u.epoch, u.unit_id, "dropped", STALE) for u in stale if u.unit_id not in again]
        if again:
            assemble.requeue(self._session, role, again, reason=STALE)
        if dropped:
            assemble.drop(self._session, role, dropped)
            limit = self._config.rollout.max_staleness
            self._count_drops(STALE, len(dropped), example=f"sampled more than {limit} steps before")

    def _read_groups(self, units: list[Unit]) -> list[Group]:
        """Return the groups' rows; those read before (while they waited for others) are not read again."""
        new = [u for u in units if (u.unit_id, u.fence) not in self._read]
        for unit_id, rows in assemble.read_trajectories(self._session, new).items():
            unit = next(u for u in new if u.unit_id == unit_id)
            self._read[unit_id, unit.fence] = Group(unit, rows_of(rows))
        return [self._read[u.unit_id, u.fence] for u in units]

    def _judge(self, group: Group, step: int, lineage: Lineage) -> str:
        versions = {v for row in group.rows for v in row["weight_versions"]}
        dead_steps = [lineage.dead[v] for v in versions if v in lineage.dead]
        if dead_steps:
            # The replay has not come to that step yet: equal weights may still be published.
            return "wait" if max(dead_steps) > lineage.newest_step else "off_lineage"
        self._learn_steps(versions)
        if self._config.assemble.stale in ("mask", "train"):
            return "ready"
        oldest = min((self._version_steps[v] for v in versions), default=step - 1)
        return "stale" if step - 1 - oldest > self._config.rollout.max_staleness else "ready"

    def _learn_steps(self, versions: set[str]) -> None:
        unknown = sorted(versions - self._version_steps.keys())
        if unknown:
            self._version_steps.update(assemble.steps_of_versions(self._session, unknown))

    def _without_unusable(self, role: Role, groups: list[Group]) -> list[Group]:
        usable = [g for g in groups if is_usable(g, self._config)]
        unusable = [g for g in groups if not is_usable(g, self._config)]
        if unusable:
            dropped = [Assignment(g.unit.epoch, g.unit.unit_id, "dropped", FAILED_MEMBERS) for g in unusable]
            assemble.drop(self._session, role, dropped)
            example = next(row["failure"] for row in unusable[0].rows if row["failure"])
            log.warning("dropped %d groups with too many failed members, e.g. %s", len(dropped), example)
            self._count_drops(FAILED_MEMBERS, len(dropped), example=f"last failure: {example}")
        return usable

    def _filtered(self, role: Role, groups: list[Group]) -> list[Group]:
        """Return the groups that the filter keeps; one that waited for others since it passed is not asked of again."""
        if self._group_filter is None:
            return groups
        kept: list[Group] = []
        dropped: list[Assignment] = []
        for group in groups:
            unit = group.unit
            if (unit.unit_id, unit.fence) not in self._passed:
                verdict = judge_group(self._group_filter, unit.unit_id, group.members)
                if not verdict.keep:
                    dropped.append(Assignment(unit.epoch, unit.unit_id, "dropped", verdict.reason))
                    continue
                self._passed.add((unit.unit_id, unit.fence))
            kept.append(group)
        if dropped:
            assemble.drop(self._session, role, dropped)
            for reason, count in Counter(str(a.reason) for a in dropped).items():
                self._count_drops(reason, count, num_kept=len(kept))
        return kept

    @staticmethod
    def _shaped(shaper: GroupShaper, group: Group) -> Group:
        shaped = shaper.shape(group.unit.unit_id, group.rows)
        return Group(group.unit, shaped.rows, shaped=shaped)

    def _count_drops(self, reason: str, num_dropped: int, *, num_kept: int = 0, example: str = "") -> None:
        """Count groups dropped since the last batch; at the limit the run is starved.

        Raises:
            WorkerFailedError: so many were dropped that whatever drops them has to be mended first.
        """
        self._dropped[reason] += num_dropped
        total = self._dropped.total()
        if total < self._config.assemble.starved_after_batches * self._config.rollout.prompts_per_step:
            return
        rate = total / (total + num_kept)
        reasons = ", ".join(f"{count} {why}" for why, count in self._dropped.most_common())
        assemble.tell_starved(self._session, reasons=dict(self._dropped), drop_rate=rate)
        raise WorkerFailedError(
            f"starved: {total} groups ({rate:.0%}) were dropped since the last batch was planned: {reasons}; "
            "mend the reward, the filter or the engine, then resume" + (f" ({example})" if example else "")
        )
