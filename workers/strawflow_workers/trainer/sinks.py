"""Where the metrics of a step go beside the index: TensorBoard event files, Weights & Biases offline.

1. The index is the truth: a sink is caught up from it at each start, and written after it. No step is written twice, also when a
   restart trains it again: it comes to the same.
2. A sink that is asked for and cannot start ends the worker; one that fails later is given up with a warning, and training goes on.
3. A record holds a whole step, so that a kill leaves all of it or nothing.
"""

from __future__ import annotations

import logging
import os
import struct
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from strawflow.errors import ConfigError
from strawflow.flow.run import Run

log = logging.getLogger(__name__)

_FIRST_LINE = "brain.Event:2"
_NOT_PLOTTED = ("step", "fence")


class Sink(Protocol):
    """Somewhere that metrics go."""

    name: str

    def last_step(self) -> int:
        """Return the newest step that it holds; 0: none."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Take the numbers of a step, all or none."""

    def close(self) -> None:
        """Let everything be read by others."""


class Sinks(AbstractContextManager["Sinks"]):
    """All sinks of a run."""

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self._sinks = {sink.name: (sink, sink.last_step()) for sink in sinks}

    def __exit__(self, *_raised: object) -> None:
        for name, (sink, _) in list(self._sinks.items()):
            try:
                sink.close()
            except Exception:  # a sink never stops a run
                log.warning("%s could not be closed", name, exc_info=True)

    def catch_up(self, steps: Iterable[Mapping[str, Any]], *, up_to: int) -> None:
        """Write what a sink lacks of recorded steps, up to the one that training goes on after."""
        for record in steps:
            if record["step"] <= up_to:
                self.write(int(record["step"]), record)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the metrics of a step to every sink that does not hold it yet; one that fails is given up."""
        for name, (sink, last) in list(self._sinks.items()):
            if step <= last:
                continue
            try:
                sink.write(step, numbers(metrics))
                self._sinks[name] = (sink, step)
            except Exception:  # a sink never stops a run
                log.warning("%s failed at step %d and is given up", name, step, exc_info=True)
                del self._sinks[name]


def numbers(metrics: Mapping[str, Any], *, prefix: str = "") -> dict[str, float]:
    """Return the numbers among metrics by name; those of a table as table/name."""
    found: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            found |= numbers(value, prefix=f"{prefix}{name}/")
        elif isinstance(value, bool | int | float) and name not in _NOT_PLOTTED:
            found[prefix + name] = float(value)
    return found


def open_sinks(run: Run) -> Sinks:
    """Open the sinks that a run asks for.

    Raises:
        ConfigError: one cannot start; names the setting.
    """
    trainer = run.config.trainer
    wanted: list[Sink] = []
    if trainer.tensorboard:
        wanted.append(TensorBoardSink(run.root / trainer.tensorboard / run.branch))
    if trainer.wandb:
        wanted.append(WandbSink(run, trainer.wandb))
    return Sinks(wanted)


class TensorBoardSink:
    """Event files in a folder: one for each start, one record for each step."""

    name = "trainer.tensorboard"

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboardX.proto import event_pb2, summary_pb2
            from tensorboardX.record_writer import RecordWriter
        except ImportError:
            raise ConfigError(
                "trainer.tensorboard needs tensorboardX, which is not installed; install it with pip install "
                "'strawflow[trainer]'"
            ) from None
        self._events, self._summaries = event_pb2, summary_pb2
        self._last = max(steps_in(folder), default=0)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # TensorBoard reads the files of a folder in the order of their names.
            path = folder / f"events.out.tfevents.{time.time_ns() // 1_000_000:015d}.{os.getpid()}"
            self._writer = RecordWriter(str(path))
            self._put(event_pb2.Event(wall_time=time.time(), file_version=_FIRST_LINE))
        except OSError as error:
            raise ConfigError(f"trainer.tensorboard: {folder} cannot be written: {error}") from None

    def last_step(self) -> int:
        return self._last

    def write(self, step: int, values: Mapping[str, float]) -> None:
        told = [
            self._summaries.Summary.Value(tag=f"train/{name}", simple_value=value)
            for name, value in values.items()
        ]
        summary = self._summaries.Summary(value=told)
        self._put(self._events.Event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        self._writer.close()

    def _put(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())
        self._writer.flush()


def steps_in(folder: Path) -> Iterator[int]:
    """Yield the step of every whole record in a folder's event files."""
    from tensorboardX.proto import event_pb2

    for path in sorted(folder.glob("events.out.tfevents.*")):
        for record in _records(path.read_bytes()):
            event = event_pb2.Event.FromString(record)
            if event.HasField("summary"):
                yield int(event.step)


def _records(content: bytes) -> Iterator[bytes]:
    """Yield the records of an event file; one that a kill cut off is none.

    Each is its length (8 bytes), a checksum of that (4), its bytes, and a checksum of those (4).
    """
    at = 0
    while at + 12 <= len(content):
        (length,) = struct.unpack_from("<Q", content, at)
        end = at + 12 + length + 4
        if end > len(content):
            return
        yield content[at + 12 : end - 4]
        at = end


class WandbSink:
    """A run of Weights & Biases, offline: `wandb sync` uploads it."""

    name = "trainer.wandb"

    def __init__(self, run: Run, project: str) -> None:
        try:
            import wandb
        except ImportError:
            raise ConfigError(
                "trainer.wandb needs wandb, which is not installed; install it with pip install wandb, or leave the setting out"
            ) from None
        self._folder = run.root / "wandb"
        self._folder.mkdir(exist_ok=True)
        self._mark = self._folder / f"last-step-{run.branch}"
        try:
            self._wandb = wandb.init(
                project=project,
                name=f"{run.name}-{run.branch}",
                dir=str(self._folder),
                mode="offline",
                config=run.config.model_dump(mode="json"),
            )
        except Exception as error:
            raise ConfigError(f"trainer.wandb: wandb does not start: {error}") from error

    def last_step(self) -> int:
        return int(self._mark.read_text()) if self._mark.exists() else 0

    def write(self, step: int, values: Mapping[str, float]) -> None:
        # Marked first: offline files cannot be asked what they hold, and a step that is missing is better than one twice.
        self._mark.write_text(str(step))
        self._wandb.log(dict(values), step=step)

    def close(self) -> None:
        self._wandb.finish()
