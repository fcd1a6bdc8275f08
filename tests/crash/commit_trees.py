"""Two trees, a commit that makes the one the other by every kind of step, and steps that fail."""

import errno
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sbx.workspace import rmtree
from sbx.workspace.snapshots import apply, journal, recover, staging
from sbx.workspace.snapshots.journal import Journal
from sbx.workspace.snapshots.manifest import Nodes, changes
from sbx.workspace.snapshots.scan import Bounds, ScanScope, look
from sbx.workspace.tree import Tree

STEPS_MAX = 300
_BOUNDS = Bounds(1 << 30)
_CHANGING = (
    "chmod",
    "chown",
    "fchown",
    "fsync",
    "link",
    "mkdir",
    "rename",
    "rmdir",
    "symlink",
    "unlink",
    "utime",
)
_FUNCTIONS = ("copy_content", "exchange", "rename_new")


class Steps:
    """Stands for the module `os`, and for functions, where a commit is made and undone: counts what
    changes something, and calls `at` with the number of each before it is done. Nothing is synced:
    what is killed leaves its writes to linux."""

    def __init__(self, at: Callable[[int], None]) -> None:
        self._at = at
        self.done = 0

    def step(self, act: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*words: Any, **named: Any) -> Any:
            self.done += 1
            self._at(self.done)
            return act(*words, **named)

        return counted

    def __getattr__(self, name: str) -> Any:
        real = (lambda fd: None) if name == "fsync" else getattr(os, name)
        return self.step(real) if name in _CHANGING else real

    def put_in(self, patch: pytest.MonkeyPatch, *others: ModuleType) -> None:
        for module in (apply, journal, staging, recover, *others):
            patch.setattr(module, "os", self)
            for name in _FUNCTIONS:
                if hasattr(module, name):
                    patch.setattr(module, name, self.step(getattr(module, name)))
            if hasattr(module, "syncfs"):
                patch.setattr(module, "syncfs", self.step(lambda fd: None))


def failing(first: int, count: int) -> Steps:
    """From the step after `first` on so many fail, ENOSPC."""

    def at(step: int) -> None:
        if first < step <= first + count:
            raise OSError(errno.ENOSPC, "no space, says the test")

    return Steps(at)


def killed(act: Callable[[], object], before: int) -> bool:
    """Do it in a process that is killed before its step of this number; False when it had fewer."""
    child = os.fork()
    if child == 0:
        code = 1
        try:

            def at(step: int) -> None:
                if step == before:
                    os.kill(os.getpid(), signal.SIGKILL)

            Steps(at).put_in(pytest.MonkeyPatch(), rmtree)
            act()
            code = 0
        except BaseException:  # noqa: BLE001  # no fork of pytest goes on
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) in (0, -signal.SIGKILL)
    return os.WIFSIGNALED(status)


@dataclass(frozen=True, slots=True)
class Trees:
    """`target` is to become what `source` is. `staging` is the path of the directory fd in
    `journal`."""

    target: Tree
    source: Tree
    path: Path
    staging: Path
    journal: Journal

    @property
    def now(self) -> Nodes:
        return look(self.target, ScanScope(), _BOUNDS).nodes

    @property
    def wanted(self) -> Nodes:
        return look(self.source, ScanScope(), _BOUNDS).nodes

    def commit(self) -> None:
        now = self.now
        apply.commit(changes(now, self.wanted), now, self.target, self.source, self.journal)

    def roll_back(self) -> bool:
        return recover.recover(self.journal.directory, self.target.fd)


@contextmanager
def made(
    top: Path, *, in_tree: bool = False, owner: tuple[int, int] | None = None
) -> Iterator[Trees]:
    _build(top / "target", "old", later=False)
    _build(top / "source", "newer", later=True)
    (top / "staging").mkdir()
    host = top / "target" if in_tree else None
    with ExitStack() as held:
        target, source = (
            held.enter_context(Tree.at(top / name, view="/workspace"))
            for name in ("target", "source")
        )
        if owner is not None:
            target.owner = owner
            for path in (top / "target", *(top / "target").rglob("*")):
                os.chown(path, *owner, follow_symlinks=False)
        staging = os.open(top / "staging", os.O_PATH)
        held.callback(os.close, staging)
        journal = Journal(staging, in_tree=in_tree, host=host)
        yield Trees(target, source, top / "target", top / "staging", journal)


def _build(top: Path, text: str, *, later: bool) -> None:
    top.mkdir(parents=True)
    for name in ("changed", "stays", "stamped"):
        (top / name).write_text("same" if name != "changed" else text)
    (top / "becomes").symlink_to(text)
    (top / "kept").mkdir()
    (top / "kept" / text).write_text(text)
    (top / "kept").chmod(0o755 if later else 0o555)
    below = top / f"only-{text}"
    below.mkdir()
    (below / "deep").mkdir()
    (below / "deep" / "file").write_text(text)
    os.link(below / "deep" / "file", below / "again")
    (below / "deep").chmod(0o755 if later else 0o500)
    if later:
        (top / "kind").mkdir()
        (top / "dir").write_text("a file")
    else:
        (top / "kind").write_text("a file")
        (top / "dir").mkdir(mode=0o555)
    _set_times(top, later=later)


def _set_times(top: Path, *, later: bool) -> None:
    """Give the files times of their own. The file system's clock gives two writes the same time, or
    two times, as the machine is quick or busy, and a commit has one step more for each time."""
    for path in top.rglob("*"):
        if path.is_file() and not path.is_symlink():
            written = 2 if later and path.name != "stays" else 1
            os.utime(path, ns=(written, written))
