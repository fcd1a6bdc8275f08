"""What an agent holds in a project with the sandbox on: one object over one working directory.

Python runs where nothing starts a process, until a person allowed commands for the conversation;
commands, whose yes is the agent's to ask for, run where they may. See project_sandbox.py.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from sbx.protocol.contexts import DEFAULT_CONTEXT
from sbx.protocol.files import Upload
from sbx.runtime.checkpoints import Checkpoint
from sbx.runtime.context import Context
from sbx.runtime.live import LiveRun
from sbx.runtime.project_sandbox import (
    COMPUTING,
    ProjectConversation,
    ProjectFiles,
    ProjectSandbox,
)
from sbx.runtime.rehearsals import Rehearsal


class UploadsShown(Protocol):
    """What is put in is read-only for code."""

    async def put(self, path: str | Path, name: str | None = None) -> Upload: ...
    async def put_bytes(self, name: str, content: bytes) -> Upload: ...
    async def list(self) -> Sequence[Upload]: ...


class ProjectBox:
    """Its kernels start with the first run that needs one; `close` ends all of it, and leaves the
    directory as it is. `commands_allowed` is what `allow_commands` made of it."""

    sandboxed = True

    def __init__(
        self,
        sandbox: ProjectSandbox,
        uploads: UploadsShown | None = None,
        *,
        commands_allowed: bool = False,
    ) -> None:
        """`uploads`: those of a kept conversation; None: the sandbox's own."""
        self.sandbox = sandbox
        talk = sandbox.conversation("default")
        assert isinstance(talk, ProjectConversation)
        self._talk = talk
        self._uploads: UploadsShown = uploads if uploads is not None else talk.uploads
        self.commands_allowed = commands_allowed

    @property
    def files(self) -> ProjectFiles:
        return self._talk.files

    @property
    def uploads(self) -> UploadsShown:
        return self._uploads

    @property
    def busy(self) -> bool:
        """Whether anything runs, waits to run, or starts."""
        return self._talk.busy

    @property
    def stateful(self) -> bool:
        """Whether Python has, or had, variables that would be missed."""
        return self._python.state_is_kept or self._talk.computing.state_is_kept

    async def allow_commands(self) -> None:
        """The person allowed commands: from now on Python may start processes too. Variables it had
        are gone, and its next run says so; a cell that runs is run to its end."""
        if self.commands_allowed:
            return
        self.commands_allowed = True
        if self._talk.computing.state_is_kept:
            self._talk.default.take_over()
        await self._talk.computing.end_if_idle()

    def start_run(self, code: str, *, timeout: float | None = None) -> LiveRun:
        """A cell of Python. Raises as `Conversation.start_run`."""
        return self._python.start_run(code, timeout=timeout)

    def start_shell(
        self, command: str, *, timeout: float | None = None, cwd: str | None = None
    ) -> LiveRun:
        return self._talk.start_shell(command, timeout=timeout, cwd=cwd)

    def start_script(self, code: str, language: str, *, timeout: float | None = None) -> LiveRun:
        return self._talk.start_script(code, language, timeout=timeout)

    async def give_up(self, run: LiveRun, /) -> None:
        await self._talk.give_up(run)

    async def rehearse(
        self, command: str, *, timeout: float | None = None, cwd: str | None = None
    ) -> Rehearsal:
        """Run a command on a frozen copy of the directory; see `Conversation.rehearse`."""
        return await self._talk.rehearse(command, timeout=timeout, cwd=cwd)

    async def checkpoint(self) -> Checkpoint:
        """The files as they are now; see `Conversation.checkpoint`."""
        return await self._talk.checkpoint()

    async def save_result(self, name: str, content: bytes) -> str:
        """Keep what is too long to be told, beside the directory; the path by which to read it."""
        return await self._talk.save_result(name, content)

    async def close(self) -> None:
        await self.sandbox.close()

    @property
    def _python(self) -> Context:
        return self._talk.contexts.find(python_in(self.commands_allowed))


def python_in(commands_allowed: bool) -> str:
    """The name of the context in which Python runs."""
    return DEFAULT_CONTEXT if commands_allowed else COMPUTING
