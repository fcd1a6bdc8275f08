"""The process that has the directories of projects, for a service that was started as root.

    service (parses HTTP, no right on these directories)
        │ calls.py, over a socket pair
    project server (a separate runtime and broker, no HTTP, no network)
        │ map_owner, beneath project_dirs, of project_owners
    broker ── jails

All of it ends with the socket, and so with the service.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from socket import socket
from typing import Any

import msgspec
from msgspec import Struct, field

from sbx import errors
from sbx.aio import in_thread, run_to_completion
from sbx.protocol import events as event_form
from sbx.protocol.files import Listing, Upload
from sbx.runtime.run.active_run import ActiveRun
from sbx.runtime.runtime import Runtime
from sbx.service.projects import calls
from sbx.service.projects.changes import CodeChanges, WriteChanges
from sbx.service.projects.sandbox import open_project
from sbx.service.projects.session import ProjectSession, python_in
from sbx.workspace.allowed_paths import AllowedProjects
from sbx.workspace.uploads import UploadLimits

_log = logging.getLogger(__name__)
_CALLS_MAX = 1024  # at once: more are a service in foreign hands
_EVENTS_MAX = 256  # of one reply
_CHUNKS_MAX = 2  # of an upload that wait for the disk

_Changes = CodeChanges | WriteChanges


class _Upload(Struct, eq=False):
    """One that comes in: None is the end of it."""

    chunks: "asyncio.Queue[bytes | None]"
    stored: "asyncio.Task[Upload]"


class _Opened(Struct, eq=False):
    """A sandbox, or the changes of one tool call in it, and the runs that were started there."""

    session: ProjectSession
    acts: ProjectSession | _Changes
    runs: dict[int, ActiveRun] = field(default_factory=dict)
    uploads: dict[int, _Upload] = field(default_factory=dict)


class ProjectServer:
    """Answers one service. `directories`: which directories may be projects."""

    def __init__(self, runtime: Runtime, directories: AllowedProjects) -> None:
        self._runtime = runtime
        self._directories = directories
        self._opened: dict[int, _Opened] = {}
        self._numbers = itertools.count(1)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._writer: asyncio.StreamWriter | None = None

    async def serve(self, sock: socket) -> None:
        """Answer until the service closes its end, and close every sandbox then."""
        reader, self._writer = await asyncio.open_unix_connection(sock=sock)
        try:
            await self._send(calls.CallReply(0))
            while (body := await calls.read_frame(reader)) is not None:
                self._take(calls.CALLS.decode(body))
        except (ValueError, ConnectionError) as error:
            _log.error("the service sent an invalid call, and the connection ends: %s", error)
        finally:
            await run_to_completion(self._close())

    def _take(self, message: calls.Call | calls.Cancel) -> None:
        if isinstance(message, calls.Cancel):
            if (task := self._tasks.get(message.id)) is not None:
                task.cancel()
        elif len(self._tasks) >= _CALLS_MAX or message.id in self._tasks:
            raise ValueError(f"the call {message.id} is one too many")
        else:
            task = asyncio.create_task(self._answer(message))
            self._tasks[message.id] = task
            task.add_done_callback(lambda _: self._tasks.pop(message.id))

    async def _answer(self, call: calls.Call) -> None:
        opened = self._opened.get(getattr(call.request, "of", 0))
        try:
            result = await self._act(call.request, opened)
            raw = msgspec.Raw(calls.ENCODER.encode(result))
            reply = calls.framed(calls.CallReply(call.id, raw, **_state(opened)))
        except errors.SbxError as error:
            described = calls.error_of(error)
            reply = calls.framed(calls.CallReply(call.id, **described, **_state(opened)))
        except Exception as error:  # noqa: BLE001  # the border to the service
            _log.error("a call of the service failed", exc_info=error)
            broken = errors.Broken("the project server failed in a call: see its log")
            reply = calls.framed(calls.CallReply(call.id, **calls.error_of(broken)))
        await self._write(reply)

    async def _send(self, reply: calls.CallReply) -> None:
        await self._write(calls.framed(reply))

    async def _write(self, frame: bytes) -> None:
        assert self._writer is not None
        try:
            self._writer.write(frame)
            await self._writer.drain()
        except ConnectionError:  # the service has ended, and the loop above sees it
            pass

    async def _close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        every, self._opened = list(self._opened.values()), {}
        ends = [_end(entry) for entry in every]
        for end in await asyncio.gather(*ends, return_exceptions=True):
            if isinstance(end, Exception):
                _log.error("the sandbox of a project could not be closed", exc_info=end)
        assert self._writer is not None
        self._writer.close()

    # -- one call ---------------------------------------------------------------------------------

    async def _act(self, request: calls.Request, opened: _Opened | None) -> Any:
        match request:
            case calls.Ping():
                return self._runtime.alive
            case calls.Resolve(directory):
                return str(await in_thread(self._directories.resolve, directory))
            case calls.NamesIn(directory, limit):
                return await in_thread(self._directories.names_in, directory, limit)
            case calls.Look(directory):
                return await in_thread(self._directories.check, Path(directory))
            case calls.Open():
                return await self._open(request)
        if opened is None:
            raise errors.Closed("the sandbox of this project is closed", hint="begin it again")
        match request:
            case calls.Close(of):
                self._opened.pop(of, None)
                return await _end(opened)
            case calls.StartCall() | calls.Follow() | calls.GiveUp():
                return await self._act_on_run(request, opened)
            case calls.ReadPolicy():
                return opened.session.sandbox.policy.model_dump(mode="json")
            case calls.ReadSurroundings():
                return await opened.session.surroundings()
            case calls.AddGrant(_, access, duration, by):
                return await opened.session.grants.grant(access, duration, by)
            case calls.Allow() | calls.Begin() | calls.Compare() | calls.Commit():
                return await self._act_on_changes(request, opened)
            case calls.Rollback():
                return await self._act_on_changes(request, opened)
            case calls.ListUploads() | calls.DeleteUpload() | calls.BeginUpload():
                return await self._act_on_uploads(request, opened)
            case calls.AddToUpload() | calls.EndUpload():
                return await self._act_on_uploads(request, opened)
        return await _act_on_files(request, opened)

    async def _open(self, request: calls.Open) -> int:
        directory = Path(request.directory)
        await in_thread(self._directories.check, directory)
        lost = frozenset((python_in(request.allowed),)) if request.lost else frozenset[str]()
        sandbox = await open_project(
            self._runtime,
            request.policy,
            directory,
            narrower=request.narrower,
            env=request.env,
            lost=lost,
        )
        session = ProjectSession(sandbox, commands_allowed=request.allowed)
        return self._keep(_Opened(session, session))

    async def _act_on_changes(self, request: calls.Request, opened: _Opened) -> Any:
        match request, opened.acts:
            case calls.Allow(), ProjectSession() as session:
                return await session.allow_commands()
            case calls.Begin(_, effect), ProjectSession() as session:
                return self._keep(_Opened(session, await session.begin(effect)))
            case calls.Compare(), (CodeChanges() | WriteChanges()) as changes:
                return _compared(await changes.compare())
            case calls.Commit(), (CodeChanges() | WriteChanges()) as changes:
                return await changes.commit()
            case calls.Rollback(of), (CodeChanges() | WriteChanges()):
                self._opened.pop(of, None)
                return await _end(opened)
        raise _not_there()

    def _keep(self, opened: _Opened) -> int:
        number = next(self._numbers)
        self._opened[number] = opened
        return number

    async def _act_on_run(self, request: calls.Request, opened: _Opened) -> Any:
        match request:
            case calls.StartCall(_, code, None, timeout):
                live = opened.acts.start_run(code, timeout=timeout)
            case calls.StartCall(_, command, "", timeout, cwd):
                live = opened.acts.start_shell(command, timeout=timeout, cwd=cwd)
            case calls.StartCall(_, code, str() as language, timeout):
                live = opened.acts.start_script(code, language, timeout=timeout)
            case calls.Follow(_, run, after):
                return await self._followed(opened, run, after)
            case calls.GiveUp(_, run):
                live = _of(opened.runs, run)
                del opened.runs[run]
                return await opened.acts.give_up(live)
            case _:
                raise _not_there()
        number = next(self._numbers)
        opened.runs[number] = live
        return number

    async def _followed(self, opened: _Opened, run: int, after: int) -> list[bytes]:
        live = _of(opened.runs, run)
        events = await live.log.read(after, _EVENTS_MAX)
        if not events:
            opened.runs.pop(run, None)
        return [event_form.encode(event_form.to_json(event, encoded=True)) for event in events]

    async def _act_on_uploads(self, request: calls.Request, opened: _Opened) -> Any:
        uploads = opened.session.sandbox.uploads
        match request:
            case calls.ListUploads():
                return list(await uploads.list())
            case calls.DeleteUpload(_, name):
                return await uploads.delete(name)
            case calls.BeginUpload(_, name):
                number = next(self._numbers)
                chunks: asyncio.Queue[bytes | None] = asyncio.Queue(_CHUNKS_MAX)
                # The service has checked it against the limits of the conversation.
                put = uploads.put_stream(name, _chunks(chunks), UploadLimits())
                opened.uploads[number] = _Upload(chunks, asyncio.create_task(put))
                return number
            case calls.AddToUpload(_, upload, chunk):
                return await _put(_of(opened.uploads, upload), chunk)
            case calls.EndUpload(_, upload, whole):
                there = _of(opened.uploads, upload)
                del opened.uploads[upload]
                if not whole:
                    return await _dropped(there)
                await _put(there, None)
                return await there.stored
        raise _not_there()


async def _act_on_files(request: calls.Request, opened: _Opened) -> Any:
    files = opened.acts.files
    match request:
        case calls.ReadFile(_, path):
            return await files.read_bytes(path)
        case calls.WriteFile(_, path, content):
            return await files.write(path, content)
        case calls.ListFiles(_, path, max_depth):
            return _found(await files.list(path, max_depth=max_depth))
        case calls.Stat(_, path):
            return await files.stat(path)
        case calls.MakeDirectory(_, path):
            return await files.make_directory(path)
        case calls.Find(_, pattern, path, kind, most):
            return _found(await files.find(pattern, path, kind=kind, max_results=most))
        case calls.SaveResult(_, name, content):
            return await opened.session.save_result(name, content)
    raise _not_there()


def _state(opened: _Opened | None) -> dict[str, Any]:
    """Return the fields of a reply that describe the sandbox; {} if it is closed."""
    if opened is None:
        return {}
    session = opened.session
    try:
        state: dict[str, Any] = {"stateful": session.stateful}
    except errors.Closed:
        return {}
    if session.grants.permitted:
        state["grants"] = [grant.id for grant in session.grants.active]
        state["refused"] = list(session.grants.take_refused())
    return state


def _found(listing: Listing) -> calls.FoundReply:
    return calls.FoundReply(list(listing), listing.complete)


def _compared(there: Any) -> calls.Compared:
    run = there.run
    result = None if run is None else event_form.encode(event_form.run_to_json(run, encoded=True))
    return calls.Compared(
        result,
        list(there.changes),
        there.truncated,
        list(there.left_out),
        calls.touched(there.planned),
    )


async def _end(opened: _Opened) -> None:
    for upload in opened.uploads.values():
        await _dropped(upload)
    acts = opened.acts
    await run_to_completion(acts.close() if isinstance(acts, ProjectSession) else acts.rollback())


async def _put(upload: _Upload, chunk: bytes | None) -> None:
    """Wait until there is room for it, or the upload has failed, which it raises."""
    putting = asyncio.ensure_future(upload.chunks.put(chunk))
    try:
        await asyncio.wait({putting, upload.stored}, return_when=asyncio.FIRST_COMPLETED)
        if not putting.done():
            await upload.stored
    finally:
        putting.cancel()


async def _dropped(upload: _Upload) -> None:
    upload.stored.cancel()
    await asyncio.gather(upload.stored, return_exceptions=True)


async def _chunks(queue: "asyncio.Queue[bytes | None]") -> AsyncIterator[bytes]:
    while (chunk := await queue.get()) is not None:
        yield chunk


def _of(there: dict[int, Any], number: int) -> Any:
    if number not in there:
        raise _not_there()
    return there[number]


def _not_there() -> errors.NotFound:
    return errors.NotFound("the project server knows nothing of that")
