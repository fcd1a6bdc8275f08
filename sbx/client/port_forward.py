"""A local TCP port whose connections go to a server in a sandbox, each through a WebSocket.

sbx/api/ports.py has the other end.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from sbx.client.http import HttpClient
from sbx.client.terminal_socket import connected
from sbx.errors import Conflict, SbxError

_PIECE = 64 << 10
_LOOPBACK = "127.0.0.1"


@asynccontextmanager
async def forwarded(
    wire: HttpClient, path: str, port: int, on_error: Callable[[SbxError], None]
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
        except SbxError as error:
            on_error(error)
        finally:
            handling.discard(task)
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    try:
        server = await asyncio.start_server(accept, _LOOPBACK, port)
    except OSError as error:
        raise Conflict(
            f"the port {port} of this host cannot be opened: {error.strerror}",
            code="port_taken",
            hint="name another port, or 0 for a free one",
        ) from error
    async with server:
        yield server.sockets[0].getsockname()[1]
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
