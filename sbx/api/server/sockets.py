"""The listening sockets of a service, created so that no other user can replace or use them.

A Unix socket is in a directory that only its owner can write, and has mode 0600 from the start. The
socket of a dead service is removed, that of a live one is never touched.
"""

import errno
import grp
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from sbx.api.console.settings import address
from sbx.api.server.settings import ServiceSettings
from sbx.errors import BadRequest, Conflict, Denied, Unavailable
from sbx.linux import locks

_BACKLOG = 1024
_PROBE_S = 1.0


class Listener(Struct, frozen=True):
    """A listening socket. `path` and `identity` are set for a Unix socket of this process."""

    sock: socket.socket
    shown: str
    path: Path | None = None
    identity: tuple[int, int] | None = None

    def close(self) -> None:
        """Close it, and remove its file, unless another file replaced it."""
        self.sock.close()
        if self.path is not None:
            with suppress(OSError):
                status = self.path.lstat()
                if (status.st_dev, status.st_ino) == self.identity:
                    self.path.unlink()


def listen_on_unix(settings: ServiceSettings, path: Path | None = None) -> Listener:
    """Bind and listen at `path`, or at the socket of the settings. Raise Conflict
    `already_running` and `socket_path_taken`, Denied `socket_directory_not_private`, BadRequest
    `invalid_settings`, Unavailable.

    Only for a process with one thread: it changes the umask for a moment.
    """
    path = path or settings.socket
    group = _group_id(settings.socket_group)
    mode = settings.socket_mode
    if mode is None:
        mode = 0o600 if group is None else 0o660
    try:
        _make_directory(path.parent, group, mode)
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if not locks.try_lock(directory):
                raise Conflict(
                    f"another service is just starting in {path.parent}", code="already_running"
                )
            _remove_stale(path)
            return _bound(path, group, mode)
        finally:
            os.close(directory)
    except OSError as error:
        raise Unavailable(
            f"no socket can be made at {path}: {error.strerror or error}",
            code="socket_unavailable",
            hint="choose another place with --socket",
        ) from error


def listen_on_tcp(listen: str) -> Listener:
    """Bind and listen. Raise Unavailable `address_unavailable`."""
    host, port = address(listen)
    sock = None
    try:
        (family, kind, protocol, _, where), *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(where)
        sock.listen(_BACKLOG)
    except OSError as error:
        if sock is not None:
            sock.close()
        raise Unavailable(
            f"nothing can listen on {listen}: {error.strerror or error}",
            code="address_unavailable",
            hint="choose another address with --listen",
        ) from error
    host, port = sock.getsockname()[:2]
    return Listener(sock, f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")


def described(sock: socket.socket) -> Listener:
    """Return the listener of an inherited socket. Its opener removes it."""
    name = sock.getsockname()
    return Listener(sock, str(name) if isinstance(name, str) else f"http://{name[0]}:{name[1]}")


def _make_directory(path: Path, group: int | None, mode: int) -> None:
    """Create a private directory. Users that may connect to the socket may pass through it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700)
    except FileExistsError:
        status = path.stat()
        foreign = status.st_uid not in (0, os.geteuid())
        if foreign or status.st_mode & (stat.S_IWOTH | stat.S_IWGRP):
            raise Denied(
                f"{path} can be written by other users; they could put their own socket there",
                code="socket_directory_not_private",
                hint="choose your own directory for --socket, as in DIR/sbx/sbx.sock",
            ) from None
        return
    passing = (0o710 if mode & 0o070 else 0o700) | (0o001 if mode & 0o007 else 0)
    if group is not None:
        os.chown(path, -1, group)
    path.chmod(passing)


def _remove_stale(path: Path) -> None:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise Conflict(
            f"{path} exists and is not a socket",
            code="socket_path_taken",
            hint="remove it, or choose another place with --socket",
        )
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(str(path))
        except OSError as error:
            if error.errno == errno.ECONNREFUSED:
                path.unlink()
                return
            # A full backlog is a busy service, not a dead one.
    raise Conflict(
        f"a service answers at {path} already",
        code="already_running",
        hint="end it first, or choose another place with --socket and --data-dir",
    )


def _bound(path: Path, group: int | None, mode: int) -> Listener:
    """Bind a socket that has its mode from the start: bind(2) takes the mode of the unbound socket.
    A chmod by name could follow a name that another user replaced."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0)
    try:
        os.fchmod(sock.fileno(), mode)
        sock.bind(str(path))
    except BaseException:
        sock.close()
        raise
    finally:
        os.umask(before)
    status = path.lstat()
    listener = Listener(sock, str(path), path, (status.st_dev, status.st_ino))
    try:
        if group is not None:
            os.chown(path, -1, group, follow_symlinks=False)
        sock.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _group_id(name: str | None) -> int | None:
    if name is None:
        return None
    if name.isdecimal():
        return int(name)
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise BadRequest(
            f"the setting socket_group is wrong: this host has no group {name}",
            code="invalid_settings",
            hint=f"create it with: groupadd {name}",
        ) from None
