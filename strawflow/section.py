"""What every section of a run's configuration is: frozen, and without room for names it does not know."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One section of the configuration tree; each field has its own docstring."""

    model_config = ConfigDict(extra="forbid", frozen=True)
