"""The five sockets of a connection, bound.

Nobody needs the key to connect and to send, only to be believed. So whatever linux and ZeroMQ keep
for a client that was not believed yet is bounded here, before the sockets are bound: the size of
what it sends, how many messages wait to be read, and how many for it to read them.
"""

import errno
import os
import socket
import stat
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from sbx.errors import Unavailable
from sbx.jupyter.connection import CHANNELS, Connection, invalid

LINGER_MS = 1000  # what was sent before the end, `shutdown_reply` above all, still arrives
_BACKLOG = 64
_UNREAD = 64  # messages, by us and by each client
_UNREAD_OUTPUT = 8  # of up to 16 MiB, which are held once for all clients
# Bytes of one part of a message. `hb` gives back what it got, `iopub` takes subscriptions.
_LARGEST = {"shell": 64 << 20, "control": 1 << 20, "stdin": 4 << 20, "hb": 1 << 10, "iopub": 4096}


class Sockets:
    """See the module. `connection` is as bound: no port is 0."""

    def __init__(self, asked: Connection) -> None:
        """Bind. Raises BadRequest `invalid_connection`, Unavailable `address_in_use`."""
        asked.check()
        self.connection = asked
        self._context = zmq.asyncio.Context()
        self._files: dict[Path, tuple[int, int]] = {}
        self._sockets: dict[str, zmq.asyncio.Socket] = {}
        try:
            ports: dict[str, Any] = {}
            for channel in CHANNELS:
                self._sockets[channel] = _socket(self._context, channel, asked)
                ports[f"{channel}_port"] = self._bind(channel, asked.port(channel))
            self.connection = replace(asked, **ports)
        except BaseException:
            self.let_go(linger_ms=0)
            self.end()
            raise

    def __getitem__(self, channel: str) -> zmq.asyncio.Socket:
        return self._sockets[channel]

    def bind_again(self) -> None:
        """Where the file of a socket is gone: jupyter_client removes them at every restart."""
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

    def let_go(self, *, linger_ms: int = LINGER_MS) -> None:
        """Close the sockets; what was sent is still delivered, for so long."""
        for made in self._sockets.values():
            made.close(linger=linger_ms)
        for path, identity in self._files.items():
            if _identity(path) == identity:
                path.unlink(missing_ok=True)
        self._files.clear()

    def end(self) -> None:
        """Wait, in whatever thread, until they are closed and nothing of ZeroMQ is left."""
        self._context.term()

    def _bind(self, channel: str, port: int) -> int:
        """Bind to this port, or a free one; which it was."""
        asked = self.connection
        if asked.transport == "tcp":
            host = f"[{asked.ip}]" if ":" in asked.ip and "[" not in asked.ip else asked.ip
            _bind_to(self[channel], f"tcp://{host}:{port or '*'}")
            return int(self[channel].getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        port = port or next(number for number in count(1) if not asked.path(number).exists())
        self._bind_path(channel, asked.path(port))
        return port

    def _bind_path(self, channel: str, path: Path) -> None:
        """ZeroMQ would take a path away from whoever listens there, let everybody connect whom the
        umask lets, and remove the file late, when it may be that of the next one."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as listening:
            try:
                _remove_what_is_dead(path)
                listening.bind(str(path))
                path.chmod(0o600)
                listening.listen(_BACKLOG)
            except (OSError, ValueError) as error:
                raise _as_ours(error, f"ipc://{path}") from error
            self._files[path] = _identity(path) or (0, 0)
            self[channel].setsockopt(zmq.USE_FD, os.dup(listening.fileno()))
        _bind_to(self[channel], f"ipc://{path}")


def _socket(context: zmq.asyncio.Context, channel: str, asked: Connection) -> zmq.asyncio.Socket:
    made = context.socket(zmq.XPUB if channel == "iopub" else zmq.ROUTER)
    made.maxmsgsize = _LARGEST[channel]
    made.rcvhwm = _UNREAD
    made.sndhwm = _UNREAD_OUTPUT if channel == "iopub" else _UNREAD
    made.ipv6 = ":" in asked.ip
    if channel == "iopub":
        made.setsockopt(zmq.XPUB_VERBOSE, 1)  # tells of each subscriber, for its `iopub_welcome`
        made.setsockopt(zmq.XPUB_NODROP, 1)
    else:
        # Clients come back under the name they had, and are not kept out by what is left of them.
        made.router_handover = 1
        made.router_mandatory = channel != "hb"  # else a reply that finds no room is gone unseen
    if asked.curve_secretkey is not None:
        try:
            made.curve_secretkey = asked.curve_secretkey
            made.curve_publickey = asked.curve_publickey
            made.curve_server = True
        except zmq.ZMQError as error:
            made.close(linger=0)
            raise invalid("these are no keys for transport encryption") from error
    return made


def _bind_to(made: zmq.asyncio.Socket, address: str) -> None:
    try:
        made.bind(address)
    except (zmq.ZMQError, OSError, ValueError) as error:
        raise _as_ours(error, address) from error


def _remove_what_is_dead(path: Path) -> None:
    """What a process left that was killed. Raises OSError where somebody listens, or for a file
    that is no socket."""
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
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _as_ours(error: Exception, address: str) -> Exception:
    number = getattr(error, "errno", None)
    if number == errno.EADDRINUSE:
        return Unavailable(
            f"{address} is in use",
            code="address_in_use",
            hint="end the kernel that has it, or leave the ports to be chosen",
        )
    if number in {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}:
        return Unavailable(f"no socket can be had: {error}")
    return invalid(f"{address} cannot be bound: {error}")
