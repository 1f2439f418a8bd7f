"""What a mount is said to give, from mountinfo texts of many machines and from this one."""

from __future__ import annotations

from pathlib import Path

import pytest

from strawflow.errors import StorageError
from strawflow.packs.probe import Probe, durability_of

ROOT = "27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard"


def probe_line(tmp_path: Path, *lines: str, path: str = "/srv/run") -> Probe:
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_text("\n".join([ROOT, *lines]) + "\n")
    return durability_of(Path(path), mountinfo=mountinfo)


@pytest.mark.parametrize(
    "filesystem, options, level, is_network",
    [
        ("xfs", "rw", "host", False),
        ("virtiofs", "rw", "host", False),
        ("ext4", "rw,barrier=0", "process", False),
        ("ext4", "rw,nobarrier", "process", False),
        ("tmpfs", "rw,size=24683656k", "process", False),
        ("ramfs", "rw", "process", False),
        ("nfs4", "rw,vers=4.2", "host", True),
        ("cifs", "rw", "host", True),
        ("9p", "rw", "process", True),
        ("fuse.juicefs", "rw", "host", True),
        ("fuse.sshfs", "rw", "process", True),
        ("somethingfs", "rw", "process", False),
    ],
)
def test_each_file_system_gets_the_level_its_fsync_can_keep(
    tmp_path: Path, filesystem: str, options: str, level: str, is_network: bool
) -> None:
    probe = probe_line(tmp_path, f"30 27 0:30 / /srv rw,noatime - {filesystem} source {options}")
    assert (probe.filesystem, probe.level, probe.is_network) == (filesystem, level, is_network)
    assert probe.mount_point == Path("/srv")
    assert probe.reason


def test_a_path_outside_every_deeper_mount_belongs_to_the_root_mount(tmp_path: Path) -> None:
    probe = probe_line(tmp_path, "30 27 0:30 / /srv/run2 rw - tmpfs tmpfs rw", path="/srv/run")
    assert (probe.filesystem, probe.mount_point) == ("ext4", Path("/"))


def test_of_two_mounts_at_one_place_the_last_counts(tmp_path: Path) -> None:
    probe = probe_line(
        tmp_path, "30 27 0:30 / /srv rw - xfs /dev/vdb rw", "31 30 0:31 / /srv rw - tmpfs tmpfs rw"
    )
    assert probe.filesystem == "tmpfs"


def test_spaces_in_mount_points_are_read(tmp_path: Path) -> None:
    probe = probe_line(tmp_path, r"30 27 0:30 / /srv/my\040runs rw - tmpfs tmpfs rw", path="/srv/my runs/a")
    assert probe.mount_point == Path("/srv/my runs")


@pytest.mark.parametrize(
    "upper, extra, level",
    [("/var/lib/up", "", "host"), ("/mem/up", "", "process"), ("/var/lib/up", ",volatile", "process")],
)
def test_an_overlay_gives_what_its_upper_file_system_gives(
    tmp_path: Path, upper: str, extra: str, level: str
) -> None:
    probe = probe_line(
        tmp_path,
        "29 27 0:29 / /mem rw - tmpfs tmpfs rw",
        f"30 27 0:30 / /srv rw - overlay overlay rw,lowerdir=/l,upperdir={upper},workdir=/w{extra}",
    )
    assert probe.level == level


def test_a_container_whose_root_is_an_overlay_can_claim_host(tmp_path: Path) -> None:
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_text("1 0 0:9 / / rw - overlay overlay rw,lowerdir=/l,upperdir=/u,workdir=/w\n")
    assert durability_of(Path("/srv/run"), mountinfo=mountinfo).level == "host"


def test_no_mountinfo_claims_nothing(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no durability level can be claimed"):
        durability_of(tmp_path, mountinfo=tmp_path / "absent")


def test_memory_of_this_machine_gives_process_only() -> None:
    probe = durability_of(Path("/dev/shm/strawflow/run"))
    assert (probe.filesystem, probe.level) == ("tmpfs", "process")


def test_a_path_that_does_not_exist_yet_is_judged_by_its_parents(tmp_path: Path) -> None:
    assert durability_of(tmp_path / "not" / "yet").mount_point == durability_of(tmp_path).mount_point


def test_an_object_store_gives_what_its_protocol_gives() -> None:
    store, memory = durability_of("s3://bucket/run"), durability_of("memory://run")
    assert (store.level, store.is_network, store.mount_point) == ("store", True, None)
    assert (memory.level, memory.is_network) == ("process", False)


def test_a_folder_given_as_text_is_a_folder(tmp_path: Path) -> None:
    assert durability_of(str(tmp_path)) == durability_of(tmp_path)
