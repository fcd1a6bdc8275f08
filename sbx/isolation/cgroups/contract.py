"""The contract of the three kinds of cgroups: limits, counters, and the groups themselves."""

from typing import NamedTuple, Protocol

from sbx.isolation.cgroups.probe import CgroupCapabilities


class IoLimit(NamedTuple):
    """Bytes a second on one whole block device, `device` being "MAJOR:MINOR"; None is unlimited.

    On v1 only direct and synchronous writes are slowed, not those from the page cache.
    """

    device: str
    read_bps: int | None = None
    write_bps: int | None = None


class CgroupLimits(NamedTuple):
    """The common limits of all jails of a sandbox; None is unlimited.

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

    `oom_kills` rises when a process of this jail is killed for memory, whichever group's limit was
    hit; on v2 it does not count processes. `pids_max_hits` grows when a fork or
    a new thread of this jail was refused.
    """

    oom_kills: int = 0
    pids_max_hits: int = 0


class CgroupUsage(NamedTuple):
    """The use of one jail, or of a whole sandbox, now; None if this machine does not report it.

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
        """Move the calling process in: a freshly forked child, before it execs.

        Raise OSError if one of the moves failed. The process is then in its earlier groups, and
        must not exec, because it would run without limits.
        """

    def entries(self) -> list[int]:
        """Return open files, for the caller to close. A process with one thread that writes "0" to
        each of them enters the group.

        For a process that cannot see the group. The right to move is that of the process that
        opened the files: credentials(7), cgroups(7).
        """

    def pids(self) -> list[int]:
        """Return the processes in the group, as this PID namespace numbers them."""

    def kill(self) -> None:
        """Send SIGKILL to every process in the group, and to those that they fork meanwhile.

        Return at once: the last of them may still be dying, and `remove` waits. A killed group can
        only be removed. `none` kills no process: end the jail's PID namespace instead.
        Raise OSError EBUSY if new processes keep appearing.
        """

    def events(self) -> CgroupEvents:
        """Return the counters now."""

    def usage(self) -> CgroupUsage:
        """Return the use now."""

    def limits(self) -> CgroupLimits:
        """Return the limits in force for this jail, as read back from Linux.

        For each limit, the tightest one of this group and of all visible groups above it; for
        `io`, the limits of the sandbox.
        """

    def remove(self, deadline_s: float) -> None:
        """Wait until the group is empty, and remove it. Do nothing if it is gone.

        Raise TimeoutError if processes are left after `deadline_s` seconds: kill first.
        """


class SandboxGroup(Protocol):
    """The group of one sandbox: its limits hold for all its jails together."""

    @property
    def path(self) -> str:
        """The group's directory, for logs ("" where there is none); v1: in the memory tree."""

    def make_jail(self, name: str) -> JailGroup:
        """Make a group below this one. Raise FileExistsError, and ValueError for a bad name."""

    def usage(self) -> CgroupUsage:
        """Return the use of all its jails now; CPU and the peak include jails that have ended."""

    def watch_memory(self) -> int | None:
        """Return a descriptor that can be read (8 bytes) when the memory of this group has run out.

        Linux then kills a process of one of its jails; `JailGroup.events` counts it. The caller
        closes the descriptor, and ends that jail, because a part of it would live on. Return None
        if Linux itself ends the jail as a whole (v2), or if nothing is limited.
        """

    def limit_memory(self, memory_max: int) -> None:
        """Change the limit of the memory of all its jails.

        Raise OSError EBUSY if they use more and nothing can be reclaimed (v1). On v2, Linux kills a
        jail then.
        """

    def throttle(self, on: bool) -> None:
        """Lift the CPU quota, or set it again: lift it while a jail of this sandbox dies.

        A killed process ends no sooner than it runs again. A fork bomb of 128 tasks under a quota
        of 0.1 was still there 5 s after its kill. A group that is gone is left alone.
        """

    def remove(self, deadline_s: float = 2.0) -> None:
        """Kill the processes of its jails, and remove the jails and the group.

        Raise TimeoutError if processes are left after `deadline_s` seconds.
        """


class Hierarchy(Protocol):
    """All groups of one runtime."""

    @property
    def version(self) -> int:
        """Return 2, 1, or 0 if nothing is limited."""

    @property
    def capabilities(self) -> CgroupCapabilities:
        """Return the capabilities that are available after opening: they may be fewer than those
        that were probed."""

    def make_sandbox(self, name: str, limits: CgroupLimits) -> SandboxGroup:
        """Make a group with these limits. `name`: letters, digits and ``-_.``, at most 128.

        Raise FileExistsError, ValueError for a bad name, and OSError if Linux refuses a value;
        then nothing is left behind.
        """

    def sweep(self) -> list[str]:
        """Remove the groups of runtimes whose broker is dead, if no process is in them.

        Return the names of the removed groups. For the start of a runtime.
        """

    def close(self, deadline_s: float = 2.0) -> None:
        """Kill and remove every group of this hierarchy, and leave the own group as it was.

        Raise TimeoutError if processes are left after `deadline_s` seconds.
        """
