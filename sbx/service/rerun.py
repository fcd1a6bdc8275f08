"""Run one run of a history again, in a fresh sandbox.

    the run ─► a sandbox with the same policy ─► copies of the files ─► the same code ─► compare

The original does not change: code gets copies of the files as they are now, and a new kernel. The
sandbox is deleted at the end.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

from msgspec import Struct

from sbx.agent.sandbox import copy_file
from sbx.aio import run_to_completion
from sbx.errors import Conflict, Denied, NotFound
from sbx.protocol.runs import Run
from sbx.runtime.conversation import Conversation
from sbx.service.caller import Caller
from sbx.service.models import SandboxView
from sbx.service.run import Kind, RunRequest
from sbx.service.service import Service
from sbx.store.runs import CODE_KEPT

_CONVERSATION = "default"  # of a fresh sandbox
_LIFE_S = 86_400.0
# The labels by which the next process finds and deletes the sandboxes that this one left behind.
FRESH: Mapping[str, str] = {"surface": "sub_agent"}
_COMPARED = ("status", "exit_code", "stdout", "stderr", "text", "result", "outputs")


class Rerun(Struct, frozen=True):
    """Both results, shortened as in the history. `differences`: the fields that differ."""

    before: Run
    after: Run
    differences: tuple[str, ...]


class FreshSandbox(Struct, frozen=True):
    """`caller` may use it: no token has such a sandbox within its bounds."""

    id: str
    caller: Caller
    conversation: Conversation


@asynccontextmanager
async def fresh_sandbox(service: Service, like: SandboxView) -> AsyncIterator[FreshSandbox]:
    """Yield a new sandbox with the policy, the narrowing and the environment of another one, and
    delete it on exit. Raise as `Sandboxes.create`."""
    caller = Caller(like.owner, "key")
    view = await service.sandboxes.create(
        caller,
        policy=like.policy_name,
        narrower=like.narrower,
        env=like.env,
        ttl_s=_LIFE_S,
        labels=FRESH,
    )
    try:
        async with service.sandboxes.using(
            caller, view.id, scope="execute", starts=True, conversation=_CONVERSATION
        ) as use:
            yield FreshSandbox(view.id, caller, use.conversation(_CONVERSATION))
    finally:
        with suppress(NotFound):  # its session was deleted
            await run_to_completion(service.sandboxes.delete(caller, view.id))


async def rerun(
    service: Service, caller: Caller, sandbox_id: str, run_id: str, timeout_s: float | None
) -> Rerun:
    """Run the code of an ended run again. Its variables, arguments and standard input are not
    there. Raise as `RunHistory.entry` and `Runs.start`, Conflict `run_in_progress` and
    `code_not_kept`, and the errors of copying."""
    row = await service.runs.history.entry(caller, sandbox_id, run_id)
    if row.run is None:
        raise Conflict(f"the run {run_id} has not ended", code="run_in_progress")
    if len(row.code) >= CODE_KEPT:
        raise Conflict(
            f"the history has only the beginning of the code of {run_id}", code="code_not_kept"
        )
    # A stopped sandbox and an expired session may be read, too.
    lease = service.sandboxes.using(
        caller, sandbox_id, scope="execute", starts=False, kept=True, conversation=row.conversation
    )
    async with lease as use:
        original, like = await use.existing(row.conversation), await use.view()
        async with fresh_sandbox(service, like) as fresh:
            await _copy_files(original, fresh.conversation)
            request = RunRequest(cast("Kind", row.kind), row.code, timeout_s=timeout_s)
            handle = await service.runs.start(
                fresh.caller, fresh.id, fresh.conversation.name, request
            )
            try:
                await handle.result()
            finally:
                await run_to_completion(handle.interrupt())
            again = await service.runs.history.entry(fresh.caller, fresh.id, handle.begun.id)
    if again.run is None:
        raise Conflict("the result was not recorded", code="run_in_progress")
    return Rerun(row.run, again.run, _differences(row.run, again.run))


async def _copy_files(source: Conversation, target: Conversation) -> None:
    """Copy the uploads and the workspace. An archive keeps links and permissions; code that may
    not start processes does not need them."""
    for upload in await source.uploads.list():
        await target.uploads.put_bytes(upload.name, await source.uploads.read_bytes(upload.name))
    try:
        await target.files.unpack(source.files.archive())
    except (Denied, Conflict):  # no processes, or stopped by request
        for entry in await source.files.list(max_depth=100):
            is_upload = entry.path.startswith("/workspace/uploads/")
            if entry.kind == "file" and not is_upload:
                path = entry.path.removeprefix("/workspace/")
                await copy_file(source, path, target, path)


def _differences(before: Run, after: Run) -> tuple[str, ...]:
    def error(run: Run) -> Any:
        return run.error and (run.error.name, run.error.value)

    fields = [name for name in _COMPARED if getattr(before, name) != getattr(after, name)]
    return (*fields, *(("error",) if error(before) != error(after) else ()))
