"""The session in which the steps of a task run, with the files that they hand on."""

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from sbx.agent.chats import ChatRun
from sbx.agent.sandbox import copy_file
from sbx.agent.task import FilledTask
from sbx.errors import NotFound
from sbx.service.caller import Caller
from sbx.service.leases import SandboxLease
from sbx.service.sandboxes import Sandboxes

# Starts the run of a task in the conversation with this id, within a number of steps.
Begin = Callable[[str, FilledTask, int | None], Awaitable[ChatRun]]


class TaskPlace(Struct, frozen=True):
    """The session in which a task runs, on behalf of a caller. `facts`: what a result depends on
    besides its template; None if no earlier result may be used."""

    sandboxes: Sandboxes
    caller: Caller
    session_id: str
    begin: Begin
    facts: Sequence[Any] | None = None

    async def upload(self, name: str, files: Sequence[Path]) -> None:
        async with self._using(name) as use:
            for path in files:
                await use.conversation(name).uploads.put(path)

    async def missing(self, name: str, paths: Sequence[str]) -> str | None:
        """Return the first of these files that a conversation does not have."""
        async with self._using(name) as use:
            for path in paths:
                try:
                    if (await use.conversation(name).files.stat(path)).kind != "file":
                        return path
                except NotFound:
                    return path
        return None

    async def copy(self, source: str, paths: Sequence[str], target: str) -> None:
        async with self._using(source) as first, self._using(target) as second:
            for path in paths:
                await copy_file(first.conversation(source), path, second.conversation(target), path)

    def _using(self, name: str) -> SandboxLease:
        return self.sandboxes.using(
            self.caller, self.session_id, scope="execute", conversation=name
        )
