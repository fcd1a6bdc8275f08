"""The quarantine of projects: a person reads the files in it, and restores or deletes them."""

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel

from sbx.api.auth import CallerDep, ServiceDep
from sbx.api.errors import documented
from sbx.errors import Denied
from sbx.service.caller import Caller
from sbx.workspace.quarantined_content import item_body

router = APIRouter(prefix="/api/v1/quarantine", tags=["projects"])


class QuarantineItemBody(BaseModel):
    """`path` is relative to `directory`. `program`: what would obey the file, and `why` the same as
    a sentence. The values come from a sandbox."""

    id: str
    directory: str
    path: str
    name: str
    program: str
    kind: str
    why: str


class QuarantineList(BaseModel):
    items: list[QuarantineItemBody]


class QuarantineEntry(BaseModel):
    path: str
    kind: str
    size: int | None
    target: str | None = None


class QuarantineContent(QuarantineItemBody):
    """An item that is a file has `content`, of at most 64 KiB; a directory has `entries`, and a
    symlink `target`. `complete` is false if there is more."""

    size: int | None = None
    executable: bool | None = None
    content: str | None = None
    entries: list[QuarantineEntry] | None = None
    target: str | None = None
    complete: bool = True


class Restored(BaseModel):
    """`path`: where the file is now."""

    path: str


@router.get("", responses=documented())
async def list_(caller: CallerDep, service: ServiceDep) -> QuarantineList:
    """List the files of your projects that a program of the host would obey: code inside wrote
    them, and they wait outside of the directory. A token has none."""
    if caller.via == "token":
        return QuarantineList(items=[])
    items = await service.projects.quarantined(caller.owner)
    return QuarantineList(items=[QuarantineItemBody(**item_body(item)) for item in items])


@router.get("/{item_id}", responses=documented(404))
async def get(
    item_id: str,
    caller: CallerDep,
    service: ServiceDep,
    path: Annotated[str, Query(max_length=4096)] = "",
) -> QuarantineContent:
    """Return an item with its content. `path` is one in an item that is a directory."""
    _check(caller)
    return QuarantineContent(
        **await service.projects.quarantined_content(caller.owner, item_id, path)
    )


@router.post("/{item_id}/restore", responses=documented(404, 409))
async def restore(item_id: str, caller: CallerDep, service: ServiceDep) -> Restored:
    """Copy an item to its place in the directory. Programs of the host obey it from then on."""
    _check(caller)
    path = await service.projects.restore_quarantined(caller.owner, item_id)
    await service.recording.record(caller, "quarantine.restore", item_id, path=path)
    return Restored(path=path)


@router.delete("/{item_id}", status_code=204, responses=documented(404, 409))
async def drop(item_id: str, caller: CallerDep, service: ServiceDep) -> None:
    """Delete an item for good."""
    _check(caller)
    await service.projects.drop_quarantined(caller.owner, item_id)
    await service.recording.record(caller, "quarantine.drop", item_id)


def _check(caller: Caller) -> None:
    if caller.via == "token":
        raise Denied(
            "a token has no projects",
            code="forbidden",
            hint="call with a key, or over the socket",
        )
