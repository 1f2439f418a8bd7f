"""What a place really gives: the file system under a path and the durability level it can promise.

1. `process` means the bytes survive every kill of a process; `host` means that a sync outlives the loss of power; `store`
   that an object store has acknowledged them.
2. Only file systems known to carry fsync to stable storage are said to give `host`; anything else is `process`.
3. This reads /proc/self/mountinfo and nothing else: it measures no disk, asks no store and trusts no drive's own cache to
   be honest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from strawflow.errors import ConfigError, StorageError

Durability = Literal["process", "host", "store"]

MOUNTINFO_PATH = Path("/proc/self/mountinfo")

_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
_LOCAL = frozenset({"ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "virtiofs"})
_NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "9p", "afs"}
)
# FUSE file systems whose fsync returns only once their servers or object store have the bytes.
_FUSE_SYNCED = frozenset({"fuse.juicefs", "fuse.glusterfs", "fuse.ceph-fuse", "fuse.lustre"})
_NETWORK_SYNCED = _NETWORK - {"9p", "afs"}


STORE_LEVELS: dict[str, Durability] = {"s3": "store", "memory": "process"}
"""What each kind of object store gives, by the protocol of its address."""


def is_url(root: str) -> bool:
    """Whether `root` is an fsspec address (`protocol://...`) and not the path of a folder."""
    return re.match(r"[a-z][a-z0-9+.-]*://", root) is not None


@dataclass(frozen=True)
class Mount:
    """One line of mountinfo: options are the mount's and the file system's together."""

    mount_point: Path
    filesystem: str
    options: tuple[str, ...]

    def option(self, name: str) -> str | None:
        """Return the value of `name=value`, or None."""
        return next((o.split("=", 1)[1] for o in self.options if o.startswith(f"{name}=")), None)


@dataclass(frozen=True)
class Probe:
    """What is known of the file system under `path`; `reason` is one clause for a person."""

    path: str
    mount_point: Path | None
    """None for an object store."""
    filesystem: str
    """Its name, or the protocol of an object store."""
    is_network: bool
    level: Durability
    reason: str


def durability_of(root: str | Path, *, mountinfo: Path = MOUNTINFO_PATH) -> Probe:
    """Say which durability level the mount, or the object store, of `root` gives; `root` need not exist yet.

    Raises:
        ConfigError: an address of an unknown protocol.
        StorageError: mountinfo cannot be read or names no mount above `root`.
    """
    if isinstance(root, str) and is_url(root):
        return _store_of(root)
    mounts = _mounts(mountinfo)
    place = Path(root).resolve()
    mount = _mount_of(place, mounts)
    level, reason = _judge(mount, mounts)
    is_network = mount.filesystem in _NETWORK or mount.filesystem.startswith("fuse")
    return Probe(str(place), mount.mount_point, mount.filesystem, is_network, level, reason)


def _store_of(address: str) -> Probe:
    protocol = address.split("://", 1)[0]
    level = STORE_LEVELS.get(protocol)
    if level is None:
        known = ", ".join(f"{name}://" for name in STORE_LEVELS)
        raise ConfigError(f"{address}: packs lie in a folder or under one of {known}")
    reason = "its acknowledgement is the store's promise" if level == "store" else "it lives in this process"
    return Probe(address, None, protocol, level == "store", level, reason)


def _mounts(mountinfo: Path) -> list[Mount]:
    try:
        lines = mountinfo.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError as error:
        raise StorageError(
            f"{mountinfo} cannot be read, so no durability level can be claimed: {error}"
        ) from error
    return [_parse_mount(line) for line in lines if line]


def _parse_mount(line: str) -> Mount:
    # Format: proc_pid_mountinfo(5). Optional fields end at a lone "-"; spaces in paths are octal escapes.
    left, right = line.split(" - ", 1)
    fields, tail = left.split(" "), right.split(" ")
    options = (*fields[5].split(","), *_unescape(tail[2] if len(tail) > 2 else "").split(","))
    return Mount(Path(_unescape(fields[4])), tail[0], options)


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _mount_of(place: Path, mounts: list[Mount]) -> Mount:
    above = [mount for mount in mounts if place.is_relative_to(mount.mount_point)]
    if not above:
        raise StorageError(f"no mount holds {place}, so no durability level can be claimed")
    # The deepest mount wins, and of several at one place the one mounted last, which hides the others.
    deepest = max(len(mount.mount_point.parts) for mount in above)
    return [mount for mount in above if len(mount.mount_point.parts) == deepest][-1]


def _judge(mount: Mount, mounts: list[Mount]) -> tuple[Durability, str]:
    name = mount.filesystem
    if name in _MEMORY:
        return "process", f"{name} lives in memory"
    if name == "overlay":
        return _judge_overlay(mount, mounts)
    if {"nobarrier", "barrier=0"} & set(mount.options):
        return "process", f"{name} is mounted without write barriers"
    if name in _LOCAL:
        return "host", f"{name} carries fsync to the disk"
    if name in _NETWORK_SYNCED or name in _FUSE_SYNCED:
        return "host", f"{name} carries fsync to its servers, as far as these keep what they acknowledge"
    return "process", f"{name} is not known to carry fsync to stable storage"


def _judge_overlay(mount: Mount, mounts: list[Mount]) -> tuple[Durability, str]:
    if any(option.split("=")[0] == "volatile" for option in mount.options):
        return "process", "overlay is mounted volatile: it leaves syncs out"
    upper = mount.option("upperdir")
    if upper is None:
        return "process", "overlay has no writable layer"
    below = _mount_of(Path(upper), mounts)
    # Inside a container the upper directory is usually another namespace's path; then only the overlay itself shows.
    if below.filesystem == "overlay":
        return "host", "overlay carries fsync to its upper file system, which is not visible from here"
    level, reason = _judge(below, mounts)
    return level, f"overlay over {below.filesystem}: {reason}"
