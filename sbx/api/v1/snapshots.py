"""Commands run on a frozen copy of a conversation's files, and files put back as they were.

Who only may run code may rehearse it; what is made real of it takes the right to write files."""

import asyncio
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, StringConstraints

from sbx.aio import run_to_completion
from sbx.api.auth import CallerDep, ServiceDep
from sbx.api.bodies import OkBody
from sbx.api.errors import documented
from sbx.api.v1.files import conversation_lease
from sbx.api.v1.runs import RunBody
from sbx.protocol.dry_runs import to_json
from sbx.protocol.events import encode, run_to_json
from sbx.runtime.conversation import Conversation
from sbx.runtime.snapshots.dry_run import DryRun

router = APIRouter(
    prefix="/v1/sandboxes/{sandbox_id}/conversations/{conversation}", tags=["native"]
)
_ERRORS = documented(404, 409, 413, 429, 504, 507)


class NewRehearsal(BaseModel):
    """`timeout` in seconds, null for the policy's; `cwd` as the code inside sees it."""

    command: Annotated[str, StringConstraints(max_length=1 << 20)]
    timeout: float | None = None
    cwd: Annotated[str, StringConstraints(max_length=16_384)] | None = None


class FileChangeBody(BaseModel):
    """Sizes in bytes; `path` of a directory ends with `/`; `diff` of a text, at most 64 Ki
    characters, with a mode, the target of a symlink, or the reason why the content is not shown."""

    path: str
    kind: Literal["added", "changed", "removed"]
    size_before: int | None
    size_after: int | None
    diff: str | None


class RehearsalBody(BaseModel):
    """`run` is what the command did; `changes` what it would do to the files. Where that is
    `truncated` there is more than is shown, of the files or of a diff, and a commit makes that,
    too. `left_out`, and not committed: FIFOs, sockets and the like, and what could not be read;
    also the attachments that the command did not see.
    `expires_at` in seconds of the epoch."""

    id: str
    run: RunBody
    changes: list[FileChangeBody]
    truncated: bool
    left_out: list[str]
    expires_at: float


class CheckpointBody(BaseModel):
    id: str


class RestoredBody(BaseModel):
    """What that changed, the first of it where it is much."""

    changes: list[FileChangeBody]


@router.post("/rehearsals", status_code=201, response_model=RehearsalBody, responses=_ERRORS)
async def rehearse(
    sandbox_id: str,
    conversation: str,
    asked: NewRehearsal,
    request: Request,
    caller: CallerDep,
    service: ServiceDep,
) -> Response:
    """Run a command on a frozen copy of the files, in a jail of its own and without network. Code
    that fails is a success of this call; when the caller goes, nothing of it is left."""
    async with conversation_lease(
        service, caller, sandbox_id, conversation, "execute", makes=True
    ) as (
        talk,
        view,
    ):
        made = await _while_here(talk, asked, request)
    told = {"conversation": conversation, "command": asked.command, "rehearsal": made.id}
    await service.recording.record(caller, "rehearsal.create", view.id, **told)
    content = encode(_body(made))
    return Response(content, status_code=201, media_type="application/json")


@router.post("/rehearsals/{rehearsal}/commit", responses=_ERRORS)
async def commit(
    sandbox_id: str, conversation: str, rehearsal: str, caller: CallerDep, service: ServiceDep
) -> OkBody:
    """Make the very same changes, all or none. 409 `workspace_changed` when what it touches is not
    as it was: it is gone then, and may be rehearsed again."""
    async with conversation_lease(service, caller, sandbox_id, conversation, "files:write") as (
        talk,
        view,
    ):
        await talk.rehearsals.get(rehearsal).commit()
    told = {"conversation": conversation, "rehearsal": rehearsal}
    await service.recording.record(caller, "rehearsal.commit", view.id, **told)
    return OkBody()


@router.delete("/rehearsals/{rehearsal}", status_code=204, responses=documented(404, 409))
async def discard(
    sandbox_id: str, conversation: str, rehearsal: str, caller: CallerDep, service: ServiceDep
) -> None:
    """Nothing of it remains."""
    async with conversation_lease(
        service, caller, sandbox_id, conversation, "execute", frees=True
    ) as (talk, _):
        await talk.rehearsals.get(rehearsal).discard()


@router.post("/checkpoints", status_code=201, responses=_ERRORS)
async def checkpoint(
    sandbox_id: str, conversation: str, caller: CallerDep, service: ServiceDep
) -> CheckpointBody:
    """Keep the files as they are now, to be put back; the oldest of them gives way."""
    async with conversation_lease(
        service, caller, sandbox_id, conversation, "files:write", makes=True
    ) as (
        talk,
        _,
    ):
        return CheckpointBody(id=(await talk.checkpoint()).id)


@router.post("/checkpoints/{checkpoint}/restore", responses=_ERRORS)
async def restore(
    sandbox_id: str, conversation: str, checkpoint: str, caller: CallerDep, service: ServiceDep
) -> RestoredBody:
    """Make the files again what they were, all or none."""
    async with conversation_lease(service, caller, sandbox_id, conversation, "files:write") as (
        talk,
        view,
    ):
        changes = await talk.checkpoints.get(checkpoint).restore()
    told = {"conversation": conversation, "checkpoint": checkpoint}
    await service.recording.record(caller, "checkpoint.restore", view.id, **told)
    return RestoredBody(changes=[FileChangeBody(**to_json(one)) for one in changes])


@router.delete("/checkpoints/{checkpoint}", status_code=204, responses=documented(404, 409))
async def forget(
    sandbox_id: str, conversation: str, checkpoint: str, caller: CallerDep, service: ServiceDep
) -> None:
    """Nothing of it remains."""
    async with conversation_lease(
        service, caller, sandbox_id, conversation, "files:write", frees=True
    ) as (
        talk,
        _,
    ):
        await talk.checkpoints.get(checkpoint).discard()


async def _while_here(talk: Conversation, asked: NewRehearsal, request: Request) -> DryRun:
    """The rehearsal, for a caller whose going away ends it."""
    work = asyncio.ensure_future(talk.rehearse(asked.command, timeout=asked.timeout, cwd=asked.cwd))
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        if not work.done():
            work.cancel()
            await run_to_completion(asyncio.wait([work]))
    return work.result()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _body(made: DryRun) -> dict[str, Any]:
    return {
        "id": made.id,
        "run": run_to_json(made.run, encoded=True),
        "changes": [to_json(one) for one in made.changes],
        "truncated": made.truncated,
        "left_out": list(made.left_out),
        "expires_at": made.expires_at,
    }
