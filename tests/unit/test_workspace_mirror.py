"""A copy that live code writes to hides nothing: a comparison is with the original."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from sbx.workspace.snapshots import mirror
from sbx.workspace.snapshots.copy import freeze, settle
from sbx.workspace.snapshots.journal import Journal
from sbx.workspace.snapshots.manifest import PlannedChange
from sbx.workspace.snapshots.mirror import Mirror
from sbx.workspace.snapshots.scan import Bounds, ScanScope
from sbx.workspace.tree import Tree

BOUNDS = Bounds(1 << 30)


class Mirrored:
    """A project with a copy; `meanwhile` is what live code does once the copy has been restored."""

    def __init__(self, project: Path, copy: Path, held: ExitStack) -> None:
        self.project, self.copy = project, copy
        staging = project.parent / "staging"
        staging.mkdir()
        fd = os.open(staging, os.O_PATH)
        held.callback(os.close, fd)
        self._journal = Journal(fd)
        self._original = held.enter_context(Tree.at(project, view="/workspace"))
        self._tree = held.enter_context(Tree.at(copy, view="/workspace"))
        self._mirror = Mirror(*freeze(self._original, self._tree, ScanScope(), BOUNDS), ScanScope())

    def changed(self) -> list[PlannedChange]:
        return self._mirror.compare(self._original, self._tree, BOUNDS)[0]

    def restore(self) -> None:
        self._mirror.restore(self._original, self._tree, self._journal, BOUNDS)

    def accept(self) -> list[PlannedChange]:
        """Make what was changed in the copy in the project, too."""
        changed = self.changed()
        for one in changed:
            (self.project / one.path).write_bytes((self.copy / one.path).read_bytes())
        self._mirror.accept(changed, self._original)
        return changed


@pytest.fixture
def mirrored(tmp_path: Path) -> Iterator[Mirrored]:
    project, copy = tmp_path / "project", tmp_path / "copy"
    project.mkdir()
    copy.mkdir()
    (project / "main.py").write_text("answer = 42\n")
    (project / "link").symlink_to("main.py")
    (project / "below").mkdir()
    with ExitStack() as held:
        yield Mirrored(project, copy, held)


def meanwhile(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Let live code act after the renames of a restore, and before their results are noted."""

    def settled() -> int:
        act()
        return settle()

    monkeypatch.setattr(mirror, "settle", settled)


def test_mode_that_live_code_sets_while_copy_is_restored_is_a_change(
    mirrored: Mirrored, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread waited for the new inode of a restored file and made it 0777: the next diff showed
    one added line, and the file was 0777 after the commit."""
    file = mirrored.copy / "main.py"
    file.write_text("theirs\n")
    meanwhile(monkeypatch, lambda: file.chmod(0o777))
    mirrored.restore()
    with file.open("a") as added:
        added.write("more = 1\n")
    (change,) = mirrored.changed()
    assert change.before is not None
    assert change.after is not None
    assert (change.before.mode, change.after.mode) == (0o644, 0o777)
    assert change.before.size == len("answer = 42\n")


@pytest.mark.parametrize("how", ["content", "removed", "link", "directory"])
def test_whatever_live_code_does_while_copy_is_restored_is_a_change(
    mirrored: Mirrored, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """What live code did before the nodes of the copy were read again was never shown."""
    file, link = mirrored.copy / "main.py", mirrored.copy / "link"
    file.write_text("theirs\n")
    link.unlink()

    def act() -> None:
        match how:
            case "content":
                found = file.stat()
                file.write_text("answer = 43\n")
                os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))
            case "removed":
                file.unlink()
            case "link":
                link.unlink()
                link.symlink_to("/etc/passwd")
            case "directory":
                (mirrored.copy / "below").chmod(0o777)

    meanwhile(monkeypatch, act)
    mirrored.restore()
    monkeypatch.undo()
    names = {"content": "main.py", "removed": "main.py", "link": "link", "directory": "below"}
    assert [one.path for one in mirrored.changed()] == [names[how]]
    mirrored.restore()
    assert mirrored.changed() == []
    assert file.read_text() == "answer = 42\n"


def test_accepted_file_that_is_written_again_at_once_is_a_change(mirrored: Mirrored) -> None:
    """Two writes in one tick of the clock have the same ctime."""
    file = mirrored.copy / "main.py"
    file.write_text("answer = 43\n")
    found = file.stat()
    assert len(mirrored.accept()) == 1
    with file.open("r+") as again:
        again.write("answer = 44\n")
    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert [one.path for one in mirrored.changed()] == ["main.py"]
    mirrored.restore()
    assert file.read_text() == "answer = 43\n"
