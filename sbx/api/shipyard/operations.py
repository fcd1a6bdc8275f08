"""exec: one operation of a session: a command, Python code, or a change of a file.

Its reply is {"success": true, "data", "error": null}. Code that fails is a success of the
operation; `data.success` is false then. An operation that fails is a 400, and its detail has the
status of the problem in words: `Ship returned 404: {"detail": …}`.
"""

import asyncio
import codecs
import json
import posixpath
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from typing import Annotated, Any, Literal

from fastapi import Response
from msgspec import Struct
from pydantic import Field, StringConstraints, ValidationError

from sbx.api.bodies import ForeignBody, entry_form
from sbx.api.encoding import encoded_run, text_and_images
from sbx.api.errors import status_of
from sbx.api.middleware import CONTENT_MAX
from sbx.api.shipyard.ships import Ships
from sbx.errors import BadRequest, Denied, InvalidPath, NotFound, SbxError
from sbx.protocol.events import run_to_json
from sbx.protocol.runs import Run, RunError, Status
from sbx.runtime.conversation import Conversation
from sbx.runtime.files.files import WorkspaceFiles
from sbx.service.caller import Caller
from sbx.service.run import RunRequest
from sbx.service.service import Service
from sbx.telemetry.host_paths import without_host_paths
from sbx.workspace.errors import is_a_directory, too_large
from sbx.workspace.paths import resolve

_WORKSPACE = "/workspace"
_OUTSIDE = ("absolute_path", "path_traversal", "read_only", "reserved", "symlink")
_PID_S = 10.0  # for the first line of a background command
_Seconds = Annotated[float, Field(gt=0)]
_Encoding = Annotated[str, StringConstraints(max_length=40)]


class ShellCall(ForeignBody):
    command: str
    cwd: str | None = None
    env: dict[str, str] | None = None
    timeout: _Seconds | None = 30
    shell: bool = True
    background: bool = False


class PythonCall(ForeignBody):
    code: str
    kernel_id: str | None = None
    timeout: _Seconds | None = 30
    silent: bool = False


class CreateFile(ForeignBody):
    path: str
    content: str = ""
    mode: Annotated[int, Field(ge=0, le=0o777)] = 0o644


class ReadFile(ForeignBody):
    path: str
    encoding: _Encoding = "utf-8"
    offset: Annotated[int, Field(ge=1)] | None = None
    limit: Annotated[int, Field(ge=0)] | None = None


class WriteFile(ForeignBody):
    path: str
    content: str
    mode: Literal["w", "a"] = "w"
    encoding: _Encoding = "utf-8"


class EditFile(ForeignBody):
    path: str
    old_string: str
    new_string: str
    replace_all: bool = False
    encoding: _Encoding = "utf-8"


class DeleteFile(ForeignBody):
    path: str


class ListDirectory(ForeignBody):
    path: str = "."
    show_hidden: bool = False


class SessionCall(Struct, frozen=True):
    """A session of a ship, for one request of its caller."""

    ships: Ships
    service: Service
    caller: Caller
    ship_id: str
    session: str

    @asynccontextmanager
    async def use(self, scope: str, *, frees: bool = False) -> AsyncIterator[Conversation]:
        lease = self.ships.session(self.caller, self.ship_id, self.session, scope, frees=frees)
        async with lease as use:
            yield use.conversation(self.session)

    def writing(self) -> asyncio.Lock:
        return self.ships.writing(self.ship_id, self.session)

    async def record(self, action: str, **details: Any) -> None:
        await self.service.recording.record(
            self.caller, action, self.ship_id, conversation=self.session, **details
        )

    async def run(self, request: RunRequest) -> Run:
        """Run a cell or a command. Raise as `Runs.start`."""
        self.ships.check(self.caller, self.ship_id, self.session)
        handle = await self.service.runs.start(self.caller, self.ship_id, self.session, request)
        return await handle.result()


async def operate(operation: str, payload: Mapping[str, Any], call: SessionCall) -> Response:
    """Do one operation. Raise BadRequest with the status of the problem in its text."""
    act = _OPERATIONS.get(operation)
    if act is None:
        raise BadRequest(
            f"Invalid operation type {operation[:80]!r}", hint=f"one of {', '.join(_OPERATIONS)}"
        )
    model, do = act
    try:
        with outside_is_denied():
            return await do(model.model_validate(payload), call)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise BadRequest(f'Ship returned 422: {{"detail":"{field}: {first["msg"]}"}}') from None
    except SbxError as error:
        raise BadRequest(_ship_returned(error), code="operation_failed") from error


def _ship_returned(error: SbxError) -> str:
    status = 500 if error.code == "not_text" else status_of(error)
    return f"Ship returned {status}: {json.dumps({'detail': without_host_paths(error)['message']})}"


@contextmanager
def outside_is_denied() -> Iterator[None]:
    """Raise Denied for a path that leads out of the workspace, or that cannot be changed there."""
    try:
        yield
    except InvalidPath as error:
        if error.details.get("reason") not in _OUTSIDE:
            raise
        raise Denied(error.message, code="forbidden", hint=error.hint) from error


def absolute(path: str) -> str:
    """Return the path as code inside sees it. Raise InvalidPath for one outside the workspace."""
    resolve(path)
    return posixpath.normpath(posixpath.join(_WORKSPACE, path))


def _reply(data: Mapping[str, Any]) -> Response:
    content = json.dumps({"success": True, "data": data, "error": None})
    return Response(content, media_type="application/json")


# -- code ------------------------------------------------------------------------------------------


async def _python(cell: PythonCall, call: SessionCall) -> Response:
    request = RunRequest(kind="python", code=cell.code, timeout_s=cell.timeout)
    run = await call.run(request)

    def form(run: Run) -> dict[str, Any]:
        result = run_to_json(run, encoded=True)
        text, images = text_and_images(result)
        if cell.silent:
            text, images = run.stdout + run.stderr, []
        data = {
            "success": run.ok,
            "execution_count": None if cell.silent else run.execution_count,
            "output": {"text": text.strip(), "images": images},
            "error": _python_error(run, cell.timeout),
            "kernel_id": call.session,
        }
        return {"success": True, "data": data, "error": None}

    return Response(await encoded_run(run, form), media_type="application/json")


def _python_error(run: Run, timeout_s: float | None) -> str | None:
    if run.status is Status.TIMEOUT and timeout_s is not None:
        return f"Code execution timed out after {timeout_s:g} seconds"
    error = run.error
    if error is None:
        return None
    return error.traceback_ansi or f"{error.name}: {error.value}"


async def _shell(command: ShellCall, call: SessionCall) -> Response:
    text = command.command
    try:
        if not command.shell:
            text = shlex.join(shlex.split(text))
    except ValueError as error:
        return _reply(_command_data(return_code=1, error=f"the command cannot be split: {error}"))
    if command.background:
        return _reply(await _background(text, command, call))
    request = RunRequest(
        kind="shell",
        code=text,
        cwd=command.cwd,
        env=command.env,
        timeout_s=command.timeout,
    )
    run = await call.run(request)
    if run.status is Status.TIMEOUT:
        return _reply(_command_data(return_code=-1, error="Command timed out"))
    code = -1 if run.exit_code is None else run.exit_code
    return _reply(
        _command_data(code, run.stdout.strip(), run.stderr.strip(), error=_reason(run.error))
    )


def _reason(error: RunError | None) -> str | None:
    return None if error is None else error.value


def _command_data(
    return_code: int,
    stdout: str = "",
    stderr: str = "",
    *,
    pid: int | None = None,
    error: str | None = None,
) -> dict[str, Any]:
    return {
        "success": return_code == 0,
        "return_code": return_code,
        "stdout": stdout,
        "stderr": stderr,
        "pid": pid,
        "error": error,
    }


async def _background(text: str, command: ShellCall, call: SessionCall) -> dict[str, Any]:
    """Start a command that continues after this call. Its first line is its own pid."""
    wrapped = f"echo $$; exec /bin/bash -c {shlex.quote(text)}"
    async with call.use("execute") as conversation:
        started = await conversation.commands.start(wrapped, cwd=command.cwd, env=command.env)
        line = ""
        try:
            async with asyncio.timeout(_PID_S), aclosing(started.follow()) as pieces:
                async for piece in pieces:
                    line += piece.text
                    if "\n" in line:
                        break
        except TimeoutError:
            await started.stop()
            return _command_data(-1, error="the command did not start in time")
        status = await started.status()
    pid = line.partition("\n")[0]
    if not (pid.isascii() and pid.isdecimal()):
        return _command_data(-1, error=status.reason or "the command did not start")
    return _command_data(0, pid=int(pid))


# -- files -----------------------------------------------------------------------------------------


async def _create(new: CreateFile, call: SessionCall) -> Response:
    path = absolute(new.path)
    async with call.use("files:write") as conversation:
        await conversation.files.write(path, new.content)
        await conversation.files.chmod(path, new.mode)
    await call.record("file.write", path=path)
    return _reply({"success": True, "message": f"File created: {path}", "path": path})


async def _read(wish: ReadFile, call: SessionCall) -> Response:
    path = absolute(wish.path)
    async with call.use("files:read") as conversation:
        content = await _content(conversation.files, path)
    text = _decoded(path, content, wish.encoding)
    if wish.offset is not None or wish.limit is not None:
        begin = (wish.offset or 1) - 1
        end = None if wish.limit is None else begin + wish.limit
        text = "".join(text.splitlines(keepends=True)[begin:end])
    return _reply({"content": text, "path": path, "size": len(content)})


async def _write(new: WriteFile, call: SessionCall) -> Response:
    path = absolute(new.path)
    data = _encoded(path, new.content, new.encoding)
    async with call.writing(), call.use("files:write") as conversation:
        if new.mode == "a":
            with suppress(NotFound):  # an append creates the file
                data = await _content(conversation.files, path) + data
        size = await conversation.files.write(path, data)
    await call.record("file.write", path=path, size=size)
    return _reply({"success": True, "message": f"File written: {path}", "path": path, "size": size})


async def _edit(edit: EditFile, call: SessionCall) -> Response:
    path = absolute(edit.path)
    if edit.old_string == edit.new_string:
        raise BadRequest("old_string and new_string are the same")
    if not edit.old_string:
        raise BadRequest("old_string is empty")
    async with call.writing(), call.use("files:write") as conversation:
        text = _decoded(path, await _content(conversation.files, path), edit.encoding)
        count = text.count(edit.old_string)
        if not count:
            raise BadRequest(f"old_string is not in {path}")
        if count > 1 and not edit.replace_all:
            raise BadRequest(
                f"old_string is {count} times in {path}: make it longer, or use replace_all"
            )
        data = _encoded(path, text.replace(edit.old_string, edit.new_string), edit.encoding)
        size = await conversation.files.write(path, data)
    await call.record("file.write", path=path, size=size)
    message = f"{count} occurrences replaced in {path}"
    return _reply(
        {"success": True, "message": message, "path": path, "replacements": count, "size": size}
    )


async def _delete(target: DeleteFile, call: SessionCall) -> Response:
    path = absolute(target.path)
    async with call.use("files:write", frees=True) as conversation:
        await conversation.files.delete(path)
    await call.record("file.delete", path=path)
    return _reply({"success": True, "message": f"Deleted: {path}"})


async def _list(wish: ListDirectory, call: SessionCall) -> Response:
    path = absolute(wish.path)
    async with call.use("files:read") as conversation:
        listing = await conversation.files.list(path)
    entries = sorted(
        (each for each in listing if wish.show_hidden or not each.name.startswith(".")),
        key=lambda each: (each.kind != "directory", each.name.lower(), each.name),
    )
    return _reply({"files": [entry_form(each) for each in entries], "current_path": path})


async def _content(files: WorkspaceFiles, path: str) -> bytes:
    """Return the bytes of a file. Raise TooLarge, and InvalidPath for a directory."""
    if (await files.stat(path)).kind == "directory":
        raise is_a_directory(path)
    async with await files.open_stream(path) as stream:
        if stream.size > CONTENT_MAX:
            raise too_large(path, CONTENT_MAX)
        return b"".join([chunk async for chunk in stream.chunks()])


def _decoded(path: str, content: bytes, encoding: str) -> str:
    try:
        return content.decode(_codec(encoding))
    except UnicodeDecodeError as error:
        raise BadRequest(f"{path} is not {encoding}: {error.reason}", code="not_text") from None


def _encoded(path: str, text: str, encoding: str) -> bytes:
    try:
        return text.encode(_codec(encoding))
    except UnicodeEncodeError as error:
        message = f"the content of {path} has no form in {encoding}: {error.reason}"
        raise BadRequest(message, code="invalid_content") from None


def _codec(encoding: str) -> str:
    """Raise BadRequest for a codec that does not exist, or is not one of text (such as `zip`)."""
    try:
        if "".encode(encoding) == codecs.encode("", encoding):
            return encoding
    except (LookupError, ValueError):
        pass
    raise BadRequest(f"the encoding {encoding!r} does not exist", details={"field": "encoding"})


_Operation = Callable[[Any, SessionCall], Awaitable[Response]]
_OPERATIONS: Mapping[str, tuple[type[ForeignBody], _Operation]] = {
    "shell/exec": (ShellCall, _shell),
    "ipython/exec": (PythonCall, _python),
    "fs/create_file": (CreateFile, _create),
    "fs/read_file": (ReadFile, _read),
    "fs/write_file": (WriteFile, _write),
    "fs/edit_file": (EditFile, _edit),
    "fs/delete_file": (DeleteFile, _delete),
    "fs/list_dir": (ListDirectory, _list),
}
