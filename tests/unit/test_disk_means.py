"""By which means workspaces keep to their size, and disks to their speed: decided, and said."""

import math
from dataclasses import replace

import pytest

from sbx.errors import CannotEnforce
from sbx.isolation import project_quota
from sbx.isolation.launch_plan import Wall
from sbx.isolation.plan import decide_walls, slows_io
from sbx.isolation.probe import Capabilities, Layer
from sbx.linux import mountinfo
from sbx.policy import load, narrow
from sbx.runtime.files import disk_limit

FOUND = Layer("disk", True, "project quota of xfs")
MISSING = Layer("disk", False, "no quota: watched", "/data lies on btrfs", "mount it so")
NAMES = ("bwrap", "namespaces", "landlock", "seccomp", "memory", "tasks", "cpu", "io")
HOST = Capabilities(
    linux="6.8.0",
    machine="x86_64",
    root=True,
    bwrap="/usr/bin/bwrap",
    bwrap_options=frozenset(),
    landlock_abi=4,
    own_namespaces=True,
    layers=tuple(Layer(name, True, f"{name} of the host") for name in NAMES),
)
DEFAULT = load("default")
MOUNTINFO = """\
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
30 22 0:25 / /data rw shared:1 - overlay overlay rw,lowerdir=/a
"""


def with_layer(layer: Layer, **answer: object) -> Capabilities:
    plain = {
        name: getattr(layer, name) for name in ("name", "available", "detail", "cause", "remedy")
    }
    disk = {"kind": "xfs", "source": "/dev/sda", "device": "8:0", **answer}
    return project_quota.with_disk(HOST, {"layer": plain, **disk}, "/data")


def test_the_receipt_says_which_of_the_two_is_in_force() -> None:
    def means(setting: str, layer: Layer, *, charged: bool, ours: bool = True) -> Wall:
        return disk_limit.wall(setting, layer, charged=charged, ours=ours, policy=DEFAULT)

    assert means("auto", FOUND, charged=True) == Wall(
        "disk",
        "best-effort",
        "quota, hard: project quota of xfs, 1073741824 bytes, 50000 files and directories",
    )
    assert means("required", FOUND, charged=True).demanded == "hard"
    watched = Wall("disk", "best-effort", disk_limit.WATCHED, weaker=True)
    assert means("auto", MISSING, charged=False) == watched
    assert means("off", FOUND, charged=False) == watched
    assert "1 GB/s" in disk_limit.WATCHED
    foreign = means("auto", FOUND, charged=False, ours=False)
    assert foreign.weaker
    assert foreign.means.startswith("watched: the growth of the directory of the host")


@pytest.mark.parametrize("setting", ["off", "auto"])
def test_only_a_required_quota_is_refused_where_there_is_none(setting: str) -> None:
    assert disk_limit.refused(setting, with_layer(MISSING)) is None
    assert disk_limit.refused("required", with_layer(FOUND)) is None
    error = disk_limit.refused("required", with_layer(MISSING))
    assert isinstance(error, CannotEnforce)
    assert error.details == {
        "layer": "disk",
        "cause": "/data lies on btrfs",
        "remedy": "mount it so",
    }


def test_io_is_a_wall_where_a_limit_speaks_of_it_and_else_none() -> None:
    slow = narrow(DEFAULT, {"limits": {"io_write_max": "50MiB"}})
    assert [slows_io(one) for one in (DEFAULT, slow)] == [False, True]
    assert "io" not in [wall.name for wall in decide_walls(DEFAULT, HOST)]
    assert decide_walls(slow, HOST)[-1] == Wall("io", "best-effort", "io of the host")
    lacking = replace(
        HOST, layers=(*HOST.layers[:-1], Layer("io", False, "none", "not delegated", "delegate"))
    )
    assert decide_walls(slow, lacking)[-1].weaker
    hard = narrow(slow, {"walls": {"io": "hard"}})
    with pytest.raises(CannotEnforce, match="io as a hard wall"):
        decide_walls(hard, lacking)
    assert decide_walls(load("strict"), HOST)


def test_without_a_disk_there_is_no_io_to_be_slowed() -> None:
    assert with_layer(FOUND).layer("io").available
    io = with_layer(FOUND, kind="overlay", source="overlay", device=None).layer("io")
    assert (io.available, io.cause) == (
        False,
        "/data lies on overlay (overlay), which is not a disk that can be slowed",
    )
    assert with_layer(MISSING).layer("disk") == MISSING


def test_a_rate_is_at_most_what_the_policy_allows() -> None:
    assert DEFAULT.limits.io_read_max == math.inf
    slow = narrow(DEFAULT, {"limits": {"io_read_max": "1MiB"}})
    assert slow.limits.io_read_max == 1 << 20
    assert narrow(slow, {"limits": {"io_read_max": "64KiB"}}).limits.io_read_max == 64 << 10
    for wider in ("none", "2MiB"):
        with pytest.raises(Exception, match=r"limits\.io_read_max.*goes beyond"):
            narrow(slow, {"limits": {"io_read_max": wider}})


@pytest.mark.parametrize("value", [0, "1KiB", "fast", "50MB/s", True])
def test_a_rate_that_would_look_like_a_hang_or_is_none_is_refused(value: object) -> None:
    with pytest.raises(Exception, match="io_write_max"):
        narrow(DEFAULT, {"limits": {"io_write_max": value}})


def test_the_file_system_is_named_by_its_device() -> None:
    mounts = mountinfo.parse(MOUNTINFO.splitlines())
    assert project_quota.kind_of("254:0", mounts) == (
        "ext4",
        "/dev/vda",
    )
    assert project_quota.kind_of("0:25", mounts) == (
        "overlay",
        "overlay",
    )
    assert project_quota.kind_of("9:9", mounts) == (
        "a file system",
        "unknown",
    )
