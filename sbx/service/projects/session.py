"""The sandbox of an agent in a project: one object over one working directory.

A tool call acts on the result of `begin`, and a commit brings its changes into the directory. The
other methods act on the directory itself: for calls that the user approves first, and for commands
after the user has allowed them for the conversation. See sandbox.py.
"""

from typing import Literal

from sbx import errors
from sbx.agent.sandbox import ToolUploads
from sbx.protocol.contexts import DEFAULT_CONTEXT
from sbx.protocol.surroundings import Surroundings
from sbx.runtime.run.active_run import ActiveRun
from sbx.runtime.run.context import Context
from sbx.runtime.snapshots.checkpoints import Checkpoint
from sbx.runtime.snapshots.dry_run import DryRun
from sbx.service.projects.changes import CodeChanges, WriteChanges
from sbx.service.projects.sandbox import (
    COMPUTING,
    ProjectConversation,
    ProjectFiles,
    ProjectSandbox,
)


class ProjectSession:
    """A session. Its kernels start with the first run that needs one; `close` ends all of it, and
    leaves the directory as it is. `commands_allowed`: whether `allow_commands` was called.
    `user_decides`: the user of this machine decides about changes, not a client of a service."""

    sandboxed = True

    def __init__(
        self,
        sandbox: ProjectSandbox,
        uploads: ToolUploads | None = None,
        *,
        commands_allowed: bool = False,
    ) -> None:
        """Create a session. `uploads`: those of a persistent conversation; None: the sandbox's
        own."""
        self.sandbox = sandbox
        conversation = sandbox.conversation("default")
        assert isinstance(conversation, ProjectConversation)
        self._conversation = conversation
        self.files: ProjectFiles = conversation.files
        self.uploads: ToolUploads = uploads if uploads is not None else conversation.uploads
        self.grants = conversation.grants  # of commands in the project; the copy has no network
        self.commands_allowed = commands_allowed
        self.user_decides = False
        self._copied = True  # cells run on the working copy, as far as it can be made

    @property
    def busy(self) -> bool:
        return self._conversation.busy

    @property
    def stateful(self) -> bool:
        """Whether Python has, or had, variables that would be missed."""
        every = (self._python, self._conversation.computing, self._conversation.working.python)
        return any(context.state_is_kept for context in every)

    @property
    def asks_about_host_executables(self) -> bool:
        """Whether the policy asks the user about files that a program of the host executes."""
        return self.sandbox.policy.host_executables == "ask"

    async def allow_commands(self) -> None:
        """Allow commands: from now on Python may start processes too. Its variables are lost, and
        its next run reports that; a cell in progress completes."""
        if self.commands_allowed:
            return
        python = self._python
        self.commands_allowed = True
        if python.state_is_kept:
            self._conversation.default.mark_state_lost()
        await python.end_if_idle()

    async def begin(
        self, effect: Literal["write", "code", "command"]
    ) -> CodeChanges | WriteChanges:
        """Return a sandbox for one tool call, whose changes reach the project by a commit.

        Raise TooLarge `workspace_too_large` and Unavailable `no_space` if the project cannot be
        copied: then cells run in the project itself.
        """
        policy = self.sandbox.policy
        if effect == "write":
            opened = await self._conversation.opened_in_place()
            asks = self.user_decides and self.asks_about_host_executables
            return WriteChanges(
                self, opened, self._conversation.copies, policy, asks_about_host_executables=asks
            )
        try:
            transaction = await self._conversation.working.begin(needs_kernel=effect == "code")
        except (errors.TooLarge, errors.Unavailable):
            self._move_python(copied=False)
            raise
        self._move_python(copied=True)
        return CodeChanges(self, self._conversation, transaction, policy)

    def start_run(self, code: str, *, timeout: float | None = None) -> ActiveRun:
        """Start a cell in the kernel of the last one: over the working copy, unless the project
        cannot be copied or commands are allowed. Raise as `Conversation.start_run`."""
        return self._python.start_run(code, timeout=timeout)

    def start_shell(
        self, command: str, *, timeout: float | None = None, cwd: str | None = None
    ) -> ActiveRun:
        """Start a command in a jail that ends with it, processes in the background included. Once
        commands are allowed, in the live jail."""
        if self.commands_allowed:
            return self._conversation.start_shell(command, timeout=timeout, cwd=cwd)
        return self._conversation.start_command(command, timeout=timeout, cwd=cwd)

    def start_script(self, code: str, language: str, *, timeout: float | None = None) -> ActiveRun:
        """Start a script in a jail like that of a command."""
        if self.commands_allowed:
            return self._conversation.start_script(code, language, timeout=timeout)
        return self._conversation.start_script_alone(code, language, timeout=timeout)

    async def give_up(self, run: ActiveRun, /) -> None:
        await self._conversation.give_up(run)

    async def surroundings(self) -> Surroundings:
        """See `Conversation.surroundings`."""
        return await self._conversation.surroundings()

    async def dry_run(
        self, command: str, *, timeout: float | None = None, cwd: str | None = None
    ) -> DryRun:
        """Run a command on a frozen copy of the directory; see `Conversation.dry_run`."""
        return await self._conversation.dry_run(command, timeout=timeout, cwd=cwd)

    async def checkpoint(self) -> Checkpoint:
        """See `Conversation.checkpoint`."""
        return await self._conversation.checkpoint()

    async def save_result(self, name: str, content: bytes) -> str:
        """Store a result that is too long for a reply, outside of the directory. Return the path by
        which to read it."""
        return await self._conversation.save_result(name, content)

    async def close(self) -> None:
        await self.sandbox.close()

    @property
    def _python(self) -> Context:
        if self._copied and not self.commands_allowed:
            return self._conversation.working.python
        return self._conversation.contexts.find(python_in(self.commands_allowed))

    def _move_python(self, *, copied: bool) -> None:
        """Run cells over the copy, or in the project itself; variables do not move."""
        if self.commands_allowed or copied == self._copied:
            return
        before, self._copied = self._python, copied
        if before.state_is_kept:
            self._python.mark_state_lost()


def python_in(commands_allowed: bool) -> str:
    return DEFAULT_CONTEXT if commands_allowed else COMPUTING
