"""The caller of a request: the owner of a key, the bounds of a token, or the peer of the socket.

No request is anonymous and no header names an owner. The order is: `Authorization: Bearer`, the
cookie of a token, and without both, on a Unix socket only, the uid of the peer from Linux
(SO_PEERCRED; the server puts it into the extension `sbx.peer` of the scope). A surface of another
product has its own header in place of the first (surfaces.py). At a listener for browsers, only the
cookie of the console counts (console/listener.py).
"""

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Depends, Request
from starlette.requests import HTTPConnection

from sbx.aio import CALLER
from sbx.api.admission import PLACE, AdmissionPlace
from sbx.api.console.listener import cookie_of, site_of
from sbx.api.server.peer_credentials import PEER
from sbx.api.signed_urls import signed_link
from sbx.api.surfaces import LINKED_PORT, OWN_ORIGIN, link_of, surface_of
from sbx.errors import Denied, Unavailable
from sbx.service.caller import Caller
from sbx.service.console import ConsoleLogin
from sbx.service.service import Service

_BOX = "/v1/sandboxes/{sandbox_id}"
_TALK = f"{_BOX}/conversations/{{conversation}}"
_CHAT, _SESSION = "/api/v1/conversations/{conversation_id}", "/api/v1/sessions/{session_id}"
# Each way in and out of an approval, a file or a run: the scopes of which a token needs one (none:
# no token may), and the methods and paths, as a pattern. The first row that matches a route counts.
# A test compares the rows with the routes, and calls each route with tokens of other scopes.
WAYS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("approval", ("execute",), rf".* (/api/v1/approvals.*|{_CHAT}/commands)"),
    ("approval", ("execute",), rf"GET {_TALK}/grants"),
    ("approval", (), rf".* ({_TALK}/grants.*|/api/v1/quarantine/.*)"),
    ("file", ("execute",), rf".* {_TALK}/archive"),
    (
        "file",
        ("files:read",),
        rf"GET {_TALK}/(files|stat|list|find|grep|watch|uploads.*|partials.*)",
    ),
    ("file", ("files:read",), rf"GET ({_BOX}/filesystem/.*|{_SESSION}/(files|conversations).*)"),
    ("file", ("files:write",), rf".* {_TALK}/(files|replace|chmod|directories|move|copy)"),
    ("file", ("files:write",), rf".* {_TALK}/(uploads|partials|checkpoints).*"),
    ("file", ("files:write",), rf".* ({_BOX}/filesystem/.*|{_SESSION}/files.*)"),
    ("file", ("files:write", "execute"), rf"DELETE ({_SESSION}/conversations/.*|{_CHAT})"),
    ("file", ("admin",), rf"DELETE ({_BOX}|{_SESSION})"),
    (
        "run",
        ("execute",),
        rf".* {_TALK}/(runs|interrupt|dry_runs|start|stop|receipt|usage|mcp|surroundings).*",
    ),
    ("run", ("execute",), rf".* {_TALK}/(contexts|commands|terminals).*"),
    (
        "run",
        ("execute",),
        rf".* {_BOX}/(runs|python|shell|interrupt|resume|stop|network|history).*",
    ),
    ("run", ("execute",), rf".* {_BOX}/port(s/|-links|-tunnels/).*"),
    (
        "run",
        ("execute",),
        rf".* ({_SESSION}/(execute|interrupt|stop)|/api/v1/runs/{{run_id}}/events)",
    ),
    ("run", ("execute",), rf"(POST|PATCH) (/api/v1/(tasks|tools/{{name}}/invoke).*|{_CHAT}.*)"),
    ("run", ("execute",), r".* /api/v1/chat.*"),
    ("run", ("execute", "files:read"), r"GET /api/v1/((runs|conversations).*|tasks(/{task_id})?)"),
)
COOKIE = "sbx_token"
CHECK_S = 5.0  # between two checks of the caller of a body
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})


def service(request: HTTPConnection) -> Service:
    service: Service = request.app.state.service
    return service


async def _service(request: Request) -> Service:
    return service(request)  # FastAPI would call a synchronous dependency in a thread


async def caller(request: HTTPConnection) -> Caller:
    """Return the caller of a request or WebSocket. See `authenticate`. With `peek=true`, a GET does
    not count as a use of a sandbox.

    The state of the request keeps it: the middleware needs it before it reads a body.
    """
    caller: Caller | None = getattr(request.state, "caller", None)
    if caller is None:
        caller = await authenticate(request)
        if request.scope.get("method") == "GET" and request.query_params.get("peek") == "true":
            caller = replace(caller, peeks=True)
        request.state.caller = caller
        CALLER.set(caller.owner)
    return caller


async def sender(request: HTTPConnection) -> Caller:
    """Return the caller of a body that arrives. Called for each piece, it authenticates the caller
    again every few seconds. Raise as `authenticate`."""
    who, now = await caller(request), time.monotonic()
    if now - getattr(request.state, "caller_checked_at", now) >= CHECK_S:
        with suppress(Unavailable):  # the store cannot be read, and the key may still be valid
            await authenticate(request)
    elif hasattr(request.state, "caller_checked_at"):
        return who
    request.state.caller_checked_at = now
    return who


async def authenticate(request: HTTPConnection) -> Caller:
    """Return the caller now: in a long stream a key may have been revoked meanwhile. Raise Denied
    `unauthorized`, and `forbidden` for a page of another origin with a cookie."""
    access = service(request).access
    if (login := await browser_login(request)) is not None:
        return _with_place(login.caller, request)
    if (surface := surface_of(request.scope)) is not None:
        if (key := surface.credential(request)) is not None:
            return _with_place(await access.from_bearer(key), request)
        if (link := surface.link(request) or await signed_link(request)) is not None:
            opened = await service(request).links.open(*link)
            return _with_place(opened.caller, request)
        return _peer(request)
    if (link := link_of(request, LINKED_PORT)) is not None:
        return _with_place((await service(request).links.open(*link)).caller, request)
    header = request.headers.get("authorization")
    if header is not None:
        scheme, _, bearer = header.partition(" ")
        if scheme.lower() != "bearer" or not bearer.strip():
            raise _unauthorized("the Authorization header must have the form: Bearer <key>")
        return _with_place(await access.from_bearer(bearer.strip()), request)
    # At the name of a port, code inside chooses the cookies.
    if not request.scope.get(OWN_ORIGIN) and (cookie := request.cookies.get(COOKIE)) is not None:
        if request.scope.get("method") not in _SAFE:
            check_origin(request)
        return _with_place(await access.from_bearer(cookie), request)
    return _peer(request)


async def browser_login(request: HTTPConnection) -> ConsoleLogin | None:
    """Return the login behind the cookie of a browser; None at a listener for programs. Raise
    Denied `unauthorized`: at a listener for browsers, nothing else identifies a caller."""
    if (site := site_of(request.scope)) is None:
        return None
    if (cookie := cookie_of(request, site)) is None:
        raise Denied(
            "a login is needed",
            code="unauthorized",
            hint="get a login link with: sbx console",
        )
    return await service(request).console.find(cookie)


def _peer(request: HTTPConnection) -> Caller:
    peer = request.scope.get("extensions", {}).get(PEER)
    if peer is None:
        raise _unauthorized("a key is needed")
    return service(request).access.from_peer(peer["uid"])


def _with_place(caller: Caller, request: HTTPConnection) -> Caller:
    """Return the caller, and keep the place of the connection for it. Raise Unavailable
    `too_many_connections`."""
    place: AdmissionPlace | None = request.scope.get("extensions", {}).get(PLACE)
    if place is not None:
        place.authenticated(caller.owner)
    return caller


async def owner(caller: Annotated[Caller, Depends(caller)]) -> Caller:
    """Return a caller that has all rights of its owner. Raise Denied `forbidden` for a token."""
    if caller.via == "token":
        raise Denied(
            "a token cannot manage tokens",
            code="forbidden",
            hint="call with a key of the owner, or over the socket",
        )
    return caller


async def operator(caller: Annotated[Caller, Depends(caller)]) -> Caller:
    """Return a caller that operates this service. Raise Denied `forbidden` for all others."""
    if not caller.operator:
        raise Denied(
            "this is for the operator of the service",
            code="forbidden",
            hint="call as root, as the service's own user, or with a key made with --operator",
        )
    return caller


async def _exit_stack() -> AsyncIterator[AsyncExitStack]:
    """Yield a stack for the resources of a streamed reply, which closes after its last byte."""
    async with AsyncExitStack() as stack:
        yield stack


CallerDep = Annotated[Caller, Depends(caller)]
OwnerDep = Annotated[Caller, Depends(owner)]
OperatorDep = Annotated[Caller, Depends(operator)]
ServiceDep = Annotated[Service, Depends(_service)]
StackDep = Annotated[AsyncExitStack, Depends(_exit_stack)]


def check_origin(request: HTTPConnection) -> None:
    """Raise Denied `forbidden` for a page of another origin. A browser sends a SameSite cookie also
    to other ports of the same host, and a page from there could otherwise use it."""
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
    return Denied(
        message,
        code="unauthorized",
        hint="send Authorization: Bearer <key>; commands of sbx read SBX_KEY or --key",
    )
