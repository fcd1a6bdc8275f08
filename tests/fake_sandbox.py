"""A sandbox in this process: files are a dict, and code does what a test says."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Literal

from sbx.agent.sandbox import FileChange
from sbx.errors import Conflict, NotFound
from sbx.protocol.changes import ChangeBudget
from sbx.protocol.files import FileEntry, Listing, Upload
from sbx.protocol.runs import Event, Run, RunEnd, RunStart, Status, Stdout


class FakeFiles:
    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}

    async def read_bytes(self, path: str) -> bytes:
        if path not in self.content:
            raise NotFound(f"{path} does not exist", code="file_not_found")
        return self.content[path]

    async def write(self, path: str, content: str | bytes) -> int:
        data = content.encode() if isinstance(content, str) else content
        self.content[path] = data
        return len(data)

    async def list(self, path: str = ".", *, max_depth: int = 1) -> Listing:
        return Listing([await self.stat(name) for name in sorted(self.content)])

    async def stat(self, path: str) -> FileEntry:
        return FileEntry(path, path, "file", len(await self.read_bytes(path)), 0.0)

    async def make_directory(self, path: str) -> None:
        pass

    async def find(
        self, pattern: str, path: str = ".", *, kind: Any = None, max_results: int = 1000
    ) -> Listing:
        return await self.list()


class FakeUploads:
    def __init__(self) -> None:
        self.there: list[Upload] = []

    async def put(self, path: Any, name: str | None = None) -> Upload:
        raise NotImplementedError

    async def put_bytes(self, name: str, content: bytes) -> Upload:
        upload = Upload(name, len(content), "", f"/workspace/uploads/temparea/{name}", 0.0)
        self.there.append(upload)
        return upload

    async def list(self) -> tuple[Upload, ...]:
        return tuple(self.there)


class FakeRun:
    """Prints its code and ends; code that begins with `wait` waits until it is given up."""

    def __init__(self, code: str) -> None:
        self.code = code
        self.given_up = asyncio.Event()

    async def events(self) -> AsyncGenerator[Event, None]:
        yield RunStart("run-fake")
        yield Stdout(self.code)
        if self.code.startswith("wait"):
            await self.given_up.wait()
        yield RunEnd(done(self.code))


def done(text: str) -> Run:
    return Run("run-fake", Status.OK, stdout=text, text=text, exit_code=0)


class FakeSandbox:
    """`runs` are all that were started, in their order."""

    def __init__(self) -> None:
        self.files = FakeFiles()
        self.uploads = FakeUploads()
        self.runs: list[FakeRun] = []
        self.given_up: list[str] = []
        self.started = asyncio.Event()

    def _start(self, code: str) -> FakeRun:
        self.started.set()
        self.runs.append(run := FakeRun(code))
        return run

    def start_run(self, code: str, *, timeout: float | None = None) -> FakeRun:
        return self._start(code)

    def start_shell(
        self, command: str, *, timeout: float | None = None, cwd: str | None = None
    ) -> FakeRun:
        return self._start(command)

    def start_script(self, code: str, language: str, *, timeout: float | None = None) -> FakeRun:
        return self._start(code)

    async def give_up(self, run: FakeRun, /) -> None:
        run.given_up.set()
        self.given_up.append(run.code)

    @property
    def ran(self) -> list[str]:
        return [run.code for run in self.runs]


class FakeDryRun:
    def __init__(self, sandbox: "DryRunSandbox", command: str) -> None:
        self.run = done(f"tried {command}")
        self.changes = (FileChange("/workspace/a", "added", None, 1, "+1"),)
        self.truncated = False
        self.left_out: Sequence[str] = ()
        self.state: Literal["open", "committed", "discarded"] = "open"
        self._sandbox = sandbox

    async def commit(self) -> None:
        if self._sandbox.changes_meanwhile:
            self._sandbox.changes_meanwhile -= 1
            raise Conflict("the workspace has changed", code="workspace_changed")
        self.state = "committed"

    async def discard(self) -> None:
        if self.state == "open":
            self.state = "discarded"


class DryRunSandbox(FakeSandbox):
    """`changes_meanwhile`: how many commits find that the workspace has changed."""

    def __init__(self, changes_meanwhile: int = 0) -> None:
        super().__init__()
        self.changes_meanwhile = changes_meanwhile
        self.dry_runs: list[FakeDryRun] = []
        self.refuses: Callable[[], Exception] | None = None

    async def dry_run(
        self, command: str, *, timeout: float | None = None, cwd: str | None = None
    ) -> FakeDryRun:
        if self.refuses is not None:
            raise self.refuses()
        self.dry_runs.append(made := FakeDryRun(self, command))
        return made


class FakeChanges:
    """The changes of one call: those of `write_file`, and of code that begins with `change`."""

    truncated = False
    left_out: Sequence[str] = ()

    def __init__(self, box: "ChangingSandbox") -> None:
        self.host_executables = box.host_executables
        self.sandbox = FakeSandbox()
        self.run: Run | None = None
        self.state: Literal["open", "committed", "dropped"] = "open"
        self._box = box

    @property
    def changes(self) -> Sequence[FileChange]:
        paths = [*self.sandbox.files.content, *(one for one in self.sandbox.ran if "change" in one)]
        return [FileChange(path, "added", None, 1, "+1") for path in paths]

    @property
    def is_empty(self) -> bool:
        return not self.changes

    @property
    def paths(self) -> Sequence[str]:
        return [change.path for change in self.changes]

    def within(self, allowances: Sequence[ChangeBudget]) -> bool:
        directories = tuple(allowance.below for allowance in allowances)
        return all(one.path.startswith(directories) for one in self.changes)

    async def compare(self) -> "FakeChanges":
        self.run = done(f"tried {self.sandbox.ran[-1]}") if self.sandbox.ran else None
        return self

    async def commit(self) -> None:
        if self._box.changes_meanwhile:
            self._box.changes_meanwhile -= 1
            raise Conflict("the workspace has changed", code="workspace_changed")
        self.state = "committed"

    async def rollback(self) -> None:
        if self.state == "open":
            self.state = "dropped"


class ChangingSandbox(DryRunSandbox):
    """A project: every call that may change files is tried first. `begun` are all that were."""

    sandboxed = True
    commands_allowed = False

    def __init__(self, changes_meanwhile: int = 0) -> None:
        super().__init__(changes_meanwhile)
        self.begun: list[FakeChanges] = []
        self.host_executables: dict[str, str] = {}

    async def begin(self, effect: str, /) -> FakeChanges:
        if self.refuses is not None:
            raise self.refuses()
        self.begun.append(made := FakeChanges(self))
        return made
