"""The tables as SQL text, for schemas/ and whoever reviews them; running systems are built by migrations/ alone."""

from __future__ import annotations

from typing import Literal

from sqlalchemy.engine import make_url
from sqlalchemy.schema import CreateIndex, CreateTable

from strawflow.index.tables import metadata


def as_sql(dialect: Literal["sqlite", "postgresql"]) -> str:
    """Return CREATE statements of every table and index, parents first."""
    spoken = make_url(f"{dialect}://").get_dialect()()
    statements = []
    for table in metadata.sorted_tables:
        statements.append(str(CreateTable(table).compile(dialect=spoken)).strip())
        statements += [
            str(CreateIndex(index).compile(dialect=spoken)).strip()
            for index in sorted(table.indexes, key=lambda index: str(index.name))
        ]
    # SQLAlchemy leaves blanks and tabs at line ends and starts that reviews would trip over.
    lines = (line.rstrip().replace("\t", "    ") for line in ";\n\n".join(statements).splitlines())
    return "\n".join(lines) + ";\n"
