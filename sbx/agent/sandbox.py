"""The sandbox that an agent holds: one conversation, in this process, in a service, or a fake.

`sbx.Conversation`, `sbx.AsyncSandbox` and their remote kin have these methods as they are.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from sbx.protocol.files import Entry, Kind, Listing, Upload
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
    async def list(self) -> tuple[Upload, ...]: ...


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


@dataclass(frozen=True, slots=True)
class FileChange:
    """What became of one file. Sizes in bytes, None where there is none; `diff` is a unified diff
    of a small text."""

    path: str
    kind: Literal["added", "changed", "removed"]
    size_before: int | None
    size_after: int | None
    diff: str | None = None


class Rehearsal(Protocol):
    """A command that was run on a frozen copy of the workspace, and would change these files."""

    run: Run
    changes: Sequence[FileChange]
    truncated: bool  # there are more changes than told

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
