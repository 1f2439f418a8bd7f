"""Alembic's entry: runs the revisions on the connection or address that strawflow.index.migrate hands over."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import context

from strawflow.index.tables import metadata

connection = context.config.attributes.get("connection")
if connection is None:
    engine = sa.create_engine(context.config.get_main_option("sqlalchemy.url"))
    with engine.connect() as own:
        context.configure(connection=own, target_metadata=metadata, render_as_batch=True)
        with context.begin_transaction():
            context.run_migrations()
else:
    context.configure(connection=connection, target_metadata=metadata, render_as_batch=True)
    context.run_migrations()
