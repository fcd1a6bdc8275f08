"""A sandbox over there, with the methods of the embedded `AsyncSandbox`."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from sbx import errors
from sbx.client.commands import RemoteCommands
from sbx.client.contexts import RemoteContexts
from sbx.client.conversation import RemoteConversation
from sbx.client.dry_runs import RemoteCheckpoint, RemoteDryRun
from sbx.client.files import RemoteFiles, RemoteUploads
from sbx.client.http import HttpClient, query, target
from sbx.client.records import SandboxInfo, mount, sandbox_info
from sbx.client.runs import OnInput
from sbx.client.talk import SandboxState
from sbx.client.terminals import RemoteTerminals
from sbx.protocol.mounts import Mount
from sbx.protocol.receipt import Receipt
from sbx.protocol.runs import Event, Run
from sbx.protocol.usage import SandboxUsage

DEFAULT_CONVERSATION = "default"


class RemoteSandbox:
    """A sandbox of a service: `async with await client.create() as box`.

    Its own methods are those of its conversation `default`; `conversation(name)` gives others. It
    lives until it is closed, by `close` or the end of `async with`, or until it expires.
    """

    def __init__(self, wire: HttpClient, sandbox_id: str, policy: str | None = None) -> None:
        self.id = sandbox_id
        self.policy = policy
        self._wire = wire
        self._held = SandboxState(wire, sandbox_id)
        self._path = target("v1", "sandboxes", sandbox_id)
        self._operated = target("v1", "admin", "sandboxes", sandbox_id)
        self._conversations: dict[str, RemoteConversation] = {}
        self._closing = asyncio.Lock()

    async def info(self) -> SandboxInfo:
        """How it is now."""
        return sandbox_info((await self._wire.call("GET", self._path)).json())

    # -- the default conversation ---------------------------------------------------------------

    async def run(
        self, code: str, *, timeout: float | None = None, on_input: OnInput | None = None
    ) -> Run:
        """Run a cell and wait for its result; see `RemoteConversation.run`."""
        return await self._default.run(code, timeout=timeout, on_input=on_input)

    def stream(
        self, code: str, *, timeout: float | None = None, on_input: OnInput | None = None
    ) -> AsyncIterator[Event]:
        """Run a cell and follow it live; the last event carries the result."""
        return self._default.stream(code, timeout=timeout, on_input=on_input)

    async def shell(
        self,
        command: str,
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
    ) -> Run:
        """Run a shell command and wait for its result."""
        return await self._default.shell(command, timeout=timeout, cwd=cwd, env=env, stdin=stdin)

    def stream_shell(
        self,
        command: str,
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
        stdin_open: bool = False,
    ) -> AsyncIterator[Event]:
        """Run a shell command and follow it live; with `stdin_open`, `write_stdin` feeds it."""
        return self._default.stream_shell(
            command, timeout=timeout, cwd=cwd, env=env, stdin=stdin, stdin_open=stdin_open
        )

    async def run_script(
        self,
        code: str,
        language: str,
        *,
        args: Sequence[str] = (),
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
        cwd: str | None = None,
    ) -> Run:
        """Run a script in another language and wait; see `RemoteConversation.run_script`."""
        return await self._default.run_script(
            code, language, args=args, timeout=timeout, env=env, stdin=stdin, cwd=cwd
        )

    def stream_script(
        self,
        code: str,
        language: str,
        *,
        args: Sequence[str] = (),
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
        cwd: str | None = None,
    ) -> AsyncIterator[Event]:
        """Run a script in another language and follow it live."""
        return self._default.stream_script(
            code, language, args=args, timeout=timeout, env=env, stdin=stdin, cwd=cwd
        )

    async def interrupt(self) -> bool:
        """Interrupt the cell that runs now; False when none does."""
        return await self._default.interrupt()

    async def dry_run(
        self, command: str, *, timeout: float | None = None, cwd: str | None = None
    ) -> RemoteDryRun:
        """Run a shell command on a frozen copy; see `RemoteConversation.dry_run`."""
        return await self._default.dry_run(command, timeout=timeout, cwd=cwd)

    async def checkpoint(self) -> RemoteCheckpoint:
        """The files as they are now, to be put back; see `RemoteConversation.checkpoint`."""
        return await self._default.checkpoint()

    @property
    def files(self) -> RemoteFiles:
        return self._default.files

    @property
    def uploads(self) -> RemoteUploads:
        return self._default.uploads

    async def write_stdin(self, run_id: str, text: str | None) -> None:
        """Feed a command that was started with `stdin_open`."""
        await self._default.write_stdin(run_id, text)

    @property
    def commands(self) -> RemoteCommands:
        """Background commands of `default`."""
        return self._default.commands

    @property
    def terminals(self) -> RemoteTerminals:
        """Terminals of `default`."""
        return self._default.terminals

    async def usage(self) -> SandboxUsage:
        """What the sandbox uses now, and the disk of `default`; nothing starts for it."""
        return await self._default.usage()

    def stream_usage(self, interval_s: float = 1.0) -> AsyncGenerator[SandboxUsage, None]:
        """The same now and after each interval, until it is closed."""
        return self._default.stream_usage(interval_s)

    @property
    def contexts(self) -> RemoteContexts:
        """Named kernels side by side over the files of `default`."""
        return self._default.contexts

    @property
    def receipt(self) -> Receipt | None:
        """Which walls stand around the kernel of `default`; see `RemoteConversation.receipt`."""
        return self._default.receipt

    async def read_receipt(self) -> Receipt | None:
        """Which walls stand around the live kernel of `default`; None while there is none."""
        return await self._default.read_receipt()

    # -- conversations and life -----------------------------------------------------------------

    def conversation(self, name: str) -> RemoteConversation:
        """The conversation of this name; made at its first use when there is none.

        Raises InvalidPath for a name that cannot be one, Closed.
        """
        self._held.check()
        if (found := self._conversations.get(name)) is None:
            found = self._conversations[name] = RemoteConversation(self._held, name)
        return found

    async def mount(
        self, source: str | Path, target: str | None = None, *, read_only: bool = True
    ) -> str:
        """Show one more directory of the service's host inside, also in kernels that live; the path
        there, /mnt/NAME unless `target` says otherwise. For the operator, and of what the
        service's setting `mount_dirs` names; until it is unmounted, or the service ends.

        Raises Denied `forbidden` and `not_granted`, and as `AsyncSandbox.mount`.
        """
        self._held.check()
        asked = {"source": str(source), "target": target, "read_only": read_only}
        body = json.dumps(asked).encode()
        reply = await self._wire.call("POST", f"{self._operated}/mounts", body=body)
        return mount(reply.json()).target

    async def unmount(self, target: str) -> None:
        """Show it no more. Raises NotFound `not_mounted`, Denied `forbidden`."""
        self._held.check()
        asked = query({"target": target})
        await self._wire.call("DELETE", f"{self._operated}/mounts{asked}")

    async def mounts(self) -> tuple[Mount, ...]:
        """What is mounted now, by the path inside. For the operator."""
        self._held.check()
        reply = await self._wire.call("GET", f"{self._operated}/mounts")
        return tuple(mount(one) for one in reply.json()["items"])

    async def unfreeze(self) -> bool:
        """Let kernels start again after a honeytoken was sprung; False where none was. For the
        operator."""
        self._held.check()
        reply = await self._wire.call("POST", f"{self._operated}/unfreeze")
        return bool(reply.json()["unfrozen"])

    async def start(self) -> Receipt:
        """Start the kernel of `default` now instead of at its first run."""
        return await self._default.start()

    async def stop(self) -> None:
        """End every kernel; files stay, and the next run starts another one."""
        self._held.check()
        await self._wire.call("POST", f"{self._path}/stop", again=True)
        for one in self._conversations.values():
            one.forget_receipt()

    async def close(self) -> None:
        """End everything and remove every file; a second call does nothing."""
        if self._held.closed:
            return
        self._wire.check()
        self._held.closed = True
        async with self._closing:
            try:
                await self._wire.call("DELETE", self._path)
            except errors.NotFound:
                return  # it is gone already
            finally:
                await self._let_go()

    async def _let_go(self) -> None:
        tasks = [run.task for run in self._held.runs]
        if tasks:
            _, following = await asyncio.wait(tasks, timeout=1.0)
            for task in following:
                task.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def _default(self) -> RemoteConversation:
        return self.conversation(DEFAULT_CONVERSATION)
