"""Signed addresses of files, which E2B's SDK makes without a call: their check, and their rights.

    /files?path=P[&username=U]&signature=S[&signature_expiration=SECONDS]
    S = "v1_" + base64(sha256("P:read|write:U:token[:SECONDS]")), without padding

The address has neither a header nor the sandbox. The token is one of the links that the service
gave out, so the links of all sandboxes are tried.
"""

import asyncio
import base64
import hashlib
import hmac
from collections.abc import Mapping
from typing import Any

from cachetools import LRUCache
from starlette.requests import HTTPConnection

from sbx.api.surfaces import ENVD_PORT, Link, e2b_id
from sbx.errors import Denied
from sbx.service.caller import Caller
from sbx.service.service import Service

SIGNED = "e2b.sandbox"  # in the scope of such a request: the sandbox, as `e2b_id` names it
HOLDERS_MAX = 16
_PATH = f"/e2b/{ENVD_PORT}/files"
_tokens: LRUCache[tuple[str, ...], str] = LRUCache(16_384)
_AT_ONCE = 256  # tokens; 1 ms of the event loop


def holder_of(caller: Caller) -> dict[str, Any]:
    """Return the bounds of a caller, to be kept with a sandbox: its token can be made from them."""
    return {
        "via": caller.via_id,
        "scopes": None if caller.scopes is None else sorted(caller.scopes),
        "user_id": caller.user_id,
        "agent_id": caller.agent_id,
        "conversation_id": caller.conversation_id,
    }


async def token_of(service: Service, owner: str, holder: Mapping[str, Any], sandbox_id: str) -> str:
    """Return the token of a sandbox for this holder: a link, and the same at each call."""
    key = (sandbox_id, owner, *map(str, holder.values()))
    if (token := _tokens.get(key)) is None:
        scopes = holder["scopes"]
        caller = Caller(
            owner,
            "token",
            scopes=None if scopes is None else frozenset(scopes),
            user_id=holder["user_id"],
            agent_id=holder["agent_id"],
            conversation_id=holder["conversation_id"],
            via_id=holder["via"],
        )
        token = _tokens[key] = await service.links.make(caller, sandbox_id)
    return token


def hashed(path: str, user: str, *, write: bool) -> "hashlib._Hash":
    """Return the hash of the text before the token."""
    text = f"{path}:{'write' if write else 'read'}:{user}:"
    return hashlib.sha256(text.encode(errors="surrogateescape"))


def signature_of(before: "hashlib._Hash", token: str, expiration: str | None) -> str:
    whole = before.copy()
    whole.update((token if expiration is None else f"{token}:{expiration}").encode())
    return f"v1_{base64.b64encode(whole.digest()).decode().rstrip('=')}"


async def signed_link(request: HTTPConnection) -> Link | None:
    """Return the link behind the signature of a request; None for a request without one. Raise
    Denied `unauthorized` for a wrong and an expired signature."""
    query = request.query_params
    if request.scope["path"] != _PATH or (signature := query.get("signature")) is None:
        return None
    service: Service = request.app.state.service
    expiration = query.get("signature_expiration")
    if expiration is not None and not (
        expiration.isdecimal() and service.clock.now() <= int(expiration[:20])
    ):
        raise Denied("the signed address has expired", code="unauthorized")
    write = request.scope["method"] not in ("GET", "HEAD")
    path, user = query.get("path", ""), query.get("username", "")
    before = hashed(path, user, write=write)  # once for all tokens
    link: Link | None = None
    tried = 0
    for sandbox in list(service.sandboxes.every()):
        for holder in (sandbox.row.labels or {}).get("holders", ()):
            token = await token_of(service, sandbox.row.owner, holder, sandbox.id)
            expected = signature_of(before, token, expiration)
            if hmac.compare_digest(expected.encode(), signature.encode(errors="replace")):
                link = token, sandbox.id, None
            if (tried := tried + 1) % _AT_ONCE == 0:
                await asyncio.sleep(0)  # this client has shown no key
    if link is None:
        raise Denied("the signature of the address is wrong", code="unauthorized")
    request.scope[SIGNED] = e2b_id(link[1])
    return link
