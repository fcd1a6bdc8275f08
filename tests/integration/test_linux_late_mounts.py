"""Mounts that come late, and the namespaces they come into; each in a process of its own.

The process is small (no site, little imported) as the ones that use these calls are. It enters a
user namespace with all that a test asks for, so that the same runs as root and as anybody.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.core

OutputOf = Callable[[str], list[str]]

ROOT = Path(__file__).resolve().parents[2]
_BEGIN = """
import errno, os, sys
sys.path.insert(0, sys.argv[1])
from sbx.linux import capabilities, libc, mounts, namespaces, network
from sbx.linux.namespaces import Namespace

ids = os.geteuid(), os.getegid()

def enter(more=0):
    namespaces.unshare(Namespace.USER | Namespace.MOUNT | more)
    namespaces.map_ids((0, 0), ids)
    mounts.private("/")
    mounts.tmpfs(sys.argv[2], "mode=0755,size=1m")
    os.chdir(sys.argv[2])

def put(path, text="here"):
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "w") as file:
        file.write(text)

def place(path, target, **restrictions):
    tree, place = mounts.open_tree(path), os.open(target, os.O_PATH)
    mounts.restrict_tree(tree, **restrictions)
    mounts.attach(tree, place)

def share(path):
    libc.call("mount", b"none", path.encode(), None, 1 << 20, None)  # MS_SHARED

def with_all_rights(target):
    libc.call("mount", b"tmpfs", target.encode(), b"tmpfs", 0, None)

def outcome(call, *args):
    try:
        call(*args)
    except OSError as error:
        return errno.errorcode[error.errno]
    return "ok"

def flags(path):  # ST_RDONLY 1, ST_NOSUID 2, ST_NODEV 4, ST_NOEXEC 8
    return os.statvfs(path).f_flag & 15

# A child that did `first`, and what lets it do `then` and waits for its end.
def beside(first, then=lambda: None):
    ready, go = os.pipe(), os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if not child:
        try:
            os.close(go[1])  # so that it waits no longer than its parent lives
            first(); os.write(ready[1], b"."); os.read(go[0], 1); then()
            sys.stdout.flush()
        finally:
            os._exit(0)
    os.close(ready[1]); os.read(ready[0], 1)

    def end():
        os.close(go[1]); os.wait()

    return child, end

def in_child(call):
    sys.stdout.flush()
    if not os.fork():
        try:
            call()
            sys.stdout.flush()
            os._exit(0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
    assert os.wait()[1] == 0
"""


@pytest.fixture
def output_of(tmp_path: Path) -> OutputOf:
    """Run code after `_BEGIN`, and give the words it printed."""

    def run(code: str) -> list[str]:
        argv = [sys.executable, "-IS", "-c", _BEGIN + code, str(ROOT), str(tmp_path)]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=30)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    return run


# -- detached trees --------------------------------------------------------------------------------


@pytest.mark.unprivileged
def test_a_tree_arrives_where_its_source_was_never_seen(output_of: OutputOf) -> None:
    """As from the broker to a jail: another user namespace, whose mounts are another's."""
    assert output_of("""
enter()
put("host/file"); put("host/below/none"); mounts.tmpfs("host/below", "size=4k")
put("host/below/file", "as well"); os.mkdir("jail")
tree = mounts.open_tree("host")
mounts.restrict_tree(tree, read_only=False)

def jail():
    namespaces.unshare(Namespace.USER | Namespace.MOUNT)
    namespaces.map_ids((0, 0), (0, 0))
    mounts.tmpfs("host", "size=4k")
    mounts.attach(tree, os.open("jail", os.O_PATH))
    print(os.listdir("host"), open("jail/file").read(), open("jail/below/file").read())

in_child(jail)
print(os.listdir("jail"))
""") == ["[]", "here", "as", "well", "[]"]


def test_a_read_only_tree_is_so_with_all_that_is_mounted_below(output_of: OutputOf) -> None:
    assert output_of("""
enter()
put("source/file"); os.mkdir("source/below"); with_all_rights("source/below")
os.mkdir("target"); place("source", "target", read_only=True)
print(outcome(put, "target/new"), outcome(put, "target/below/new"))
print(flags("target"), flags("target/below"), flags("source/below"))
""") == ["EROFS", "EROFS", "7", "7", "0"]


def test_a_tree_that_may_be_written_has_neither_set_id_programs_nor_devices(
    output_of: OutputOf,
) -> None:
    assert output_of("""
enter()
os.mkdir("source"); with_all_rights("source")
os.mkdir("target"); place("source", "target", read_only=False)
put("target/new"); print(os.listdir("source"), flags("target"))
""") == ["['new']", "6"]


def test_a_file_can_be_placed_on_a_file_and_not_on_a_directory(output_of: OutputOf) -> None:
    assert output_of("""
enter()
put("source"); put("target", "old"); os.mkdir("directory")
place("source", "target", read_only=True)
print(open("target").read(), outcome(put, "target"))
print(outcome(lambda: place("source", "directory", read_only=True)))
""") == ["here", "EROFS", "EINVAL"]


def test_a_symlink_is_no_tree_and_leaves_no_descriptor(output_of: OutputOf) -> None:
    assert output_of("""
enter()
os.mkdir("source"); os.symlink("source", "link")
before = os.listdir("/proc/self/fd")
print(outcome(mounts.open_tree, "link"), os.listdir("/proc/self/fd") == before)
""") == ["ELOOP", "True"]


def test_the_fd_of_a_tree_is_close_on_exec(output_of: OutputOf) -> None:
    assert output_of("enter(); print(os.get_inheritable(mounts.open_tree('.')))") == ["False"]


def test_a_tree_of_a_shared_mount_passes_no_mount_on(output_of: OutputOf) -> None:
    assert output_of("""
enter(); share(".")
os.makedirs("source/in"); os.makedirs("source/out"); os.mkdir("target")
place("source", "target", read_only=False)
mounts.tmpfs("source/in", ""); put("source/in/file"); print(os.listdir("target/in"))
mounts.tmpfs("target/out", ""); put("target/out/file"); print(os.listdir("source/out"))
""") == ["[]", "[]"]


def test_a_tree_has_one_place_and_moves_from_there(output_of: OutputOf) -> None:
    assert output_of("""
enter()
for name in ("target", "other"):
    os.mkdir(name)
put("source/file"); tree = mounts.open_tree("source")
for name in ("target", "other"):
    mounts.attach(tree, os.open(name, os.O_PATH))
    print(os.listdir("target"), os.listdir("other"))
namespaces.unshare(Namespace.MOUNT)
print(outcome(mounts.attach, tree, os.open("target", os.O_PATH)))
""") == ["['file']", "[]", "[]", "['file']", "EINVAL"]


# -- what a jail mounts for itself -----------------------------------------------------------------


def test_below_a_private_mount_nothing_arrives(output_of: OutputOf) -> None:
    assert output_of("""
enter(); share(".")
for name in ("a/x", "a/y", "b"):
    os.makedirs(name)
mounts.bind("a", "b")
mounts.tmpfs("a/x", ""); put("a/x/file"); print(os.listdir("b/x"))
mounts.private("b")
mounts.tmpfs("a/y", ""); put("a/y/file"); print(os.listdir("b/y"))
""") == ["['file']", "[]"]


def test_a_tmpfs_gets_another_size_and_mode_and_keeps_the_rest(output_of: OutputOf) -> None:
    assert output_of("""
enter()
os.mkdir("t"); mounts.tmpfs("t", "mode=0700,size=16k"); put("t/file")
print(outcome(put, "t/large", "x" * 20_000))
mounts.resize_tmpfs("t", 1 << 20, "1777")
now = os.statvfs("t")
print(now.f_blocks * now.f_frsize, oct(os.stat("t").st_mode), flags("t"), open("t/file").read())
print(outcome(put, "t/large", "x" * 20_000), outcome(mounts.resize_tmpfs, "t", 8192, "1777"))
""") == ["ENOSPC", "1048576", "0o41777", "6", "here", "ok", "EINVAL"]


@pytest.mark.unprivileged
def test_proc_shows_the_processes_of_its_own_namespace_only(output_of: OutputOf) -> None:
    assert output_of("""
enter(Namespace.PID)
os.mkdir("proc")

def first():
    mounts.proc("proc")
    print(*filter(str.isdigit, os.listdir("proc")), flags("proc"))

in_child(first)
""") == ["1", "14"]


def test_terminals_of_one_devpts_are_not_in_another(output_of: OutputOf) -> None:
    assert output_of("""
enter()
for name in ("one", "two"):
    os.mkdir(name); mounts.devpts(name, ptys_max=8)
terminals = [os.open("one/ptmx", os.O_RDWR | os.O_NOCTTY) for _ in range(2)]
print(sorted(os.listdir("one")), os.listdir("two"), flags("one"))
print(oct(os.stat("one/ptmx").st_mode & 0o777))
""") == ["['0',", "'1',", "'ptmx']", "['ptmx']", "10", "0o666"]


# -- namespaces ------------------------------------------------------------------------------------


def test_a_pidfd_lends_several_namespaces_at_once(output_of: OutputOf) -> None:
    assert output_of("""
made = Namespace.USER | Namespace.NET | Namespace.UTS
child, end = beside(lambda: namespaces.unshare(made))
namespaces.join(os.pidfd_open(child), Namespace.USER | Namespace.NET)
for kind in ("user", "net", "uts"):
    print(os.stat(f"/proc/self/ns/{kind}").st_ino == os.stat(f"/proc/{child}/ns/{kind}").st_ino)
end()
""") == ["True", "True", "False"]


def test_a_file_of_another_kind_of_namespace_is_refused(output_of: OutputOf) -> None:
    assert output_of("""
enter(Namespace.NET)
fd = os.open("/proc/self/ns/net", os.O_RDONLY)
print(outcome(namespaces.join, fd, Namespace.NET), outcome(namespaces.join, fd, Namespace.UTS))
""") == ["ok", "EINVAL"]


def test_ids_get_other_numbers_inside(output_of: OutputOf) -> None:
    assert output_of("""
namespaces.unshare(Namespace.USER)
namespaces.map_ids((1000, 1001), ids)
print(os.geteuid(), os.getegid(), outcome(os.setgroups, []))
""") == ["1000", "1001", "EPERM"]


@pytest.mark.unprivileged
def test_a_namespace_without_further_user_namespaces(output_of: OutputOf) -> None:
    """Neither in it nor in one made in it before; and outside of it, nothing has changed."""
    assert output_of("""
def one_more():
    print(outcome(namespaces.unshare, Namespace.USER))

def inside():
    enter()
    _, end = beside(lambda: namespaces.unshare(Namespace.USER), one_more)
    namespaces.forbid_user_namespaces()
    one_more()
    end()

in_child(inside)
one_more()
""") == ["ENOSPC", "ENOSPC", "ok"]


@pytest.mark.unprivileged
def test_who_has_no_capability_forbids_nothing(output_of: OutputOf) -> None:
    assert output_of("""
enter(); capabilities.drop_all()
print(outcome(namespaces.forbid_user_namespaces))
""") == ["EACCES"]


@pytest.mark.needs("root")
def test_a_parent_maps_several_ranges_of_ids(output_of: OutputOf) -> None:
    assert output_of("""
def mapped():
    uids, gids = (open(f"/proc/self/{kind}_map").read() for kind in ("uid", "gid"))
    print(uids == gids, uids, outcome(os.setgroups, []))
    print(outcome(os.setresuid, 60_004, 60_004, 60_004), os.geteuid())

child, end = beside(lambda: namespaces.unshare(Namespace.USER), mapped)
namespaces.map_ranges(child, [(0, 1), (60_000, 5)])
end()
""") == ["True", *["0", "0", "1", "60000", "60000", "5"], "ok", "ok", "60004"]


def test_a_new_network_namespace_reaches_itself_once_its_loopback_is_up(
    output_of: OutputOf,
) -> None:
    assert output_of("""
import socket
enter(Namespace.NET)
def reach():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.connect(("127.0.0.1", 9))
print(outcome(reach))
network.loopback_up()
print(outcome(reach))
capabilities.drop_all()
print(outcome(network.loopback_up))
""") == ["ENETUNREACH", "ok", "EPERM"]
