"""The contexts of a conversation in a service, with the methods of the embedded ones."""

import json
from collections.abc import Mapping
from typing import Any

from sbx.client.conversation_calls import (
    ConversationCalls,
    RemoteRuns,
    receipt_of,
    receipt_or_none,
)
from sbx.client.errors import decode
from sbx.client.http import target
from sbx.protocol.contexts import check_context
from sbx.protocol.receipt import Receipt


class RemoteContext(RemoteRuns):
    """One kernel of a conversation, in a service. Its methods may be called concurrently from one
    event loop."""

    def __init__(self, calls: ConversationCalls, name: str, receipt: Receipt | None = None) -> None:
        self.name = self._context = name
        self._calls = calls
        self._path = f"{calls.path}/contexts{target(name)}"
        self._receipt = receipt

    @property
    def conversation(self) -> str:
        """The name of its conversation."""
        return self._calls.conversation

    @property
    def receipt(self) -> Receipt | None:
        """The walls around its live kernel, from the last reply that had them: a property cannot
        send a request."""
        return self._receipt

    async def read_receipt(self) -> Receipt | None:
        """Return the walls around its live kernel, or None without a kernel."""
        self._receipt = receipt_or_none(await self._calls.call("GET", self._path))
        return self._receipt

    async def interrupt(self) -> bool:
        """Interrupt the active cell. Return False if no cell is active."""
        return bool((await self._calls.call("POST", f"{self._path}/interrupt"))["interrupted"])

    async def restart(self) -> Receipt:
        """Stop its kernel with its active and queued runs, and start another one with an empty
        namespace. Files stay."""
        self._receipt = receipt_of(await self._calls.call_until_done(f"{self._path}/restart", b""))
        return self._receipt

    async def stop(self) -> None:
        """Stop its kernel and its runs. The next run starts another kernel."""
        await self._calls.call("POST", f"{self._path}/stop", again=True)
        self._receipt = None


class RemoteContexts:
    """Named kernels over the files of one conversation, in a service."""

    def __init__(self, calls: ConversationCalls) -> None:
        self._calls = calls
        self._path = f"{calls.path}/contexts"

    async def create(self, name: str) -> RemoteContext:
        """Create a context and start its kernel. If the start fails, the context does not exist.

        Raise BadRequest for the name, Conflict `context_exists` and `too_many_contexts`, Denied,
        Closed, and the errors of a kernel start.
        """
        body = json.dumps({"name": check_context(name)}).encode("ascii")
        return self._context(await self._calls.call_until_done(self._path, body))

    async def get(self, name: str) -> RemoteContext:
        """Return the context `name`. Raise NotFound, BadRequest for the name, Closed."""
        check_context(name)
        return self._context(await self._calls.call("GET", f"{self._path}{target(name)}"))

    async def list(self) -> list[RemoteContext]:
        """Return all contexts, `default` first, the others by name."""
        reply = await self._calls.call("GET", self._path)
        return [self._context(item) for item in reply["items"]]

    async def delete(self, name: str) -> None:
        """Delete a context with its kernel and its active and queued runs. Files stay. Raise
        NotFound, BadRequest, Conflict `default_context`, Closed."""
        check_context(name)
        await self._calls.call("DELETE", f"{self._path}{target(name)}", again=False)

    def _context(self, reply: Mapping[str, Any]) -> RemoteContext:
        return decode(
            "context",
            lambda data: RemoteContext(self._calls, data["name"], receipt_or_none(data)),
            reply,
        )
