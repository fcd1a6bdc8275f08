"""A sandbox, as its owner sees it: its conversations and its life."""

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Self

from sbx import errors
from sbx.aio import check_process, run_to_completion
from sbx.isolation.launch_plan import Interpreter
from sbx.isolation.receipt import Receipt
from sbx.policy import Policy
from sbx.policy.grants import Grants
from sbx.protocol.mounts import Mount
from sbx.run_methods import to_default
from sbx.runtime.conversation import Conversation
from sbx.runtime.files.files import MountPoints, WorkspaceFiles, WorkspaceUploads
from sbx.runtime.lifetime import UNLIMITED, Lifetime, watch
from sbx.runtime.prewarm import PrewarmedSandbox
from sbx.runtime.processes.commands import Commands
from sbx.runtime.processes.terminals import Terminals
from sbx.runtime.resources import RuntimeResources
from sbx.runtime.run.context_kernel import StartKernel
from sbx.runtime.run.contexts import Contexts
from sbx.runtime.sandbox_kernels import SandboxKernels
from sbx.telemetry.background import background_context
from sbx.workspace.outside import notes
from sbx.workspace.paths import check_name
from sbx.workspace.rights import refuse_rights

_log = logging.getLogger(__name__)
DEFAULT_CONVERSATION = "default"
_CONVERSATIONS_MAX = 1000


class AsyncSandbox(SandboxKernels):
    """A sandbox for asyncio: `async with await runtime.create() as box`.

    The methods for runs and files are those of its conversation `default`. `conversation(name)`
    returns others, which have separate files and variables, and share the limits.
    """

    def __init__(
        self,
        resources: RuntimeResources,
        policy: Policy,
        loaded: Policy,
        interpreter: Interpreter,
        *,
        workspace: Path | None,
        uploads: Path | None,
        on_close: Callable[["AsyncSandbox"], None],
        id: str | None = None,
        directory: str | None = None,
        prewarmed: PrewarmedSandbox | None = None,
        lifetime: Lifetime = UNLIMITED,
    ) -> None:
        """`id` and `directory` (an opaque name): those of a sandbox that was closed and kept its
        files. `prewarmed`: a prewarmed sandbox; the first conversation gets its kernel."""
        super().__init__(
            resources,
            policy,
            loaded,
            interpreter,
            workspace=workspace,
            uploads=uploads,
            id=id,
            directory=directory,
            prewarmed=prewarmed,
        )
        self._on_close = on_close
        self._pid = os.getpid()
        self._closed = False
        self._ended = False
        self._closing = asyncio.Lock()
        self._lifetime = lifetime
        self._living: asyncio.Task[None] | None = None
        self._close_reason = ""
        self.notes: tuple[str, ...] = ()  # about the directory of the host, after `prepare`

    def __repr__(self) -> str:
        return f"<AsyncSandbox {self.id}, policy {self.policy.name}>"

    async def prepare(self) -> None:
        """Refuse a policy that this host cannot enforce, and create the cgroup. Start nothing.

        If this raises, the caller closes the sandbox.
        """
        if self._uploads is not None:
            await asyncio.to_thread(self._check_directory, self._uploads, True)
        if self._workspace is not None:
            await asyncio.to_thread(self._check_directory, self._workspace, False)
            self._owner_uid = await asyncio.to_thread(_owner_of, self._workspace)
            may_map = self._resources.capabilities.root and self._owner_uid is not None
            self._mapped = may_map and (self._owner_uid == 0 or self._resources.confined)
        await self._make_group(None if self._mapped else self._owner_uid or None)
        opened = await self._default.opened()
        if self._mapped:
            path = str(opened.files_path)
            await self._resources.broker.map_owner(self._group, path, opened.identities[path])
            assert opened.host_directory is not None
            await opened.call(partial(refuse_rights, opened.host_directory))
        if opened.host_directory is not None:
            visible = (*self.policy.filesystem.read, *self._interpreter.prefixes)
            self.notes = tuple(
                await opened.call(partial(notes, opened.host_directory.path, visible))
            )
            for note in self.notes:
                _log.warning("%s", note)
        paths = self._resources.paths(opened, MountPoints({}, opened.any_guard), self._interpreter)
        self._decide_key(paths, foreign_uid=paths.host_directory and not self._mapped)
        if self._lifetime.limited:
            watching = watch(
                self._lifetime,
                last_use=self._last_use,
                end_kernels=self._end_idle_kernels,
                close=self._close_unused,
            )
            self._living = asyncio.create_task(watching, context=background_context())

    # -- the default conversation ---------------------------------------------------------------

    run = to_default(Conversation.run)
    stream = to_default(Conversation.stream)
    shell = to_default(Conversation.shell)
    stream_shell = to_default(Conversation.stream_shell)
    run_script = to_default(Conversation.run_script)
    stream_script = to_default(Conversation.stream_script)
    run_call = to_default(Conversation.run_call)
    run_file = to_default(Conversation.run_file)
    stream_file = to_default(Conversation.stream_file)
    start_file = to_default(Conversation.start_file)
    start_run = to_default(Conversation.start_run)
    start_shell = to_default(Conversation.start_shell)
    start_script = to_default(Conversation.start_script)
    write_stdin = to_default(Conversation.write_stdin)
    interrupt = to_default(Conversation.interrupt)
    give_up = to_default(Conversation.give_up)
    dry_run = to_default(Conversation.dry_run)
    checkpoint = to_default(Conversation.checkpoint)
    surroundings = to_default(Conversation.surroundings)
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
    def grants(self) -> Grants:
        return self._default.grants

    @property
    def receipt(self) -> Receipt | None:
        return self._default.receipt

    # -- conversations and life -----------------------------------------------------------------

    def conversation(self, name: str) -> Conversation:
        """Return the conversation of this name, also a new one.

        Raise InvalidPath for an invalid name, Conflict `too_many_conversations` and
        `workspace_not_shared`, Closed.
        """
        check_process(self._pid)
        self._check_open()
        if conversation := self._conversations.get(name):
            return conversation
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
        new = self._conversations[name] = self._make_conversation(name)
        new.files.honeytokens = new.uploads.honeytokens = self.honeytokens
        new.files.partials.honeytokens = self.honeytokens
        new.copy_by(self._copies, self._starter_of(name))
        return new

    def _check_name(self, name: str) -> None:
        check_name(name)

    def _make_conversation(self, name: str) -> Conversation:
        return Conversation(
            name,
            self.policy,
            self._open_files,
            self._starter_of(name),
            self._resources.grace_s,
            languages=self._languages,
            grants=self._new_grants(name),
            whole=self._whole,
        )

    def _starter_of(self, conversation: str) -> StartKernel:
        return partial(self._start_in, conversation)

    async def mount(
        self, source: str | Path, target: str | None = None, *, read_only: bool = True
    ) -> str:
        """Mount another directory of the host, also in live kernels. Return the path inside. See
        `LiveMounts.mount`."""
        check_process(self._pid)
        self._check_open()
        mount = await self._mounts.mount(source, target, read_only=read_only)
        return mount.target

    async def unmount(self, target: str) -> None:
        """See `LiveMounts.unmount`."""
        check_process(self._pid)
        self._check_open()
        await self._mounts.unmount(target)

    async def mounts(self) -> tuple[Mount, ...]:
        """Return the current mounts, by the path inside."""
        return self._mounts.there

    async def unfreeze(self) -> bool:
        """Let kernels start again after the use of a honeytoken. Return False if none was used."""
        check_process(self._pid)
        self._check_open()
        if self.honeytokens is None or self.honeytokens.sprung is None:
            return False
        self.honeytokens.unfreeze()
        return True

    def _last_use(self) -> float:
        return max(each.last_use() for each in self._conversations.values())

    async def _end_idle_kernels(self) -> None:
        for conversation in list(self._conversations.values()):
            for context in conversation.contexts.every:
                await context.end_if_idle()

    async def _close_unused(self) -> None:
        self._close_reason = f": it was not used for {self._lifetime.ttl_s:g} s, its ttl"
        await self.close()

    async def stop(self) -> None:
        """End every kernel. The files stay, and the next run starts another kernel."""
        check_process(self._pid)
        await asyncio.gather(*(each.stop() for each in self._conversations.values()))
        if self._prewarmed is not None:
            await self._prewarmed.end_kernel()
        if self._outlet is not None:
            await self._outlet.rest(self._has_kernels)

    async def close(self) -> None:
        """End everything and remove every file; a second call does nothing. A cancelled call still
        completes."""
        check_process(self._pid)
        self._closed = True
        await run_to_completion(self._end())

    async def _end(self) -> None:
        async with self._closing, AsyncExitStack() as last:
            if self._ended:
                return
            self._ended = True
            if self._living is not None:
                self._living.cancel()
            last.callback(self._on_close, self)
            last.push_async_callback(self._leave_files)
            last.push_async_callback(self._resources.broker.drop_sandbox, self._group)
            if self._prewarmed is not None:
                last.push_async_callback(self._prewarmed.leave)
            if self._outlet is not None:
                last.push_async_callback(self._outlet.close)
            if self._freezing is not None:
                await asyncio.wait([self._freezing])
            if self._watcher is not None:
                self._watcher.close()
            ends = (each.close() for each in self._conversations.values())
            for end in await asyncio.gather(*ends, return_exceptions=True):
                if end is not None:
                    raise end

    async def _leave_files(self) -> None:
        await asyncio.to_thread(self._resources.data.remove, self._directory)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def _default(self) -> Conversation:
        return self.conversation(DEFAULT_CONVERSATION)

    def _check_open(self) -> None:
        if self._closed:
            raise errors.Closed(
                f"sandbox {self.id} is closed{self._close_reason}",
                hint="make a new one: its files and state are gone",
            )


def _owner_of(workspace: Path) -> int | None:
    """Return the host uid that owns a directory of the host; None if it cannot be read."""
    try:
        return workspace.stat().st_uid
    except OSError:
        return None  # `opened` then raises the error
