"""Dry runs and checkpoints without asyncio: synchronous faces of what lives on the event loop in
a thread."""

from collections.abc import Sequence
from typing import Protocol

from sbx.aio import Loop
from sbx.protocol.dry_runs import FileChange
from sbx.protocol.runs import Run


class AsyncDryRun(Protocol):
    """A command that was run on a frozen copy, here or in a service."""

    id: str
    run: Run
    changes: Sequence[FileChange]
    truncated: bool
    left_out: Sequence[str]
    expires_at: float

    async def commit(self) -> None: ...
    async def discard(self) -> None: ...


class AsyncCheckpoint(Protocol):
    """Files as they were at a moment, here or in a service."""

    id: str

    async def restore(self) -> Sequence[FileChange]: ...
    async def discard(self) -> None: ...


class BlockingDryRun:
    """What a command did on a frozen copy of the files, and would change. `truncated`: there are
    more changes than told. `left_out`: FIFOs, sockets and the like, and what could not be read.
    `expires_at` in seconds of the epoch."""

    def __init__(self, loop: Loop, inner: AsyncDryRun) -> None:
        self._loop = loop
        self._inner = inner
        self.id = inner.id
        self.run = inner.run
        self.changes = inner.changes
        self.truncated = inner.truncated
        self.left_out = inner.left_out
        self.expires_at = inner.expires_at

    def commit(self) -> None:
        """Make the very same changes, all or none. Raises Conflict `workspace_changed` when what it
        touches is not as it was, NotFound `dry_run_not_found`."""
        self._loop.call(self._inner.commit())

    def discard(self) -> None:
        """Nothing of it remains. A second time does nothing."""
        self._loop.call(self._inner.discard())


class BlockingCheckpoint:
    """The files as they were when it was made."""

    def __init__(self, loop: Loop, inner: AsyncCheckpoint) -> None:
        self._loop = loop
        self._inner = inner
        self.id = inner.id

    def restore(self) -> Sequence[FileChange]:
        """Make the files so again, all or none, and tell what that changed. Raises Conflict
        `workspace_changed` when somebody writes meanwhile, NotFound `checkpoint_not_found`."""
        return self._loop.call(self._inner.restore())

    def discard(self) -> None:
        """Nothing of it remains. A second time does nothing."""
        self._loop.call(self._inner.discard())
