"""Replies of a service: complete, in pieces, and as server-sent events."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from sbx import errors
from sbx.client.address import Address
from sbx.client.errors import failure
from sbx.client.http_connection import HttpConnection

_EVENTS_MAX = 256 << 20  # bytes of one event


@dataclass(frozen=True, slots=True)
class HttpReply:
    status: int
    headers: Mapping[bytes, bytes]
    body: bytes

    def json(self) -> Any:
        """Decode the body; None for an empty one. Raise Broken `foreign_reply`."""
        if not self.body:
            return None
        try:
            return json.loads(self.body)
        except ValueError as error:
            raise _foreign() from error


class StreamedReply:
    """A reply whose body is still arriving. `size` is in bytes, or None if the service did not
    announce it."""

    def __init__(self, connection: HttpConnection, timeout_s: float) -> None:
        self.status = connection.status
        self.headers = connection.headers
        length = connection.headers.get(b"content-length", b"")
        self.size = int(length) if length.isdigit() else None
        self._connection = connection
        self._timeout_s = timeout_s

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the body in pieces. Raise ConnectionLost, and Unavailable `timeout` if no piece
        arrives in time."""
        async with aclosing(self._connection.chunks()) as pieces:
            while True:
                try:
                    async with asyncio.timeout(self._timeout_s):
                        piece = await anext(pieces, None)
                except TimeoutError:
                    raise too_late(self._timeout_s) from None
                if piece is None:
                    return
                yield piece


async def read_events(pieces: AsyncIterable[bytes]) -> AsyncGenerator[tuple[int, str, str], None]:
    """Yield server-sent events as (id, type, data). Raise the error of an event `failure`."""
    pending = bytearray()
    async for piece in pieces:
        pending += piece
        if b"\n\n" not in pending[-len(piece) - 1 :]:
            if len(pending) > _EVENTS_MAX:
                raise _foreign()
            continue
        *blocks, rest = bytes(pending).split(b"\n\n")
        pending = bytearray(rest)
        for block in blocks:
            if (event := _event(block)) is not None:
                if event[1] == "failure":
                    raise failure(event[2])
                yield event


def _event(block: bytes) -> tuple[int, str, str] | None:
    number, kind, data = 0, "message", []
    for line in block.decode("utf-8", "replace").split("\n"):
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "id" and value.isascii() and value.isdigit():
            number = int(value)
        elif name == "event":
            kind = value
        elif name == "data":
            data.append(value)
    return (number, kind, "\n".join(data)) if data else None


def too_late(seconds: float) -> errors.Unavailable:
    return errors.Unavailable(
        f"the service did not answer within {seconds:g} s",
        code="timeout",
        hint="look at the service's log, or give the client a longer timeout",
    )


def connection_lost(address: Address, reason: object) -> errors.Unavailable:
    return errors.Unavailable(
        f"the connection to {address.shown} was lost: {reason}",
        code="connection_lost",
        hint="it is not known whether the service acted: check before you repeat the request",
    )


def _foreign() -> errors.Broken:
    return errors.Broken("the service answered with a body that is not JSON", code="foreign_reply")
