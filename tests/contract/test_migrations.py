"""The migrations build exactly the tables the code uses, on both databases, and an index of another revision is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from strawflow.errors import CommitUnknownError, IncompatibleFormatError, NotFoundError, StorageError
from strawflow.index import migrate
from strawflow.index.engine import REVISION, Index
from strawflow.index.tables import metadata


@pytest.fixture
def index(tmp_path: Path, index_url: str) -> Index:
    return Index(index_url or f"sqlite:///{tmp_path / 'index.sqlite'}")


def test_the_migrations_build_the_tables_of_the_code(index: Index) -> None:
    assert migrate.upgrade(index) == (None, REVISION)
    with index.read() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []


def test_upgrading_twice_changes_nothing(index: Index) -> None:
    migrate.upgrade(index)
    assert migrate.upgrade(index) == (REVISION, REVISION)
    index.check_revision()


def test_an_upgrade_that_breaks_off_leaves_no_half_built_index(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = migrate.command.upgrade

    def broken(*arguments: object) -> None:
        real(*arguments)
        raise RuntimeError("cable pulled")

    monkeypatch.setattr(migrate.command, "upgrade", broken)
    with pytest.raises(RuntimeError, match="cable pulled"):
        migrate.upgrade(index)
    assert migrate.current(index) is None


def test_a_missing_and_a_foreign_index_are_refused_with_what_to_do(index: Index) -> None:
    with pytest.raises(NotFoundError, match="no strawflow index here"):
        index.check_revision()
    migrate.upgrade(index)
    with index.begin() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '0000'"))
    with pytest.raises(IncompatibleFormatError, match="strawflow index upgrade"):
        index.check_revision()


def test_the_program_works_with_the_newest_revision() -> None:
    assert ScriptDirectory.from_config(migrate.alembic_config()).get_current_head() == REVISION


def test_a_commit_without_an_answer_is_told_from_a_statement_that_failed(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    migrate.upgrade(index)
    lost = sa.exc.OperationalError("COMMIT", {}, Exception("connection lost"))

    def commit_and_lose_the_reply(connection: sa.Connection) -> None:
        raise lost

    def failing() -> None:
        with index.begin():
            raise lost

    with pytest.raises(StorageError, match="connection lost"):
        failing()
    monkeypatch.setattr(index._engine.dialect, "do_commit", commit_and_lose_the_reply)
    with pytest.raises(CommitUnknownError, match="connection lost"), index.begin() as connection:
        connection.execute(sa.text("SELECT 1"))
