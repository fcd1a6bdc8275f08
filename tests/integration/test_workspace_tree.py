"""`Tree` on a real file system, by openat2 and by the walk for hosts without it."""

import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sbx.errors import InvalidPath, NotFound, TooLarge, Unavailable
from sbx.linux import libc
from sbx.workspace import safe_open
from sbx.workspace.tree import Tree

BIG = 1 << 20


@pytest.fixture(params=[safe_open.by_openat2, safe_open.by_walk], ids=["openat2", "walk"])
def opener(request: pytest.FixtureRequest) -> safe_open.Opener:
    found: safe_open.Opener = request.param
    return found


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "files").mkdir()
    return tmp_path / "files"


@pytest.fixture
def tree(root: Path, opener: safe_open.Opener) -> Iterator[Tree]:
    tree = Tree(os.open(root, os.O_PATH), view="/workspace", opener=opener)
    yield tree
    tree.close()


def reason(error: pytest.ExceptionInfo[InvalidPath]) -> str:
    return str(error.value.details["reason"])


def test_write_replaces_content_and_keeps_permissions(tree: Tree, root: Path) -> None:
    (root / "run.sh").write_text("old")
    (root / "run.sh").chmod(0o750)
    tree.write(("run.sh",), [b"n", b"ew"], max_bytes=BIG)
    assert (root / "run.sh").read_text() == "new"
    assert stat.S_IMODE((root / "run.sh").stat().st_mode) == 0o750


def test_write_beyond_the_limit_keeps_what_was_there(tree: Tree, root: Path) -> None:
    tree.write(("a",), b"old", max_bytes=BIG)
    with pytest.raises(TooLarge) as raised:
        tree.write(("a",), (b"x" * 10 for _ in range(10)), max_bytes=50)
    assert raised.value.details["limit"] == 50
    assert tree.read(("a",), max_bytes=BIG) == b"old"
    assert os.listdir(root) == ["a"]


def test_write_from_a_body_that_breaks_off_keeps_what_was_there(tree: Tree, root: Path) -> None:
    def body() -> Iterator[bytes]:
        yield b"half"
        raise ConnectionResetError("the client left")

    tree.write(("a",), b"old", max_bytes=BIG)
    with pytest.raises(ConnectionResetError):
        tree.write(("a",), body(), max_bytes=BIG)
    assert tree.read(("a",), max_bytes=BIG) == b"old"
    assert os.listdir(root) == ["a"]


def test_write_by_way_of_staging_shows_no_temporary_name(
    tmp_path: Path, root: Path, opener: safe_open.Opener
) -> None:
    (tmp_path / "staging").mkdir()
    staging = os.open(tmp_path / "staging", os.O_PATH)
    tree = Tree(os.open(root, os.O_PATH), view="/w", staging=staging, opener=opener)
    seen: list[list[str]] = []

    def body() -> Iterator[bytes]:
        yield b"x"
        seen.append(os.listdir(root))

    tree.write(("a",), body(), max_bytes=BIG)
    assert seen == [[]]
    assert os.listdir(root) == ["a"]
    assert os.listdir(tmp_path / "staging") == []
    tree.close()
    os.close(staging)


def test_a_deep_directory_is_made_below_its_parent(root: Path) -> None:
    """Each step was opened from the top: to restore a tree of depth 1500 took minutes."""
    opened: list[int] = []

    def counting(top: int, relative: tuple[str, ...], flags: int) -> int:
        opened.append(len(relative))
        return safe_open.by_openat2(top, relative, flags)

    with Tree(os.open(root, os.O_PATH), view="/workspace", opener=counting) as tree:
        tree.make_directory(("a",) * 100)
        opened.clear()
        tree.make_directory(("a",) * 101)
        assert len(opened) <= 4


def test_write_onto_a_directory_is_refused(tree: Tree) -> None:
    tree.make_directory(("d",))
    with pytest.raises(InvalidPath) as raised:
        tree.write(("d",), b"", max_bytes=BIG)
    assert reason(raised) == "is_a_directory"


def test_write_below_a_file_is_refused(tree: Tree) -> None:
    tree.write(("f",), b"", max_bytes=BIG)
    with pytest.raises(InvalidPath) as raised:
        tree.write(("f", "g"), b"", max_bytes=BIG)
    assert reason(raised) == "not_a_directory"


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")
def test_what_root_writes_belongs_to_the_jail(root: Path, opener: safe_open.Opener) -> None:
    os.chown(root, 65534, 65534)
    tree = Tree(os.open(root, os.O_PATH), view="/w", owner=(65534, 65534), opener=opener)
    tree.write(("d", "f"), b"x", max_bytes=BIG)
    assert {(root / "d").stat().st_uid, (root / "d/f").stat().st_gid} == {65534}
    tree.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="a small file system of its own needs root")
def test_write_to_a_full_disk_says_no_space_and_keeps_what_was_there(
    root: Path, opener: safe_open.Opener
) -> None:
    def fill() -> None:
        libc.call("unshare", 0x20000)  # CLONE_NEWNS
        libc.call("mount", None, b"/", None, 0x44000, None)  # MS_REC | MS_PRIVATE
        libc.call("mount", b"small", bytes(root), b"tmpfs", 0, b"size=64k")
        with Tree(os.open(root, os.O_PATH), view="/w", opener=opener) as tree:
            tree.write(("a",), b"old", max_bytes=BIG)
            with pytest.raises(Unavailable) as raised:
                tree.write(("a",), b"x" * 100_000, max_bytes=BIG)
            assert raised.value.code == "no_space"
            assert tree.read(("a",), max_bytes=BIG) == b"old"
            assert os.listdir(root) == ["a"]

    child = os.fork()
    if child == 0:
        code = 1
        try:
            fill()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_read_of_what_is_missing_is_not_found(tree: Tree) -> None:
    with pytest.raises(NotFound) as raised:
        tree.read(("no", "such"), max_bytes=BIG)
    assert raised.value.code == "file_not_found"
    assert "/workspace/no/such" in raised.value.message


def test_read_beyond_the_limit_is_too_large(tree: Tree) -> None:
    tree.write(("a",), b"x" * 100, max_bytes=BIG)
    with pytest.raises(TooLarge) as raised:
        tree.read(("a",), max_bytes=99)
    assert raised.value.details["limit"] == 99


def test_read_of_a_directory_is_refused(tree: Tree) -> None:
    with pytest.raises(InvalidPath) as raised:
        tree.read((), max_bytes=BIG)
    assert reason(raised) == "is_a_directory"


def test_open_streams_ranges(tree: Tree) -> None:
    tree.write(("a",), bytes(range(100)), max_bytes=BIG)
    with tree.open(("a",)) as file:
        assert file.size == 100
        assert b"".join(file.chunks(10, 5)) == bytes(range(10, 15))
        assert b"".join(file.chunks(95, 50)) == bytes(range(95, 100))
        assert b"".join(file.chunks(200)) == b""


def test_list_tells_kinds_sizes_and_inside_paths(tree: Tree, root: Path) -> None:
    before = time.time() - 5
    (root / "f").write_bytes(b"abc")
    (root / "d").mkdir()
    (root / "l").symlink_to("f")
    os.mkfifo(root / "p")
    entries = {entry.name: entry for entry in tree.list()}
    kinds = {name: entry.kind for name, entry in entries.items()}
    assert kinds == {"f": "file", "d": "directory", "l": "symlink", "p": "other"}
    assert entries["f"].path == "/workspace/f"
    assert (entries["f"].size, entries["d"].size) == (3, None)
    assert entries["f"].modified_s > before


def test_list_goes_as_deep_as_asked(tree: Tree) -> None:
    tree.write(("a", "b", "c"), b"", max_bytes=BIG)
    assert [entry.name for entry in tree.list()] == ["a"]
    assert [entry.name for entry in tree.list(max_depth=2)] == ["a", "b"]
    assert [entry.path for entry in tree.list(("a",), max_depth=9)] == [
        "/workspace/a/b",
        "/workspace/a/b/c",
    ]


def test_list_says_when_it_was_cut(tree: Tree) -> None:
    for number in range(5):
        tree.write((str(number),), b"", max_bytes=BIG)
    assert tree.list(max_entries=5).complete
    cut = tree.list(max_entries=4)
    assert (len(cut), cut.complete) == (4, False)


def test_list_shows_names_that_are_not_utf8(tree: Tree, root: Path) -> None:
    (root / os.fsdecode(b"bad\xff")).touch()
    assert [entry.name for entry in tree.list()] == ["bad\\xff"]


def test_stat_tells_of_a_symlink_itself(tree: Tree, root: Path) -> None:
    (root / "l").symlink_to("/etc/passwd")
    assert tree.stat(("l",)).kind == "symlink"
    assert tree.stat(()).kind == "directory"


def test_delete_takes_files_directories_and_names_what_is_missing(tree: Tree, root: Path) -> None:
    tree.write(("d", "e", "f"), b"", max_bytes=BIG)
    tree.write(("g",), b"", max_bytes=BIG)
    assert tree.delete(("d",))
    assert tree.delete(("g",))
    assert os.listdir(root) == []
    with pytest.raises(NotFound):
        tree.delete(("d",))


def test_measure_counts_blocks_and_each_hardlink_once(tree: Tree, root: Path) -> None:
    empty = tree.measure()
    tree.write(("a",), b"x" * 100_000, max_bytes=BIG)
    os.link(root / "a", root / "b")
    usage = tree.measure()
    assert usage.files == 2
    assert usage.complete
    assert 100_000 <= usage.bytes - empty.bytes < 150_000


@pytest.mark.full_tier
def test_measure_finds_what_is_hidden_below_any_depth(tree: Tree, root: Path) -> None:
    fd = os.open(root, os.O_RDONLY)
    for _ in range(3000):  # 4 097 bytes and more are no path any more
        os.mkdir("dd", dir_fd=fd)
        below = os.open("dd", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    hidden = os.open("f", os.O_CREAT | os.O_WRONLY, dir_fd=fd)
    os.write(hidden, b"x" * BIG)
    os.close(hidden)
    os.close(fd)
    usage = tree.measure(deadline_s=30)
    assert usage.complete
    assert usage.bytes >= BIG
    assert tree.delete(("dd",))


def test_measure_that_runs_out_of_entries_says_so(tree: Tree) -> None:
    for number in range(5):
        tree.write((str(number),), b"", max_bytes=BIG)
    assert not tree.measure(max_entries=4).complete
    assert not tree.measure(deadline_s=0).complete


@pytest.mark.parametrize("relative", [("..",), ("a", "..", "b"), ("a/b",), ("",), ("a\0",)])
def test_a_component_that_is_not_plain_never_reaches_linux(
    tree: Tree, relative: tuple[str, ...]
) -> None:
    with pytest.raises(InvalidPath):
        tree.stat(relative)


def test_no_fd_is_left_open_by_refusals(tree: Tree, root: Path) -> None:
    (root / "l").symlink_to("f")
    os.mkfifo(root / "p")
    before = len(os.listdir("/proc/self/fd"))
    for name in ("l", "p", "missing"):
        with pytest.raises((InvalidPath, NotFound)):
            tree.read((name, "x"), max_bytes=1)
        with pytest.raises((InvalidPath, NotFound)):
            tree.read((name,), max_bytes=1)
    assert len(os.listdir("/proc/self/fd")) == before
