"""The limit of the size of a conversation's files: by quota, or by a watch that kills.

    quota     Linux refuses more: sbx.isolation.project_quota. There is no watch
    watched   sbx measures the files while code runs, and ends the kernel that exceeds the limit.
              The files can grow between two measurements, and they stay as large as they are then

A measurement walks the files, and asks the processes of the jail for unlinked files. It happens
every half second, and earlier if the file system lost as much space as the files had left: so a
fast writer is found quickly. Two things are not seen: unlinked files on their way through a socket,
and for an unprivileged runtime files that are mapped and not open.

The quarantine of a directory of the host is measured too. It has no quota, and its content counts
with the files.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar
from weakref import WeakKeyDictionary

from msgspec.structs import replace

from sbx import errors
from sbx.aio import run_to_completion
from sbx.errors import CannotEnforce
from sbx.isolation.launch_plan import Wall
from sbx.isolation.probe import Capabilities, Layer
from sbx.kernels.kernel import Kernel
from sbx.linux import procfs
from sbx.policy import Policy
from sbx.policy.tables import LimitsPolicy
from sbx.protocol.runs import Cause
from sbx.runtime.files.open_files import OpenFiles
from sbx.runtime.resources import RuntimeResources
from sbx.telemetry.background import background_context
from sbx.workspace.disk_usage import DiskUsage, EarlyStop
from sbx.workspace.tree import Tree

_log = logging.getLogger(__name__)
_PERIOD_S = 0.5
_TICK_S = 0.1  # each is a call of a thread and of statvfs(2), 60 µs
_SHARED_S = 0.02  # for which watches share its result
_SHORT_CELL_S = 0.02  # its writes show at the next measurement
_STEP = 64 << 20  # may be written before the first look of a kernel: it knows nothing yet
_STEP_FILES = 5_000
_HELD_S = 0.1
_NAMES = 5  # of a workspace, which are there before anything is put into it
_ROUND_S = 10.0
_ENTRIES = 200_000
_SCAN_S = 0.4
_SCAN_MAX_S = 3.2  # of a tree so deep, or so wide, that 0.4 s did not do


# The two ways to limit the size of a conversation's files: the quota of Linux, or our measurements.
#
# Decided once for each opening of the files: a quota takes root's broker and a file system that has
# them, and the setting `disk_quota` decides whether a weaker way is enough.
WATCHED = (
    "watched: looked at every 0.5 s of a run, sooner when the disk fills, and the kernel killed;"
    " until then a writer of 1 GB/s may leave about 0.3 GB too much, and another 1 GB where walking"
    " its files takes as long as it may; the host's own disk is what ends many such kernels"
)
_FOREIGN = "nothing: a directory of the host is the workspace"
_OLD = "this workspace is older than the quota of its file system, and its files do not count there"


def refused(setting: str, capabilities: Capabilities) -> CannotEnforce | None:
    """Return why the setting refuses every sandbox on this host; pure."""
    layer = capabilities.layer("disk")
    if setting != "required" or layer.available:
        return None
    return _cannot(str(layer.cause), layer.remedy)


def wall(setting: str, layer: Layer, *, charged: bool, ours: bool, policy: Policy) -> Wall:
    demanded = "hard" if setting == "required" else "best-effort"
    if not ours:
        return Wall("disk", demanded, _FOREIGN, weaker=True)
    if not charged:
        return Wall("disk", demanded, WATCHED, weaker=True)
    limits = policy.limits
    sizes = f"{limits.workspace_max} bytes, {limits.workspace_files} files and directories"
    return Wall("disk", demanded, f"quota, hard: {layer.detail}, {sizes}")


async def limited(resources: RuntimeResources, policy: Policy, opened: OpenFiles) -> OpenFiles:
    """Limit the files to the size of the policy. Call it before a jail uses them.

    Raise CannotEnforce if the setting requires a quota that this host does not offer.
    """
    layer, setting = resources.capabilities.layer("disk"), resources.disk_quota
    ours = opened.measured is not None
    if ours and layer.available and setting != "off":
        limits = policy.limits
        charged = True
        for path in (opened.own.path, opened.shared_path):
            if path is not None:
                charged &= await resources.broker.charge(
                    str(path),
                    bytes_max=limits.workspace_max,
                    inodes_max=limits.workspace_files + _NAMES,
                )
        opened.has_quota = charged
    if setting == "required" and not opened.has_quota:
        await opened.close()
        if not ours:
            raise _cannot(_FOREIGN, "let sbx make the workspace, and copy the files into it")
        raise _cannot(_OLD, "copy its files into a new conversation")
    opened.disk = wall(setting, layer, charged=opened.has_quota, ours=ours, policy=policy)
    return opened


def _cannot(cause: str, remedy: str | None) -> CannotEnforce:
    return CannotEnforce(
        f"the setting disk_quota requires a hard quota, and there is none: {cause}",
        hint=remedy,
        details={"layer": "disk", "cause": cause, "remedy": remedy},
    )


class DiskLimitState:
    """The shared state of the watches of one conversation: the `tolerated` size, the watches that
    `stir` because their jail was active since their last measurement, and those that were active
    while a limit was exceeded."""

    def __init__(self) -> None:
        self.tolerated = (0, 0)
        self.stir: set[DiskLimit] = set()
        self.suspects: set[DiskLimit] = set()
        self.looking = asyncio.Lock()  # so that growth ends one kernel, not two

    def forget(self, watch: "DiskLimit") -> None:
        self.stir.discard(watch)
        self.suspects.discard(watch)


class DiskLimit:
    """Watches the files of one conversation for one kernel, as well as it can: they can grow
    between two measurements.

    A size above the limit is tolerated as long as it does not grow: the next run may delete files.
    Between runs there is no measurement while the jail does nothing. Of several kernels over the
    same files, each one ends that was active between its last measurement and the one that exceeded
    the limit: the writer is not known.
    """

    def __init__(self, limits: LimitsPolicy, shared: DiskLimitState | None = None) -> None:
        self._limits = limits
        self._shared = shared or DiskLimitState()
        self._busy = 0
        self._active = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def watch(self, kernel: Kernel, opened: OpenFiles) -> None:
        """Watch this kernel until `close`. Do nothing if Linux limits the files."""
        if _limited(opened) or opened.quarantine is not None:
            looking = self._look(kernel, opened)
            self._task = asyncio.create_task(looking, context=background_context())

    def run_began(self) -> None:
        """Look often, until as many `run_ended` were called."""
        self._busy += 1
        self._active.set()
        self._shared.stir.add(self)

    def run_ended(self) -> None:
        self._busy -= 1

    def leave(self) -> None:
        """Do the same as `close`, at once. Call it only outside of a measurement."""
        task, self._task = self._task, None
        self._shared.forget(self)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        """Stop watching; the next `watch` keeps the tolerated size."""
        task, self._task = self._task, None
        self._shared.forget(self)
        if task is not None and task is not asyncio.current_task():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _look(self, kernel: Kernel, opened: OpenFiles) -> None:
        limits, shared = self._limits, self._shared
        rounds = ProbeScheduler.for_running_loop()
        room, scan_s = FreeSpaceProbe(_STEP, _STEP_FILES), _SCAN_S
        await self._active.wait()
        while True:
            self._active.clear()
            shared.stir.add(self)
            await room.last(opened)
            async with shared.looking:
                began = time.monotonic()
                most = max(limits.workspace_max, shared.tolerated[0])
                most_files = max(limits.workspace_files + _NAMES, shared.tolerated[1])
                enough = EarlyStop(most, most_files)
                used, quiet = await _measured(kernel, opened, scan_s, enough)
                if used.bytes > most or used.inodes > most_files:
                    shared.suspects |= shared.stir
                if self in shared.suspects:
                    shared.forget(self)
                    await run_to_completion(self._end(kernel, opened))
                    return
                scan_s = _SCAN_S if used.complete else min(_SCAN_MAX_S, 2 * scan_s)
                within = used.inodes <= limits.workspace_files + _NAMES
                if within and used.bytes <= limits.workspace_max:
                    shared.tolerated = (0, 0)
                left = most - used.bytes, most_files - used.inodes
                room = FreeSpaceProbe(*left, taking_s=time.monotonic() - began)
            if not self._busy and not self._active.is_set():
                shared.stir.discard(self)
            if not self._busy:
                with rounds.asking(quiet, self._active.set):
                    await self._active.wait()

    async def _end(self, kernel: Kernel, opened: OpenFiles) -> None:
        """End the kernel at once, then measure the size to tolerate: a measurement that exceeded
        the limit stopped early."""
        await kernel.kill(Cause.DISK)
        used, _ = await _measured(kernel, opened, _SCAN_MAX_S, None)
        self._shared.tolerated = (used.bytes, used.inodes)


class FreeSpaceProbe:
    """The space that the file system may lose before the next measurement, whatever takes it: as
    much as the files had left at the last one, which took `taking_s`."""

    def __init__(self, left: int, files_left: int, *, taking_s: float = 0.0) -> None:
        self._left = left
        self._files_left = files_left
        self._tick_s = max(_TICK_S, min(_PERIOD_S, taking_s))  # a slow tree is not walked all day
        self._at_first: tuple[int, int] | None = None

    async def last(self, opened: OpenFiles) -> None:
        """Return when it is time to look. Not at once is anything asked: most cells are over soon,
        and should not share the interpreter with a thread that is of no use to them."""
        loop = asyncio.get_running_loop()
        due = loop.time() + _PERIOD_S
        await asyncio.sleep(_SHORT_CELL_S)
        while (wait_s := due - loop.time()) > 0:
            if await self._is_taken(opened):
                return
            await asyncio.sleep(min(self._tick_s, wait_s))

    async def _is_taken(self, opened: OpenFiles) -> bool:
        try:
            free = await _free_space(opened)
        except OSError:
            return False
        if self._at_first is None:
            self._at_first = free
        taken, files_taken = (a - b for a, b in zip(self._at_first, free, strict=True))
        return taken > self._left or files_taken > self._files_left


# The last reply of statvfs(2) for each file system, by its device, and when it was asked for.
_replies: WeakKeyDictionary[
    asyncio.AbstractEventLoop, dict[int, tuple[float, asyncio.Future[tuple[int, int]]]]
] = WeakKeyDictionary()


async def _free_space(opened: OpenFiles) -> tuple[int, int]:
    """Return the free bytes and inodes of the file system with these files. Raise OSError.

    All watches of an event loop share a reply for a moment: with one call for each, those of 100
    busy kernels took a tenth of a core.
    """
    trees, loop = _limited(opened), asyncio.get_running_loop()
    fd = trees[0].fd if trees else _quarantine(opened).fd
    replies = _replies.setdefault(loop, {})
    device, now = os.fstat(fd).st_dev, loop.time()
    at, reply = replies.get(device, (0.0, None))
    if reply is None or now - at > _SHARED_S:
        reply = asyncio.ensure_future(opened.call(lambda: _free(fd)))
        replies[device] = now, reply
    return await asyncio.shield(reply)


def _free(fd: int) -> tuple[int, int]:
    status = os.fstatvfs(fd)
    return status.f_bfree * status.f_frsize, status.f_ffree


class IdleProbe:
    """Checks whether a jail did nothing since this was created; processes of an ended run may still
    write."""

    def __init__(self, kernel: Kernel) -> None:
        inside = kernel.jail.processes()
        # Of PID 1 and the kernel alone, PID 1 has nothing to do by itself.
        self._inside = inside[1:] if len(inside) == 2 else inside
        self._seen = self._look()

    def lasts(self) -> bool:
        return bool(self._seen) and self._look() == self._seen

    def _look(self) -> list[tuple[bytes, ...]]:
        return [procfs.activity(pid) for pid in self._inside]


class ProbeScheduler:
    """Asks every idle jail of one event loop now and then whether it still is: one timer for all
    of them, 15 µs each."""

    _of: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, "ProbeScheduler"]] = (
        WeakKeyDictionary()
    )

    def __init__(self) -> None:
        self._asked: dict[IdleProbe, Callable[[], None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    @classmethod
    def for_running_loop(cls) -> "ProbeScheduler":
        return cls._of.setdefault(asyncio.get_running_loop(), cls())

    @contextmanager
    def asking(self, quiet: IdleProbe, stirred: Callable[[], None]) -> Iterator[None]:
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


async def _measured(
    kernel: Kernel, opened: OpenFiles, scan_s: float, enough: EarlyStop | None
) -> tuple[DiskUsage, IdleProbe]:
    """Return the size of the files, and the parts that are quiet as long as it is right. If the
    files cannot be measured, return 0: the next measurement may succeed."""
    try:
        used, quiet, unlinked = await opened.call(lambda: _look(kernel, opened, scan_s, enough))
        if unlinked is None:
            unlinked = await kernel.jail.unlinked(os.fstat(_limited(opened)[0].fd).st_dev)
    except (OSError, errors.SbxError) as error:
        _log.warning("a workspace could not be measured: %s", error)
        return DiskUsage(0, 0, complete=False), IdleProbe(kernel)
    return replace(used, bytes=used.bytes + unlinked[0], files=used.files + unlinked[1]), quiet


def _look(
    kernel: Kernel, opened: OpenFiles, scan_s: float, enough: EarlyStop | None
) -> tuple[DiskUsage, IdleProbe, tuple[int, int] | None]:
    """Return the larger size of this conversation and of all conversations; the quiet parts, which
    were recorded before, so that the next measurement covers later writes; and the bytes and the
    number of unlinked files, None if only the broker may look."""
    quiet = IdleProbe(kernel)
    trees = _limited(opened)
    aside = [] if opened.quarantine is None else [opened.quarantine.tree]
    looks, extra = (
        [tree.measure(max_entries=_ENTRIES, deadline_s=scan_s, enough=enough) for tree in some]
        for some in (trees, aside)
    )
    used = DiskUsage(
        max((look.bytes for look in looks), default=0) + sum(look.bytes for look in extra),
        max((look.inodes for look in looks), default=0) + sum(look.inodes for look in extra),
        complete=all(look.complete for look in (*looks, *extra)),
    )
    if not trees:  # files without a name may be of the directory, which has no limit
        return used, quiet, (0, 0)
    try:
        device = os.fstat(trees[0].fd).st_dev
        unlinked = procfs.unlinked_of(kernel.jail.processes(), device, _HELD_S)
    except PermissionError:
        return used, quiet, None
    return used, quiet, unlinked


def _limited(opened: OpenFiles) -> list[Tree]:
    """Return the trees of the files, where they have a limit and Linux does not keep it."""
    if opened.measured is None or opened.has_quota:
        return []
    return [opened.measured] if opened.shared is None else [opened.measured, opened.shared]


def _quarantine(opened: OpenFiles) -> Tree:
    assert opened.quarantine is not None
    return opened.quarantine.tree
