"""Requests to one service: calls, streams of events, downloads. `Client` inherits them."""

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, Self

from sbx import errors
from sbx.client.http import HttpClient, Params, query
from sbx.client.http_connection import ConnectionLost
from sbx.client.replies import StreamedReply, connection_lost

_FOLLOW_PAUSE_S = 0.5
Json = dict[str, Any]


class ServiceRequests:
    """Requests over `wire`, which belongs to one event loop and one process."""

    def __init__(self, wire: HttpClient) -> None:
        self._wire = wire

    @property
    def address(self) -> str:
        """The path of the socket, or the URL."""
        return self._wire.address.shown

    async def close(self) -> None:
        """Close every connection. The sandboxes continue to exist."""
        await self._wire.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def request(
        self,
        method: str,
        path: str,
        *,
        params: Params | None = None,
        json: Any = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Send one request. Return the JSON of the reply, or None for an empty one.

        `path` must be quoted. `timeout_s`: None for that of the client. Raise the error of the
        body.
        """
        body = b"" if json is None else _encoded(json)
        reply = await self._wire.call(
            method, path + query(params), body=body, headers=headers, timeout_s=timeout_s
        )
        return reply.json()

    async def follow(
        self, method: str, path: str, *, json: Any = None, after: int = 0
    ) -> AsyncGenerator[tuple[int, Json], None]:
        """Yield the events of a stream as (id, JSON) until the service ends it. Resume a GET after
        the last event if its connection is lost."""
        body = b"" if json is None else _encoded(json)
        async with aclosing(self._followed(method, path, after, body)) as events:
            async for number, data in events:
                yield number, loads(data)

    @asynccontextmanager
    async def download(
        self, path: str, *, params: Params | None = None
    ) -> AsyncIterator[StreamedReply]:
        """Open a reply of any size, to read it in pieces: `.size` and `.chunks()`."""
        try:
            async with self._wire.opened("GET", path + query(params)) as reply:
                yield reply
        except ConnectionLost as lost:
            raise connection_lost(self._wire.address, lost) from lost

    async def _followed(
        self, method: str, path: str, after: int, body: bytes = b""
    ) -> AsyncGenerator[tuple[int, str], None]:
        tries = 0
        while True:
            try:
                events = self._wire.events(method, path, body=body, after=after)
                async with aclosing(events):
                    async for number, _, data in events:
                        after, tries = max(after, number), 0
                        yield number, data
                return
            except ConnectionLost as lost:
                tries += 1
                if method != "GET" or tries > 3:
                    raise connection_lost(self._wire.address, lost) from lost
            await asyncio.sleep(_FOLLOW_PAUSE_S)

    async def _json(self, method: str, path: str, body: Any = None) -> Json:
        reply = await self.request(method, path, json=body)
        if not isinstance(reply, dict):
            raise errors.Broken("the service did not answer with an object", code="foreign_reply")
        return reply

    async def _items(self, path: str) -> list[Json]:
        """Return a list that has no pages."""
        items: list[Json] = (await self._json("GET", path))["items"]
        return items

    async def _post_once(self, path: str, body: Json, key: str | None) -> Any:
        headers = {"idempotency-key": key or secrets.token_hex(16)}
        reply = await self._wire.call(
            "POST", path, body=_encoded(body), headers=headers, again=True
        )
        return reply.json()


loads = json.loads  # `json` is also the name of an argument


def without_none(**fields: Any) -> Json:
    """Return the fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def _encoded(value: Any) -> bytes:
    """Encode the value. Raise BadRequest for a value that JSON cannot represent."""
    try:
        return json.dumps(value, allow_nan=False).encode("ascii")
    except (TypeError, ValueError) as error:
        raise errors.BadRequest(f"this cannot be sent as JSON: {error}") from None
