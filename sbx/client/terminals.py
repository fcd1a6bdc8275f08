"""The terminals of a conversation over there, with the methods of the embedded ones."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from sbx import errors
from sbx.client import checks
from sbx.client.conversation_calls import ConversationCalls, SandboxState
from sbx.client.http import target
from sbx.protocol.terminals import (
    TerminalScreen,
    TerminalStatus,
    check_size,
    screen_from_json,
    status_from_json,
)

if TYPE_CHECKING:
    from sbx.client.terminal_socket import RemoteAttached


class RemoteTerminal:
    """One terminal, by its id."""

    def __init__(self, held: SandboxState, talk: ConversationCalls, status: TerminalStatus) -> None:
        self.id = status.id
        self._held = held
        self._talk = talk
        self._path = f"{talk.path}/terminals{target(status.id)}"

    async def status(self) -> TerminalStatus:
        """How it is now."""
        return _status(await self._talk.call("GET", self._path))

    @asynccontextmanager
    async def attach(self) -> "AsyncIterator[RemoteAttached]":
        """Come to it as a client. Raises Conflict `too_many_clients`."""
        with errors.needs_extra("a terminal in a service", "serve"):
            from sbx.client.terminal_socket import attached  # 60 ms, only for terminals

        self._held.check()
        async with attached(self._held.wire, f"{self._path}/attach") as client:
            yield client

    async def screen(self) -> TerminalScreen:
        """What it shows now, or showed last."""
        told = await self._talk.call("GET", f"{self._path}/screen")
        try:
            return screen_from_json(told)
        except ValueError as error:
            raise errors.Broken(str(error), code="foreign_reply") from error

    async def resize(self, rows: int, columns: int) -> None:
        """Give it another size, of which linux tells whoever runs there. Raises BadRequest
        `invalid_size`."""
        check_size(rows, columns)
        body = json.dumps({"rows": rows, "columns": columns}).encode("ascii")
        await self._talk.call_until_done(f"{self._path}/resize", body)

    async def close(self) -> None:
        """Hang up, and kill what is left of its session after a second; it is forgotten."""
        try:
            await self._talk.call("DELETE", self._path)
        except errors.NotFound:
            return  # a second time does nothing, as embedded


class RemoteTerminals:
    """The terminals of one conversation, in a service."""

    def __init__(self, held: SandboxState, talk: ConversationCalls) -> None:
        self._held = held
        self._talk = talk
        self._path = f"{talk.path}/terminals"

    async def open(
        self,
        *,
        rows: int = 24,
        columns: int = 80,
        command: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> RemoteTerminal:
        """A new terminal with a shell, or with `/bin/bash -c command`; the kernel is started where
        there is none.

        Raises Denied where the policy offers no shell or no processes, BadRequest, TooLarge,
        Closed, Conflict `too_many_terminals`, and what starting a kernel raises.
        """
        check_size(rows, columns)
        asked = {
            "rows": rows,
            "columns": columns,
            "command": command if command is None else checks.text(command, "command"),
            "cwd": cwd if cwd is None else checks.path(cwd),
            "env": checks.environment(env),
        }
        body = {name: value for name, value in asked.items() if value is not None}
        encoded = json.dumps(body, ensure_ascii=False).encode()
        return self._seen(await self._talk.call_until_done(self._path, encoded))

    async def get(self, terminal_id: str) -> RemoteTerminal:
        """A terminal by its id. Raises NotFound, Closed."""
        return self._seen(await self._talk.call("GET", f"{self._path}{target(terminal_id)}"))

    async def list(self) -> list[RemoteTerminal]:
        """Those that run and those that ended, the oldest first. Raises Closed."""
        told = await self._talk.call("GET", self._path)
        return [self._seen(one) for one in told["items"]]

    async def close(self, terminal_id: str) -> None:
        """End it as `RemoteTerminal.close` does. Raises NotFound, Closed."""
        await self._talk.call("DELETE", f"{self._path}{target(terminal_id)}")

    def _seen(self, told: Mapping[str, Any]) -> RemoteTerminal:
        return RemoteTerminal(self._held, self._talk, _status(told))


def _status(told: Mapping[str, Any]) -> TerminalStatus:
    try:
        return status_from_json(told)
    except ValueError as error:
        raise errors.Broken(str(error), code="foreign_reply") from error
