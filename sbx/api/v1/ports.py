"""Ports: servers that code started in a sandbox, and signed links to them."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Request, Response, WebSocket
from pydantic import BaseModel, Field
from starlette.websockets import WebSocketDisconnect

from sbx.api.auth import CallerDep, ServiceDep, StackDep, caller, check_origin, service
from sbx.api.bodies import RequestBody
from sbx.api.console.listener import is_local, site_of
from sbx.api.console.settings import address
from sbx.api.errors import documented, iso
from sbx.api.ports import relay_bytes, relay_http, relay_websocket
from sbx.api.surfaces import LINK_QUERY
from sbx.api.v1.terminals import refuse_socket
from sbx.errors import BadRequest, SbxError
from sbx.runtime.conversation import Conversation
from sbx.runtime.sandbox import DEFAULT_CONVERSATION

router = APIRouter(prefix="/v1/sandboxes/{sandbox_id}", tags=["native"])
_ERRORS = documented(404, 409, 502)
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"]
_LINK_S_MAX = 7 * 86_400


class NewLink(RequestBody):
    """`ttl` in seconds, from now."""

    port: Annotated[int, Field(ge=1, le=65_535)]
    ttl: Annotated[int, Field(gt=0, le=_LINK_S_MAX)] = 3600


class LinkBody(BaseModel):
    """`path` opens the port, and everything below it, to its holder until `expires_at`. So does
    `url`, in a browser on this host; null if the service does not listen on TCP."""

    path: str
    url: str | None
    expires_at: str


@router.post("/port-links", status_code=201, responses=_ERRORS)
async def create_link(
    sandbox_id: str,
    new: NewLink,
    request: Request,
    caller: CallerDep,
    service: ServiceDep,
) -> LinkBody:
    """Make a link to a port. Everyone with it may use the server there, without a key."""
    port = new.port
    sandbox = service.sandboxes.index.get(caller, sandbox_id, "execute")
    end = service.clock.now() + new.ttl
    link = await service.links.make(caller, sandbox.id, port=port, expires_at=end)
    await service.recording.record(caller, "port.link", sandbox.id, port=port, ttl_s=new.ttl)
    query = f"?{LINK_QUERY}={link}"
    listen = request.app.state.settings.listen
    at_proxy = (site := site_of(request.scope)) is not None and not is_local(site)
    tcp = None if at_proxy else request.url.port
    tcp = tcp or (address(listen)[1] if listen is not None else None)
    return LinkBody(
        path=f"/v1/sandboxes/{sandbox.id}/ports/{port}/{query}",
        url=f"http://{port}-{sandbox.id}.localhost:{tcp}/{query}" if tcp else None,
        expires_at=iso(end),
    )


@router.api_route(
    "/ports/{port}/{path:path}", methods=_METHODS, response_class=Response, include_in_schema=False
)
async def relay(
    sandbox_id: str,
    port: int,
    path: str,
    request: Request,
    caller: CallerDep,
    service: ServiceDep,
    stack: StackDep,
) -> Response:
    """Send the request to the server at this port of the default conversation."""
    check_port(port)
    lease = service.sandboxes.using(
        caller, sandbox_id, scope="execute", starts=False, conversation=DEFAULT_CONVERSATION
    )
    use = await stack.enter_async_context(lease)
    return await relay_http(request, use.conversation(), port, f"/{path}")


@router.websocket("/ports/{port}/{path:path}")
async def relay_socket(socket: WebSocket, sandbox_id: str, port: int, path: str) -> None:
    """Relay a WebSocket, as `relay`."""
    await _relay(socket, sandbox_id, port, partial(relay_websocket, path=f"/{path}"))


@router.websocket("/port-tunnels/{port}")
async def tunnel(socket: WebSocket, sandbox_id: str, port: int) -> None:
    """Relay one TCP connection to this port, of any protocol: see `relay_bytes`."""
    await _relay(socket, sandbox_id, port, relay_bytes)


async def _relay(
    socket: WebSocket,
    sandbox_id: str,
    port: int,
    act: Callable[[WebSocket, Conversation, int], Awaitable[None]],
) -> None:
    try:
        check_port(port)
        check_origin(socket)
        lease = service(socket).sandboxes.using(
            await caller(socket),
            sandbox_id,
            scope="execute",
            starts=False,
            conversation=DEFAULT_CONVERSATION,
        )
        async with lease as use:
            await act(socket, use.conversation(), port)
    except WebSocketDisconnect:
        pass
    except SbxError as error:
        await refuse_socket(socket, error)


def check_port(port: int) -> None:
    if not 1 <= port <= 65_535:
        raise BadRequest("a port is 1 to 65535", details={"field": "port"})
