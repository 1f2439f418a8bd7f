"""A data source class written for slime, as a data source of ours: a class of `args` with get_samples, save and load.

1. What its `save` writes beneath `args.save` is its state: the files are kept as text in the index, with the work that came of
   its prompts, and laid beneath `args.load` for `load` wherever it goes on.
2. One instance serves as long as it is asked from the state it was left in; from any other a new one is made and loaded.
3. A group of samples is one prompt, sampled as the run's settings say; `add_samples` is never called: what was broken off goes
   on as a continuation.
"""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from strawflow.errors import ConfigError
from strawflow_workers.rollout.hooks import slime
from strawflow_workers.rollout.hooks.interfaces import PromptRequest, Prompts

_METHODS = ("get_samples", "save", "load")
_ROLLOUT_ID = 0
"""Always the same, so that a class that names its file after it keeps one."""


def data_source(make: Callable[..., Any], args: slime.Arguments) -> Callable[[PromptRequest, Any], Prompts]:
    """Return slime's data source class as a data source.

    Raises:
        ConfigError: what is there is no class with these methods.
    """
    if missing := [name for name in _METHODS if not callable(getattr(make, name, None))]:
        raise ConfigError(
            f"data source {make!r} of slime's has no {', '.join(missing)}: it is to have {', '.join(_METHODS)}"
        )
    return _SlimeSource(make, args)


class _SlimeSource:
    def __init__(self, make: Callable[..., Any], args: slime.Arguments) -> None:
        self._make, self._args = make, args
        self._instance: Any = None
        self._left_in: Any = None
        self._folder = tempfile.TemporaryDirectory(prefix="strawflow-source-")

    def __call__(self, request: PromptRequest, state: Any) -> Prompts:
        if self._instance is None or state != self._left_in:
            self._begin(state)
        instance, self._instance = self._instance, None  # begun anew, should it raise
        rows = [_row(group) for group in instance.get_samples(request.count)]
        instance.save(_ROLLOUT_ID)
        self._instance, self._left_in = instance, self._files()
        return Prompts(rows=rows, state=self._left_in)

    def _begin(self, state: Any) -> None:
        self._folder.cleanup()
        self._folder = tempfile.TemporaryDirectory(prefix="strawflow-source-")
        root = Path(self._folder.name)
        for name, text in (state or {}).items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(base64.b64decode(text))
        args = slime.Arguments(**{**vars(self._args), "save": str(root), "load": str(root)})
        self._instance = self._make(args)
        if state is not None:
            self._instance.load(_ROLLOUT_ID)

    def _files(self) -> dict[str, str]:
        root = Path(self._folder.name)
        return {
            str(path.relative_to(root)): base64.b64encode(path.read_bytes()).decode()
            for path in sorted(root.rglob("*"))
            if path.is_file()
        }


def _row(group: Any) -> Mapping[str, Any]:
    samples = group if isinstance(group, list) else [group]
    first = samples[0]
    if any((s.prompt, s.label) != (first.prompt, first.label) for s in samples):
        raise ValueError("the samples of one group have different prompts or labels: a group is one prompt")
    metadata = getattr(first, "metadata", None)
    return {"prompt": first.prompt, "label": first.label, "metadata": metadata or None}
