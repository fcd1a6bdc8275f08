"""The surfaces that speak the protocol of another product: their paths, errors and credentials.

Their routes are below a prefix, in a folder of the same name. The prefix decides the form of every
error body, also of those that no route sees: a wrong key, a body that is too large. The SDK of E2B
has no prefix, so `e2b_path` adds one.
"""

import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from msgspec import Struct
from starlette.requests import HTTPConnection
from starlette.types import Scope

from sbx.errors import Denied

# A key, a token (JWT), or a text of the operator (SBX_API_KEY) without space.
_KEY_FORM = re.compile(r"sk-sbx-[0-9a-f]{64}|[\w-]+\.[\w-]+\.[\w-]+|[!-~]{20,4096}")
# The text, and the sandbox and port that it must open; no port is everything of the sandbox. So a
# link to one port never opens a number at which a surface itself serves files and processes.
Link = tuple[str, str, int | None]


class Surface(Struct, frozen=True):
    """`error_body` gets the error, already without paths of the host, and its HTTP status; it
    returns JSON or a text. `header` carries the key; `key_of` makes the key of sbx of it. `link`
    returns the link of a request, if it has one."""

    prefix: str
    error_body: Callable[[dict[str, Any], int], dict[str, Any] | str]
    header: str
    key_form: str = "sk-sbx-…"
    key_of: Callable[[str], str] = str
    link: Callable[[HTTPConnection], Link | None] = lambda _request: None

    def credential(self, request: HTTPConnection) -> str | None:
        """Return the key or token of a request, None without one. Raise Denied `malformed_key` for
        a text that no key or token can be."""
        text = request.headers.get(self.header)
        if text is None or not text.strip():
            return None
        key = self.key_of(text.strip())
        if not _KEY_FORM.fullmatch(key):
            raise Denied(
                f"the header {self.header} does not have the form of a key or a token",
                code="malformed_key",
                hint=f"send {self.header}: {self.key_form}; `sbx key create` makes a key",
            )
        return key


def own_origin(host: bytes) -> tuple[str, str] | None:
    """Return the sandbox and the port of a host such as `8000-sandbox-5a7afa86d151.localhost`; None
    for any other. Browsers resolve it to loopback."""
    match = _OWN_HOST.fullmatch(host)
    return None if match is None else (f"sandbox-{match[2].decode()}", match[1].decode())


def link_of(
    request: HTTPConnection, linked: re.Pattern[str], own: Collection[int] = ()
) -> Link | None:
    """Return the link of a request, and the sandbox and port that it must open. A browser has it in
    the query. `own`: the ports at which the surface itself answers."""
    match = linked.fullmatch(request.scope["path"])
    if match is None:
        return None
    text = request.headers.get(LINK_HEADER) or request.query_params.get(LINK_QUERY)
    text = text or request.headers.get(TRAFFIC_HEADER)
    if not text and request.scope.get(OWN_ORIGIN):
        text = request.cookies.get(LINK_QUERY)
    port = int(match[2])
    return (text, match[1], None if port in own else port) if text else None


def _sentence(error: dict[str, Any]) -> str:
    """Return the message, with the hint after it: these bodies have no field for a hint."""
    hint = error.get("hint")
    return f"{error['message']} ({hint})" if hint else str(error["message"])


EXECD_PORT, EGRESS_PORT = PLANE_PORTS = (44772, 18080)  # where OpenSandbox itself answers
_OPENSANDBOX_CODES = {
    "unauthorized": "INVALID_API_KEY",
    "malformed_key": "INVALID_API_KEY_FORM",
    "file_not_found": "FILE_NOT_FOUND",
    "validation_error": "INVALID_REQUEST_BODY",
    "sandbox_expired": "DOCKER::SANDBOX_NOT_FOUND",
}


def _opensandbox_body(error: dict[str, Any], _status: int) -> dict[str, Any]:
    """Return both fields that its SDK demands; without them it loses the HTTP status."""
    code = _OPENSANDBOX_CODES.get(error["code"], str(error["code"]).upper())
    if code == "NOT_FOUND" and "sandbox_id" in error.get("details", {}):
        code = "DOCKER::SANDBOX_NOT_FOUND"
    return {"code": code, "message": _sentence(error)}


OPENSANDBOX = Surface(
    "/opensandbox/",
    _opensandbox_body,
    header="open-sandbox-api-key",
    link=partial(
        link_of,
        own=PLANE_PORTS,
        linked=re.compile(r"/opensandbox/v1/sandboxes/([^/]+)/proxy/([0-9]{1,5})(?:/.*)?"),
    ),
)

# -- E2B -------------------------------------------------------------------------------------------

ENVD_PORT, CODE_PORT = 49983, 49999  # what E2B serves inside each sandbox
E2B_SANDBOX = "e2b-sandbox-id"
TRAFFIC_HEADER = "e2b-traffic-access-token"
_E2B_PORT = b"e2b-sandbox-port"
_E2B_INSIDE = re.compile(r"/e2b/(?:ports/([0-9]{1,5})|[0-9]{1,5})/.*", re.DOTALL)
_E2B_CONTROL = re.compile(
    r"(?:/v[23])?/(?:sandboxes|templates|snapshots|volumes|secrets)(?:[/?].*)?", re.DOTALL
)
_CONNECT_CODES = {
    400: "invalid_argument", 401: "unauthenticated", 403: "permission_denied", 404: "not_found",
    408: "deadline_exceeded", 413: "resource_exhausted", 422: "invalid_argument",
    429: "resource_exhausted", 501: "unimplemented", 502: "unavailable", 503: "unavailable",
    504: "deadline_exceeded", 507: "resource_exhausted",
}  # fmt: skip


def e2b_path(path: str, headers: Mapping[bytes, bytes]) -> str | None:
    """Return the path of a request of E2B's SDK with its prefix; None for any other request. The
    SDK names the sandbox and the port in headers, except for a signed address of a file."""
    path = f"/{path.lstrip('/')}"
    port = headers.get(_E2B_PORT, b"")
    if E2B_SANDBOX.encode() in headers and port.isdigit() and len(port) <= _PORT_DIGITS:
        own = int(port) in (ENVD_PORT, CODE_PORT)
        return f"/e2b/{int(port)}{path}" if own else f"/e2b/ports/{int(port)}{path}"
    if path == "/files":
        return f"/e2b/{ENVD_PORT}{path}"
    return f"/e2b{path}" if _E2B_CONTROL.fullmatch(path) else None


def e2b_id(sandbox_id: str) -> str:
    """Return the id of a sandbox as E2B's SDK may get it: it becomes a part of a host name."""
    return sandbox_id.replace("-", "")


def id_of_e2b(sandbox_id: str) -> str:
    """Return the id of sbx for one of `e2b_id`. Older clients append a client's id after a dash."""
    return f"sandbox-{sandbox_id.partition('-')[0].removeprefix('sandbox')}"


def connect_code(error: Mapping[str, Any], status: int) -> str:
    """Return the code of the Connect protocol for an error."""
    if error["code"] == "file_exists":
        return "already_exists"
    return _CONNECT_CODES.get(status, "internal")


def _e2b_body(error: dict[str, Any], status: int) -> dict[str, Any]:
    body = {"code": status, "message": _sentence(error)}
    if "sandbox_id" in error.get("details", {}):
        body["sandboxId"] = e2b_id(error["details"]["sandbox_id"])
    return body


def _rpc_body(error: dict[str, Any], status: int) -> dict[str, Any]:
    return {**_e2b_body(error, status), "code": connect_code(error, status)}


def _e2b_key(text: str) -> str:
    return f"sk-sbx-{text.removeprefix('e2b_')}" if text.startswith("e2b_") else text


def _e2b_link(request: HTTPConnection) -> Link | None:
    match = _E2B_INSIDE.fullmatch(request.scope["path"])
    text = request.headers.get("x-access-token") or request.headers.get(TRAFFIC_HEADER)
    if match is None or not text:
        return None
    port = None if match[1] is None else int(match[1])
    return text, id_of_e2b(request.headers.get(E2B_SANDBOX, "")), port


def _e2b(prefix: str, error_body: Callable[[dict[str, Any], int], dict[str, Any] | str]) -> Surface:
    return Surface(
        prefix,
        error_body,
        header="x-api-key",
        key_form="e2b_…",
        key_of=_e2b_key,
        link=_e2b_link,
    )


E2B = _e2b("/e2b/", _e2b_body)
_SURFACES = (
    OPENSANDBOX,
    _e2b(f"/e2b/{CODE_PORT}/", lambda error, _status: _sentence(error)),
    _e2b(f"/e2b/{ENVD_PORT}/process.Process/", _rpc_body),
    _e2b(f"/e2b/{ENVD_PORT}/filesystem.Filesystem/", _rpc_body),
    E2B,
)
LINK_HEADER = "sbx-link"
LINK_QUERY = "sbx_link"  # and the cookie of a page at the name of a port
OWN_ORIGIN = "sbx.own_origin"  # in the scope of a request to `{port}-{sandbox}.localhost`
_PORT_DIGITS = 5
_OWN_HOST = re.compile(rb"([0-9]{1,5})-sandbox-?([0-9a-f]{1,32})\.localhost(?::[0-9]{1,5})?")
LINKED_PORT = re.compile(r"/v1/sandboxes/([^/]+)/ports/([0-9]{1,5})/.*", re.DOTALL)


def surface_of(scope: Scope) -> Surface | None:
    """Return the surface of a request by its path; None for the routes of sbx."""
    path: str = scope["path"]
    return next((each for each in _SURFACES if path.startswith(each.prefix)), None)
