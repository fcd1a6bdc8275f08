"""The targets of tools in a project: no change is in the project before a decision.

    CodeChanges    code and commands, on the working copy (working_copy.py)
    WriteChanges   a file that a tool writes as a whole: compared with the project, without a copy

Both end by `commit` or `rollback`.
"""

from dataclasses import replace
from pathlib import Path
from typing import Protocol

from sbx import errors
from sbx.agent.sandbox import ToolUploads
from sbx.aio import run_to_completion
from sbx.policy import Policy
from sbx.protocol.files import FileEntry, Kind, Listing
from sbx.runtime.files.files import WorkspaceFiles
from sbx.runtime.files.open_files import OpenFiles
from sbx.runtime.honeytokens import look
from sbx.runtime.run.active_run import ActiveRun
from sbx.runtime.snapshots.changes import Changes, ChangeSet, effect_of
from sbx.runtime.snapshots.snapshots import Snapshot, Snapshots
from sbx.runtime.snapshots.working_copy import COMMAND_ENV, Transaction
from sbx.service.projects.sandbox import ProjectConversation, in_project
from sbx.workspace.errors import translate, wrong_path
from sbx.workspace.snapshots.diff import plain
from sbx.workspace.snapshots.manifest import FileNode, Manifest, PlannedChange, Relative, relative
from sbx.workspace.snapshots.scan import ScanScope, digest, node_at


class SessionParts(Protocol):
    """The parts of a project's sandbox in addition to its files."""

    @property
    def files(self) -> WorkspaceFiles: ...
    @property
    def uploads(self) -> ToolUploads: ...
    async def save_result(self, name: str, content: bytes, /) -> str: ...
    def start_run(self, code: str, *, timeout: float | None = None) -> ActiveRun: ...
    async def give_up(self, run: ActiveRun, /) -> None: ...


class CodeChanges:
    """A sandbox over the working copy, for one call."""

    sandboxed = True
    commands_allowed = False  # in the kernel of the cells

    def __init__(
        self,
        session: SessionParts,
        conversation: ProjectConversation,
        transaction: Transaction,
        policy: Policy,
    ) -> None:
        self.files = _CopyFiles(session.files, conversation, transaction, policy)
        self.uploads = session.uploads
        self.save_result = session.save_result
        self._conversation = conversation
        self._transaction = transaction
        self.compare = transaction.compare
        self.commit = transaction.commit
        self.rollback = transaction.rollback

    @property
    def sandbox(self) -> "CodeChanges":
        return self

    def start_run(self, code: str, *, timeout: float | None = None) -> ActiveRun:
        """Start a cell in the kernel over the copy. Raise as `Conversation.start_run`."""
        run = self._transaction.python.start_run(code, timeout=timeout)
        return self._transaction.follow(run)

    def start_shell(
        self, command: str, *, timeout: float | None = None, cwd: str | None = None
    ) -> ActiveRun:
        """Start a command on the copy, without network. Raise as `Conversation.start_shell`."""
        jail = self._transaction.jail
        run = jail.start_shell(command, timeout=timeout, cwd=cwd, env=COMMAND_ENV)
        return self._transaction.follow(run)

    def start_script(self, code: str, language: str, *, timeout: float | None = None) -> ActiveRun:
        """Start a script on the copy, without network. Raise as `Conversation.start_script`."""
        make = self._conversation.prepare_script(code, language, env=COMMAND_ENV)
        time_s = self._conversation.script_timeout(timeout)
        return self._transaction.follow(self._transaction.jail.start_program(make, time_s))

    async def give_up(self, run: ActiveRun, /) -> None:
        await self._transaction.give_up(run)


class _CopyFiles:
    """The files of the copy; uploads and results are those of the sandbox."""

    def __init__(
        self,
        beside: WorkspaceFiles,
        conversation: ProjectConversation,
        transaction: Transaction,
        policy: Policy,
    ) -> None:
        async def opened() -> OpenFiles:
            return transaction.files

        self._beside = beside
        self._conversation = conversation
        self._copy = WorkspaceFiles(opened, policy, transaction.python.borrow_kernel)
        self._copy.honeytokens = beside.honeytokens

    async def _at(self, path: str) -> WorkspaceFiles:
        opened = await self._conversation.opened()
        return self._beside if in_project(opened, path) is None else self._copy

    async def read_bytes(self, path: str) -> bytes:
        return await (await self._at(path)).read_bytes(path)

    async def write(self, path: str, content: str | bytes) -> int:
        return await (await self._at(path)).write(path, content)

    async def list(self, path: str = ".", *, max_depth: int = 1) -> Listing:
        return await (await self._at(path)).list(path, max_depth=max_depth)

    async def stat(self, path: str) -> FileEntry:
        return await (await self._at(path)).stat(path)

    async def make_directory(self, path: str) -> None:
        await (await self._at(path)).make_directory(path)

    async def find(
        self, pattern: str, path: str = ".", *, kind: Kind | None = None, max_results: int = 1000
    ) -> Listing:
        at = await self._at(path)
        return await at.find(pattern, path, kind=kind, max_results=max_results)


class WriteChanges:
    """The sandbox of a tool that only reads and writes files: nothing is copied, and no jail
    starts. A run of such a tool runs in the kernel of the cells, on the working copy."""

    sandboxed = True
    commands_allowed = False

    def __init__(
        self,
        session: SessionParts,
        opened: OpenFiles,
        copies: Snapshots,
        policy: Policy,
        *,
        asks_about_host_executables: bool = False,
    ) -> None:
        """`asks_about_host_executables`: a new one is a change that a person decides about; else it
        is refused. One that exists is refused in any case."""
        self.uploads = session.uploads
        self.save_result = session.save_result
        self.start_run = session.start_run
        self.give_up = session.give_up
        self.files = _StagedFiles(
            session.files, opened, copies, policy, asks=asks_about_host_executables
        )
        self.compare = self.files.compare
        self.commit = self.files.commit
        self.rollback = self.files.rollback

    @property
    def sandbox(self) -> "WriteChanges":
        return self

    def start_shell(
        self, command: str, *, timeout: float | None = None, cwd: str | None = None
    ) -> ActiveRun:
        raise _no_commands()

    def start_script(self, code: str, language: str, *, timeout: float | None = None) -> ActiveRun:
        raise _no_commands()


class _StagedFiles:
    """The files of the project, with the written files staged outside of it."""

    def __init__(
        self,
        project: WorkspaceFiles,
        opened: OpenFiles,
        copies: Snapshots,
        policy: Policy,
        *,
        asks: bool,
    ) -> None:
        self._project = project
        self._asks = asks
        self._created: dict[Relative, str] = {}  # new host executables, each with its program
        self._opened = opened
        self._copies = copies
        self._tree, _ = copies.original(opened)
        self._most = policy.limits.file_size_max
        self._stage: str | None = None
        self._changed: dict[str, PlannedChange] = {}
        self._expected: dict[str, FileNode] = {}
        self._effect: Changes | None = None

    async def read_bytes(self, path: str) -> bytes:
        name = self._name(path)
        if name is None:
            return await self._project.read_bytes(path)
        if name in self._changed:
            return await self._staged(name)
        await self._opened.call(lambda: self._expect(name))
        return await self._project.read_bytes(path)

    async def write(self, path: str, content: str | bytes) -> int:
        name = self._name(path)
        if name is None:
            return await self._project.write(path, content)
        data = content.encode() if isinstance(content, str) else content
        await look(self._project.honeytokens, "a file that came in", data)
        if self._stage is None:
            self._stage = await self._copies.empty(self._opened)
        stage = self._stage
        return await run_to_completion(
            self._opened.call(lambda: self._write(stage, path, name, data))
        )

    async def list(self, path: str = ".", *, max_depth: int = 1) -> Listing:
        return await self._project.list(path, max_depth=max_depth)

    async def stat(self, path: str) -> FileEntry:
        name = self._name(path)
        stage = self._stage
        if name is None or stage is None or name not in self._changed:
            return await self._project.stat(path)
        return await self._opened.call(lambda: self._staged_entry(stage, name))

    async def make_directory(self, path: str) -> None:
        raise errors.Denied(
            "a tool with the effect write makes no directory by itself",
            code="directory_not_staged",
            hint="write a file into it: the directories that it needs are made",
        )

    async def find(
        self, pattern: str, path: str = ".", *, kind: Kind | None = None, max_results: int = 1000
    ) -> Listing:
        return await self._project.find(pattern, path, kind=kind, max_results=max_results)

    async def compare(self) -> ChangeSet:
        """Return the writes, for the decision of the user."""
        stage = self._stage
        if stage is None:
            self._effect = Changes((), {}, (), False, ())
        else:
            self._effect = await self._opened.call(lambda: self._compared(stage))
        shown = {plain(self._tree.shown(path)): why for path, why in self._created.items()}
        return ChangeSet(self._effect, host_executables=shown)

    async def commit(self) -> None:
        """Make exactly the changes that `compare` gave. Raises as `Transaction.commit`."""
        assert self._effect is not None
        try:
            if self._effect.changed:
                assert self._stage is not None
                none = Manifest({})
                copy = Snapshot(self._stage, Path(), ScanScope(), none, none, False)
                with self._opened.in_use():
                    await self._copies.commit(
                        self._opened, copy, self._effect, self._expected, self._created.keys()
                    )
        finally:
            await self.rollback()

    async def rollback(self) -> None:
        stage, self._stage = self._stage, None
        if stage is not None:
            await self._copies.remove(stage)

    def _name(self, path: str) -> str | None:
        """Return the path relative to the project; None for one elsewhere."""
        where = in_project(self._opened, path)
        return None if where is None else "/".join(where)

    async def _staged(self, name: str) -> bytes:
        stage = self._stage
        assert stage is not None

        def act() -> bytes:
            with self._copies.tree(stage) as tree:
                return tree.read(relative(name), max_bytes=self._most)

        return await self._opened.call(act)

    # -- in a worker thread -----------------------------------------------------------------------

    def _expect(self, name: str) -> FileNode | None:
        """Return the file of the project at the first look: a commit requires that it is
        unchanged."""
        if name in self._expected:
            return self._expected[name]
        tree = self._tree
        try:
            node = node_at(tree, relative(name))
        except OSError as error:
            raise translate(error, tree.shown(relative(name))) from error
        if node is not None and node.kind == "file":
            node = replace(node, sha256=digest(tree, relative(name)))
        if node is not None:
            self._expected[name] = node
        return node

    def _write(self, stage: str, path: str, name: str, data: bytes) -> int:
        parts = relative(name)
        self._refuse(path, parts)
        for depth in range(1, len(parts)):
            above = "/".join(parts[:depth])
            node = self._expect(above)
            if node is None and above not in self._changed:
                self._changed[above] = PlannedChange(above, None, FileNode("directory", 0o755))
            elif node is not None and node.kind != "directory":
                shown = self._tree.shown(parts[:depth])
                raise wrong_path(shown, "not_a_directory", "is not a directory")
        before = self._expect(name)
        if before is not None and before.kind == "directory":
            raise wrong_path(path, "is_a_directory", "is a directory")
        mode = before.mode if before is not None and before.kind == "file" else 0o644
        with self._copies.tree(stage) as tree:
            size = tree.write(parts, data, max_bytes=self._most, mode=mode | 0o600)
            node = node_at(tree, parts)
            assert node is not None
            after = FileNode("file", mode, node.size, node.mtime_ns, sha256=digest(tree, parts))
        self._changed[name] = PlannedChange(name, before, after)
        return size

    def _refuse(self, path: str, parts: Relative) -> None:
        """Refuse a write that no tool may make."""
        try:
            self._opened.files.view(path, changing=True)
        except errors.Denied as error:
            host = self._opened.host_directory
            if not self._asks or host is None or error.code != "runs_on_the_host":
                raise
            host.created_by(parts)

    def _compared(self, stage: str) -> Changes:
        changed: list[PlannedChange] = []
        for name in sorted(self._changed, key=lambda path: path.replace("/", "\0")):
            change = self._changed[name]
            before, after = change.before, change.after
            if before is not None and after is not None and before.kind != after.kind:
                changed += (PlannedChange(name, before, None), PlannedChange(name, None, after))
            elif before is None or after is None or before.sha256 != after.sha256:
                changed.append(change)
        host = self._opened.host_directory
        if self._asks and host is not None:
            created = host.created_by_all([change.relative for change in changed])
            self._created = {path: match.program for path, match in created.items()}
        with self._copies.tree(stage) as tree:
            return effect_of(changed, (), self._tree, tree)

    def _staged_entry(self, stage: str, name: str) -> FileEntry:
        with self._copies.tree(stage) as tree:
            return tree.stat(relative(name))


def _no_commands() -> errors.Denied:
    return errors.Denied(
        "a tool with the effect write starts no command",
        code="capability_not_supported",
        hint='declare the effect "command" or "code" for it',
    )
