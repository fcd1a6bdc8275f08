"""What a sandbox over there uses."""

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from sbx.client.errors import failure
from sbx.client.http import connection_lost, query
from sbx.client.http_connection import ConnectionLost
from sbx.client.talk import SandboxState
from sbx.errors import Broken
from sbx.protocol.usage import SandboxUsage, usage_from_json


async def usage(held: SandboxState, path: str) -> SandboxUsage:
    """`path` is that of the conversation."""
    held.check()
    return _usage((await held.wire.call("GET", f"{path}/usage")).json())


async def stream_usage(
    held: SandboxState, path: str, interval_s: float
) -> AsyncGenerator[SandboxUsage, None]:
    """One now, and one after each interval. A connection that breaks ends it: Unavailable."""
    held.check()
    address = f"{path}/usage{query({'interval_s': interval_s})}"
    silence_s = max(60.0, interval_s)
    try:
        async with aclosing(held.wire.events("GET", address, silence_s=silence_s)) as events:
            async for _, kind, data in events:
                if kind == "failure":
                    raise failure(data)
                yield _usage(json.loads(data))
    except ConnectionLost as lost:
        raise connection_lost(held.wire.address, str(lost)) from lost


def _usage(told: Mapping[str, Any]) -> SandboxUsage:
    try:
        return usage_from_json(told)
    except (ValueError, TypeError) as error:
        raise Broken(f"a usage that is none: {error}", code="foreign_reply") from error
