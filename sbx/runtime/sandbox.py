"""A sandbox: what a caller owns. It sequences; how anything is done is known by what it calls."""

import asyncio
import logging
import math
import os
import secrets
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from sbx import errors
from sbx.aio import check_process, in_thread, run_to_completion
from sbx.egress.unix_socket import EgressSocket
from sbx.environments.directory import check_there
from sbx.isolation.broker.client import HostIds
from sbx.isolation.launch_plan import Interpreter, Paths, WayOut
from sbx.isolation.plan import decide_walls
from sbx.isolation.receipt import Receipt
from sbx.kernels.budget import FrameBudget
from sbx.kernels.kernel import Kernel
from sbx.kernels.memory_watcher import Watcher
from sbx.kernels.pool.zygotes import Key, key_of
from sbx.policy import Policy
from sbx.protocol.contexts import DEFAULT_CONTEXT
from sbx.protocol.mounts import Mount
from sbx.protocol.runs import Cause
from sbx.run_methods import to_default
from sbx.runtime.conversation import Conversation
from sbx.runtime.files.disk_limit import limited, refused
from sbx.runtime.files.files import (
    MountPoints,
    OpenFiles,
    WorkspaceFiles,
    WorkspaceUploads,
    open_files,
)
from sbx.runtime.files.usage import SandboxUsageSource
from sbx.runtime.honeytokens import Honeytokens, TokenTriggered
from sbx.runtime.host_sockets import refuse_uncovered
from sbx.runtime.live_mounts import LiveMounts
from sbx.runtime.prewarm import PrewarmedSandbox
from sbx.runtime.processes.commands import Commands
from sbx.runtime.processes.languages import Languages
from sbx.runtime.processes.terminals import Terminals
from sbx.runtime.resources import RuntimeResources
from sbx.runtime.run.context_kernel import StartKernel
from sbx.runtime.run.contexts import Contexts
from sbx.runtime.snapshots.dry_run import is_dry_run, offline
from sbx.runtime.snapshots.snapshots import Snapshots
from sbx.workspace import allowed_paths, check_name
from sbx.workspace.rights import refuse_rights

if TYPE_CHECKING:
    from sbx.egress import EgressDecision

_log = logging.getLogger(__name__)
DEFAULT_CONVERSATION = "default"
_CONVERSATIONS_MAX = 1000
_FREED_WITHIN_S = 1.0
_FREED_LOOK_S = 0.005


class AsyncSandbox:
    """A sandbox for asyncio: `async with await runtime.create() as box`.

    Its own methods are those of its conversation `default`; `conversation(name)` gives others,
    with files and variables of their own, under the limits they all share.
    """

    def __init__(
        self,
        means: RuntimeResources,
        policy: Policy,
        loaded: Policy,
        interpreter: Interpreter,
        *,
        workspace: Path | None,
        uploads: Path | None,
        on_close: Callable[["AsyncSandbox"], None],
        id: str | None = None,
        directory: str | None = None,
        home: PrewarmedSandbox | None = None,
    ) -> None:
        """`id` and `directory` (an opaque name): those of one that was closed with its files.
        `home`: what was made ahead for it; its first conversation gets the kernel."""
        self.id = id or f"sandbox-{secrets.token_hex(6)}"
        self.policy = policy
        self._loaded = loaded  # as it was before a request narrowed it: what others share
        self._means = means
        self._interpreter = interpreter
        self._languages = Languages(policy, interpreter)
        self._workspace = workspace
        self._uploads = uploads
        self._on_close = on_close
        self._home = home
        self._group = home.group if home is not None else self.id
        if home is not None:
            directory = home.directory
        self._directory = directory or means.data.new_name()
        self._conversations: dict[str, Conversation] = {}
        self._watcher: Watcher | None = None
        self.honeytokens: Honeytokens | None = None
        if policy.honeytoken.enabled:
            key = means.data.path / "tripwire_key"  # another name would give other tokens
            self.honeytokens = Honeytokens(policy.honeytoken, self.id, key, self._on_sprung)
        self._freezing: asyncio.Task[None] | None = None
        self._had_kernel = False
        self._outlet: EgressSocket | None = None
        if policy.network.mode == "proxy":
            wires = self.honeytokens.at_proxy if self.honeytokens is not None else None
            self._outlet = EgressSocket(self.id, policy, means.data, self._decided, wires)
        self._mounts = LiveMounts(
            policy.shared and workspace is None,
            guarded=policy.host_executables != "allow",
            possible=means.capabilities.own_namespaces,
            check=self._check_directory,
        )
        self._copies = Snapshots(
            means, policy, self._directory, lambda: (self._host.uid, self._host.gid)
        )
        self._frame_budget = FrameBudget()
        self._host: HostIds
        self._owner_uid: int | None = None  # of the workspace, when the uid of jails was chosen
        self._mapped = False  # whether jails see the owner of the workspace as their own uid
        self._key: Key | None = None
        self._pid = os.getpid()
        self._closed = False
        self._ended = False
        self._closing = asyncio.Lock()

    async def prepare(self) -> None:
        """Refuse what this host cannot enforce, then make the cgroup; nothing runs yet.

        Whoever calls it closes the sandbox where this raises.
        """
        if self._uploads is not None:
            await asyncio.to_thread(self._check_directory, self._uploads, read_only=True)
        if self._workspace is not None:
            await asyncio.to_thread(self._check_directory, self._workspace)
            self._owner_uid = await asyncio.to_thread(_owner_of, self._workspace)
            may_map = self._means.capabilities.root and self._owner_uid is not None
            self._mapped = may_map and (self._owner_uid == 0 or self._means.confined)
        await self._make_group(None if self._mapped else self._owner_uid or None)
        opened = await self._default.opened()
        if self._mapped:
            path = str(opened.files_path)
            await self._means.broker.map_owner(self._group, path, opened.identities[path])
            assert opened.host_directory is not None
            await opened.call(partial(refuse_rights, opened.host_directory))
        paths = self._means.paths(opened, MountPoints({}, opened.any_guard), self._interpreter)
        self._decide_key(paths, foreign_uid=paths.host_directory and not self._mapped)

    async def _make_group(self, uid: int | None) -> None:
        """The cgroup and host uid of its jails; None lets the broker choose the uid."""
        capabilities = self._means.capabilities
        if (refusal := refused(self._means.disk_quota, capabilities)) is not None:
            raise refusal
        walls = {wall.name: wall for wall in decide_walls(self.policy, capabilities)}
        if self._home is not None:
            self._host = self._home.host
        else:
            limits = self._means.group_limits(self.policy)
            self._host = await self._means.broker.make_sandbox(self._group, limits, uid)
        if walls["memory"].weaker or not capabilities.root:
            self._watcher = Watcher(
                self.policy.limits.memory_max if walls["memory"].weaker else math.inf,
                descriptors=not capabilities.root,  # then jails have the uid of the host user
            )

    def _decide_key(self, paths: Paths, *, foreign_uid: bool) -> None:
        """By which zygote its kernels may be forked. `foreign_uid`: not of the broker's range."""
        if self._home is not None:
            self._key = self._home.key
        else:
            self._key = self._key_of(self.policy, paths, foreign_uid=foreign_uid)

    def _key_of(self, policy: Policy, paths: Paths, *, foreign_uid: bool) -> Key | None:
        capabilities = self._means.capabilities
        own_uid = self._host.uid if capabilities.root and foreign_uid else None
        return key_of(self._loaded, policy, capabilities, paths, self._means.filters, own_uid)

    # -- the default conversation ---------------------------------------------------------------

    run = to_default(Conversation.run)
    stream = to_default(Conversation.stream)
    shell = to_default(Conversation.shell)
    stream_shell = to_default(Conversation.stream_shell)
    run_script = to_default(Conversation.run_script)
    stream_script = to_default(Conversation.stream_script)
    start_run = to_default(Conversation.start_run)
    start_shell = to_default(Conversation.start_shell)
    start_script = to_default(Conversation.start_script)
    write_stdin = to_default(Conversation.write_stdin)
    interrupt = to_default(Conversation.interrupt)
    give_up = to_default(Conversation.give_up)
    dry_run = to_default(Conversation.dry_run)
    checkpoint = to_default(Conversation.checkpoint)
    usage = to_default(Conversation.usage)
    stream_usage = to_default(Conversation.stream_usage)
    read_receipt = to_default(Conversation.read_receipt)
    start = to_default(Conversation.start)

    @property
    def files(self) -> WorkspaceFiles:
        return self._default.files

    @property
    def uploads(self) -> WorkspaceUploads:
        return self._default.uploads

    @property
    def contexts(self) -> Contexts:
        return self._default.contexts

    @property
    def commands(self) -> Commands:
        return self._default.commands

    @property
    def terminals(self) -> Terminals:
        return self._default.terminals

    @property
    def receipt(self) -> Receipt | None:
        return self._default.receipt

    @property
    def network_log(self) -> "tuple[EgressDecision, ...]":
        """What its proxy decided lately, the last one last; empty without a proxy."""
        return tuple(self._outlet.log) if self._outlet is not None else ()

    # -- conversations and life -----------------------------------------------------------------

    def conversation(self, name: str) -> Conversation:
        """The conversation of this name; made when there is none.

        Raises InvalidPath for a name that cannot be one, Conflict `too_many_conversations` and
        `workspace_not_shared`, Closed.
        """
        check_process(self._pid)
        self._check_open()
        if found := self._conversations.get(name):
            return found
        self._check_name(name)
        if len(self._conversations) >= _CONVERSATIONS_MAX:
            raise errors.Conflict(
                f"a sandbox has at most {_CONVERSATIONS_MAX} conversations",
                code="too_many_conversations",
            )
        if self._workspace is not None and self._conversations:
            raise errors.Conflict(
                "a sandbox over a directory of the host has one conversation only",
                code="workspace_not_shared",
                hint="make a sandbox for each, so that neither sees the other's changes unasked",
            )
        made = self._conversations[name] = self._make_conversation(name)
        made.files.honeytokens = made.uploads.honeytokens = self.honeytokens
        made.files.partials.honeytokens = self.honeytokens
        made.copy_by(self._copies, self._starter_of(name))
        return made

    def _check_name(self, name: str) -> None:
        check_name(name)

    def _make_conversation(self, name: str) -> Conversation:
        return Conversation(
            name,
            self.policy,
            self._open_files,
            self._start_in,
            self._means.grace_s,
            languages=self._languages,
            whole=self._whole,
        )

    async def mount(
        self, source: str | Path, target: str | None = None, *, read_only: bool = True
    ) -> str:
        """Show one more directory of the host inside, also in kernels that live; the path there.
        See `LiveMounts.mount`."""
        check_process(self._pid)
        self._check_open()
        told = await self._mounts.mount(source, target, read_only=read_only)
        return told.target

    async def unmount(self, target: str) -> None:
        """Show it no more; see `LiveMounts.unmount`."""
        check_process(self._pid)
        self._check_open()
        await self._mounts.unmount(target)

    async def mounts(self) -> tuple[Mount, ...]:
        """What is mounted now, by the path inside."""
        return self._mounts.there

    async def unfreeze(self) -> bool:
        """Let kernels start again after a honeytoken was sprung; False where none was."""
        check_process(self._pid)
        self._check_open()
        if self.honeytokens is None or self.honeytokens.sprung is None:
            return False
        self.honeytokens.unfreeze()
        return True

    async def stop(self) -> None:
        """End every kernel; files stay, and the next run starts another one."""
        check_process(self._pid)
        await asyncio.gather(*(one.stop() for one in self._conversations.values()))
        if self._home is not None:
            await self._home.end_kernel()
        if self._outlet is not None:
            await self._outlet.rest(self._has_kernels)

    async def close(self) -> None:
        """End everything and remove every file; a second call does nothing.

        Once begun it is done to its end, also when the call is cancelled.
        """
        check_process(self._pid)
        self._closed = True
        await run_to_completion(self._end())

    async def _end(self) -> None:
        async with self._closing, AsyncExitStack() as last:
            if self._ended:
                return
            self._ended = True
            last.callback(self._on_close, self)
            last.push_async_callback(self._leave_files)
            last.push_async_callback(self._means.broker.drop_sandbox, self._group)
            if self._home is not None:
                last.push_async_callback(self._home.leave)
            if self._outlet is not None:
                last.push_async_callback(self._outlet.close)
            if self._freezing is not None:
                await asyncio.wait([self._freezing])
            if self._watcher is not None:
                self._watcher.close()
            ends = (one.close() for one in self._conversations.values())
            for end in await asyncio.gather(*ends, return_exceptions=True):
                if end is not None:
                    raise end

    async def _leave_files(self) -> None:
        await asyncio.to_thread(self._means.data.remove, self._directory)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    # -- what conversations ask for -------------------------------------------------------------

    def _check_directory(
        self, directory: int | Path, *, read_only: bool = False, guarded: bool = True
    ) -> None:
        """Raise Denied `directory_forbidden` for a host directory that no sandbox may see."""
        own = self._means.own_paths
        allowed_paths.check(directory, own, read_only=read_only, guarded=guarded)

    async def _open_files(self) -> OpenFiles:
        if self._home is not None and (opened := self._home.take_files()) is not None:
            return opened
        return await self._open_files_in(self._means.data.new_name())

    async def _open_files_in(self, directory: str, *, new: bool = True) -> OpenFiles:
        opened = await asyncio.to_thread(
            open_files,
            self._means.data,
            self._directory,
            directory,
            self.policy,
            (self._host.uid, self._host.gid),
            self._workspace,
            self._uploads,
            protection=self._means.protection,
            new=new,
            check=self._check_directory,
            mapped=self._mapped,
            owner_uid=self._owner_uid,
        )
        return await limited(self._means, self.policy, opened)

    @property
    def _whole(self) -> SandboxUsageSource:
        return SandboxUsageSource(
            self.id, lambda: self._means.broker.usage(self._group), self._pids
        )

    def _pids(self) -> list[int]:
        """Every process of its jails; from any thread."""
        contexts = [one for talk in list(self._conversations.values()) for one in talk.ending]
        return [pid for one in contexts for pid in one.processes]

    def _starter_of(self, _conversation: str) -> StartKernel:
        return self._start_in

    async def _start_in(self, context: str, opened: OpenFiles) -> Kernel:
        return await self._start_kernel(opened, context)

    def _walls_of(self, context: str) -> tuple[Policy, Key | None]:
        """The policy of the kernels of this context, and by which zygote they may be forked."""
        if is_dry_run(context) and self.policy.network.mode != "none":
            return offline(self.policy), None
        return self.policy, self._key

    async def _start_kernel(self, opened: OpenFiles, context: str = DEFAULT_CONTEXT) -> Kernel:
        if self.policy.environment is not None:
            await in_thread(check_there, self.policy, self._interpreter)
        policy, key = self._walls_of(context)
        wires = self.honeytokens
        if wires is not None:
            wires.check()
            await wires.plant()
            policy = policy.model_copy(update={"env": {**wires.environment, **policy.env}})
        kernel = self._moved_in(opened)
        if kernel is None:
            ready = await opened.prepare()
            if self._had_kernel:
                await self._wait_for_freed_memory()
            means = self._means
            async with self._way_out(policy) as way_out:
                paths = means.paths(opened, ready, self._interpreter, way_out)
                order = means.order(self._group, policy, paths, ready, key)
                if order.plan.host_directories and not order.plan.masks:
                    await opened.call(partial(refuse_uncovered, order.plan))
                if wires is not None:
                    order = replace(order, config={**order.config, "planted": dict(wires.files)})
                kernel = await means.starter.start(order)
        self._had_kernel = True
        kernel.share(self._frame_budget)
        if wires is not None:
            wires.watch_output(kernel)
            if wires.sprung is not None:  # while this one started
                await kernel.kill(Cause.HONEYTOKEN)
                wires.check()
        if is_dry_run(context):
            written = [] if self._workspace is None else [self._workspace]
            opened.left_out += await self._mounts.mount_into_dry_run(kernel, written)
        else:
            await self._mounts.mount_into(kernel)
        if self._watcher is not None:
            self._watcher.watch(kernel)
        return kernel

    def _on_sprung(self, sprung: TokenTriggered) -> None:
        """A planted credential was used: end every kernel, by a task of its own."""
        _log.warning(
            "a honeytoken of %s was sprung: %s, in %s", self.id, sprung.token, sprung.where
        )
        for talk in self._conversations.values():
            for one in talk.ending:
                one.mark_killed(Cause.HONEYTOKEN)
        self._freezing = asyncio.create_task(self._freeze())

    async def _freeze(self) -> None:
        every = [one for talk in self._conversations.values() for one in talk.ending]
        ends = (one.kill_for(Cause.HONEYTOKEN) for one in every)
        for end in await asyncio.gather(*ends, return_exceptions=True):
            if isinstance(end, Exception):
                _log.error("a kernel of the frozen %s is left", self.id, exc_info=end)
        if self._outlet is not None:
            await self._outlet.close()

    def _has_kernels(self) -> bool:
        every = (one for talk in self._conversations.values() for one in talk.ending)
        return any(one.alive for one in every)

    def _way_out(self, policy: Policy) -> AbstractAsyncContextManager[WayOut | None]:
        if self._outlet is None or policy.network.mode == "none":
            return nullcontext()
        ids = (self._host.uid, self._host.gid)
        return self._outlet.opened(ids if ids[0] != os.geteuid() else None)

    def _decided(self, decision: "EgressDecision") -> None:
        """What the proxy let through, or did not. To be quick: the proxy waits for it."""
        level = logging.DEBUG if decision.allowed else logging.INFO
        told = (self.id, decision.host, decision.port, decision.rule, decision.reason)
        _log.log(level, "the network of %s: %s:%d by %s %s", *told)

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
                    usage = await self._means.broker.usage(self._group)
                    if (usage.memory_pinned or 0) <= self.policy.limits.memory_max / 2:
                        break
                    await asyncio.sleep(_FREED_LOOK_S)

    def _moved_in(self, opened: OpenFiles) -> Kernel | None:
        """The kernel that entered these files before anybody owned them, once."""
        home = self._home
        if home is None or home.files_path != opened.files_path:
            return None
        kernel = home.take_kernel()
        if kernel is not None:
            self._means.starter.count_prewarmed(self._group)
        return kernel

    @property
    def _default(self) -> Conversation:
        return self.conversation(DEFAULT_CONVERSATION)

    def _check_open(self) -> None:
        if self._closed:
            raise errors.Closed(
                f"the {self.id} is closed", hint="make a new one: its files and state are gone"
            )


def _owner_of(workspace: Path) -> int | None:
    """The host uid that a directory of the host belongs to; None where it cannot be seen."""
    try:
        return workspace.stat().st_uid
    except OSError:
        return None  # opening it says what is wrong
