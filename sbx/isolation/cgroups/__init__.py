"""cgroups: what the jails of a sandbox may use together, and how they are killed.

    probe() ──► CgroupCapabilities ──► scope_command()            in the runtime, before the broker
    probe() ──► CgroupCapabilities ──► open_hierarchy() ──► Hierarchy          in the broker
        Hierarchy.make_sandbox(name, limits) ──► SandboxGroup                  limits sit here
            SandboxGroup.make_jail(name) ──► JailGroup      enter, kill, events, usage, remove

Groups are made below the broker's own group in each tree, so limits from outside keep holding:

    {own group}/sbx-{runtime}-{pid}-{start time}/box-{sandbox}/jail-{jail}

Three implementations of one contract: `v2` (one tree, delegated or root's), `v1` (a tree for each
controller) and `none` (limits nothing, and says so). `probe.py` decides which, with a cause and a
remedy for whatever is missing. A limit whose controller is missing is left out: compare
`Hierarchy.capabilities.missing` with the policy before, `JailGroup.limits()` with it after.

Everything is synchronous and for one single-threaded process, the broker; nothing is cached that
the kernel knows better. Failures of the kernel's files are OSError. Imports only the standard
library, and little of that.
"""

from collections.abc import Collection
from typing import NamedTuple, Protocol

from sbx.isolation.cgroups.probe import (
    CONTROLLERS,
    CgroupCapabilities,
    Missing,
    probe,
    scope_command,
)

__all__ = [
    "CONTROLLERS",
    "CgroupCapabilities",
    "CgroupEvents",
    "CgroupLimits",
    "CgroupUsage",
    "Hierarchy",
    "IoLimit",
    "JailGroup",
    "Missing",
    "SandboxGroup",
    "open_hierarchy",
    "probe",
    "scope_command",
]


class IoLimit(NamedTuple):
    """Bytes a second on one whole block device, `device` being "MAJOR:MINOR"; None is unlimited.

    On v1 only direct and synchronous writes are slowed, not those from the page cache.
    """

    device: str
    read_bps: int | None = None
    write_bps: int | None = None


class CgroupLimits(NamedTuple):
    """What all jails of a sandbox may use together; None is unlimited.

    `memory_max` in bytes counts anonymous memory, page cache, tmpfs and shm, and swap: nothing is
    swapped out beyond it. `tasks_max` counts processes and threads, the first one too.
    `cpu_quota` is CPU seconds a second: 0.5 is half a CPU, 2.0 two whole ones.
    """

    memory_max: int | None = None
    tasks_max: int | None = None
    cpu_quota: float | None = None
    io: tuple[IoLimit, ...] = ()


class CgroupEvents(NamedTuple):
    """Counters of one jail that only grow: read before and after, and compare.

    `oom_kills` is above what it was when a process of this jail was killed for memory, whichever
    group's limit was hit; on v2 it is no count of processes. `pids_max_hits` grows when a fork or
    a new thread of this jail was refused.
    """

    oom_kills: int = 0
    pids_max_hits: int = 0


class CgroupUsage(NamedTuple):
    """What one jail, or a whole sandbox, uses now; None where this machine does not tell.

    Bytes, tasks, seconds. Memory charged before a process entered stays where it was charged.
    `memory_pinned` is the part of `memory` that Linux cannot reclaim without swap: anonymous
    memory, tmpfs and shared memory. It includes the groups below.
    """

    memory: int | None = None
    memory_pinned: int | None = None
    memory_peak: int | None = None
    tasks: int | None = None
    cpu_s: float | None = None


class JailGroup(Protocol):
    """The group of one jail: everything that lives in it can be counted, and killed, by it."""

    @property
    def path(self) -> str:
        """The group's directory, for logs ("" where there is none); v1: in the memory tree."""

    def enter(self) -> None:
        """Moves the calling process in. For a freshly forked child, before it execs.

        Raises OSError when any of the moves failed; the process is then where it was, and must
        not go on to exec: it would run without limits.
        """

    def entries(self) -> list[int]:
        """Files through which whoever holds them enters: it writes "0" to each, having one thread.

        For a process that cannot see the group. Opened for the caller to close; the right to move
        is that of who opened them: credentials(7), cgroups(7).
        """

    def pids(self) -> list[int]:
        """The processes in the group, as this PID namespace numbers them."""

    def populated(self) -> bool:
        """Whether a process is in the group. Always False for `none`, which cannot know."""

    def kill(self) -> None:
        """SIGKILL for every process in the group and for what they fork meanwhile.

        Returns at once, the last of them may still be dying: `remove` waits. A killed group is
        good for nothing but removal. `none` kills nobody: end the jail's PID namespace instead.
        Raises OSError(EBUSY) if new processes keep appearing.
        """

    def events(self) -> CgroupEvents:
        """The counters now."""

    def usage(self) -> CgroupUsage:
        """The use now."""

    def limits(self) -> CgroupLimits:
        """What is in force for this jail, as read back from the kernel's files: for each limit
        the tightest of this group and all those above it that can be seen, ours or not; for
        `io` what was set on the sandbox."""

    def remove(self, deadline_s: float) -> None:
        """Waits until the group is empty and removes it; a group that is gone is removed.

        Raises TimeoutError when processes are left after `deadline_s` seconds: kill first.
        """


class SandboxGroup(Protocol):
    """The group of one sandbox: its limits hold for all its jails together."""

    @property
    def path(self) -> str:
        """The group's directory, for logs ("" where there is none); v1: in the memory tree."""

    def make_jail(self, name: str) -> JailGroup:
        """A new group below this one. Raises FileExistsError; ValueError for a bad name."""

    def usage(self) -> CgroupUsage:
        """What all its jails use now; CPU and the peak also of those that have ended."""

    def watch_memory(self) -> int | None:
        """A descriptor to be read (8 bytes) when the memory of this group ran out: a process of one
        of its jails is killed within the next moment, which `JailGroup.events` tells. The caller
        closes it, and ends that jail, of which otherwise a part would live on.

        None where linux ends the jail as a whole by itself (v2), or nothing is limited.
        """

    def throttle(self, on: bool) -> None:
        """Lifts the CPU quota, or puts it back: lift it while a jail of this sandbox dies.

        A killed process ends no sooner than it runs again. A fork bomb of 128 tasks under a quota
        of 0.1 was still there 5 s after its kill. A group that is gone is left alone.
        """

    def remove(self, deadline_s: float = 2.0) -> None:
        """Kills what is left in its jails and removes them and the group.

        Raises TimeoutError when processes are left after `deadline_s` seconds.
        """


class Hierarchy(Protocol):
    """All groups of one runtime."""

    @property
    def version(self) -> int:
        """2, 1, or 0 where nothing is limited."""

    @property
    def capabilities(self) -> CgroupCapabilities:
        """What is truly to be had, which opening found out: may be less than what was probed."""

    def make_sandbox(self, name: str, limits: CgroupLimits) -> SandboxGroup:
        """A new group with these limits. `name`: letters, digits and ``-_.``, at most 128.

        Raises FileExistsError; ValueError for a bad name; OSError when the kernel refuses a
        value, and then nothing is left behind.
        """

    def sweep(self) -> list[str]:
        """Removes the groups of runtimes whose broker is dead, if no process is in them.

        Returns the names of those removed. Meant for the start of a runtime.
        """

    def close(self, deadline_s: float = 2.0) -> None:
        """Kills and removes every group of this hierarchy, and gives the own group back.

        Raises TimeoutError when processes are left after `deadline_s` seconds.
        """


def open_hierarchy(
    capabilities: CgroupCapabilities, runtime_id: str, *, movable: Collection[int] = ()
) -> Hierarchy:
    """The groups of a new runtime, by what was probed in this very process. Never fails for lack
    of means: then the hierarchy is `none` and its capabilities name the cause.

    On v2 a group that hands its controllers down may hold no process: the caller moves itself to
    a leaf of its own, and with it those of `movable` (pids that belong to the caller and do not
    mind). Any other process in the own group makes v2 impossible there.
    """
    from sbx.isolation.cgroups.none import NoHierarchy

    if not capabilities.controllers:
        return NoHierarchy(capabilities)
    try:
        if capabilities.version == 1:
            from sbx.isolation.cgroups.v1 import open_v1

            return open_v1(capabilities, runtime_id)
        from sbx.isolation.cgroups.v2 import open_v2

        return open_v2(capabilities, runtime_id, movable)
    except OSError as error:
        where = f" in {error.filename}" if error.filename else ""
        cause = f"no groups can be set up{where}: {error.strerror}"
        return NoHierarchy(capabilities.without_all(cause))
