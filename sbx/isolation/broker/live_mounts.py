"""Mount a directory into a live jail, by a child of the broker that ends after it.

    the broker   opens the source as a detached mount with all mounts below it: nosuid, nodev, and
                 by default read-only
    the child    covers the host's sockets and FIFOs below it (`masking`), in a mount namespace that
                 no other process is in, and hands a clone of all that to the broker
    the child    joins the jail's mount namespace by the pidfd of its PID 1, and attaches the mount.
                 The jail controls every path there, so the child uses openat2 without symlinks and
                 below the root, and then checks that the path leads to the mount. If a directory
                 was renamed meanwhile, it removes the mount

`begin_masks` starts another child, for the directories of the host at the start of a jail: it
covers their sockets before user code runs.

The broker keeps the mount open and detaches exactly that mount, wherever it is by then: another
jail with the same workspace can rename a directory, and mounts on it move along.

Two places may be a target. `/mnt/NAME` is on a tmpfs that the child makes there at first, and which
nothing inside can write to. `/workspace/shared/NAME` is a directory that must exist; Landlock's
rule for the workspace covers mounts below it, so these can be writable.

After setns(2) nothing is imported: the module would be a file of the jail, run with the broker's
rights. Linux ends the child after a few seconds, and it ends with the broker.
"""

import errno
import json
import os
import re
import signal
import socket
import stat
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

from sbx.errors import Broken, Conflict, NotFound, SbxError, Unavailable
from sbx.guest.granted_packages import PREFIX, TOP
from sbx.isolation import masking
from sbx.isolation.broker import bind_staging
from sbx.linux import mounts, namespaces, openat2, prctl

SHARED = "/workspace/shared"
WORKSPACE = "/workspace"
DEADLINE_S = 2.0 + masking.WALK_S
_ASIDE = "/proc"  # every host has it; covered in a mount namespace of the child's own only
_TARGET = re.compile(
    rf"({TOP}|{SHARED})/((?:{re.escape(PREFIX)})?[A-Za-z0-9][A-Za-z0-9._-]{{0,63}})"
)
_TMPFS = "mode=0755,size=256k,nr_inodes=128"
_HOW = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW
_RESOLVE = openat2.RESOLVE_IN_ROOT | openat2.RESOLVE_NO_SYMLINKS | openat2.RESOLVE_NO_MAGICLINKS
_TAKEN, _MOVED, _UNMASKED = 1, 2, 3  # exit codes of the child; 0 is done, FAILED anything else
_FAILED = 100


class Child(NamedTuple):
    """The child at work. `report` gives how much was covered, with the tree that is attached in
    place of the one it was given, and the last words of one that failed."""

    pid: int
    pidfd: int
    report: socket.socket


class JailEnded(NamedTuple):
    """The outcome of a child. `tree` is the fd of the attached tree, if that is not the original
    one; `masks` counts the covered sockets."""

    error: SbxError | None
    tree: int | None
    masks: masking.Masks


def is_target(target: object) -> bool:
    return isinstance(target, str) and _TARGET.fullmatch(target) is not None


def open_source(source: str, expected: list[int] | None, *, read_only: bool) -> int:
    """Return a directory of the host as a detached mount, which the caller closes.

    Raise OSError, and Broken `path_replaced` if it is not the (device, inode) `expected`.
    """
    tree = mounts.open_tree(source)
    try:
        status = os.fstat(tree)
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(20, os.strerror(20))
        if expected is not None and [status.st_dev, status.st_ino] != expected:
            raise bind_staging.replaced(source)
        mounts.restrict_tree(tree, read_only=read_only)
    except BaseException:
        os.close(tree)
        raise
    return tree


def begin(
    pid1: int,
    target: str,
    tree: int,
    *,
    attach: bool,
    mask: bool = False,
    partly: bool = False,
    pin: bool = False,
) -> Child:
    """Start the child: it attaches the `tree` at the target, or detaches it there.

    With `mask` it covers sockets and FIFOs first. If it cannot cover all of them, it attaches
    nothing, unless `partly`. `pin`: code inside may write there. `pid1` is a pidfd. Only a process
    with one thread may call this. Raise OSError.
    """
    match = _TARGET.fullmatch(target)
    assert match is not None  # the caller checked `is_target`
    top, name = match[1], match[2]

    def act(report: socket.socket) -> None:
        shown = _masked(tree, report, partly=partly, pin=pin) if mask else tree
        root = _enter(pid1)
        if not attach:
            _take_away(root, top, name, shown)
        elif top == TOP:
            _put_on_tmpfs(root, name, shown)
        else:
            _put(root, top, _open(root, top), name, shown)

    return start_child(act)


def begin_masks(pid1: int, places: Sequence[str]) -> Child:
    """Start the child that covers the sockets and FIFOs of the host in these directories of a jail,
    before any code of a user runs there. As `begin`."""

    def act(report: socket.socket) -> None:
        namespaces.unshare(namespaces.Namespace.MOUNT)
        cover = masking.Cover(masking.make_cover(_ASIDE))
        root = _enter(pid1)
        limits = masking.MaskingLimits()
        done = [
            masking.mask(_open(root, place), cover, limits, pin=place == WORKSPACE)
            for place in places
        ]
        _report(report, masking.Masks(sum(masks.masked for masks in done), limits.complete))

    return start_child(act)


def start_child(act: Callable[[socket.socket], None]) -> Child:
    """Start a child of the broker that does `act`, and ends with the broker or after DEADLINE_S.
    Only a process with one thread may call this. Raise OSError."""
    report, inside = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _act(act, inside, parent)
    inside.close()
    try:
        return Child(pid, os.pidfd_open(pid), report)
    except OSError:
        report.close()
        os.kill(pid, signal.SIGKILL)  # not reaped yet: its number is still its own
        os.waitpid(pid, 0)
        raise


def end(child: Child, target: str) -> JailEnded:
    """Return the outcome of a child that has ended, and close its fds."""
    _, status = os.waitpid(child.pid, 0)
    last_words, tree, masks = "", None, masking.Masks(0, False)
    with child.report as report:
        while True:
            words, fds, _, _ = socket.recv_fds(report, 4096, 1)
            if not words:
                break
            if words.startswith(b"{"):
                masks = masking.Masks(**json.loads(words))
                if fds:
                    tree = fds[0]
                    os.set_inheritable(tree, False)  # no jail that starts later gets it
            else:
                last_words = words.decode(errors="replace")
    os.close(child.pidfd)
    return JailEnded(_error(os.waitstatus_to_exitcode(status), last_words, target), tree, masks)


def _error(code: int, last_words: str, target: str) -> SbxError | None:
    match code:
        case 0:
            return None
        case 1:
            return taken(target)
        case 2:
            return Conflict(
                f"{target} was renamed inside while something was mounted to it",
                code="target_moved",
                hint="code inside can do this; mount below /mnt, where it cannot",
            )
        case 3:
            return Unavailable(
                f"the directory for {target} may hold sockets of the host that cannot be covered: "
                f"it has more than {masking.ENTRIES_MAX} entries or {masking.MASKS_MAX} sockets, "
                "or parts that cannot be read",
                code="sockets_not_masked",
                hint='mount a smaller directory, or use a policy with unix_sockets = "none"',
            )
    why = f"it was ended by signal {-code}" if code < 0 else last_words or f"it ended with {code}"
    return Unavailable(
        f"nothing can be mounted at {target} in a live jail: {why}",
        code="mount_failed",
        hint="a target in the workspace must be a directory, and no symlink: make it, or unmount"
        " the mount there",
    )


def refuse_without_namespaces() -> Unavailable:
    """Return the error for a broker without rights over the jail's mounts."""
    return Unavailable(
        "this host permits the runtime no separate namespaces, so nothing can be mounted into a "
        "live jail",
        code="live_mount_unavailable",
        hint="name the directory in the policy (filesystem.mount), or start the sandbox with it",
    )


def taken(target: str) -> Conflict:
    return Conflict(
        f"something is mounted at {target} already",
        code="already_mounted",
        hint="unmount it first, or choose another name",
    )


def not_there(target: str) -> NotFound:
    return NotFound(f"nothing is mounted at {target}", code="not_mounted")


def gone() -> Broken:
    return Broken("the jail has ended", code="jail_gone")


# -- the child -------------------------------------------------------------------------------------


class _Refused(Exception):
    """Carry the exit code of the child as its argument."""


class _FindsNothing:
    def find_spec(self, name: str, path: object = None, target: object = None) -> NoReturn:
        raise ImportError(f"{name} would be imported inside")


def _act(act: Callable[[socket.socket], None], report: socket.socket, parent: int) -> None:
    """Run `act` in the child. After `_enter`, no module is imported."""
    code = _FAILED
    try:
        prctl.set_parent_death_signal(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(_FAILED)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, DEADLINE_S)
        act(report)
        code = 0
    except _Refused as refused:
        code = refused.args[0]
    except OSError as error:
        report.send(f"{error.strerror}".encode())
    except BaseException as error:  # noqa: BLE001  # a forked child never returns into the broker
        report.send(type(error).__name__.encode())
    finally:
        os._exit(code)


def _enter(pid1: int) -> int:
    """Join the mount namespace of the jail, and return its root."""
    finders: list[Any] = sys.meta_path
    finders[:] = [_FindsNothing()]
    namespaces.join(pid1, namespaces.Namespace.MOUNT)
    return os.open("/", _HOW)


def _masked(tree: int, report: socket.socket, *, partly: bool, pin: bool) -> int:
    """Return a clone of the tree with covered sockets and FIFOs, before any code can reach them.
    The broker gets it, too."""
    namespaces.unshare(namespaces.Namespace.MOUNT)
    cover = masking.Cover(masking.make_cover(_ASIDE))
    place = f"{_ASIDE}/tree"
    os.mkdir(place)
    mounts.attach(tree, os.open(place, _HOW))
    done = masking.mask(tree, cover, masking.MaskingLimits(), pin=pin)
    if not (done.complete or partly):
        raise _Refused(_UNMASKED)
    shown = mounts.clone(tree)
    _report(report, done, shown)
    return shown


def _report(report: socket.socket, done: masking.Masks, *fds: int) -> None:
    socket.send_fds(report, [json.dumps(done._asdict()).encode()], fds)


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
        # no longer mounted: the removal of a mount point on the host unmounts it here
    if top == TOP:
        place = _open(root, TOP)
        mounts.set_read_only(place, on=False)
        try:
            os.rmdir(name, dir_fd=place)
        finally:
            mounts.set_read_only(place, on=True)


def _unmount(mounted: int) -> None:
    """Unmount by the directory itself: a path could lead elsewhere by now."""
    os.fchdir(mounted)
    mounts.detach(".")
    os.chdir("/")


def _is_mounted(directory: int, above: int) -> bool:
    return mounts.number_of(directory) != mounts.number_of(above)


def _is_same(left: int, right: int) -> bool:
    return mounts.number_of(left) == mounts.number_of(right)
