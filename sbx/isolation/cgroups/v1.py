"""cgroup v1: a tree for each controller, so a jail is a group in each of them.

Measured on Linux 6.18, where limits sit on the sandbox's group and processes in the jail's:

- An OOM kill counts in ``memory.oom_control`` (oom_kill) of the victim's own group alone, neither
  in the group whose limit was hit nor in a sibling; ``memory.failcnt`` stays 0 in both. A refused
  fork counts in ``pids.events`` of the forking group alone. So the jail's own files attribute.
- Moving a process by ``cgroup.procs`` waits for an RCU grace period, unless another such move was
  made just before: 7 ms. Moving the calling thread by ``tasks`` does not: 0.35 ms for four trees.
- There is no oom.group: one process of a jail that is out of memory dies, and those that wait for
  it hang. ``cgroup.event_control`` reports it just before, also if the limit is further up.
- A group's blkio throttle does not hold for the groups below it: 2 MiB of direct writes at 1 MiB/s
  took 14 ms with the limit on the sandbox's group and 2.0 s with it on the jail's.
- The queues of sockets count only in a group whose ``memory.kmem.tcp.limit_in_bytes`` was written,
  so that of the jail as well as that of the sandbox, and separately from all other memory. The
  limit holds for UDP and TCP; Unix sockets are other memory. Above it, datagrams are dropped and
  the windows of TCP stay small.
- A CPU quota above an outer group's is EINVAL on v1 (v2 takes it and the tighter one holds).

Linux Documentation/admin-guide/cgroup-v1.
"""

import contextlib
import errno
import os
from typing import NamedTuple

from sbx.isolation.cgroups import controlfile, groups
from sbx.isolation.cgroups.contract import CgroupEvents, CgroupLimits, CgroupUsage, IoLimit
from sbx.isolation.cgroups.probe import CgroupCapabilities

CPU_PERIOD_US = 100_000
CPU_QUOTA_MIN_US = 1_000  # less is EINVAL
_SOCKETS = "memory.kmem.tcp.limit_in_bytes"
_SOCKETS_SHARE = 4  # the queues of sockets: a quarter of the memory, in addition to it


class V1Setting(NamedTuple):
    controller: str
    file: str
    text: str


def sandbox_settings(limits: CgroupLimits, *, counts_swap: bool) -> list[V1Setting]:
    """Return the settings of a sandbox in order: memory with swap may not be below memory."""
    settings = []
    if limits.memory_max is not None:
        size = str(limits.memory_max)
        settings.append(V1Setting("memory", "memory.limit_in_bytes", size))
        # Where the kernel was built or started without swap accounting, no swap instead
        settings.append(
            V1Setting("memory", "memory.memsw.limit_in_bytes", size)
            if counts_swap
            else V1Setting("memory", "memory.swappiness", "0")
        )
        settings.append(V1Setting("memory", _SOCKETS, str(limits.memory_max // _SOCKETS_SHARE)))
    if limits.tasks_max is not None:
        settings.append(V1Setting("tasks", "pids.max", str(limits.tasks_max)))
    if limits.cpu_quota is not None:
        quota = max(CPU_QUOTA_MIN_US, round(limits.cpu_quota * CPU_PERIOD_US))
        settings.append(V1Setting("cpu", "cpu.cfs_period_us", str(CPU_PERIOD_US)))
        settings.append(V1Setting("cpu", "cpu.cfs_quota_us", str(quota)))
    return settings


def jail_settings(limits: CgroupLimits) -> list[V1Setting]:
    settings = []
    if limits.memory_max is not None:
        settings.append(V1Setting("memory", _SOCKETS, "-1"))
    for device, read_bps, write_bps in limits.io:
        for way, value in (("read", read_bps), ("write", write_bps)):
            if value is not None:
                file = f"blkio.throttle.{way}_bps_device"
                settings.append(V1Setting("io", file, f"{device} {value}"))
    return settings


def open_v1(capabilities: CgroupCapabilities, runtime_id: str) -> "V1Hierarchy":
    """Create the runtime's group in each tree. Raise OSError, and then leave nothing behind."""
    own = dict(capabilities.controllers)
    if capabilities.cpuacct is not None:
        own["cpuacct"] = capabilities.cpuacct
    hierarchy = V1Hierarchy(capabilities, own, groups.runtime_name(runtime_id))
    groups.make(hierarchy.group.directories)
    hierarchy.group.make_hierarchical()
    return hierarchy


class V1Group:
    """One group in all of its trees. `trees`: its directory by controller; controllers that are
    mounted together share one."""

    def __init__(self, trees: dict[str, str]) -> None:
        self.trees = trees

    @property
    def path(self) -> str:
        return self.trees.get("memory", self.directories[0])

    @property
    def directories(self) -> list[str]:
        return list(dict.fromkeys(self.trees.values()))

    def child(self, name: str) -> dict[str, str]:
        return {controller: f"{path}/{name}" for controller, path in self.trees.items()}

    def pids(self) -> list[int]:
        members: set[int] = set()
        for path in self.directories:
            members |= groups.pids(path)
        return sorted(members)

    def kill(self) -> None:
        # There is no cgroup.kill, and a fork bomb can outrun signals. Here it cannot fork
        try:
            self.apply([V1Setting("tasks", "pids.max", "0")])
        except FileNotFoundError:
            return  # the group is gone
        groups.kill(lambda: set(self.pids()))

    def remove(self, deadline_s: float) -> None:
        groups.remove(
            self.directories,
            lambda timeout_s: groups.wait_for_exit(self.pids(), timeout_s),
            deadline_s,
        )

    def make_hierarchical(self) -> None:
        """Extend limits to the groups below, which is not the default before Linux 5.11."""
        file = f"{self.path}/memory.use_hierarchy"
        if (controlfile.read_optional(file) or "").strip() == "0":
            controlfile.write(file, "1")

    def usage(self) -> CgroupUsage:
        nanoseconds = controlfile.number(self._read("cpuacct", "cpuacct.usage"))
        return CgroupUsage(
            memory=controlfile.number(self._read("memory", "memory.usage_in_bytes")),
            memory_pinned=controlfile.fields_sum(
                self._read("memory", "memory.stat"), "total_rss", "total_shmem"
            ),
            memory_peak=controlfile.number(self._read("memory", "memory.max_usage_in_bytes")),
            tasks=controlfile.number(self._read("tasks", "pids.current")),
            cpu_s=None if nanoseconds is None else nanoseconds / 1e9,
        )

    def _read(self, controller: str, file: str) -> str | None:
        if controller not in self.trees:
            return None
        return controlfile.read_optional(f"{self.trees[controller]}/{file}")

    def apply(self, settings: list[V1Setting]) -> None:
        for setting in settings:
            if setting.controller in self.trees:
                self._write(setting)

    def _write(self, setting: V1Setting) -> None:
        group = self.trees[setting.controller]
        try:
            controlfile.write(f"{group}/{setting.file}", setting.text)
        except OSError as error:
            if setting.file == _SOCKETS and error.errno == errno.ENOENT:
                return  # a Linux without it
            if setting.file != "cpu.cfs_quota_us" or error.errno != errno.EINVAL:
                raise
            outer = _cpu_quota(os.path.dirname(group))
            if outer is None or outer * CPU_PERIOD_US > int(setting.text):
                raise
            # The limit of an outer group is lower, and holds


class V1Hierarchy:
    version = 1

    def __init__(self, capabilities: CgroupCapabilities, own: dict[str, str], name: str) -> None:
        self.capabilities = capabilities
        self.own = V1Group(own)
        self.group = V1Group(self.own.child(name))

    def make_sandbox(self, name: str, limits: CgroupLimits) -> "V1Sandbox":
        trees = self.group.child("box-" + groups.checked(name))
        if not limits.io:
            trees.pop("io", None)  # one tree less to enter
        sandbox = V1Sandbox(trees, self.own, limits)
        groups.make(sandbox.directories)
        try:
            sandbox.apply(sandbox_settings(limits, counts_swap=sandbox.counts_swap))
        except OSError:
            sandbox.remove(0)
            raise
        return sandbox

    def sweep(self) -> list[str]:
        return groups.sweep(self.own.directories)

    def close(self, deadline_s: float = 2.0) -> None:
        self.group.kill()
        self.group.remove(deadline_s)


class V1Sandbox(V1Group):
    def __init__(self, trees: dict[str, str], own: V1Group, limits: CgroupLimits) -> None:
        super().__init__(trees)
        self._own = own
        self._limits = limits

    def make_jail(self, name: str) -> "V1Jail":
        jail = V1Jail(self.child("jail-" + groups.checked(name)), self._own)
        groups.make(jail.directories)
        try:
            jail.apply(jail_settings(self._limits))
        except OSError:
            jail.remove(0)
            raise
        return jail

    def watch_memory(self) -> int | None:
        if "memory" not in self.trees or self._limits.memory_max is None:
            return None
        notices = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            watched = os.open(f"{self.path}/memory.oom_control", os.O_RDONLY | os.O_CLOEXEC)
            try:
                controlfile.write(f"{self.path}/cgroup.event_control", f"{notices} {watched}")
            finally:
                os.close(watched)
        except FileNotFoundError:  # a Linux without the files of v1's memory controller
            os.close(notices)
            return None
        except OSError:
            os.close(notices)
            raise
        return notices

    @property
    def counts_swap(self) -> bool:
        return os.path.exists(f"{self.path}/memory.memsw.limit_in_bytes")

    def limit_memory(self, memory_max: int) -> None:
        if "memory" not in self.trees:
            return
        settings = sandbox_settings(CgroupLimits(memory_max), counts_swap=self.counts_swap)
        if memory_max > (self._limits.memory_max or 0):
            settings.reverse()
        self.apply(settings)
        self._limits = self._limits._replace(memory_max=memory_max)

    def throttle(self, on: bool) -> None:
        only_cpu = CgroupLimits(cpu_quota=self._limits.cpu_quota)
        for setting in sandbox_settings(only_cpu, counts_swap=False):
            lifted = setting._replace(text="-1") if setting.file == "cpu.cfs_quota_us" else setting
            with contextlib.suppress(FileNotFoundError):
                self.apply([setting if on else lifted])

    def remove(self, deadline_s: float = 2.0) -> None:
        self.kill()
        super().remove(deadline_s)


class V1Jail(V1Group):
    def __init__(self, trees: dict[str, str], own: V1Group) -> None:
        super().__init__(trees)
        self._own = own

    def enter(self) -> None:
        # The quick way moves one thread. With a second one it would leave a process half outside
        if os.stat("/proc/self/task").st_nlink != 3:
            raise OSError(errno.EINVAL, "only a process with one thread can enter", self.path)
        homes = list(dict.fromkeys(self._own.trees[controller] for controller in self.trees))
        moved = []
        try:
            for home, directory in zip(homes, self.directories, strict=True):
                controlfile.write(f"{directory}/tasks", "0")
                moved.append(home)
        except OSError:
            for home in moved:
                controlfile.write(f"{home}/tasks", "0")
            raise

    def entries(self) -> list[int]:
        return controlfile.open_all(f"{directory}/tasks" for directory in self.directories)

    def events(self) -> CgroupEvents:
        return CgroupEvents(
            controlfile.field(self._read("memory", "memory.oom_control"), "oom_kill") or 0,
            controlfile.field(self._read("tasks", "pids.events"), "max") or 0,
        )

    def limits(self) -> CgroupLimits:
        trees = self.trees
        return CgroupLimits(
            controlfile.tightest(trees["memory"], "memory.limit_in_bytes")
            if "memory" in trees
            else None,
            controlfile.tightest(trees["tasks"], "pids.max") if "tasks" in trees else None,
            _cpu_quota(trees["cpu"]) if "cpu" in trees else None,
            self._io_limits(),
        )

    def _io_limits(self) -> tuple[IoLimit, ...]:
        reads = self._throttle("blkio.throttle.read_bps_device")
        writes = self._throttle("blkio.throttle.write_bps_device")
        devices = sorted(reads.keys() | writes.keys())
        return tuple(IoLimit(device, reads.get(device), writes.get(device)) for device in devices)

    def _throttle(self, file: str) -> dict[str, int]:
        lines = (self._read("io", file) or "").splitlines()
        return {device: int(value) for device, value in (line.split() for line in lines)}


def _cpu_quota(group: str) -> float | None:
    quotas = controlfile.upwards(group, "cpu.cfs_quota_us")
    periods = controlfile.upwards(group, "cpu.cfs_period_us")
    shares = [int(q) / int(p) for q, p in zip(quotas, periods, strict=False) if int(q) > 0]
    return min(shares, default=None)
