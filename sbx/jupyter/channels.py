"""Messages in and out of the five sockets: signed, checked, and never held up for long.

    receive, arrived    what a client asks, on one channel
    reply               to that client
    publish             to every client
    beat, welcome       the two that need no kernel: echo heartbeats, greet subscribers

Output is not thrown away while its clients read at all: a send waits for the slowest of them, and
by that the kernel does. A send waits a few seconds for a client that reads nothing. After that the
client misses output, and a client that keeps up loses nothing. To keep up means to have at most a
few unread messages: `sockets` bounds them for each client. ZeroMQ does not report which client is
full, so a client that lags by more than that bound at such a time misses output as well.
"""

import asyncio
import logging
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar, cast

import msgspec
import zmq
import zmq.asyncio
from jupyter_client.session import Session

from sbx.isolation.patience import in_thread
from sbx.jupyter import requests
from sbx.jupyter.connection import Connection
from sbx.jupyter.gathering import Gathering
from sbx.jupyter.messages import Message
from sbx.jupyter.requests import Malformed, Request
from sbx.jupyter.sockets import Sockets

_log = logging.getLogger(__name__)
T = TypeVar("T")
_PATIENCE_S = 5.0
_REGAINED = 0.05  # seconds a second
_BRIEF_S = 0.25  # a client that takes what there is as often as this is slow, and not stuck
_POLL_S = 0.001
_WELCOMES_MAX = 16  # subscribers at once
_AT_ONCE = 10_000  # messages, of whoever sends faster than they can be looked at


class Channels:
    """See the module. Of one event loop."""

    def __init__(self, sockets: Sockets) -> None:
        self._sockets = sockets
        self._session = Session(
            key=sockets.connection.key,
            signature_scheme=sockets.connection.signature_scheme,
            username="sbx",
            pack=msgspec.json.encode,
        )
        self._ways = {name: _Way(name, sockets[name]) for name in ("shell", "control", "stdin")}
        self._iopub = _Way("iopub", sockets["iopub"])
        self._gathering = Gathering(self._publish)
        self._unread = 0

    @classmethod
    def bind(cls, asked: Connection) -> Self:
        """Raises Unavailable `address_in_use`, BadRequest."""
        return cls(Sockets(asked))

    @property
    def connection(self) -> Connection:
        """As bound: no port is 0."""
        return self._sockets.connection

    def bind_again(self) -> None:
        """Put back the files of sockets that were removed. Raises as `bind`."""
        self._sockets.bind_again()

    async def receive(self, channel: str) -> Request:
        """The next that is authentic and well-formed; others are logged and dropped."""
        while True:
            request = self._read(channel, await self._sockets[channel].recv_multipart())
            if request is not None:
                return request
            await asyncio.sleep(0)  # what is there already is received without a wait

    def arrived(self, channel: str) -> list[Request]:
        """All that is there already."""
        arrived = _received(self._sockets[channel], _AT_ONCE)
        read = (self._read(channel, parts) for parts in arrived)
        return [request for request in read if request is not None]

    def _read(self, channel: str, parts: list[bytes]) -> Request | None:
        try:
            return requests.read(self._session, parts)
        except Malformed as error:
            self._unread += 1
            if self._unread.bit_count() == 1:  # anybody may send any number of them
                _log.warning("%s on %s is not heard (%d so far)", error, channel, self._unread)
            return None

    async def reply(self, channel: str, to: Request, message: Message) -> None:
        """Send to the client who asked, after all output so far. One who is gone, or does not read,
        gets nothing."""
        await self._gathering.flush()
        parts = self._packed(message, to.header, to.names)
        if not await self._ways[channel].send(parts):
            _log.warning("%s found no reader on %s", message.kind, channel)

    async def publish(self, message: Message, parent: Mapping[str, Any]) -> None:
        """Send to every client, text with what follows within a moment; one that does not read
        misses it."""
        await self._gathering.publish(message, parent)

    async def _publish(self, message: Message, parent: Mapping[str, Any]) -> None:
        await self._iopub.send(self._packed(message, parent, (message.kind.encode(),)))

    async def beat(self) -> None:
        """Echo on the heartbeat channel until cancelled."""
        heart = self._sockets["hb"]
        while True:
            _done(heart.send_multipart(await heart.recv_multipart(), zmq.NOBLOCK)).exception()
            await asyncio.sleep(0)

    async def welcome(self) -> None:
        """Greet subscribers until cancelled. What else may come on this channel is anybody's."""
        iopub = self._sockets["iopub"]
        while True:
            told = [await iopub.recv_multipart(), *_received(iopub, _WELCOMES_MAX)]
            for topic in {parts[0][1:] for parts in told if parts[0][:1] == b"\x01"}:
                content = {"subscription": topic.decode(errors="replace")}
                greeting = self._packed(Message("iopub_welcome", content), {}, (topic,))
                await self._iopub.send(greeting)
            await asyncio.sleep(0)

    async def close(self) -> None:
        """Let go of the sockets, when what was sent has arrived or cannot."""
        await self._gathering.close()
        self._sockets.let_go()
        await in_thread(self._sockets.end)

    def _packed(
        self, message: Message, parent: Mapping[str, Any], names: Sequence[bytes]
    ) -> list[bytes]:
        told = self._session.msg(
            message.kind, dict(message.content), metadata=dict(message.metadata)
        )
        told["parent_header"] = parent
        packed: list[bytes] = self._session.serialize(told, list(names))
        return [*packed, *message.buffers]


class _Way:
    """One socket to send by, without waiting for long."""

    def __init__(self, name: str, socket: zmq.asyncio.Socket) -> None:
        self._name = name
        self._socket = socket
        self._left_s = _PATIENCE_S
        self._left_at = 0.0
        self._in_turn = asyncio.Lock()
        self._ahead = 0  # how many have the turn or wait for it; a free lock may be spoken for
        self._stuck = False

    async def send(self, parts: list[bytes]) -> bool:
        """Whether somebody may get it."""
        if not self._ahead:
            sent = self._tried(parts)
            if sent is not None:
                return sent
        self._ahead += 1
        try:
            async with self._in_turn:
                return await self._waited(parts)
        finally:
            self._ahead -= 1

    def _tried(self, parts: list[bytes]) -> bool | None:
        """None when there is no room for it."""
        error = _done(self._socket.send_multipart(parts, zmq.NOBLOCK)).exception()
        if isinstance(error, zmq.Again):
            return None
        self._stuck = False
        if error is None:
            return True
        if isinstance(error, zmq.ZMQError):  # EHOSTUNREACH: it hung up meanwhile
            return False
        raise error

    async def _waited(self, parts: list[bytes]) -> bool:
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._left_s = min(_PATIENCE_S, self._left_s + (began - self._left_at) * _REGAINED)
        sent = None
        while True:
            self._socket.get(zmq.EVENTS)  # else ZeroMQ looks once in a while who has read
            sent = self._tried(parts)
            if sent is not None or loop.time() - began >= self._left_s:
                break
            await asyncio.sleep(_POLL_S)
        self._left_at = loop.time()
        waited = self._left_at - began
        if waited > _BRIEF_S:
            self._left_s = max(0.0, self._left_s - waited)
        return self._sent_to_others(parts) if sent is None else sent

    def _sent_to_others(self, parts: list[bytes]) -> bool:
        """A reply has one reader. Output has many, of whom those who do not read miss it."""
        if not self._stuck:
            self._stuck = True
            _log.warning("a client on %s does not read, and misses what is sent", self._name)
        if self._socket.type != zmq.XPUB:
            return False
        self._socket.setsockopt(zmq.XPUB_NODROP, 0)
        try:
            return _done(self._socket.send_multipart(parts, zmq.NOBLOCK)).exception() is None
        finally:
            self._socket.setsockopt(zmq.XPUB_NODROP, 1)


def _received(socket: zmq.asyncio.Socket, most: int) -> Iterator[list[bytes]]:
    """What is there already, up to so many messages."""
    for _ in range(most):
        arriving = _done(socket.recv_multipart(zmq.NOBLOCK))
        if isinstance(arriving.exception(), zmq.Again):
            return
        yield arriving.result()


def _done(asked: Awaitable[T]) -> asyncio.Future[T]:
    """What pyzmq gives back for NOBLOCK: its outcome is there already."""
    return cast("asyncio.Future[T]", asked)
