"""Bringing an index to this program's revision with alembic; the only place that runs migrations.

The revisions lie in migrations/ of a checkout and in strawflow/_migrations of a wheel.
"""

from __future__ import annotations

import threading
from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext

import strawflow
from strawflow.errors import ConfigError
from strawflow.index.engine import REVISION, Index

# alembic keeps the migration at work in module globals: two threads would share them.
_ONE_AT_A_TIME = threading.Lock()


def migrations_folder() -> Path:
    """Return the folder of the revisions: inside the wheel, else beside the package in a checkout.

    Raises:
        ConfigError: neither exists; the installation is broken.
    """
    package = Path(strawflow.__file__).parent
    for folder in (package / "_migrations", package.parent / "migrations"):
        if (folder / "env.py").exists():
            return folder
    raise ConfigError(f"no migrations beside {package}; install strawflow again")


def alembic_config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(migrations_folder()))
    return config


def upgrade(index: Index) -> tuple[str | None, str]:
    """Bring the index to this program's revision in one transaction; returns (revision before, revision after)."""
    config = alembic_config()
    with _ONE_AT_A_TIME, index.begin() as connection:
        before = MigrationContext.configure(connection).get_current_revision()
        config.attributes["connection"] = connection
        command.upgrade(config, REVISION)
    return before, REVISION


def current(index: Index) -> str | None:
    """Return the index's revision; None when it holds no strawflow index."""
    with index.read() as connection:
        if not sa.inspect(connection).has_table("alembic_version"):
            return None
        return MigrationContext.configure(connection).get_current_revision()
