"""The addresses and keys of a bridge, as in a connection file."""

import hashlib
from pathlib import Path
from typing import Literal

from msgspec import Struct

from sbx.errors import BadRequest

CHANNELS = ("shell", "iopub", "stdin", "control", "hb")
_WEAK = frozenset({"md5", "sha1", "shake_128", "shake_256"})  # broken, or of no fixed length
_Z85_KEY = 40  # characters of a key of 32 bytes


class ConnectionInfo(Struct, frozen=True):
    """The address of a bridge. Port 0 means a free port. For `ipc`, `ip` is the start of a path and
    the ports are its ends."""

    key: bytes
    transport: Literal["tcp", "ipc"] = "tcp"
    ip: str = "127.0.0.1"
    shell_port: int = 0
    iopub_port: int = 0
    stdin_port: int = 0
    control_port: int = 0
    hb_port: int = 0
    signature_scheme: str = "hmac-sha256"
    curve_publickey: bytes | None = None
    curve_secretkey: bytes | None = None

    def port(self, channel: str) -> int:
        port: int = getattr(self, f"{channel}_port")
        return port

    def path(self, port: int) -> Path:
        """Return the path of an `ipc` socket, in the form that every Jupyter client uses."""
        return Path(f"{self.ip}-{port}")

    def check(self) -> None:
        """Raise BadRequest `connection_unsigned` or `invalid_connection` if it is invalid."""
        if not self.key:
            raise BadRequest(
                "a connection without a key would let any process run code",
                code="connection_unsigned",
                hint="give Session.key a value, or leave it to jupyter_client",
            )
        digest = self.signature_scheme.removeprefix("hmac-")
        supported = hashlib.algorithms_guaranteed - _WEAK
        if digest == self.signature_scheme or digest not in supported:
            raise invalid(f"the signature scheme {self.signature_scheme!r} is not supported")
        if any(not 0 <= self.port(channel) < 1 << 16 for channel in CHANNELS):
            raise invalid("a port is a number from 0 to 65535")
        if self.ip.startswith("@") or "\0" in self.ip:  # an abstract socket: open to every user
            raise invalid(f"{self.ip!r} is not a path for a socket")
        keys = (self.curve_publickey, self.curve_secretkey)
        if keys != (None, None) and any(key is None or len(key) != _Z85_KEY for key in keys):
            raise invalid("transport encryption takes a public and a secret key of 40 characters")


def invalid(message: str) -> BadRequest:
    return BadRequest(message, code="invalid_connection")
