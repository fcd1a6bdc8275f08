"""filesystem.Filesystem: the tree of files, and watches.

A program inside does the work (sbx/api/inner_files.py). A watch sees the workspace only.
"""

import asyncio
import json
import posixpath
import secrets
import stat
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from sbx.aio import kept_with
from sbx.api.auth import StackDep
from sbx.api.e2b import connect, paths
from sbx.api.e2b.connect import Message
from sbx.api.e2b.processes import check_user
from sbx.api.e2b.target import TargetDep
from sbx.api.encoding import list_reply
from sbx.api.errors import iso
from sbx.api.inner_files import InnerEntry, InnerFiles, is_in_workspace
from sbx.api.slots import take_slot
from sbx.api.surfaces import ENVD_PORT
from sbx.errors import Conflict, InvalidPath, NotFound, SbxError, Unavailable
from sbx.protocol.files import FileEvent
from sbx.runtime.conversation import Conversation
from sbx.service.limits import Slot

router = APIRouter(prefix=f"/e2b/{ENVD_PORT}/filesystem.Filesystem", include_in_schema=False)

_TYPES = {
    "file": "FILE_TYPE_FILE",
    "directory": "FILE_TYPE_DIRECTORY",
    "symlink": "FILE_TYPE_SYMLINK",
}
_CHANGES = {
    "created": "EVENT_TYPE_CREATE",
    "modified": "EVENT_TYPE_WRITE",
    "deleted": "EVENT_TYPE_REMOVE",
}
_WATCHERS_MAX = 16  # of one conversation
UNREAD_MAX = 1 << 20  # bytes of the unread events of one watcher
_EVENT_SIZE = 100  # bytes, the approximate overhead of one event
_KEEPALIVE: dict[str, Any] = {"keepalive": {}}


class PathRequest(Message):
    path: str = ""


class ListRequest(PathRequest):
    depth: Annotated[int, Field(ge=0, le=1000)] = 1


class MoveRequest(Message):
    source: str = ""
    destination: str = ""


class WatchRequest(PathRequest):
    recursive: bool | None = None
    include_entry: bool | None = None


class WatcherRequest(Message):
    watcher_id: str = ""


@router.post("/Stat")
async def stat_(request: Request, target: TargetDep) -> dict[str, Any]:
    path = await _path(request)
    async with target.use() as conversation:
        return {"entry": await entry_at(conversation, path)}


@router.post("/ListDir")
async def list_(request: Request, target: TargetDep) -> Response:
    check_user(request)
    message = await connect.unary(request, ListRequest)
    path = paths.absolute(message.path)
    async with target.use() as conversation:
        inner = InnerFiles(conversation)
        await _check_directory(inner, path)
        call = {"act": "list", "path": paths.inside(path), "depth": message.depth or 1}
        (answer,) = await inner.call(call)
    return await list_reply("entries", answer.each_entry(), lambda each: shown(each, path))


@router.post("/MakeDir")
async def make_directory(request: Request, target: TargetDep) -> dict[str, Any]:
    path = await _path(request)
    call = {"act": "make_directory", "path": paths.inside(path), "mode": None}
    async with target.use() as conversation:
        try:
            (answer,) = await InnerFiles(conversation).call(call)
        except Conflict as error:
            raise InvalidPath(error.message) from None  # it is a file
        if not answer.is_new:
            raise Conflict(f"{path} exists already", code="file_exists")
        await target.record("directory.create", path=path)
        return {"entry": await entry_at(conversation, path)}


@router.post("/Remove")
async def remove(request: Request, target: TargetDep) -> dict[str, Any]:
    """Delete a file, or a directory with all below it. A missing one is a success."""
    path = await _path(request)
    async with target.use() as conversation:
        call = {"act": "delete", "path": paths.inside(path), "tree": True}
        await InnerFiles(conversation).call(call)
    await target.record("file.delete", path=path)
    return {}


@router.post("/Move")
async def move(request: Request, target: TargetDep) -> dict[str, Any]:
    check_user(request)
    message = await connect.unary(request, MoveRequest)
    source, destination = paths.absolute(message.source), paths.absolute(message.destination)
    call = {
        "act": "move",
        "source": paths.inside(source),
        "target": paths.inside(destination),
        "replace": True,
    }
    async with target.use() as conversation:
        await InnerFiles(conversation).call(call)
        await target.record("file.move", path=source, target=destination)
        return {"entry": await entry_at(conversation, destination)}


async def _path(request: Request) -> str:
    check_user(request)
    return paths.absolute((await connect.unary(request, PathRequest)).path)


async def _check_directory(inner: InnerFiles, path: str) -> None:
    """Raise NotFound, and InvalidPath for a file."""
    entry = await inner.stat(paths.inside(path))
    if "directory" not in (entry.kind, entry.target_kind):
        raise InvalidPath(f"{path} is not a directory")


async def entry_at(conversation: Conversation, path: str) -> dict[str, Any]:
    """Return the entry at a path of `absolute`."""
    return shown(await InnerFiles(conversation).stat(paths.inside(path)), path)


def shown(entry: InnerEntry, requested: str) -> dict[str, Any]:
    """Return an entry as EntryInfo. A link has the type and the mode of its target. Without a
    target it is a link: the SDK leaves entries without a type out of lists."""
    path = paths.shown(entry.path, requested)
    is_link = entry.kind == "symlink"
    kind = entry.target_kind if is_link else entry.kind
    mode = entry.mode if entry.target_mode is None else entry.target_mode
    body: dict[str, Any] = {
        "name": posixpath.basename(path) or "/",
        "type": _TYPES.get(kind or entry.kind, "FILE_TYPE_UNSPECIFIED"),
        "path": path,
        "size": str(entry.size),
        "mode": mode,
        "permissions": "Lrwxrwxrwx" if is_link else _permissions(entry),
        "owner": entry.owner,
        "group": entry.group,
        "modifiedTime": iso(entry.modified_s),
    }
    if is_link:
        body["isSymlink"] = True
        body["symlinkTarget"] = paths.shown(entry.target or "", requested)
    if entry.attributes:
        body["metadata"] = entry.attributes
    return body


def _permissions(entry: InnerEntry) -> str:
    kind = {"directory": stat.S_IFDIR, "file": stat.S_IFREG}.get(entry.kind, 0)
    return stat.filemode(kind | entry.mode).replace("?", "-")


# -- watches ---------------------------------------------------------------------------------------


class Watcher:
    """A watch whose events a client fetches from time to time. The unread ones are JSON, which
    takes a tenth of the memory; beyond the limit the oldest are dropped."""

    def __init__(self, events: AsyncGenerator[dict[str, Any], None], slot: Slot | None) -> None:
        self._events = events
        self._slot = slot
        self._unread: deque[bytes] = deque()
        self._size = 0
        self._task: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Return as soon as no later event can be missed. Raise as `_changes`."""
        await anext(self._events)
        self._task = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        try:
            async with aclosing(self._events) as events:
                with suppress(SbxError):
                    async for event in events:
                        self._append(json.dumps(event, separators=(",", ":")).encode("ascii"))
        finally:
            if self._slot is not None:
                self._slot.end()

    def _append(self, event: bytes) -> None:
        self._unread.append(event)
        self._size += len(event) + _EVENT_SIZE
        while self._size > UNREAD_MAX:
            self._size -= len(self._unread.popleft()) + _EVENT_SIZE

    def take(self) -> bytes:
        """Return the unread events as the body of a reply, and forget them."""
        body = b'{"events":[%b]}' % b",".join(self._unread)
        self._unread.clear()
        self._size = 0
        return body

    async def end(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])


class _Watchers(dict[str, Watcher]):
    """The watchers of a conversation, by id."""


@router.post("/CreateWatcher")
async def create_watcher(request: Request, target: TargetDep) -> dict[str, str]:
    """Create a watcher, which counts among the followers of its owner until it is removed."""
    check_user(request)
    message = await connect.unary(request, WatchRequest)
    async with target.use() as conversation:
        watchers = kept_with(conversation, _Watchers)
        if len(watchers) >= _WATCHERS_MAX:
            raise Unavailable("too many watchers; remove one", code="too_many_watches")
        watcher = Watcher(_changes(conversation, message), take_slot(request, "followers"))
        await watcher.begin()
        watcher_id = secrets.token_hex(8)
        watchers[watcher_id] = watcher
    return {"watcherId": watcher_id}


@router.post("/GetWatcherEvents")
async def get_watcher_events(request: Request, target: TargetDep) -> Response:
    message = await connect.unary(request, WatcherRequest)
    async with target.use(starts=False) as conversation:
        events = _watcher(conversation, message.watcher_id).take()
    return Response(events, media_type="application/json")


@router.post("/RemoveWatcher")
async def remove_watcher(request: Request, target: TargetDep) -> dict[str, Any]:
    message = await connect.unary(request, WatcherRequest)
    async with target.use(starts=False) as conversation:
        watcher = _watcher(conversation, message.watcher_id)
        del kept_with(conversation, _Watchers)[message.watcher_id]
        await watcher.end()
    return {}


def _watcher(conversation: Conversation, watcher_id: str) -> Watcher:
    watcher = kept_with(conversation, _Watchers).get(watcher_id)
    if watcher is None:
        raise NotFound(f"the watcher {watcher_id[:80]} does not exist")
    return watcher


@router.post("/WatchDir")
async def watch(request: Request, target: TargetDep, stack: StackDep) -> Response:
    check_user(request)
    message = await connect.first(request, WatchRequest)
    conversation = await stack.enter_async_context(target.use())
    events = _stream(_changes(conversation, message))
    return await connect.stream(request, events, keepalive=_KEEPALIVE)


async def _stream(
    changes: AsyncGenerator[dict[str, Any], None],
) -> AsyncGenerator[dict[str, Any], None]:
    async with aclosing(changes):
        await anext(changes)
        yield {"start": {}}
        async for change in changes:
            yield {"filesystem": change}


async def _changes(
    conversation: Conversation, message: WatchRequest
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield an empty message when the watch has begun, then each change. Raise NotFound,
    InvalidPath."""
    path = paths.absolute(message.path)
    top = paths.inside(path)
    await _check_directory(InnerFiles(conversation), path)
    if top != paths.inside(paths.HOME) and not is_in_workspace(top):
        raise InvalidPath(f"{path}: only directories below {paths.HOME} can be watched")
    events = conversation.files.watch(top, recursive=bool(message.recursive))
    async with aclosing(events):
        async for event in events:
            if event.kind == "started":
                yield {}
            elif (kind := _CHANGES.get(event.kind)) is not None and event.path != top:
                yield await _change(conversation, event, kind, top, path, message)


async def _change(
    conversation: Conversation,
    event: FileEvent,
    kind: str,
    top: str,
    path: str,
    message: WatchRequest,
) -> dict[str, Any]:
    body: dict[str, Any] = {"name": posixpath.relpath(event.path, top), "type": kind}
    if message.include_entry and event.kind != "deleted":
        with suppress(SbxError):  # it is gone already
            body["entry"] = await entry_at(conversation, paths.shown(event.path, path))
    return body
