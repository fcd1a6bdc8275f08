"""The limit of the size of a conversation's files: by quota, or by a watch that kills.

    quota     Linux refuses more: sbx.isolation.project_quota. There is no watch
    watched   sbx measures the files while code runs, and ends the kernel that exceeds the limit.
              The files can grow between two measurements, and they stay as large as they are then

A measurement walks the files, and asks the processes of the jail for unlinked files. It happens
every half second, and earlier if the file system lost as much space as the files had left. A file
without a name can be in flight, or mapped and not open: then the loss of the file system counts
(`HiddenGrowth`). Of a directory of the host the growth counts, with its quarantine (`HostGrowth`).
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from sbx import errors
from sbx.aio import kept_with, run_to_completion
from sbx.errors import CannotEnforce
from sbx.isolation.launch_plan import Wall
from sbx.isolation.probe import Capabilities, Layer
from sbx.kernels.kernel import Kernel
from sbx.kernels.memory_watcher import HiddenGrowth
from sbx.kernels.watch import keep_watching
from sbx.linux import hidden_files, procfs
from sbx.policy import Policy
from sbx.policy.tables import LimitsPolicy
from sbx.protocol.runs import Cause
from sbx.runtime.files import free_space
from sbx.runtime.files.open_files import OpenFiles
from sbx.runtime.resources import RuntimeResources
from sbx.telemetry.background import background_context
from sbx.workspace.disk_usage import DiskUsage, EarlyStop
from sbx.workspace.tree import Tree

_log = logging.getLogger(__name__)
_PERIOD_S = 0.5
_STEP = 64 << 20  # may be written before the first look of a kernel: it knows nothing yet
_STEP_FILES = 5_000
# A kernel leaves less than this beyond the limit, see WATCHED.
_OVERSHOOT, _OVERSHOOT_FILES = 2 << 30, 100_000
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
    " its files takes as long as it may; a file of hidden size, as one in flight, counts by the"
    f" space that the disk lost, below {free_space.UNKNOWN_FACTOR} times the limit at most the"
    " jail's writes; the host's own disk is what ends many such kernels"
)
_FOREIGN = "no quota: a directory of the host is the workspace"
_GROWTH = (
    "watched: the growth of the directory of the host since the first kernel, by the files that"
    " changed, when its file system has lost as much; the kernel killed, at once if the jail wrote"
    f" half of it, else at {free_space.UNKNOWN_FACTOR} times the limit"
)
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
        return Wall("disk", demanded, _GROWTH, weaker=True)
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
        self.growth: free_space.HostGrowth | None = None
        self.looking = asyncio.Lock()  # so that growth ends one kernel, not two

    def forget(self, watch: "DiskLimit") -> None:
        self.stir.discard(watch)
        self.suspects.discard(watch)


class DiskLimit:
    """Watches the files of one conversation for one kernel, as well as it can: they can grow
    between two measurements.

    A size above the limit is tolerated as long as it does not grow: the next run may delete files.
    But no kernel starts over files that are far above it: see `check`.
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

    async def check(self, opened: OpenFiles) -> None:
        """Raise Conflict `workspace_full` if a kernel was ended over these files, and left more
        than any kernel leaves between two measurements."""
        limits, shared = self._limits, self._shared
        most = limits.workspace_max + max(limits.workspace_max, _OVERSHOOT)
        most_files = limits.workspace_files + max(limits.workspace_files, _OVERSHOOT_FILES)
        if shared.tolerated[0] <= most and shared.tolerated[1] <= most_files:
            return
        used = await opened.call(lambda: _size_of(_limited(opened), _SCAN_MAX_S, None))
        shared.tolerated = (used.bytes, used.inodes)
        if used.bytes > most or used.inodes > most_files:
            raise errors.Conflict(
                f"the workspace has {used.bytes} bytes in {used.inodes} files and directories, far"
                f" above its limits of {limits.workspace_max} bytes and {limits.workspace_files}",
                code="workspace_full",
                hint="delete files by the file API, or delete the conversation or the sandbox",
                details={"limit": limits.workspace_max, "bytes": used.bytes, "files": used.inodes},
            )

    def watch(self, kernel: Kernel, opened: OpenFiles) -> None:
        """Watch this kernel until `close`. Do nothing if Linux limits the files."""
        self._hidden = HiddenGrowth()
        self._writes, self._hidden_writes = free_space.WriteCounter(), HiddenGrowth()
        if _limited(opened) or opened.host_directory is not None:
            looking = keep_watching(
                lambda: self._look_now_after_error(kernel, opened),
                lambda: kernel.kill(Cause.CRASHED),
            )
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

    async def _look_now_after_error(self, kernel: Kernel, opened: OpenFiles) -> None:
        try:
            await self._look(kernel, opened)
        except Exception:
            self._active.set()
            raise

    async def _look(self, kernel: Kernel, opened: OpenFiles) -> None:
        limits, shared = self._limits, self._shared
        rounds = ProbeScheduler.for_running_loop()
        fd, scan_s = _fd(opened), _SCAN_S
        room = free_space.FreeSpaceProbe(fd, _STEP, _STEP_FILES, period_s=_PERIOD_S)
        await self._active.wait()
        if opened.measured is None and opened.host_directory is not None and shared.growth is None:
            directory = opened.host_directory
            shared.growth = await opened.call(lambda: free_space.HostGrowth(directory, limits))
        while True:
            self._active.clear()
            shared.stir.add(self)
            await room.last(opened)
            async with shared.looking:
                began = time.monotonic()
                most = max(limits.workspace_max, shared.tolerated[0])
                most_files = max(limits.workspace_files + _NAMES, shared.tolerated[1])
                enough = EarlyStop(most, most_files)
                used, quiet = await self._measured(kernel, opened, scan_s, enough)
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
                if shared.growth is not None:
                    left = shared.growth.left()
                taking_s = time.monotonic() - began
                room = free_space.FreeSpaceProbe(fd, *left, period_s=_PERIOD_S, taking_s=taking_s)
            if not self._busy and not self._active.is_set():
                shared.stir.discard(self)
            if not self._busy:
                hiding = self._hidden.hiding
                before = await free_space.current(opened, fd) if hiding else (0, 0)
                with rounds.asking(quiet, self._active.set):
                    await self._active.wait()
                if hiding:
                    self._hidden.skip(before[0] - (await free_space.current(opened, fd))[0])

    async def _end(self, kernel: Kernel, opened: OpenFiles) -> None:
        """End the kernel at once, then measure the size to tolerate: a measurement that exceeded
        the limit stopped early."""
        await kernel.kill(Cause.DISK)
        used, _ = await self._measured(kernel, opened, _SCAN_MAX_S, None)
        self._shared.tolerated = (used.bytes, used.inodes)

    async def _measured(
        self, kernel: Kernel, opened: OpenFiles, scan_s: float, enough: EarlyStop | None
    ) -> tuple[DiskUsage, "IdleProbe"]:
        """Return the size of the files, and the parts that are quiet as long as it is right: they
        were recorded before, so that the next measurement covers later writes. If the files cannot
        be measured, return 0: the next measurement may succeed."""
        try:
            quiet, used, host, written, unlinked = await opened.call(
                lambda: self._look_at(kernel, opened, scan_s, enough)
            )
            if unlinked is None:
                unlinked = await kernel.jail.unlinked(os.fstat(_fd(opened)).st_dev)
        except (OSError, errors.SbxError) as error:
            _log.warning("a workspace could not be measured: %s", error)
            return DiskUsage(0, 0, complete=False), IdleProbe(kernel)
        used = used.plus(unlinked.bytes, unlinked.files)
        if used.complete:
            hidden = self._hidden.charge(unlinked.hidden, host, used.bytes)
            by_jail = self._hidden_writes.charge(unlinked.hidden, written, used.bytes)
            if (
                written < free_space.UNKNOWN_WRITES
                and hidden <= free_space.UNKNOWN_FACTOR * self._limits.workspace_max
            ):
                hidden = min(hidden, by_jail)  # the others may have caused the rest
            used = used.plus(hidden, 0)
        return used, quiet

    def _look_at(
        self, kernel: Kernel, opened: OpenFiles, scan_s: float, enough: EarlyStop | None
    ) -> tuple["IdleProbe", DiskUsage, int, int, hidden_files.Unlinked | None]:
        """Measure the files, the used bytes of their file system (plus a constant), the bytes that
        the jail wrote, and the files without a name; None if only the broker may look."""
        quiet = IdleProbe(kernel)
        trees = _limited(opened)
        used = _size_of(trees, scan_s, enough)
        if opened.quarantine is not None:
            aside = _size_of([opened.quarantine.tree], scan_s, enough)
            used = used.plus(aside.bytes, aside.inodes, complete=aside.complete)
        pids = kernel.jail.processes()
        if (growth := self._shared.growth) is not None and opened.host_directory is not None:
            used = used.plus(*growth.measure(opened.host_directory, pids, _SCAN_MAX_S))
        fd = _fd(opened)
        host, written = -free_space.free(fd)[0], self._writes.note(pids)
        if not trees:  # files without a name in a directory of the host are part of its growth
            return quiet, used, host, written, hidden_files.Unlinked(0, 0)
        try:
            unlinked = hidden_files.unlinked_of(pids, os.fstat(fd).st_dev, _HELD_S)
        except PermissionError:
            return quiet, used, host, written, None
        return quiet, used, host, written, unlinked


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

    def __init__(self) -> None:
        self._asked: dict[IdleProbe, Callable[[], None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    @classmethod
    def for_running_loop(cls) -> "ProbeScheduler":
        return kept_with(asyncio.get_running_loop(), cls)

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


def _size_of(trees: Sequence[Tree], scan_s: float, enough: EarlyStop | None) -> DiskUsage:
    """Return the larger size of this conversation and of all conversations."""
    looks = [tree.measure(max_entries=_ENTRIES, deadline_s=scan_s, enough=enough) for tree in trees]
    return DiskUsage(
        max((look.bytes for look in looks), default=0),
        max((look.inodes for look in looks), default=0),
        complete=all(look.complete for look in looks),
    )


def _limited(opened: OpenFiles) -> list[Tree]:
    """Return the trees of the files, where they have a limit and Linux does not keep it."""
    if opened.measured is None or opened.has_quota:
        return []
    return [opened.measured] if opened.shared is None else [opened.measured, opened.shared]


def _fd(opened: OpenFiles) -> int:
    """Return a descriptor on the file system of the watched files."""
    if trees := _limited(opened):
        return trees[0].fd
    assert opened.host_directory is not None
    return opened.host_directory.fd
