"""strawflow: the durable data plane and workflow engine of LLM reinforcement-learning post-training.

What a producer or consumer of your own needs is here; `create` or `open` a store and go on from there. Names are loaded
when first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strawflow.consumer import Batch, Consumer
    from strawflow.errors import (
        CommitUnknownError,
        ConflictError,
        LeaseLostError,
        StorageError,
        StrawflowError,
    )
    from strawflow.flow.claim import Grant
    from strawflow.flow.trajectory import Member
    from strawflow.store import Store, create, open
    from strawflow.worker import Worker

__version__ = "0.1.0"

_HOMES = {
    "create": "strawflow.store",
    "open": "strawflow.store",
    "Store": "strawflow.store",
    "Worker": "strawflow.worker",
    "Grant": "strawflow.flow.claim",
    "Member": "strawflow.flow.trajectory",
    "Consumer": "strawflow.consumer",
    "Batch": "strawflow.consumer",
    "StrawflowError": "strawflow.errors",
    "LeaseLostError": "strawflow.errors",
    "ConflictError": "strawflow.errors",
    "CommitUnknownError": "strawflow.errors",
    "StorageError": "strawflow.errors",
}

__all__ = [
    "Batch",
    "CommitUnknownError",
    "ConflictError",
    "Consumer",
    "Grant",
    "LeaseLostError",
    "Member",
    "StorageError",
    "Store",
    "StrawflowError",
    "Worker",
    "__version__",
    "create",
    "open",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'strawflow' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
