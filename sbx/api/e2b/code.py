"""The code interpreter: /execute and /contexts, as its server in each sandbox of E2B answers.

A context of Python is a context of sbx, with a kernel. A context of another language has no state
between runs, except files. The default context of a language is made by its first use.

The lines of a run are JSON in ASCII: the clients also split at U+2028 and U+0085.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request, Response

from sbx.aio import kept_with
from sbx.api import sse
from sbx.api.bodies import ForeignBody, body_of
from sbx.api.e2b import paths
from sbx.api.e2b.target import E2bTarget, TargetDep
from sbx.api.encoding import encoded_if_long
from sbx.api.line_events import LineBuffer, with_pauses
from sbx.api.surfaces import CODE_PORT
from sbx.errors import BadRequest, NotFound
from sbx.isolation.launch_plan import GUEST
from sbx.protocol.contexts import DEFAULT_CONTEXT
from sbx.protocol.events import encode
from sbx.protocol.languages import check_language, full_name
from sbx.protocol.runs import Display, Result, Run, RunEnd, Status, Stderr, Stdout
from sbx.service.run import RunHandle, RunRequest

router = APIRouter(prefix=f"/e2b/{CODE_PORT}", include_in_schema=False)

_DEFAULT = "default-"  # and the language: the id of a default context
_SILENCE_S = 1.0  # a client that left is noticed at the next bytes for it
_PAUSE_S = 0.2  # after which the beginning of a line is sent
_NAMES = {
    "text/plain": "text", "text/html": "html", "text/markdown": "markdown",
    "image/svg+xml": "svg", "image/png": "png", "image/jpeg": "jpeg", "application/pdf": "pdf",
    "text/latex": "latex", "application/json": "json", "application/javascript": "javascript",
    "e2b/data": "data", "e2b/chart": "chart",
}  # fmt: skip
_RICH_RESULTS = f"__import__('runpy').run_path('{GUEST}/sbx/guest/tools/rich_results.py');"
_Line = dict[str, Any]
_Contexts = dict[str, dict[str, str]]


class ExecuteBody(ForeignBody):
    code: str
    context_id: str | None = None
    language: str | None = None
    env_vars: dict[str, str] | None = None


class NewContext(ForeignBody):
    language: str | None = None
    cwd: str | None = None


@router.post("/execute")
async def execute(request: Request, target: TargetDep) -> Response:
    """Run code in a context, and stream its lines. If the client disconnects, interrupt it."""
    new = await body_of(request, ExecuteBody)
    sse.reserve(request)
    if new.context_id and new.language:
        raise BadRequest("only one of context_id and language may be given")
    language, context, cwd = await _place(target, new)
    env = new.env_vars or {}
    if language == "python":
        handle, hidden = await _started_cell(target, context, new.code, env)
    else:
        env = {**target.environment, "PWD": cwd, **env}
        kind: Any = language
        request_ = RunRequest(kind=kind, code=new.code, cwd=cwd, env=env)
        handle, hidden = await target.start(request_), 0
    reply = await sse.stream(
        _numbered(handle, hidden),
        request=request,
        encode=_encode,
        keepalive=(_SILENCE_S, b'{"type":"keepalive"}\n'),
    )
    reply.headers["content-type"] = "application/json"
    return reply


async def _started_cell(
    target: E2bTarget, context: str, code: str, env: Mapping[str, str]
) -> tuple[RunHandle, int]:
    """Start a cell, with cells before and after it that the user does not see. Return it, and how
    many hidden cells its kernel had before it."""
    async with target.use() as conversation:
        kernel, _ = await conversation.contexts.find(context).ready()
        cells = kept_with(kernel, HiddenCells)
        async with cells.turn:  # no other cell may come between these
            if not cells.count:
                await cells.start(target, context, _RICH_RESULTS)
            prepare, restore = _environment_code(env) if env else ("", "")
            if prepare:
                await cells.start(target, context, prepare)
            hidden = cells.count
            handle = await target.start(RunRequest(kind="python", code=code, context=context))
            if restore:
                await cells.start(target, context, restore)
    return handle, hidden


class HiddenCells:
    """The cells of a kernel that the user does not see: how many there were."""

    def __init__(self) -> None:
        self.count = 0
        self.turn = asyncio.Lock()

    async def start(self, target: E2bTarget, context: str, code: str) -> None:
        await target.start(RunRequest(kind="python", code=code, context=context))
        self.count += 1


def _environment_code(env: Mapping[str, str]) -> tuple[str, str]:
    """Return the code that sets variables for one run, and the code that takes them back."""
    name = f"__sbx_environment_{secrets.token_hex(4)}"
    environ = "__import__('os').environ"
    before = (
        f"{name} = {{k: {environ}.get(k) for k in {list(env)!r}}}\n{environ}.update({dict(env)!r})"
    )
    after = (
        f"for __sbx_k, __sbx_v in {name}.items():\n"
        f"    {environ}.pop(__sbx_k, None) if __sbx_v is None else "
        f"{environ}.__setitem__(__sbx_k, __sbx_v)\n"
        f"del {name}, __sbx_k, __sbx_v"
    )
    return before, after


async def _numbered(
    handle: RunHandle, hidden: int
) -> AsyncGenerator[tuple[int, _Line | bytes], None]:
    number, buffer = 0, LineBuffer()
    try:
        async with aclosing(with_pauses(handle, buffer, _PAUSE_S)) as events:
            async for event in events:
                for line in _lines(event, buffer, hidden):
                    number += 1
                    yield number, await encoded_if_long(line, _encode)
    finally:
        if not handle.ended:
            await handle.interrupt()


def _lines(event: object, buffer: LineBuffer, hidden: int) -> Iterator[_Line]:
    if not isinstance(event, Stdout | Stderr):
        for stream, text in buffer.flush():
            yield _output(stream, text)
    match event:
        case Stdout(text=text) | Stderr(text=text):
            if whole := buffer.feed(event.type, text):
                yield _output(event.type, whole)
        case Result(data=data):
            yield result_line(data, is_main=True)
        case Display(data=data):
            yield result_line(data, is_main=False)
        case RunEnd(run=run):
            if run.execution_count is not None:
                count = max(1, run.execution_count - hidden)
                yield {"type": "number_of_executions", "execution_count": count}
            if not run.ok or run.error is not None:
                yield _error_line(run)
            yield {"type": "end_of_execution"}


def _output(stream: str, text: str) -> _Line:
    return {"type": stream, "text": text, "timestamp": datetime.now(UTC).isoformat()}


def result_line(data: Mapping[str, Any], *, is_main: bool) -> _Line:
    """Return the line of a result: known types by the names of the SDK, others in `extra`."""
    line: _Line = {"type": "result", "is_main_result": is_main, "extra": {}}
    for mime, value in data.items():
        if (name := _NAMES.get(mime)) is None:
            line["extra"][mime] = value
        elif name == "text":
            line[name] = _unquoted(str(value))
        else:
            line[name] = value
    return line


def _unquoted(text: str) -> str:
    """Return a text without the quotes of a repr: the result of `'a'` is shown as a."""
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    return text[1:-1] if quoted else text


def _error_line(run: Run) -> _Line:
    error = run.error
    if run.status is Status.INTERRUPTED and error is None:
        return _error("KeyboardInterrupt", "", "")
    if error is None:
        what = f"exit code {run.exit_code}" if run.exit_code is not None else run.status.value
        return _error("ExecutionError", what, run.stderr[-4000:])
    return _error(error.name, error.value, error.traceback)


def _error(name: str, value: str, traceback: str) -> _Line:
    return {"type": "error", "name": name, "value": value, "traceback": traceback}


def _encode(_number: int, line: Mapping[str, Any]) -> bytes:
    if line["type"] == "failure":
        error = line["error"]
        end = _encode(0, {"type": "end_of_execution"})
        return _encode(0, _error(error["code"], error["message"], "")) + end
    return encode(line) + b"\n"


# -- contexts --------------------------------------------------------------------------------------


@router.post("/contexts")
async def create(request: Request, target: TargetDep) -> dict[str, str]:
    new = await body_of(request, NewContext)
    language = _language(new.language or "python")
    cwd = paths.absolute(new.cwd)
    context_id = secrets.token_hex(16)
    async with target.use() as conversation:
        if language == "python":
            await conversation.contexts.create(context_id)
            if cwd != paths.HOME and not await _enter(target, context_id, cwd):
                await conversation.contexts.delete(context_id)
                raise BadRequest(f"cwd {cwd[:300]!r} does not exist")
        else:
            await conversation.resolve_interpreter(language)
    await target.change(
        contexts={**_contexts(target), context_id: {"language": language, "cwd": cwd}}
    )
    return {"id": context_id, "language": language, "cwd": cwd}


async def _enter(target: E2bTarget, context_id: str, cwd: str) -> bool:
    code = f"__import__('os').chdir({cwd!r})"
    handle = await target.start(RunRequest(kind="python", code=code, context=context_id))
    return (await handle.result()).ok


@router.get("/contexts")
async def list_(target: TargetDep) -> list[dict[str, str]]:
    """List the contexts, the default one of Python first."""
    every = {f"{_DEFAULT}python": {"language": "python", "cwd": paths.HOME}, **_contexts(target)}
    return [{"id": context_id, **each} for context_id, each in every.items()]


@router.delete("/contexts/{context_id}", status_code=204)
async def delete(context_id: str, target: TargetDep) -> None:
    language, _ = _find(target, context_id)
    if language == "python":
        async with target.use(starts=False) as conversation:
            if context_id.startswith(_DEFAULT):
                await conversation.contexts.default.stop()
            else:
                await conversation.contexts.delete(context_id)
    await target.change(
        contexts={name: each for name, each in _contexts(target).items() if name != context_id}
    )


@router.post("/contexts/{context_id}/restart", status_code=204)
async def restart(context_id: str, target: TargetDep) -> None:
    """Give a context a clean namespace. The files stay."""
    language, cwd = _find(target, context_id)
    if language != "python":
        return
    default = context_id.startswith(_DEFAULT)
    async with target.use() as conversation:
        await conversation.contexts.find(DEFAULT_CONTEXT if default else context_id).stop()
    if cwd != paths.HOME:
        await _enter(target, context_id, cwd)


async def _place(target: E2bTarget, new: ExecuteBody) -> tuple[str, str, str]:
    """Return the language, the context of sbx and the directory for a run. Raise NotFound."""
    if not new.context_id:
        return _language(new.language or "python"), DEFAULT_CONTEXT, paths.HOME
    language, cwd = _find(target, new.context_id)
    own = language == "python" and not new.context_id.startswith(_DEFAULT)
    return language, new.context_id if own else DEFAULT_CONTEXT, cwd


def _contexts(target: E2bTarget) -> _Contexts:
    return dict(target.labels.get("contexts", {}))


def _find(target: E2bTarget, context_id: str) -> tuple[str, str]:
    """Return the language and the directory of a context. Raise NotFound."""
    if context_id.startswith(_DEFAULT):
        return _language(context_id.removeprefix(_DEFAULT)), paths.HOME
    if (found := _contexts(target).get(context_id)) is None:
        raise NotFound(f"Context {context_id[:80]} not found")
    return found["language"], found["cwd"]


def _language(name: str) -> str:
    """Raise BadRequest for a language that sbx does not run."""
    full = str(full_name(name.lower()))
    return full if full == "python" else check_language(full)
