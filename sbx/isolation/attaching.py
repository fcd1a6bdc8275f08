"""One more directory in a jail that lives: mounted by a child of the broker, which ends after it.

    the broker   opens the source as a detached mount: nosuid, nodev, read-only unless it is said
                 otherwise, with all that is mounted below it
    the child    joins the jail's mount namespace by the pidfd of its PID 1, and puts the mount in
                 place. There every path is what the jail made of it: so it walks with openat2, no
                 symlink and nothing above the root, and looks afterwards whether the mount can be
                 reached by the path that was meant. Should somebody have renamed a directory in
                 between, it is taken away again

The broker keeps the mount open, and what is detached is that very mount, wherever it is by then: a
directory of the workspace can be renamed by another jail that has it, and what is mounted on it in
this one goes along.

Two places may be a target. `/mnt/NAME` is on a tmpfs that the child makes there at first, and which
nothing inside can write to. `/workspace/shared/NAME` is a directory that must be there; Landlock's
rule for the workspace covers what is mounted below it, so there it can be written to.

After setns(2) nothing is imported: a module found then would be one of the jail's files, run with
the broker's rights. The child has few seconds, after which linux ends it, and it ends with the
broker.
"""

import errno
import os
import re
import signal
import stat
import sys
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

from sbx.errors import Broken, Conflict, NotFound, SbxError, Unavailable
from sbx.isolation import staging
from sbx.linux import mounts, namespaces, openat2, prctl

TOP = "/mnt"
SHARED = "/workspace/shared"
DEADLINE_S = 2.0
_TARGET = re.compile(rf"({TOP}|{SHARED})/([A-Za-z0-9][A-Za-z0-9._-]{{0,63}})")
_TMPFS = "mode=0755,size=256k,nr_inodes=128"
_HOW = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW
_RESOLVE = openat2.RESOLVE_IN_ROOT | openat2.RESOLVE_NO_SYMLINKS | openat2.RESOLVE_NO_MAGICLINKS
_TAKEN, _MOVED = 1, 2  # exit codes of the child; 0 is done, FAILED anything else
_FAILED = 100


class Child(NamedTuple):
    """The child at work. `said` gives the last words of one that failed."""

    pid: int
    pidfd: int
    said: int


def is_target(target: object) -> bool:
    """Whether something may be attached there."""
    return isinstance(target, str) and _TARGET.fullmatch(target) is not None


def open_source(source: str, expected: list[int] | None, *, read_only: bool) -> int:
    """A directory of the host as a detached mount, for the caller to close.

    Raises OSError, and Broken `path_replaced` when it is not the (device, inode) `expected`.
    """
    tree = mounts.open_tree(source)
    try:
        found = os.fstat(tree)
        if not stat.S_ISDIR(found.st_mode):
            raise NotADirectoryError(20, os.strerror(20))
        if expected is not None and [found.st_dev, found.st_ino] != expected:
            raise staging.replaced(source)
        mounts.restrict_tree(tree, read_only=read_only)
    except BaseException:
        os.close(tree)
        raise
    return tree


def begin(pid1: int, target: str, tree: int, *, attach: bool) -> Child:
    """Start the child: it attaches the `tree` at the target, or takes away what it attached there.

    `pid1` is a pidfd. Only a process with one thread may call this. Raises OSError.
    """
    found = _TARGET.fullmatch(target)
    assert found is not None  # `is_target` was asked
    top, name = found[1], found[2]
    reading, writing = os.pipe2(os.O_CLOEXEC)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _act(pid1, top, name, tree, attach, writing, parent)
    os.close(writing)
    try:
        return Child(pid, os.pidfd_open(pid), reading)
    except OSError:
        os.close(reading)
        os.kill(pid, signal.SIGKILL)  # not reaped yet: its number is still its own
        os.waitpid(pid, 0)
        raise


def end(child: Child, target: str) -> SbxError | None:
    """What became of a child that has ended; its fds are closed."""
    _, status = os.waitpid(child.pid, 0)
    said = os.read(child.said, 4096).decode(errors="replace")
    os.close(child.said)
    os.close(child.pidfd)
    code = os.waitstatus_to_exitcode(status)
    match code:
        case 0:
            return None
        case 1:
            return taken(target)
        case 2:
            return Conflict(
                f"{target} was renamed inside while something was attached to it",
                code="target_moved",
                hint="code inside can do this; attach below /mnt, where it cannot",
            )
    why = f"it was ended by signal {-code}" if code < 0 else said or f"it ended with {code}"
    return Unavailable(
        f"nothing can be mounted at {target} in a jail that lives: {why}",
        code="attach_failed",
        hint="a target in the workspace must be a directory, and no symlink: make it, or detach"
        " what is attached there",
    )


def refuse_without_namespaces() -> Unavailable:
    """What an order gets where the broker has no power over the jail's mounts."""
    return Unavailable(
        "this host lets the runtime have no namespaces of its own, so nothing can be mounted into "
        "a jail that lives",
        code="attach_unavailable",
        hint="name the directory in the policy (filesystem.mount), or start the sandbox with it",
    )


def taken(target: str) -> Conflict:
    return Conflict(
        f"something is attached at {target} already",
        code="already_attached",
        hint="detach it first, or choose another name",
    )


def not_there(target: str) -> NotFound:
    return NotFound(f"nothing is attached at {target}", code="not_attached")


def gone() -> Broken:
    return Broken("the jail has ended", code="jail_gone")


# -- the child -------------------------------------------------------------------------------------


class _Refused(Exception):
    """Its argument is the exit code."""


class _FindsNothing:
    """The only finder of modules that is left."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> NoReturn:
        raise ImportError(f"{name} would be imported inside")


def _act(pid1: int, top: str, name: str, tree: int, attach: bool, report: int, parent: int) -> None:
    """All it does. From `join` on no name of ours is looked up that is not loaded yet."""
    code = _FAILED
    try:
        prctl.set_parent_death_signal(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(_FAILED)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, DEADLINE_S)
        finders: list[Any] = sys.meta_path
        finders[:] = [_FindsNothing()]
        namespaces.join(pid1, namespaces.Namespace.MOUNT)
        root = os.open("/", _HOW)
        if not attach:
            _take_away(root, top, name, tree)
        elif top == TOP:
            _put_on_tmpfs(root, name, tree)
        else:
            _put(root, top, _open(root, top), name, tree)
        code = 0
    except _Refused as refused:
        code = refused.args[0]
    except OSError as error:
        os.write(report, f"{error.strerror}".encode())
    except BaseException as error:  # noqa: BLE001  # a forked child never returns into the broker
        os.write(report, type(error).__name__.encode())
    finally:
        os._exit(code)


def _open(at: int, path: str) -> int:
    return openat2.openat2(at, path.encode(), _HOW, resolve=_RESOLVE)


def _put_on_tmpfs(root: int, name: str, tree: int) -> None:
    place = _open(root, TOP)
    if not _is_mounted(place, root):
        mounts.tmpfs(TOP, _TMPFS)  # no name on this path can be changed from inside
        place = _open(root, TOP)
    mounts.set_read_only(place, on=False)
    try:
        with suppress(FileExistsError):  # left by one that was ended on its way
            os.mkdir(name, 0o755, dir_fd=place)
        _put(root, TOP, place, name, tree)
    finally:
        mounts.set_read_only(place, on=True)


def _put(root: int, top: str, place: int, name: str, tree: int) -> None:
    target = _open(place, name)
    if _is_mounted(target, place):
        raise _Refused(_TAKEN)
    mounts.attach(tree, target)
    try:
        there = _is_same(_open(root, f"{top}/{name}"), tree)
    except OSError:
        there = False
    if not there:
        _unmount(tree)
        raise _Refused(_MOVED)


def _take_away(root: int, top: str, name: str, tree: int) -> None:
    try:
        _unmount(tree)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # not mounted any more: whoever removes a mount point on the host unmounts it here
    if top == TOP:
        place = _open(root, TOP)
        mounts.set_read_only(place, on=False)
        try:
            os.rmdir(name, dir_fd=place)
        finally:
            mounts.set_read_only(place, on=True)


def _unmount(mounted: int) -> None:
    """By the directory itself: a path could lead elsewhere by now."""
    os.fchdir(mounted)
    mounts.detach(".")
    os.chdir("/")


def _is_mounted(directory: int, above: int) -> bool:
    return mounts.number_of(directory) != mounts.number_of(above)


def _is_same(one: int, other: int) -> bool:
    return mounts.number_of(one) == mounts.number_of(other)
