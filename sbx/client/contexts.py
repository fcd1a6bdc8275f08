"""The contexts of a conversation over there, with the methods of the embedded ones."""

import json
from collections.abc import Mapping
from typing import Any

from sbx.client.conversation_calls import ConversationCalls, RemoteRuns, receipt_from
from sbx.client.http import target
from sbx.errors import Broken
from sbx.protocol.contexts import check_context
from sbx.protocol.receipt import Receipt


class RemoteContext(RemoteRuns):
    """One kernel of a conversation, in a service. Its methods may be called concurrently from one
    event loop."""

    def __init__(self, talk: ConversationCalls, name: str, receipt: Receipt | None = None) -> None:
        self.name = self._context = name
        self._talk = talk
        self._path = f"{talk.path}/contexts{target(name)}"
        self._receipt = receipt

    @property
    def conversation(self) -> str:
        """The name of its conversation."""
        return self._talk.conversation

    @property
    def receipt(self) -> Receipt | None:
        """Which walls stand around its live kernel, as last told here: a property cannot ask the
        service."""
        return self._receipt

    async def read_receipt(self) -> Receipt | None:
        """Which walls stand around its live kernel; None while there is none."""
        self._receipt = _receipt((await self._talk.call("GET", self._path))["receipt"])
        return self._receipt

    async def interrupt(self) -> bool:
        """Interrupt the cell that runs now; False when none does."""
        return bool((await self._talk.call("POST", f"{self._path}/interrupt"))["interrupted"])

    async def restart(self) -> Receipt:
        """End its kernel and what runs or waits in it, and start another: a clean namespace. Files
        stay."""
        told = await self._talk.call_until_done(f"{self._path}/restart", b"")
        self._receipt = receipt_from(told["receipt"])
        return self._receipt

    async def stop(self) -> None:
        """End its kernel and what runs in it; the next run starts another."""
        await self._talk.call("POST", f"{self._path}/stop", again=True)
        self._receipt = None


class RemoteContexts:
    """Named kernels side by side over the files of one conversation, in a service."""

    def __init__(self, talk: ConversationCalls) -> None:
        self._talk = talk
        self._path = f"{talk.path}/contexts"

    async def create(self, name: str) -> RemoteContext:
        """Another context, with its kernel started; where that fails there is none.

        Raises BadRequest for the name, Conflict `context_exists` and `too_many_contexts`, Denied,
        Closed, and what starting a kernel raises.
        """
        body = json.dumps({"name": check_context(name)}).encode("ascii")
        return self._seen(await self._talk.call_until_done(self._path, body))

    async def get(self, name: str) -> RemoteContext:
        """The context of this name. Raises NotFound, BadRequest for the name, Closed."""
        check_context(name)
        return self._seen(await self._talk.call("GET", f"{self._path}{target(name)}"))

    async def list(self) -> list[RemoteContext]:
        """All of them, `default` first, the others by name."""
        told = await self._talk.call("GET", self._path)
        return [self._seen(one) for one in told["items"]]

    async def delete(self, name: str) -> None:
        """End its kernel and what runs or waits in it, for good; files stay. Raises NotFound,
        BadRequest, Conflict `default_context`, Closed."""
        check_context(name)
        await self._talk.call("DELETE", f"{self._path}{target(name)}", again=False)

    def _seen(self, told: Mapping[str, Any]) -> RemoteContext:
        try:
            return RemoteContext(self._talk, told["name"], _receipt(told["receipt"]))
        except (TypeError, KeyError) as error:
            raise Broken(f"a context that is none: {error}", code="foreign_reply") from error


def _receipt(told: Mapping[str, Any] | None) -> Receipt | None:
    return None if told is None else receipt_from(told)
