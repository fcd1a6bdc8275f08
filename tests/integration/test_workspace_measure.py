"""How much a tree takes is found however it was built, and by whomever it was made unreadable."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from sbx.workspace.disk_usage import EarlyStop
from sbx.workspace.rmtree import remove_tree
from sbx.workspace.tree import Tree

MIB = 1 << 20


def test_a_mode_that_was_lifted_for_a_look_is_as_it_was(tmp_path: Path) -> None:
    for mode in (0, 0o300, 0o400, 0o600, 0o755):
        below = tmp_path / f"{mode:o}"
        below.mkdir()
        (below / "file").write_bytes(bytes(MIB))
        below.chmod(mode)
    tree = Tree.at(tmp_path, view="/workspace")
    try:
        used = tree.measure()
        assert used.bytes >= 5 * MIB
        assert (used.files, used.directories, used.complete) == (5, 5, True)
        modes = {one.name: one.stat().st_mode & 0o777 for one in tmp_path.iterdir()}
        assert all(int(name, 8) == mode for name, mode in modes.items())
    finally:
        tree.close()
        for below in tmp_path.iterdir():
            below.chmod(0o700)


@pytest.mark.full_tier
def test_a_deep_tree_without_rights_takes_few_descriptors(tmp_path: Path) -> None:
    at = os.open(tmp_path, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=at)
        below = os.open("d", os.O_RDONLY, dir_fd=at)
        os.fchmod(at, 0o500)
        os.close(at)
        at = below
    os.close(at)
    tree = Tree.at(tmp_path, view="/workspace")
    try:
        most = _most_descriptors(lambda: tree.measure(deadline_s=30))
        assert most < 120
    finally:
        tree.close()
        top = os.open(tmp_path, os.O_PATH)
        remove_tree(top, "d", 30)
        os.close(top)


def _most_descriptors(act: Callable[[], object]) -> int:
    """How many more than before are open at any time, by the highest number that is given."""
    most, over = [0], threading.Event()
    before = len(os.listdir("/proc/self/fd"))

    def look() -> None:
        while not over.is_set():
            most[0] = max(most[0], len(os.listdir("/proc/self/fd")) - before)

    watching = threading.Thread(target=look)
    watching.start()
    try:
        act()
    finally:
        over.set()
        watching.join()
    return most[0]


def test_a_look_stops_when_it_knows_enough(tmp_path: Path) -> None:
    for number in range(100):
        (tmp_path / f"{number}").mkdir()
        (tmp_path / f"{number}/file").write_bytes(b"x")
    with Tree.at(tmp_path, view="/workspace") as tree:
        whole = tree.measure(enough=EarlyStop(MIB * 100, 200))
        assert (whole.inodes, whole.complete) == (200, True)
        some = tree.measure(enough=EarlyStop(MIB * 100, 150))
        assert (some.inodes, some.complete) == (151, False)


def test_a_directory_that_is_moved_away_hides_nothing(tmp_path: Path) -> None:
    """The walk goes back to a directory it holds, wherever that one is by now."""
    for name in ("a", "b", "a/moved", "a/moved/inner", "a/after"):
        (tmp_path / name).mkdir()
    for name in ("a/moved/inner/file", "a/after/file", "b/file"):
        (tmp_path / name).write_bytes(bytes(MIB))
    over = threading.Event()

    def storm() -> None:
        while not over.is_set():
            (tmp_path / "a/moved").rename(tmp_path / "b/moved")
            (tmp_path / "b/moved").rename(tmp_path / "a/moved")

    moving = threading.Thread(target=storm)
    moving.start()
    try:
        with Tree.at(tmp_path, view="/workspace") as tree:
            found = [tree.measure() for _ in range(200)]
    finally:
        over.set()
        moving.join()
    assert min(one.bytes for one in found) >= 2 * MIB
    assert max(one.bytes for one in found) < 4 * MIB
