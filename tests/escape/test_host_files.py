"""Code inside builds or moves files so that the host harms itself with them: one attack each.

Both ways to open run every attack: openat2, and the walk for hosts without it.
"""

import fcntl
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sbx.errors import Conflict, InvalidPath, NotFound, SbxError, TooLarge
from sbx.linux import libc
from sbx.workspace import safe_open
from sbx.workspace.tree import Tree

SECRET = b"host secret"
BIG = 1 << 20
NOBODY = 65534
CLONE_NEWNS, MS_BIND, MS_REC, MS_PRIVATE = 0x20000, 0x1000, 0x4000, 0x40000
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="setting up this attack needs root")


@pytest.fixture(params=[safe_open.by_openat2, safe_open.by_walk], ids=["openat2", "walk"])
def opener(request: pytest.FixtureRequest) -> safe_open.Opener:
    found: safe_open.Opener = request.param
    return found


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret").write_bytes(SECRET)
    return tmp_path / "outside"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "files").mkdir()
    return tmp_path / "files"


@pytest.fixture
def tree(root: Path, opener: safe_open.Opener) -> Iterator[Tree]:
    with Tree(os.open(root, os.O_PATH), view="/workspace", opener=opener) as tree:
        yield tree


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(InvalidPath) as raised:
        call()
    return str(raised.value.details["reason"])


def in_child(action: Callable[[], bool]) -> bool:
    """What `action` says in a child of ours, whose mounts end with it."""
    child = os.fork()
    if child == 0:
        code = 2
        try:
            code = 0 if action() else 1
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 1), "the attack could not be set up"
    return code == 0


def test_read_of_a_symlink_to_a_host_file(tree: Tree, root: Path, outside: Path) -> None:
    (root / "link").symlink_to(outside / "secret")
    assert refused(lambda: tree.read(("link",), max_bytes=BIG)) == "symlink"


def test_read_through_a_symlinked_directory(tree: Tree, root: Path, outside: Path) -> None:
    (root / "d").symlink_to(outside)
    assert refused(lambda: tree.read(("d", "secret"), max_bytes=BIG)) == "symlink"


def test_read_through_a_relative_symlink(tree: Tree, root: Path, outside: Path) -> None:
    (root / "d").mkdir()
    (root / "d/up").symlink_to("../../outside")
    assert refused(lambda: tree.read(("d", "up", "secret"), max_bytes=BIG)) == "symlink"


def test_read_through_a_magic_link_of_proc(tree: Tree, root: Path, outside: Path) -> None:
    (root / "d").symlink_to("/proc/self/root")
    parts = ("d", *outside.parts[1:], "secret")
    assert refused(lambda: tree.read(parts, max_bytes=BIG)) == "symlink"


def test_write_through_a_symlinked_directory(tree: Tree, root: Path, outside: Path) -> None:
    (root / "d").symlink_to(outside)
    assert refused(lambda: tree.write(("d", "planted"), b"x", max_bytes=BIG)) == "symlink"
    assert refused(lambda: tree.write(("d", "new", "x"), b"x", max_bytes=BIG)) == "symlink"
    assert os.listdir(outside) == ["secret"]


def test_write_onto_a_symlink_replaces_the_link_only(tree: Tree, root: Path, outside: Path) -> None:
    (root / "link").symlink_to(outside / "secret")
    tree.write(("link",), b"mine", max_bytes=BIG)
    assert (outside / "secret").read_bytes() == SECRET
    assert (root / "link").read_bytes() == b"mine"
    assert not (root / "link").is_symlink()


def test_write_onto_a_hardlink_leaves_the_other_name_alone(
    tree: Tree, root: Path, outside: Path
) -> None:
    os.link(outside / "secret", root / "link")
    tree.write(("link",), b"mine", max_bytes=BIG)
    assert (outside / "secret").read_bytes() == SECRET


def test_write_never_makes_a_set_id_file(tree: Tree, root: Path) -> None:
    tree.write(("a",), b"x", max_bytes=BIG, mode=0o6755)
    (root / "b").touch()
    (root / "b").chmod(0o4755)
    tree.write(("b",), b"x", max_bytes=BIG)
    assert not (root / "a").stat().st_mode & 0o6000
    assert not (root / "b").stat().st_mode & 0o6000


@needs_root
def test_read_of_a_hardlink_to_a_file_of_the_host(
    root: Path, outside: Path, opener: safe_open.Opener
) -> None:
    os.link(outside / "secret", root / "link")  # the secret is root's, the jail is nobody
    fd = os.open(root, os.O_PATH)
    with Tree(fd, view="/w", owner=(NOBODY, NOBODY), opener=opener) as tree:
        assert refused(lambda: tree.read(("link",), max_bytes=BIG)) == "hardlink"


def test_read_of_a_fifo_that_nobody_writes_does_not_wait(tree: Tree, root: Path) -> None:
    os.mkfifo(root / "fifo")
    assert refused(lambda: tree.read(("fifo",), max_bytes=BIG)) == "not_a_file"


def test_write_onto_a_fifo_replaces_it_and_does_not_wait(tree: Tree, root: Path) -> None:
    os.mkfifo(root / "fifo")
    tree.write(("fifo",), b"x", max_bytes=BIG)
    assert tree.read(("fifo",), max_bytes=BIG) == b"x"


def test_read_of_a_socket(tree: Tree, root: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(root / "s"))
        assert refused(lambda: tree.read(("s",), max_bytes=BIG)) == "not_a_file"


@needs_root
def test_read_of_a_device(tree: Tree, root: Path) -> None:
    os.mknod(root / "zero", 0o20666, os.makedev(1, 5))
    assert refused(lambda: tree.read(("zero",), max_bytes=BIG)) == "not_a_file"


def test_read_of_a_leased_file_does_not_wait_for_the_lease_to_break(tree: Tree, root: Path) -> None:
    fd = os.open(root / "f", os.O_RDWR | os.O_CREAT)
    fcntl.fcntl(fd, fcntl.F_SETSIG, 23)  # SIGURG, which is ignored: not SIGIO, which kills
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    with pytest.raises(Conflict) as raised:
        tree.read(("f",), max_bytes=BIG)
    os.close(fd)
    assert raised.value.code == "file_busy"  # who waits, for 45 s, reads the file


def test_read_of_a_sparse_file_of_a_tebibyte(tree: Tree, root: Path) -> None:
    with (root / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(TooLarge):
        tree.read(("sparse",), max_bytes=BIG)


def test_a_sparse_file_does_not_count_as_used(tree: Tree, root: Path) -> None:
    with (root / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    assert tree.measure().bytes < BIG


def test_a_file_that_grows_while_it_is_read_ends_where_it_ended(tree: Tree, root: Path) -> None:
    (root / "f").write_bytes(b"x" * 100)
    received = 0
    with tree.open(("f",)) as file, (root / "f").open("ab", buffering=0) as writer:
        writer.write(b"y" * BIG)
        for chunk in file.chunks():
            received += len(chunk)
            writer.write(b"y" * BIG)
    assert received == 100


def test_a_file_that_shrinks_while_it_is_read_ends_early(tree: Tree, root: Path) -> None:
    (root / "f").write_bytes(b"x" * 100)
    with tree.open(("f",)) as file:
        os.truncate(root / "f", 10)
        assert b"".join(file.chunks()) == b"x" * 10


def test_a_directory_swapped_with_a_symlink_never_leads_out(
    tree: Tree, root: Path, outside: Path
) -> None:
    (root / "d").mkdir()
    (root / "d/secret").write_bytes(b"inside")
    (root / "link").symlink_to(outside)
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            for old, new in (("d", "spare"), ("link", "d"), ("d", "link"), ("spare", "d")):
                os.rename(root / old, root / new)

    swapper = threading.Thread(target=swap)
    swapper.start()
    seen = set()
    try:
        for _ in range(2000):
            try:
                seen.add(tree.read(("d", "secret"), max_bytes=BIG))
            except SbxError:
                continue
    finally:
        stop.set()
        swapper.join()
    assert seen <= {b"inside"}
    assert os.listdir(outside) == ["secret"]


def test_writes_into_a_directory_swapped_with_a_symlink_never_land_outside(
    tree: Tree, root: Path, outside: Path
) -> None:
    (root / "link").symlink_to(outside)
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            try:
                os.rename(root / "link", root / "d")
                os.rename(root / "d", root / "link")
                os.rename(root / "d", root / "old")
            except OSError:
                continue  # the host made a directory in between: the point of the race

    swapper = threading.Thread(target=swap)
    swapper.start()
    try:
        for number in range(300):
            try:
                tree.write(("d", str(number)), b"x", max_bytes=BIG)
            except SbxError:
                continue
    finally:
        stop.set()
        swapper.join()
    assert os.listdir(outside) == ["secret"]


def test_a_fifo_swapped_in_after_the_look_does_not_block(root: Path, outside: Path) -> None:
    (root / "f").write_bytes(b"x")
    os.mkfifo(root / "fifo")

    def racing(fd: int, relative: tuple[str, ...], flags: int) -> int:
        if not flags & os.O_PATH:  # the code inside wins the race: its turn is exactly now
            os.replace(root / "fifo", root / "f")
        return safe_open.opener()(fd, relative, flags)

    with Tree(os.open(root, os.O_PATH), view="/w", opener=racing) as tree:
        assert refused(lambda: tree.read(("f",), max_bytes=BIG)) == "not_a_file"


def test_list_does_not_follow_symlinks_and_tells_no_target(
    tree: Tree, root: Path, outside: Path
) -> None:
    (root / "d").symlink_to(outside)
    assert [entry.name for entry in tree.list(max_depth=5)] == ["d"]
    assert refused(lambda: tree.list(("d",))) == "symlink"


def test_list_of_symlink_loops_ends(tree: Tree, root: Path) -> None:
    (root / "loop").symlink_to("loop")
    (root / "up").symlink_to(".")
    assert len(tree.list(max_depth=50)) == 2


def test_list_of_very_many_names_is_bounded(tree: Tree, root: Path) -> None:
    for number in range(3000):
        (root / f"{number}").touch()
    assert len(tree.list(max_entries=100)) == 100


def test_names_with_terminal_codes_or_odd_bytes_are_text_that_json_takes(
    tree: Tree, root: Path
) -> None:
    (root / os.fsdecode(b"\x1b]0;owned\x07\xff\xfe")).touch()
    (entry,) = tree.list()
    assert entry.name.encode("utf-8").endswith(b"\\xff\\xfe")


def test_delete_of_a_symlink_takes_the_link_only(tree: Tree, root: Path, outside: Path) -> None:
    (root / "link").symlink_to(outside)
    tree.delete(("link",))
    assert (outside / "secret").exists()
    assert os.listdir(root) == []


def test_delete_through_a_symlinked_directory(tree: Tree, root: Path, outside: Path) -> None:
    (root / "d").symlink_to(outside)
    assert refused(lambda: tree.delete(("d", "secret"))) == "symlink"
    assert (outside / "secret").exists()


def test_delete_of_a_directory_full_of_symlinks_takes_the_links_only(
    tree: Tree, root: Path, outside: Path
) -> None:
    (root / "d/e").mkdir(parents=True)
    (root / "d/e/link").symlink_to(outside)
    (root / "d/file").symlink_to(outside / "secret")
    assert tree.delete(("d",))
    assert (outside / "secret").read_bytes() == SECRET


def test_delete_racing_with_swaps_to_symlinks_takes_nothing_outside(
    tree: Tree, root: Path, outside: Path
) -> None:
    (outside / "sub").mkdir()
    stop = threading.Event()
    held = [-1]

    def swap() -> None:
        while not stop.is_set():
            try:
                os.mkdir("x", dir_fd=held[0])
                os.mkdir("x/sub", dir_fd=held[0])
                os.rename("x", "y", src_dir_fd=held[0], dst_dir_fd=held[0])
                os.symlink(outside, "x", dir_fd=held[0])
            except OSError:
                continue  # removed meanwhile

    swapper: threading.Thread | None = None
    for _ in range(30):
        (root / "d").mkdir()
        held[0] = os.open(root / "d", os.O_RDONLY)
        swapper = threading.Thread(target=swap)
        swapper.start()
        tree.delete(("d",), deadline_s=0.05)
        stop.set()
        swapper.join()
        stop.clear()
        os.close(held[0])
    assert sorted(os.listdir(outside)) == ["secret", "sub"]


@needs_root
@pytest.mark.parametrize("verb", ["read", "write", "delete"])
def test_what_is_mounted_in_the_tree_is_not_entered(
    root: Path, outside: Path, opener: safe_open.Opener, verb: str
) -> None:
    (root / "d").mkdir()

    def attack() -> bool:
        libc.call("unshare", CLONE_NEWNS)
        libc.call("mount", None, b"/", None, MS_REC | MS_PRIVATE, None)
        libc.call("mount", bytes(outside), bytes(root / "d"), None, MS_BIND, None)
        with Tree(os.open(root, os.O_PATH), view="/w", opener=opener) as tree:
            calls: dict[str, Callable[[], object]] = {
                "read": lambda: tree.read(("d", "secret"), max_bytes=BIG),
                "write": lambda: tree.write(("d", "planted"), b"", max_bytes=BIG),
                "delete": lambda: tree.delete(("d", "secret")),
            }
            return refused(calls[verb]) == "mount_point"

    assert in_child(attack)
    assert os.listdir(outside) == ["secret"]


@needs_root
def test_removal_does_not_empty_what_is_mounted_below(root: Path, outside: Path) -> None:
    (root / "d/e").mkdir(parents=True)

    def attack() -> bool:
        libc.call("unshare", CLONE_NEWNS)
        libc.call("mount", None, b"/", None, MS_REC | MS_PRIVATE, None)
        libc.call("mount", bytes(outside), bytes(root / "d/e"), None, MS_BIND, None)
        with Tree(os.open(root, os.O_PATH), view="/w") as tree:
            return not tree.delete(("d",), deadline_s=2)

    assert in_child(attack)
    assert (outside / "secret").read_bytes() == SECRET


def test_a_path_longer_than_linux_takes_is_refused_in_short_time(tree: Tree) -> None:
    with pytest.raises((InvalidPath, NotFound)):
        tree.read(("d",) * 50_000, max_bytes=BIG)
