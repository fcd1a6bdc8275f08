"""A sandbox for tests of tools: files in a dict, and runs whose events were written down before."""

import fnmatch
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from sbx.agent.messages import ToolCall
from sbx.agent.tools.registry import Tools
from sbx.agent.tools.tool import ToolResult
from sbx.errors import InvalidPath, NotFound, SbxError
from sbx.protocol.files import FileEntry, Kind, Listing, Upload
from sbx.protocol.runs import Event, Run, RunEnd, RunStart, Status


class FakeRun:
    """`events` is what it tells; `refused` what it raises instead of ever beginning."""

    def __init__(self, events: Sequence[Event], refused: SbxError | None = None) -> None:
        self._events = events
        self._refused = refused

    async def events(self) -> AsyncGenerator[Event, None]:
        if self._refused is not None:
            raise self._refused
        for event in self._events:
            yield event


class FakeFiles:
    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}

    async def read_bytes(self, path: str) -> bytes:
        if (content := self.content.get(_at(path))) is None:
            raise NotFound(f"'{path}' does not exist", code="file_not_found")
        return content

    async def write(self, path: str, content: str | bytes) -> int:
        data = content.encode() if isinstance(content, str) else content
        self.content[_at(path)] = data
        return len(data)

    async def list(self, path: str = ".", *, max_depth: int = 1) -> Listing:
        return Listing([await self.stat(name) for name in sorted(self.content)])

    async def stat(self, path: str) -> FileEntry:
        at = _at(path)
        return FileEntry(at.rpartition("/")[2], at, "file", len(await self.read_bytes(path)), 0.0)

    async def make_directory(self, path: str) -> None:
        raise NotImplementedError

    async def find(
        self, pattern: str, path: str = ".", *, kind: Kind | None = None, max_results: int = 1000
    ) -> Listing:
        found = [entry for entry in await self.list() if fnmatch.fnmatch(entry.name, pattern)]
        return Listing(found[:max_results])


class FakeUploads:
    async def put(self, path: str | Path, name: str | None = None) -> Upload:
        raise NotImplementedError

    async def put_bytes(self, name: str, content: bytes) -> Upload:
        raise NotImplementedError

    async def list(self) -> tuple[Upload, ...]:
        return ()


class FakeToolbox:
    """Each run tells `events`, and is written down in `asked`; a cell is never refused."""

    def __init__(self, *events: Event, refused: SbxError | None = None) -> None:
        self.files = FakeFiles()
        self.uploads = FakeUploads()
        self.events: Sequence[Event] = events
        self.refused = refused
        self.asked: list[tuple[str, ...]] = []
        self.given_up: list[object] = []

    def start_run(self, code: str, *, timeout: float | None = None) -> FakeRun:
        self.asked.append(("run", code))
        return FakeRun(self.events)

    def start_shell(
        self, command: str, *, timeout: float | None = None, cwd: str | None = None
    ) -> FakeRun:
        self.asked.append(("shell", command, str(timeout), str(cwd)))
        return FakeRun(self.events, self.refused)

    def start_script(self, code: str, language: str, *, timeout: float | None = None) -> FakeRun:
        self.asked.append(("script", code, language))
        return FakeRun(self.events, self.refused)

    async def give_up(self, run: object, /) -> None:
        self.given_up.append(run)


def ended(status: Status = Status.OK, **more: object) -> tuple[Event, ...]:
    """The events of a run that came to this."""
    run = Run("run-1", status, **more)  # type: ignore[arg-type]
    return RunStart("run-1"), RunEnd(run)


async def called(
    tools: Tools, name: str, arguments: str = "{}", box: FakeToolbox | None = None
) -> ToolResult:
    """One call, as a model wrote it, with nobody listening."""
    call = ToolCall("call-1", name, arguments)
    return await tools.call(call, box or FakeToolbox(), lambda stream, text: None)


def _at(path: str) -> str:
    if path.startswith("/") and not path.startswith("/workspace/"):
        raise InvalidPath("absolute paths …", details={"reason": "absolute_path"})
    return f"/workspace/{path.removeprefix('/workspace/')}"
