"""The zygotes of one policy, one after the other: at any time one of them forks kernels.

    start     with the first fork, once for all who wait for it
    watch     its end is noticed; the next fork starts another one, after a delay that grows
    replace   one that is worn forks on until its successor has started
    retire    the zygote ends, after the forks that are in flight; the jails it forked live on

A kernel shares the address layout and the hash seed of its zygote, because a fork copies both.
Replacing the zygote (see `upkeep.worn`) is what changes them; a policy that cannot have that at
all says `start = "cold"`.
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
from typing import Any, Protocol

from sbx import errors
from sbx.isolation.launch import Jail, Zygote
from sbx.isolation.patience import to_the_end
from sbx.isolation.plan import Bind, Filters, Interpreter, Paths, ZygotePlan, plan, zygote_plan
from sbx.isolation.probe import Capabilities
from sbx.kernels import upkeep
from sbx.linux import procfs
from sbx.policy import Policy

_log = logging.getLogger(__name__)
_IN_FLIGHT_S = 30.0  # as long as an order for a fork may take


class Clock(Protocol):
    """What an event loop has of a clock; the tests have one of their own."""

    def time(self) -> float: ...

    def call_later(self, delay: float, callback: Callable[[], object], /) -> Any: ...


@dataclass(frozen=True, slots=True)
class Key:
    """Kernels of equal keys come from one zygote and one pool.

    `uid`: the host uid that its jails need, if it is none of the broker's range. `walls` gives
    those of the policy, for jails to rehearse; the ones they get may be narrower, so keys that
    differ in nothing else are equal. `found`: which files the paths of the plan led to, since a
    zygote goes on with those it has. `unfit`: why this request, unlike others of the same key, is
    not for a forked kernel; empty when it is.
    """

    plan: ZygotePlan
    min_idle: int
    max_idle: int
    uid: int | None = None
    walls: Callable[[], Mapping[str, Any]] = field(default=dict, compare=False, repr=False)
    found: tuple[tuple[str | int, ...], ...] = field(default=(), repr=False)
    unfit: str = field(default="", compare=False)


def key_of(
    loaded: Policy,
    narrowed: Policy,
    capabilities: Capabilities,
    paths: Paths,
    filters: Filters,
    uid: int | None = None,
) -> Key | None:
    """The key for a kernel of the policy `narrowed`, which a request made of the one `loaded`;
    None when it is to start cold. Both are policies that `decide_walls` has not refused.

    What a request may tighten is put in force in the jail, so sandboxes with other limits and
    variables share a zygote. Not so what a zygote has done already: mounts and imports.

    Looks at a few directories of the host.
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
        tuple(_found(planned, paths.interpreter)),
        _unfit(set(narrowed.env) - set(loaded.env), shared.preload),
    )


def _unfit(variables: Set[str], preload: Sequence[str]) -> str:
    """Modules may read any variable as they are imported, and Python reads the locale's as it
    starts. A kernel that is forked has done both before a request tells it of its variables."""
    if preload and variables:
        return f"env: {min(variables)} is the request's, and the policy preloads modules"
    early = [one for one in variables if one in ("LANG", "LANGUAGE") or one.startswith("LC_")]
    return f"env: Python reads {min(early)} as it starts" if early else ""


def _found(planned: ZygotePlan, interpreter: Interpreter) -> Iterator[tuple[str | int, ...]]:
    """What is mounted, and when what is imported from was changed.

    A directory that is mounted shows by itself what becomes of it, unless another one takes its
    place; a zygote has imported from the interpreter's what was there then.
    """
    for mount in planned.mounts:
        if isinstance(mount, Bind):
            with contextlib.suppress(OSError):
                its = os.stat(mount.source)
                yield mount.source, its.st_dev, its.st_ino
    environment = os.path.dirname(os.path.dirname(interpreter.executable))
    for prefix in dict.fromkeys((environment, *interpreter.prefixes)):
        for path in (f"{prefix}/pyvenv.cfg", *_package_directories(prefix)):
            with contextlib.suppress(OSError):
                its = os.stat(path)
                yield path, its.st_dev, its.st_ino, its.st_mtime_ns


def _package_directories(prefix: str) -> Iterator[str]:
    """Where packages of this prefix may be, by the two names that Python and Debian give it."""
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(f"{prefix}/lib")):
            if name.startswith("python3"):
                yield from (f"{prefix}/lib/{name}/{kind}-packages" for kind in ("dist", "site"))


def _walls(
    policy: Policy, capabilities: Capabilities, paths: Paths, filters: Filters
) -> Mapping[str, Any]:
    like = plan(policy, capabilities, paths, filters)
    return {**like.seal.to_json(), "filter": like.filter.program.hex()}


class Lineage:
    """See the module. `on_end` is called when a zygote ended that nobody had asked to."""

    def __init__(
        self, start: Callable[[], Awaitable[Zygote]], clock: Clock, on_end: Callable[[], None]
    ) -> None:
        self._start = start
        self._clock = clock
        self._on_end = on_end
        self._zygote: Zygote | None = None
        self._started_at = 0.0
        self._pid: int | None = None
        self._resident = 0
        self._starting: asyncio.Task[Zygote] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._leaving: dict[Zygote, asyncio.Task[None]] = {}
        self._failures = 0
        self._retry_at = 0.0
        self._cause = ""
        self._closed = False

    async def fork(self, *, ahead: bool = False) -> Jail:
        """A parked jail, from the zygote that lives or from a new one; `ahead` of need or on order.

        Raises what the start or the fork raised; soon after a failure Unavailable
        `zygote_unavailable`, at once.
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

    @property
    def zygote(self) -> Zygote | None:
        """The one that forks now."""
        return self._zygote

    @property
    def rests_s(self) -> float:
        """For how long nothing is forked, because a zygote failed just now; 0 when it may be."""
        if self._zygote is not None:
            return 0.0
        return max(0.0, self._retry_at - self._clock.time())

    async def rest(self, error: errors.SbxError, zygote: Zygote) -> None:
        """What this zygote gives does not work: end it, and wait before another one is started.

        Of many who fail at the same time, the first one's word is taken.
        """
        if zygote is self._zygote:
            self._zygote = None
            self._count_failure(error.message, zygote)
        await _retire(zygote)

    def tend(self) -> None:
        """Start a successor when the zygote is worn; it takes over when it is there."""
        if self._closed or self._zygote is None or self._starting is not None:
            return
        if self._clock.time() < self._retry_at:
            return  # a successor failed not long ago
        if why := upkeep.worn(self._wear(self._zygote)):
            _log.info("a zygote is replaced: %s", why)
            self._begin()

    async def close(self) -> None:
        """End the zygote, also one that is being started. Jails forked from it live on."""
        self._closed = True
        for task in (self._starting, self._watching, *self._leaving.values()):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, errors.SbxError):
                    await to_the_end(task)
        for zygote in self._leaving:
            await _retire(zygote)
        if self._zygote is not None:
            zygote, self._zygote = self._zygote, None
            await _retire(zygote)

    async def _live(self) -> Zygote:
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
        await asyncio.wait([starting])  # whoever stops waiting leaves it to the others
        if starting.cancelled():
            raise unavailable("the pool was closed")
        return starting.result()

    def _begin(self) -> None:
        # Kernels of all callers come from it: its log lines name none of them.
        self._starting = asyncio.create_task(self._succeed(), context=Context())
        self._starting.add_done_callback(self._begun)

    def _begun(self, task: "asyncio.Task[Zygote]") -> None:
        self._starting = None
        if not task.cancelled() and (error := task.exception()) is not None:
            self._count_failure(str(error), None)

    async def _succeed(self) -> Zygote:
        """Start a zygote, and only then let the one before it go, with what it still forks."""
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

    async def _let_go(self, zygote: Zygote) -> None:
        try:
            async with asyncio.timeout(_IN_FLIGHT_S):
                await zygote.idle()
        except TimeoutError:
            _log.warning("a zygote is replaced that has not forked within %g s", _IN_FLIGHT_S)
        await _retire(zygote)
        del self._leaving[zygote]

    async def _watch(self, zygote: Zygote) -> None:
        why = await zygote.gone()
        if self._zygote is zygote:
            self._zygote = None
            self._count_failure(f"the zygote ended: {why}", zygote)
            _log.warning("a zygote ended, and the kernels it forked live on: %s", why)
            self._on_end()

    def _count_failure(self, cause: str, zygote: Zygote | None) -> None:
        now = self._clock.time()
        lived_s = now - self._started_at if zygote is not None else 0.0
        self._failures = upkeep.failures_after(self._failures, lived_s)
        self._retry_at = now + upkeep.delay(self._failures)
        self._cause = cause

    def _wear(self, zygote: Zygote) -> upkeep.Wear:
        age_s = self._clock.time() - self._started_at
        grown = procfs.resident(self._pid) - self._resident if self._pid is not None else 0
        return upkeep.Wear(age_s, zygote.forks, grown)


async def _retire(zygote: Zygote) -> None:
    try:
        await zygote.retire()
    except errors.SbxError as error:
        _log.warning("a zygote is left to its broker: %s", error)


def _parent(pid: int) -> int | None:
    """The parent of a forked kernel is its zygote; None when the kernel has ended."""
    try:
        return int(procfs.status(pid)["PPid"])
    except OSError:
        return None


def unavailable(cause: str) -> errors.Unavailable:
    """Neither on order nor ahead of need can a kernel be forked."""
    return errors.Unavailable(
        f"no kernel can be forked: {cause}",
        code="zygote_unavailable",
        hint="kernels start by the cold path meanwhile; `sbx doctor` tries each path",
    )
