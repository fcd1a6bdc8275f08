"""Every walk, watch and copy has an end, and says where it was cut."""

import os
import tracemalloc
from pathlib import Path

import pytest

from sbx.errors import Conflict, TooLarge
from sbx.linux import inotify
from sbx.workspace import copy, edit
from sbx.workspace.files import Files
from sbx.workspace.patterns import Expression
from sbx.workspace.search import Grep
from sbx.workspace.tree import Tree
from sbx.workspace.walk import Walk
from sbx.workspace.watch import Watching


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    for number in range(20):
        (tmp_path / f"d{number % 4}").mkdir(exist_ok=True)
        (tmp_path / f"d{number % 4}" / f"f{number}").write_text("line\n" * 10)
    return Tree.at(tmp_path, view="/workspace")


@pytest.fixture(autouse=True)
def closed(tree: Tree) -> object:
    yield
    tree.close()


@pytest.mark.parametrize(("most", "complete"), [(23, False), (24, True)])
def test_a_walk_ends_at_its_entries(tree: Tree, most: int, complete: bool) -> None:
    walk = Walk(max_entries=most)
    assert len(list(tree.walk(walk))) == min(24, most)
    assert walk.complete is complete


def test_a_walk_ends_at_its_deadline(tree: Tree) -> None:
    walk = Walk(deadline_s=0)
    assert list(tree.walk(walk)) == []
    assert not walk.complete


@pytest.mark.full_tier
def test_what_a_walk_has_yet_to_read_takes_no_path_each(tmp_path: Path) -> None:
    top = tmp_path / "top"
    deep = top.joinpath(*["d"] * 400)
    deep.mkdir(parents=True)
    for number in range(1200):
        (deep / str(number)).mkdir()
    with Tree.at(top, view="/workspace") as deeper:
        tracemalloc.start()
        try:
            found = sum(1 for _ in deeper.walk(Walk(max_entries=1700, deadline_s=30)))
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert found == 1600
    assert peak < 2 << 20  # with all components of each it is 4 MB


def test_a_watch_ends_at_its_depth(tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.joinpath(*["d"] * 200).mkdir(parents=True)
    with Tree.at(top, view="/workspace") as deeper:
        watching = Watching([(deeper, ())], recursive=True)
        try:
            assert len(watching._watched) == 129
            assert watching.take_missed()
        finally:
            watching.close()


def test_a_grep_ends_at_its_deadline_and_its_matches(tree: Tree) -> None:
    expression = Expression("line", regex=False, ignore_case=False)
    late = Grep(expression, None, Walk(deadline_s=0), 99).run([(tree, ())], "/workspace")
    assert (list(late), late.complete) == ([], False)
    cut = Grep(expression, None, Walk(), 15).run([(tree, ())], "/workspace")
    assert (len(cut), cut.complete) == (15, False)


def test_a_copy_beyond_a_bound_leaves_nothing(
    tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Files(tree, None, total_max_bytes=100)
    with pytest.raises(TooLarge) as refused:
        files.copy("d0", "copy")
    assert refused.value.code == "tree_too_large"
    monkeypatch.setattr(copy, "ENTRIES_MAX", 2)
    with pytest.raises(TooLarge):
        Files(tree, None).copy("d0", "copy")
    monkeypatch.setattr(copy, "DEADLINE_S", 0)
    with pytest.raises(TooLarge):
        Files(tree, None).copy("d0", "copy")
    assert sorted(os.listdir(tmp_path)) == ["d0", "d1", "d2", "d3"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_what_a_replacement_would_be_too_large_for_is_never_made(
    tree: Tree, tmp_path: Path, encoding: str
) -> None:
    content = ("a" * (1 << 20)).encode(encoding)
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(TooLarge):  # it would be a TiB
        Files(tree, None).replace("a", "a", "b" * (1 << 20), count=None)
    with pytest.raises(Conflict) as refused:
        Files(tree, None).replace("a", "a", "b" * (1 << 20), count=1)
    assert (refused.value.code, refused.value.details["found"]) == ("replace_count", 1 << 20)
    assert (tmp_path / "a").read_bytes() == content


def test_a_file_that_is_written_meanwhile_is_not_replaced(
    tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = edit.replaced_bytes

    def slow(content: bytes, old: str, new: str, *, most: int) -> tuple[bytes | None, int]:
        (tmp_path / "d0" / "f0").write_text("somebody else's")
        return real(content, old, new, most=most)

    monkeypatch.setattr(edit, "replaced_bytes", slow)
    with pytest.raises(Conflict) as refused:
        Files(tree, None).replace("d0/f0", "line", "x", count=None)
    assert refused.value.code == "file_changed"
    assert (tmp_path / "d0" / "f0").read_text() == "somebody else's"
    assert sorted(os.listdir(tmp_path / "d0")) == ["f0", "f12", "f16", "f4", "f8"]


def test_a_watch_of_too_many_directories_says_so(tree: Tree, tmp_path: Path) -> None:
    watching = Watching([(tree, ())], recursive=True, max_directories=3)
    assert watching.take_missed()
    (tmp_path / "new").mkdir()
    assert {(one.kind, one.path) for one in watching.read()} == {
        ("created", "/workspace/new"),
        ("overflow", "/workspace"),
    }
    watching.close()


def test_what_the_queue_lost_is_told(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    watching = Watching([(tree, ())], recursive=True)
    events = [[inotify.Event(-1, inotify.OVERFLOW, b"")], []]
    monkeypatch.setattr(inotify.Inotify, "read", lambda _: events.pop(0))
    assert [one.kind for one in watching.read()] == ["overflow"]
    watching.close()


def test_a_burst_is_told_once(tree: Tree, tmp_path: Path) -> None:
    watching = Watching([(tree, ())], recursive=True)
    for _ in range(50):
        with (tmp_path / "d0" / "f0").open("a") as file:
            file.write("x")
    assert [(one.kind, one.path) for one in watching.read()] == [("modified", "/workspace/d0/f0")]
    assert watching.read() == []
    watching.close()
