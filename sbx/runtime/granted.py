"""Grants that the walls of a sandbox do not read by themselves.

GrantedAccess   applies a grant of a directory, memory or a package, and undoes it at its end
MemoryLimit     the memory limit of a sandbox, which a grant raises
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from sbx.aio import in_thread, run_to_completion
from sbx.errors import Broken, SbxError, Unavailable, needs_extra
from sbx.isolation.broker.client import BrokerClient
from sbx.policy import Policy
from sbx.policy.units import MIB
from sbx.protocol.grants import Access, Grant
from sbx.runtime.live_mounts import LiveMounts
from sbx.runtime.resources import RuntimeResources
from sbx.workspace.allowed_paths import MountSources

_log = logging.getLogger(__name__)
_FREED_WITHIN_S = 10.0
_FREED_LOOK_S = 0.01  # Linux frees memory a moment after its last process has ended


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
        """Raise the limit to this, if it is lower. A cancelled call changes nothing. Raise
        Unavailable `memory_not_limited`."""
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
            self._in_force = 0  # the broker may have raised it
            with suppress(SbxError):
                await run_to_completion(self._change())
            raise

    async def end(self, memory: int) -> None:
        """Return to the limit without this grant. Kernels that use more are ended."""
        self._granted.remove(memory)
        await self._change()

    async def _change(self) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + _FREED_WITHIN_S
        async with self._changing:
            while self._in_force != (memory := self.bytes):
                try:
                    await self._broker.limit_memory(self._group, memory)
                except Broken as error:
                    if error.code != "memory_in_use" or loop.time() > until:
                        raise
                    _log.info("%s uses more memory than is granted: its kernels end", self._group)
                    await self._end_kernels()
                    await asyncio.sleep(_FREED_LOOK_S)
                else:
                    self._in_force = memory


class GrantedAccess:
    """The grants of all conversations of a sandbox, as far as they need an action."""

    def __init__(
        self,
        resources: RuntimeResources,
        policy: Policy,
        python: str,
        mounts: LiveMounts,
        memory: MemoryLimit,
    ) -> None:
        """`python`: the executable of the Python inside, for which packages are chosen."""
        self._resources = resources
        self._python = python
        self._mounts = mounts
        self._memory = memory
        directories = [Path(each) for grant in policy.grant for each in grant.directory]
        self._directories = MountSources(directories, writable=False)
        self._packages: dict[tuple[str, str], str] = {}  # by conversation and path inside

    async def apply(self, conversation: str, access: Access) -> str | None:
        """Give the kernels of a conversation this access, and return its path inside, if it has
        one. Raise as `Grants.grant`; then, and if the call is cancelled, nothing has changed."""
        match access.kind:
            case "memory":
                await self._memory.grant(int(access.target) * MIB)
            case "directory":
                mount = self._mounts.show_to(conversation, self._directories, access.target)
                return await self._shown(conversation, mount)
            case "package":
                return await self._install(conversation, access.target)
        return None

    async def undo(self, conversation: str, grant: Grant) -> None:
        if grant.kind == "memory":
            await self._memory.end(int(grant.target) * MIB)
        elif grant.inside is not None:
            try:
                await self._mounts.hide_from(conversation, grant.inside)
            finally:
                if directory := self._packages.pop((conversation, grant.inside), None):
                    await self._remove(directory)

    async def _shown(self, conversation: str, mounting: Awaitable[str]) -> str:
        """Wait for a mount, and return its path inside. If the call is cancelled, unmount it."""
        task = asyncio.ensure_future(mounting)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await run_to_completion(asyncio.wait([task]))
            if not task.cancelled() and task.exception() is None:
                await run_to_completion(self._mounts.hide_from(conversation, task.result()))
            raise

    async def _install(self, conversation: str, package: str) -> str:
        resources, data = self._resources, self._resources.data
        if resources.confined:
            raise Unavailable(
                "a service that was started as root installs no packages",
                code="packages_need_rights",
                hint="serve as another user, or name an environment that has them in the policy",
            )
        with needs_extra("the installation of a package", "env"):
            from sbx.environments.installers import install_missing
        directory = data.new_name()
        resources.unowned_directories.add(directory)  # it has no row, and is not swept
        try:
            top = await in_thread(data.make_packages, directory)
            await install_missing(package, self._python, top)
            mount = self._mounts.show_packages(conversation, top, package)
            inside = await self._shown(conversation, mount)
        except BaseException:
            await run_to_completion(self._remove(directory))
            raise
        self._packages[conversation, inside] = directory
        return inside

    async def _remove(self, directory: str) -> None:
        await in_thread(self._resources.data.remove, directory)
        self._resources.unowned_directories.discard(directory)
