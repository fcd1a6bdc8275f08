"""Logins of browsers: `sbx console` requests a code, and the page exchanges it for a cookie."""

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, StringConstraints

from sbx.api.auth import CallerDep, ServiceDep, browser_login
from sbx.api.bodies import RequestBody
from sbx.api.console.listener import ConsoleListener, demanded_site
from sbx.api.console.me import Me, described
from sbx.api.errors import documented
from sbx.api.sessions_v1.dependencies import SessionsDep
from sbx.errors import Denied, NotFound
from sbx.service.caller import Caller
from sbx.service.console import COOKIE_S, LOGIN_MAX_S, ConsoleSessionRow
from sbx.service.service import Service

router = APIRouter(prefix="/api/v1/console", tags=["console"])


class NewCode(RequestBody):
    """`token`: the login gets the rights of this token. `operator`: whether it keeps the rights of
    an operator. `path`: the page to open."""

    token: Annotated[str, StringConstraints(min_length=1, max_length=4096)] | None = None
    operator: bool = True
    path: Annotated[str, StringConstraints(pattern=r"^/console/[\x21-\x7e]*$", max_length=2000)] = (
        "/console/"
    )


class Code(BaseModel):
    """`names`: the host names of the console. `url`: its permanent origin; `socket`: the Unix
    socket to which a local port can be forwarded. Either may be null."""

    code: str
    expires_at: float
    names: list[str]
    url: str | None
    socket: str | None
    path: str


class CodeLogin(RequestBody):
    code: Annotated[str, StringConstraints(min_length=1, max_length=200)]


class Logout(RequestBody):
    """`clean`: stop the sandboxes of the caller."""

    clean: bool = False


class LoginBody(BaseModel):
    """A browser that is logged in. Times are seconds of the epoch; `last_seen_at` to a minute."""

    id: str
    created_at: float
    last_seen_at: float
    expires_at: float
    user_agent: str
    current: bool


class LoginList(BaseModel):
    items: list[LoginBody]


@router.post("/codes", status_code=201, responses=documented(404, 429))
async def make_code(new: NewCode, request: Request, caller: CallerDep, service: ServiceDep) -> Code:
    """Make a code with which one browser can log in once, within a minute. The page gets it in the
    fragment of its address: `…/console/#login=CODE`."""
    listener: ConsoleListener | None = request.app.state.console
    if listener is None:
        raise NotFound(
            "this service has no listener for browsers",
            code="no_console",
            hint="start it with --console 127.0.0.1:8766, or without --no-console",
        )
    if caller.via in ("token", "console"):
        raise Denied(
            "a token or a login makes no codes",
            code="forbidden",
            hint="call with a key, or over the socket",
        )
    bearer = caller
    if new.token is not None:
        bearer = await service.access.from_bearer(new.token)
        if bearer.via != "token" or bearer.owner != caller.owner:
            raise Denied("this token belongs to another owner", code="forbidden")
    code, expires_at = service.console.make_code(bearer, operator=new.operator)
    await service.recording.record(caller, "console.code", bearer.owner)
    return Code(
        code=code,
        expires_at=expires_at,
        names=listener.names,
        url=listener.url,
        socket=listener.path,
        path=new.path,
    )


@router.post("/login", responses=documented(429))
async def login(body: CodeLogin, request: Request, response: Response, service: ServiceDep) -> Me:
    """Exchange a code for the cookie of this browser. Only at a listener for browsers."""
    site = demanded_site(request.scope)
    user_agent = request.headers.get("user-agent", "")
    cookie, login = await service.console.login(body.code, user_agent)
    request.state.caller = login.caller
    await service.recording.record(login.caller, "console.login", login.row.id)
    response.set_cookie(
        site.cookie,
        cookie,
        max_age=int(COOKIE_S),
        path="/",
        secure=site.origin.startswith("https:"),
        httponly=True,
        samesite="strict",
    )
    response.headers["cache-control"] = "no-store"
    return await described(request, service, login.caller, login.row.expires_at)


@router.post("/logout", status_code=204, responses=documented())
async def logout(
    request: Request,
    response: Response,
    caller: CallerDep,
    service: ServiceDep,
    sessions: SessionsDep,
    body: Logout | None = None,
) -> None:
    """End the login of this browser. Only at a listener for browsers."""
    site = demanded_site(request.scope)
    login = await browser_login(request)
    assert login is not None  # the site has one for each caller
    if body is not None and body.clean:
        for sandbox in list(service.sandboxes.index.visible(caller)):
            await service.sandboxes.stop(caller, sandbox.id)
    await service.console.end(login.row.owner, login.row.id)
    await service.recording.record(caller, "console.logout", login.row.id)
    response.delete_cookie(site.cookie, path="/", httponly=True, samesite="strict")


@router.get("/sessions", responses=documented())
async def list_(request: Request, caller: CallerDep, service: ServiceDep) -> LoginList:
    """List the browsers that are logged in with the rights of the caller, the oldest first."""
    current = await browser_login(request)
    items = [
        LoginBody(
            id=row.id,
            created_at=row.created_at,
            last_seen_at=row.last_seen_at,
            expires_at=min(row.expires_at, row.created_at + LOGIN_MAX_S),
            user_agent=row.user_agent,
            current=current is not None and row.id == current.row.id,
        )
        for row in await _own(service, caller)
    ]
    return LoginList(items=items)


@router.delete("/sessions/{login_id}", status_code=204, responses=documented(404))
async def end(login_id: str, caller: CallerDep, service: ServiceDep) -> None:
    """End the login of a browser."""
    if login_id not in {row.id for row in await _own(service, caller)}:
        raise NotFound(f"login {login_id[:80]!r} does not exist")
    await service.console.end(caller.owner, login_id)
    await service.recording.record(caller, "console.logout", login_id)


async def _own(service: Service, caller: Caller) -> Sequence[ConsoleSessionRow]:
    """Return the logins that the caller may see and end: a token only those that came from it."""
    rows = await service.console.every(caller.owner)
    return [row for row in rows if caller.via != "token" or row.token_id == caller.via_id]
