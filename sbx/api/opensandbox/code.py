"""The code interpreter: Python with its variables, and scripts in five other languages.

A context of Python is a context of sbx, with a kernel. A context of another language has no state
between runs, except files. The default context of a language is made by its first use.
"""

import secrets
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from sbx.api import sse
from sbx.api.bodies import ForeignBody, body_of
from sbx.api.opensandbox.execd import PREFIX, ExecdTarget, TargetDep
from sbx.api.opensandbox.stream import reply, run_events
from sbx.errors import BadRequest, Conflict, NotFound
from sbx.protocol.contexts import DEFAULT_CONTEXT
from sbx.protocol.languages import check_language, full_name
from sbx.runtime.sandbox import DEFAULT_CONVERSATION
from sbx.service.run import RunRequest

router = APIRouter(prefix=PREFIX, include_in_schema=False)
_DEFAULT = "default-"  # and the language: the id of a default context


class NewCodeContext(ForeignBody):
    language: str


class CodeContext(ForeignBody):
    id: str | None = None
    language: str | None = None


class RunCode(ForeignBody):
    code: str
    context: CodeContext = Field(default_factory=CodeContext)


@router.post("/code")
async def run(request: Request, target: TargetDep) -> Response:
    """Run code in a context, and stream its events."""
    new = await body_of(request, RunCode)
    sse.reserve(request)
    language, context = await _place(target, new.context)
    kind: Any = language
    handle = await target.start(RunRequest(kind=kind, code=new.code, context=context))
    return await reply(run_events(handle, command=False), request)


@router.delete("/code")
async def interrupt(target: TargetDep, id: Annotated[str, Query()]) -> Response:
    """Interrupt a run by its own id, or by that of its context. The variables stay."""
    runs = target.service.runs
    if id.startswith(_DEFAULT) or id in _contexts(target):
        context = id if id in _contexts(target) else DEFAULT_CONTEXT
        done = await runs.interrupt(target.caller, target.sandbox.id, DEFAULT_CONVERSATION, context)
    else:
        done = await (await runs.attach(target.caller, target.sandbox.id, id)).interrupt()
    if not done:
        raise Conflict("nothing runs there", code="RUNTIME_ERROR")
    return Response()


@router.post("/code/context")
async def create(request: Request, target: TargetDep) -> dict[str, str]:
    language = _language((await body_of(request, NewCodeContext)).language)
    context_id = f"ctx-{secrets.token_hex(8)}"
    async with target.use() as conversation:
        if language == "python":
            await conversation.contexts.create(context_id)
        else:
            await conversation.resolve_interpreter(language)
    await _keep(target, {**_contexts(target), context_id: language})
    return {"id": context_id, "language": language}


@router.get("/code/contexts")
async def list_(target: TargetDep, language: str | None = None) -> list[dict[str, str]]:
    """List the contexts, with the default one of Python."""
    every = {f"{_DEFAULT}python": "python", **_contexts(target)}
    return [
        {"id": context_id, "language": each}
        for context_id, each in every.items()
        if language is None or full_name(language) == each
    ]


@router.get("/code/contexts/{context_id}")
async def get(context_id: str, target: TargetDep) -> dict[str, str]:
    return {"id": context_id, "language": _language_of(target, context_id)}


@router.delete("/code/contexts/{context_id}")
async def delete(context_id: str, target: TargetDep) -> Response:
    language = _language_of(target, context_id)
    await _end(target, context_id, language)
    await _keep(target, {k: v for k, v in _contexts(target).items() if k != context_id})
    return Response()


@router.delete("/code/contexts")
async def delete_of_language(target: TargetDep, language: Annotated[str, Query()]) -> Response:
    """Delete the contexts of a language; the default one gets a clean namespace."""
    name = _language(language)
    contexts = _contexts(target)
    ending = [context_id for context_id, each in contexts.items() if each == name]
    for context_id in (f"{_DEFAULT}{name}", *ending):
        await _end(target, context_id, name)
    await _keep(target, {k: v for k, v in contexts.items() if k not in ending})
    return Response()


async def _place(target: ExecdTarget, wish: CodeContext) -> tuple[str, str]:
    """Return the language and the context of sbx for a run. Raise NotFound, BadRequest."""
    if not wish.id:
        return _language(wish.language or "python"), DEFAULT_CONTEXT
    language = _language_of(target, wish.id)
    own = language == "python" and not wish.id.startswith(_DEFAULT)
    return language, wish.id if own else DEFAULT_CONTEXT


async def _end(target: ExecdTarget, context_id: str, language: str) -> None:
    if language != "python":
        return
    async with target.use(starts=False) as conversation:
        if context_id.startswith(_DEFAULT):
            await conversation.contexts.default.stop()
        else:
            await conversation.contexts.delete(context_id)


def _contexts(target: ExecdTarget) -> dict[str, str]:
    return dict(target.labels.get("contexts", {}))


async def _keep(target: ExecdTarget, contexts: dict[str, str]) -> None:
    await target.sandbox.set_labels({**target.labels, "contexts": contexts})


def _language_of(target: ExecdTarget, context_id: str) -> str:
    if context_id.startswith(_DEFAULT):
        return _language(context_id.removeprefix(_DEFAULT))
    if (language := _contexts(target).get(context_id)) is None:
        raise NotFound(f"the context {context_id[:80]} does not exist", code="CONTEXT_NOT_FOUND")
    return language


def _language(name: str) -> str:
    """Raise BadRequest for a language that sbx does not run."""
    full = str(full_name(name.lower()))
    if full == "python":
        return full
    try:
        return check_language(full)
    except BadRequest as error:
        raise BadRequest(error.message, code="NOT_SUPPORTED") from None
