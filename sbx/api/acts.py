"""What callers did, for the audit log: whatever changes something, or opens a door.

Runs are not here: the history of their sandbox has each of them, with its code.
"""

from typing import Any, Literal

from fastapi import Response
from pydantic import BaseModel

from sbx.service.auth import Caller
from sbx.service.service import Service


class NotRecorded(BaseModel):
    """The revocation holds, and the store does not have it yet: the service tries again until it
    does. If the service is killed before that, the revocation is lost at the next start."""

    recorded: Literal[False] = False


REVOKED: dict[int | str, dict[str, Any]] = {
    200: {"model": NotRecorded, "description": "Revoked, and not recorded yet"},
    204: {"description": "Revoked"},
}
_TEXT_MAX = 1000  # characters; a line whose details are too long would lose all of them


async def record(service: Service, caller: Caller, what: str, object: str, **details: Any) -> None:
    """Record who did what to what, once it is done. Long texts are cut, None is left out.

    Never refuse here: the act is done. A line that cannot be written waits in memory, and new work
    is refused meanwhile, before it begins: see `sbx.service.recording`.
    """
    told = {name: _cut(value) for name, value in details.items() if value is not None}
    await service.audit.record(caller.who, what, object, **told)


def revoked(recorded: bool) -> Response:
    """Return the reply to a revocation, which holds from now on in either case."""
    if recorded:
        return Response(status_code=204)
    content = NotRecorded().model_dump_json()
    return Response(content, status_code=200, media_type="application/json")


def _cut(value: Any) -> Any:
    if isinstance(value, str) and len(value) > _TEXT_MAX:
        return f"{value[: _TEXT_MAX - 1]}…"
    return value
