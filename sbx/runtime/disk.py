"""What stands in for a disk quota: look at the workspace, and end the kernel that makes it grow."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar
from weakref import WeakKeyDictionary

from sbx import errors
from sbx.kernels.kernel import Kernel
from sbx.linux import procfs
from sbx.policy.model import Limits
from sbx.protocol.runs import Cause
from sbx.runtime.files import OpenFiles
from sbx.workspace import Usage

_log = logging.getLogger(__name__)
_PERIOD_S = 0.5
_ROUND_S = 10.0
_ENTRIES = 200_000
_SCAN_S = 0.4


class Shared:
    """What the watches of one conversation share: what is `tolerated`, which of them `stir`, having
    done something since their last look, and which did while a limit was crossed."""

    def __init__(self) -> None:
        self.tolerated = (0, 0)
        self.stir: set[DiskWatch] = set()
        self.suspects: set[DiskWatch] = set()
        self.looking = asyncio.Lock()  # so that what another one is ended for is not seen as growth

    def forget(self, watch: "DiskWatch") -> None:
        self.stir.discard(watch)
        self.suspects.discard(watch)


class DiskWatch:
    """Watches one conversation's files for one kernel; best effort, between two looks they can
    grow.

    What is beyond the limits already is tolerated as long as it does not grow: the next run may be
    the one that deletes. Between runs there is no look at the files while the jail does nothing.
    Of several kernels over the same files every one ends that did something between its last look
    and the one that found them beyond the limits: who wrote what is not known.
    """

    def __init__(self, limits: Limits, shared: Shared | None = None) -> None:
        self._limits = limits
        self._shared = shared or Shared()
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
        self._shared.stir.add(self)

    def run_ended(self) -> None:
        self._busy -= 1

    def leave(self) -> None:
        """As `close`, at once; only while it does not look."""
        task, self._task = self._task, None
        self._shared.forget(self)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        """Stop watching; the next `watch` keeps what is tolerated."""
        task, self._task = self._task, None
        self._shared.forget(self)
        if task is not None and task is not asyncio.current_task():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _look(self, kernel: Kernel, opened: OpenFiles) -> None:
        limits, shared = self._limits, self._shared
        rounds = _Rounds.of_this_loop()
        await self._active.wait()
        while True:
            self._active.clear()
            shared.stir.add(self)
            await asyncio.sleep(_PERIOD_S)
            async with shared.looking:
                used, quiet = await _measured(kernel, opened)
                most = max(limits.workspace_max, shared.tolerated[0])
                most_files = max(limits.workspace_files, shared.tolerated[1])
                if used.bytes > most or used.files > most_files:
                    shared.suspects |= shared.stir
                if self in shared.suspects:
                    shared.tolerated = (used.bytes, used.files)
                    shared.forget(self)
                    await kernel.kill(Cause.DISK)
                    return
                if used.bytes <= limits.workspace_max and used.files <= limits.workspace_files:
                    shared.tolerated = (0, 0)
            if not self._busy and not self._active.is_set():
                shared.stir.discard(self)
            if not self._busy:
                with rounds.asking(quiet, self._active.set):
                    await self._active.wait()


class _Quiet:
    """Whether a jail did nothing since this was made; what a run left behind may still write."""

    def __init__(self, kernel: Kernel) -> None:
        inside = kernel.processes()
        # Of PID 1 and the kernel alone, PID 1 has nothing to do by itself.
        self._inside = inside[1:] if len(inside) == 2 else inside
        self._seen = self._look()

    def lasts(self) -> bool:
        return bool(self._seen) and self._look() == self._seen

    def _look(self) -> list[tuple[bytes, ...]]:
        return [procfs.activity(pid) for pid in self._inside]


class _Rounds:
    """Asks every idle jail of one event loop now and then whether it still is: one timer for all
    of them, 15 µs each."""

    _of: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, "_Rounds"]] = WeakKeyDictionary()

    def __init__(self) -> None:
        self._asked: dict[_Quiet, Callable[[], None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    @classmethod
    def of_this_loop(cls) -> "_Rounds":
        return cls._of.setdefault(asyncio.get_running_loop(), cls())

    @contextmanager
    def asking(self, quiet: _Quiet, stirred: Callable[[], None]) -> Iterator[None]:
        """Until the end of the block, call `stirred` when `quiet` lasts no longer."""
        self._asked[quiet] = stirred
        self._arm()
        try:
            yield
        finally:
            del self._asked[quiet]

    def _arm(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_ROUND_S, self._go)

    def _go(self) -> None:
        self._timer = None
        for quiet, stirred in self._asked.items():
            if not quiet.lasts():
                stirred()
        if self._asked:
            self._arm()


async def _measured(kernel: Kernel, opened: OpenFiles) -> tuple[Usage, _Quiet]:
    """What the files take, and what is quiet as long as that is so. Where they cannot be looked at,
    they take nothing: the next look may."""
    tree = opened.measured
    assert tree is not None

    def look() -> tuple[Usage, _Quiet]:
        quiet = _Quiet(kernel)  # before the look: what is written meanwhile is for the next one
        return tree.measure(max_entries=_ENTRIES, deadline_s=_SCAN_S), quiet

    try:
        return await opened.call(look)
    except (OSError, errors.SbxError) as error:
        _log.warning("a workspace could not be measured: %s", error)
        return Usage(0, 0, complete=False), _Quiet(kernel)
