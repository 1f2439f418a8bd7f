"""What the tests of rebuilds share: workers that die, indexes that vanish, and what of an index must come back."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from strawflow.flow.run import INDEX_FILE, Run
from strawflow.index.engine import Index
from strawflow.testing.runs import SmallRun
from tests.contract.backed_up import Rows, rows_in

on_sqlite = pytest.mark.parametrize("index_url", ["sqlite"], indirect=True)
"""For tests of what is believed and done, which is the same on both databases; what they store is tested on both."""


def die(small: SmallRun) -> None:
    """End every session as a kill would: nothing is said, packs stay without a footer."""
    for session in small.sessions.values():
        session.__exit__(RuntimeError, RuntimeError("killed by the test"), None)
    small.sessions.clear()
    small.roles.clear()


def lose_index(run: Run) -> Path:
    """Make the index vanish; returns the run's folder."""
    run.close()
    if run.index.dialect == "sqlite":
        for part in ("", "-wal", "-shm"):
            (run.root / f"{INDEX_FILE}{part}").unlink(missing_ok=True)
    else:
        engine = sa.create_engine(run.index.url)
        with engine.begin() as connection:
            connection.exec_driver_sql("DROP SCHEMA public CASCADE")
            connection.exec_driver_sql("CREATE SCHEMA public")
        engine.dispose()
    return run.root


def essence_of(index: Index) -> dict[str, Any]:
    """Return what of an index must come back from the run's folder, told without the ids that may differ."""
    return essence(rows_in(index))


def essence(rows: Rows) -> dict[str, Any]:
    batch_of = {b["batch_id"]: (b["branch_id"], b["consumer"], b["step"]) for b in rows["batches"]}
    segment_of = {s["segment_id"]: (s["dataset_id"], s["segment_seq"]) for s in rows["segments"]}
    digests = {e["extent_id"]: e["digests"] for e in rows["extents"]}
    return {
        "units": [_unit(u, segment_of, digests) for u in rows["units"]],
        "fates": sorted(
            (
                a["branch_id"],
                a["consumer"],
                a["unit_id"],
                a["epoch"],
                a["outcome"],
                a["reason"] or "",
                a["at_step"],
                batch_of.get(a["batch_id"], ()),
            )
            for a in rows["assignments"]
        ),
        "batches": sorted(
            (
                *batch_of[b["batch_id"]],
                b["digest"],
                b["state"],
                b["num_units"],
                b["num_tokens"],
                b["fence"],
                b["denominators"],
                b["mean_reward"] or 0.0,
                digests[b["plan_extent_id"]],
            )
            for b in rows["batches"]
        ),
        "packed": sorted(
            (*batch_of[p["batch_id"]], p["mini_batch"], p["slice"], p["micro_batch"], digests[p["extent_id"]])
            for p in rows["batch_extents"]
        ),
        "offers": _picked(rows, "offers", "branch_id", "consumer", "purpose", "version_step", "unit_id"),
        "cursors": rows["cursors"],
        "consumers": rows["consumers"],
        "tallies": [t for t in rows["tallies"] if t["value"]],
        "checkpoints": _picked(
            rows,
            "checkpoints",
            "checkpoint_id",
            "step",
            "fence",
            "path",
            "state_digest",
            "batch_digest",
            "cursors",
        ),
        "weights": _picked(rows, "weight_versions", "version_id", "step", "digest", "state", "files_removed"),
        "steps": _picked(rows, "steps", "branch_id", "consumer", "step", "fence", "metrics"),
        "segments": sorted(segment_of.values()),
        "prompts": rows["prompt_rows"],
        "branches": _picked(rows, "branches", "branch_id", "parent_id", "from_checkpoint_id", "from_step"),
    }


def _picked(rows: Rows, table: str, *names: str) -> list[tuple[Any, ...]]:
    return sorted((tuple(row[name] for name in names) for row in rows[table]), key=repr)


def _unit(u: dict[str, Any], segment_of: dict[int, Any], digests: dict[int, bytes]) -> tuple[Any, ...]:
    result: tuple[Any, ...] = ()
    if u["extent_id"] is not None:
        names = ("fence", "seq", "row_start", "row_count", "version_step", "mean_reward", "num_tokens")
        result = (digests[u["extent_id"]], *(u[name] for name in names))
    who = (
        "unit_id",
        "branch_id",
        "purpose",
        "profile",
        "epoch",
        "position",
        "required_version_id",
        "precedence",
    )
    return (*(u[name] for name in who), segment_of[u["segment_id"]], u["state"], result)


def all_ready_again(expected: dict[str, Any]) -> dict[str, Any]:
    """Return an essence in which whatever was leased or set aside without a fate is ready, as after a rebuild."""
    fated = {unit_id for _, _, unit_id, *_ in expected["fates"]}
    units = [
        (*u[:-2], "ready" if u[-2] == "leased" or (u[-2] == "failed" and u[0] not in fated) else u[-2], u[-1])
        for u in expected["units"]
    ]
    return {**expected, "units": units}


def copied(root: Path, to: Path) -> Path:
    """Copy a run's folder; its index must be SQLite or gone."""
    shutil.copytree(root, to)
    return to
