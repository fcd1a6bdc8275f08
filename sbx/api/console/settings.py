"""The settings of the console, and the addresses and origins in settings."""

from pathlib import Path
from typing import Self

from pydantic import Field, field_validator, model_validator

from sbx.protocol.addresses import default_socket
from sbx.runtime.settings import Settings


def address(listen: str) -> tuple[str, int]:
    """Return (host, port) of `127.0.0.1:8765` or `[::1]:8765`. Raise ValueError."""
    host, colon, port = listen.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not host or not port.isdecimal() or not 0 <= int(port) <= 65535:
        raise ValueError(f"'{listen}' is not an address such as 127.0.0.1:8765")
    return host, int(port)


def origin(text: str) -> str:
    """Return an origin of web pages. Raise ValueError."""
    scheme, _, rest = text.partition("://")
    if scheme not in ("http", "https") or not rest or "/" in rest or "*" in rest:
        raise ValueError(f"'{text}' is not an origin such as https://app.example.org")
    return text


class ConsoleSettings(Settings):
    """Settings that `ServiceSettings` includes.

    `console`: a permanent address for browsers. `console_socket`: whether there is a socket for
    `sbx console`. `console_url`: the origin that a reverse proxy gives the console, and
    `console_frames_url` the one that it gives frames with output of sandboxes.
    """

    socket: Path = Field(default_factory=default_socket)
    console: str | None = None
    console_socket: bool = True
    console_url: str | None = None
    console_frames_url: str | None = None

    @field_validator("console")
    @classmethod
    def _is_an_address(cls, value: str | None) -> str | None:
        if value is not None:
            address(value)
        return value

    @field_validator("console_url", "console_frames_url")
    @classmethod
    def _is_an_origin(cls, value: str | None) -> str | None:
        return None if value is None else origin(value)

    @model_validator(mode="after")
    def _has_two_origins(self) -> Self:
        if (self.console_url is None) != (self.console_frames_url is None):
            raise ValueError("console_url and console_frames_url need each other")
        return self

    @property
    def console_path(self) -> Path | None:
        """Return the socket for browsers, next to that of programs; None without one."""
        if not self.console_socket:
            return None
        prefix = "" if self.socket.name == "sbx.sock" else f"{self.socket.stem}-"
        return self.socket.with_name(f"{prefix}console.sock")
