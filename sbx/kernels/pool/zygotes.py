"""The zygotes of one policy, one after the other: at any time one of them forks kernels.

    start     the first fork starts a zygote, once for all callers that wait for it
    watch     when a zygote ends, the next fork starts another one, after a delay that grows
    replace   a worn zygote continues to fork until its successor has started
    retire    the zygote ends after the forks that are in flight; the jails it forked live on

A kernel shares the address layout and the hash seed of its zygote, because a fork copies both.
Only a new zygote (see `upkeep.worn`) changes them. A policy that does not allow sharing them sets
`start = "cold"`.
"""

import asyncio
import contextlib
import logging
import math
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence, Set
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from sbx import errors
from sbx.aio import run_to_completion
from sbx.isolation.broker.jail import Jail, ZygoteHandle
from sbx.isolation.launch_plan import Bind, Interpreter, Paths, ZygotePlan
from sbx.isolation.plan import Filters, plan, zygote_plan
from sbx.isolation.probe import Capabilities
from sbx.kernels.pool import scaling
from sbx.linux import procfs
from sbx.policy import Policy

_log = logging.getLogger(__name__)
_IN_FLIGHT_S = 30.0  # the longest time for one fork


@dataclass(frozen=True, slots=True)
class Key:
    """Kernels of equal keys come from one zygote and one pool.

    `uid` is the host uid that its jails need, if it is not in the broker's range. `walls` returns
    the walls of the policy, for jails to rehearse. The walls of a jail may be narrower, so keys
    that differ only in that are equal. `identities` are those of the files of the plan,
    because a zygote keeps the files that it has. `unfit` is the reason why this request, unlike
    others of the same key, cannot use a forked kernel; empty if it can.
    """

    plan: ZygotePlan
    min_idle: int
    max_idle: int
    uid: int | None = None
    walls: Callable[[], Mapping[str, Any]] = field(default=dict, compare=False, repr=False)
    identities: tuple[tuple[str | int, ...], ...] = field(default=(), repr=False)
    unfit: str = field(default="", compare=False)


def key_of(
    loaded: Policy,
    narrowed: Policy,
    capabilities: Capabilities,
    paths: Paths,
    filters: Filters,
    uid: int | None = None,
) -> Key | None:
    """Return the key for a kernel of the policy `narrowed`, which a request made from `loaded`.

    Return None if the kernel must start cold. `decide_walls` must have accepted both policies.

    Restrictions that a request may tighten are enforced in the jail, so sandboxes with other limits
    and variables share a zygote. Mounts and imports are part of the zygote and cannot change later.

    Read a few directories of the host.
    """
    if narrowed.pool.start == "cold":
        return None
    shared = loaded.model_copy(
        update={
            "filesystem": narrowed.filesystem,
            "preload": narrowed.preload,
            "network": loaded.network.model_copy(update={"mode": narrowed.network.mode}),
        }
    )
    planned = zygote_plan(shared, capabilities, paths)
    return Key(
        planned,
        loaded.pool.min_idle,
        loaded.pool.max_idle,
        uid,
        partial(_walls, shared, capabilities, paths, filters),
        tuple(_file_identities(planned, paths.interpreter)),
        _unfit(set(narrowed.env) - set(loaded.env), shared.preload),
    )


def _unfit(variables: Set[str], preload: Sequence[str]) -> str:
    """Return why a forked kernel cannot have these variables, or "".

    Modules may read any variable at import, and Python reads the locale's variables when it starts.
    A forked kernel has done both before it gets the variables of a request.
    """
    if preload and variables:
        return f"env: the request sets {min(variables)}, and the policy preloads modules"
    early = [name for name in variables if name in ("LANG", "LANGUAGE") or name.startswith("LC_")]
    return f"env: Python reads {min(early)} when it starts" if early else ""


def _file_identities(
    planned: ZygotePlan, interpreter: Interpreter
) -> Iterator[tuple[str | int, ...]]:
    """Yield the identity of each mounted file, and the change times of the imported directories.

    A mounted directory shows its own changes, unless another directory takes its place. The zygote
    has imported the files that the interpreter's directories held at that time.
    """
    for mount in planned.mounts:
        if isinstance(mount, Bind):
            with contextlib.suppress(OSError):
                status = os.stat(mount.source)
                yield mount.source, status.st_dev, status.st_ino
    environment = os.path.dirname(os.path.dirname(interpreter.executable))
    for prefix in dict.fromkeys((environment, *interpreter.prefixes)):
        for path in (f"{prefix}/pyvenv.cfg", *_package_directories(prefix)):
            with contextlib.suppress(OSError):
                status = os.stat(path)
                yield path, status.st_dev, status.st_ino, status.st_mtime_ns


def _package_directories(prefix: str) -> Iterator[str]:
    """Yield the package directories of this prefix, under the names of Python and of Debian."""
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(f"{prefix}/lib")):
            if name.startswith("python3"):
                yield from (f"{prefix}/lib/{name}/{kind}-packages" for kind in ("dist", "site"))


def _walls(
    policy: Policy, capabilities: Capabilities, paths: Paths, filters: Filters
) -> Mapping[str, Any]:
    launch_plan = plan(policy, capabilities, paths, filters)
    return {**launch_plan.seal.to_json(), "filter": launch_plan.filter.program.hex()}


class ZygoteGroup:
    """See the module. `on_end` is called when a zygote ended unexpectedly."""

    def __init__(
        self,
        start: Callable[[], Awaitable[ZygoteHandle]],
        clock: asyncio.AbstractEventLoop,
        on_end: Callable[[], None],
    ) -> None:
        self._start = start
        self._clock = clock
        self._on_end = on_end
        self._zygote: ZygoteHandle | None = None
        self._started_at = 0.0
        self._pid: int | None = None
        self._resident = 0
        self._starting: asyncio.Task[ZygoteHandle] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._leaving: dict[ZygoteHandle, asyncio.Task[None]] = {}
        self._failures = 0
        self._retry_at = 0.0
        self._cause = ""
        self._closed = False

    async def fork(self, *, ahead: bool = False) -> Jail:
        """Return an idle jail from the live zygote or a new one.

        `ahead` is true for the pool and false for an order. Raise the error of the start or of the
        fork. Soon after a failure, raise Unavailable `zygote_unavailable` at once.
        """
        zygote = await self._live()
        try:
            jail = await zygote.fork(ahead=ahead)
        except errors.SbxError as error:
            await self.rest(error, zygote)
            raise
        if zygote is self._zygote and self._pid is None and jail.kernel_pid is not None:
            self._pid = _parent(jail.kernel_pid)
            self._resident = procfs.resident(self._pid) if self._pid is not None else 0
        return jail

    def prepare(self) -> None:
        """Start the zygote now, if it is absent: a fork will come soon."""
        is_here = self._zygote is not None or self._starting is not None
        if not is_here and not self._closed and not self.rests_s:
            self._begin()

    @property
    def zygote(self) -> ZygoteHandle | None:
        """The zygote that forks now."""
        return self._zygote

    @property
    def rests_s(self) -> float:
        """The seconds without forks after a failure of a zygote; 0 if forks are allowed."""
        if self._zygote is not None:
            return 0.0
        return max(0.0, self._retry_at - self._clock.time())

    async def rest(self, error: errors.SbxError, zygote: ZygoteHandle) -> None:
        """End this zygote, whose kernels fail, and wait before another one is started.

        If many of its kernels fail at the same time, only the first failure counts.
        """
        if zygote is self._zygote:
            self._zygote = None
            self._count_failure(error.message, zygote)
        await _retire(zygote)

    def tend(self) -> None:
        """Start a successor if the zygote is worn; it takes over when it has started."""
        if self._closed or self._zygote is None or self._starting is not None:
            return
        if self._clock.time() < self._retry_at:
            return  # a successor failed recently
        if why := scaling.needs_replacing(self._wear(self._zygote)):
            _log.info("a zygote is replaced: %s", why)
            self._begin()

    async def close(self) -> None:
        """End the zygote, also one that is being started. Jails forked from it live on."""
        self._closed = True
        for task in (self._starting, self._watching, *self._leaving.values()):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, errors.SbxError):
                    await run_to_completion(task)
        for zygote in self._leaving:
            await _retire(zygote)
        if self._zygote is not None:
            zygote, self._zygote = self._zygote, None
            await _retire(zygote)

    async def _live(self) -> ZygoteHandle:
        if self._zygote is not None and self._zygote.alive:
            return self._zygote
        if self._closed:
            raise unavailable("the pool was closed")
        if self._starting is None:
            if rests_s := self.rests_s:
                raise unavailable(f"{self._cause}; not tried again for {math.ceil(rests_s)} s")
            self._begin()
        starting = self._starting
        assert starting is not None
        await asyncio.wait([starting])  # a cancelled caller does not cancel it for the others
        if starting.cancelled():
            raise unavailable("the pool was closed")
        return starting.result()

    def _begin(self) -> None:
        # The zygote serves all callers, so its log lines must not carry the context of one.
        self._starting = asyncio.create_task(self._succeed(), context=Context())
        self._starting.add_done_callback(self._begun)

    def _begun(self, task: "asyncio.Task[ZygoteHandle]") -> None:
        self._starting = None
        if not task.cancelled() and (error := task.exception()) is not None:
            self._count_failure(str(error), None)

    async def _succeed(self) -> ZygoteHandle:
        """Start a zygote. Then let the previous one go, after the forks that are in flight."""
        zygote = await self._start()
        before, self._zygote = self._zygote, zygote
        self._started_at = self._clock.time()
        self._pid = None
        if self._watching is not None:
            self._watching.cancel()
        self._watching = asyncio.create_task(self._watch(zygote))
        if before is not None:
            self._leaving[before] = asyncio.create_task(self._let_go(before))
        return zygote

    async def _let_go(self, zygote: ZygoteHandle) -> None:
        try:
            async with asyncio.timeout(_IN_FLIGHT_S):
                await zygote.idle()
        except TimeoutError:
            _log.warning("a replaced zygote did not finish its forks within %g s", _IN_FLIGHT_S)
        await _retire(zygote)
        del self._leaving[zygote]

    async def _watch(self, zygote: ZygoteHandle) -> None:
        why = await zygote.gone()
        if self._zygote is zygote:
            self._zygote = None
            self._count_failure(f"the zygote ended: {why}", zygote)
            _log.warning("a zygote ended, and the kernels it forked live on: %s", why)
            self._on_end()

    def _count_failure(self, cause: str, zygote: ZygoteHandle | None) -> None:
        now = self._clock.time()
        lived_s = now - self._started_at if zygote is not None else 0.0
        self._failures = scaling.failures_after(self._failures, lived_s)
        self._retry_at = now + scaling.delay(self._failures)
        self._cause = cause

    def _wear(self, zygote: ZygoteHandle) -> scaling.ZygoteAge:
        age_s = self._clock.time() - self._started_at
        grown = procfs.resident(self._pid) - self._resident if self._pid is not None else 0
        return scaling.ZygoteAge(age_s, zygote.forks, grown)


async def _retire(zygote: ZygoteHandle) -> None:
    try:
        await zygote.retire()
    except errors.SbxError as error:
        _log.warning("a zygote did not end and is left to its broker: %s", error)


def _parent(pid: int) -> int | None:
    """Return the parent of a forked kernel, which is its zygote. None if the kernel has ended."""
    try:
        return int(procfs.status(pid)["PPid"])
    except OSError:
        return None


def unavailable(cause: str) -> errors.Unavailable:
    """Return the error for a kernel that cannot be forked now, neither for an order nor ahead."""
    return errors.Unavailable(
        f"no kernel can be forked: {cause}",
        code="zygote_unavailable",
        hint="until then, kernels start by the cold path; `sbx doctor` tries each path",
    )
