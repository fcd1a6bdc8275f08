"""The sandbox of one conversation in a project: the working directory, and the jails over it.

    computing   Python until the user allowed commands: it starts no process
    command/…   one command until then; the jail ends with the command, and so do the processes that
                the command left, which would change files after it was approved
    default     Python and commands from then on: the unchanged policy

A tool acts on a copy of the directory first (working_copy.py); these jails are for approved calls
that cannot be tried first. They see the same files and uploads, and share the limits. sbx writes no
data into the directory: saved results lie outside of it, and are visible at /mnt/results.
"""

import asyncio
import logging
import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from sbx import errors
from sbx.aio import in_thread, run_to_completion
from sbx.isolation.launch_plan import Interpreter
from sbx.kernels.pool.zygotes import Key
from sbx.policy import Policy, narrow
from sbx.protocol.files import FileEntry, Listing
from sbx.runtime.conversation import Conversation
from sbx.runtime.files.disk_limit import DiskLimit
from sbx.runtime.files.files import MountPoints, OpenFiles, WorkspaceFiles
from sbx.runtime.resources import RuntimeResources
from sbx.runtime.run.active_run import ActiveRun
from sbx.runtime.run.context import Context
from sbx.runtime.run.context_kernel import ClosedReason, StartKernel
from sbx.runtime.run.contexts import ContextStore
from sbx.runtime.runtime import Runtime
from sbx.runtime.sandbox import AsyncSandbox
from sbx.runtime.snapshots.snapshots import Snapshots
from sbx.runtime.snapshots.working_copies import WorkingCopies
from sbx.runtime.snapshots.working_copy import WorkingCopy
from sbx.workspace.paths import WorkspaceArea, check_name, resolve

COMPUTING = "computing"
RESULTS = "/mnt/results"
_COMMAND = "command/"  # no context of a caller's has such a name
_OVER = ClosedReason("the command", "its jail is gone")
_KEPT = ("uploads", "generated")  # of the conversation's own files, which no jail is shown
_log = logging.getLogger(__name__)


class ProjectSandbox(AsyncSandbox):
    """See the module. `lost`: the contexts whose variables ended with an earlier sandbox of this
    conversation, so that the next run there reports it."""

    def __init__(
        self,
        resources: RuntimeResources,
        policy: Policy,
        loaded: Policy,
        interpreter: Interpreter,
        *,
        workspace: Path,
        uploads: Path | None,
        on_close: Callable[[AsyncSandbox], None],
        lost: frozenset[str] = frozenset(),
    ) -> None:
        """`workspace`: by a path without symlinks. `uploads`: a directory that is shown as they
        are; None: its own, which go with it."""
        super().__init__(
            resources,
            policy,
            loaded,
            interpreter,
            workspace=workspace,
            uploads=uploads,
            on_close=on_close,
        )
        self._named = workspace
        self._without_processes = narrow(policy, {"processes": False})
        self._computing_key: Key | None = None
        self._lost = lost
        resources.unowned_directories.add(
            self._directory
        )  # no row names it, and it must not be swept

    async def prepare(self) -> None:
        await in_thread(self._resources.data.mark_temporary, self._directory)
        await super().prepare()
        opened = await self._default.opened()
        paths = self._resources.paths(opened, MountPoints({}, opened.any_guard), self._interpreter)
        self._computing_key = self._key_of(
            self._without_processes, paths, foreign_uid=not self._mapped
        )

    def _check_directory(
        self, directory: int | Path, read_only: bool, *, guarded: bool = True
    ) -> None:
        """Pass the uploads and the results of a conversation, which are in the data directory."""
        path = f"/proc/self/fd/{directory}" if isinstance(directory, int) else directory
        data = os.path.realpath(self._resources.data.path)
        if not read_only or not Path(os.path.realpath(path)).is_relative_to(data):
            super()._check_directory(directory, read_only=read_only, guarded=guarded)

    def _make_conversation(self, name: str) -> "ProjectConversation":
        return ProjectConversation(
            name,
            self.policy,
            self._open_files,
            self._starter_of(name),
            self._resources.grace_s,
            without_processes=self._without_processes,
            mount=partial(self.mount, target=RESULTS, read_only=True),
            languages=self._languages,
            lost=self._lost.__contains__,
            contexts=ContextStore(names=(COMPUTING,)),
            grants=self._new_grants(name),
            whole=self._whole,
        )

    def _walls_of(self, context: str) -> tuple[Policy, Key | None]:
        if context == COMPUTING:
            return self._without_processes, self._computing_key
        return super()._walls_of(context)

    async def _open_files_in(self, directory: str, *, new: bool = True) -> OpenFiles:
        opened = await super()._open_files_in(directory, new=new)
        host_directory = opened.host_directory
        if host_directory is None or host_directory.path != self._named:
            await opened.close()
            raise replaced(self._named)
        return opened

    async def _leave_files(self) -> None:
        await super()._leave_files()
        self._resources.unowned_directories.discard(self._directory)


class ProjectConversation(Conversation):
    """A conversation whose context `computing` has a separate policy, and whose files include
    results."""

    files: "ProjectFiles"
    working: WorkingCopies

    def __init__(
        self,
        name: str,
        policy: Policy,
        *others: Any,
        without_processes: Policy,
        mount: Callable[[Path], Any],
        **named: Any,
    ) -> None:
        self._without_processes = without_processes
        super().__init__(name, policy, *others, **named)
        self.files = ProjectFiles(self.opened, policy, self._default.borrow_kernel)
        self._mount = mount
        self._mounting = asyncio.Lock()
        self._mounted = False
        self._jails: dict[Context, asyncio.Task[None]] = {}

    def start_command(
        self, command: str, *, timeout: float | None = None, cwd: str | None = None
    ) -> ActiveRun:
        """Start a shell command in a separate jail. Raises as `start_shell`."""
        jail = self._jail()
        return self._alone(jail, jail.start_shell(command, timeout=timeout, cwd=cwd))

    def start_script_alone(
        self, code: str, language: str, *, timeout: float | None = None
    ) -> ActiveRun:
        """Start a script in a separate jail. Raises as `start_script`."""
        make = self.prepare_script(code, language)
        jail = self._jail()
        return self._alone(jail, jail.start_program(make, self.script_timeout(timeout)))

    def _jail(self) -> Context:
        self._default.check_open()
        return Context(
            f"{_COMMAND}{secrets.token_hex(8)}",
            self.name,
            self._policy,
            self.opened,
            self._start,
            self._grace_s,
            disk=DiskLimit(self._policy.limits, self._disk),
            ends_with_command=True,
            grants=self.grants,
        )

    def _alone(self, jail: Context, live: ActiveRun) -> ActiveRun:
        async def leave() -> None:
            try:
                await live.ended()
            finally:
                await run_to_completion(jail.close(_OVER))
                self._jails.pop(jail, None)

        self._jails[jail] = asyncio.create_task(leave())
        return live

    def copy_by(self, copies: Snapshots, start: StartKernel) -> None:
        super().copy_by(copies, start)
        self.copies = copies

        def make(is_spare: bool) -> WorkingCopy:
            return WorkingCopy(
                self.name,
                self._policy,
                self._without_processes,
                self.opened_in_place,
                copies,
                start,
                self._grace_s,
                python=COMPUTING,
                had_kernel=not is_spare and self._lost(COMPUTING),
                grants=self.grants,
                is_spare=is_spare,
            )

        self.working = WorkingCopies(make)

    async def opened_in_place(self) -> OpenFiles:
        """Return the files, as long as the directory has its path. Raise Denied `not_granted`."""
        opened = await self.opened()
        directory = opened.host_directory
        assert directory is not None
        if not await opened.call(directory.is_in_place):
            raise replaced(directory.path)
        return opened

    @property
    def ending(self) -> list[Context]:
        return [*super().ending, *self.working.contexts, *self._jails]

    @property
    def busy(self) -> bool:
        return super().busy or self.working.busy or bool(self._jails)

    async def give_up(self, live: ActiveRun) -> None:
        await super().give_up(live)
        for context in (*self.working.contexts, *self._jails):
            await context.give_up(live)

    async def _end(self, ending: list[Context]) -> None:
        try:
            for jail in list(self._jails):
                await jail.close()
            if self._jails:
                await asyncio.wait(list(self._jails.values()))
            await self.working.close()
        finally:
            await super()._end(ending)

    @property
    def computing(self) -> Context:
        return self.contexts.find(COMPUTING)

    @property
    def default(self) -> Context:
        return self._default

    async def save_result(self, name: str, content: bytes) -> str:
        """Keep it until the sandbox is closed; the path at which code and file calls read it.

        Raises InvalidPath for the name, TooLarge, Unavailable `no_space`, Closed.
        """
        check_name(name)
        opened = await self.opened()
        most = self._policy.limits.file_size_max
        await opened.call(lambda: opened.own.files.write((*_KEPT, name), content, max_bytes=most))
        async with self._mounting:
            if not self._mounted:
                self._mounted = True
                with suppress(errors.SbxError):  # code does not see it then; file calls do
                    await self._mount(opened.own.files_path.joinpath(*_KEPT))
        return f"{RESULTS}/{name}"

    def _make_context(self, name: str, new: bool) -> Context:
        if name != COMPUTING:
            return super()._make_context(name, new)
        return Context(
            name,
            self.name,
            self._without_processes,
            self.opened,
            self._start,
            self._grace_s,
            disk=DiskLimit(self._without_processes.limits, self._disk),
        )


class ProjectFiles(WorkspaceFiles):
    """The files of a project, and the saved results outside of it, which are read-only."""

    async def read_bytes(self, path: str) -> bytes:
        if (name := _of_a_result(path)) is None:
            return await super().read_bytes(path)
        opened = await self._opened()
        most = self._policy.limits.file_size_max
        return await opened.call(lambda: opened.own.files.read((*_KEPT, name), max_bytes=most))

    async def stat(self, path: str) -> FileEntry:
        if (name := _of_a_result(path)) is None:
            return await super().stat(path)
        opened = await self._opened()
        return _shown(await opened.call(lambda: opened.own.files.stat((*_KEPT, name))))

    async def list(self, path: str = ".", *, max_depth: int = 1) -> Listing:
        if path.rstrip("/") != RESULTS:
            return await super().list(path, max_depth=max_depth)
        opened = await self._opened()
        return Listing(map(_shown, await opened.call(lambda: opened.own.files.list(_KEPT))))


def replaced(directory: Path) -> errors.Denied:
    return errors.Denied(
        f"{directory} was replaced by a symlink or by another directory",
        code="not_granted",
        hint="put the directory back, or change the project",
    )


def in_project(opened: OpenFiles, path: str) -> tuple[str, ...] | None:
    """Return the path relative to the directory; None for an upload or a result. Raise
    InvalidPath."""
    if path.rstrip("/") == RESULTS or path.startswith(f"{RESULTS}/"):
        return None
    where = resolve(path, uploads_apart=True)
    return where.relative if where.part is WorkspaceArea.FILES else None


def _of_a_result(path: str) -> str | None:
    """Return the name of the saved result at this path. Raise InvalidPath."""
    if not path.startswith(f"{RESULTS}/"):
        return None
    return check_name(path.removeprefix(f"{RESULTS}/"))


def _shown(entry: FileEntry) -> FileEntry:
    return replace(entry, path=f"{RESULTS}/{entry.name}")


async def open_project(
    runtime: Runtime,
    policy: str | Path | Policy,
    directory: Path,
    *,
    narrower: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    uploads: Path | None = None,
    lost: frozenset[str] = frozenset(),
) -> ProjectSandbox:
    """Return a sandbox over a working directory of the host. `directory` contains no symlinks.

    Raises as `Runtime.create`, and Denied `not_granted` if another directory has taken its place.
    """
    loaded, decided = await runtime.decide(policy, narrower=narrower, env=env)
    make = partial(ProjectSandbox, workspace=directory, uploads=uploads, lost=lost)
    return await runtime.open(loaded, decided, make)
