"""The proxy of one sandbox: its Unix sockets, and a task for each connection.

A policy with grants needs a socket for each conversation, because a grant is for one of them. The
socket identifies the conversation to the proxy, and code inside cannot reach another one.
"""

import asyncio
import contextlib
import errno
import logging
import os
import socket
import ssl
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Self

from msgspec.structs import replace

from sbx.egress.connection import ProxyConnection
from sbx.egress.denials import EgressDenied
from sbx.egress.limits import ConnectionLimits, FairQueue, RateLimit, Timeouts, Tls
from sbx.egress.resolver import Lookup, Resolver, system_lookup
from sbx.egress.rules import EgressDecision
from sbx.egress.secrets import Secret, SecretStore
from sbx.egress.stream import ByteCounter, ProxyStream
from sbx.errors import Unavailable
from sbx.policy.grants import Grants
from sbx.policy.tables import Network
from sbx.telemetry.background import background_context

SOCKET = "egress.sock"
_log = logging.getLogger(__name__)
_BACKLOG = 64
_REFUSED_AT_ONCE = 8  # beyond connections_max: these get a refusal, and further ones are closed
_PAUSE_S = 0.2  # when no descriptor is left


class Egress:
    def __init__(self, terms: ConnectionLimits, certificates: bytes | None) -> None:
        self.environment: Mapping[str, str] = terms.vault.environment
        self.certificates = certificates
        self._terms = terms
        self._listeners: list[_Listener] = []
        self._connections: dict[asyncio.Task[None], ProxyConnection] = {}
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def open(
        cls,
        sandbox: str,
        network: Network,
        secrets: Mapping[str, Secret],
        *,
        need_grant: Collection[str] = (),
        record: Callable[[EgressDecision], None],
        honeytokens: Callable[[str], str | None] | None = None,
        lookup: Lookup = system_lookup,
        outside: ssl.SSLContext | None = None,
        patience: Timeouts | None = None,
        clock: Callable[[], float] = time.time,
    ) -> Self:
        """Prepare a proxy that does not listen yet. `need_grant`: the names of secrets that are
        inserted only after a grant. `record` must not block."""
        patience = patience or Timeouts()
        patterns = {rule.host for rule in network.rule}
        patterns |= {pattern for secret in secrets.values() for pattern in secret.hosts}
        tls, certificates = None, None
        if patterns:
            tls, certificates = await asyncio.to_thread(
                _means, sandbox, tuple(sorted(patterns)), outside
            )
        terms = ConnectionLimits(
            sandbox=sandbox,
            network=network,
            vault=SecretStore(secrets, need_grant),
            tls=tls,
            resolver=Resolver(lookup, patience.resolve),
            meter=ByteCounter(network.bytes_max),
            allowed=RateLimit(100, 200),
            refused=RateLimit(5, 50),
            reading=FairQueue(),
            patience=patience,
            record=record,
            honeytokens=honeytokens or (lambda _: None),
            clock=clock,
        )
        return cls(terms, certificates)

    def listen(
        self,
        directory: Path,
        owner: tuple[int, int] | None,
        grants: Grants | None = None,
    ) -> Callable[[], None]:
        """Make `directory`, and listen on a socket in it, with the grants of one conversation, or
        for all of them. Return a function that stops listening and closes these connections.

        The directory is 0700 and belongs to `owner` (uid, gid). Every process that reaches the
        socket may use it: on the host those that may enter the directory, inside all that have it
        mounted. Raise Unavailable `egress_unusable`.
        """
        try:
            listening = _listening(directory, owner)
        except OSError as error:
            raise Unavailable(
                f"the egress proxy cannot listen in {directory}: {error.strerror or error}",
                code="egress_unusable",
                hint="the directory must be new, and its parent must belong to the service",
            ) from error
        terms = replace(self._terms, grants=grants)
        listener = _Listener(listening, directory / SOCKET, partial(self._begin, terms))
        self._listeners.append(listener)

        def stop() -> None:
            listener.close()
            if listener in self._listeners:
                self._listeners.remove(listener)
            for task, connection in self._connections.items():
                if connection.terms is terms:
                    task.cancel()

        return stop

    def end_forbidden(self) -> None:
        """Close the connections that only a grant allowed which has ended."""
        for task, connection in self._connections.items():
            if not connection.is_allowed:
                connection.cut("the grant has ended")
                task.cancel()

    async def close(self) -> None:
        """Close every connection, and remove the sockets. A second call does nothing."""
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener.close()
        connections = list(self._connections)
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        await self._terms.resolver.close()

    def _begin(self, terms: ConnectionLimits, sock: socket.socket) -> None:
        most = terms.network.connections_max
        if len(self._connections) >= most + _REFUSED_AT_ONCE:
            sock.close()
            return
        wire = ProxyStream(sock, stall_s=terms.patience.body)
        full = len(self._connections) >= most
        connection = ProxyConnection(terms, wire)
        refused = EgressDenied("network.connections_max", f"{most} connections are open already")
        task = self._loop.create_task(_guarded(connection, refused if full else None))
        self._connections[task] = connection
        task.add_done_callback(self._connections.pop)
        task.add_done_callback(lambda _: wire.close())  # a task that is cancelled may never begin


class _Listener:
    """A listening socket, and the function that gets its connections."""

    def __init__(
        self, listening: socket.socket, path: Path, begin: Callable[[socket.socket], None]
    ) -> None:
        self._listening: socket.socket | None = listening
        self._path = path
        self._begin = begin
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._listen()

    def close(self) -> None:
        """Stop, and remove the socket. A second call does nothing."""
        if self._listening is None:
            return
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._listening.fileno())
        self._listening.close()
        self._listening = None
        with contextlib.suppress(OSError):
            self._path.unlink()
            self._path.parent.rmdir()

    def _listen(self) -> None:
        if self._listening is not None:
            background_context().run(self._loop.add_reader, self._listening.fileno(), self._accept)

    def _accept(self) -> None:
        """Accept all pending connections without waiting, so that no cancellation loses one."""
        if self._listening is None:
            return
        for _ in range(_BACKLOG):
            try:
                sock, _ = self._listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != errno.ECONNABORTED:
                    self._loop.remove_reader(self._listening.fileno())
                    self._pause = self._loop.call_later(_PAUSE_S, self._listen)
                return
            self._begin(sock)


async def _guarded(connection: ProxyConnection, refused: EgressDenied | None) -> None:
    try:
        await connection.run(refused=refused)
    except Exception as error:  # noqa: BLE001  # the border of a task: the others continue
        # Without its text, because it may quote a header with a secret.
        place = traceback.extract_tb(error.__traceback__)[-1]
        name = type(error).__name__
        _log.error("a connection ended by %s at %s:%d", name, place.name, place.lineno or 0)


def _means(
    sandbox: str, patterns: tuple[str, ...], outside: ssl.SSLContext | None
) -> tuple[Tls, bytes]:
    """Make the keys and read the certificates of the host. Run this in a thread."""
    # Imported only here: it takes a few MiB, which sandboxes without secrets and rules save.
    from sbx.egress import certificates

    authority = certificates.Authority(sandbox, patterns)
    outside = outside or certificates.trusted()
    return Tls(authority, outside), certificates.bundle(authority, outside)


def _listening(directory: Path, owner: tuple[int, int] | None) -> socket.socket:
    directory.mkdir(mode=0o700)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:  # by the descriptor, because the path of a socket has 107 bytes at most
            listening.bind(f"/proc/self/fd/{fd}/{SOCKET}")
        finally:
            os.close(fd)
        path = directory / SOCKET
        path.chmod(0o666)
        if owner is not None:
            os.chown(path, *owner, follow_symlinks=False)
            os.chown(directory, *owner, follow_symlinks=False)
        listening.listen(_BACKLOG)
    except BaseException:
        listening.close()
        with contextlib.suppress(OSError):
            (directory / SOCKET).unlink(missing_ok=True)
            directory.rmdir()
        raise
    return listening
