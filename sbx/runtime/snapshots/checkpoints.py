"""The files of a conversation as they were at a moment, to be put back: what `/undo` is made of.

A checkpoint is a frozen copy. To restore it is to compare it with what is there now, and to make
the difference undone by the same steps that commit a dry run: all or none. It is there until it
is discarded, until so many newer ones are made, and no longer than its conversation is open.
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
    """The files as they were when it was made; uploads, and what is shared, are not of it."""

    id: str
    _of: "Checkpoints" = field(repr=False)
    _copy: Snapshot = field(repr=False)

    async def restore(self) -> Sequence[FileChange]:
        """Make the files so again, all or none, and tell what that changed. It may be done again.

        Left as it is: what could not be read then, or cannot now; FIFOs, sockets and devices that
        were there; what was moved about while the checkpoint was made; and in a directory of the
        host what a program of the host would run. Changes of others since are undone, too. Raises
        Conflict `workspace_changed` when somebody writes meanwhile, NotFound when it is gone.
        """
        return await self._of.restore(self)

    async def discard(self) -> None:
        """Nothing of it remains. A second time does nothing."""
        await self._of.discard(self)


class Checkpoints:
    """Those of one conversation. Its methods may be called concurrently from one event loop."""

    def __init__(self, opened: Callable[[], Awaitable[OpenFiles]], copies: Snapshots) -> None:
        self._opened = opened
        self._copies = copies
        self._there: dict[str, Checkpoint] = {}
        self._at_work = asyncio.Lock()
        self._task: asyncio.Task[Checkpoint] | None = None
        self._closed = False

    @property
    def busy(self) -> bool:
        """Whether one is made or restored."""
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
        """The one of this id. Raises NotFound `checkpoint_not_found`, Closed."""
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
        f"there is no checkpoint {checkpoint_id[:80]!r} any more",
        code="checkpoint_not_found",
        hint="only the last few are kept, while their conversation is open",
    )
