"""strawflow: the durable data plane and workflow engine of LLM reinforcement-learning post-training.

The package root exports only the version until the public producer and consumer calls have settled; the layers
below are imported by their own names (`strawflow.flow.claim`, `strawflow.packs.reader`, ...).
"""

from __future__ import annotations

__version__ = "0.1.0"

__all__ = ["__version__"]
