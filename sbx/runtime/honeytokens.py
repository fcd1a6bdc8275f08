"""Fake credentials and host names in a sandbox. Their use gives an attacker away.

    planted   in variables, and in a file below /tmp that AWS_SHARED_CREDENTIALS_FILE names. The
              values differ between sandboxes, and are the same in all kernels of one
    watched   the output of kernels and commands (`watch_output`), files through the API (`reader`),
              and the data that the proxy can read (`at_proxy`). A value is found across pieces and
              lines, in any case, and as base64 or hexadecimal digits. Packed data is not searched:
              an archive, a compressed body
    sprung    once: `on_sprung` ends every kernel, and none starts until `unfreeze`

The purpose of a sandbox never needs these values, but code that prints all its variables prints
them too: `watch` in the policy states where this counts.
"""

import asyncio
import base64
import hashlib
import hmac
import json
import string
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from sbx import errors
from sbx.aio import in_thread
from sbx.kernels import frames
from sbx.kernels.kernel import Kernel
from sbx.policy.tables import HoneytokenPolicy
from sbx.workspace.secret_files import secret_at

CREDENTIALS = "/tmp/.aws/credentials"  # noqa: S108  # inside
CODE = "honeytoken"
_ALPHABET = string.ascii_letters + string.digits
_STREAMS_MAX = 256  # commands at once of which the last piece is remembered
_SHOWN_MAX = 200


class TokenTriggered(Struct, frozen=True):
    """The use of a honeytoken: its name (`token`: a variable or a host), where, and when."""

    token: str
    where: str
    at: float


class Honeytokens:
    """The honeytokens of one sandbox. Call the methods from one event loop, `find` from any
    thread."""

    def __init__(
        self,
        policy: HoneytokenPolicy,
        sandbox: str,
        key: Path,
        on_sprung: Callable[[TokenTriggered], None],
    ) -> None:
        """`key`: where the secret lies, or is made, that the values come from."""
        self._policy = policy
        self._sandbox = sandbox
        self._key = key
        self._on_sprung = on_sprung
        self._planting = asyncio.Lock()
        self._needles: Mapping[str, str] = {}
        self._host = ""
        self._search: Callable[[bytes], Any] | None = None
        self.longest = 0
        self.environment: Mapping[str, str] = {}
        self.files: Mapping[str, str] = {}
        self.sprung: TokenTriggered | None = None

    async def plant(self) -> None:
        """Know the values. Raises Unavailable `secret_unusable`."""
        async with self._planting:
            if not self.environment:
                key = await in_thread(secret_at, self._key)
                self._know(partial(_drawn, key, self._sandbox))

    def _know(self, draw: Callable[[str, int], str]) -> None:
        import re2  # here, because only honeytokens need it

        host = f"db-{draw('host', 12).lower()}.{self._policy.host_suffix}"
        wires = {name: _value_of(name, draw(name, 40), host) for name in self._policy.env}
        pair = (_access_key(draw("file", 16)), draw("file-secret", 40))
        in_file = dict(zip(("access key of the file", "secret of the file"), pair, strict=True))
        secrets = {name: secret for name, (_, secret) in wires.items()} | in_file
        # In any case: programs write names of hosts in lower case, and the data in a name too.
        needles = {
            form.lower(): name for name, secret in secrets.items() for form in _forms(secret)
        }
        self._needles, self._host = needles, host
        # One pass, whatever the number of needles; each of them is of letters, digits and `.+/`.
        secrets_in = "|".join(map(re2.escape, needles))
        pattern = f"(?i)({secrets_in})|{re2.escape(host)}"
        self._search = re2.compile(pattern.encode()).search
        self.longest = max(map(len, (*needles, host)))
        self.environment = {name: shown for name, (shown, _) in wires.items()}
        if self._policy.file:
            self.environment = {**self.environment, "AWS_SHARED_CREDENTIALS_FILE": CREDENTIALS}
            self.files = {
                CREDENTIALS: "[default]\n"
                f"aws_access_key_id = {pair[0]}\naws_secret_access_key = {pair[1]}\n"
            }

    # -- used -----------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise Conflict `honeytoken` after the use of one."""
        if self.sprung is not None:
            raise refusal(self.sprung.token, self.sprung.where)

    def unfreeze(self) -> None:
        """Let kernels start again; the values stay."""
        self.sprung = None

    def find(self, text: str) -> str | None:
        """Return the honeytoken in this text; None without one."""
        if self._search is None:
            return None
        match = self._search(_unbroken(text).encode(errors="replace"))
        if match is None:
            return None
        return self._needles[match[1].decode().lower()] if match[1] is not None else self._host

    def at_proxy(self, text: str) -> str | None:
        """Return the honeytoken in a host name, a header or a piece of a body, and mark it as
        used."""
        return self._seen(text, "network", "a request to the proxy")

    def watch_output(self, kernel: Kernel) -> None:
        """Watch all that a kernel and its commands write."""
        if "output" in self._policy.watch:
            kernel.on_output = _Output(self).hear

    def reader(self, what: str) -> "FileReader | None":
        """For one file on its way in or out; None where files are not watched."""
        return FileReader(self, what) if "files" in self._policy.watch else None

    def _seen(self, text: str, kind: str, where: str) -> str | None:
        if kind not in self._policy.watch:
            return None
        name = self.find(text)
        if name is not None and self.sprung is None:
            self.sprung = TokenTriggered(name, where, time.time())
            self._on_sprung(self.sprung)
        return name


class FileReader:
    """A file that is read piece by piece. Remembers so much of the last piece as could begin a
    value."""

    def __init__(self, wires: Honeytokens, what: str) -> None:
        self._wires = wires
        self._what = what
        self._tail = ""
        self._loop = asyncio.get_running_loop()

    def read(self, piece: bytes) -> None:
        """Raise Conflict `honeytoken` if this piece completes a value."""
        text = self._tail + _unbroken(piece.decode("latin-1"))
        if self._wires._seen(text, "files", self._what) is not None:
            self._wires.check()
        self._tail = text[-(self._wires.longest - 1) :]

    async def pieces(self, source: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
        """Yield the same pieces after a check of each."""
        async for piece in source:
            self.read(piece)
            yield piece

    def check(self, source: Iterable[bytes]) -> None:
        """Read all pieces in a worker thread; a use is reported in the loop that created this
        object. Raise Conflict `honeytoken`."""
        for piece in source:
            text = self._tail + _unbroken(piece.decode("latin-1"))
            if (name := self._wires.find(text)) is not None:
                self._loop.call_soon_threadsafe(self._wires._seen, text, "files", self._what)
                raise refusal(name, self._what)
            self._tail = text[-(self._wires.longest - 1) :]


async def reader_of(wires: Honeytokens | None, what: str) -> FileReader | None:
    """For one file; None where nothing is planted, or files are not watched."""
    if wires is None:
        return None
    await wires.plant()
    return wires.reader(what)


async def look(wires: Honeytokens | None, what: str, content: bytes) -> None:
    """Raise Conflict `honeytoken` for a file that has a planted value."""
    if (reader := await reader_of(wires, what)) is not None:
        reader.read(content)


class _Output:
    """The output of one kernel, by its streams: those of the cell, and those of each command."""

    def __init__(self, wires: Honeytokens) -> None:
        self._wires = wires
        self._tails: dict[tuple[str | None, str], str] = {}

    def hear(self, frame: frames.Frame) -> bool:
        """Return whether the frame has a value; then it is not passed on."""
        content = frame.content
        match content:
            case frames.Stream(name, text):
                return self._goes_on((None, name), text)
            case frames.OutputFrame(name, text):
                return self._goes_on((frame.id, name), text)
            case frames.Tty(data):
                return self._goes_on((frame.id, "tty"), data.decode("latin-1"))
            case frames.Exited():
                for key in [key for key in self._tails if key[0] == frame.id]:
                    del self._tails[key]
        text = "\n".join(_texts(msgspec.structs.astuple(content)))
        return self._found(text)

    def _goes_on(self, key: tuple[str | None, str], text: str) -> bool:
        text = self._tails.pop(key, "") + _unbroken(text)
        self._tails[key] = text[-(self._wires.longest - 1) :]
        if len(self._tails) > _STREAMS_MAX:
            del self._tails[next(iter(self._tails))]
        return self._found(text)

    def _found(self, text: str) -> bool:
        return self._wires._seen(text, "output", "an output") is not None


def refusal(token: str, where: str) -> errors.Conflict:
    """Return the error for any start in a sandbox whose honeytoken was used."""
    return errors.Conflict(
        f"this sandbox is frozen: {token[:_SHOWN_MAX]}, a planted credential, was used in {where}",
        code=CODE,
        hint="look at its runs; an operator may unfreeze this (sbx unfreeze), or delete it",
        details={"token": token, "where": where},
    )


def _unbroken(text: str) -> str:
    """Without the ends of lines: `base64` and `xxd` write lines that are shorter than a value."""
    return text.replace("\n", "").replace("\r", "")


def _texts(value: Any) -> Iterator[str]:
    """Yield each text in a message from inside. Raise Malformed for too many.

    Decode JSON first: a kernel may write any letter as an escape.
    """
    match value:
        case str():
            yield value
        case msgspec.Raw():
            loose = frames.loose(value)
            yield loose if isinstance(loose, str) else json.dumps(loose, ensure_ascii=False)
        case dict():
            for name, item in value.items():
                yield name
                yield from _texts(item)
        case list() | tuple():
            for item in value:
                yield from _texts(item)


def _drawn(key: bytes, sandbox: str, name: str, length: int) -> str:
    """Letters and digits that only this key gives for this sandbox and name. None of them is
    written otherwise in JSON or a URL."""
    stream = hashlib.shake_256(hmac.digest(key, f"{sandbox}\0{name}".encode(), "sha256"))
    return "".join(_ALPHABET[byte % len(_ALPHABET)] for byte in stream.digest(length))


def _value_of(name: str, secret: str, host: str) -> tuple[str, str]:
    """Return the value of the variable, in the form that its name suggests, and the part to search
    for."""
    if name.endswith("_ACCESS_KEY_ID"):
        key = _access_key(secret[:16])
        return key, key
    if name.endswith(("_URL", "_URI", "_DSN")):
        return f"postgresql://app:{secret[:24]}@{host}:5432/app", secret[:24]
    if name.startswith(("GITHUB_", "GH_")):
        token = f"ghp_{secret[:36]}"
        return token, token
    return secret, secret


def _access_key(secret: str) -> str:
    return f"AKIA{secret.upper()}"


def _forms(secret: str) -> Iterator[str]:
    """Return the value itself, in hexadecimal, and in base64 at each of three offsets, without the
    letters that depend on the neighbouring bytes."""
    raw = secret.encode()
    yield secret
    yield raw.hex()
    for before in range(3):
        encoded = base64.b64encode(b"\0" * before + raw).decode()
        start = (before * 8 + 5) // 6
        end = (before + len(raw)) * 8 // 6
        yield encoded[start:end]
