"""Groups of cgroup v2 in a directory whose files appear, change and go as those of Linux do.

tests/vm runs the same contract on a Linux that has cgroup v2.
"""

import errno
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from sbx.isolation.cgroups import CgroupEvents, CgroupLimits, IoLimit, controlfile, v2
from sbx.isolation.cgroups.probe import LEAF, CgroupCapabilities
from sbx.isolation.cgroups.v2 import V2Group, V2Hierarchy, V2Sandbox, open_v2

OWN = os.getpid()
LIMITS = CgroupLimits(64 << 20, 30, 0.5, (IoLimit("8:0", None, 1024),))
FILES = {
    "cgroup.procs": "",
    "cgroup.subtree_control": "",
    "cgroup.events": "populated 0\n",
    "cgroup.kill": "",
    "memory.max": "max",
    "memory.high": "max",
    "memory.events": "oom_kill 2\n",
    "pids.max": "max",
    "pids.events": "max 3\n",
    "cpu.max": "max 100000",
    "io.max": "",
}


class Tree:
    """The own group of this process at `top`. `refused` has the errno of a text or a file."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.refused: dict[str, int] = {}
        self._mkdir, self._rmdir = os.mkdir, os.rmdir
        self._fill(top)
        (top / "cgroup.procs").write_text(f"{OWN}\n")

    def _fill(self, group: Path) -> None:
        for name, text in FILES.items():
            (group / name).write_text(text)

    def mkdir(self, path: str) -> None:
        self._mkdir(path)
        self._fill(Path(path))

    def rmdir(self, path: str) -> None:
        group = Path(path)
        if any(one.is_dir() for one in group.iterdir()) or self.procs(group):
            raise OSError(errno.EBUSY, "busy", path)
        for file in group.iterdir():
            file.unlink()
        self._rmdir(path)

    def procs(self, group: Path) -> list[str]:
        return (group / "cgroup.procs").read_text().split()

    def write(self, path: str, text: str) -> None:
        file = Path(path)
        for word in (text, file.name):
            if word in self.refused:
                raise OSError(self.refused[word], "refused", path)
        if not file.exists():
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        match file.name:
            case "cgroup.procs":
                pid = str(OWN) if text == "0" else text
                for other in self.top.rglob("cgroup.procs"):
                    others = [one for one in other.read_text().split() if one != pid]
                    other.write_text("".join(f"{one}\n" for one in others))
                file.write_text(f"{file.read_text()}{pid}\n")
            case "cgroup.subtree_control":
                names = set(file.read_text().split())
                change = names.add if text[0] == "+" else names.discard
                change(text[1:])
                file.write_text(" ".join(sorted(names)))
            case "cgroup.kill":
                for procs in file.parent.rglob("cgroup.procs"):
                    procs.write_text("")
            case _:
                file.write_text(text)

    def open(
        self, *names: str, at_root: bool = False, movable: tuple[int, ...] = ()
    ) -> V2Hierarchy:
        controllers = dict.fromkeys(names or ("memory", "tasks", "cpu", "io"), str(self.top))
        found = CgroupCapabilities(2, controllers, {}, members=(OWN,), at_root=at_root)
        return open_v2(found, "r", movable)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    tree = Tree(tmp_path)
    monkeypatch.setattr(os, "mkdir", tree.mkdir)
    monkeypatch.setattr(os, "rmdir", tree.rmdir)
    monkeypatch.setattr(controlfile, "write", tree.write)
    return tree


def directories(top: Path) -> list[str]:
    return sorted(str(path.relative_to(top)) for path in top.rglob("*") if path.is_dir())


def untouched(tree: Tree) -> bool:
    control = (tree.top / "cgroup.subtree_control").read_text()
    return (directories(tree.top), tree.procs(tree.top), control) == ([], [str(OWN)], "")


def test_runtime_moves_to_a_leaf_and_hands_its_controllers_down(tree: Tree) -> None:
    hierarchy = tree.open()
    (group,) = (name for name in directories(tree.top) if "/" not in name)
    assert tree.procs(tree.top / group / LEAF) == [str(OWN)]
    for place in (tree.top, tree.top / group):
        assert (place / "cgroup.subtree_control").read_text() == "cpu io memory pids"
    for _ in range(2):
        hierarchy.close()
        assert untouched(tree)


def test_group_with_other_processes_hands_nothing_down(tree: Tree) -> None:
    (tree.top / "cgroup.procs").write_text(f"{OWN}\n7\n")
    with pytest.raises(OSError, match="holds other processes") as raised:
        tree.open()
    assert raised.value.errno == errno.EBUSY
    assert directories(tree.top) == []
    tree.open(movable=(7,)).close()
    assert sorted(tree.procs(tree.top)) == sorted([str(OWN), "7"])


def test_root_group_keeps_its_processes_and_controllers(tree: Tree) -> None:
    (tree.top / "cgroup.procs").write_text(f"{OWN}\n7\n")
    tree.open(at_root=True).close()
    assert tree.procs(tree.top) == [str(OWN), "7"]
    assert (tree.top / "cgroup.subtree_control").read_text() == "cpu io memory pids"


def test_controllers_stay_while_another_runtime_uses_them(tree: Tree) -> None:
    first = tree.open("memory")
    second = V2Hierarchy(first.capabilities, str(tree.top), f"sbx-other-{OWN}-x")
    second.settle({OWN})
    first.close()
    assert (tree.top / "cgroup.subtree_control").read_text() == "memory"
    second.close()
    assert untouched(tree)


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EINVAL])
def test_controller_that_cannot_be_enabled_is_missing_with_its_cause(
    tree: Tree, number: int
) -> None:
    tree.refused["+io"] = number
    hierarchy = tree.open("memory", "io")
    assert [*hierarchy.capabilities.controllers] == ["memory"]
    assert "io controller cannot be enabled" in hierarchy.capabilities.missing["io"].cause
    hierarchy.close()
    with pytest.raises(OSError, match="none of its controllers"):
        tree.open("io")
    assert untouched(tree)


def test_start_that_linux_refuses_leaves_everything_where_it_was(tree: Tree) -> None:
    tree.refused["+memory"] = errno.EACCES
    with pytest.raises(OSError, match="refused"):
        tree.open("memory")
    assert untouched(tree)


@pytest.fixture
def box(tree: Tree) -> V2Sandbox:
    return tree.open().make_sandbox("s", LIMITS)


def test_limits_are_those_of_the_sandbox_and_the_jail(tree: Tree, box: V2Sandbox) -> None:
    jail = box.make_jail("1")
    assert jail.limits() == CgroupLimits(64 << 20, 30, 0.5, (IoLimit("8:0", None, 1024),))
    assert jail.events() == CgroupEvents(2, 3)
    jail.enter()
    assert jail.pids() == [OWN] == box.pids()
    (fd,) = jail.entries()
    assert os.readlink(f"/proc/self/fd/{fd}") == f"{jail.path}/cgroup.procs"
    os.close(fd)
    assert box.watch_memory() is None


def test_quota_is_lifted_and_put_back(box: V2Sandbox) -> None:
    for on, text in ((False, "max"), (True, "50000 100000")):
        box.throttle(on)
        assert Path(f"{box.path}/cpu.max").read_text() == text


def test_the_memory_limit_changes_and_no_other(box: V2Sandbox) -> None:
    Path(f"{box.path}/pids.max").write_text("unchanged")
    box.limit_memory(96 << 20)
    texts = [Path(f"{box.path}/{name}").read_text() for name in ("memory.max", "memory.high")]
    assert texts == [str(96 << 20), str(v2.memory_high(96 << 20))]
    assert Path(f"{box.path}/pids.max").read_text() == "unchanged"


@pytest.mark.parametrize("level", ["sandbox", "jail"])
def test_limit_that_linux_refuses_leaves_no_group(tree: Tree, level: str) -> None:
    hierarchy = tree.open()
    make: Callable[[], object] = partial(hierarchy.make_sandbox, "s", LIMITS)
    if level == "jail":
        make = partial(hierarchy.make_sandbox("s", LIMITS).make_jail, "1")
    before = directories(tree.top)
    tree.refused["pids.max"] = errno.EINVAL
    with pytest.raises(OSError, match="refused"):
        make()
    assert directories(tree.top) == before


def test_close_ends_what_is_left(tree: Tree) -> None:
    hierarchy = tree.open()
    jail = hierarchy.make_sandbox("s", LIMITS).make_jail("1")
    Path(jail.path, "cgroup.procs").write_text("7\n")
    hierarchy.close()
    assert untouched(tree)


def test_group_without_a_file_to_kill_by_forks_no_more_and_is_killed(
    tree: Tree, box: V2Sandbox
) -> None:
    """Linux before 5.14."""
    Path(box.path, "cgroup.kill").unlink()
    box.kill()
    assert Path(box.path, "pids.max").read_text() == "0"
    box.remove(0)
    assert not Path(box.path).exists()
    box.kill()  # it is gone


@pytest.mark.parametrize("populated", [0, 1, None])
def test_change_of_a_group_is_waited_for_no_longer_than_said(
    tmp_path: Path, populated: int | None
) -> None:
    if populated is not None:
        (tmp_path / "cgroup.events").write_text(f"populated {populated}\n")
    began = time.monotonic()
    V2Group(str(tmp_path))._wait_for_change(0)
    assert time.monotonic() - began < 5
