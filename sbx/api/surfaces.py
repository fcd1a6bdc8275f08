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
    `header` carries the key, after `scheme` if there is one."""

    name: str
    error_body: Callable[[dict[str, Any], int], dict[str, Any]]
    header: str
    scheme: str = ""

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

    def _malformed(self) -> Denied:
        scheme = f"{self.scheme.title()} " if self.scheme else ""
        return Denied(
            f"the header {self.header} does not have the form of a key or a token",
            code="malformed_key",
            hint=f"send {self.header}: {scheme}sk-sbx-…; `sbx key create` makes a key",
        )


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
_SURFACES = (SHIPYARD,)


def surface_of(scope: Scope) -> Surface | None:
    """Return the surface of a request by its path; None for the routes of sbx."""
    path: str = scope["path"]
    return next((each for each in _SURFACES if path.startswith(each.prefix)), None)
