"""The external tools of a directory: their users, their limits, and the removal of secrets.

    {directory}/NAME.toml ─► ToolSource ─► McpServer, HttpTools, functions ─► guarded Tools

A tool has the name of its source; of several, `NAME_` and its own name. The files are read again
when they change.
"""

import asyncio
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from cachetools import TTLCache
from msgspec import Struct
from msgspec.structs import replace

from sbx.agent.external.source import (
    RESERVED,
    ToolSource,
    check_name,
    filled,
    read_source,
    source_files,
    tool_name,
)
from sbx.agent.tools.results import cut
from sbx.agent.tools.tool import Arguments, Emit, Tool, ToolCallRequest, ToolResult
from sbx.egress.secrets import Secret
from sbx.egress.unix_socket import read_secret
from sbx.egress.veil import RedactingStream, Search
from sbx.errors import BadRequest, Conflict, NotFound, SbxError, Unavailable, needs_extra
from sbx.imports import import_in_thread
from sbx.settings_files import to_toml

if TYPE_CHECKING:
    from aiolimiter import AsyncLimiter

    from sbx.agent.external.http import HttpTools
    from sbx.agent.external.mcp_server import McpServer

_READY_S = 5.0  # for servers that have just been started
_USERS_MAX = 10_000  # whose calls are counted at a time
_MINUTE_S = 60.0
_RESULTS_MAX, _CACHED_MAX = 200, 256 << 10  # results of a source, and characters of each
_ERROR_MAX = 2000  # characters
_log = logging.getLogger(__name__)
State = Literal["ready", "starting", "failed"]
User = tuple[str | None, ...]


class SourceStatus(Struct, frozen=True):
    """A source as its operator sees it. `problem`: why it has no tools, or is not connected."""

    name: str
    state: State
    source: ToolSource | None
    tools: Sequence[Tool] = ()
    problem: str | None = None

    @property
    def kind(self) -> str:
        """Return the kind of the source; an empty text for a file that is not valid."""
        return "" if self.source is None else self.source.kind


class _Open(Struct):
    """A source that is in use. `stamp` identifies the version of its file."""

    name: str
    stamp: tuple[int, ...]
    source: ToolSource
    clean: Callable[[str], str]
    limiters: "TTLCache[User, AsyncLimiter]"
    results: "TTLCache[tuple[User, str, str], ToolResult]"
    tools: Sequence[Tool] = ()
    server: "McpServer | None" = None
    http: "HttpTools | None" = None
    task: "asyncio.Task[None] | None" = None

    @property
    def status(self) -> SourceStatus:
        tools, problem = self.tools, None
        state: State = "ready"
        if self.server is not None:
            tools, problem = self.server.tools, self.server.problem
            state = "ready" if problem is None else "failed"
            if not self.server.settled.is_set():
                state = "starting"
        named = [_named(tool, self.source, self.name) for tool in tools]
        return SourceStatus(self.name, state, self.source, named, problem)

    async def close(self) -> None:
        if self.task is not None:
            self.task.cancel()
            with suppress(asyncio.CancelledError):
                await self.task
        if self.http is not None:
            await self.http.close()


class ExternalTools:
    """The tools of a directory, which need not exist. Close it.

    `additions`: where `add` writes files, the same directory by default. Files of the first one
    precede. `only`: open no other source.
    """

    def __init__(
        self, directory: Path, additions: Path | None = None, *, only: str | None = None
    ) -> None:
        self._additions = additions or directory
        self._directories = (self._additions, directory)
        self._only = only
        self._open: dict[str, _Open] = {}
        self._broken: dict[str, SourceStatus] = {}
        self._refreshing = asyncio.Lock()
        self._closed = False

    async def status(self) -> list[SourceStatus]:
        """Return all sources, by name."""
        await self.refresh()
        sources = {name: each.status for name, each in self._open.items()} | self._broken
        return [sources[name] for name in sorted(sources)]

    async def tools(
        self,
        user: User,
        is_allowed: Callable[[ToolSource], bool],
        names: Sequence[str] | None = None,
    ) -> list[Tool]:
        """Return the tools of the allowed sources. `user` identifies whose calls are counted.
        `names`: only of these sources, or tools of these names. Wait a moment for servers that have
        just been started."""
        await self.refresh()
        chosen = [each for each in self._open.values() if is_allowed(each.source)]
        waits = [each.server.settled.wait() for each in chosen if each.server is not None]
        if waits:
            with suppress(TimeoutError):
                async with asyncio.timeout(_READY_S):
                    await asyncio.gather(*waits)
        tools: dict[str, Tool] = {}
        for each in chosen:
            for tool in each.status.tools:
                if names is None or each.name in names or tool.name in names:
                    tools.setdefault(tool.name, replace(tool, act=_guarded(each, tool, user)))
        return [tool for name, tool in tools.items() if name not in RESERVED]

    async def tool(
        self, name: str, user: User, is_allowed: Callable[[ToolSource], bool]
    ) -> Tool | None:
        tools = await self.tools(user, is_allowed, [name])
        return next((tool for tool in tools if tool.name == name), None)

    async def start(self) -> None:
        """Start the servers, so that they are ready when an agent needs them."""
        try:
            await self.refresh()
        except SbxError as error:
            _log.error("the external tools cannot be used: %s", error.message)

    async def add(self, name: str, source: ToolSource) -> SourceStatus:
        """Write the file of a source and open it. Raise BadRequest `invalid_tool`, Conflict
        `tool_exists`, Unavailable `tools_not_writable` and the errors of the source: then there is
        no file."""
        if check_name(name) in await asyncio.to_thread(_stamps, self._directories):
            raise _exists(name)
        path = self._additions / f"{name}.toml"
        text = to_toml(source.model_dump(mode="json", exclude_defaults=True))
        await asyncio.to_thread(_write_new, path, text)
        try:
            await self.refresh()
            if (broken := self._broken.get(name)) is not None:
                raise Unavailable(f"{broken.problem}", code="invalid_tool")
            if name not in self._open:  # it was removed meanwhile
                raise no_source(name)
            return self._open[name].status
        except BaseException:
            await asyncio.to_thread(path.unlink, missing_ok=True)
            raise

    async def remove(self, name: str) -> None:
        """Delete the file of a source, and close it; a second time does nothing. Raise Unavailable
        `tools_not_writable`."""
        files = await asyncio.to_thread(_stamps, self._directories)
        if name in files:
            await asyncio.to_thread(_remove, files[name][1])
        await self.refresh()

    async def refresh(self) -> None:
        """Open the sources whose files are new or have changed, and close the others."""
        async with self._refreshing:
            files = {} if self._closed else await asyncio.to_thread(_stamps, self._directories)
            for name, each in list(self._open.items()):
                if files.get(name, (None,))[0] != each.stamp:
                    del self._open[name]
                    await each.close()
            self._broken.clear()
            for name, (stamp, path) in files.items():
                if name in self._open or self._only not in (None, name):
                    continue
                try:
                    source = await asyncio.to_thread(read_source, path)
                    self._open[name] = await _opened(name, stamp, source)
                except SbxError as error:
                    self._broken[name] = SourceStatus(name, "failed", None, problem=error.message)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the servers that were started."""
        self._closed = True
        await self.refresh()


def _write_new(path: Path, text: str) -> None:
    with _writable(path.parent):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        except FileExistsError:
            raise _exists(path.stem) from None
        with os.fdopen(fd, "w") as file:
            file.write(text)


def _exists(name: str) -> Conflict:
    return Conflict(
        f"there is a source of tools {name} already",
        code="tool_exists",
        hint="remove it first, or change its file",
    )


def _remove(path: Path) -> None:
    with _writable(path.parent):
        path.unlink(missing_ok=True)


@contextmanager
def _writable(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Unavailable(
            f"the directory of tools cannot be changed: {error.strerror}",
            code="tools_not_writable",
            hint=f"the operator changes the files in {directory}",
        ) from None


def no_source(name: str) -> NotFound:
    return NotFound(
        f"the source of tools {name[:80]!r} does not exist",
        code="tool_not_found",
        hint="sbx tool list shows them",
    )


def _stamps(directories: Sequence[Path]) -> dict[str, tuple[tuple[int, ...], Path]]:
    """Return the versions of files, and the files, by the names of their sources."""
    stamps: dict[str, tuple[tuple[int, ...], Path]] = {}
    for directory in directories:
        for name, path in source_files(directory).items():
            with suppress(OSError):  # it was removed meanwhile
                status = path.stat()
                stamps[name] = (status.st_ino, status.st_mtime_ns, status.st_size), path
    return stamps


async def _opened(name: str, stamp: tuple[int, ...], source: ToolSource) -> _Open:
    """Raise the errors of a source that cannot be used, without values of secrets."""
    secrets = {
        label: await asyncio.to_thread(read_secret, label, place)
        for label, place in source.secrets.items()
    }
    for label, value in secrets.items():
        Secret(label, "", (), "", value)  # it can be part of a header, and be found in an answer
    redacting = RedactingStream(
        Search((value, f"[secret {label}]".encode()) for label, value in secrets.items())
    )

    def clean(text: str) -> str:
        data = text.encode(errors="replace")
        return redacting.over(data).decode(errors="replace") if secrets else text

    each = _Open(
        name,
        stamp,
        source,
        clean,
        limiters=TTLCache(_USERS_MAX, 2 * _MINUTE_S),
        results=TTLCache(_RESULTS_MAX, source.cache),
    )
    try:
        await _load(each, secrets)
    except SbxError:
        await each.close()
        raise
    except Exception as error:  # noqa: BLE001  # code and documents of the operator
        await each.close()
        problem = clean(f"{type(error).__name__}: {error!s:.500}")
        raise Unavailable(
            f"the source {name} cannot be used: {problem}", code="invalid_tool"
        ) from None
    return each


async def _load(each: _Open, secrets: Mapping[str, str]) -> None:
    name, source = each.name, each.source
    if source.mcp is not None:
        module = await import_in_thread("sbx.agent.external.mcp_server")
        each.server = module.McpServer(
            name,
            source.mcp,
            env=filled(source.mcp.env, secrets),
            headers=filled(source.mcp.headers, secrets),
            timeout_s=source.timeout,
            clean=each.clean,
        )
        each.task = asyncio.create_task(each.server.run())
    elif source.python is not None:
        module = await import_in_thread("sbx.agent.external.functions")
        each.tools = await asyncio.to_thread(module.load_functions, name, source.python)
    else:
        http = await import_in_thread("sbx.agent.external.http")
        requests = source.http or source.openapi
        assert requests is not None
        headers = filled(requests.headers, secrets)
        tools = await asyncio.to_thread(http.HttpTools, headers, source.timeout)
        each.http = tools
        if source.http is not None:
            operations = [http.endpoint(name, source.http, source.description)]
        else:
            assert source.openapi is not None
            operations = await asyncio.to_thread(http.read_operations, name, source.openapi)
        each.tools = [tools.tool(operation) for operation in operations]


def _named(tool: Tool, source: ToolSource, name: str) -> Tool:
    """Return a tool with its full name, and with the permission of its source."""
    own = tool.name
    if source.mcp is not None or (source.python is not None and own != name):
        own = tool_name(name, own)
    return replace(
        tool,
        definition=replace(tool.definition, name=own),
        permission=source.approval,
        scope=source.scope,
        source=name,
        idempotent=source.idempotent,
    )


def _guarded(each: _Open, tool: Tool, user: User) -> Callable[[ToolCallRequest, Arguments], Any]:
    """Return the function of a tool, within the limits of its source. Its result, its output and
    its errors have no value of a secret."""
    source, clean = each.source, each.clean

    async def act(call: ToolCallRequest, arguments: Arguments) -> ToolResult:
        key = user, tool.name, json.dumps(arguments, sort_keys=True)
        if (earlier := each.results.get(key)) is not None:
            return replace(earlier, cached=True)
        await _count(each, user)
        guarded = replace(call, emit=_cleaned(call.emit, clean))
        try:
            async with asyncio.timeout(source.timeout) as limit:
                output = await tool.act(guarded, arguments)
        except SbxError as error:
            kind = BadRequest if isinstance(error, BadRequest) else Unavailable
            raise kind(
                clean(error.message), code=error.code, hint=error.hint and clean(error.hint)
            ) from None
        except Exception as error:  # noqa: BLE001  # the border of a program of others
            if isinstance(error, TimeoutError) and limit.expired():
                raise Unavailable(
                    f"{tool.name} took longer than {source.timeout:g} s", code="tool_timeout"
                ) from None
            problem = clean(cut(f"{type(error).__name__}: {error}", _ERROR_MAX))
            _log.warning("the external tool %s failed: %s", tool.name, problem)
            raise Unavailable(f"{tool.name} failed: {problem}", code="tool_failed") from None
        result = output if isinstance(output, ToolResult) else ToolResult(str(output))
        text = cut(await asyncio.to_thread(clean, result.text), source.result_max)
        result = replace(result, text=text, outputs=(), error=None)
        if source.cache and not result.is_error and len(text) <= _CACHED_MAX:
            each.results[key] = result
        return result

    return act


async def _count(each: _Open, user: User) -> None:
    """Count a call. Raise Unavailable `too_many_tool_calls`."""
    with needs_extra("external tools", "agent"):
        from aiolimiter import AsyncLimiter

    owner = user[:1]  # it chooses the ids of its users, so these get no quota of their own
    limiter = each.limiters.get(owner)
    if limiter is None:
        limiter = AsyncLimiter(each.source.calls_per_minute, _MINUTE_S)
    each.limiters[owner] = limiter  # now it is kept for two more minutes
    if not limiter.has_capacity():
        raise Unavailable(
            f"{each.name} takes {each.source.calls_per_minute} calls of an owner in a minute",
            code="too_many_tool_calls",
            hint="call it again later",
        )
    await limiter.acquire()


def _cleaned(emit: Emit, clean: Callable[[str], str]) -> Emit:
    return lambda stream, text: emit(stream, clean(text))
