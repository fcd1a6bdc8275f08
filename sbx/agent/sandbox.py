"""The sandbox that an agent uses: one conversation, in this process, in a service, or a fake.

`sbx.Conversation` and its remote counterparts have the same methods.
"""

from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, runtime_checkable

from sbx.errors import BadRequest, TooLarge
from sbx.protocol.changes import ChangeBudget
from sbx.protocol.dry_runs import FileChange as FileChange
from sbx.protocol.files import FileEntry, Kind, Listing, Upload
from sbx.protocol.runs import Event, Run

COPIED_MAX = 64 << 20  # bytes of a file that goes from one sandbox to another


class ToolRun(Protocol):
    """A run that continues by itself."""

    def events(self) -> AsyncGenerator[Event, None]: ...


class ToolFiles(Protocol):
    async def read_bytes(self, path: str) -> bytes: ...
    async def write(self, path: str, content: str | bytes) -> int: ...
    async def list(self, path: str = ".", *, max_depth: int = 1) -> Listing: ...
    async def stat(self, path: str) -> FileEntry: ...
    async def make_directory(self, path: str) -> None: ...
    async def find(
        self, pattern: str, path: str = ".", *, kind: Kind | None = None, max_results: int = 1000
    ) -> Listing: ...


class ToolUploads(Protocol):
    async def put(self, path: str | Path, name: str | None = None) -> Upload: ...
    async def put_bytes(self, name: str, content: bytes) -> Upload: ...
    async def list(self) -> Sequence[Upload]: ...


@runtime_checkable
class ToolSandbox(Protocol):
    """A caller that starts a run and stops following it calls `give_up`, which interrupts the run.

    A sandbox may have further members; most have only some of them.

        dry_run(command, *, timeout, cwd)   return a `ToolDryRun`
        checkpoint()                        return an object with `restore` and `discard`
        save_result(name, content)          store a figure or a long result outside of the user's
                                            files, and return the path at which tools find it; other
                                            sandboxes keep them below /workspace/uploads/generated
        sandboxed, commands_allowed         of a project; see the functions of these names
        grants                              the `Grants` of a conversation; if its policy permits
                                            some, refused access becomes a question
        surroundings()                      return the `Surroundings`; others are whole sandboxes
        begin(effect)                       of a project: start a trial and return `ToolChanges`;
                                            raise TooLarge and Unavailable if the project cannot be
                                            copied
    """

    @property
    def files(self) -> ToolFiles: ...
    @property
    def uploads(self) -> ToolUploads: ...
    def start_run(self, code: str, *, timeout: float | None = None) -> ToolRun: ...
    def start_shell(
        self, command: str, *, timeout: float | None = None, cwd: str | None = None
    ) -> ToolRun: ...
    def start_script(
        self, code: str, language: str, *, timeout: float | None = None
    ) -> ToolRun: ...
    async def give_up(self, run: Any, /) -> None: ...


class Conversations(Protocol):
    """A whole sandbox, such as `sbx.AsyncSandbox` and its remote counterparts."""

    def conversation(self, name: str, /) -> ToolSandbox: ...


def one_of(sandbox: ToolSandbox | Conversations) -> ToolSandbox:
    """Return the sandbox of an agent: of a sandbox with several conversations, the `default`
    one."""
    if isinstance(sandbox, ToolSandbox):
        return sandbox
    return sandbox.conversation("default")


def in_project(sandbox: ToolSandbox) -> bool:
    """Return whether this is a sandbox over a directory of the user."""
    return hasattr(sandbox, "commands_allowed")


def is_sandboxed(sandbox: ToolSandbox) -> bool:
    """Return whether there is isolation: without it the tools act on the host itself, and every
    path of the host is reachable."""
    return bool(getattr(sandbox, "sandboxed", True))


def commands_allowed(sandbox: ToolSandbox) -> bool:
    """Return whether cells of a project may start processes. If not, commands and cells run in
    different jails."""
    return bool(getattr(sandbox, "commands_allowed", False))


class ToolDryRun(Protocol):
    """A command that ran on a frozen copy of the workspace, with the files that it would change."""

    run: Run
    changes: Sequence[FileChange]
    truncated: bool  # the list is incomplete; a commit also makes the missing changes
    left_out: Sequence[str]  # uncommitted or uncopied paths: FIFOs, sockets and others

    async def commit(self) -> None:
        """Make exactly the same changes, all or none. Raise Conflict `workspace_changed`."""
        ...

    async def discard(self) -> None:
        """Delete the copy. A second call does nothing."""
        ...


class ToolChangeSet(Protocol):
    """The file changes of one tool call, as a user sees them to decide."""

    run: Run | None  # the last run of the call
    changes: Sequence[FileChange]
    truncated: bool
    left_out: Sequence[str]
    host_executables: Mapping[str, str]  # new paths, and which program of the host would obey each

    @property
    def is_empty(self) -> bool: ...

    @property
    def paths(self) -> Collection[str]:
        """All paths that would change, relative to the project."""
        ...

    def within(self, allowances: Sequence[ChangeBudget]) -> bool:
        """Return whether every change is within one of these allowances."""
        ...


class ToolChanges(Protocol):
    """One tool call in progress. The tool acts on `sandbox`, and no change reaches the project
    before `commit`."""

    @property
    def sandbox(self) -> ToolSandbox: ...

    async def compare(self) -> ToolChangeSet:
        """Return the changes once the tool is done."""
        ...

    async def commit(self) -> None:
        """Make exactly these changes, all or none. Raise Conflict `workspace_changed`, Denied."""
        ...

    async def rollback(self) -> None:
        """Discard uncommitted changes. A second call does nothing."""
        ...


async def copy_file(
    source: ToolSandbox | Conversations,
    path: str,
    target: ToolSandbox | Conversations,
    to: str | None = None,
    *,
    max_bytes: int = COPIED_MAX,
) -> str:
    """Copy the file at `path` in `source` to `to` in `target`, and return that path. Without `to`
    the file keeps its name and goes to the working directory. An existing file is replaced.

    Raise TooLarge `file_too_large` above `max_bytes`, BadRequest `not_a_file`, and the errors of
    reading and writing. The size is checked before and after the read, because code in the sandbox
    may write to the file meanwhile.
    """
    source, target = one_of(source), one_of(target)
    entry = await source.files.stat(path)
    if entry.kind != "file":
        raise BadRequest(f"{path} is not a file but a {entry.kind}", code="not_a_file")
    _check(path, entry.size or 0, max_bytes)
    content = await source.files.read_bytes(path)
    _check(path, len(content), max_bytes)
    to = to or PurePosixPath(path).name
    await target.files.write(to, content)
    return to


def _check(path: str, size: int, limit: int) -> None:
    if size > limit:
        raise TooLarge(
            f"{path} has {size} bytes, and the limit for copies between sandboxes is {limit}",
            code="file_too_large",
            details={"limit": limit},
        )
