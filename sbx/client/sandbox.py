"""A sandbox in a service, with the methods of the embedded `AsyncSandbox`."""

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Self

from sbx import errors
from sbx.client.commands import RemoteCommands
from sbx.client.contexts import RemoteContexts
from sbx.client.conversation import RemoteConversation
from sbx.client.conversation_calls import SandboxState
from sbx.client.files import RemoteFiles, RemoteUploads
from sbx.client.grants import RemoteGrants
from sbx.client.http import HttpClient, query, target
from sbx.client.records import SandboxInfo, mount, sandbox_info
from sbx.client.terminals import RemoteTerminals
from sbx.protocol.mounts import Mount
from sbx.protocol.receipt import Receipt
from sbx.run_methods import to_default

DEFAULT_CONVERSATION = "default"


class RemoteSandbox:
    """A sandbox of a service: `async with await client.create() as box`.

    Its own methods are those of its conversation `default`; `conversation(name)` returns others.
    It exists until `close` or the end of `async with` deletes it, or until it expires.
    """

    def __init__(self, wire: HttpClient, sandbox_id: str, policy: str | None = None) -> None:
        self.id = sandbox_id
        self.policy = policy
        self._wire = wire
        self._state = SandboxState(wire, sandbox_id)
        self._path = target("v1", "sandboxes", sandbox_id)
        self._admin_path = target("v1", "admin", "sandboxes", sandbox_id)
        self._conversations: dict[str, RemoteConversation] = {}
        self._closing = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<RemoteSandbox {self.id} of {self._wire.address.shown}>"

    async def info(self) -> SandboxInfo:
        """Return its state."""
        return sandbox_info((await self._wire.call("GET", self._path)).json())

    def forward_port(
        self,
        port: int,
        *,
        local_port: int = 0,
        on_error: Callable[[errors.SbxError], None] = lambda _error: None,
    ) -> AbstractAsyncContextManager[int]:
        """Forward a port of 127.0.0.1 (0: a free one) to a server in the sandbox, until the end of
        `async with`, which gives the local port. Every user of this host can connect to it.
        `on_error` gets the error of a connection that fails. Raise Conflict `port_taken`."""
        from sbx.client.websocket import forwarded  # websockets takes 60 ms

        path = f"{self._path}/port-tunnels/{port}"
        return forwarded(self._wire, path, local_port, on_error)

    # -- the default conversation ---------------------------------------------------------------

    run = to_default(RemoteConversation.run)
    stream = to_default(RemoteConversation.stream)
    shell = to_default(RemoteConversation.shell)
    stream_shell = to_default(RemoteConversation.stream_shell)
    run_script = to_default(RemoteConversation.run_script)
    stream_script = to_default(RemoteConversation.stream_script)
    start_run = to_default(RemoteConversation.start_run)
    start_shell = to_default(RemoteConversation.start_shell)
    run_file = to_default(RemoteConversation.run_file)
    stream_file = to_default(RemoteConversation.stream_file)
    start_file = to_default(RemoteConversation.start_file)
    start_script = to_default(RemoteConversation.start_script)
    write_stdin = to_default(RemoteConversation.write_stdin)
    interrupt = to_default(RemoteConversation.interrupt)
    give_up = to_default(RemoteConversation.give_up)
    dry_run = to_default(RemoteConversation.dry_run)
    checkpoint = to_default(RemoteConversation.checkpoint)
    surroundings = to_default(RemoteConversation.surroundings)
    usage = to_default(RemoteConversation.usage)
    stream_usage = to_default(RemoteConversation.stream_usage)
    read_receipt = to_default(RemoteConversation.read_receipt)
    start = to_default(RemoteConversation.start)

    @property
    def files(self) -> RemoteFiles:
        return self._default.files

    @property
    def uploads(self) -> RemoteUploads:
        return self._default.uploads

    @property
    def contexts(self) -> RemoteContexts:
        return self._default.contexts

    @property
    def commands(self) -> RemoteCommands:
        return self._default.commands

    @property
    def terminals(self) -> RemoteTerminals:
        return self._default.terminals

    @property
    def grants(self) -> RemoteGrants:
        return self._default.grants

    @property
    def receipt(self) -> Receipt | None:
        return self._default.receipt

    # -- conversations and life -----------------------------------------------------------------

    def conversation(self, name: str) -> RemoteConversation:
        """Return the conversation `name`; its first use creates it.

        Raise InvalidPath for an invalid name, Closed.
        """
        self._state.check()
        if (conversation := self._conversations.get(name)) is None:
            conversation = self._conversations[name] = RemoteConversation(self._state, name)
        return conversation

    async def mount(
        self, source: str | Path, target: str | None = None, *, read_only: bool = True
    ) -> str:
        """Mount a directory of the host of the service, also in live kernels, until it is unmounted
        or the service ends. Return its path inside: `target`, or /mnt/NAME. Only the operator may
        do this, and only with the directories of the setting `mount_dirs`.

        Raise Denied `forbidden` and `not_granted`, and the errors of `AsyncSandbox.mount`.
        """
        self._state.check()
        fields = {"source": str(source), "target": target, "read_only": read_only}
        body = json.dumps(fields).encode()
        reply = await self._wire.call("POST", f"{self._admin_path}/mounts", body=body)
        return mount(reply.json()).target

    async def unmount(self, target: str) -> None:
        """Unmount a directory. Raise NotFound `not_mounted`, Denied `forbidden`."""
        self._state.check()
        path = f"{self._admin_path}/mounts{query({'target': target})}"
        await self._wire.call("DELETE", path)

    async def mounts(self) -> tuple[Mount, ...]:
        """Return the current mounts, by the path inside. For the operator."""
        self._state.check()
        reply = await self._wire.call("GET", f"{self._admin_path}/mounts")
        return tuple(mount(item) for item in reply.json()["items"])

    async def unfreeze(self) -> bool:
        """Permit kernels to start again after the use of a honeytoken. Return False if the sandbox
        was not frozen. For the operator."""
        self._state.check()
        reply = await self._wire.call("POST", f"{self._admin_path}/unfreeze")
        return bool(reply.json()["unfrozen"])

    async def stop(self) -> None:
        """Stop every kernel. Files stay, and the next run starts another kernel."""
        self._state.check()
        await self._wire.call("POST", f"{self._path}/stop", again=True)
        for conversation in self._conversations.values():
            conversation.forget_receipt()

    async def close(self) -> None:
        """Stop everything and delete every file. A second call does nothing."""
        if self._state.closed:
            return
        self._wire.check()
        self._state.closed = True
        async with self._closing:
            try:
                await self._wire.call("DELETE", self._path)
            except errors.NotFound:
                return  # it is already deleted
            finally:
                await self._end_following()

    async def _end_following(self) -> None:
        tasks = [run.task for run in self._state.runs]
        if tasks:
            _, following = await asyncio.wait(tasks, timeout=1.0)
            for task in following:
                task.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def _default(self) -> RemoteConversation:
        return self.conversation(DEFAULT_CONVERSATION)
