"""Join pieces of text on their way to the clients into one message.

A kernel sends the first text of a cell at once, and the rest a hundred times a second. `print`
alone makes two pieces: its text and its newline. Clients keep each message as a separate output and
save it so in notebooks. So text waits a moment for more of the same stream. Any other message or
reply sends the waiting text first.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from sbx.jupyter.serialize import JupyterMessage

WAIT_S = 0.05
"""The longest wait, in seconds. A person does not notice it. ipykernel waits 0.2 s."""
FULL = 64 * 1024
"""The number of characters that ends the wait."""

Parent = Mapping[str, Any]


class StreamBatcher:
    """Passes published messages on to `send`, in order. Belongs to one event loop."""

    def __init__(self, send: Callable[[JupyterMessage, Parent], Awaitable[None]]) -> None:
        self._send = send
        self._texts: list[str] = []
        self._size = 0
        self._name = ""
        self._parent: Parent = {}
        self._due: asyncio.TimerHandle | None = None
        self._overdue: asyncio.Task[None] | None = None

    async def publish(self, message: JupyterMessage, parent: Parent) -> None:
        """Return when the message is sent, or waits. Block while too much text is published."""
        if message.kind != "stream":
            await self.flush()
            await self._send(message, parent)
            return
        if self._overdue is not None and not self._overdue.done():
            await asyncio.wait([self._overdue])  # a client is slow: do not queue more text
        name, text = message.content["name"], message.content["text"]
        if self._texts and (name != self._name or parent is not self._parent):
            await self.flush()
        self._name, self._parent = name, parent
        self._texts.append(text)
        self._size += len(text)
        if self._size >= FULL:
            await self.flush()
        elif self._due is None:
            self._due = asyncio.get_running_loop().call_later(WAIT_S, self._send_overdue)

    async def flush(self) -> None:
        """Send the text that waits."""
        if self._due is not None:
            self._due.cancel()
            self._due = None
        texts, self._texts, self._size = self._texts, [], 0
        if texts:
            content = {"name": self._name, "text": "".join(texts)}
            await self._send(JupyterMessage("stream", content), self._parent)

    async def close(self) -> None:
        """Drop the waiting text and stop."""
        if self._due is not None:
            self._due.cancel()
        if self._overdue is not None:
            self._overdue.cancel()
            await asyncio.wait([self._overdue])

    def _send_overdue(self) -> None:
        self._due = None
        self._overdue = asyncio.create_task(self.flush())
