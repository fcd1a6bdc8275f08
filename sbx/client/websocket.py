"""WebSockets of a service, at the address of all other requests.

connected   one of them
forwarded   a local TCP port; its connections go to a server in a sandbox, each through one of them;
            sbx/api/ports.py has the other end
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from websockets.asyncio.client import ClientConnection, connect, unix_connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from sbx import errors
from sbx.client.errors import error_of
from sbx.client.http import HttpClient
from sbx.protocol.terminals import MESSAGE_MAX, PING_S

_CONNECT_S = 10.0
_CLOSE_S = 1.0
_PIECE = 64 << 10


async def connected(wire: HttpClient, path: str) -> ClientConnection:
    """Open a WebSocket to the service. Raise the error of the body, Unavailable
    `service_unreachable`."""
    address = wire.address
    headers = {} if wire.authorization is None else {"authorization": wire.authorization}
    options: dict[str, Any] = {
        "additional_headers": headers,
        "user_agent_header": None,
        "compression": None,
        "max_size": MESSAGE_MAX,
        "open_timeout": _CONNECT_S,
        "close_timeout": _CLOSE_S,
        "ping_interval": PING_S,
        "ping_timeout": PING_S,
        "proxy": None,
    }
    try:
        if address.path is not None:
            return await unix_connect(address.path, f"ws://{address.host}{path}", **options)
        scheme = "wss" if address.tls else "ws"
        return await connect(f"{scheme}://{address.host}{path}", **options)
    except InvalidStatus as error:
        raise error_of(error.response.status_code, bytes(error.response.body)) from error
    except (OSError, TimeoutError, InvalidHandshake) as error:
        raise errors.Unavailable(
            f"no service answers at {address.shown}: {error or 'it takes too long'}",
            code="service_unreachable",
            hint="start it with: sbx serve",
            details={"address": address.shown},
        ) from error


@asynccontextmanager
async def forwarded(
    wire: HttpClient, path: str, port: int, on_error: Callable[[errors.SbxError], None]
) -> AsyncIterator[int]:
    """Listen on a port of the loopback (0: a free one), and yield it. `on_error` gets the error of
    each connection that could not be forwarded. Raise Conflict `port_taken`."""
    handling: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handling.add(task)
        try:
            tunnel = await connected(wire, path)
            async with asyncio.TaskGroup() as both:
                both.create_task(_sent(reader, tunnel))
                both.create_task(_received(tunnel, writer))
            await tunnel.close()
        except errors.SbxError as error:
            on_error(error)
        finally:
            handling.discard(task)
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    try:
        server = await asyncio.start_server(accept, "127.0.0.1", port)
    except OSError as error:
        raise errors.Conflict(
            f"the port {port} of this host cannot be opened: {error.strerror}",
            code="port_taken",
            hint="name another port, or 0 for a free one",
        ) from error
    async with server:
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            for task in handling:
                task.cancel()
            await asyncio.gather(*handling, return_exceptions=True)


async def _sent(reader: asyncio.StreamReader, tunnel: ClientConnection) -> None:
    data = b"-"
    with suppress(ConnectionClosed):
        while data:
            data = b""
            with suppress(OSError):
                data = await reader.read(_PIECE)
            await tunnel.send(data)


async def _received(tunnel: ClientConnection, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionClosed, OSError):
        while isinstance(data := await tunnel.recv(), bytes) and data:
            writer.write(data)
            await writer.drain()
    with suppress(OSError):
        writer.write_eof()
