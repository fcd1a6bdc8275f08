"""cgroups: the common limits of the jails of a sandbox, and their end.

    probe() ──► CgroupCapabilities ──► scope_command()            in the runtime, before the broker
    probe() ──► CgroupCapabilities ──► open_hierarchy() ──► Hierarchy          in the broker
        Hierarchy.make_sandbox(name, limits) ──► SandboxGroup                  limits sit here
            SandboxGroup.make_jail(name) ──► JailGroup      enter, kill, events, usage, remove

Groups are made below the broker's own group in each tree, so limits from outside keep holding:

    {own group}/sbx-{runtime}-{pid}-{start time}/box-{sandbox}/jail-{jail}

Three implementations of one `contract`: `v2` (one tree, delegated or root's), `v1` (a tree for each
controller) and `NoHierarchy` (limits nothing, and reports so). `probe` decides which, with a cause
and a remedy for everything that is missing. A limit whose controller is missing is left out:
compare `Hierarchy.capabilities.missing` with the policy before, `JailGroup.limits()` after.

Everything is synchronous and for one single-threaded process, the broker; it caches nothing that
Linux can report. Failures of the kernel's files are OSError. Imports only the standard
library, and little of that.
"""

import os
from collections.abc import Collection
from typing import NamedTuple

from sbx.isolation.cgroups import controlfile, groups
from sbx.isolation.cgroups.contract import (
    CgroupEvents,
    CgroupLimits,
    CgroupUsage,
    Hierarchy,
    IoLimit,
    JailGroup,
    SandboxGroup,
)
from sbx.isolation.cgroups.probe import (
    CONTROLLERS,
    LEAF,
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
    "move_to_leaf_cgroup",
    "open_hierarchy",
    "probe",
    "scope_command",
]

_DELEGATED = "user.delegate"  # an extended attribute; systemd.resource-control(5), Delegate=
_DELEGATED_CONTROLLERS = {"memory", "tasks", "cpu"}


def open_hierarchy(
    capabilities: CgroupCapabilities, runtime_id: str, *, movable: Collection[int] = ()
) -> Hierarchy:
    """Return the groups of a new runtime, by the probe of this process. Without cgroups, return a
    `NoHierarchy` whose capabilities name the cause.

    On v2 a group that hands its controllers down may hold no process: the caller moves itself to
    a leaf of its own, and with it those of `movable` (pids that belong to the caller and do not
    mind). Any other process in the own group makes v2 impossible there.
    """
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


class NoHierarchy(NamedTuple):
    """A host without cgroups: the same contract, so that the caller has one path.

    It limits nothing, counts nothing and kills no process. rlimits and a watcher contain the jail
    then, and SIGKILL for PID 1 of its PID namespace ends it.
    """

    capabilities: CgroupCapabilities

    @property
    def version(self) -> int:
        return 0

    def make_sandbox(self, name: str, limits: CgroupLimits) -> "NoSandbox":
        return NoSandbox()

    def sweep(self) -> list[str]:
        return []

    def close(self, deadline_s: float = 2.0) -> None:
        pass


class NoGroup:
    path = ""

    def usage(self) -> CgroupUsage:
        return CgroupUsage()

    def remove(self, deadline_s: float = 2.0) -> None:
        pass


class NoSandbox(NoGroup):
    def make_jail(self, name: str) -> "NoJail":
        return NoJail()

    def watch_memory(self) -> int | None:
        return None

    def limit_memory(self, memory_max: int) -> None:
        pass

    def throttle(self, on: bool) -> None:
        pass


class NoJail(NoGroup):
    def enter(self) -> None:
        pass

    def entries(self) -> list[int]:
        return []

    def pids(self) -> list[int]:
        return []

    def kill(self) -> None:
        pass

    def events(self) -> CgroupEvents:
        return CgroupEvents()

    def limits(self) -> CgroupLimits:
        return CgroupLimits()


def move_to_leaf_cgroup() -> str | None:
    """Move this process, if it is alone in a group that systemd delegated, into a leaf below it,
    and return the leaf. Return None if nothing changes. Call this before a broker is started.

    A group of cgroup v2 that hands controllers down may hold no process. While a service of systemd
    sits in the group of its unit, its broker needs a separate scope: the limits of the unit
    (MemoryMax=, TasksMax=) would hold for no jail, and the unit would not show them.
    """
    capabilities = probe()
    if not _only_our_process(capabilities):
        return None
    group = f"{next(iter(capabilities.controllers.values()))}/{groups.runtime_name('service')}"
    leaf = f"{group}/{LEAF}"
    try:
        groups.make([group, leaf])
        controlfile.write(f"{leaf}/cgroup.procs", "0")
    except OSError:  # then the broker gets a scope, as anywhere else
        groups.remove([group], lambda _: None, 0)
        return None
    return leaf


def _only_our_process(own: CgroupCapabilities) -> bool:
    if own.version != 2 or own.at_root or set(own.members) != {os.getpid()}:
        return False
    return own.controllers.keys() >= _DELEGATED_CONTROLLERS and _is_delegated(
        own.controllers["memory"]
    )


def _is_delegated(group: str) -> bool:
    """Return whether systemd leaves the group alone: without Delegate=yes it may change it again. A
    user's own systemd (252, measured) marks nothing, but hands the cpu controller down only to
    units that it delegates to."""
    try:
        return os.getxattr(group, _DELEGATED) == b"1"
    except OSError:
        return os.geteuid() != 0 and os.environ.get("SYSTEMD_EXEC_PID") == str(os.getpid())
