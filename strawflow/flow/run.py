"""A run: one folder, one index, one configuration that never changes.

RUN/config.json      the resolved configuration, written last when a run is created
RUN/run.id           which run this is: a backup of another one is not restored into it
RUN/index.sqlite     the index, unless run.index_url names another
RUN/packs/<kind>/    Arrow packs
RUN/weights/         weight versions, each a Hugging Face checkpoint
RUN/checkpoints/     trainer checkpoints
RUN/logs/            one file per worker and start
RUN/megatron.json    what the trainer's newest start was built with, field by field
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from strawflow import config as configuration
from strawflow.config import RunConfig
from strawflow.errors import AlreadyExistsError, ConfigError, ConflictError, NotFoundError
from strawflow.ids import new_id
from strawflow.index import branches, consumers, dump, meta, migrate
from strawflow.index.engine import REVISION, Index
from strawflow.packs.probe import durability_of, is_url
from strawflow.packs.sync import sync_path

MAIN_BRANCH = "main"
TRAINER = "trainer"
ACTIVE_BRANCH = "branch"
"""Key of the note that names the branch the run is on; absent: the first."""
CONFIG_FILE = "config.json"
INDEX_FILE = "index.sqlite"
IDENTITY_FILE = "run.id"
NATIVE_FILE = "megatron.json"
RUN_ID = "run_id"
"""Key of the note that says whose index this is; absent in one made before it was kept."""


@dataclass(frozen=True)
class Run:
    """An open run; safe to share between threads."""

    root: Path
    config: RunConfig
    index: Index
    branch: str = MAIN_BRANCH
    consumer: str = TRAINER

    @property
    def name(self) -> str:
        return self.root.name

    @property
    def model_path(self) -> Path:
        """The initial Hugging Face checkpoint; a relative path lies inside the run's folder."""
        return self.root / self.config.model.path

    def log_path(self, worker: str, attempt: int) -> Path:
        return self.root / "logs" / f"{worker}-{attempt}.log"

    def close(self) -> None:
        self.index.close()


def folder_of(given: str | Path) -> Path:
    """Return the folder that a path means.

    Raises:
        ConfigError: it is the address of an object store.
    """
    if isinstance(given, str) and is_url(given):
        raise ConfigError(
            f"{given} is an address, and a run lies in a folder: packs in an object store are read and written by the pack "
            "layer alone; name a folder, which may be a mount of the store"
        )
    return Path(given)


def create_run(
    root: Path, config: RunConfig, *, fresh: bool = False, files: Mapping[str, bytes] | None = None
) -> Run:
    """Create the run's folder and index; the folder becomes a run when config.json appears, last.

    `fresh` removes a run that is there; `files` (name to content) are written before config.json.

    Raises:
        AlreadyExistsError: the folder holds a run (or anything else) and `fresh` is not set, or run.index_url names a
            database that holds a run's index: `fresh` removes no database.
        ConfigError: the file system cannot keep the durability the configuration claims.
    """
    root = root.resolve()
    is_occupied = root.exists() and any(root.iterdir())
    if is_occupied:
        _refuse_occupied(root, fresh=fresh)
    _refuse_filled_database(config)  # before anything is removed
    if is_occupied:
        shutil.rmtree(root)
    for folder in ("packs", "weights", "checkpoints", "logs"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    refuse_unkeepable_durability(root, config)
    index = open_index(root, config)
    migrate.upgrade(index)
    identity = new_id("run")
    with index.begin() as connection:
        branches.create(connection, MAIN_BRANCH)
        consumers.ensure(connection, MAIN_BRANCH, TRAINER)
        meta.put(connection, RUN_ID, identity)
    index.expire_after_reboot()
    write_durably(root / IDENTITY_FILE, identity.encode())
    for name, content in (files or {}).items():
        write_durably(root / name, content)
    write_durably(root / CONFIG_FILE, configuration.to_json(config).encode())
    return Run(root, config, index)


def open_run(root: Path) -> Run:
    """Open an existing run.

    Raises:
        NotFoundError: the folder is no run.
        IncompatibleFormatError: its index is of another revision.
        ConflictError: its index is that of another run.
        ConfigError: config.json cannot be read, or its SQLite index lies on a network file system.
    """
    root = root.resolve()
    config = stored_config(root)
    if not config.run.index_url and not (root / INDEX_FILE).exists():
        raise NotFoundError(
            f"{root} has no {INDEX_FILE}: the run's index is lost; `strawflow index restore` brings a backup back, "
            "`strawflow index rebuild` builds it from the packs"
        )
    index = open_index(root, config)
    index.check_revision()
    index.expire_after_reboot()
    with index.read() as connection:
        branch = meta.find(connection, ACTIVE_BRANCH) or MAIN_BRANCH
        owner = meta.find(connection, RUN_ID)
    identity = identity_of(root)
    if owner and identity and owner != identity:
        index.close()
        # A sweep by it would take every pack of this run for one that nothing names.
        raise ConflictError(
            f"the index of {root} is that of another run ({owner}, not {identity}): nothing was done; put the run's own "
            "index back, `strawflow index restore` and `rebuild` help",
            url=index.shown_url,
        )
    return Run(root, config, index, branch)


def stored_config(root: Path) -> RunConfig:
    """Read the configuration that a run was created with.

    Raises:
        NotFoundError: the folder is no run.
        ConfigError: the file cannot be read, or does not match this program's configuration.
    """
    path = root / CONFIG_FILE
    if not path.exists():
        raise NotFoundError(f"{root} is no run: it has no {CONFIG_FILE}; see `strawflow run list`")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; bring it back from a copy") from None
    if not text.strip():
        raise ConfigError(f"{path} is empty; bring it back from a copy")
    return configuration.from_json(text, path=str(path))


def open_index(root: Path, config: RunConfig) -> Index:
    """Return the index of a run; an SQLite file is refused where locks cannot be trusted.

    Raises:
        ConfigError: the SQLite file lies, or would lie, on a network file system.
    """
    url = index_url(root, config)
    if url.startswith("sqlite"):
        place = Path(url.removeprefix("sqlite:///"))
        probe = durability_of(place)
        if probe.is_network:
            raise ConfigError(
                f"{place} lies on a network file system ({probe.filesystem}), where SQLite locks cannot be trusted; "
                "set run.index_url to a PostgreSQL address or to a local SQLite file"
            )
    return Index(url, durability=config.run.durability, idle_transaction_s=max(1.0, config.lease.ttl_s))


def index_url(root: Path, config: RunConfig) -> str:
    return config.run.index_url or f"sqlite:///{root / INDEX_FILE}"


def identity_of(root: Path) -> str:
    """Return what tells a run from every other; empty for one made before runs had it, or whose file was lost."""
    try:
        return (root / IDENTITY_FILE).read_text(encoding="utf-8").strip()
    except (FileNotFoundError, UnicodeDecodeError):
        return ""


def is_run(root: Path) -> bool:
    return (root / CONFIG_FILE).exists()


def refuse_unkeepable_durability(root: Path, config: RunConfig) -> None:
    """Raise ConfigError when the folder's file system cannot give what the configuration claims."""
    probe = durability_of(root)
    if config.run.durability == "host" and probe.level != "host":
        raise ConfigError(
            f"{root} lies on {probe.filesystem}, which does not survive power loss ({probe.reason}); "
            "choose another folder or --run.durability process"
        )


def write_durably(path: Path, content: bytes) -> None:
    """Write a whole file: temporary name, fsync, rename, fsync of the folder."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as sink:
        sink.write(content)
        sink.flush()
        os.fsync(sink.fileno())
    temporary.rename(path)
    sync_path(path.parent)


def _refuse_filled_database(config: RunConfig) -> None:
    """Raise AlreadyExistsError when the run is to use a database of its own choice that holds an index."""
    if not config.run.index_url:
        return
    if (file := dump.sqlite_file(config.run.index_url)) is not None and not file.exists():
        return
    index = Index(config.run.index_url, durability=config.run.durability)
    try:
        with index.read() as connection:
            found = dump.revision(connection)
            is_filled = found is not None and (found != REVISION or bool(branches.listed(connection)))
    finally:
        index.close()
    if is_filled:
        raise AlreadyExistsError(
            f"run.index_url {index.shown_url} holds the index of a run already, and --fresh removes no database: name "
            "another one, or empty it first; nothing was changed"
        )


def _refuse_occupied(root: Path, *, fresh: bool) -> None:
    if not fresh:
        what = "a run" if is_run(root) else "files that are no complete run"
        raise AlreadyExistsError(
            f"{root} already holds {what}: `strawflow resume {root}` goes on with it, --fresh removes it and starts anew"
        )
    if not is_run(root) and not (root / "packs").is_dir():
        raise AlreadyExistsError(f"{root} holds files that are no run of ours; --fresh does not remove them")
