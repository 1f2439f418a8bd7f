"""What consumers did, brought back from journal and checkpoints: batches, fates, positions, checkpoints, steps, weights.

1. A position is that of the newest checkpoint whose files are whole and that no later trainer contradicts; the batches up to
   it are those its digest stands for.
2. Batches after it are those that lead on from it, same step, same bytes, same digest.
3. A batch whose packed rows are nowhere any more was given up by retention if it is trained; otherwise it is quarantined.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strawflow import clock
from strawflow.config import RunConfig
from strawflow.errors import CorruptCheckpointError, IncompatibleFormatError
from strawflow.flow import inherit
from strawflow.flow import journal_choice as choice
from strawflow.flow.admit_evaluation import evaluation_of, segments_told
from strawflow.flow.assemble import NO_DIGEST
from strawflow.flow.checkpoint_folder import is_whole
from strawflow.flow.found_manifests import row_of_manifest
from strawflow.flow.found_packs import FoundPacks, Loss
from strawflow.flow.journal import EntryKind, ExtentRef, StoredEntry
from strawflow.flow.journal_choice import Line, Manifest, PlanChain
from strawflow.index import batches, carry, consumers, reconstruction, retired_again, units
from strawflow.index.consumers import Assignment, Consumer
from strawflow.index.engine import Connection
from strawflow.index.reconstruction import FoundBatch
from strawflow.states import BatchState, WeightState
from strawflow.weights.verify import MANIFEST, verify_checkpoint, verify_weights


@dataclass
class Lines:
    """Brings lines back, one branch after another, parents first."""

    connection: Connection
    config: RunConfig
    packs: FoundPacks
    entries: Sequence[StoredEntry]
    manifests: Sequence[Manifest]
    on_hole: Callable[[str], None]
    is_met: Callable[[int, int], bool]
    """Whether anything tells of a unit among (first id, count)."""
    num_batches: int = 0
    num_checkpoints: int = 0
    num_weights: int = 0
    num_drops: int = 0
    positions: dict[Line, tuple[int, int]] = field(default_factory=dict)
    """(position, planned)."""
    _fences: dict[Line, dict[int, int]] = field(default_factory=dict)
    """Fence of each batch that was brought back, by step."""

    def of_branch(self, branch_id: str) -> list[StoredEntry]:
        return [e for e in self.entries if e.branch_id == branch_id]

    def bring_back(self, branch_id: str) -> None:
        """Bring a branch's consumers, weights, batches, positions and checkpoints back; its units are there."""
        self._consumers(branch_id)
        self._weights(branch_id)
        for consumer in consumers.listed(self.connection, branch_id):
            self._line(consumer)

    def _consumers(self, branch_id: str) -> None:
        known = {c.consumer for c in consumers.listed(self.connection, branch_id)}
        for entry in choice.consumers_in_order(self.of_branch(branch_id), known=known, is_met=self.is_met):
            head = entry.head
            if "first_unit_id" in head:
                self._take_up(branch_id, entry)
            consumers.ensure(self.connection, branch_id, head["consumer"], purposes=head["purposes"])

    def _take_up(self, branch_id: str, entry: StoredEntry) -> None:
        """Take up again what a consumer was given of the line before its branch."""
        body = entry.body
        parents = reconstruction.carried_units(self.connection, body["carried"])
        if missing := set(body["carried"]) - parents.keys():
            self.on_hole(
                f"consumer {body['consumer']!r} was given unit {min(missing)} on branch {branch_id!r}, which nothing admitted"
            )
        carried = inherit.with_results(body, parents, self.packs.find_anyway)
        # Of two entries that give the same the one that nobody built on was not committed.
        taken = carry.places_taken(self.connection, branch_id)
        inherit.take_up(
            self.connection,
            branch_id,
            {unit_id: c for unit_id, c in carried.items() if carry.place_of(c.unit) not in taken},
            body["readers"],
        )

    # ---- weights

    def _weights(self, branch_id: str) -> None:
        mine = [e for e in self.of_branch(branch_id) if e.kind is EntryKind.WEIGHTS]
        for entry in mine:
            head = entry.head
            values = {name: head[name] for name in ("version_id", "step", "fence", "path", "digest")}
            consumers.note_publisher(self.connection, branch_id, head["consumer"])
            self.num_weights += reconstruction.add_weights(
                self.connection,
                {
                    **values,
                    "branch_id": branch_id,
                    "state": WeightState.PUBLISHED,
                    "files_removed": not _has_weights(self.packs.root / head["path"], head["digest"]),
                    "created_at": clock.shown(entry.at_ms),
                },
            )
        self._judge_weights(branch_id, mine)
        self._evaluations(branch_id, mine)

    def _judge_weights(self, branch_id: str, mine: Sequence[StoredEntry]) -> None:
        """Tell which versions a later trainer did not go on from, and which of those it arrived at again."""
        consumer_of = {e.head["version_id"]: e.head["consumer"] for e in mine}
        resumed = {
            name: choice.resumed_at(self.entries, (branch_id, name)) for name in set(consumer_of.values())
        }
        stored = reconstruction.weights_of(self.connection, branch_id)
        for version_id, step, fence, digest, state in stored:
            if state is WeightState.SUPERSEDED or version_id not in consumer_of:
                continue
            is_dead = state is WeightState.DEAD or choice.is_contradicted(
                step, fence, resumed[consumer_of[version_id]]
            )
            if not is_dead:
                continue
            again = [v for v, s, f, d, _ in stored if (s, d) == (step, digest) and f > fence]
            reconstruction.set_weights_state(
                self.connection,
                version_id,
                WeightState.SUPERSEDED if again else WeightState.DEAD,
                superseded_by=again[0] if again else None,
            )

    def _evaluations(self, branch_id: str, mine: Sequence[StoredEntry]) -> None:
        by_step: dict[int, list[StoredEntry]] = {}
        for entry in mine:
            if entry.head["evaluation"]["count"]:
                by_step.setdefault(int(entry.head["step"]), []).append(entry)
        for step, found in sorted(by_step.items()):
            if units.has_epoch(self.connection, branch_id, purpose="eval", epoch=step):
                continue
            # Only the first to be published admitted it: of two that planned to, the earlier was not committed.
            entry = max(found, key=lambda e: (int(e.head["fence"]), e.place))
            evaluation = entry.head["evaluation"]
            segments = segments_told(self.connection, evaluation)
            new = evaluation_of(self.config, segments, version_id=entry.head["version_id"], step=step)
            if len(new) != evaluation["count"]:
                self.on_hole(
                    f"there should be {evaluation['count']} units for the evaluation of step {step}, its "
                    f"datasets and config.json give {len(new)}"
                )
                continue
            first_id = evaluation["first_unit_id"]
            units.admit(self.connection, branch_id, new, ids=range(first_id, first_id + len(new)))

    # ---- batches and positions

    def _line(self, consumer: Consumer) -> None:
        line = consumer.branch_id, consumer.consumer
        step, digest = self._base(consumer)
        chain = PlanChain(self.entries, line, step=step, digest=digest)
        resumed = choice.resumed_at(self.entries, line)
        newest, leading = self._newest_checkpoint(consumer, chain, resumed, base_step=step)
        advanced = choice.advanced_to(self.entries, line, resumed)
        position = max(consumer.position, 0 if newest is None else newest.step, advanced)
        for entry in leading:
            self._add_batch(consumer, entry, position, missing=self._missing_units(consumer, entry))
            step, digest = int(entry.head["step"]), str(entry.head["digest"])
        for entry in chain.beyond(step, digest, fits=lambda e: self._fits(consumer, e)):
            self._add_batch(consumer, entry, position)
            step = int(entry.head["step"])
        position = min(position, step)
        batches.mark_trained(self.connection, *line, up_to_step=position)
        reconstruction.set_consumer(self.connection, *line, position=position, planned=step)
        self.positions[line] = position, step
        self._checkpoints(consumer, newest, resumed, position)
        for entry in self.entries:
            if entry.kind is EntryKind.STEP and (entry.branch_id, entry.head["consumer"]) == line:
                self._add_step(entry)

    def _base(self, consumer: Consumer) -> tuple[int, str]:
        """Return the last batch the line has: its own, or the one it started behind."""
        own = reconstruction.last_step_of(self.connection, consumer.branch_id, consumer.consumer)
        if own is not None:
            return own
        inherited = batches.find(self.connection, consumer.branch_id, consumer.consumer, consumer.planned)
        return consumer.planned, NO_DIGEST if inherited is None else inherited.digest

    def _newest_checkpoint(
        self, consumer: Consumer, chain: PlanChain, resumed: dict[int, int], *, base_step: int
    ) -> tuple[Manifest | None, list[StoredEntry]]:
        """Return the newest checkpoint that is whole and later than the position, and the batches that lead to it."""
        line = consumer.branch_id, consumer.consumer
        for manifest in choice.manifests_by_preference(self.manifests, line, resumed):
            if manifest.step <= consumer.position:
                return None, []
            leading: list[StoredEntry] | None = None
            if manifest.step <= base_step:
                stored = batches.find(self.connection, *line, manifest.step)
                if stored is not None and stored.digest == manifest.batch_digest:
                    leading = []
            else:
                leading = chain.up_to(manifest.step, manifest.batch_digest)
            if leading is None:
                self.on_hole(
                    f"{manifest.path} stands for a batch of step {manifest.step} to which no batches lead"
                )
                continue
            try:
                verify_checkpoint(self.packs.root / manifest.path)
            except (CorruptCheckpointError, IncompatibleFormatError) as error:
                self.packs.losses.append(Loss("checkpoint", manifest.path, error.message))
                continue
            return manifest, leading
        return None, []

    def _fits(self, consumer: Consumer, entry: StoredEntry) -> bool:
        wanted = choice.units_of_plan(entry)
        if reconstruction.missing_among(self.connection, wanted):
            self.packs.losses.append(
                Loss(
                    "batch",
                    f"step {entry.head['step']}",
                    "names units that nothing admitted; it is planned again",
                )
            )
            return False
        return not reconstruction.assigned_among(
            self.connection, consumer.branch_id, consumer.consumer, wanted
        )

    def _missing_units(self, consumer: Consumer, entry: StoredEntry) -> set[int]:
        missing = reconstruction.missing_among(self.connection, choice.units_of_plan(entry))
        if missing:
            self.on_hole(
                f"the batch of step {entry.head['step']} of consumer {consumer.consumer!r} on branch "
                f"{consumer.branch_id!r} trained {len(missing)} units that nothing admitted, the first is {min(missing)}; "
                "their prompts may be admitted and trained again"
            )
        return missing

    def _add_batch(
        self, consumer: Consumer, entry: StoredEntry, position: int, *, missing: Collection[int] = ()
    ) -> None:
        """Bring a batch back; of units that are `missing` it keeps no fate."""
        body = entry.body
        is_trained = int(body["step"]) <= position
        planned, _ = self.packs.find_or_quarantine(ExtentRef.of("plan", body["plan"]))
        places = self._places(body["rows"], is_trained=is_trained)
        state = BatchState.TRAINED if is_trained else BatchState.PLANNED
        fates = [
            (epoch, outcome, reason, [unit_id for unit_id in ids if unit_id not in missing])
            for epoch, outcome, reason, ids in body["fates"]
        ]
        batch_id = reconstruction.add_batch(
            self.connection,
            FoundBatch(
                branch_id=consumer.branch_id,
                consumer=consumer.consumer,
                step=int(body["step"]),
                values={
                    **{
                        name: body[name]
                        for name in (
                            "objective",
                            "num_sequences",
                            "num_tokens",
                            "mean_reward",
                            "max_staleness",
                            "digest",
                            "fence",
                        )
                    },
                    "state": state,
                    "num_units": sum(len(ids) for *_, ids in fates),
                    "denominators": json.dumps(body["denominators"]),
                    "plan_extent_id": planned.extent_id,
                    "planned_at": clock.shown(entry.at_ms),
                },
                places=places or (),
                fates=fates,
            ),
        )
        if places is None:
            retired_again.retire_batch(self.connection, batch_id)
        self._fences.setdefault((consumer.branch_id, consumer.consumer), {})[int(body["step"])] = body[
            "fence"
        ]
        self.num_batches += 1

    def _places(
        self, rows: Sequence[Sequence[Any]], *, is_trained: bool
    ) -> list[tuple[int, int, int, int]] | None:
        """Return where packed rows lie; None when a trained batch's are gone with their files."""
        places = []
        for mini_batch, at_slice, micro_batch, raw in rows:
            ref = ExtentRef.of("batch", raw)
            found = self.packs.find(ref)
            if found is None and is_trained and not self.packs.is_in_file(ref):
                return None
            extent = found or self.packs.find_or_quarantine(ref)[0]
            places.append((mini_batch, at_slice, micro_batch, extent.extent_id))
        return places

    # ---- checkpoints, steps, drops

    def _checkpoints(
        self, consumer: Consumer, newest: Manifest | None, resumed: dict[int, int], position: int
    ) -> None:
        line = consumer.branch_id, consumer.consumer
        by_step: dict[int, tuple[int, dict[str, Any]]] = {}
        for entry in self.entries:
            if entry.kind is not EntryKind.CHECKPOINT or (entry.branch_id, entry.head["consumer"]) != line:
                continue
            values = {name: value for name, value in entry.body.items() if name in _CHECKPOINT}
            step, fence = int(values["step"]), int(values["fence"])
            if choice.is_contradicted(step, fence, resumed) or fence < by_step.get(step, (0, {}))[0]:
                continue
            by_step[step] = fence, values
        if newest is not None:
            fence, told = by_step.get(newest.step, (0, {}))
            is_same = (fence, told.get("state_digest")) == (newest.fence, newest.state_digest)
            if is_same or told.get("path") == newest.path:
                told["path"] = newest.path  # its folder may be a copy put in the place of a lost one
            else:
                by_step[newest.step] = newest.fence, row_of_manifest(newest)
        self._from_files(by_step, line, resumed, position)
        for step, (_, values) in sorted(by_step.items()):
            stored = batches.find(self.connection, *line, step)
            if step > position or stored is None or stored.digest != values["batch_digest"]:
                continue
            values["files_removed"] = not (self.packs.root / values["path"] / MANIFEST).is_file()
            self.num_checkpoints += reconstruction.add_checkpoint(self.connection, values)

    def _from_files(
        self,
        by_step: dict[int, tuple[int, dict[str, Any]]],
        line: Line,
        resumed: dict[int, int],
        position: int,
    ) -> None:
        """Add the checkpoints whose entries are lost and whose own files say what they stand for."""
        for manifest in choice.manifests_by_preference(self.manifests, line, resumed):
            if manifest.step in by_step or manifest.step > position:
                continue
            if not is_whole(self.packs.root / manifest.path):
                continue  # its folder is kept all the same, and the sweep says so
            by_step[manifest.step] = manifest.fence, row_of_manifest(manifest)

    def _add_step(self, entry: StoredEntry) -> None:
        body = entry.body
        reconstruction.add_step(
            self.connection,
            {
                "branch_id": entry.branch_id,
                "consumer": body["consumer"],
                "step": body["step"],
                "fence": body["fence"],
                "metrics": json.dumps(body["metrics"], sort_keys=True),
                "recorded_at": clock.shown(entry.at_ms),
            },
        )

    def drop_again(self, branch_id: str) -> None:
        """Record the drops outside any batch again, of units that got no other fate and no later result.

        One made while a step was planned that a later assembler planned its predecessor of was never committed.
        """
        for entry in self.of_branch(branch_id):
            if entry.kind is not EntryKind.DROP:
                continue
            body = entry.body
            planned = self._fences.get((branch_id, body["consumer"]), {})
            if any(step < body["at_step"] and fence > body["fence"] for step, fence in planned.items()):
                continue
            wanted = [unit_id for _, unit_id, _, _ in body["units"]]
            standing = reconstruction.standing_of(self.connection, wanted)
            assigned = reconstruction.assigned_among(self.connection, branch_id, body["consumer"], wanted)
            dropped = [
                Assignment(epoch, unit_id, "dropped", reason)
                for epoch, unit_id, fence, reason in body["units"]
                if unit_id in standing and unit_id not in assigned and standing[unit_id].fence <= fence
            ]
            consumers.assign(
                self.connection,
                branch_id,
                body["consumer"],
                dropped,
                batch_id=None,
                at_step=body["at_step"],
            )
            self.num_drops += len(dropped)


_CHECKPOINT = frozenset(
    {
        "checkpoint_id",
        "branch_id",
        "consumer",
        "step",
        "fence",
        "path",
        "state_digest",
        "batch_digest",
        "created_at",
        "cursors",
        "last_unit_id",
        "files_removed",
    }
)


def _has_weights(folder: Path, digest: str) -> bool:
    try:
        verify_weights(folder, digest)
    except CorruptCheckpointError:
        return False
    return True
