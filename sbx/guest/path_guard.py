"""The path guard: performs every change of a host directory on behalf of the jail.

A host directory is a workspace that the user continues to use. Landlock lets the kernel and the
commands of its jail only read there. The calls that open a file for writing, create, rename or
remove a name, or change a mode are stopped by a filter (`isolation/filters/table.py`, GUARD) and
come here. The guard resolves the path itself, asks `path_rules`, performs the call and passes the
result back. No program inside has the right to do it alone, so nothing can change between a check
and its use: the path that was checked is the descriptor that is used.

    free        the call is performed; a descriptor that it opens is given to the caller
    protected   EROFS: an existing name of the table, or a path below one
    new         the name is created in the quarantine, and a symlink to it takes its place. Inside
                it works; on the host the link leads nowhere
    outside     (/tmp, the quarantine, /proc): Linux executes the call, under Landlock

The quarantine is a directory of the host, outside of the user's, mounted at QUARANTINE:

    items/ID           a file or directory, which the jail may change freely
    records/ID.json    {"path", "name", "program", "kind"}; only the guard can write there

Start order: the guard is forked before the jail's processes enter their user namespace and their
Landlock domain. Its uid owns that namespace, so it may read their memory and descriptors
(ptrace(2), "Ptrace access mode checking"; Yama permits it too), and no process of the jail may
trace or signal it. On the cold path it stays PID 1, above everything else in the tree of processes.

It drops its capabilities and loads the jail's filter. It has no Landlock domain: a process in a
domain may only trace processes in domains below it. It executes no program and reads no file of the
workspace.
"""

import contextlib
import errno
import os
import select
import signal
import socket
from _thread import start_new_thread  # `threading` does much in every fork
from collections.abc import Callable
from typing import NoReturn

from sbx.guest.guarded_calls import GuardedCalls, Opened, SlowOpen
from sbx.guest.guarded_paths import Outside
from sbx.linux import seccomp_notify
from sbx.linux.seccomp_notify import SyscallNotice


def serve(joining: socket.socket, calls: GuardedCalls, child: int | None = None) -> NoReturn:
    """Be the guard until no process is left to serve. `joining` brings the listeners.

    `child` is the supervisor if this is PID 1: then reap, and end with it. Otherwise the end of
    PID 1 ends this process.
    """
    try:
        os.chdir("/")
        os.umask(0)  # every mode has the caller's umask applied already
        poll = select.poll()
        poll.register(joining, select.POLLIN)
        others: dict[int, Callable[[], None]] = {joining.fileno(): lambda: _join(joining, poll)}
        if child is not None:
            others |= _watch_children(child, poll)
        while True:
            for fd, events in poll.poll():
                if fd in others:
                    others[fd]()
                elif events & select.POLLIN:
                    if (call := seccomp_notify.receive(fd)) is not None:
                        _answer(fd, call, calls)
                else:  # the last process under this filter has ended
                    poll.unregister(fd)
                    os.close(fd)
    finally:
        os._exit(1)


def _watch_children(child: int, poll: select.poll) -> dict[int, Callable[[], None]]:
    """Do the duties of PID 1: reap orphans, and end with the supervisor."""
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def reap() -> None:
        os.read(reading, 4096)
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == child:
                os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
            if pid == 0:
                return

    poll.register(reading, select.POLLIN)
    os.write(writing, b"0")  # the child may have ended already
    return {reading: reap}


def _join(joining: socket.socket, poll: select.poll) -> None:
    """Take a listener; the sender waits for the answer before it continues."""
    message, fds, _, _ = socket.recv_fds(joining, 16, 1)
    if not message:
        poll.unregister(joining)
    for fd in fds:
        os.set_inheritable(fd, False)
        poll.register(fd, select.POLLIN)


def _answer(listener: int, call: SyscallNotice, calls: GuardedCalls) -> None:
    """Perform one call, and always answer it, so that the next one is served."""
    try:
        _perform(listener, call, calls)
    except Exception as error:  # noqa: BLE001  # the boundary of a call: its arguments are hostile
        _refuse(listener, call, error)


def _perform(listener: int, call: SyscallNotice, calls: GuardedCalls) -> None:
    try:
        answer = calls.perform(call)
    except Outside:
        seccomp_notify.let_run(listener, call.id)
        return
    if isinstance(answer, Opened):
        _give(listener, call, answer)
    elif isinstance(answer, SlowOpen):
        try:
            start_new_thread(_open_slowly, (listener, call, answer))
        except RuntimeError:  # no task is left
            os.close(answer.fd)
            seccomp_notify.fail(listener, call.id, errno.EAGAIN)
    else:
        seccomp_notify.succeed(listener, call.id)


def _open_slowly(listener: int, call: SyscallNotice, slow: SlowOpen) -> None:
    try:
        try:
            fd = os.open(f"/proc/self/fd/{slow.fd}", slow.flags | os.O_CLOEXEC)
        finally:
            os.close(slow.fd)
        _give(listener, call, Opened(fd, slow.flags))
    except Exception as error:  # noqa: BLE001  # the same boundary, in a thread
        _refuse(listener, call, error)


def _give(listener: int, call: SyscallNotice, opened: Opened) -> None:
    try:
        close_on_exec = bool(opened.flags & os.O_CLOEXEC)
        seccomp_notify.give_fd(listener, call.id, opened.fd, close_on_exec=close_on_exec)
    finally:
        os.close(opened.fd)


def _refuse(listener: int, call: SyscallNotice, error: Exception) -> None:
    number = error.errno if isinstance(error, OSError) else None
    with contextlib.suppress(OSError):  # the listener itself may be unusable
        seccomp_notify.fail(listener, call.id, number or errno.EPERM)
