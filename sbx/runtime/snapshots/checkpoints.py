"""Earlier files of a conversation, to restore: `/undo` uses them.

A checkpoint is a frozen copy. A restore compares it with the present files, and reverts the
difference by the same steps that commit a dry run: all or none. A checkpoint exists until it is
discarded, until there are too many newer ones, or until its conversation is closed.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from sbx import errors
from sbx.aio import outcome, run_to_completion
from sbx.protocol.dry_runs import CHECKPOINTS_MAX, FileChange
from sbx.runtime.files.open_files import OpenFiles
from sbx.runtime.snapshots.snapshots import Snapshot, Snapshots


@dataclass(slots=True, eq=False)
class Checkpoint:
    """The files at the time of the checkpoint, without uploads and shared files."""

    id: str
    _of: "Checkpoints" = field(repr=False)
    _copy: Snapshot = field(repr=False)

    async def restore(self) -> Sequence[FileChange]:
        """Restore the files, all or none, and return the changes. It may be called again.

        These stay as they are: files that were not readable then, or are not now; earlier FIFOs,
        sockets and devices; files that were moved while the checkpoint was made; and in a directory
        of the host the files that a program of the host would run. Later changes of other writers
        are reverted too. Raise Conflict `workspace_changed` for a concurrent write, NotFound if the
        checkpoint does not exist.
        """
        return await self._of.restore(self)

    async def discard(self) -> None:
        """Nothing of it remains. A second time does nothing."""
        await self._of.discard(self)


class Checkpoints:
    """The checkpoints of one conversation. Call the methods from one event loop; calls may be
    concurrent."""

    def __init__(self, opened: Callable[[], Awaitable[OpenFiles]], copies: Snapshots) -> None:
        self._opened = opened
        self._copies = copies
        self._there: dict[str, Checkpoint] = {}
        self._at_work = asyncio.Lock()
        self._task: asyncio.Task[Checkpoint] | None = None
        self._closed = False

    @property
    def busy(self) -> bool:
        return self._at_work.locked()

    async def make(self) -> Checkpoint:
        """Copy the files as they are. The oldest gives way where there are too many.

        Raises TooLarge `workspace_too_large`, Unavailable `no_space`; it leaves nothing then.
        """
        async with self._at_work:
            self._check_open()
            self._task = asyncio.create_task(self._make())
            try:
                checkpoint = await outcome(self._task, self.discard)
            finally:
                self._task = None
            if checkpoint is None:
                raise _closed()
            return checkpoint

    def get(self, checkpoint_id: str) -> Checkpoint:
        """Return the checkpoint of this id. Raise NotFound `checkpoint_not_found`, Closed."""
        self._check_open()
        checkpoint = self._there.get(checkpoint_id)
        if checkpoint is None:
            raise _not_found(checkpoint_id)
        return checkpoint

    async def restore(self, checkpoint: Checkpoint) -> Sequence[FileChange]:
        """See `Checkpoint.restore`."""
        async with self._at_work:
            self._check_open()
            if checkpoint.id not in self._there:
                raise _not_found(checkpoint.id)
            opened = await self._opened()
            with opened.in_use():
                effect = await self._copies.way_back(opened, checkpoint._copy)
                await self._copies.commit(opened, checkpoint._copy, effect, effect.before)
            return effect.summary

    async def discard(self, checkpoint: Checkpoint) -> None:
        """See `Checkpoint.discard`."""
        if self._there.pop(checkpoint.id, None) is not None:
            await run_to_completion(self._copies.remove(checkpoint._copy.name))

    async def close(self) -> None:
        """Discard all of them, for good."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
        async with self._at_work:
            for checkpoint in list(self._there.values()):
                await self.discard(checkpoint)

    async def _make(self) -> Checkpoint:
        opened = await self._opened()
        with opened.in_use():
            copy = await self._copies.make(opened)
        checkpoint = Checkpoint(f"checkpoint-{secrets.token_hex(8)}", self, copy)
        self._there[checkpoint.id] = checkpoint
        while len(self._there) > CHECKPOINTS_MAX:
            await self.discard(next(iter(self._there.values())))
        return checkpoint

    def _check_open(self) -> None:
        if self._closed:
            raise _closed()


def _closed() -> errors.Closed:
    return errors.Closed("the conversation is closed, and its checkpoints are gone")


def _not_found(checkpoint_id: str) -> errors.NotFound:
    return errors.NotFound(
        f"the checkpoint {checkpoint_id[:80]!r} does not exist",
        code="checkpoint_not_found",
        hint="only the last few are kept, while their conversation is open",
    )
