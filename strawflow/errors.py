"""The error tree: classes group failures by what the one who catches them would do.

1. Every class carries a `kind` (a stable string, frozen in schemas/errors.txt, append-only) and an exit code.
2. The message is one clear sentence that names the file, line or field and what to do; ids come last, from `facts`.
3. Errors pickle (they cross process borders): all state lies in `args`.
4. Losing something that was held, and faults, are exceptions. Expected contention is a return value.
"""

from __future__ import annotations

from typing import Any, ClassVar


class StrawflowError(Exception):
    """Root of every error strawflow raises on purpose."""

    kind: ClassVar[str] = "strawflow"
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message, facts)

    @property
    def message(self) -> str:
        return str(self.args[0])

    @property
    def facts(self) -> dict[str, Any]:
        return dict(self.args[1])

    def __str__(self) -> str:
        tail = ", ".join(f"{name}={value}" for name, value in self.facts.items())
        return f"{self.message} ({tail})" if tail else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.facts)


def _rebuild(cls: type[StrawflowError], message: str, facts: dict[str, Any]) -> StrawflowError:
    return cls(message, **facts)


class InvalidInputError(StrawflowError, ValueError):
    """A file, row or argument given by the user is wrong; nothing was written. Mend the input."""

    kind = "invalid_input"
    exit_code = 2


class ConfigError(StrawflowError, ValueError):
    """The configuration of a run or of this machine cannot work. Mend the field it names."""

    kind = "config"
    exit_code = 3


class NotFoundError(StrawflowError, KeyError):
    """The named run, unit, batch, version or file does not exist."""

    kind = "not_found"
    exit_code = 4

    __str__ = StrawflowError.__str__


class AlreadyExistsError(StrawflowError):
    """Something of that name exists and is not overwritten."""

    kind = "already_exists"
    exit_code = 5


class LeaseLostError(StrawflowError):
    """The fence was superseded: stop the work and throw it away; nothing was changed."""

    kind = "lease_lost"
    exit_code = 6


class ConflictError(StrawflowError):
    """The same submission id came with other content, or an expected position was passed. Re-read, then decide."""

    kind = "conflict"
    exit_code = 7


class CommitUnknownError(StrawflowError):
    """The reply of a commit was lost: read back by the submission id, delete nothing."""

    kind = "commit_unknown"
    exit_code = 8


class IllegalTransitionError(StrawflowError):
    """A verb was applied to a state that does not allow it: a bug, or an operator's slip."""

    kind = "illegal_transition"
    exit_code = 9


class StorageError(StrawflowError, OSError):
    """A filesystem, database or engine fault that a retry with back-off may mend."""

    kind = "storage"
    exit_code = 10

    __str__ = StrawflowError.__str__


class CorruptPackError(StrawflowError):
    """Stored bytes do not match their checksum or cannot be parsed: quarantine, never train on them."""

    kind = "corrupt_pack"
    exit_code = 11


class IncompatibleFormatError(StrawflowError):
    """Stored data or an index of a version this program does not read."""

    kind = "incompatible_format"
    exit_code = 12


class CorruptCheckpointError(StrawflowError):
    """A checkpoint is missing a part, or a part does not match its manifest."""

    kind = "corrupt_checkpoint"
    exit_code = 13


class EngineError(StrawflowError):
    """A generation engine answered wrongly or not at all."""

    kind = "engine"
    exit_code = 14


class WorkerFailedError(StrawflowError):
    """A worker process ended and was not to be restarted any more."""

    kind = "worker_failed"
    exit_code = 15


class EngineQuarantinedError(EngineError):
    """An engine served wrong weights or garbage: nothing more is asked of it until it proved itself anew."""

    kind = "engine_quarantined"
    exit_code = 16
