"""The usage of a live sandbox, once or as a stream of events."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from sbx.api import sse
from sbx.api.errors import documented
from sbx.api.v1.dependencies import PREFIX, Target, TargetDep
from sbx.protocol.usage import INTERVAL_MAX_S, INTERVAL_MIN_S, SandboxUsage, usage_to_json

router = APIRouter(prefix=f"{PREFIX}/usage", tags=["native"])


@router.get(
    "",
    response_model=SandboxUsage,
    responses={**documented(404, 409, 429), 200: {"content": sse.DOCUMENTED}},
)
async def usage(
    request: Request,
    target: TargetDep,
    interval_s: Annotated[float, Query(ge=INTERVAL_MIN_S, le=INTERVAL_MAX_S)] = 1.0,
) -> SandboxUsage | Response:
    """Return the usage now. No kernel starts. A client that accepts events gets one now and one
    after each interval. The sandbox is in use while the client follows them."""
    if sse.accepts_events(request):
        return await sse.stream(_events(target, interval_s), request=request)
    async with target.use("execute", starts=False) as conversation:
        return await conversation.usage()


async def _events(target: Target, interval_s: float) -> AsyncIterator[tuple[int, dict[str, Any]]]:
    number = 0
    async with (
        target.use("execute", starts=False) as conversation,
        aclosing(conversation.stream_usage(interval_s)) as stream,
    ):
        async for usage in stream:
            number += 1
            yield number, {"type": "usage", **usage_to_json(usage)}
