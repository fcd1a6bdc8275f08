"""One HTTP call, bounded in time, and its record."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from bench.torture.ledger import CUT, LATE, NEVER_SENT, Act
from bench.torture.service_process import ServiceUnderTest

DEADLINE_S = 60.0
Json = dict[str, Any]


@dataclass(slots=True)
class _Reply:
    """The part of a reply that has come."""

    status: int | None = None
    code: str = ""
    seen: Any = None


@dataclass(frozen=True, slots=True)
class Wire:
    """The calls of one client. Every method records its act and returns it."""

    service: ServiceUnderTest
    http: httpx.AsyncClient
    client: int

    async def call(
        self,
        kind: str,
        target: str,
        method: str,
        path: str,
        *,
        key: str = "",
        seen: Callable[[httpx.Response], Any] | Any = None,
        **request: Any,
    ) -> Act:
        """One request. `seen` is the content of the act, or a function of a successful reply."""
        async with self._recorded(kind, target, key) as (reply, done):
            reply.seen = None if callable(seen) else seen
            response = await self.http.request(method, path, **request)
            reply.status = response.status_code
            if response.is_success:
                reply.seen = seen(response) if callable(seen) else seen
            else:
                reply.code = _code(response.content)
        return done[0]

    async def follow(
        self,
        kind: str,
        target: str,
        path: str,
        body: Json,
        *,
        key: str,
        seen: Callable[[list[Json]], Any],
        complete: Callable[[Json], bool],
    ) -> Act:
        """One request that is answered by events. It is done with an event that is `complete`."""
        events: list[Json] = []
        async with self._recorded(kind, target, key) as (reply, done):
            headers = {"accept": "text/event-stream"}
            try:
                async with self.http.stream("POST", path, json=body, headers=headers) as response:
                    if not response.is_success:
                        reply.status = response.status_code
                        reply.code = _code(await response.aread())
                    else:
                        async for event in _events(response):
                            events.append(event)  # noqa: PERF401  # kept when it is cut
                        _judge(reply, events, complete)
            finally:
                reply.seen = seen(events)
        return done[0]

    @asynccontextmanager
    async def _recorded(
        self, kind: str, target: str, key: str
    ) -> AsyncIterator[tuple[_Reply, list[Act]]]:
        began, reply, done = self.service.now(), _Reply(), list[Act]()
        try:
            async with asyncio.timeout(DEADLINE_S):
                yield reply, done
        except TimeoutError:
            reply.status, reply.code = None, LATE
        except httpx.ConnectError:
            reply.status, reply.code = None, NEVER_SENT
        except httpx.HTTPError:
            reply.status, reply.code = None, CUT
        done.append(
            Act(
                kind,
                target,
                self.client,
                began,
                self.service.now(),
                status=reply.status,
                code=reply.code,
                key=key,
                seen=reply.seen,
            )
        )
        self.service.ledger.acts += done


async def _events(response: httpx.Response) -> AsyncIterator[Json]:
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def _judge(reply: _Reply, events: list[Json], complete: Callable[[Json], bool]) -> None:
    """A stream without its last event was cut, whatever its status line said."""
    last: Mapping[str, Any] = events[-1] if events else {}
    if isinstance(last.get("error"), dict) and "status" in last:
        reply.status, reply.code = int(last["status"]), str(last["error"].get("code"))
    elif events and complete(events[-1]):
        reply.status = 200
    else:
        reply.code = CUT


def _code(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return "no code"
