"""Requests to one service: pooled connections, deadlines, and retries where they are safe.

The client sends a request again if the service cannot have acted on it: no connection could be
made, or the reply is 429 or 503 with a `Retry-After`, which sbx sends before it does anything. If
the connection is lost during the exchange, the client repeats only methods that are safe to repeat
(GET, PUT, DELETE) and requests with an Idempotency-Key.
"""

import asyncio
import os
import stat
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
from typing import Any
from urllib.parse import quote, urlencode

from sbx import errors
from sbx.aio import check_process
from sbx.client.address import Address
from sbx.client.errors import error_of
from sbx.client.http_connection import ConnectionLost, HttpConnection, connect
from sbx.client.replies import HttpReply, StreamedReply, connection_lost, read_events, too_late
from sbx.protocol.trace_context import trace_headers
from sbx.version import __version__

CHUNK = 256 << 10
_CONNECT_S = 5.0
_IDLE_S = 4.0  # the service may close a connection that is idle for longer
_IDLE_MAX = 64
_PAUSES = (0.05, 0.2, 0.5)  # seconds before each retry
_RETRY_AFTER_MAX = 10.0
_REPEATABLE = frozenset({"GET", "PUT", "DELETE"})

Params = Mapping[str, Any]


class HttpClient:
    """The connections to one service. An instance belongs to one process and one event loop."""

    def __init__(self, address: Address, key: str | None, timeout_s: float, tries: int) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self._tries = tries
        self._pid = os.getpid()
        self._idle: list[tuple[HttpConnection, float]] = []
        self._busy: set[HttpConnection] = set()
        self.tasks: set[asyncio.Task[None]] = set()  # they follow runs; `close` ends them
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        common = f"host: {address.host}\r\nuser-agent: sbx/{__version__}\r\n"
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
        """Exchange one request and its reply. Raise the error of the body.

        `again` permits to repeat the request after its connection was lost; None decides by the
        method. With `still_there` a time-out does not end the request: `still_there` is called,
        and raises if the service is gone.
        """
        head = self._head(method, target, headers, f"content-length: {len(body)}\r\n", body)
        repeatable = method in _REPEATABLE if again is None else again
        limit = self.timeout_s if timeout_s is None else timeout_s
        attempt = 0
        while True:
            connection, fresh = await self._lease()
            try:
                connection.send(head, body)
                content = await _read(connection, limit, still_there)
                self._check_service(connection)
            except ConnectionLost as lost:
                if not repeatable or attempt >= self._tries:
                    raise self._lost(lost) from lost
                if fresh:
                    await asyncio.sleep(_pause(attempt))
                    attempt += 1
                continue
            finally:
                self._release(connection)
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
        """Exchange one request and a reply that the caller reads in pieces. `timeout_s` applies to
        each piece. An early exit closes the connection. Raise the error of the body, and
        ConnectionLost."""
        head = self._head(method, target, headers, f"content-length: {len(body)}\r\n", body)
        limit = self.timeout_s if timeout_s is None else timeout_s
        connection, _ = await self._lease()
        try:
            try:
                async with asyncio.timeout(limit):
                    connection.send(head, body)
                    await connection.head()
                    self._check_service(connection)
                    if connection.status >= 400:
                        raise error_of(connection.status, await connection.read())
            except TimeoutError:
                raise too_late(limit) from None
            yield StreamedReply(connection, limit)
        finally:
            self._release(connection)

    async def send(
        self,
        method: str,
        target: str,
        chunks: AsyncIterable[bytes],
        *,
        size: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> HttpReply:
        """Exchange one request with a body of any size, sent as it arrives, and its reply. The
        request is never repeated.

        The service must accept each piece within the time-out. Raise the error of the body.
        """
        framing = "transfer-encoding: chunked" if size is None else f"content-length: {size}"
        head = self._head(method, target, headers, f"{framing}\r\n", b"")
        connection, _ = await self._lease()
        try:
            watched = _WatchedBody(chunks)
            sending = asyncio.ensure_future(
                connection.send_all(head, watched.chunks(), sized=size is not None)
            )
            try:
                await watched.wait_for(sending, self.timeout_s)
            finally:
                sending.cancel()
                await asyncio.wait([sending])
            async with asyncio.timeout(self.timeout_s):
                content = await connection.read()
            self._check_service(connection)
        except TimeoutError:
            raise too_late(self.timeout_s) from None
        except ConnectionLost as lost:
            raise self._lost(lost) from lost
        finally:
            self._release(connection)
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
        """Yield server-sent events as (id, type, data). Raise the error of an event `failure`, and
        ConnectionLost, so that the caller may connect again. A service that sends not even a
        heartbeat for `silence_s` counts as lost."""
        headers = {"accept": "text/event-stream"}
        if after:
            headers["last-event-id"] = str(after)
        async with (
            self.opened(method, target, body=body, headers=headers, timeout_s=silence_s) as reply,
            aclosing(reply.chunks()) as pieces,
        ):
            async for event in read_events(pieces):
                yield event

    def check(self) -> None:
        """Raise Broken `used_after_fork`, Closed."""
        check_process(self._pid, "client")
        if self._closed:
            raise errors.Closed("the client is closed", hint="create a new one")

    async def close(self) -> None:
        """Close every connection, and end the tasks that follow runs."""
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
        await asyncio.sleep(0)  # the transports are closed when this returns

    # -- connections ------------------------------------------------------------------------------

    async def _lease(self) -> tuple[HttpConnection, bool]:
        """Return a connection, and whether it is new."""
        self.check()
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._loop is not None:
                raise errors.BadRequest(
                    "a client belongs to the event loop that used it first",
                    code="other_loop",
                    hint="create a client in each asyncio.run, or use BlockingClient",
                )
            self._loop = loop
        while self._idle:
            connection, idle_since = self._idle.pop()
            if connection.usable and time.monotonic() - idle_since < _IDLE_S:
                self._busy.add(connection)
                return connection, False
            connection.close()
        connection = await self._connect()
        self._busy.add(connection)
        return connection, True

    async def _connect(self) -> HttpConnection:
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

    def _release(self, connection: HttpConnection) -> None:
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
        for name, value in {**trace_headers(), **(headers or {})}.items():
            if "\r" in value or "\n" in value or not value.isascii():
                raise errors.BadRequest(f"the header {name} cannot carry {value[:80]!r}")
            more += f"{name}: {value}\r\n"
        return b"".join(
            (f"{method} {target} HTTP/1.1\r\n".encode("ascii"), self._common, more.encode("ascii"),
             b"\r\n")
        )  # fmt: skip

    # -- errors ------------------------------------------------------------------------------------

    def _check_service(self, connection: HttpConnection) -> None:
        """Raise for the reply of another server. Each reply of sbx has the id of its request; a
        proxy before it may answer 5xx without one."""
        if b"x-request-id" in connection.headers or connection.status >= 500:
            return
        raise errors.Unavailable(
            f"the server at {self.address.shown} is not an sbx service",
            code="foreign_service",
            hint="check the address: --connect, SBX_SOCKET or connect=",
            details={"address": self.address.shown},
        )

    def _unreachable(self, error: Exception) -> errors.Unavailable:
        path = self.address.path
        if path is not None and os.path.exists(path) and not stat.S_ISSOCK(os.stat(path).st_mode):
            return errors.Unavailable(
                f"{path} is not a socket",
                code="service_unreachable",
                hint="give the socket of a service, or http://HOST:PORT",
                details={"address": self.address.shown},
            )
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
            hint="ask its operator: sbx serve --socket-group and --socket-mode permit others",
            details={"address": self.address.shown},
        )

    def _lost(self, lost: ConnectionLost) -> errors.Unavailable:
        return connection_lost(self.address, lost)


class _WatchedBody:
    """The body of a request, and whether the service still accepts it."""

    def __init__(self, source: AsyncIterable[bytes]) -> None:
        self._source = source
        self._taken = 0

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        async for chunk in self._source:
            for start in range(0, len(chunk), CHUNK):
                self._taken += 1
                yield chunk[start : start + CHUNK]

    async def wait_for(self, sending: asyncio.Future[None], silence_s: float) -> None:
        """Raise TimeoutError if no piece was sent for `silence_s`."""
        while not sending.done():
            before = self._taken
            await asyncio.wait([sending], timeout=silence_s)
            if not sending.done() and self._taken == before:
                raise TimeoutError
        sending.result()


def target(*parts: str, params: Params | None = None) -> str:
    """Return the path of a request, each part quoted, and the `params` that are not None."""
    path = "".join(f"/{quote(part, safe='')}" for part in parts)
    return path + query(params)


def query(params: Params | None) -> str:
    fields = {name: _text(value) for name, value in (params or {}).items() if value is not None}
    return f"?{urlencode(fields)}" if fields else ""


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _bearer(key: str) -> str:
    if not key.isascii() or not key.isprintable() or not key.strip():
        raise errors.BadRequest("a key must be printable ASCII", code="invalid_key")
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
    return _PAUSES[min(attempt, len(_PAUSES) - 1)]


def _retry_after(connection: HttpConnection) -> float | None:
    """Return the seconds after which the service accepts the request, if they are few."""
    if connection.status not in (429, 503):
        return None
    value = connection.headers.get(b"retry-after", b"")
    seconds = float(value) if value.isdigit() else None
    return seconds if seconds is not None and seconds <= _RETRY_AFTER_MAX else None
