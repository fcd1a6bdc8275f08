"""What a live sandbox uses, as a call and, for who accepts events, as a stream."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel

from sbx.api import sse
from sbx.api.auth import CallerDep, ServiceDep
from sbx.api.errors import documented
from sbx.protocol.usage import INTERVAL_MAX_S, INTERVAL_MIN_S, usage_to_json
from sbx.service.auth import Caller
from sbx.service.service import Service

router = APIRouter(
    prefix="/v1/sandboxes/{sandbox_id}/conversations/{conversation}/usage", tags=["native"]
)


class UsageBody(BaseModel):
    """All jails of the sandbox together, save `disk`, which is this conversation's; as
    sbx/protocol/usage.py tells it. Bytes and seconds; null where this host does not tell."""

    at: float
    source: Literal["cgroup2", "cgroup1", "proc"]
    kernels: int
    cpu_s: float | None
    memory: int | None
    memory_peak: int | None
    pids: int | None
    disk: int | None
    disk_files: int | None
    disk_complete: bool
    network_received: int | None
    network_sent: int | None
    loopback: int | None
    memory_max: int
    pids_max: int
    cpu_quota: float | None
    disk_max: int


@router.get(
    "",
    response_model=UsageBody,
    responses={**documented(404, 409, 429), 200: {"content": sse.DOCUMENTED}},
)
async def usage(
    sandbox_id: str,
    conversation: str,
    request: Request,
    caller: CallerDep,
    service: ServiceDep,
    interval_s: Annotated[float, Query(ge=INTERVAL_MIN_S, le=INTERVAL_MAX_S)] = 1.0,
) -> UsageBody | Response:
    """What it uses now; no kernel is started for this. Who accepts events gets one now and one
    after each interval, for as long as they listen, which is a use of the sandbox."""
    if sse.wanted(request):
        events = _events(service, caller, (sandbox_id, conversation), interval_s)
        return await sse.stream(events, request=request)
    async with service.sandboxes.using(caller, sandbox_id, scope="execute", starts=False) as use:
        told = await (await use.existing(conversation)).usage()
        return UsageBody.model_validate(usage_to_json(told))


async def _events(
    service: Service, caller: Caller, names: tuple[str, str], interval_s: float
) -> AsyncIterator[tuple[int, dict[str, Any]]]:
    async with service.sandboxes.using(caller, names[0], scope="execute", starts=False) as use:
        talk = await use.existing(names[1])
        async with aclosing(talk.stream_usage(interval_s)) as looks:
            number = 0
            async for one in looks:
                number += 1
                yield number, {"type": "usage", **usage_to_json(one)}
