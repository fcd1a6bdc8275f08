"""The surfaces that speak the protocol of another product: their paths, errors and credentials.

Their routes are below a prefix, in a folder of the same name. The prefix decides the form of every
error body, also of those that no route sees: a wrong key, a body that is too large.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import HTTPConnection
from starlette.types import Scope

from sbx.errors import Denied

# A key, a token (JWT), or a text of the operator (SBX_API_KEY) without space.
_KEY_FORM = re.compile(r"sk-sbx-[0-9a-f]{64}|[\w-]+\.[\w-]+\.[\w-]+|[!-~]{20,4096}")


@dataclass(frozen=True, slots=True)
class Surface:
    """`error_body` gets the error, already without paths of the host, and its HTTP status.
    `header` carries the key, after `scheme` if there is one. `linked`: the paths that a link opens
    as well, with the groups sandbox and port."""

    name: str
    error_body: Callable[[dict[str, Any], int], dict[str, Any]]
    header: str
    scheme: str = ""
    linked: re.Pattern[str] | None = None

    @property
    def prefix(self) -> str:
        return f"/{self.name}/"

    def credential(self, request: HTTPConnection) -> str | None:
        """Return the key or token of a request, None without one. Raise Denied `malformed_key` for
        a text that no key or token can be."""
        text = request.headers.get(self.header)
        if text is None or not text.strip():
            return None
        if self.scheme:
            scheme, _, text = text.partition(" ")
            if scheme.lower() != self.scheme:
                raise self._malformed()
        if not _KEY_FORM.fullmatch(text.strip()):
            raise self._malformed()
        return text.strip()

    def link(self, request: HTTPConnection) -> tuple[str, str, int] | None:
        """Return the link of a request, and the sandbox and port that it must open."""
        return link_of(request, self.linked)

    def _malformed(self) -> Denied:
        scheme = f"{self.scheme.title()} " if self.scheme else ""
        return Denied(
            f"the header {self.header} does not have the form of a key or a token",
            code="malformed_key",
            hint=f"send {self.header}: {scheme}sk-sbx-…; `sbx key create` makes a key",
        )


def own_origin(host: bytes) -> tuple[str, str] | None:
    """Return the sandbox and the port of a host such as `8000-sandbox-5a7afa86d151.localhost`; None
    for any other. Browsers resolve it to loopback."""
    match = _OWN_HOST.fullmatch(host)
    return None if match is None else (match[2].decode(), match[1].decode())


def link_of(request: HTTPConnection, linked: re.Pattern[str] | None) -> tuple[str, str, int] | None:
    """Return the link of a request, and the sandbox and port that it must open. A browser has it in
    the query."""
    match = linked.fullmatch(request.scope["path"]) if linked is not None else None
    if match is None:
        return None
    text = request.headers.get(LINK_HEADER) or request.query_params.get(LINK_QUERY)
    if not text and request.scope.get(OWN_ORIGIN):
        text = request.cookies.get(LINK_QUERY)
    return (text, match[1], int(match[2])) if text else None


def _sentence(error: dict[str, Any]) -> str:
    """Return the message, with the hint after it: these bodies have no field for a hint."""
    hint = error.get("hint")
    return f"{error['message']} ({hint})" if hint else str(error["message"])


SHIPYARD = Surface(
    "shipyard",
    lambda error, _status: {"detail": _sentence(error)},
    header="authorization",
    scheme="bearer",
)
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
    "opensandbox",
    _opensandbox_body,
    header="open-sandbox-api-key",
    linked=re.compile(r"/opensandbox/v1/sandboxes/([^/]+)/proxy/([0-9]{1,5})(?:/.*)?"),
)
_SURFACES = (SHIPYARD, OPENSANDBOX)
LINK_HEADER = "sbx-link"
LINK_QUERY = "sbx_link"  # and the cookie of a page at the name of a port
OWN_ORIGIN = "sbx.own_origin"  # in the scope of a request to `{port}-{sandbox}.localhost`
_OWN_HOST = re.compile(rb"([0-9]{1,5})-(sandbox-[0-9a-f]{1,32})\.localhost(?::[0-9]{1,5})?")
LINKED_PORT = re.compile(r"/v1/sandboxes/([^/]+)/ports/([0-9]{1,5})/.*", re.DOTALL)


def surface_of(scope: Scope) -> Surface | None:
    """Return the surface of a request by its path; None for the routes of sbx."""
    path: str = scope["path"]
    return next((each for each in _SURFACES if path.startswith(each.prefix)), None)
