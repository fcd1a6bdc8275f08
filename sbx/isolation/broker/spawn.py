"""Start one bwrap: its descriptors, and the few steps between fork and exec."""

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from sbx.guest import shares
from sbx.guest.inherited_fds import CONTROL_FD, KERNEL_FD, ORDERS_FD
from sbx.isolation import userns
from sbx.isolation.broker import bind_staging
from sbx.linux import namespaces, prctl
from sbx.linux.descriptors import duplicate_above

# The descriptors of a starting jail, besides 0, 1, 2 and those of `inherited_fds`.
ARGS_FD = 5  # bwrap reads its arguments here, and closes it
INFO_FD = 6  # bwrap writes here which process is PID 1, and closes it
FILTER_FD = 7  # bwrap reads the seccomp program here, and closes it
USERNS_FD = 7  # of a zygote, which has no filter: the user namespace that bwrap enters
DATA_FD = 8  # and the following: the files of the synthetic /etc, read and closed by bwrap
_SPARE_MIN = 200  # above every slot, so that filling one slot closes no file of another


@dataclass(frozen=True, slots=True)
class SpawnRequest:
    """One bwrap to be started. `slots` gives each inherited file its number inside."""

    argv: Sequence[str]
    slots: Sequence[tuple[int, int]]
    become: tuple[int, int] | None
    enter_group: Callable[[], None]
    limit: bool = False  # what Linux counts per user, by a user namespace around the jail


@dataclass(frozen=True, slots=True)
class Started:
    """A bwrap that runs, its "monitor": it will write to `info_fd` which process is PID 1."""

    monitor: int
    monitor_fd: int
    info_fd: int
    stderr_fd: int


def start_jail(
    order: Mapping[str, Any],
    sockets: tuple[int, int],
    become: tuple[int, int] | None,
    enter_group: Callable[[], None],
    owners: int | None,
) -> Started:
    """Start a jail of the cold path. `order` is the broker's `launch`, `sockets` are the inner ends
    of control and kernel, `owners` is the user namespace for its mapped mounts; the caller closes
    the descriptors of the returned value.

    Raise OSError and Broken; then `bind_staging.clear` removes the rest.
    """
    seccomp = memory_file(bytes.fromhex(order["filter"]), "filter")
    try:
        control, kernel = sockets
        inherited = [(control, CONTROL_FD), (kernel, KERNEL_FD), (seccomp, FILTER_FD)]
        limit = bool(order.get("own_shares"))
        if limit:
            bind_staging.mount_devpts(order["jail"], ptys_max=shares.PTYS_MAX)
            owner = become or (os.geteuid(), os.getegid())
            order = {**order, "args": bind_staging.limit_tmpfs(order["jail"], order["args"], owner)}
        return _start_bwrap(
            order["jail"], order, inherited, become, enter_group, owners, limit=limit
        )
    finally:
        os.close(seccomp)


def start_zygote(
    order: Mapping[str, Any], orders: int, lives_in: int, become: tuple[int, int] | None
) -> Started:
    """Start a zygote, in the group of the broker. `orders` is the inner end of its socket,
    `lives_in` the user namespace it is to live in. Raises as `start_jail` does."""
    inherited = [(orders, ORDERS_FD), (lives_in, USERNS_FD)]
    return _start_bwrap(order["zygote"], order, inherited, become, lambda: None, None)


def _start_bwrap(
    name: str,
    order: Mapping[str, Any],
    inherited: Sequence[tuple[int, int]],
    become: tuple[int, int] | None,
    enter_group: Callable[[], None],
    owners: int | None,
    *,
    limit: bool = False,
) -> Started:
    """Stage the mounts, hand bwrap all that it reads, start it."""
    for index, source, expected, mapped in order["stage"]:
        place = bind_staging.place(name, index)
        mapping = userns.of(mapped, owners)
        bind_staging.bind(source, place, tuple(expected) if expected else None, mapping)
    with ExitStack() as ours, ExitStack() as handed:

        def hand(fd: int) -> int:
            handed.callback(os.close, fd)
            return fd

        info, info_writing = os.pipe2(os.O_CLOEXEC)
        ours.callback(os.close, info)
        hand(info_writing)
        stderr = os.memfd_create("stderr", os.MFD_CLOEXEC)
        ours.callback(os.close, stderr)
        null = hand(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC))
        args = b"".join(arg.encode() + b"\0" for arg in order["args"])
        slots = [
            (null, 0),
            (null, 1),
            (stderr, 2),
            *inherited,
            (hand(memory_file(args, "args")), ARGS_FD),
            (info_writing, INFO_FD),
        ]
        for index, text in enumerate(order["files"]):
            slots.append((hand(memory_file(text.encode(), "file")), DATA_FD + index))
        argv = [order["bwrap"], "--args", str(ARGS_FD), "--", *order["command"]]
        monitor = start(SpawnRequest(argv, slots, become, enter_group, limit))
        try:
            monitor_fd = os.pidfd_open(monitor)
        except OSError:
            os.kill(monitor, signal.SIGKILL)  # a child not yet reaped: its number is still its own
            os.waitpid(monitor, 0)
            raise
        ours.pop_all()
        return Started(monitor, monitor_fd, info, stderr)


def start(order: SpawnRequest) -> int:
    """Fork and exec; returns the pid once the exec has succeeded, raises OSError if it has not.

    Only a process with one thread may call this: the child runs Python between fork and exec.
    """
    reading, writing = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        _become(order, writing)
    os.close(writing)
    try:
        failure = os.read(reading, 4096).decode(errors="replace")
    finally:
        os.close(reading)
    if not failure:
        return pid
    os.waitpid(pid, 0)
    number, _, text = failure.partition(" ")
    raise OSError(int(number), text)


def memory_file(content: bytes, name: str) -> int:
    """Return an unnamed file with this content, positioned at its start. memfd_create(2)."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.write(fd, content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _become(order: SpawnRequest, report: int) -> None:
    """Be the child. Its cgroup comes first, so that all it ever does counts; its uid last before
    exec. An error is reported with the name of the failed step."""
    step = "fcntl"
    try:
        report = _move_above(report)  # first: reports every later failure
        step = "the entry into the cgroup"
        order.enter_group()
        os.umask(0o022)
        step = "dup2"
        _place(order.slots, report)
        if order.become is not None:
            uid, gid = order.become
            step = "setgroups"
            os.setgroups([])
            step = "setresgid"
            os.setresgid(gid, gid, gid)
            step = "setresuid"
            os.setresuid(uid, uid, uid)
        if order.limit:
            step = "the user namespace of the jail"
            _limit_shares()
        step = "execve"
        os.execve(order.argv[0], list(order.argv), {})  # noqa: S606  # an absolute path of the system
    except OSError as error:
        os.write(report, f"{error.errno} {step}: {error.strerror}".encode())
    except BaseException as error:  # noqa: BLE001  # a forked child never returns into the broker
        os.write(report, f"0 {step}: {error!r}".encode())
    finally:
        os._exit(127)


def _limit_shares() -> None:
    """Put a user namespace around those of bubblewrap, in which nothing of the jail has power: it
    carries the limits that a jail of the fast path sets in its own."""
    ids = os.geteuid(), os.getegid()
    namespaces.unshare(namespaces.Namespace.USER)
    prctl.set_dumpable(True)  # otherwise root owns its files in /proc
    namespaces.map_ids_to_self(*ids)
    shares.limit_inotify()


def _move_above(fd: int) -> int:
    """Return a copy of `fd` above every slot, with a number that was free.

    A fixed number can belong to another file of a broker with many jails: dup3(2) then replaces
    that file, and fails with EINVAL if the file is `fd` itself.
    """
    return duplicate_above(fd, _SPARE_MIN)


def _place(slots: Sequence[tuple[int, int]], report: int) -> None:
    """Give each file its slot, whatever its number was. Close all others but `report`."""
    for fd, slot in [(_move_above(fd), slot) for fd, slot in slots]:
        os.dup2(fd, slot, inheritable=True)
    os.closerange(max(DATA_FD, *(slot for _, slot in slots)) + 1, report)
    os.closerange(report + 1, os.sysconf("SC_OPEN_MAX"))
