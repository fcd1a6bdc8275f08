"""Requests to one service: connections kept open, deadlines, and retries where they are safe.

A request is sent again when nobody can have acted on it: no connection was to be had, or the reply
is 429 or 503 with a `Retry-After`, which sbx gives before it does anything. A connection that was
lost on the way is tried anew for methods that may be repeated (GET, PUT, DELETE), and for what has
an Idempotency-Key.
"""

import asyncio
import json
import os
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Mapping,
)
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any
from urllib.parse import quote, urlencode

from sbx import errors
from sbx.aio import check_process
from sbx.client.address import Address
from sbx.client.errors import error_of
from sbx.client.http_connection import ConnectionLost, HttpConnection, connect

CHUNK = 256 << 10
_CONNECT_S = 5.0
_IDLE_S = 4.0  # a connection unused for longer may be closed over there at any moment
_IDLE_MAX = 64
_AGAIN = (0.05, 0.2, 0.5)  # seconds to wait before each further try
_RETRY_AFTER_MAX = 10.0
_REPEATABLE = frozenset({"GET", "PUT", "DELETE"})
_EVENTS_MAX = 256 << 20  # bytes of one event

Params = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class HttpReply:
    status: int
    headers: Mapping[bytes, bytes]
    body: bytes

    def json(self) -> Any:
        """What the body says; None for an empty one. Raises Broken `foreign_reply`."""
        if not self.body:
            return None
        try:
            return json.loads(self.body)
        except ValueError as error:
            raise _foreign() from error


class StreamedReply:
    """A reply whose body is still on its way. `size` in bytes, where the service says it."""

    def __init__(self, connection: HttpConnection, timeout_s: float) -> None:
        self.status = connection.status
        self.headers = connection.headers
        length = connection.headers.get(b"content-length", b"")
        self.size = int(length) if length.isdigit() else None
        self._connection = connection
        self._timeout_s = timeout_s

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Raises Lost, and Unavailable `timeout` when nothing comes for too long."""
        async with aclosing(self._connection.chunks()) as pieces:
            while True:
                try:
                    async with asyncio.timeout(self._timeout_s):
                        piece = await anext(pieces, None)
                except TimeoutError:
                    raise too_late(self._timeout_s) from None
                if piece is None:
                    return
                yield piece


class HttpClient:
    """The connections to one service. Belongs to one process and one event loop."""

    def __init__(self, address: Address, key: str | None, timeout_s: float, tries: int) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self._tries = tries
        self._pid = os.getpid()
        self._idle: list[tuple[HttpConnection, float]] = []
        self._busy: set[HttpConnection] = set()
        self.tasks: set[asyncio.Task[None]] = set()  # that follow runs: ended with the client
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        common = f"host: {address.host}\r\nuser-agent: sbx/{version('sbx')}\r\n"
        self.authorization = None if key is None else f"Bearer {_bearer(key)}"
        if self.authorization is not None:
            common += f"authorization: {self.authorization}\r\n"
        self._common = common.encode("ascii")

    async def call(
        self,
        method: str,
        target: str,
        *,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        again: bool | None = None,
        still_there: Callable[[], Awaitable[object]] | None = None,
    ) -> HttpReply:
        """One exchange; raises the error of the body.

        `again`: it may be repeated when its connection was lost; None: by the method. With
        `still_there` the time-out ends nothing: that is called, and raises where it should.
        """
        head = self._head(method, target, headers, f"content-length: {len(body)}\r\n", body)
        repeatable = method in _REPEATABLE if again is None else again
        limit = self.timeout_s if timeout_s is None else timeout_s
        attempt = 0
        while True:
            connection, fresh = await self._leased()
            try:
                connection.send(head, body)
                content = await _read(connection, limit, still_there)
            except ConnectionLost as lost:
                if not repeatable or attempt >= self._tries:
                    raise self._lost(lost) from lost
                if fresh:
                    await asyncio.sleep(_pause(attempt))
                    attempt += 1
                continue
            finally:
                self._returned(connection)
            if connection.status < 400:
                return HttpReply(connection.status, connection.headers, content)
            seconds = _retry_after(connection)
            if seconds is None or attempt >= self._tries:
                raise error_of(connection.status, content)
            await asyncio.sleep(seconds)
            attempt += 1

    @asynccontextmanager
    async def opened(
        self,
        method: str,
        target: str,
        *,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> AsyncIterator[StreamedReply]:
        """One exchange whose reply is read in pieces; `timeout_s` is for each of them. Leaving
        early closes the connection. Raises the error of the body, and Lost."""
        head = self._head(method, target, headers, f"content-length: {len(body)}\r\n", body)
        limit = self.timeout_s if timeout_s is None else timeout_s
        connection, _ = await self._leased()
        try:
            try:
                async with asyncio.timeout(limit):
                    connection.send(head, body)
                    await connection.head()
                    if connection.status >= 400:
                        raise error_of(connection.status, await connection.read())
            except TimeoutError:
                raise too_late(limit) from None
            yield StreamedReply(connection, limit)
        finally:
            self._returned(connection)

    async def send(
        self,
        method: str,
        target: str,
        chunks: AsyncIterable[bytes],
        *,
        size: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> HttpReply:
        """One exchange with a body of any size, sent as it comes; never sent again.

        Each piece must be taken within the time-out. Raises the error of the body.
        """
        framing = "transfer-encoding: chunked" if size is None else f"content-length: {size}"
        head = self._head(method, target, headers, f"{framing}\r\n", b"")
        connection, _ = await self._leased()
        try:
            watched = _watched(chunks)
            sending = asyncio.ensure_future(
                connection.send_all(head, watched.chunks(), sized=size is not None)
            )
            try:
                await watched.while_it_moves(sending, self.timeout_s)
            finally:
                sending.cancel()
                await asyncio.wait([sending])
            async with asyncio.timeout(self.timeout_s):
                content = await connection.read()
        except TimeoutError:
            raise too_late(self.timeout_s) from None
        except ConnectionLost as lost:
            raise self._lost(lost) from lost
        finally:
            self._returned(connection)
        if connection.status >= 400:
            raise error_of(connection.status, content)
        return HttpReply(connection.status, connection.headers, content)

    async def events(
        self,
        method: str,
        target: str,
        *,
        body: bytes = b"",
        after: int = 0,
        silence_s: float = 60.0,
    ) -> AsyncGenerator[tuple[int, str, str], None]:
        """Server-sent events as (id, type, data). Raises Lost, so that the caller may re-attach;
        a service that is silent for `silence_s`, without even a heartbeat, counts as lost."""
        headers = {"accept": "text/event-stream"}
        if after:
            headers["last-event-id"] = str(after)
        async with (
            self.opened(method, target, body=body, headers=headers, timeout_s=silence_s) as reply,
            aclosing(reply.chunks()) as pieces,
        ):
            async for event in _events(pieces):
                yield event

    def check(self) -> None:
        """Raises Broken `used_after_fork`, Closed."""
        check_process(self._pid, "client")
        if self._closed:
            raise errors.Closed("the client is closed", hint="make a new one")

    async def close(self) -> None:
        """Cut every connection, and end what follows runs."""
        self._closed = True
        tasks = list(self.tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for connection, _ in self._idle:
            connection.close()
        for connection in self._busy:
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)  # so that the transports are gone when this returns

    # -- connections ------------------------------------------------------------------------------

    async def _leased(self) -> tuple[HttpConnection, bool]:
        """A connection to use, and whether it is new."""
        self.check()
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._loop is not None:
                raise errors.BadRequest(
                    "a client belongs to the event loop that used it first",
                    code="other_loop",
                    hint="make a client in each asyncio.run, or use BlockingClient",
                )
            self._loop = loop
        while self._idle:
            connection, since = self._idle.pop()
            if connection.usable and time.monotonic() - since < _IDLE_S:
                self._busy.add(connection)
                return connection, False
            connection.close()
        connection = await self._connected()
        self._busy.add(connection)
        return connection, True

    async def _connected(self) -> HttpConnection:
        for attempt in range(self._tries + 1):
            try:
                async with asyncio.timeout(_CONNECT_S):
                    return await connect(self.address)
            except (OSError, TimeoutError) as error:  # TimeoutError is an OSError too
                if isinstance(error, PermissionError):
                    raise self._not_permitted() from error
                if attempt == self._tries:
                    raise self._unreachable(error) from error
            await asyncio.sleep(_pause(attempt))
        raise AssertionError

    def _returned(self, connection: HttpConnection) -> None:
        self._busy.discard(connection)
        if connection.usable and not self._closed and len(self._idle) < _IDLE_MAX:
            self._idle.append((connection, time.monotonic()))
        else:
            connection.close()

    def _head(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str] | None,
        framing: str,
        body: bytes,
    ) -> bytes:
        more = framing
        if body:
            more += "content-type: application/json\r\n"
        for name, value in (headers or {}).items():
            if "\r" in value or "\n" in value or not value.isascii():
                raise errors.BadRequest(f"the header {name} cannot carry {value[:80]!r}")
            more += f"{name}: {value}\r\n"
        return b"".join(
            (f"{method} {target} HTTP/1.1\r\n".encode("ascii"), self._common, more.encode("ascii"),
             b"\r\n")
        )  # fmt: skip

    # -- what went wrong --------------------------------------------------------------------------

    def _unreachable(self, error: Exception) -> errors.Unavailable:
        return errors.Unavailable(
            f"no service answers at {self.address.shown}: {error or 'it takes too long'}",
            code="service_unreachable",
            hint="start it with: sbx serve",
            details={"address": self.address.shown},
        )

    def _not_permitted(self) -> errors.Denied:
        return errors.Denied(
            f"you may not use the socket {self.address.shown}",
            code="socket_not_permitted",
            hint="ask its operator: sbx serve --socket-group and --socket-mode open it to others",
            details={"address": self.address.shown},
        )

    def _lost(self, lost: ConnectionLost) -> errors.Unavailable:
        return connection_lost(self.address, str(lost))


class _Watched:
    """What is sent, with a look at whether it still moves."""

    def __init__(self, source: AsyncIterable[bytes]) -> None:
        self._source = source
        self._taken = 0

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        async for chunk in self._source:
            for start in range(0, len(chunk), CHUNK):
                self._taken += 1
                yield chunk[start : start + CHUNK]

    async def while_it_moves(self, sending: asyncio.Future[None], silence_s: float) -> None:
        """Raises TimeoutError when nothing was taken for `silence_s`."""
        while not sending.done():
            before = self._taken
            await asyncio.wait([sending], timeout=silence_s)
            if not sending.done() and self._taken == before:
                raise TimeoutError
        sending.result()


def _watched(chunks: AsyncIterable[bytes]) -> _Watched:
    return _Watched(chunks)


def target(*parts: str, params: Params | None = None) -> str:
    """The path of a request, each part quoted; `params` without those that are None."""
    path = "".join(f"/{quote(part, safe='')}" for part in parts)
    return path + query(params)


def query(params: Params | None) -> str:
    given = {name: _shown(value) for name, value in (params or {}).items() if value is not None}
    return f"?{urlencode(given)}" if given else ""


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def too_late(seconds: float) -> errors.Unavailable:
    return errors.Unavailable(
        f"the service did not answer within {seconds:g} s",
        code="timeout",
        hint="look at the service's log, or give the client a longer timeout",
    )


def connection_lost(address: Address, why: str) -> errors.Unavailable:
    return errors.Unavailable(
        f"the connection to {address.shown} was lost: {why}",
        code="connection_lost",
        hint="whether the service acted is not known: look before you ask again",
    )


def _foreign() -> errors.Broken:
    return errors.Broken("the service answered with a body that is no JSON", code="foreign_reply")


def _bearer(key: str) -> str:
    if not key.isascii() or not key.isprintable() or not key.strip():
        raise errors.BadRequest("a key is printable ASCII", code="invalid_key")
    return key.strip()


async def _read(
    connection: HttpConnection, limit: float, still_there: Callable[[], Awaitable[object]] | None
) -> bytes:
    while True:
        try:
            async with asyncio.timeout(limit):
                return await connection.read()
        except TimeoutError:
            if still_there is None:
                raise too_late(limit) from None
        await still_there()


def _pause(attempt: int) -> float:
    return _AGAIN[min(attempt, len(_AGAIN) - 1)]


def _retry_after(connection: HttpConnection) -> float | None:
    """Seconds, when the reply asks to come back and that is soon."""
    if connection.status not in (429, 503):
        return None
    given = connection.headers.get(b"retry-after", b"")
    seconds = float(given) if given.isdigit() else None
    return seconds if seconds is not None and seconds <= _RETRY_AFTER_MAX else None


async def _events(pieces: AsyncIterable[bytes]) -> AsyncGenerator[tuple[int, str, str], None]:
    held = bytearray()
    async for piece in pieces:
        held += piece
        if b"\n\n" not in held[-len(piece) - 1 :]:
            if len(held) > _EVENTS_MAX:
                raise _foreign()
            continue
        *blocks, rest = bytes(held).split(b"\n\n")
        held = bytearray(rest)
        for block in blocks:
            if (event := _event(block)) is not None:
                yield event


def _event(block: bytes) -> tuple[int, str, str] | None:
    number, kind, data = 0, "message", []
    for line in block.decode("utf-8", "replace").split("\n"):
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "id" and value.isascii() and value.isdigit():
            number = int(value)
        elif name == "event":
            kind = value
        elif name == "data":
            data.append(value)
    return (number, kind, "\n".join(data)) if data else None
