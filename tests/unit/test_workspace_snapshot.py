"""A frozen copy of what was built to be hard to copy, in bounds."""

import json
import os
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from sbx.errors import Closed, Conflict, TooLarge
from sbx.protocol.dry_runs import CHANGES_MAX, FileChange, from_json, to_json
from sbx.workspace.snapshots import scan
from sbx.workspace.snapshots.apply import commit
from sbx.workspace.snapshots.copy import freeze
from sbx.workspace.snapshots.diff import DIFF_MAX, tell
from sbx.workspace.snapshots.journal import Journal
from sbx.workspace.snapshots.manifest import (
    FileNode,
    Manifest,
    PlannedChange,
    changes,
    excluding,
    missed,
    with_specials,
)
from sbx.workspace.snapshots.scan import Bounds, ScanScope, look
from sbx.workspace.tree import Tree

BOUNDS = Bounds(1 << 30)
ALL = ScanScope()
MEMORY = Path("/dev/shm")


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Tree]:
    (tmp_path / "source").mkdir()
    with Tree.at(tmp_path / "source", view="/workspace") as tree:
        yield tree


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Tree]:
    (tmp_path / "target").mkdir()
    with Tree.at(tmp_path / "target", view="/workspace") as tree:
        yield tree


def frozen(source: Tree, target: Tree, bounds: Bounds = BOUNDS, scope: ScanScope = ALL) -> Manifest:
    return freeze(source, target, scope, bounds)[1]


def test_what_is_no_file_is_left_out_and_named(source: Tree, target: Tree, tmp_path: Path) -> None:
    top = tmp_path / "source"
    os.mkfifo(top / "fifo")
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(top / "socket"))
    (top / "link").symlink_to("/etc/shadow")
    (top / "dangling").symlink_to("nowhere")
    base, _ = freeze(source, target, ScanScope(), BOUNDS)
    assert sorted(base.left_out) == ["fifo", "socket"]
    assert os.readlink(tmp_path / "target" / "link") == "/etc/shadow"
    assert sorted(os.listdir(tmp_path / "target")) == ["dangling", "link"]


def test_set_id_bits_are_not_copied(source: Tree, target: Tree, tmp_path: Path) -> None:
    (tmp_path / "source" / "file").write_text("x")
    (tmp_path / "source" / "file").chmod(0o6755)
    (tmp_path / "source" / "directory").mkdir()
    (tmp_path / "source" / "directory").chmod(0o3755)
    frozen(source, target)
    for name in ("file", "directory"):
        assert (tmp_path / "target" / name).stat().st_mode & 0o7777 == 0o755


def test_holes_and_names_of_one_file_are_kept(source: Tree, target: Tree, tmp_path: Path) -> None:
    with open(tmp_path / "source" / "sparse", "wb") as file:
        file.truncate(10 << 30)
        file.seek(5 << 30)
        file.write(b"in the middle")
    (tmp_path / "source" / "below").mkdir()
    os.link(tmp_path / "source" / "sparse", tmp_path / "source" / "below" / "again")
    frozen(source, target, Bounds(1 << 20))
    found = (tmp_path / "target" / "sparse").stat()
    assert (found.st_size, found.st_nlink) == (10 << 30, 2)
    assert found.st_blocks * 512 < 1 << 20
    assert os.path.samefile(tmp_path / "target" / "sparse", tmp_path / "target" / "below" / "again")
    with open(tmp_path / "target" / "sparse", "rb") as file:
        file.seek((5 << 30) - 1)
        assert file.read(15) == b"\0in the middle\0"


def test_a_file_that_is_made_shorter_while_it_is_copied_ends_there(
    source: Tree, target: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between where its data begins and where that ends: ENXIO, as for a hole to the end."""
    file = tmp_path / "source" / "file"
    file.write_bytes(b"x" * 100_000)

    class Hostile:
        def __getattr__(self, name: str) -> object:
            return getattr(os, name)

        def lseek(self, fd: int, at: int, whence: int) -> int:
            if whence == os.SEEK_HOLE:
                os.truncate(file, 0)
            return os.lseek(fd, at, whence)

    monkeypatch.setattr(scan, "os", Hostile())
    monkeypatch.setattr("sbx.workspace.snapshots.copy.clone", lambda *_: False)
    frozen(source, target)
    assert (tmp_path / "target" / "file").read_bytes() == b""


def test_what_was_moved_out_of_sight_while_it_was_copied_is_not_removed_later() -> None:
    """A directory that was listed at neither of its two places."""
    base = Manifest({"seen": node(1, 1), "old": FileNode("directory", identity=(9, 5))}, (), 100)
    now = {
        "new": FileNode("directory", identity=(2, 101)),
        "new/missed": node(1, 3, 99),
        "new/made-since": node(1, 4, 101),
        "renamed": node(1, 1, 101),
    }
    changed = changes(now, base.nodes)
    assert missed(changed, base) == ["new/missed"]
    assert [one.path for one in excluding(changed, missed(changed, base))] == [
        *("new/made-since", "old", "renamed", "seen")
    ]


def test_what_is_spared_stays_with_all_below_it_and_the_directories_above() -> None:
    directory, file = FileNode("directory"), node(1, 1)
    now = {"a": directory, "a/b": directory, "a/b/c": file, "a/x": file, "d": directory}
    now |= {"d/e": file}
    changed = changes(now, {"a": file, "d/f": file})
    assert [one.path for one in excluding(changed, ["a/b"])] == ["a/x", "d", "d/e", "d/f"]
    assert excluding(changed, []) == changed


def test_a_special_file_goes_with_its_directory_only() -> None:
    directory, fifo = FileNode("directory"), FileNode("special")
    before = {"a/fifo": fifo, "fifo": fifo, "b/fifo": fifo, "c/fifo": fifo}
    after = {"a": directory, "c": node(1, 1)}
    assert with_specials(after, before) == {**after, "a/fifo": fifo, "fifo": fifo}


def test_what_is_mounted_inside_is_not_of_the_tree(
    source: Tree, target: Tree, tmp_path: Path
) -> None:
    for name in ("uploads/temparea/covered", "uploads/generated/figure", "shared/other"):
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    uploads, temparea = ("uploads",), ("uploads", "temparea")
    scope = ScanScope((uploads, temparea, ("uploads", "generated")), (temparea, ("shared",)))
    assert set(frozen(source, target, scope=scope).nodes) == {"uploads/generated/figure", "shared"}
    assert (tmp_path / "target" / "uploads" / "temparea").is_dir()


@pytest.mark.parametrize(
    ("bounds", "limit"),
    [(Bounds(5000), 5000), (Bounds(1 << 30, entries_max=9), 9), (replace(BOUNDS, deadline_s=0), 0)],
)
def test_what_is_too_large_is_refused(
    source: Tree, target: Tree, tmp_path: Path, bounds: Bounds, limit: int
) -> None:
    for number in range(10):
        (tmp_path / "source" / str(number)).write_bytes(b"x" * 1000)
    with pytest.raises(TooLarge) as raised:
        frozen(source, target, bounds)
    assert (raised.value.code, raised.value.details["limit"]) == ("workspace_too_large", limit)


def test_paths_that_linux_does_not_take_are_refused(
    source: Tree, target: Tree, tmp_path: Path
) -> None:
    here = os.open(tmp_path / "source", os.O_RDONLY)
    for _ in range(30):
        os.mkdir("d" * 200, dir_fd=here)
        below = os.open("d" * 200, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    with pytest.raises(TooLarge):
        frozen(source, target)


def test_a_copy_that_nobody_waits_for_ends(source: Tree, target: Tree, tmp_path: Path) -> None:
    (tmp_path / "source" / "file").write_text("x")
    stopped = threading.Event()
    stopped.set()
    with pytest.raises(Closed):
        frozen(source, target, replace(BOUNDS, stopped=stopped))


@pytest.mark.skipif(not MEMORY.is_dir(), reason="there is no file system in memory here")
def test_a_write_to_a_mapped_page_is_seen_where_no_time_tells_it(tmp_path: Path) -> None:
    """tmpfs does not stamp a file whose mapped pages are written."""
    import mmap
    import tempfile

    with tempfile.TemporaryDirectory(dir=MEMORY) as directory:
        file = Path(directory) / "file"
        file.write_bytes(bytes(8192))
        with open(file, "r+b") as held, mmap.mmap(held.fileno(), 0) as mapped:
            mapped[0] = 1
            with Tree.at(Path(directory), view="/workspace") as tree:
                before = look(tree, ScanScope(), BOUNDS)
                mapped[0] = 2
                after = look(tree, ScanScope(), BOUNDS)
        assert [one.path for one in changes(before.nodes, after.nodes)] == ["file"]


# -- commit ----------------------------------------------------------------------------------------


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    (tmp_path / "staging").mkdir()
    staging = os.open(tmp_path / "staging", os.O_PATH)
    yield Journal(staging, in_tree=True)
    os.close(staging)


@pytest.mark.parametrize("meanwhile", ["written", "removed", "made", "replaced", "fifo"])
def test_whoever_was_quicker_is_not_overwritten(
    source: Tree, target: Tree, journal: Journal, tmp_path: Path, meanwhile: str
) -> None:
    top = tmp_path / "target"
    for where in (top, tmp_path / "source"):
        (where / "file").write_text("old")
        (where / "gone").write_text("old")
    before = look(target, ScanScope(), BOUNDS).nodes
    (tmp_path / "source" / "file").write_text("new!")
    (tmp_path / "source" / "added").write_text("new")
    (tmp_path / "source" / "gone").unlink()
    wanted = changes(before, look(source, ScanScope(), BOUNDS).nodes)
    match meanwhile:
        case "written":
            (top / "file").write_text("mine")
        case "removed":
            (top / "gone").unlink()
        case "made":
            (top / "added").write_text("mine")
        case "replaced":
            (top / "file").unlink()
            (top / "file").symlink_to("/etc/passwd")
        case "fifo":
            os.mkfifo(top / "added")
    left = described(top)
    with pytest.raises(Conflict) as raised:
        commit(wanted, before, target, source, journal)
    assert raised.value.code == "workspace_changed"
    assert described(top) == left


def described(top: Path) -> dict[str, tuple[int, ...]]:
    """All that a change would show; a symlink that is read has another time of access."""
    found = {path.name: path.lstat() for path in top.iterdir()}
    return {name: (*one[:7], one.st_mtime_ns, one.st_ctime_ns) for name, one in found.items()}


def test_a_directory_that_got_something_meanwhile_is_not_removed(
    source: Tree, target: Tree, journal: Journal, tmp_path: Path
) -> None:
    below = tmp_path / "target" / "below"
    below.mkdir()
    (below / "file").write_text("old")
    before = look(target, ScanScope(), BOUNDS).nodes
    (below / "mine").write_text("x")
    with pytest.raises(Conflict):
        commit(changes(before, {}), before, target, source, journal)
    assert (below / "file").read_text() == "old"
    assert (below / "mine").read_text() == "x"


def access_list(user: int) -> bytes:
    """An ACL by which one more user may read and write: acl(5), linux/posix_acl_xattr.h."""
    entries = [(1, 6, -1), (2, 6, user), (4, 4, -1), (16, 6, -1), (32, 4, -1)]
    packed = (struct.pack("<HHI", tag, perm, one & 0xFFFFFFFF) for tag, perm, one in entries)
    return struct.pack("<I", 2) + b"".join(packed)


@pytest.mark.parametrize("name", ["user.kept", "system.posix_acl_access"])
@pytest.mark.parametrize("changes_content", [True, False])
def test_attributes_of_a_file_stay_when_it_is_replaced(
    source: Tree, target: Tree, journal: Journal, tmp_path: Path, name: str, changes_content: bool
) -> None:
    """A commit makes a new file, and the ACL and the attributes of the old one were lost."""
    file, new = tmp_path / "target" / "file", tmp_path / "source" / "file"
    for one in (file, new):
        one.write_text("old")
    os.link(file, tmp_path / "target" / "other")
    value = access_list(4243) if name.startswith("system") else b"value"
    try:
        os.setxattr(file, name, value)
    except OSError as error:
        pytest.skip(f"the file system has no {name}: {error}")
    if os.geteuid() == 0:
        os.chown(file, -1, 4244)
    group, mode = file.stat().st_gid, file.stat().st_mode & 0o777
    before = look(target, ScanScope(), BOUNDS).nodes
    was = before["file"]
    after = replace(was, size=4, mode=mode) if changes_content else replace(was, mode=mode ^ 0o100)
    new.write_text("new!" if changes_content else "old")
    change = PlannedChange("file", was, after, content=changes_content)
    commit([change], before, target, source, journal)
    assert file.read_text() == new.read_text()
    assert os.getxattr(file, name) == value or name.startswith("system")
    assert name in os.listxattr(file)
    assert (file.stat().st_gid, file.stat().st_mode & 0o777) == (group, after.mode)
    assert (tmp_path / "target" / "other").stat().st_mode & 0o777 == mode


# -- telling ---------------------------------------------------------------------------------------


def node(size: int, inode: int, ctime_ns: int = 0) -> FileNode:
    return FileNode("file", 0o644, size, identity=(inode, ctime_ns))


def test_diffs_and_their_number_are_bounded() -> None:
    wide = PlannedChange("wide", node(200_000, 1), node(200_000, 2))
    lines = [b"\n".join(b"%d %d" % (sign, n) for n in range(30_000)) for sign in (0, 1)]
    described, more = tell([wide], str, lambda _: lines[0][:200_000], lambda _: lines[1][:200_000])
    assert described[0].diff is not None
    assert DIFF_MAX < len(described[0].diff) < DIFF_MAX + 40
    assert described[0].diff.endswith(" more lines)")
    assert more
    many = [PlannedChange(f"{n}", None, node(0, n)) for n in range(CHANGES_MAX + 1)]
    described, more = tell(many, str, lambda _: b"", lambda _: b"")
    assert (len(described), more) == (CHANGES_MAX, True)


def test_all_diffs_together_are_bounded_and_the_rest_is_named() -> None:
    """A diff that was not made because of a bound was left out without a word."""
    many = [PlannedChange(f"{n}", None, replace(node(60_000, n), mode=0o777)) for n in range(100)]
    described, more = tell(many, str, lambda _: b"", lambda _: b"\x01" * 60_000)
    assert more
    assert sum(len(json.dumps(one.diff)) for one in described) < 2 << 20
    expected = "new file mode 100777\ncontent not shown: the other changes are too large"
    assert described[-1].diff == expected


@pytest.mark.parametrize(
    ("kind", "mode", "diff"),
    [
        ("file", 0o644, None),
        ("file", 0o755, "new file mode 100755"),
        ("directory", 0o755, None),
        ("directory", 0o777, "new directory mode 040777"),
    ],
)
def test_unusual_mode_of_what_is_new_is_shown(
    kind: Literal["file", "directory"], mode: int, diff: str | None
) -> None:
    """A new file that everybody may write to looked like any other."""
    described, _ = tell(
        [PlannedChange("x", None, FileNode(kind, mode))], str, lambda _: b"", lambda _: b""
    )
    assert [one.diff for one in described] == [diff]


def test_unusual_mode_of_a_new_directory_with_files_is_shown() -> None:
    """A directory was shown by what lies in it only, whatever its mode was."""
    made = FileNode("file", 0o644)
    for mode, paths in ((0o755, ["d/f"]), (0o777, ["d/", "d/f"])):
        changed = [
            PlannedChange("d", None, FileNode("directory", mode)),
            PlannedChange("d/f", None, made),
        ]
        described, _ = tell(changed, str, lambda _: b"", lambda _: b"")
        assert [one.path for one in described] == paths


def test_no_name_and_no_link_hides_what_it_is() -> None:
    link = FileNode("symlink", text=b"x\n+symlink to y\x1b[2K\xff\\n")
    described, _ = tell(
        [PlannedChange("a\n\u202eb\x9b", None, link)], str, lambda _: b"", lambda _: b""
    )
    assert described[0].path == r"a\n\u202eb\u009b"
    assert described[0].diff == r"+symlink to x\n+symlink to y\x1b[2K\xff\\n"


def test_no_two_names_are_shown_alike() -> None:
    """A newline, and a backslash with an n, were both shown as a backslash with an n."""
    names = ["a\nb", r"a\nb", r"a\\nb", "a\x9b", "a\udc9b", r"a\x9b", "a\u3164", "a"]
    changed = [PlannedChange(name, None, node(0, 1)) for name in names]
    described, _ = tell(changed, str, lambda _: b"", lambda _: b"")
    assert len({one.path for one in described}) == len(names)


def test_content_that_is_not_shown_is_named_with_the_reason() -> None:
    """One NUL, or more bytes than a small text has, made the diff vanish without a word."""
    for content in (b"\0binary", bytes(range(128, 256))):
        change = PlannedChange("x", node(9, 1), node(9, 2))
        described, _ = tell([change], str, lambda _, c=content: c, lambda _: b"text")  # type: ignore[misc]
        assert described[0].diff == "content not shown: binary"
    large = PlannedChange("x", None, node(1 << 30, 1))
    described, _ = tell([large], str, lambda _: b"", lambda _: pytest.fail("it was read"))
    reason = f"content not shown: too large, {1 << 30} bytes"
    assert described[0] == FileChange("x", "added", None, 1 << 30, reason)
    gone = PlannedChange("x", node(9, 1), node(9, 2))
    described, _ = tell([gone], str, lambda _: None, lambda _: b"text")
    assert described[0].diff == "content not shown: it cannot be read"


def test_byte_that_is_not_utf8_hides_no_other_line() -> None:
    """One such byte made the diff vanish."""
    change = PlannedChange("x", node(9, 1), node(9, 2))
    described, _ = tell(
        [change], str, lambda _: b"caf\xe9\nold\n", lambda _: b"caf\xe9\nnew \xff\n"
    )
    assert described[0].diff == "@@ -1,2 +1,2 @@\n caf\\xe9\n-old\n+new \\xff"


def test_a_change_goes_over_the_wire_and_back() -> None:
    change = FileChange("/workspace/a", "changed", 1, 2, "@@ -1,1 +1,1 @@")
    assert from_json(to_json(change)) == change
    for broken in ({**to_json(change), "kind": "x"}, {**to_json(change), "size_after": "1"}):
        with pytest.raises(ValueError, match=r"`\$.kind`|`\$.size_after`"):
            from_json(broken)
