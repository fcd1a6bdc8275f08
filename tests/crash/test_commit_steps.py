"""Changes are made all or none, whichever step of the host fails."""

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sbx.errors import Broken, Unavailable
from sbx.workspace import committing
from sbx.workspace.changes import Nodes, changes
from sbx.workspace.snapshot import Bounds, Scope, look
from sbx.workspace.tree import Tree

BOUNDS = Bounds(1 << 30)
STEPS_MAX = 200
_CHANGING = ("chmod", "chown", "link", "mkdir", "rename", "rmdir", "symlink", "utime")


class Failing:
    """The module `os`, or a function: from the step `first` on so many of them fail, ENOSPC."""

    def __init__(self, first: int, count: int) -> None:
        self.left = first
        self.count = count
        self.steps = 0

    def step(self, act: Callable[..., Any]) -> Callable[..., Any]:
        def maybe(*words: Any, **named: Any) -> Any:
            self.steps += 1
            if self.left < self.steps <= self.left + self.count:
                raise OSError(errno.ENOSPC, "no space, says the test")
            return act(*words, **named)

        return maybe

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        return self.step(real) if name in _CHANGING else real

    def put_in(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(committing, "os", self)
        for name in ("exchange", "rename_new", "copy_content"):
            patch.setattr(committing, name, self.step(getattr(committing, name)))


def build(top: Path, text: str, *, later: bool) -> None:
    top.mkdir()
    for name in ("changed", "stays", "stamped"):
        (top / name).write_text("same" if name != "changed" else text)
    os.utime(top / "stamped", ns=(1, 2 if later else 1))
    (top / "becomes").symlink_to(text)
    (top / "kept").mkdir()
    (top / "kept" / text).write_text(text)
    (top / "kept").chmod(0o755 if later else 0o555)
    below = top / f"only-{text}"
    below.mkdir()
    (below / "deep").mkdir()
    (below / "deep" / "file").write_text(text)
    os.link(below / "deep" / "file", below / "again")
    if later:
        (top / "kind").mkdir()
    else:
        (top / "kind").write_text("a file")


@pytest.fixture
def trees(tmp_path: Path) -> Iterator[tuple[Tree, Tree, int]]:
    build(tmp_path / "target", "old", later=False)
    build(tmp_path / "source", "newer", later=True)
    (tmp_path / "staging").mkdir()
    staging = os.open(tmp_path / "staging", os.O_RDONLY)
    with (
        Tree.at(tmp_path / "target", view="/workspace") as target,
        Tree.at(tmp_path / "source", view="/workspace") as source,
    ):
        yield target, source, staging
    os.close(staging)


def nodes(tree: Tree) -> Nodes:
    return look(tree, Scope(), BOUNDS).nodes


def test_whichever_step_fails_nothing_was_changed(
    trees: tuple[Tree, Tree, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, source, staging = trees
    for step in range(STEPS_MAX):
        before, wanted = nodes(target), nodes(source)
        failing = Failing(step, 1)
        with monkeypatch.context() as patch:
            failing.put_in(patch)
            try:
                committing.commit(changes(before, wanted), before, target, source, staging=staging)
            except Unavailable as error:
                told = error.code
            else:
                break
        assert (told, nodes(target) == before) == ("no_space", True), f"after the step {step}"
        assert os.listdir(staging) == []
    assert step > 20
    assert nodes(target) == wanted
    assert os.listdir(staging) == []


def test_no_directory_of_others_is_emptied_in_place_of_the_staging(tmp_path: Path) -> None:
    """In the tree itself code inside sees the name, and may give it to another one."""
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "file").write_text("kept")
    (tmp_path / "file").write_text("old")
    with Tree.at(tmp_path, view="/workspace") as target:
        with committing._staging(target, target.fd) as stage:
            os.mkdir("1", dir_fd=stage)
            [name] = [one for one in os.listdir(tmp_path) if one.startswith(".sbx-")]
            (tmp_path / name).rename(tmp_path / "moved")
            (tmp_path / "foreign").rename(tmp_path / name)
        assert (tmp_path / name / "file").read_text() == "kept"
        assert list((tmp_path / "moved").iterdir()) == []


def test_what_cannot_be_undone_is_told_and_nothing_of_it_is_thrown_away(
    trees: tuple[Tree, Tree, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, source, staging = trees
    before, wanted = nodes(target), nodes(source)
    with monkeypatch.context() as patch:
        Failing(20, STEPS_MAX).put_in(patch)
        with pytest.raises(Broken) as raised:
            committing.commit(changes(before, wanted), before, target, source, staging=staging)
    assert raised.value.code == "commit_not_undone"
    assert os.listdir(staging) != []
