"""The terminals of a conversation in a service, with the methods of the embedded ones."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from sbx import errors
from sbx.client import checks
from sbx.client.conversation_calls import ConversationCalls, encoded
from sbx.client.errors import decode
from sbx.client.http import target
from sbx.client.requests import without_none
from sbx.protocol.fields import read_fields
from sbx.protocol.terminals import TerminalScreen, TerminalStatus, check_size

if TYPE_CHECKING:
    from sbx.client.terminal_socket import RemoteAttached


class RemoteTerminal:
    """One terminal, by its id."""

    def __init__(self, calls: ConversationCalls, status: TerminalStatus) -> None:
        self.id = status.id
        self._calls = calls
        self._path = f"{calls.path}/terminals{target(status.id)}"

    async def status(self) -> TerminalStatus:
        """Return its status."""
        return _status(await self._calls.call("GET", self._path))

    @asynccontextmanager
    async def attach(self) -> "AsyncIterator[RemoteAttached]":
        """Become a client of the terminal. Raise Conflict `too_many_clients`."""
        with errors.needs_extra("a terminal in a service", "serve"):
            from sbx.client.terminal_socket import attached  # 60 ms, only for terminals

        state = self._calls.state
        state.check()
        async with attached(state.wire, f"{self._path}/attach") as client:
            yield client

    async def screen(self) -> TerminalScreen:
        """Return its current or last screen."""
        reply = await self._calls.call("GET", f"{self._path}/screen")
        return decode("screen", partial(read_fields, TerminalScreen), reply)

    async def resize(self, rows: int, columns: int) -> None:
        """Change its size; the program receives SIGWINCH. Raise BadRequest `invalid_size`."""
        check_size(rows, columns)
        body = json.dumps({"rows": rows, "columns": columns}).encode("ascii")
        await self._calls.call_until_done(f"{self._path}/resize", body)

    async def close(self) -> None:
        """Hang up, kill the rest of its session after one second, and delete it."""
        try:
            await self._calls.call("DELETE", self._path)
        except errors.NotFound:
            return  # a second call does nothing, as in the embedded API


class RemoteTerminals:
    """The terminals of one conversation, in a service."""

    def __init__(self, calls: ConversationCalls) -> None:
        self._calls = calls
        self._path = f"{calls.path}/terminals"

    async def open(
        self,
        *,
        rows: int = 24,
        columns: int = 80,
        command: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> RemoteTerminal:
        """Open a terminal with a shell, or with `/bin/bash -c command`. Start the kernel if needed.

        Raise Denied if the policy permits no shell or no processes, BadRequest, TooLarge, Closed,
        Conflict `too_many_terminals`, and the errors of a kernel start.
        """
        check_size(rows, columns)
        fields = without_none(
            rows=rows,
            columns=columns,
            command=command if command is None else checks.text(command, "command"),
            cwd=cwd if cwd is None else checks.path(cwd),
            env=checks.environment(env),
        )
        return self._terminal(await self._calls.call_until_done(self._path, encoded(fields)))

    async def get(self, terminal_id: str) -> RemoteTerminal:
        """Return a terminal by its id. Raise NotFound, Closed."""
        return self._terminal(await self._calls.call("GET", f"{self._path}{target(terminal_id)}"))

    async def list(self) -> list[RemoteTerminal]:
        """Return the running and the ended terminals, the oldest first. Raise Closed."""
        reply = await self._calls.call("GET", self._path)
        return [self._terminal(item) for item in reply["items"]]

    async def close(self, terminal_id: str) -> None:
        """Close a terminal as `RemoteTerminal.close` does. Raise NotFound, Closed."""
        await self._calls.call("DELETE", f"{self._path}{target(terminal_id)}")

    def _terminal(self, reply: Mapping[str, Any]) -> RemoteTerminal:
        return RemoteTerminal(self._calls, _status(reply))


def _status(reply: Any) -> TerminalStatus:
    return decode("terminal", partial(read_fields, TerminalStatus), reply)
