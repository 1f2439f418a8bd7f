"""Weight versions and the engines that serve them.

1. A row is published only after its files are durable.
2. A resume kills every version its checkpoint does not cover; a replay that arrives at equal weights supersedes the
   dead version, so that what was sampled from it stays on the branch's line.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from strawflow import clock
from strawflow.index import branches, events, slots
from strawflow.index import tables as t
from strawflow.index.engine import lock_rows, share_rows
from strawflow.index.pins import PinKind, is_pinned
from strawflow.states import WeightState


@dataclass(frozen=True)
class WeightVersion:
    version_id: str
    branch_id: str
    step: int
    fence: int
    path: str
    digest: str
    state: WeightState
    superseded_by: str | None
    created_at: str


def _version(row: sa.Row[tuple[object, ...]]) -> WeightVersion:
    values = dict(row._mapping)  # the public row mapping of SQLAlchemy
    values.pop("files_removed")
    values["state"] = WeightState(str(values["state"]))
    return WeightVersion(**values)  # type: ignore[arg-type]


def publish(
    connection: Connection, *, version_id: str, branch_id: str, step: int, fence: int, path: str, digest: str
) -> None:
    """Insert a published version and supersede dead ones of equal step and digest."""
    connection.execute(
        sa.insert(t.weight_versions).values(
            version_id=version_id,
            branch_id=branch_id,
            step=step,
            fence=fence,
            path=path,
            digest=digest,
            state=WeightState.PUBLISHED,
            files_removed=False,
            created_at=clock.wall_time(),
        )
    )
    connection.execute(
        sa.update(t.weight_versions)
        .where(
            t.weight_versions.c.branch_id == branch_id,
            t.weight_versions.c.step == step,
            t.weight_versions.c.digest == digest,
            t.weight_versions.c.state == WeightState.DEAD,
        )
        .values(state=WeightState.SUPERSEDED, superseded_by=version_id)
    )
    events.record(connection, "weights.published", version_id=version_id, step=step)


def kill_after(connection: Connection, branch_id: str, *, step: int) -> list[str]:
    """Declare versions later than `step` dead; returns their ids."""
    rows = connection.execute(
        sa.update(t.weight_versions)
        .where(
            t.weight_versions.c.branch_id == branch_id,
            t.weight_versions.c.step > step,
            t.weight_versions.c.state == WeightState.PUBLISHED,
        )
        .values(state=WeightState.DEAD)
        .returning(t.weight_versions.c.version_id)
    )
    dead = [row.version_id for row in rows]
    if dead:
        events.record(connection, "weights.died", step=step, versions=dead)
    return dead


def newest(connection: Connection, branch_id: str) -> WeightVersion | None:
    """Return the published version of the highest step on the branch's line whose files are kept."""
    w = t.weight_versions
    row = connection.execute(
        sa.select(w)
        .where(
            branches.seen(connection, w, branch_id),
            w.c.state == WeightState.PUBLISHED,
            w.c.files_removed.is_(False),
        )
        .order_by(w.c.step.desc(), w.c.fence.desc())
        .limit(1)
    ).first()
    return None if row is None else _version(row)


def find(connection: Connection, version_id: str) -> WeightVersion | None:
    row = connection.execute(
        sa.select(t.weight_versions).where(t.weight_versions.c.version_id == version_id)
    ).first()
    return None if row is None else _version(row)


def of_step(connection: Connection, branch_id: str, step: int) -> WeightVersion | None:
    """Return the published version of a step whose files are kept, if there is one."""
    w = t.weight_versions
    row = connection.execute(
        sa.select(w)
        .where(
            branches.seen(connection, w, branch_id),
            w.c.step == step,
            w.c.state == WeightState.PUBLISHED,
            w.c.files_removed.is_(False),
        )
        .order_by(w.c.fence.desc())
        .limit(1)
    ).first()
    return None if row is None else _version(row)


def dead_ids(connection: Connection, branch_id: str) -> dict[str, int]:
    """Return {version id: step} of the dead versions."""
    w = t.weight_versions.c
    rows = connection.execute(
        sa.select(w.version_id, w.step).where(
            branches.seen(connection, t.weight_versions, branch_id), w.state == WeightState.DEAD
        )
    )
    return {row.version_id: row.step for row in rows}


def has_files(connection: Connection, version_id: str) -> bool:
    """Tell whether the files of a version are kept and it may be served."""
    w = t.weight_versions.c
    row = connection.execute(
        sa.select(w.version_id).where(
            w.version_id == version_id, w.files_removed.is_(False), w.state != WeightState.DEAD
        )
    ).first()
    return row is not None


def dead_among(connection: Connection, version_ids: Collection[str]) -> list[str]:
    """Return which of these versions are dead; the others cannot die before this transaction ends."""
    w = t.weight_versions.c
    statement = sa.select(w.version_id, w.state).where(w.version_id.in_(sorted(version_ids)))
    return [
        row.version_id
        for row in connection.execute(share_rows(statement, connection))
        if row.state == WeightState.DEAD
    ]


def _is_in_use() -> sa.ColumnElement[bool]:
    """Return the condition that an engine serves a version, an unfinished unit waits for it, or it is pinned."""
    w = t.weight_versions.c
    served = sa.exists().where(t.engines.c.version_id == w.version_id)
    required = sa.exists().where(
        t.units.c.required_version_id == w.version_id,
        sa.text(
            "units.required_version_id IS NOT NULL AND units.state IN ('ready', 'leased')"
        ),  # the index's words
    )
    return sa.or_(served, required, is_pinned(PinKind.WEIGHTS))


def removable(
    connection: Connection, branch_id: str, *, keep_last: int, keep_every: int = 0
) -> list[WeightVersion]:
    """Return versions that are not in use, and neither among the newest `keep_last` nor of an interval of steps."""
    w = t.weight_versions
    kept = (
        sa.select(w.c.version_id)
        .where(w.c.branch_id == branch_id, w.c.state == WeightState.PUBLISHED)
        .order_by(w.c.step.desc())
        .limit(keep_last)
        .subquery()
    )
    is_of_interval = (
        sa.and_(w.c.state == WeightState.PUBLISHED, w.c.step % keep_every == 0) if keep_every else sa.false()
    )
    rows = connection.execute(
        sa.select(w)
        .where(
            w.c.branch_id == branch_id,
            w.c.files_removed.is_(False),
            w.c.version_id.not_in(sa.select(kept.c.version_id)),
            ~is_of_interval,
            ~_is_in_use(),
        )
        .order_by(w.c.step)
    )
    return [_version(row) for row in rows]


def mark_files_removed(connection: Connection, version_id: str) -> bool:
    """Say that a version's files are removed; False if it is in use after all, or they were removed before."""
    w = t.weight_versions
    connection.execute(lock_rows(sa.select(w.c.step).where(w.c.version_id == version_id), connection)).all()
    done = connection.execute(
        sa.update(w)
        .where(w.c.version_id == version_id, w.c.files_removed.is_(False), ~_is_in_use())
        .values(files_removed=True)
    )
    return bool(done.rowcount)


def report_engine(
    connection: Connection, engine_id: str, *, session_id: str, url: str, build: str, version_id: str | None
) -> None:
    """Store what an engine itself reported to serve."""
    values = {"url": url, "build": build, "version_id": version_id, "updated_at": clock.wall_time()}
    done = connection.execute(
        sa.update(t.engines)
        .where(t.engines.c.engine_id == engine_id, t.engines.c.session_id == session_id)
        .values(**values)
    )
    if done.rowcount == 0:
        connection.execute(sa.insert(t.engines).values(engine_id=engine_id, session_id=session_id, **values))
    events.record(
        connection, "engine.reported", session_id=session_id, engine_id=engine_id, version_id=version_id
    )


def forget_engines(connection: Connection, session_id: str) -> None:
    """Remove the engines of a session that is gone; the slots it had are free again."""
    connection.execute(sa.delete(t.engines).where(t.engines.c.session_id == session_id))
    slots.vacate(connection, session_id)


@dataclass(frozen=True)
class Engine:
    engine_id: str
    session_id: str
    url: str
    build: str
    version_id: str | None
    updated_at: str


def engines_listed(connection: Connection) -> list[Engine]:
    """Return the engines of live workers and what each reported to serve."""
    rows = connection.execute(sa.select(t.engines).order_by(t.engines.c.engine_id))
    return [Engine(**row._mapping) for row in rows]
