"""Messages in and out of the five sockets: signed, checked, and never blocked for long.

    receive, arrived    the requests of clients, on one channel
    reply               send to the client of a request
    publish             send to every client
    beat, welcome       need no kernel: echo heartbeats, greet subscribers

Output is not dropped while its clients read. A send waits for the slowest of them, and so does the
kernel. A send waits a few seconds for a client that reads nothing. After that the client misses
output, and a client that keeps up loses nothing. To keep up means to have at most a few unread
messages: `sockets` limits them for each client. ZeroMQ does not report which client is full, so a
client that lags by more than that limit at such a time misses output as well.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar, cast

import msgspec
import zmq
import zmq.asyncio
from jupyter_client.session import Session

from sbx.aio import in_thread
from sbx.jupyter import parse
from sbx.jupyter.connection import ConnectionInfo
from sbx.jupyter.parse import KernelRequest, MalformedMessage
from sbx.jupyter.serialize import JupyterMessage
from sbx.jupyter.sockets import Sockets

_log = logging.getLogger(__name__)
T = TypeVar("T")
Parent = Mapping[str, Any]
FULL = 64 * 1024  # characters of text that are sent at once
_BATCH_S = 0.05  # the longest wait of text; a person does not notice it, and ipykernel waits 0.2 s
_PATIENCE_S = 5.0
_REGAINED = 0.05  # seconds of patience regained per second
_BRIEF_S = 0.25  # a client that makes room within this time is slow, and not stuck
_POLL_S = 0.001
_WELCOMES_MAX = 16  # subscribers at once
_AT_ONCE = 10_000  # messages to take at once from a client that sends faster than they are handled


class Channels:
    """See the module. Belongs to one event loop."""

    def __init__(self, sockets: Sockets) -> None:
        self._sockets = sockets
        self._session = Session(
            key=sockets.connection.key,
            signature_scheme=sockets.connection.signature_scheme,
            username="sbx",
            pack=msgspec.json.encode,
        )
        self._senders = {
            name: _Sender(name, sockets[name]) for name in ("shell", "control", "stdin")
        }
        self._iopub = _Sender("iopub", sockets["iopub"])
        self._gathering = StreamBatcher(self._publish)
        self._rejected = 0

    @classmethod
    def bind(cls, connection: ConnectionInfo) -> Self:
        """Bind the sockets. Raise Unavailable `address_in_use` and BadRequest."""
        return cls(Sockets(connection))

    @property
    def connection(self) -> ConnectionInfo:
        """The connection after the bind: no port is 0."""
        return self._sockets.connection

    def bind_again(self) -> None:
        """Create removed socket files again. Raise like `bind`."""
        self._sockets.bind_again()

    async def receive(self, channel: str) -> KernelRequest:
        """Return the next authentic, well-formed request. Log and drop others."""
        while True:
            request = self._read(channel, await self._sockets[channel].recv_multipart())
            if request is not None:
                return request
            await asyncio.sleep(0)  # receiving a message that is already there does not yield

    def arrived(self, channel: str) -> list[KernelRequest]:
        """Return all requests that have already arrived."""
        arrived = _received(self._sockets[channel], _AT_ONCE)
        read = (self._read(channel, parts) for parts in arrived)
        return [request for request in read if request is not None]

    def _read(self, channel: str, parts: list[bytes]) -> KernelRequest | None:
        try:
            return parse.read(self._session, parts)
        except MalformedMessage as error:
            self._rejected += 1
            if self._rejected.bit_count() == 1:  # any process may send any number of them
                _log.warning("%s on %s is dropped (%d so far)", error, channel, self._rejected)
            return None

    async def reply(self, channel: str, to: KernelRequest, message: JupyterMessage) -> None:
        """Send to the client of the request, after all output so far. A client that is gone or does
        not read gets nothing."""
        await self._gathering.flush()
        parts = self._packed(message, to.header, to.names)
        if not await self._senders[channel].send(parts):
            _log.warning("%s on %s was not delivered", message.kind, channel)

    async def publish(self, message: JupyterMessage, parent: Mapping[str, Any]) -> None:
        """Send to every client. Join text with the text that follows within a moment.

        A client that does not read misses the message.
        """
        await self._gathering.publish(message, parent)

    async def _publish(self, message: JupyterMessage, parent: Mapping[str, Any]) -> None:
        await self._iopub.send(self._packed(message, parent, (message.kind.encode(),)))

    async def beat(self) -> None:
        """Echo on the heartbeat channel until cancelled."""
        heart = self._sockets["hb"]
        while True:
            _done(heart.send_multipart(await heart.recv_multipart(), zmq.NOBLOCK)).exception()
            await asyncio.sleep(0)

    async def welcome(self) -> None:
        """Greet subscribers until cancelled. Ignore other input: any process may send it."""
        iopub = self._sockets["iopub"]
        while True:
            arrivals = [await iopub.recv_multipart(), *_received(iopub, _WELCOMES_MAX)]
            for topic in {parts[0][1:] for parts in arrivals if parts[0][:1] == b"\x01"}:
                content = {"subscription": topic.decode(errors="replace")}
                greeting = self._packed(JupyterMessage("iopub_welcome", content), {}, (topic,))
                await self._iopub.send(greeting)
            await asyncio.sleep(0)

    async def close(self) -> None:
        """Close the sockets after the sent messages have arrived, or when they cannot arrive."""
        await self._gathering.close()
        self._sockets.release()
        await in_thread(self._sockets.end)

    def _packed(
        self, message: JupyterMessage, parent: Mapping[str, Any], names: Sequence[bytes]
    ) -> list[bytes]:
        envelope = self._session.msg(
            message.kind, dict(message.content), metadata=dict(message.metadata)
        )
        envelope["parent_header"] = parent
        packed: list[bytes] = self._session.serialize(envelope, list(names))
        return [*packed, *message.buffers]


class _Sender:
    """One socket to send on, with a limited wait."""

    def __init__(self, name: str, socket: zmq.asyncio.Socket) -> None:
        self._name = name
        self._socket = socket
        self._left_s = _PATIENCE_S
        self._left_at = 0.0
        self._in_turn = asyncio.Lock()
        self._ahead = 0  # senders with the lock or waiting for it; a free lock may be assigned
        self._stuck = False

    async def send(self, parts: list[bytes]) -> bool:
        """Send. Return whether a client may get the message."""
        if not self._ahead:
            sent = self._try_send(parts)
            if sent is not None:
                return sent
        self._ahead += 1
        try:
            async with self._in_turn:
                return await self._wait_and_send(parts)
        finally:
            self._ahead -= 1

    def _try_send(self, parts: list[bytes]) -> bool | None:
        """Send without waiting. Return None if it does not fit."""
        error = _done(self._socket.send_multipart(parts, zmq.NOBLOCK)).exception()
        if isinstance(error, zmq.Again):
            return None
        self._stuck = False
        if error is None:
            return True
        if isinstance(error, zmq.ZMQError):  # EHOSTUNREACH: the client hung up
            return False
        raise error

    async def _wait_and_send(self, parts: list[bytes]) -> bool:
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        self._left_s = min(_PATIENCE_S, self._left_s + (started_at - self._left_at) * _REGAINED)
        sent = None
        while True:
            self._socket.get(zmq.EVENTS)  # else ZeroMQ rarely checks which client has read
            sent = self._try_send(parts)
            if sent is not None or loop.time() - started_at >= self._left_s:
                break
            await asyncio.sleep(_POLL_S)
        self._left_at = loop.time()
        waited_s = self._left_at - started_at
        if waited_s > _BRIEF_S:
            self._left_s = max(0.0, self._left_s - waited_s)
        return self._sent_to_others(parts) if sent is None else sent

    def _sent_to_others(self, parts: list[bytes]) -> bool:
        """Send to the clients that have room. A reply has only one reader, so return False."""
        if not self._stuck:
            self._stuck = True
            _log.warning("a client on %s does not read, and misses messages", self._name)
        if self._socket.type != zmq.XPUB:
            return False
        self._socket.setsockopt(zmq.XPUB_NODROP, 0)
        try:
            return _done(self._socket.send_multipart(parts, zmq.NOBLOCK)).exception() is None
        finally:
            self._socket.setsockopt(zmq.XPUB_NODROP, 1)


def _received(socket: zmq.asyncio.Socket, limit: int) -> Iterator[list[bytes]]:
    """Yield the messages that have already arrived, up to a limit."""
    for _ in range(limit):
        arriving = _done(socket.recv_multipart(zmq.NOBLOCK))
        if isinstance(arriving.exception(), zmq.Again):
            return
        yield arriving.result()


def _done(awaitable: Awaitable[T]) -> asyncio.Future[T]:
    """Return the future that pyzmq returns for NOBLOCK; it is already done."""
    return cast("asyncio.Future[T]", awaitable)


class StreamBatcher:
    """Passes published messages on to `send`, in order, and joins pieces of text into one message.

    A kernel sends the first text of a cell at once, and the rest a hundred times a second. `print`
    alone makes two pieces: its text and its newline. Clients keep each message as a separate output
    and save it so in notebooks. So text waits a moment for more of the same stream. Any other
    message or reply sends the waiting text first. Belongs to one event loop.
    """

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
            self._due = asyncio.get_running_loop().call_later(_BATCH_S, self._send_overdue)

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
