"""The proxy of one sandbox: a Unix socket, and a task for each connection."""

import asyncio
import contextlib
import errno
import logging
import os
import socket
import ssl
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

from sbx.egress.connection import ProxyConnection
from sbx.egress.denials import EgressDenied
from sbx.egress.limits import ConnectionLimits, FairQueue, RateLimit, Timeouts, Tls
from sbx.egress.resolver import Lookup, Resolver, system_lookup
from sbx.egress.rules import EgressDecision
from sbx.egress.secrets import Secret, SecretStore
from sbx.egress.stream import ByteCounter, ProxyStream
from sbx.errors import Unavailable
from sbx.policy.tables import Network
from sbx.telemetry.background import background_context

SOCKET = "egress.sock"
_log = logging.getLogger(__name__)
_BACKLOG = 64
_REFUSED_AT_ONCE = 8  # beyond connections_max: these get a refusal, and further ones are closed
_PAUSE_S = 0.2  # when no descriptor is left


class Egress:
    def __init__(
        self,
        terms: ConnectionLimits,
        listening: socket.socket,
        path: Path,
        certificates: bytes | None,
    ) -> None:
        self.socket = path
        self.environment: Mapping[str, str] = terms.vault.environment
        self.certificates = certificates
        self._terms = terms
        self._listening: socket.socket | None = listening
        self._connections: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._listen()

    @classmethod
    async def open(
        cls,
        sandbox: str,
        network: Network,
        secrets: Mapping[str, Secret],
        *,
        directory: Path,
        owner: tuple[int, int] | None,
        record: Callable[[EgressDecision], None],
        honeytokens: Callable[[str], str | None] | None = None,
        lookup: Lookup = system_lookup,
        outside: ssl.SSLContext | None = None,
        patience: Timeouts | None = None,
        clock: Callable[[], float] = time.time,
    ) -> Self:
        """Make `directory`, and listen on a socket in it.

        The directory is 0700 and belongs to `owner` (uid, gid). Every process that reaches the
        socket may use it: on the host those that may enter the directory, inside all that have it
        mounted. `record` must not block. Raise Unavailable `egress_unusable`.
        """
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
            vault=SecretStore(secrets),
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
        try:
            listening = _listening(directory, owner)
        except OSError as error:
            raise Unavailable(
                f"the egress proxy cannot listen in {directory}: {error.strerror or error}",
                code="egress_unusable",
                hint="the directory must be new, and its parent must belong to the service",
            ) from error
        return cls(terms, listening, directory / SOCKET, certificates)

    async def close(self) -> None:
        """Close every connection, and remove the socket. A second call does nothing."""
        if self._listening is None:
            return
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._listening.fileno())
        self._listening.close()
        self._listening = None
        with contextlib.suppress(OSError):
            self.socket.unlink()
            self.socket.parent.rmdir()
        connections = list(self._connections)
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        await self._terms.resolver.close()

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

    def _begin(self, sock: socket.socket) -> None:
        most = self._terms.network.connections_max
        if len(self._connections) >= most + _REFUSED_AT_ONCE:
            sock.close()
            return
        wire = ProxyStream(sock, stall_s=self._terms.patience.body)
        full = len(self._connections) >= most
        connection = ProxyConnection(self._terms, wire)
        refused = EgressDenied("network.connections_max", f"{most} connections are open already")
        task = self._loop.create_task(_guarded(connection, refused if full else None))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        task.add_done_callback(lambda _: wire.close())  # a task that is cancelled may never begin


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
