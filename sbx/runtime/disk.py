"""What stands in for a disk quota: look at the workspace, and end the kernel that makes it grow."""

import asyncio
import contextlib
import logging

from sbx import errors
from sbx.kernels.kernel import Kernel
from sbx.policy.model import Limits
from sbx.protocol.runs import Cause
from sbx.runtime.files import OpenFiles
from sbx.workspace import Usage

_log = logging.getLogger(__name__)
_PERIOD_S = 0.5
_IDLE_PERIOD_S = 5.0
_ENTRIES = 200_000
_SCAN_S = 0.4


class DiskWatch:
    """Watches one conversation's files; best effort, between two looks they can grow.

    What is beyond the limits already is tolerated as long as it does not grow: the next run may be
    the one that deletes.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._tolerated = (0, 0)
        self._busy = 0
        self._active = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def watch(self, kernel: Kernel, opened: OpenFiles) -> None:
        """From now on watch what this kernel does, until `close`."""
        if opened.measured is not None:
            self._task = asyncio.create_task(self._look(kernel, opened))

    def run_began(self) -> None:
        """Look often, until as many `run_ended` were called."""
        self._busy += 1
        self._active.set()

    def run_ended(self) -> None:
        self._busy -= 1

    async def close(self) -> None:
        """Stop watching; the next `watch` keeps what is tolerated."""
        task, self._task = self._task, None
        if task is not None and task is not asyncio.current_task():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _look(self, kernel: Kernel, opened: OpenFiles) -> None:
        limits = self._limits
        while True:
            if not self._busy:  # what a run left behind may still write: look, but seldom
                self._active.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._active.wait(), _IDLE_PERIOD_S)
            await asyncio.sleep(_PERIOD_S)
            used = await _measured(opened)
            most = max(limits.workspace_max, self._tolerated[0])
            most_files = max(limits.workspace_files, self._tolerated[1])
            if used.bytes > most or used.files > most_files:
                self._tolerated = (used.bytes, used.files)
                await kernel.kill(Cause.DISK)
                return
            if used.bytes <= limits.workspace_max and used.files <= limits.workspace_files:
                self._tolerated = (0, 0)


async def _measured(opened: OpenFiles) -> Usage:
    """What the files take. Where they cannot be looked at, they take nothing: the next look may."""
    tree = opened.measured
    assert tree is not None
    try:
        return await opened.call(lambda: tree.measure(max_entries=_ENTRIES, deadline_s=_SCAN_S))
    except (OSError, errors.SbxError) as error:
        _log.warning("a workspace could not be measured: %s", error)
        return Usage(0, 0, complete=False)
