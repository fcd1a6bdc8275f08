"""The terminals of one conversation, by id. An ended one stays until its place is needed."""

import asyncio
import builtins
import secrets
from collections.abc import Mapping

from sbx import errors
from sbx.policy import Policy
from sbx.protocol.terminals import TERMINALS_MAX, check_size
from sbx.runtime.processes.terminal import Terminal
from sbx.runtime.run import checks
from sbx.runtime.run.context import Context

# The prompt shows that this shell is inside of a sandbox.
_ENVIRONMENT = {"TERM": "xterm-256color", "PS1": r"sbx:\w\$ "}


class Terminals:
    """Call the methods from one event loop; calls may be concurrent."""

    def __init__(self, policy: Policy, context: Context) -> None:
        """Run the terminals in the jail of `context`."""
        self._policy = policy
        self._context = context
        self._terminals: dict[str, Terminal] = {}  # the oldest first
        self._drawing = asyncio.Lock()  # a conversation waits for its own screens first
        self._opening = 0

    @property
    def attached(self) -> int:
        return sum(terminal.attached for terminal in self._terminals.values())

    async def open(
        self,
        *,
        rows: int = 24,
        columns: int = 80,
        command: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Terminal:
        """Open a terminal with a shell, or with `/bin/bash -c command`. Start the kernel if
        necessary.

        Raise Denied if the policy offers no shell or no processes, BadRequest, TooLarge, Closed,
        Conflict `too_many_terminals`, and the errors of the start of a kernel.
        """
        directory, variables = checks.check_shell(self._policy, command, cwd, env)
        check_size(rows, columns)
        argv = ["/bin/bash"] if command is None else ["/bin/bash", "-c", "--", command]
        self._context.check_open()
        self._make_room()
        self._opening += 1
        try:
            kernel, _ = await self._context.ready()
            process = await kernel.spawn_at_terminal(
                argv, directory, {**_ENVIRONMENT, **variables}, rows, columns
            )
        finally:
            self._opening -= 1
        name = f"term-{secrets.token_hex(6)}"
        size = (rows, columns)
        terminal = Terminal(name, command, process, self._context, size, self._drawing)
        self._terminals[name] = terminal
        return terminal

    async def get(self, terminal_id: str) -> Terminal:
        """Return a terminal by its id. Raise NotFound, Closed."""
        self._context.check_open()
        if (terminal := self._terminals.get(terminal_id)) is None:
            raise errors.NotFound(
                f"terminal {terminal_id[:80]!r} does not exist",
                hint="list them, or open one",
            )
        return terminal

    async def list(self) -> builtins.list[Terminal]:
        """Return the running and the ended terminals, the oldest first. Raise Closed."""
        self._context.check_open()
        return [*self._terminals.values()]

    async def close(self, terminal_id: str) -> None:
        """End a terminal as `Terminal.close`, and forget it. Raise NotFound, Closed."""
        terminal = await self.get(terminal_id)
        await terminal.close()
        self._terminals.pop(terminal_id, None)

    async def end(self) -> None:
        """Wait until all have ended. Call it after the context is closed."""
        for terminal in self._terminals.values():
            await terminal.ended()

    def _make_room(self) -> None:
        for name, terminal in builtins.list(self._terminals.items()):
            if len(self._terminals) + self._opening < TERMINALS_MAX:
                return
            if not terminal.running and not terminal.attached:
                del self._terminals[name]
        if len(self._terminals) + self._opening >= TERMINALS_MAX:
            raise errors.Conflict(
                f"a conversation has at most {TERMINALS_MAX} terminals",
                code="too_many_terminals",
                hint="close one that is no longer needed",
                details={"limit": TERMINALS_MAX},
            )
