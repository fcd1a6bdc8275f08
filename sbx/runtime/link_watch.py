"""Keep the path guard of a live kernel up to date with what the user does in the directory.

The guard protects names of the table by themselves, whenever they come. What an existing one leads
to (a symlink's target, a directory that git's configuration names) is found by a walk, before a
start and, while code runs, every few seconds: not by inotify, of whose watches and instances Linux
counts few per user, and a tree may have thousands of directories.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from sbx.errors import SbxError
from sbx.runtime.files.open_files import OpenFiles
from sbx.telemetry.background import background_context

_log = logging.getLogger(__name__)
PERIOD_S = 3.0
_SHARE = 50  # at most 2 % of one CPU, however large the tree is


class LinkWatch:
    """The watch of one kernel at a time."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    def watch(self, opened: OpenFiles, used_at: Callable[[], float]) -> None:
        """Look from now on until `close`, where there is a guard. `used_at`: the monotonic time of
        the last use of the kernel; an unused kernel is not examined."""
        if opened.quarantine is not None:
            self._task = asyncio.create_task(_look(opened, used_at), context=background_context())

    def leave(self) -> None:
        """As `close`, at once; only while it does not look."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _look(opened: OpenFiles, used_at: Callable[[], float]) -> None:
    wait_s, looked = PERIOD_S, time.monotonic()
    while True:
        await asyncio.sleep(wait_s)
        if used_at() < looked:
            continue
        looked = time.monotonic()
        try:
            await opened.call(opened.look_at_links)
        except (OSError, SbxError) as error:
            _log.warning("a directory could not be looked at again: %s", error)
        wait_s = max(PERIOD_S, _SHARE * (time.monotonic() - looked))
