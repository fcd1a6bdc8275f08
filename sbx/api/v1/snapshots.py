"""Dry runs of commands on a frozen copy of the files, and checkpoints to restore.

<<<<<<< HEAD
A dry run takes the scope `execute`; to apply its changes takes `files:write`.
"""
=======
Who only may run code may dry-run it; what is made real of it takes the right to write files."""
>>>>>>> main

import asyncio
from typing import Annotated, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, StringConstraints

from sbx.aio import run_to_completion
from sbx.api.bodies import OkBody, disconnected
from sbx.api.errors import documented
from sbx.api.v1.dependencies import PREFIX, TargetDep
from sbx.api.v1.runs import RunBody
from sbx.protocol.dry_runs import to_json
from sbx.protocol.events import encode, run_to_json
from sbx.runtime.conversation import Conversation
from sbx.runtime.snapshots.dry_run import DryRun

router = APIRouter(prefix=PREFIX, tags=["native"])
_ERRORS = documented(404, 409, 413, 429, 504, 507)


class NewDryRun(BaseModel):
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


<<<<<<< HEAD
class RehearsalBody(BaseModel):
    """`run` is the run of the command, `changes` its effect on the files. If `truncated`, there are
    more files or longer diffs than shown; a commit applies all of it. `left_out` is not
    committed: FIFOs, sockets and the like, and unreadable files; also the mounts that the command
    did not see. `expires_at` in seconds of the epoch."""
=======
class DryRunBody(BaseModel):
    """`run` is what the command did; `changes` what it would do to the files. Where that is
    `truncated` there is more than is shown, of the files or of a diff, and a commit makes that,
    too. `left_out`, and not committed: FIFOs, sockets and the like, and what could not be read;
    also the mounts that the command did not see.
    `expires_at` in seconds of the epoch."""
>>>>>>> main

    id: str
    run: RunBody
    changes: list[FileChangeBody]
    truncated: bool
    left_out: list[str]
    expires_at: float


class CheckpointBody(BaseModel):
    id: str


class RestoredBody(BaseModel):
    """The changes that this made, the first ones if there are many."""

    changes: list[FileChangeBody]


<<<<<<< HEAD
@router.post("/rehearsals", status_code=201, response_model=RehearsalBody, responses=_ERRORS)
async def rehearse(new: NewRehearsal, request: Request, target: TargetDep) -> Response:
    """Run a command on a frozen copy of the files, in another jail and without network. A command
    that fails is a success of this call. If the client disconnects, the copy is removed."""
    async with target.use("execute", creates=True) as talk:
        dry_run = await _run_while_connected(talk, new, request)
    await target.record("rehearsal.create", command=new.command, rehearsal=dry_run.id)
    content = {
        "id": dry_run.id,
        "run": run_to_json(dry_run.run, encoded=True),
        "changes": [to_json(change) for change in dry_run.changes],
        "truncated": dry_run.truncated,
        "left_out": list(dry_run.left_out),
        "expires_at": dry_run.expires_at,
    }
    return Response(encode(content), status_code=201, media_type="application/json")


@router.post("/rehearsals/{rehearsal}/commit", responses=_ERRORS)
async def commit(rehearsal: str, target: TargetDep) -> OkBody:
    """Apply the same changes, all or none. 409 `workspace_changed` if the files changed meanwhile:
    the dry run is gone then, and may be repeated."""
    async with target.use("files:write") as talk:
        await talk.rehearsals.get(rehearsal).commit()
    await target.record("rehearsal.commit", rehearsal=rehearsal)
    return OkBody()


@router.delete("/rehearsals/{rehearsal}", status_code=204, responses=documented(404, 409))
async def discard(rehearsal: str, target: TargetDep) -> None:
    """Remove the copy without applying its changes."""
    async with target.use("execute", frees=True) as talk:
        await talk.rehearsals.get(rehearsal).discard()
=======
@router.post("/dry_runs", status_code=201, response_model=DryRunBody, responses=_ERRORS)
async def dry_run(
    sandbox_id: str,
    conversation: str,
    asked: NewDryRun,
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
    told = {"conversation": conversation, "command": asked.command, "dry_run": made.id}
    await service.recording.record(caller, "dry_run.create", view.id, **told)
    content = encode(_body(made))
    return Response(content, status_code=201, media_type="application/json")


@router.post("/dry_runs/{dry_run}/commit", responses=_ERRORS)
async def commit(
    sandbox_id: str, conversation: str, dry_run: str, caller: CallerDep, service: ServiceDep
) -> OkBody:
    """Make the very same changes, all or none. 409 `workspace_changed` when what it touches is not
    as it was: it is gone then, and may be dry-run again."""
    async with conversation_lease(service, caller, sandbox_id, conversation, "files:write") as (
        talk,
        view,
    ):
        await talk.dry_runs.get(dry_run).commit()
    told = {"conversation": conversation, "dry_run": dry_run}
    await service.recording.record(caller, "dry_run.commit", view.id, **told)
    return OkBody()


@router.delete("/dry_runs/{dry_run}", status_code=204, responses=documented(404, 409))
async def discard(
    sandbox_id: str, conversation: str, dry_run: str, caller: CallerDep, service: ServiceDep
) -> None:
    """Nothing of it remains."""
    async with conversation_lease(
        service, caller, sandbox_id, conversation, "execute", frees=True
    ) as (talk, _):
        await talk.dry_runs.get(dry_run).discard()
>>>>>>> main


@router.post("/checkpoints", status_code=201, responses=_ERRORS)
async def checkpoint(target: TargetDep) -> CheckpointBody:
    """Record the files, so that they can be restored. The oldest checkpoint makes room."""
    async with target.use("files:write", creates=True) as talk:
        return CheckpointBody(id=(await talk.checkpoint()).id)


@router.post("/checkpoints/{checkpoint}/restore", responses=_ERRORS)
async def restore(checkpoint: str, target: TargetDep) -> RestoredBody:
    """Restore the files, all or none."""
    async with target.use("files:write") as talk:
        changes = await talk.checkpoints.get(checkpoint).restore()
    await target.record("checkpoint.restore", checkpoint=checkpoint)
    return RestoredBody(changes=[FileChangeBody(**to_json(change)) for change in changes])


@router.delete("/checkpoints/{checkpoint}", status_code=204, responses=documented(404, 409))
async def forget(checkpoint: str, target: TargetDep) -> None:
    """Remove a checkpoint."""
    async with target.use("files:write", frees=True) as talk:
        await talk.checkpoints.get(checkpoint).discard()


<<<<<<< HEAD
async def _run_while_connected(talk: Conversation, new: NewRehearsal, request: Request) -> DryRun:
    """Return the dry run. Cancel it if the client disconnects."""
    work = asyncio.ensure_future(talk.rehearse(new.command, timeout=new.timeout, cwd=new.cwd))
    gone = asyncio.ensure_future(disconnected(request.receive))
=======
async def _while_here(talk: Conversation, asked: NewDryRun, request: Request) -> DryRun:
    """The dry run, for a caller whose going away ends it."""
    work = asyncio.ensure_future(talk.dry_run(asked.command, timeout=asked.timeout, cwd=asked.cwd))
    gone = asyncio.ensure_future(_gone(request))
>>>>>>> main
    try:
        await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        if not work.done():
            work.cancel()
            await run_to_completion(asyncio.wait([work]))
    return work.result()
