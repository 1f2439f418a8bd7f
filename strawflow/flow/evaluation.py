"""Evaluation results: what held-out prompts scored under one weight version, read from the stored trajectories."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from strawflow.flow.placed import read_extents
from strawflow.flow.run import Run
from strawflow.index import units
from strawflow.packs.reader import PackReader
from strawflow.records import TRAJECTORY
from strawflow.states import UnitState


@dataclass(frozen=True)
class Accuracy:
    """Share of answers that the verifier scored exactly 1.0; failed members and units count as wrong and are told."""

    profile: str
    step: int
    num_prompts: int
    num_answers: int
    num_right: int
    num_failed: int
    num_tokens: int

    @property
    def value(self) -> float:
        return self.num_right / self.num_answers if self.num_answers else float("nan")


def accuracy(run: Run, *, step: int, profile: str) -> Accuracy | None:
    """Return a profile's accuracy under the weights of a step; None until every prompt is answered or given up."""
    with run.index.read() as connection:
        found = units.of_profile(connection, run.branch, profile=profile, epoch=step)
        if not found or any(u.state in (UnitState.READY, UnitState.LEASED) for u in found):
            return None
        answered = [u for u in found if u.state is UnitState.COMPLETED]
    reader = PackReader(run.root)
    whole = dict(read_extents(run, reader, [u.extent_id for u in answered if u.extent_id is not None]))
    rows = pa.Table.from_batches(
        [
            whole[u.extent_id].slice(u.row_start, u.row_count)
            for u in answered
            if u.extent_id is not None  # completed, so it has one
        ],
        schema=TRAJECTORY,
    )
    reader.close()
    num_given_up = (len(found) - len(answered)) * run.config.profiles()[profile].num_samples
    return Accuracy(
        profile=profile,
        step=step,
        num_prompts=len(found),
        num_answers=rows.num_rows + num_given_up,
        num_right=int(pc.sum(pc.equal(rows["score"], 1.0)).as_py() or 0),
        num_failed=int(pc.sum(pc.equal(rows["status"], "failed")).as_py() or 0) + num_given_up,
        num_tokens=sum(u.num_tokens or 0 for u in answered),
    )
