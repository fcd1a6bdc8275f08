"""The parts that the sandboxes of a runtime share, and their requests for kernels."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sbx.errors import Broken, Unavailable
from sbx.isolation.broker.client import BrokerClient
from sbx.isolation.launch_plan import GroupLimits, Interpreter, Paths, WayOut
from sbx.isolation.plan import Filters, plan, slows_io
from sbx.isolation.probe import Capabilities
from sbx.kernels.pool.factory import KernelFactory
from sbx.kernels.pool.warm_pool import LaunchRequest
from sbx.kernels.pool.zygotes import Key
from sbx.policy import Policy
from sbx.runtime.files.open_files import MountPoints, OpenFiles
from sbx.workspace import DataDirectory
from sbx.workspace.allowed_paths import OwnPaths
from sbx.workspace.quarantine import HostProtection

_MIME_MAX = 8 << 20
_FREED_LOOK_S = 0.01  # Linux frees memory a moment after its last process has ended


@dataclass(frozen=True, slots=True)
class RuntimeResources:
    """The parts of a runtime that every sandbox uses. `unowned_directories`: those of sandboxes
    without an owner, which no store has; `copies`: those of frozen copies. `confined`: the broker
    gives jails only uids of its range."""

    broker: BrokerClient
    starter: KernelFactory
    data: DataDirectory
    filters: Filters
    guest: Path
    grace_s: float
    own_paths: OwnPaths
    unowned_directories: set[str] = field(default_factory=set)
    copies: set[str] = field(default_factory=set)
    disk_quota: str = "auto"
    protection: HostProtection = field(default_factory=lambda: HostProtection(Path()))
    confined: bool = False

    @property
    def capabilities(self) -> Capabilities:
        assert self.broker.capabilities is not None
        return self.broker.capabilities

    def paths_of_any(self, interpreter: Interpreter, policy: Policy) -> Paths:
        """Return the paths of any workspace of sbx, as far as they matter for a zygote."""
        shared = "" if policy.shared else None
        return Paths("", "", interpreter, str(self.guest), shared)

    def paths(
        self,
        opened: OpenFiles,
        ready: MountPoints,
        interpreter: Interpreter,
        way_out: WayOut | None = None,
    ) -> Paths:
        """Return where a jail finds its parts of these files."""
        return Paths(
            files=str(opened.files_path),
            uploads=str(opened.uploads_path),
            interpreter=interpreter,
            guest=str(self.guest),
            shared=str(opened.shared_path) if opened.shared_path is not None else None,
            shared_read_only=opened.shared_read_only,
            host_directory=opened.host_directory is not None,
            guard=ready.guard,
            host_uploads=str(opened.uploads_path) in opened.identities,
            way_out=way_out,
            disk=opened.disk,
            mapped=opened.mapped,
        )

    def order(
        self, group: str, policy: Policy, paths: Paths, ready: MountPoints, key: Key | None
    ) -> LaunchRequest:
        """Return the request for a kernel by this policy, in the sandbox with the name `group` at
        the broker."""
        planned = plan(policy, self.capabilities, paths, self.filters)
        return LaunchRequest(
            sandbox=group,
            plan=planned,
            identities=ready.identities,
            config=_config(policy, planned.writable_home),
            key=key,
            pooled=policy.pool.max_idle > 0,
        )

    def group_limits(self, policy: Policy) -> GroupLimits:
        """Return the limits of all jails of one sandbox together."""
        limits, disk = policy.limits, self.broker.disk
        io: tuple[tuple[str, int | None, int | None], ...] = ()
        if slows_io(policy) and disk is not None and self.capabilities.layer("io").available:
            rates = (limits.io_read_max, limits.io_write_max)
            read, write = (None if rate == math.inf else int(rate) for rate in rates)
            io = ((disk, read, write),)
        return GroupLimits(limits.memory_max, limits.tasks_max, limits.cpu_quota, io)


class MemoryLimit:
    """The memory limit of the jails of one sandbox: that of the policy, or the largest grant."""

    def __init__(
        self,
        broker: BrokerClient,
        group: str,
        memory_max: int,
        end_kernels: Callable[[], Awaitable[None]],
        *,
        enforced: bool,
    ) -> None:
        """`end_kernels` is called if they use more than the limit to which they return. `enforced`:
        whether the group has a limit of memory."""
        self._enforced = enforced
        self._broker = broker
        self._group = group
        self._memory_max = self._in_force = memory_max
        self._end_kernels = end_kernels
        self._granted: list[int] = []
        self._changing = asyncio.Lock()

    @property
    def bytes(self) -> int:
        return max([self._memory_max, *self._granted])

    async def grant(self, memory: int) -> None:
        """Raise the limit to this, if it is lower. Raise Unavailable `memory_not_limited`."""
        if not self._enforced:
            raise Unavailable(
                "this host has no cgroup that limits the memory of a sandbox",
                code="memory_not_limited",
                hint="sbx doctor lists what the host lacks",
            )
        self._granted.append(memory)
        try:
            await self._change()
        except BaseException:
            self._granted.remove(memory)
            raise

    async def end(self, memory: int) -> None:
        """Return to the limit without this grant. Kernels that use more are ended."""
        self._granted.remove(memory)
        await self._change()

    async def _change(self) -> None:
        async with self._changing:
            while self._in_force != (memory := self.bytes):
                try:
                    await self._broker.limit_memory(self._group, memory)
                except Broken as error:
                    if error.code != "memory_in_use":
                        raise
                    await self._end_kernels()
                    await asyncio.sleep(_FREED_LOOK_S)
                else:
                    self._in_force = memory


def _config(policy: Policy, home: str) -> dict[str, Any]:
    rules = policy.imports
    return {
        "preload": list(policy.preload),
        "import_rules": {
            "allow": None if rules.allow == "any" else list(rules.allow),
            "forbid": list(rules.forbid),
        },
        "processes": policy.processes,
        "user": policy.user,
        "home": home,
        "output_max": policy.limits.output_max,
        "mime_max": _MIME_MAX,
        "cwd": "/workspace",
    }
