"""A token as a cookie, which a browser sends by itself and hides from scripts."""

import math
from typing import Annotated

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, StringConstraints

from sbx.api.auth import COOKIE, ServiceDep, caller
from sbx.api.bodies import RequestBody
from sbx.api.errors import documented
from sbx.api.sessions_v1.dependencies import SessionsDep
from sbx.errors import BadRequest, Denied

router = APIRouter(prefix="/api/v1", tags=["login"])


class Login(RequestBody):
    token: Annotated[str, StringConstraints(min_length=1, max_length=4096)] | None = None


class LoggedIn(BaseModel):
    """The bounds of the token; `expires_at` in seconds of the epoch."""

    user_id: str | None
    agent_id: str | None
    conversation_id: str | None
    scopes: list[str] | None
    expires_at: float


@router.post("/login", responses=documented())
async def login(
    request: Request, response: Response, service: ServiceDep, body: Login | None = None
) -> LoggedIn:
    """Set a token of the body or the Authorization header as an HttpOnly cookie until it expires.

    A key is refused: it has all rights of its owner, and does not belong in a browser.
    """
    token = (body.token if body is not None else None) or _bearer(request)
    if token is None:
        raise Denied("a token is needed", code="unauthorized", hint='send {"token": "…"}')
    bearer = await service.access.from_bearer(token)
    if bearer.via != "token":
        raise BadRequest(
            "a login takes a token, and this is a key",
            hint="make a token for this user: sbx token create --user U",
        )
    assert bearer.via_id is not None
    await service.recording.record(bearer, "token.login", bearer.via_id, user_id=bearer.user_id)
    import jwt

    ends = float(jwt.decode(token, options={"verify_signature": False})["exp"])
    response.set_cookie(
        COOKIE,
        token,
        max_age=max(0, math.floor(ends - service.clock.now())),
        path="/",
        secure=request.url.scheme == "https",
        httponly=True,
        samesite="strict",
    )
    response.headers["cache-control"] = "no-store"
    return LoggedIn(
        user_id=bearer.user_id,
        agent_id=bearer.agent_id,
        conversation_id=bearer.conversation_id,
        scopes=sorted(bearer.scopes) if bearer.scopes is not None else None,
        expires_at=ends,
    )


class Logout(RequestBody):
    """`end_session`: the sessions of the token expire now."""

    end_session: bool = False


@router.post("/logout", status_code=204, responses=documented())
async def logout(
    request: Request,
    response: Response,
    service: ServiceDep,
    sessions: SessionsDep,
    body: Logout | None = None,
) -> None:
    """Delete the cookie. The token itself is valid until it expires or is revoked.

    `end_session` ends the kernels, runs and agents of the token's session, or of each session of
    its user if it names no agent. The files stay for the grace period of expired sessions.
    """
    if body is not None and body.end_session:
        who = await caller(request)
        for session_id in await sessions.log_out(who):
            await service.recording.record(who, "session.end", session_id)
    response.delete_cookie(COOKIE, path="/", httponly=True, samesite="strict")


def _bearer(request: Request) -> str | None:
    scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
    return bearer.strip() or None if scheme.lower() == "bearer" else None
