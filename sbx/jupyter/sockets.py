"""The five sockets of a connection, bound.

A process needs no key to connect and to send; the key only makes its messages accepted. So Linux
and ZeroMQ store data for unauthenticated clients. That data is limited here, before the sockets are
bound: the size of a message, and the number of unread messages in each direction.
"""

import errno
import os
import socket
import stat
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio
from msgspec.structs import replace

from sbx.errors import Unavailable
from sbx.jupyter.connection import CHANNELS, ConnectionInfo, invalid

LINGER_MS = 1000  # messages sent before the end, `shutdown_reply` above all, still arrive
_BACKLOG = 64
_UNREAD = 64  # messages that the host, and each client, has not read
_UNREAD_OUTPUT = 8  # of up to 16 MiB, which are stored once for all clients
# Bytes of one part of a message. `hb` echoes its input, `iopub` receives subscriptions.
_LARGEST = {"shell": 64 << 20, "control": 1 << 20, "stdin": 4 << 20, "hb": 1 << 10, "iopub": 4096}


class Sockets:
    """See the module. `connection` has the bound ports: no port is 0."""

    def __init__(self, connection: ConnectionInfo) -> None:
        """Bind. Raise BadRequest `invalid_connection`, Unavailable `address_in_use`."""
        connection.check()
        self.connection = connection
        self._context = zmq.asyncio.Context()
        self._files: dict[Path, tuple[int, int]] = {}
        self._sockets: dict[str, zmq.asyncio.Socket] = {}
        try:
            ports: dict[str, Any] = {}
            for channel in CHANNELS:
                self._sockets[channel] = _socket(self._context, channel, connection)
                ports[f"{channel}_port"] = self._bind(channel, connection.port(channel))
            self.connection = replace(connection, **ports)
        except BaseException:
            self.release(linger_ms=0)
            self.end()
            raise

    def __getitem__(self, channel: str) -> zmq.asyncio.Socket:
        return self._sockets[channel]

    def bind_again(self) -> None:
        """Bind a socket again if its file is gone: jupyter_client removes it at every restart."""
        if self.connection.transport == "tcp":
            return
        for channel in CHANNELS:
            port = self.connection.port(channel)
            path = self.connection.path(port)
            if _identity(path) != self._files.pop(path, None):
                self[channel].unbind(f"ipc://{path}")
                self._bind_path(channel, path)
            else:
                self._files[path] = _identity(path) or (0, 0)

    def release(self, *, linger_ms: int = LINGER_MS) -> None:
        """Close the sockets. Sent messages are still delivered for `linger_ms`."""
        for sock in self._sockets.values():
            sock.close(linger=linger_ms)
        for path, identity in self._files.items():
            if _identity(path) == identity:
                path.unlink(missing_ok=True)
        self._files.clear()

    def end(self) -> None:
        """Wait until the sockets are closed and ZeroMQ has ended. May be called in any thread."""
        self._context.term()

    def _bind(self, channel: str, port: int) -> int:
        """Bind to this port, or to a free one. Return the port."""
        connection = self.connection
        if connection.transport == "tcp":
            host = (
                f"[{connection.ip}]"
                if ":" in connection.ip and "[" not in connection.ip
                else connection.ip
            )
            _bind_to(self[channel], f"tcp://{host}:{port or '*'}")
            return int(self[channel].getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        port = port or next(number for number in count(1) if not connection.path(number).exists())
        self._bind_path(channel, connection.path(port))
        return port

    def _bind_path(self, channel: str, path: Path) -> None:
        """Bind and listen with our own code.

        ZeroMQ would take a path away from a process that listens there, create a socket that the
        umask may open to others, and remove the file late, when it may belong to the next kernel.
        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as listening:
            try:
                _remove_dead_socket(path)
                listening.bind(str(path))
                path.chmod(0o600)
                listening.listen(_BACKLOG)
            except (OSError, ValueError) as error:
                raise _translated(error, f"ipc://{path}") from error
            self._files[path] = _identity(path) or (0, 0)
            self[channel].setsockopt(zmq.USE_FD, os.dup(listening.fileno()))
        _bind_to(self[channel], f"ipc://{path}")


def _socket(
    context: zmq.asyncio.Context, channel: str, connection: ConnectionInfo
) -> zmq.asyncio.Socket:
    sock = context.socket(zmq.XPUB if channel == "iopub" else zmq.ROUTER)
    sock.maxmsgsize = _LARGEST[channel]
    sock.rcvhwm = _UNREAD
    sock.sndhwm = _UNREAD_OUTPUT if channel == "iopub" else _UNREAD
    sock.ipv6 = ":" in connection.ip
    if channel == "iopub":
        sock.setsockopt(zmq.XPUB_VERBOSE, 1)  # reports each subscriber, for its `iopub_welcome`
        sock.setsockopt(zmq.XPUB_NODROP, 1)
    else:
        # A client that reconnects under its old name replaces its old connection.
        sock.router_handover = 1
        sock.router_mandatory = channel != "hb"  # else a reply without room is lost silently
    if connection.curve_secretkey is not None:
        try:
            sock.curve_secretkey = connection.curve_secretkey
            sock.curve_publickey = connection.curve_publickey
            sock.curve_server = True
        except zmq.ZMQError as error:
            sock.close(linger=0)
            raise invalid("the keys for transport encryption are invalid") from error
    return sock


def _bind_to(sock: zmq.asyncio.Socket, address: str) -> None:
    try:
        sock.bind(address)
    except (zmq.ZMQError, OSError, ValueError) as error:
        raise _translated(error, address) from error


def _remove_dead_socket(path: Path) -> None:
    """Remove the socket file of a process that was killed.

    Raise OSError if a process listens on it, or if the file is not a socket.
    """
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise FileExistsError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    except FileNotFoundError:
        return
    kind = socket.SOCK_STREAM | socket.SOCK_NONBLOCK
    with socket.socket(socket.AF_UNIX, kind) as caller, suppress(ConnectionRefusedError):
        caller.connect(str(path))
        raise FileExistsError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    path.unlink(missing_ok=True)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _translated(error: Exception, address: str) -> Exception:
    number = getattr(error, "errno", None)
    if number == errno.EADDRINUSE:
        return Unavailable(
            f"{address} is in use",
            code="address_in_use",
            hint="end the kernel that has it, or leave the ports to be chosen",
        )
    if number in {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}:
        return Unavailable(f"no socket can be opened: {error}")
    return invalid(f"{address} cannot be bound: {error}")
