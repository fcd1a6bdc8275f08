"""cgroup v2: one tree, in a group that was delegated to us or is root's.

    {own group}                   controllers enabled for groups below: may hold no process
      sbx-{runtime}-…/
        sup/                      the broker
        box-{sandbox}/            the limits of a sandbox
          jail-{jail}/            the processes of a jail; dies as a whole when out of memory

A group either holds processes or enables controllers for the groups below ("no internal
processes"), so the broker has the leaf `sup`. The leaf also keeps a systemd scope alive: a scope is
removed, with all groups in it, when its last process leaves.

Measured on Linux 6.1 with systemd 252: a write to ``cgroup.subtree_control`` with a process in
the group is EBUSY; a controller that the group above has not enabled is ENOENT, an unknown one
EINVAL. One bad name fails a whole write, so each write has one name. An OOM kill counts in
``memory.events`` of the jail (and of all groups above it). Linux 6.11 changed which group counts a
fork that a group above refused (read in its source, not measured). The jail has the same limit, so
its own group counts it.
``memory.peak`` may be some pages above the limit of the group above.

Entering waits for an RCU grace period unless another process moved just before: 17 to 22 ms. v1's
way around it does not exist here (``cgroup.threads`` moves within one domain only). A process
that is created in the group does not wait: clone3(2) with CLONE_INTO_CGROUP and a descriptor of
`V2Jail.path`.
Linux Documentation/admin-guide/cgroup-v2.rst
"""

import errno
import os
import select
import time
from collections.abc import Collection
from typing import NamedTuple

from sbx.isolation.cgroups import controlfile, groups
from sbx.isolation.cgroups.contract import CgroupEvents, CgroupLimits, CgroupUsage, IoLimit
from sbx.isolation.cgroups.probe import (
    LEAF,
    RUNTIME_PREFIX,
    V2_NAMES,
    CgroupCapabilities,
    Missing,
    handing_down,
)

CPU_PERIOD_US = 100_000
CPU_QUOTA_MIN_US = 1_000  # less is EINVAL
_BELOW_MAX = 16 << 20
_PAGE = 4096


class V2Setting(NamedTuple):
    file: str
    text: str
    optional: bool = False  # not every kernel has the file


def sandbox_settings(limits: CgroupLimits, controllers: Collection[str]) -> list[V2Setting]:
    settings = []
    if limits.memory_max is not None and "memory" in controllers:
        settings.append(V2Setting("memory.high", str(memory_high(limits.memory_max))))
        settings.append(V2Setting("memory.max", str(limits.memory_max)))
        settings.append(V2Setting("memory.swap.max", "0", optional=True))
    if limits.tasks_max is not None and "tasks" in controllers:
        settings.append(V2Setting("pids.max", str(limits.tasks_max)))
    if limits.cpu_quota is not None and "cpu" in controllers:
        quota = max(CPU_QUOTA_MIN_US, round(limits.cpu_quota * CPU_PERIOD_US))
        settings.append(V2Setting("cpu.max", f"{quota} {CPU_PERIOD_US}"))
    if "io" in controllers:
        for device, read_bps, write_bps in limits.io:
            read = "max" if read_bps is None else read_bps
            write = "max" if write_bps is None else write_bps
            settings.append(V2Setting("io.max", f"{device} rbps={read} wbps={write}"))
    return settings


def memory_high(memory_max: int) -> int:
    """Return the size at which Linux begins to reclaim pages and to slow processes down.

    Page cache is reclaimed there before a process is killed. Memory that cannot be reclaimed, for
    lack of swap, only makes its processes slower: by mm/memcontrol.c of 6.1 a process that takes
    256 KiB waits 16 ms at 1/64 above this size, and 250 ms at 1/16. So one that takes 1 GiB would
    be killed after 0.3 s or after 21 s. 16 MiB are enough for any single read.
    """
    return (memory_max - min(memory_max >> 6, _BELOW_MAX)) & -_PAGE


def jail_settings(limits: CgroupLimits, controllers: Collection[str]) -> list[V2Setting]:
    settings = [V2Setting("cgroup.max.descendants", "0", optional=True)]
    if "memory" in controllers:
        # Without it a single process dies, and a kernel's children live on without it
        settings.append(V2Setting("memory.oom.group", "1", optional=True))
    if limits.tasks_max is not None and "tasks" in controllers:
        # Since 6.11 a refused fork counts in the group whose limit was hit, no more in the
        # forking one: with the same limit on the jail it counts there
        settings.append(V2Setting("pids.max", str(limits.tasks_max)))
    return settings


def open_v2(
    capabilities: CgroupCapabilities, runtime_id: str, movable: Collection[int]
) -> "V2Hierarchy":
    """Create the runtime's group, move the caller and `movable` below it, and enable the
    controllers. Raise OSError, and then restore the previous state."""
    base = next(iter(capabilities.controllers.values()))
    hierarchy = V2Hierarchy(capabilities, base, groups.runtime_name(runtime_id))
    hierarchy.settle({os.getpid(), *movable})
    return hierarchy


class V2Hierarchy:
    version = 2

    def __init__(self, capabilities: CgroupCapabilities, base: str, name: str) -> None:
        self.capabilities = capabilities
        self._base = base
        self._group = f"{base}/{name}"

    def settle(self, movable: set[int]) -> None:
        at_root = self.capabilities.at_root
        strangers = set(controlfile.pids(self._base)) - movable
        if strangers and not at_root:
            raise OSError(
                errno.EBUSY,
                f"it holds other processes ({len(strangers)}), and a group that hands controllers"
                " down may hold none",
                self._base,
            )
        groups.make([self._group, f"{self._group}/{LEAF}"])
        try:
            if not at_root:
                self._move_to_leaf(movable)
            self._enable()
        except OSError:
            self._give_back()
            raise

    def make_sandbox(self, name: str, limits: CgroupLimits) -> "V2Sandbox":
        path = f"{self._group}/box-{groups.checked(name)}"
        controllers = self.capabilities.controllers.keys()
        os.mkdir(path)
        try:
            _apply(path, sandbox_settings(limits, controllers))
            for controller in controllers:
                _switch(path, "+", V2_NAMES[controller])
        except OSError:
            os.rmdir(path)
            raise
        return V2Sandbox(path, limits, controllers)

    def sweep(self) -> list[str]:
        return groups.sweep([self._base])

    def close(self, deadline_s: float = 2.0) -> None:
        deadline = time.monotonic() + deadline_s
        boxes = [
            V2Group(path) for path in groups.below(self._group) if not path.endswith("/" + LEAF)
        ]
        for box in boxes:
            box.kill()
        for box in boxes:
            box.remove(max(0.0, deadline - time.monotonic()))
        self._give_back()

    def _move_to_leaf(self, movable: set[int]) -> None:
        # A process that an earlier runtime moved is in the leaf of that one already. The caller is
        # moved from there, too, because that leaf may end before this runtime.
        for pid in {os.getpid(), *(movable & set(controlfile.pids(self._base)))}:
            controlfile.write(f"{self._group}/{LEAF}/cgroup.procs", str(pid))

    def _enable(self) -> None:
        for controller in list(self.capabilities.controllers):
            name = V2_NAMES[controller]
            try:
                _switch(self._base, "+", name)
                _switch(self._group, "+", name)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.EINVAL):
                    raise
                why = Missing(
                    f"the {name} controller cannot be enabled in {self._base}: {error.strerror}",
                    handing_down(name, os.geteuid()),
                )
                self.capabilities = self.capabilities.without(controller, why)
        if not self.capabilities.controllers:
            raise OSError(errno.ENOENT, "none of its controllers can be enabled", self._base)

    def _give_back(self) -> None:
        """Leaves the own group as it was found. As long as another runtime has groups there, its
        controllers must stay, and so must the leaf that holds us; `sweep` gets it later."""
        self.sweep()
        names = [path.rpartition("/")[2] for path in groups.below(self._base)]
        shared = sum(name.startswith(RUNTIME_PREFIX) for name in names) > 1
        # It held processes, so this runtime, or an earlier one that is gone, enabled its
        # controllers. Only the root group may have both, and other programs may need them there.
        handing_down = (
            [self._group] if shared or self.capabilities.at_root else [self._group, self._base]
        )
        try:
            for group in handing_down:
                for name in controlfile.read(f"{group}/cgroup.subtree_control").split():
                    _switch(group, "-", name)
            for pid in controlfile.pids(f"{self._group}/{LEAF}"):
                controlfile.write(f"{self._base}/cgroup.procs", str(pid))
            os.rmdir(f"{self._group}/{LEAF}")
            os.rmdir(self._group)
        except FileNotFoundError:
            return  # closed before
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise


class V2Group:
    def __init__(self, path: str) -> None:
        self.path = path

    def pids(self) -> list[int]:
        return sorted(groups.pids(self.path))

    def kill(self) -> None:
        try:
            controlfile.write(f"{self.path}/cgroup.kill", "1")
        except FileNotFoundError:  # before 5.14, or the group is gone
            if self._read("pids.max") is not None:
                controlfile.write(f"{self.path}/pids.max", "0")
            groups.kill(lambda: groups.pids(self.path))

    def remove(self, deadline_s: float) -> None:
        groups.remove([self.path], self._wait_for_change, deadline_s)

    def _wait_for_change(self, timeout_s: float) -> None:
        try:
            descriptor = os.open(f"{self.path}/cgroup.events", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            # poll reports changes since the last read: no change is missed in between
            if controlfile.field(os.read(descriptor, 4096).decode(), "populated") == 1:
                poll = select.poll()
                poll.register(descriptor, select.POLLPRI)
                poll.poll(timeout_s * 1000)
            else:
                time.sleep(0.0005)
        finally:
            os.close(descriptor)

    def usage(self) -> CgroupUsage:
        microseconds = controlfile.field(self._read("cpu.stat"), "usage_usec")
        return CgroupUsage(
            memory=controlfile.number(self._read("memory.current")),
            memory_pinned=controlfile.fields_sum(self._read("memory.stat"), "anon", "shmem"),
            memory_peak=controlfile.number(self._read("memory.peak")),  # since 5.19
            tasks=controlfile.number(self._read("pids.current")),
            cpu_s=None if microseconds is None else microseconds / 1e6,
        )

    def _read(self, file: str) -> str | None:
        return controlfile.read_optional(f"{self.path}/{file}")


class V2Sandbox(V2Group):
    def __init__(self, path: str, limits: CgroupLimits, controllers: Collection[str]) -> None:
        super().__init__(path)
        self._limits = limits
        self._controllers = controllers

    def make_jail(self, name: str) -> "V2Jail":
        path = f"{self.path}/jail-{groups.checked(name)}"
        os.mkdir(path)
        try:
            _apply(path, jail_settings(self._limits, self._controllers))
        except OSError:
            os.rmdir(path)
            raise
        return V2Jail(path)

    def watch_memory(self) -> int | None:
        return None  # memory.oom.group of each jail

    def limit_memory(self, memory_max: int) -> None:
        self._limits = self._limits._replace(memory_max=memory_max)
        only_memory = {"memory"}.intersection(self._controllers)
        _apply(self.path, sandbox_settings(self._limits, only_memory))

    def throttle(self, on: bool) -> None:
        for setting in sandbox_settings(self._limits, {"cpu"}.intersection(self._controllers)):
            text = setting.text if on else "max"
            _apply(self.path, [setting._replace(text=text, optional=True)])

    def remove(self, deadline_s: float = 2.0) -> None:
        self.kill()
        super().remove(deadline_s)


class V2Jail(V2Group):
    def enter(self) -> None:
        controlfile.write(f"{self.path}/cgroup.procs", "0")

    def entries(self) -> list[int]:
        return controlfile.open_all([f"{self.path}/cgroup.procs"])

    def events(self) -> CgroupEvents:
        return CgroupEvents(
            controlfile.field(self._read("memory.events"), "oom_kill") or 0,
            controlfile.field(self._read("pids.events"), "max") or 0,
        )

    def limits(self) -> CgroupLimits:
        quotas = [text.split() for text in controlfile.upwards(self.path, "cpu.max")]
        shares = [int(quota) / int(period) for quota, period in quotas if quota != "max"]
        return CgroupLimits(
            controlfile.tightest(self.path, "memory.max"),
            controlfile.tightest(self.path, "pids.max"),
            min(shares, default=None),
            self._io_limits(),
        )

    def _io_limits(self) -> tuple[IoLimit, ...]:
        limits = []
        sandbox = os.path.dirname(self.path)
        for line in (controlfile.read_optional(f"{sandbox}/io.max") or "").splitlines():
            device, *pairs = line.split()
            values = dict(pair.split("=") for pair in pairs)
            read, write = (controlfile.number(values[key]) for key in ("rbps", "wbps"))
            limits.append(IoLimit(device, read, write))
        return tuple(limits)


def _apply(group: str, settings: list[V2Setting]) -> None:
    for setting in settings:
        try:
            controlfile.write(f"{group}/{setting.file}", setting.text)
        except FileNotFoundError:
            if not setting.optional:
                raise


def _switch(group: str, sign: str, name: str) -> None:
    controlfile.write(f"{group}/cgroup.subtree_control", sign + name)
