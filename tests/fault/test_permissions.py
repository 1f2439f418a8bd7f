"""Permissions that are taken away from packs: what cannot be read is told, and never passes for damaged, missing or empty."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from strawflow.errors import StorageError
from strawflow.flow.check import check
from strawflow.flow.quarantine import quarantine_damage
from strawflow.flow.reconcile import reconcile
from strawflow.flow.usage import usage_of
from strawflow.testing.runs import SmallRun, small_run
from tests.contract.stored import end_sessions

VERSION_3 = 0x20080522
DAC_OVERRIDE, DAC_READ_SEARCH = 1 << 1, 1 << 2


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Sets(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


@contextmanager
def as_anybody_else() -> Iterator[None]:
    """Let permissions hold for this thread though it may be root's (capset(2))."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = _Header(VERSION_3, 0), (_Sets * 2)()
    assert libc.capget(ctypes.byref(header), sets) == 0
    before = sets[0].effective
    sets[0].effective = before & ~(DAC_OVERRIDE | DAC_READ_SEARCH)
    assert libc.capset(ctypes.byref(header), sets) == 0
    try:
        yield
    finally:
        sets[0].effective = before
        assert libc.capset(ctypes.byref(header), sets) == 0, os.strerror(ctypes.get_errno())


@contextmanager
def taken_away(path: Path) -> Iterator[None]:
    mode = path.stat().st_mode
    path.chmod(0)
    try:
        yield
    finally:
        path.chmod(mode)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[SmallRun]:
    with small_run(tmp_path) as made:
        made.advance(1)
        made.sample()
        end_sessions(made)
        yield made


def test_a_pack_that_may_not_be_read_is_no_damage_and_is_not_quarantined(small: SmallRun) -> None:
    (path,) = (small.run.root / "packs" / "trajectory").glob("*.arrow")
    with taken_away(path), as_anybody_else():
        findings = check(small.run).findings
        with pytest.raises(
            StorageError, match=r"Permission denied.*that is no damage.*nothing was quarantined"
        ):
            quarantine_damage(small.run, do=True, reopen=True)
    assert findings
    assert all("that is no damage" in f.message for f in findings if f.check == "extent")
    assert check(small.run).findings == []
    assert quarantine_damage(small.run, do=False).damaged == []


def test_a_folder_that_may_not_be_listed_is_not_taken_for_an_empty_one(small: SmallRun) -> None:
    with taken_away(small.run.root / "packs" / "trajectory"), as_anybody_else():
        for look in (check, usage_of, reconcile):
            with pytest.raises(StorageError, match=r"the packs cannot be listed: .*Permission denied"):
                look(small.run)
    assert check(small.run).findings == []
