"""The proxy of one sandbox whose policy has one: from its first kernel until it is stopped.

    host     an Egress listens on a Unix socket in a private directory of the sandbox, or of each
             conversation if the policy has grants
    jail     that directory is mounted read-only; PID 1 listens on the loopback and copies

This module reads the values of secrets on the host when the proxy opens, and passes them only to
the proxy. `record` gets each decision of the proxy, and `log` keeps the last ones.
"""

import asyncio
import os
import stat
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from sbx import errors
from sbx.aio import in_thread, run_to_completion
from sbx.imports import import_in_thread
from sbx.isolation.launch_plan import CERTIFICATES, WayOut
from sbx.policy import Policy
from sbx.policy.grants import Grants
from sbx.workspace.layout import DataDirectory

if TYPE_CHECKING:
    from sbx.egress import Egress, EgressDecision, Secret

_REMEMBERED = 1000
_SECRET_MAX = 64 * 1024
_SWEEP_S = 5.0


class _Opened(Struct, frozen=True):
    name: str  # of its directory
    way_out: WayOut
    stop: Callable[[], None]


class EgressSocket:
    """Open and close the proxy. Its modules are imported only when it opens."""

    def __init__(
        self,
        sandbox: str,
        policy: Policy,
        data: DataDirectory,
        record: "Callable[[EgressDecision], None]",
        honeytokens: Callable[[str], str | None] | None = None,
    ) -> None:
        self.log: deque[EgressDecision] = deque(maxlen=_REMEMBERED)
        self._sandbox = sandbox
        self._policy = policy
        self._data = data
        self._record = record
        self._honeytokens = honeytokens
        self._opening = asyncio.Lock()
        self._starts = 0
        self._names: set[str] = set()  # of its directories
        self._egress: Egress | None = None
        self._ways_out: dict[str, _Opened] = {}  # by conversation, or only one for all

    @asynccontextmanager
    async def opened(
        self,
        owner: tuple[int, int] | None,
        conversation: str = "",
        grants: Grants | None = None,
    ) -> AsyncIterator[WayOut]:
        """Open the proxy, and keep it open while a kernel of a conversation starts with it.
        `owner`: the ids of the jails, if they differ from those of the runtime. With `grants` the
        conversation has its own socket.

        Raise Unavailable `secret_unusable`, `egress_unusable`.
        """
        key = conversation if grants is not None else ""
        self._starts += 1
        try:
            async with self._opening:
                if key not in self._ways_out:
                    try:
                        opening = self._open(owner, grants)
                        self._ways_out[key] = await run_to_completion(opening)
                    except BaseException:
                        if not self._ways_out:
                            await run_to_completion(self._close())
                        raise
                way_out = self._ways_out[key].way_out
            yield way_out
        finally:
            self._starts -= 1

    async def rest(self, in_use: Callable[[], bool]) -> None:
        """Close the proxy unless a kernel starts with it, or `in_use` returns True."""
        async with self._opening:
            if not self._starts and not in_use():
                await run_to_completion(self._close())

    async def close(self) -> None:
        """Close every connection, and remove the files and the placeholders of this proxy."""
        async with self._opening:
            await run_to_completion(self._close())

    async def leave(self, conversation: str) -> None:
        """Close the socket and the connections of a conversation that ends. Remove its files."""
        if (opened := self._ways_out.pop(conversation, None)) is not None:
            opened.stop()
            await in_thread(self._data.remove_egress, opened.name, _SWEEP_S)
            self._names.discard(opened.name)  # until then, `close` removes it

    def end_forbidden(self) -> None:
        """Close the connections that a grant allowed which has ended."""
        if self._egress is not None:
            self._egress.end_forbidden()

    async def _open(self, owner: tuple[int, int] | None, grants: Grants | None) -> "_Opened":
        egress = await import_in_thread("sbx.egress")
        if (proxy := self._egress) is None:
            proxy = self._egress = await egress.Egress.open(
                self._sandbox,
                self._policy.network,
                await in_thread(read_secrets, self._policy),
                need_grant={name for grant in self._policy.grant for name in grant.secret},
                record=self._decided,
                honeytokens=self._honeytokens,
            )
        name = self._data.new_name()
        self._names.add(name)
        directory = self._data.egress_path(name)
        stop = proxy.listen(directory, owner, grants)
        certificates = proxy.certificates
        if certificates is not None:
            await in_thread(_write_certificates, directory / CERTIFICATES, certificates)
        way_out = WayOut(
            str(directory),
            certificates=certificates is not None,
            environment=tuple(sorted(proxy.environment.items())),
        )
        return _Opened(name, way_out, stop)

    async def _close(self) -> None:
        egress, names = self._egress, self._names
        self._egress, self._names, self._ways_out = None, set(), {}
        if egress is not None:
            await egress.close()
        for name in names:
            await in_thread(self._data.remove_egress, name, _SWEEP_S)

    def _decided(self, decision: "EgressDecision") -> None:
        self.log.append(decision)
        self._record(decision)


def read_secrets(policy: Policy) -> "Mapping[str, Secret]":
    """Return the secrets of a policy with their values, by name. Raise Unavailable
    `secret_unusable`, never with a value in it."""
    if not policy.secrets:
        return {}
    from sbx.egress import Secret

    values = {}
    for name, secret in policy.secrets.items():
        value = read_secret(name, secret.source)
        values[name] = Secret(
            name, secret.env, secret.hosts, secret.header, value, allow_plain=secret.allow_plain
        )
    return values


def read_secret(name: str, source: str) -> str:
    """Return the value of a secret from `env:NAME` or `file:/path`. Raise as `read_secrets`."""
    kind, _, where = source.partition(":")
    value = os.environ.get(where) if kind == "env" else _read(name, Path(where))
    if not value:
        raise _unusable(name, f"the runtime has no variable {where}, or an empty one")
    return value


def _read(name: str, path: Path) -> str:
    """Read a regular file of bounded size: a FIFO could block indefinitely."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise _unusable(name, f"{path} is not a regular file")
            data = os.read(fd, _SECRET_MAX + 1)
        finally:
            os.close(fd)
    except OSError as error:
        raise _unusable(name, f"{path} cannot be read: {error.strerror}") from error
    if len(data) > _SECRET_MAX:
        raise _unusable(name, f"{path} is too long")
    try:
        value = data.decode().strip()
    except UnicodeDecodeError:
        raise _unusable(name, f"{path} is not text") from None
    if not value:
        raise _unusable(name, f"{path} is empty")
    return value


def _unusable(name: str, why: str) -> errors.Unavailable:
    return errors.Unavailable(
        f"the secret {name} cannot be used: {why}",
        code="secret_unusable",
        hint="its place on the host is in the policy, or in the file of the tool",
    )


def _write_certificates(path: Path, content: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    with os.fdopen(fd, "wb") as file:
        os.fchmod(fd, 0o644)  # for any umask; the directory keeps other users out
        file.write(content)
