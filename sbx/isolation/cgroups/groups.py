"""Group directories on v1 and v2: their names and processes, kill and removal.

A process is never signalled by a remembered number: it is held by a pidfd first and then looked
up in its group again, so that a number reused meanwhile cannot hit a stranger.
"""

import errno
import os
import select
import signal
import time
from collections.abc import Callable, Iterable

from sbx.isolation.cgroups import controlfile
from sbx.isolation.cgroups.probe import RUNTIME_PREFIX

ALLOWED = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")
KILL_PASSES = 100  # a fork bomb that can no longer fork is gone after two or three
AT_ONCE = 256  # pidfds held at a time, well below the usual limit of open files
LONGEST_WAIT_S = 0.02


def checked(name: str) -> str:
    """Return the name if it is valid in the name of a directory. Raise ValueError."""
    if not name or len(name) > 128 or not ALLOWED.issuperset(name):
        raise ValueError(f"{name!r} cannot name a cgroup: 1 to 128 letters, digits and '-_.'")
    return name


def runtime_name(runtime_id: str) -> str:
    """Return the name of a runtime's group, with its process: a later runtime can detect its
    end."""
    pid = os.getpid()
    return f"{RUNTIME_PREFIX}{checked(runtime_id)}-{pid}-{_start_time(pid)}"


def make(paths: Iterable[str]) -> None:
    created: list[str] = []
    try:
        for path in paths:
            os.mkdir(path)
            created.append(path)
    except OSError:
        for path in reversed(created):
            os.rmdir(path)
        raise


def below(group: str) -> list[str]:
    try:
        with os.scandir(group) as entries:
            return [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []


def pids(group: str) -> set[int]:
    members = set(controlfile.pids(group))
    for child in below(group):
        members |= pids(child)
    return members


def kill(members: Callable[[], set[int]]) -> None:
    """Send SIGKILL to all members, until a reading has only members that were signalled before.

    The caller must prevent new forks. Raise OSError(EBUSY) if new members keep appearing.
    """
    signalled: set[int] = set()
    for _ in range(KILL_PASSES):
        current = members() - {0}  # 0: in a PID namespace that cannot be seen from here
        if current <= signalled:
            return
        waiting = list(current)
        for start in range(0, len(waiting), AT_ONCE):
            _signal(waiting[start : start + AT_ONCE], members)
        signalled |= current
    raise OSError(errno.EBUSY, "processes appear faster than they can be killed")


def remove(paths: Iterable[str], wait: Callable[[float], None], deadline_s: float) -> None:
    """Remove each directory with all below it as soon as no process is left in them.

    `wait(seconds)` returns when that may have changed. Raise TimeoutError.
    """
    deadline = time.monotonic() + deadline_s
    for path in paths:
        while not _remove_tree(path):
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(
                    errno.ETIMEDOUT,
                    f"still in use by {sorted(pids(path))} after {deadline_s} s",
                    path,
                )
            wait(min(left, LONGEST_WAIT_S))


def wait_for_exit(members: Iterable[int], timeout_s: float) -> None:
    """Return when one of the processes has ended, or after `timeout_s`."""
    poll = select.poll()
    handles = _hold(list(members)[:AT_ONCE])
    try:
        for handle in handles.values():
            poll.register(handle, select.POLLIN)
        ended = poll.poll(timeout_s * 1000 if handles else 0)
    finally:
        _close(handles)
    if ended or not handles:
        time.sleep(0.0005)  # an ended process leaves its group a little after its pidfd is readable


def sweep(bases: Iterable[str]) -> list[str]:
    """Remove the groups of dead runtimes from each tree, and return their names.

    Groups with processes stay: another runtime must not kill the processes that outlived theirs.
    """
    dead: dict[str, list[str]] = {}
    for base in bases:
        for path in below(base):
            name = path.rpartition("/")[2]
            if name.startswith(RUNTIME_PREFIX) and not _owner_lives(name):
                dead.setdefault(name, []).append(path)
    return [
        name
        for name, paths in sorted(dead.items())
        if not any(pids(path) for path in paths) and all(_remove_tree(path) for path in paths)
    ]


def _signal(chunk: list[int], members: Callable[[], set[int]]) -> None:
    handles = _hold(chunk)
    try:
        for pid in members() & handles.keys():
            try:
                signal.pidfd_send_signal(handles[pid], signal.SIGKILL)
            except ProcessLookupError:
                continue  # ended by itself
    finally:
        _close(handles)


def _hold(members: list[int]) -> dict[int, int]:
    handles = {}
    for pid in members:
        try:
            handles[pid] = os.pidfd_open(pid)
        except OSError as error:
            # ESRCH: it ended; EINVAL: pid 0, or no longer the leader of its threads
            if error.errno not in (errno.ESRCH, errno.EINVAL):
                _close(handles)
                raise
    return handles


def _close(handles: dict[int, int]) -> None:
    for handle in handles.values():
        os.close(handle)


def _remove_tree(group: str) -> bool:
    """Whether the group is gone. False when something lives in it."""
    while True:
        try:
            os.rmdir(group)
        except FileNotFoundError:
            return True
        except OSError as error:
            if error.errno not in (errno.EBUSY, errno.ENOTEMPTY):
                raise
            inside = below(group)
            if not inside or not all(_remove_tree(child) for child in inside):
                return False
        else:
            return True


def _owner_lives(name: str) -> bool:
    """Whether the process that a runtime's group is named after is still the same one. A name we
    did not make counts as living."""
    parts = name.rsplit("-", 2)
    if len(parts) != 3 or not (parts[1].isdecimal() and parts[2].isdecimal()):
        return True
    try:
        return _start_time(int(parts[1])) == int(parts[2])
    except (FileNotFoundError, ProcessLookupError):
        return False


def _start_time(pid: int) -> int:
    """Return the start in clock ticks since boot: with the pid it identifies a process."""
    _, _, after_name = controlfile.read(f"/proc/{pid}/stat").rpartition(")")
    return int(after_name.split()[19])
