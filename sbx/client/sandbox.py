"""A sandbox over there, with the methods of the embedded `AsyncSandbox`."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Self

from sbx import errors
from sbx.client.conversation import Held, RemoteConversation
from sbx.client.files import RemoteFiles, RemoteUploads
from sbx.client.records import SandboxInfo, sandbox_info
from sbx.client.runs import OnInput
from sbx.client.wire import Wire, target
from sbx.protocol.receipt import Receipt
from sbx.protocol.runs import Event, Run

DEFAULT_CONVERSATION = "default"


class RemoteSandbox:
    """A sandbox of a service: `async with await client.create() as box`.

    Its own methods are those of its conversation `default`; `conversation(name)` gives others. It
    lives until it is closed, by `close` or the end of `async with`, or until it expires.
    """

    def __init__(self, wire: Wire, sandbox_id: str, policy: str | None = None) -> None:
        self.id = sandbox_id
        self.policy = policy
        self._wire = wire
        self._held = Held(wire, sandbox_id)
        self._path = target("v1", "sandboxes", sandbox_id)
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
    ) -> AsyncIterator[Event]:
        """Run a shell command and follow it live."""
        return self._default.stream_shell(command, timeout=timeout, cwd=cwd, env=env, stdin=stdin)

    async def interrupt(self) -> bool:
        """Interrupt the cell that runs now; False when none does."""
        return await self._default.interrupt()

    @property
    def files(self) -> RemoteFiles:
        return self._default.files

    @property
    def uploads(self) -> RemoteUploads:
        return self._default.uploads

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
