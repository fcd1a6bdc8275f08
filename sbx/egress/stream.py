"""Bytes over a socket: with deadlines, counted, and read only on request.

A ProxyStream reads from the socket itself, so unread bytes stay in the buffers of Linux and slow
the sender: that is the whole back-pressure, and it needs no water marks. It is a stream of anyio,
so that anyio's TLS runs over it.
"""

import asyncio
import contextlib
import select
import socket
from collections.abc import Coroutine
from typing import Any

import anyio
from anyio.abc import ByteStream

PIECE = 256 * 1024  # bytes that are moved at once


class BudgetExceeded(Exception):
    """The sandbox has used up the bytes that the policy allows."""


class ByteCounter:
    def __init__(self, most: int) -> None:
        self._left = most

    def count(self, size: int) -> None:
        """Raise BudgetExceeded when there are more than the policy allows."""
        self._left -= size
        self.check()

    def check(self) -> None:
        if self._left < 0:
            raise BudgetExceeded


class ProxyStream(ByteStream):
    """One end of a socket, which it owns. `stall_s` bounds each single wait for room to send."""

    def __init__(
        self, sock: socket.socket, *, stall_s: float | None = None, meter: ByteCounter | None = None
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._stall_s = stall_s
        self._meter = meter
        self._returned = b""
        self._sending = asyncio.Lock()  # TLS sends from two tasks; this keeps the order
        self.received = 0
        self.sent = 0

    def put_back(self, data: bytes) -> None:
        """Return bytes that were read too early: the next `receive` gets them first."""
        self._returned = data + self._returned

    async def receive(self, max_bytes: int = 64 * 1024) -> bytes:
        if self._returned:
            data, self._returned = self._returned[:max_bytes], self._returned[max_bytes:]
            return data
        await asyncio.sleep(0)  # asyncio does not yield while data is there: others must run, too
        data = await asyncio.get_running_loop().sock_recv(self._sock, max_bytes)
        if not data:
            raise anyio.EndOfStream
        self.received += len(data)
        if self._meter is not None:
            self._meter.count(len(data))
        return data

    async def send(self, item: bytes) -> None:
        async with self._sending:
            if self._meter is not None:
                self._meter.count(len(item))
            loop = asyncio.get_running_loop()
            if self._stall_s is None:
                await loop.sock_sendall(self._sock, item)
            else:
                for start in range(0, len(item), PIECE):
                    async with asyncio.timeout(self._stall_s):
                        await loop.sock_sendall(self._sock, item[start : start + PIECE])
            self.sent += len(item)

    async def send_eof(self) -> None:
        with contextlib.suppress(OSError):  # the other side is gone already
            self._sock.shutdown(socket.SHUT_WR)

    async def aclose(self) -> None:
        self.close()

    def close(self) -> None:
        self._sock.close()

    def left(self) -> bool:
        """Return whether the other side will send no more. Sent bytes may still be unread."""
        polled = select.poll()
        polled.register(self._sock, select.POLLRDHUP)
        return bool(polled.poll(0))

    def quiet(self) -> bool:
        """Return whether the other side has neither sent bytes nor closed the connection."""
        if self._returned:
            return False
        try:
            self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False


async def copy(source: ProxyStream, sink: ProxyStream) -> None:
    """Copy all bytes, and then the end of the stream. The other direction continues."""
    try:
        while True:
            await sink.send(await source.receive(PIECE))
            await asyncio.sleep(0)  # both may be ready each time
    except anyio.EndOfStream:
        await sink.send_eof()


async def together(*parts: Coroutine[Any, Any, None]) -> None:
    """Run all until they are done or one fails. Then cancel the others and raise its exception."""
    try:
        async with asyncio.TaskGroup() as group:
            for part in parts:
                group.create_task(part)
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
