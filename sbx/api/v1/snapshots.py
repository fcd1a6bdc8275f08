"""Dry runs of commands on a frozen copy of the files, and checkpoints to restore.

A dry run takes the scope `execute`; to apply its changes takes `files:write`.
"""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, StringConstraints

from sbx.aio import run_to_completion
from sbx.api.bodies import OkBody, RequestBody, disconnected
from sbx.api.errors import documented
from sbx.api.v1.dependencies import PREFIX, TargetDep
from sbx.api.v1.runs import RunBody
from sbx.protocol.dry_runs import FileChange, to_json
from sbx.protocol.events import encode, run_to_json
from sbx.runtime.conversation import Conversation
from sbx.runtime.snapshots.dry_run import DryRun

router = APIRouter(prefix=PREFIX, tags=["native"])
_ERRORS = documented(404, 409, 413, 429, 504, 507)


class NewDryRun(RequestBody):
    """`timeout` in seconds, null for the policy's; `cwd` as the code inside sees it."""

    command: Annotated[str, StringConstraints(max_length=1 << 20)]
    timeout: float | None = None
    cwd: Annotated[str, StringConstraints(max_length=16_384)] | None = None


class DryRunBody(BaseModel):
    """`run` is the run of the command, `changes` its effect on the files. If `truncated`, there are
    more files or longer diffs than shown; a commit applies all of it. `left_out` is not
    committed: FIFOs, sockets and the like, and unreadable files; also the mounts that the command
    did not see. `expires_at` in seconds of the epoch."""

    id: str
    run: RunBody
    changes: list[FileChange]
    truncated: bool
    left_out: list[str]
    expires_at: float


class CheckpointBody(BaseModel):
    id: str


class RestoredBody(BaseModel):
    """The changes that this made, the first ones if there are many."""

    changes: list[FileChange]


@router.post("/dry_runs", status_code=201, response_model=DryRunBody, responses=_ERRORS)
async def dry_run(new: NewDryRun, request: Request, target: TargetDep) -> Response:
    """Run a command on a frozen copy of the files, in another jail and without network. A command
    that fails is a success of this call. If the client disconnects, the copy is removed."""
    async with target.use("execute", creates=True) as conversation:
        result = await _run_while_connected(conversation, new, request)
    await target.record("dry_run.create", command=new.command, dry_run=result.id)
    content = {
        "id": result.id,
        "run": run_to_json(result.run, encoded=True),
        "changes": [to_json(change) for change in result.changes],
        "truncated": result.truncated,
        "left_out": list(result.left_out),
        "expires_at": result.expires_at,
    }
    return Response(encode(content), status_code=201, media_type="application/json")


@router.post("/dry_runs/{dry_run}/commit", responses=_ERRORS)
async def commit(dry_run: str, target: TargetDep) -> OkBody:
    """Apply the same changes, all or none. 409 `workspace_changed` if the files changed meanwhile:
    the dry run is gone then, and may be repeated."""
    async with target.use("files:write") as conversation:
        await conversation.dry_runs.get(dry_run).commit()
    await target.record("dry_run.commit", dry_run=dry_run)
    return OkBody()


@router.delete("/dry_runs/{dry_run}", status_code=204, responses=documented(404, 409))
async def discard(dry_run: str, target: TargetDep) -> None:
    """Remove the copy without applying its changes."""
    async with target.use("execute", frees=True) as conversation:
        await conversation.dry_runs.get(dry_run).discard()


@router.post("/checkpoints", status_code=201, responses=_ERRORS)
async def checkpoint(target: TargetDep) -> CheckpointBody:
    """Record the files, so that they can be restored. The oldest checkpoint makes room."""
    async with target.use("files:write", creates=True) as conversation:
        return CheckpointBody(id=(await conversation.checkpoint()).id)


@router.post("/checkpoints/{checkpoint}/restore", responses=_ERRORS)
async def restore(checkpoint: str, target: TargetDep) -> RestoredBody:
    """Restore the files, all or none."""
    async with target.use("files:write") as conversation:
        changes = await conversation.checkpoints.get(checkpoint).restore()
    await target.record("checkpoint.restore", checkpoint=checkpoint)
    return RestoredBody(changes=list(changes))


@router.delete("/checkpoints/{checkpoint}", status_code=204, responses=documented(404, 409))
async def forget(checkpoint: str, target: TargetDep) -> None:
    """Remove a checkpoint."""
    async with target.use("files:write", frees=True) as conversation:
        await conversation.checkpoints.get(checkpoint).discard()


async def _run_while_connected(
    conversation: Conversation, new: NewDryRun, request: Request
) -> DryRun:
    """Return the dry run. Cancel it if the client disconnects."""
    work = asyncio.ensure_future(
        conversation.dry_run(new.command, timeout=new.timeout, cwd=new.cwd)
    )
    gone = asyncio.ensure_future(disconnected(request.receive))
    try:
        await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        if not work.done():
            work.cancel()
            await run_to_completion(asyncio.wait([work]))
    return work.result()
