"""What a sandbox's groups of cgroup v1 do where Linux refuses a value, or has no such file."""

import errno
import os
from pathlib import Path

import pytest

from sbx.isolation.cgroups import CgroupLimits, IoLimit, controlfile
from sbx.isolation.cgroups.v1 import V1Group, V1Sandbox, V1Setting

MEMORY = CgroupLimits(memory_max=1 << 20)


def sandbox(place: Path, limits: CgroupLimits = MEMORY, *trees: str) -> V1Sandbox:
    group = dict.fromkeys(trees or ("memory",), str(place))
    return V1Sandbox(group, V1Group(group), limits)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_linux_that_counts_each_group_alone_is_told_to_count_those_below(tmp_path: Path) -> None:
    file = tmp_path / "memory.use_hierarchy"
    for before, after in (("0", "1"), ("1", "1")):
        file.write_text(before)
        sandbox(tmp_path).make_hierarchical()
        assert file.read_text() == after
    file.unlink()
    sandbox(tmp_path).make_hierarchical()
    assert not file.exists()


def test_memory_is_watched_where_it_has_a_limit_and_linux_tells(tmp_path: Path) -> None:
    before = descriptors()
    assert sandbox(tmp_path, CgroupLimits()).watch_memory() is None
    assert sandbox(tmp_path, MEMORY, "tasks").watch_memory() is None
    assert sandbox(tmp_path).watch_memory() is None  # there is no memory.oom_control
    (tmp_path / "memory.oom_control").touch()
    (tmp_path / "cgroup.event_control").mkdir()
    with pytest.raises(IsADirectoryError):
        sandbox(tmp_path).watch_memory()
    assert descriptors() == before
    (tmp_path / "cgroup.event_control").rmdir()
    (tmp_path / "cgroup.event_control").touch()
    notices = sandbox(tmp_path).watch_memory()
    assert notices is not None
    os.close(notices)
    assert (tmp_path / "cgroup.event_control").read_text().split()[0] == str(notices)


def test_jail_whose_limits_are_refused_leaves_no_group(tmp_path: Path) -> None:
    slow = CgroupLimits(io=(IoLimit("8:0", 1 << 20, None),))
    with pytest.raises(FileNotFoundError):  # a directory has no file for it
        sandbox(tmp_path, slow, "io").make_jail("1")
    assert os.listdir(tmp_path) == []


def test_quota_that_no_outer_group_explains_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = tmp_path / "group"
    group.mkdir()

    def refuse(path: str, text: str) -> None:
        raise OSError(errno.EINVAL, "Invalid argument", path)

    monkeypatch.setattr(controlfile, "write", refuse)
    box = sandbox(group, MEMORY, "cpu")
    quota = V1Setting("cpu", "cpu.cfs_quota_us", "50000")
    for outer, taken in (("", False), ("60000", False), ("50000", True), ("40000", True)):
        for name, text in (("cpu.cfs_quota_us", outer), ("cpu.cfs_period_us", "100000")):
            (tmp_path / name).write_text(text) if outer else None
        if taken:
            box.apply([quota])
        else:
            with pytest.raises(OSError, match="Invalid argument"):
                box.apply([quota])
