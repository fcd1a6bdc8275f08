"""The address of a service: the path of a Unix socket, or a TCP address."""

import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from sbx.errors import BadRequest
from sbx.protocol.addresses import default_socket, is_host_port, is_local

_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Address:
    """An address. `shown` is for messages, `host` for the Host header. `path` is that of a socket;
    without one the address is TCP."""

    shown: str
    host: str
    path: str | None = None
    port: int = 0
    tls: bool = False


def address_of(connect: str | os.PathLike[str] | None) -> Address:
    """Return the address; for None that of SBX_SOCKET, else the default socket. HOST:PORT of this
    machine is `http://HOST:PORT`.

    Raise BadRequest `invalid_address`.
    """
    if connect is None:
        connect = os.environ.get("SBX_SOCKET") or default_socket()
    text = os.fspath(connect)
    scheme, separator, rest = text.partition("://")
    if not separator:
        if is_host_port(text):
            if not is_local(text):
                raise _invalid(text, f"for a service on TCP, write https://{text} or http://{text}")
            return address_of(f"http://{text}")
        return _socket(text)
    if scheme == "unix":
        return _socket(rest)
    try:
        parts = urlsplit(text)
        port = parts.port or _PORTS[scheme]
    except (KeyError, ValueError):
        raise _invalid(text) from None
    if not parts.hostname or parts.path.strip("/") or parts.query or parts.username:
        raise _invalid(text)
    return Address(text.rstrip("/"), parts.netloc, None, port, scheme == "https")


def host_of(address: Address) -> str:
    """Return the host name or IP address of a TCP address."""
    return urlsplit(address.shown).hostname or ""


def _socket(path: str) -> Address:
    if not path or "\0" in path:
        raise _invalid(path)
    return Address(str(Path(path).expanduser()), "sbx", str(Path(path).expanduser()))


def _invalid(
    text: str, hint: str = "give the path of its socket, or http://HOST:PORT"
) -> BadRequest:
    return BadRequest(f"{text!r} is not an address of a service", code="invalid_address", hint=hint)
