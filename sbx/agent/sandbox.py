"""The sandbox that an agent holds: one conversation, in this process, in a service, or a fake.

`sbx.Conversation` and its remote kin have these methods as they are.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from sbx.protocol.files import Entry, Kind, Listing, Upload
from sbx.protocol.rehearsals import FileChange as FileChange
from sbx.protocol.runs import Event, Run


class LiveRun(Protocol):
    """A run that goes on by itself."""

    def events(self) -> AsyncGenerator[Event, None]: ...


class Files(Protocol):
    async def read_bytes(self, path: str) -> bytes: ...
    async def write(self, path: str, content: str | bytes) -> int: ...
    async def list(self, path: str = ".", *, max_depth: int = 1) -> Listing: ...
    async def stat(self, path: str) -> Entry: ...
    async def make_directory(self, path: str) -> None: ...
    async def find(
        self, pattern: str, path: str = ".", *, kind: Kind | None = None, max_results: int = 1000
    ) -> Listing: ...


class Uploads(Protocol):
    async def put(self, path: str | Path, name: str | None = None) -> Upload: ...
    async def put_bytes(self, name: str, content: bytes) -> Upload: ...
    async def list(self) -> Sequence[Upload]: ...


@runtime_checkable
class Sandbox(Protocol):
    """Whoever starts a run and follows it no more says so by `give_up`, which interrupts it."""

    @property
    def files(self) -> Files: ...
    @property
    def uploads(self) -> Uploads: ...
    def start_run(self, code: str, *, timeout: float | None = None) -> LiveRun: ...
    def start_shell(
        self, command: str, *, timeout: float | None = None, cwd: str | None = None
    ) -> LiveRun: ...
    def start_script(
        self, code: str, language: str, *, timeout: float | None = None
    ) -> LiveRun: ...
    async def give_up(self, run: Any, /) -> None: ...


class Conversations(Protocol):
    """A whole sandbox, as `sbx.AsyncSandbox` and its remote kin are."""

    def conversation(self, name: str, /) -> Sandbox: ...


def one_of(sandbox: Sandbox | Conversations) -> Sandbox:
    """What an agent holds of it: of a whole sandbox its conversation `default`."""
    if isinstance(sandbox, Sandbox):
        return sandbox
    return sandbox.conversation("default")


@runtime_checkable
class SavesResults(Protocol):
    """A sandbox that has a place of its own for files that nobody asked for: figures, long results.
    Others keep them below /workspace/uploads/generated."""

    async def save_result(self, name: str, content: bytes, /) -> str:
        """Keep it; the path at which tools and the code find it."""
        ...


@runtime_checkable
class InProject(Protocol):
    """A sandbox over a person's own directory."""

    @property
    def sandboxed(self) -> bool:
        """False: it acts on the host itself, and every path of the host is a path of it."""
        ...

    @property
    def commands_allowed(self) -> bool:
        """Whether cells may start processes; if not, commands run in another jail than they."""
        ...


def is_sandboxed(sandbox: Sandbox) -> bool:
    """Whether there are walls: without them its tools act on the host itself."""
    return not isinstance(sandbox, InProject) or sandbox.sandboxed


class Rehearsal(Protocol):
    """A command that was run on a frozen copy of the workspace, and would change these files."""

    run: Run
    changes: Sequence[FileChange]
    truncated: bool  # there is more than is told, and a commit makes that, too
    left_out: Sequence[str]  # what is not committed, or was not there: FIFOs, sockets and the like

    async def commit(self) -> None:
        """Make the very same changes, all or none. Raises Conflict `workspace_changed`."""
        ...

    async def discard(self) -> None:
        """Nothing of it remains. A second time does nothing."""
        ...


@runtime_checkable
class Rehearses(Protocol):
    """A sandbox that can."""

    async def rehearse(
        self, command: str, *, timeout: float | None = None, cwd: str | None = None
    ) -> Rehearsal: ...


class ChangeSet(Protocol):
    """The file changes of one tool call, as a person decides by them."""

    run: Run | None  # the last run of the call
    changes: Sequence[FileChange]
    truncated: bool
    left_out: Sequence[str]
    host_executables: Mapping[str, str]  # new paths, and which program of the host would obey each

    @property
    def is_empty(self) -> bool: ...

    def within(self, prefixes: Sequence[str]) -> bool:
        """Return whether every change lies below one of these directories."""
        ...


class Changes(Protocol):
    """One tool call on its way: the tool acts on `sandbox`, and nothing that it changes is in the
    project before `commit`."""

    @property
    def sandbox(self) -> Sandbox: ...

    async def compare(self) -> ChangeSet:
        """Return the changes once the tool is done."""
        ...

    async def commit(self) -> None:
        """Make exactly these changes, all or none. Raises Conflict `workspace_changed`, Denied."""
        ...

    async def rollback(self) -> None:
        """Drop what was not committed. A second time does nothing."""
        ...


@runtime_checkable
class KeepsChanges(Protocol):
    """A sandbox over a project that shows the changes of a call before it makes them."""

    async def begin(self, effect: Literal["write", "code", "command"], /) -> Changes:
        """Raises TooLarge and Unavailable where the project cannot be copied."""
        ...


class Checkpoint(Protocol):
    """The files of a workspace as they were at one moment."""

    async def restore(self) -> Sequence[FileChange]:
        """Make them so again; what that changed."""
        ...

    async def discard(self) -> None: ...


@runtime_checkable
class Restores(Protocol):
    """A sandbox whose files can be put back."""

    async def checkpoint(self) -> Checkpoint: ...
