"""Runs that earlier revisions of the index left behind, killed in the middle: they open, are sound, and go on to the end.

tests/compat/run_<revision>.tar.gz holds a run made by the program of that revision (SQLite, closed WAL): two steps
trained, two groups offered of which one was dropped by hand, two leased when everything was killed.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import pyarrow as pa
import pytest
import sqlalchemy as sa
from alembic import command
from alembic.script import ScriptDirectory

from strawflow.cli.main import main
from strawflow.errors import IncompatibleFormatError
from strawflow.flow import admit, compact, history, rescue
from strawflow.flow.check import check
from strawflow.flow.retry import retry_failed
from strawflow.flow.run import open_run
from strawflow.index import events, migrate, units
from strawflow.index.engine import Index
from strawflow.testing.invariants import batch_digests, check_exactly_once
from strawflow.testing.runs import SmallRun
from tests.contract.stored import end_sessions
from tests.readme import without_strawflow

COMPAT = Path(__file__).parents[1] / "compat"

DIGESTS = {
    "0001": {1: "b6b2ead93f87d0cfcdf4ab62f3b822ab", 2: "f2aaf45dbbee844de12b55317545105e"},
    "0002": {1: "b6b2ead93f87d0cfcdf4ab62f3b822ab", 2: "f2aaf45dbbee844de12b55317545105e"},
}


def unpack(folder: Path, revision: str) -> Path:
    with tarfile.open(COMPAT / f"run_{revision}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / f"run_{revision}"


def to_postgresql(root: Path, url: str, revision: str) -> None:
    """Move an old index to PostgreSQL as it would have been there: migrated to the old revision, same rows."""
    source, target = sa.create_engine(f"sqlite:///{root / 'index.sqlite'}"), Index(url)
    with target.begin() as connection:
        config = migrate.alembic_config()
        config.attributes["connection"] = connection
        command.upgrade(config, revision)
    tables = sa.MetaData()
    with source.connect() as old, target.begin() as new:
        tables.reflect(new)
        new.execute(sa.delete(tables.tables["meta"]))  # what a migration put there comes with the rows
        for table in tables.sorted_tables:
            rows = old.execute(sa.text(f'SELECT * FROM "{table.name}"')).mappings().all()
            if rows and table.name != "alembic_version":
                booleans = [c.name for c in table.columns if isinstance(c.type, sa.Boolean)]
                new.execute(
                    sa.insert(table),
                    [{**row, **{name: bool(row[name]) for name in booleans}} for row in rows],
                )
                for key in (c for c in table.primary_key if isinstance(c.type, sa.Integer)):
                    counted = {"table": table.name, "column": key.name}
                    new.execute(
                        sa.text(
                            f"SELECT setval(pg_get_serial_sequence(:table, :column), max({key.name})) FROM {table.name} "
                            "WHERE pg_get_serial_sequence(:table, :column) IS NOT NULL"
                        ),
                        counted,
                    )
    target.close()
    source.dispose()
    (root / "index.sqlite").unlink()
    text = (root / "config.json").read_text()
    (root / "config.json").write_text(text.replace('"index_url": ""', f'"index_url": "{url}"'))


@pytest.mark.parametrize("revision", sorted(DIGESTS))
def test_a_run_of_an_earlier_revision_opens_and_goes_on_to_the_end(
    tmp_path: Path,
    index_url: str,
    revision: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = unpack(tmp_path, revision)
    if index_url:
        to_postgresql(root, index_url, revision)
    with pytest.raises(IncompatibleFormatError, match="strawflow index upgrade"):
        open_run(root)
    with pytest.raises(SystemExit) as ended:
        main(["index", "upgrade", str(root)])
    assert ended.value.code == 0, capsys.readouterr()

    run = open_run(root)
    assert batch_digests(history.batches(run)) == DIGESTS[revision]
    assert [c.step for c in history.checkpoints(run)] == [1, 2]
    for session_id in _live(run.index):
        rescue.declare_lost(run, session_id, reason="killed long ago")
    assert [f for f in check(run).findings if "not recorded" not in f.message] == []
    with run.index.read() as connection:
        counts = units.count_by_state(connection, run.branch)
        newest = events.latest(connection, limit=1000)
    assert counts == {("train", "completed"): 14, ("train", "ready"): 2}
    assert all(event["at"].startswith("2026-") for event in newest)

    with SmallRun(run) as going_on:
        rescue.recover_packs(going_on.session("rescue"))
        going_on.trainer()
        admit.admit_due(going_on.session("rollout"))
        going_on.advance(2)
        assert batch_digests(history.batches(run)).items() >= DIGESTS[revision].items()
        fates = check_exactly_once(run, finished=False)
        assert sum(outcome == "trained" for outcome in fates.values()) == 16
        assert sum(outcome == "dropped" for outcome in fates.values()) == 1
        assert retry_failed(run) == []
        assert check(run).findings == []
        # Rows of the earlier schemas come to lie in packs of the present ones.
        end_sessions(going_on)
        monkeypatch.setattr(compact, "MERGED_FROM", 1)
        moved = compact.compact(going_on.session("storage")).items
        assert any(item.subject.startswith("packs/trajectory/") for item in moved)
        assert check(run).findings == []
        assert batch_digests(history.batches(run)).items() >= DIGESTS[revision].items()


def test_what_the_readme_opens_keeps_nulls_beside_packs_of_version_1(tmp_path: Path) -> None:
    root = unpack(tmp_path / "runs", "0001").rename(tmp_path / "runs/quickstart")
    folder = root / "packs/trajectory"
    (left_open,) = folder.iterdir()
    of_version_1 = pa.ipc.open_stream(left_open.read_bytes()[len(b"ARROW1\0\0") :]).read_all()
    index = Index(f"sqlite:///{root / 'index.sqlite'}")
    migrate.upgrade(index)
    index.close()
    run = open_run(root)
    for session_id in _live(run.index):
        rescue.declare_lost(run, session_id, reason="killed long ago")
    with SmallRun(run) as going_on:
        rescue.recover_packs(going_on.session("rescue"))
        assert going_on.sample() == 2
    (salvaged,) = folder.glob("rescue-*")
    with pa.ipc.new_file(salvaged, of_version_1.schema) as sealed:  # as its worker would have, had it ended
        sealed.write_table(of_version_1)
    with pa.ipc.open_file(min(folder.iterdir())) as first:
        assert not first.schema.field("loss_mask").nullable

    count = (
        "print(duckdb.sql('SELECT count(*), count(loss_mask), count(token_versions) FROM {}').fetchall()[0])"
    )
    told = without_strawflow(
        tmp_path,
        then="import pyarrow.parquet as pq; pq.write_table(trajectories.to_table(), 'all.parquet')\n"
        + "\n".join(count.format(name) for name in ("trajectories", '"all.parquet"')),
    )
    num_old, num_new = of_version_1.num_rows, 4
    assert told.splitlines()[-2:] == [str((num_old + num_new, num_old, num_old))] * 2


def test_every_revision_before_this_one_has_its_run_here() -> None:
    script = ScriptDirectory.from_config(migrate.alembic_config())
    earlier = {found.revision for found in script.walk_revisions()} - {migrate.REVISION}
    assert earlier == set(DIGESTS)
    assert {p.name for p in COMPAT.iterdir()} == {f"run_{revision}.tar.gz" for revision in earlier}


def _live(index: Index) -> list[str]:
    from strawflow.index import sessions

    with index.read() as connection:
        return [s.session_id for s in sessions.listed(connection, live_only=True)]
