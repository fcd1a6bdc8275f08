"""The jails of one sandbox: their cgroup, their files, and the start of their kernels."""

import asyncio
import logging
import math
import os
import secrets
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from sbx import errors
from sbx.aio import in_thread
from sbx.environments.directory import check_there
from sbx.isolation import masking
from sbx.isolation.broker.client import HostIds
from sbx.isolation.launch_plan import Bind, Interpreter, LaunchPlan, Paths, WayOut
from sbx.isolation.plan import decide_walls
from sbx.kernels.channel import FrameBudget
from sbx.kernels.kernel import Kernel
from sbx.kernels.memory_watcher import Watcher
from sbx.kernels.pool.zygotes import Key, key_of
from sbx.policy import Policy
from sbx.policy.grants import GrantChange, Grants
from sbx.protocol.grants import Grant
from sbx.protocol.runs import Cause
from sbx.runtime.conversation import Conversation
from sbx.runtime.files.disk_limit import limited, refused
from sbx.runtime.files.open_files import OpenFiles, open_files
from sbx.runtime.files.usage import SandboxUsageSource
from sbx.runtime.granted import GrantedAccess, MemoryLimit
from sbx.runtime.honeytokens import Honeytokens, TokenTriggered
from sbx.runtime.live_mounts import LiveMounts
from sbx.runtime.prewarm import PrewarmedSandbox
from sbx.runtime.processes.languages import Languages
from sbx.runtime.resources import RuntimeResources
from sbx.runtime.run.context import Context
from sbx.runtime.snapshots.dry_run import is_dry_run, offline
from sbx.runtime.snapshots.snapshots import Snapshots
from sbx.workspace import allowed_paths

if TYPE_CHECKING:
    from sbx.egress import EgressDecision
    from sbx.egress.unix_socket import EgressSocket

_log = logging.getLogger(__name__)
_FREED_WITHIN_S = 1.0
_FREED_LOOK_S = 0.005


class SandboxKernels:
    """The part of a sandbox below its conversations: how files are opened and kernels started."""

    def __init__(
        self,
        resources: RuntimeResources,
        policy: Policy,
        loaded: Policy,
        interpreter: Interpreter,
        *,
        workspace: Path | None,
        uploads: Path | None,
        id: str | None,
        directory: str | None,
        prewarmed: PrewarmedSandbox | None,
    ) -> None:
        self.id = id or f"sandbox-{secrets.token_hex(6)}"
        self.policy = policy
        self._loaded = loaded  # before a request narrowed it; other sandboxes share it
        self._resources = resources
        self._interpreter = interpreter
        self._languages = Languages(policy, interpreter)
        self._workspace = workspace
        self._uploads = uploads
        self._prewarmed = prewarmed
        self._group = prewarmed.group if prewarmed is not None else self.id
        if prewarmed is not None:
            directory = prewarmed.directory
        self._directory = directory or resources.data.new_name()
        self._conversations: dict[str, Conversation] = {}
        self._watcher: Watcher | None = None
        self._memory: MemoryLimit
        self._granted: GrantedAccess
        self.honeytokens: Honeytokens | None = None
        if policy.honeytoken.enabled:
            key = resources.data.path / "tripwire_key"  # another name would give other tokens
            self.honeytokens = Honeytokens(policy.honeytoken, self.id, key, self._on_sprung)
        self._freezing: asyncio.Task[None] | None = None
        self._had_kernel = False
        self._outlet: EgressSocket | None = None
        if policy.network.mode == "proxy":
            tokens = self.honeytokens.at_proxy if self.honeytokens is not None else None
            from sbx.egress import unix_socket  # 25 ms, for these policies only

            self._outlet = unix_socket.EgressSocket(
                self.id, policy, resources.data, self._decided, tokens
            )
        self._mounts = LiveMounts(
            policy.shared and workspace is None,
            guarded=policy.host_executables != "allow",
            possible=resources.capabilities.own_namespaces,
            check=partial(self._check_directory, guarded=False),
        )
        self._copies = Snapshots(
            resources, policy, self._directory, lambda: (self._host.uid, self._host.gid)
        )
        self._frame_budget = FrameBudget()
        self._host: HostIds
        self._owner_uid: int | None = None  # of the workspace, when the uid of the jails was chosen
        self._mapped = False  # whether jails see the owner of the workspace as their own uid
        self._key: Key | None = None

    @property
    def network_log(self) -> "tuple[EgressDecision, ...]":
        """The latest decisions of the proxy, the newest last; empty without a proxy."""
        return tuple(self._outlet.log) if self._outlet is not None else ()

    async def _make_group(self, uid: int | None) -> None:
        """Create the cgroup, and decide the host uid of the jails; None lets the broker choose."""
        capabilities = self._resources.capabilities
        if (refusal := refused(self._resources.disk_quota, capabilities)) is not None:
            raise refusal
        walls = {wall.name: wall for wall in decide_walls(self.policy, capabilities)}
        if self._prewarmed is not None:
            self._host = self._prewarmed.host
        else:
            limits = self._resources.group_limits(self.policy)
            self._host = await self._resources.broker.make_sandbox(self._group, limits, uid)
        self._memory = MemoryLimit(
            self._resources.broker,
            self._group,
            self.policy.limits.memory_max,
            partial(self._kill_kernels, Cause.MEMORY),
            enforced=not walls["memory"].weaker,
        )
        self._granted = GrantedAccess(
            self._resources, self.policy, self._interpreter.executable, self._mounts, self._memory
        )
        if walls["memory"].weaker or not capabilities.root:
            self._watcher = Watcher(
                self.policy.limits.memory_max if walls["memory"].weaker else math.inf,
                tasks_max=self.policy.limits.tasks_max,
                descriptors=not capabilities.root,  # then jails have the uid of the host user
            )

    def _decide_key(self, paths: Paths, *, foreign_uid: bool) -> None:
        """Decide which zygotes may fork the kernels. `foreign_uid`: the uid is outside the range of
        the broker."""
        if self._prewarmed is not None:
            self._key = self._prewarmed.key
        else:
            self._key = self._key_of(self.policy, paths, foreign_uid=foreign_uid)

    def _key_of(self, policy: Policy, paths: Paths, *, foreign_uid: bool) -> Key | None:
        capabilities = self._resources.capabilities
        own_uid = self._host.uid if capabilities.root and foreign_uid else None
        return key_of(self._loaded, policy, capabilities, paths, self._resources.filters, own_uid)

    def _check_directory(
        self, directory: int | Path, read_only: bool, *, guarded: bool = True
    ) -> None:
        """Raise Denied `directory_forbidden` for a host directory that no sandbox may see."""
        own = self._resources.own_paths
        allowed_paths.check(directory, own, read_only=read_only, guarded=guarded)

    async def _open_files(self) -> OpenFiles:
        if self._prewarmed is not None and (opened := self._prewarmed.take_files()) is not None:
            return opened
        return await self._open_files_in(self._resources.data.new_name())

    async def _open_files_in(self, directory: str, *, new: bool = True) -> OpenFiles:
        opened = await asyncio.to_thread(
            open_files,
            self._resources.data,
            self._directory,
            directory,
            self.policy,
            (self._host.uid, self._host.gid),
            self._workspace,
            self._uploads,
            protection=self._resources.protection,
            new=new,
            check=self._check_directory,
            mapped=self._mapped,
            owner_uid=self._owner_uid,
        )
        return await limited(self._resources, self.policy, opened)

    @property
    def _whole(self) -> SandboxUsageSource:
        return SandboxUsageSource(
            self.id,
            lambda: self._resources.broker.usage(self._group),
            self._pids,
            self._memory,
        )

    def _pids(self) -> list[int]:
        """Return all processes of the jails. Call it from any thread."""
        return [pid for context in self._contexts() for pid in context.processes]

    async def _start_in(self, conversation: str, context: str, opened: OpenFiles) -> Kernel:
        return await self._start_kernel(opened, conversation, context)

    def _new_grants(self, conversation: str) -> Grants:
        outlet = self._outlet
        return Grants(
            self.policy,
            on_change=partial(self._grant_changed, conversation),
            on_close=partial(outlet.leave, conversation) if outlet is not None else None,
            apply=partial(self._granted.apply, conversation),
            undo=partial(self._granted.undo, conversation),
        )

    def _grant_changed(self, conversation: str, change: GrantChange, grant: Grant) -> None:
        details = (self.id, conversation, change, grant.access, grant.by)
        _log.info("the grants of %s, %s: %s %s by %s", *details)
        if change == "grant_ended" and self._outlet is not None:
            self._outlet.end_forbidden()

    def _walls_of(self, context: str) -> tuple[Policy, Key | None]:
        """Return the policy of the kernels of this context, and the key of their zygotes."""
        if is_dry_run(context) and self.policy.network.mode != "none":
            return offline(self.policy), None
        return self.policy, self._key

    async def _start_kernel(self, opened: OpenFiles, conversation: str, context: str) -> Kernel:
        if self.policy.environment is not None:
            await in_thread(check_there, self.policy, self._interpreter)
        policy, key = self._walls_of(context)
        tokens = self.honeytokens
        if tokens is not None:
            tokens.check()
            await tokens.plant()
            policy = policy.model_copy(update={"env": {**tokens.environment, **policy.env}})
        kernel = self._take_prewarmed(opened)
        if kernel is None:
            ready = await opened.prepare()
            if self._had_kernel:
                await self._wait_for_freed_memory()
            resources = self._resources
            async with self._way_out(policy, conversation) as way_out:
                paths = resources.paths(opened, ready, self._interpreter, way_out)
                order = resources.order(self._group, policy, paths, ready, key)
                if order.plan.host_directories and not order.plan.masks:
                    await opened.call(partial(refuse_uncovered, order.plan))
                if tokens is not None:
                    order = replace(order, config={**order.config, "planted": dict(tokens.files)})
                kernel = await resources.starter.start(order)
        self._had_kernel = True
        kernel.share(self._frame_budget)
        if tokens is not None:
            tokens.watch_output(kernel)
            if tokens.sprung is not None:  # while this kernel started
                await kernel.kill(Cause.HONEYTOKEN)
                tokens.check()
        if is_dry_run(context):
            written = [] if self._workspace is None else [self._workspace]
            opened.left_out += await self._mounts.mount_into_dry_run(kernel, written)
        else:
            await self._mounts.mount_into(kernel, conversation)
        if self._watcher is not None:
            self._watcher.watch(kernel)
        return kernel

    def _on_sprung(self, sprung: TokenTriggered) -> None:
        """End every kernel in a task: code used a planted credential."""
        _log.warning(
            "a honeytoken of %s was sprung: %s, in %s", self.id, sprung.token, sprung.where
        )
        for context in self._contexts():
            context.mark_killed(Cause.HONEYTOKEN)
        self._freezing = asyncio.create_task(self._freeze())

    async def _kill_kernels(self, cause: Cause) -> None:
        ends = (context.kill_for(cause) for context in self._contexts())
        for end in await asyncio.gather(*ends, return_exceptions=True):
            if isinstance(end, Exception):
                _log.error("a kernel of %s is left", self.id, exc_info=end)

    async def _freeze(self) -> None:
        await self._kill_kernels(Cause.HONEYTOKEN)
        if self._outlet is not None:
            await self._outlet.close()

    def _has_kernels(self) -> bool:
        return any(context.alive for context in self._contexts())

    def _contexts(self) -> list[Context]:
        conversations = list(self._conversations.values())  # a copy, for other threads
        return [context for conversation in conversations for context in conversation.ending]

    def _way_out(
        self, policy: Policy, conversation: str
    ) -> AbstractAsyncContextManager[WayOut | None]:
        if self._outlet is None or policy.network.mode == "none":
            return nullcontext()
        ids = (self._host.uid, self._host.gid)
        owner = ids if ids[0] != os.geteuid() else None
        caller = self._conversations.get(conversation)
        grants = caller.grants if caller is not None and policy.grant else None
        return self._outlet.opened(owner, conversation, grants)

    def _decided(self, decision: "EgressDecision") -> None:
        """Log a decision of the proxy. Return quickly, because the proxy waits for it."""
        level = logging.DEBUG if decision.allowed else logging.INFO
        target = (decision.host, decision.port, decision.rule, decision.reason)
        _log.log(level, "the network of %s: %s:%d by %s %s", self.id, *target)

    async def _wait_for_freed_memory(self) -> None:
        """Wait until at most half of the memory is still charged to kernels that have ended, for at
        most a second.

        Linux frees the System V segments of an IPC namespace and the files of a tmpfs a moment
        after the last process has ended (164 MiB of 160 were charged 3 ms after the end). A kernel
        that starts in this moment is killed for them. This cannot be measured while another
        kernel of this sandbox runs.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(_FREED_WITHIN_S):
                while not self._has_kernels():
                    usage = await self._resources.broker.usage(self._group)
                    if (usage.memory_pinned or 0) <= self.policy.limits.memory_max / 2:
                        break
                    await asyncio.sleep(_FREED_LOOK_S)

    def _take_prewarmed(self, opened: OpenFiles) -> Kernel | None:
        """Return the prewarmed kernel over these files, once."""
        prewarmed = self._prewarmed
        if prewarmed is None or prewarmed.files_path != opened.files_path:
            return None
        kernel = prewarmed.take_kernel()
        if kernel is not None:
            self._resources.starter.count_prewarmed(self._group)
        return kernel


def refuse_uncovered(plan: LaunchPlan) -> None:
    """Raise Denied `host_socket` for a socket or FIFO in a directory of the host, where the broker
    has no power over mounts and so cannot cover it. Blocks while it looks for one."""
    if plan.masks or plan.unix_sockets != "own":
        return
    for mount in (*plan.mounts, *plan.own_mounts):
        if isinstance(mount, Bind) and mount.target in plan.host_directories:
            _refuse_below(mount.source)


def _refuse_below(source: str) -> None:
    top = os.open(source, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        limits = masking.MaskingLimits()
        sockets = masking.find(top, limits)
    finally:
        os.close(top)
    if sockets:
        path = f"{source}/{os.fsdecode(sockets[0])}"
        raise _socket_denied(f"{path!r} is a socket or FIFO of the host", path)
    if not limits.complete:
        raise _socket_denied(
            f"{source!r} may hold sockets of the host, and is too large to look for them", source
        )


def _socket_denied(problem: str, path: str) -> errors.Denied:
    return errors.Denied(
        f"{problem}, and this host gives sbx no mount namespace in which to cover it",
        code="host_socket",
        hint='remove it, or use a policy with unix_sockets = "none"; `sbx doctor` names the cause',
        details={"path": path},
    )
