"""Who calls: the owner of a bearer key, the bounds of a token, or the user behind the socket.

Nobody is anonymous and no header names an owner. The order is: `Authorization: Bearer`, the cookie
that a login set, and without both, on a Unix socket only, the peer's uid as linux tells it
(SO_PEERCRED; the server puts it into the scope's extension `sbx.peer`).
"""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Depends, Request
from starlette.requests import HTTPConnection

from sbx.api.admission import PLACE, AdmissionPlace
from sbx.api.server.peer_credentials import PEER
from sbx.errors import Denied
from sbx.service.auth import Caller
from sbx.service.service import Service

COOKIE = "sbx_token"
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})


def service(request: HTTPConnection) -> Service:
    """All that this process holds."""
    found: Service = request.app.state.service
    return found


async def _service(request: Request) -> Service:
    return service(request)  # a dependency that is not async would be called in a thread


async def caller(request: Request) -> Caller:
    """See `known`."""
    return await known(request)


async def known(request: HTTPConnection) -> Caller:
    """Who calls, also by a WebSocket. Raises Denied `unauthorized`, and `forbidden` for a page of
    another origin with a cookie.

    Found once for a request, whose state keeps it: it is asked for before a body is read.
    """
    found: Caller | None = getattr(request.state, "caller", None)
    if found is None:
        found = request.state.caller = await authenticate(request)
    return found


async def authenticate(request: HTTPConnection) -> Caller:
    """As `known`, found anew: whoever stays for long may have been known and be so no more."""
    return await _caller(request)


async def _caller(request: HTTPConnection) -> Caller:
    access = service(request).access
    given = request.headers.get("authorization")
    if given is not None:
        scheme, _, bearer = given.partition(" ")
        if scheme.lower() != "bearer" or not bearer.strip():
            raise _unauthorized("the Authorization header must say: Bearer <key>")
        return _with_place(await access.from_bearer(bearer.strip()), request)
    if (cookie := request.cookies.get(COOKIE)) is not None:
        if request.scope.get("method") not in _SAFE:
            check_origin(request)
        return _with_place(await access.from_bearer(cookie), request)
    peer = request.scope.get("extensions", {}).get(PEER)
    if peer is None:
        raise _unauthorized("a key is needed")
    return access.from_peer(peer["uid"])


def _with_place(caller: Caller, request: HTTPConnection) -> Caller:
    """Return the caller, and keep the place of the connection for it."""
    place: AdmissionPlace | None = request.scope.get("extensions", {}).get(PLACE)
    if place is not None:
        place.authenticated()
    return caller


async def operator(caller: Annotated[Caller, Depends(caller)]) -> Caller:
    """A caller who runs this service. Raises Denied `forbidden` for all others."""
    if not caller.operator:
        raise Denied(
            "this is for the operator of the service",
            code="forbidden",
            hint="call as root, as the service's own user, or with a key made with --operator",
        )
    return caller


async def held() -> AsyncIterator[AsyncExitStack]:
    """What a streamed reply needs until its last byte is out, whether or not the client stays."""
    async with AsyncExitStack() as stack:
        yield stack


CallerDep = Annotated[Caller, Depends(caller)]
OperatorDep = Annotated[Caller, Depends(operator)]
ServiceDep = Annotated[Service, Depends(_service)]
HeldDep = Annotated[AsyncExitStack, Depends(held)]


def check_origin(request: HTTPConnection) -> None:
    """A browser sends a SameSite cookie also to other ports of the same host: whoever listens
    there could otherwise change things with it. Raises Denied `forbidden`."""
    origin = request.headers.get("origin")
    if origin is None:
        return
    if origin in request.app.state.cors_origins:
        return
    if urlsplit(origin).netloc == request.headers.get("host"):
        return
    raise Denied(
        "a page of another origin may not do this",
        code="forbidden",
        hint="send the token as a bearer, or allow the origin with --cors-origin",
    )


def _unauthorized(message: str) -> Denied:
    return Denied(message, code="unauthorized", hint="send: Authorization: Bearer <key>")
