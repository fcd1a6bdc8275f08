"""Start a live kernel for an order by the fastest path that works: pool → fork → cold.

    pool   give an idle jail its plan: mounts, cgroup, uid, seal
    fork   the same with a jail that is forked for this order, if none is idle
    cold   bubblewrap and a new interpreter: on request, and if nothing else works

After a failure on one path, destroy the kernel, log and count the failure, and try the next path.
The receipt of the kernel gives the reason. A refusal that every path would give is raised by the
first path.
"""

import logging
import time
from dataclasses import replace

from sbx import errors
from sbx.aio import check_process
from sbx.kernels.kernel import Kernel
from sbx.kernels.pool.pools import FINAL, FINAL_CODES, KernelPools, StartAttempt, start_deadline
from sbx.kernels.pool.warm_pool import LaunchRequest, PrewarmedKernel, PrewarmSpec
from sbx.kernels.pool.zygotes import Key
from sbx.telemetry import metrics, spans

_log = logging.getLogger(__name__)
_COLD_TRIES = 5  # while all kernels were killed every 1.3 s, 3 were too few


class KernelFactory(KernelPools):
    """Starts the kernels of one runtime."""

    async def start(self, order: LaunchRequest) -> Kernel:
        """Return a sealed kernel that can run cells. Raise like the last path; nothing is left."""
        check_process(self._pid)
        started_at = time.monotonic()
        attempt = StartAttempt(started_at + self._deadline_s)
        with self._caller_waits():
            kernel = None
            if order.key is not None and self._zygotes_max:
                if order.key.unfit:
                    attempt.causes.append(order.key.unfit)
                else:
                    kernel = await self._fast(order, order.key, attempt)
            if kernel is None:
                kernel = await self._cold(order, attempt)
                await self._broker.end_early_zygote()
        kernel.receipt = replace(
            kernel.receipt, path=attempt.path, fallback="; ".join(attempt.causes)
        )
        self.starts = self.starts.with_served(attempt.path)
        took_s = time.monotonic() - started_at
        metrics.acquired(attempt.path, took_s)
        spans.record("sbx.acquire", took_s, path=attempt.path, sandbox=order.sandbox)
        return kernel

    def take_prewarmed(
        self, key: Key | None, furnished: PrewarmSpec | None
    ) -> PrewarmedKernel | None:
        """Hand a kernel for a new sandbox over to the caller.

        Return None if none is ready, or without `furnished`. The zygote then starts, since the
        sandbox will start a kernel, and with `furnished` the pool keeps prewarmed ones.
        """
        check_process(self._pid)
        if key is None or key.unfit or not self._zygotes_max:
            return None
        try:
            pool = self._pool(key)
        except errors.Unavailable:
            return None  # the caller that starts a kernel gets the error
        with self._caller_waits(), pool.in_use():
            if furnished is not None and key.max_idle:
                prewarmed = pool.take_prewarmed(furnished)
                if prewarmed is not None:
                    return prewarmed
            pool.lineage.prepare()
            return None

    def count_prewarmed(self, sandbox: str) -> None:
        """Count a prewarmed kernel that begins to serve: no caller waited for it."""
        self.starts = self.starts.with_served("pool")
        metrics.acquired("pool", 0.0)
        spans.record("sbx.acquire", 0.0, path="pool", sandbox=sandbox)

    async def _fast(self, order: LaunchRequest, key: Key, attempt: StartAttempt) -> Kernel | None:
        """Start a kernel by pool or by fork. Return None, and note the causes, if both fail."""
        attempt.path = "fork"
        try:
            pool = self._pool(key)
        except errors.Unavailable as error:
            self._failed(error, attempt)
            return None
        with pool.in_use():
            if order.pooled and (idle := pool.take()) is not None:
                attempt.path = "pool"
                try:
                    async with self._room, attempt.fast():
                        return await self._enter(idle, order, attempt)
                except errors.SbxError as error:
                    self._failed(error, attempt)
                    attempt.suspect = (pool, error, idle.jail.zygote)
                    if isinstance(error, errors.CannotEnforce):
                        return None  # a jail forked now would refuse the same
                attempt.path = "fork"
            jail, before = None, pool.lineage.zygote
            try:
                async with self._room, attempt.fast():
                    jail = await pool.lineage.fork()
                    kernel = await self._enter(await Kernel.attach(jail), order, attempt)
            except errors.SbxError as error:
                self._failed(error, attempt)
                if jail is not None:
                    attempt.suspect = (pool, error, jail.zygote)
                elif before is not None and error.code == "start_timeout":
                    attempt.suspect = (pool, error, before)  # it existed, but has forked nothing
                return None
            if attempt.causes:
                self._dismiss(pool.shrink(0))  # other idle kernels may fail in the same way
            return kernel

    async def _cold(self, order: LaunchRequest, attempt: StartAttempt) -> Kernel:
        """Launch a kernel. Launch another one if it is killed before it is ready.

        Other kernels may have been killed with it. If the kernel's memory ran out, a second try
        would only fail in the same way.
        """
        attempt.path = "cold"
        for tries_left in reversed(range(_COLD_TRIES)):
            try:
                kernel = await self._launch(order, attempt)
            except errors.SbxError as error:
                self.starts = self.starts.with_failed("cold", error.message)
                if not _was_killed(error) or not tries_left or not attempt.left_s:
                    raise
                _log.warning("no kernel by the path cold, which is tried again: %s", error)
            else:
                break
        if attempt.suspect is not None:
            # The order can be served, so the zygote was at fault. If the cold path had failed, too,
            # the cause could be the caller's own workspace, and other callers should not wait.
            pool, failure, zygote = attempt.suspect
            self._dismiss(pool.mark_untrusted(failure, zygote))
        return kernel

    async def _launch(self, order: LaunchRequest, attempt: StartAttempt) -> Kernel:
        async with start_deadline(attempt.left_s):
            jail = await self._broker.launch(order.sandbox, order.plan, order.identities)
        return await Kernel.start(jail, order.config, attempt.left_s)

    def _failed(self, error: errors.SbxError, attempt: StartAttempt) -> None:
        """Note the error. Raise it again if the next path would only repeat it."""
        self.starts = self.starts.with_failed(attempt.path, error.message)
        if isinstance(error, FINAL) or error.code in FINAL_CODES:
            raise error
        level = logging.INFO if error.code == "zygote_unavailable" else logging.WARNING
        _log.log(level, "no kernel by the path %s: %s", attempt.path, error)
        attempt.causes.append(f"{attempt.path}: {error.message}")


def _was_killed(error: errors.SbxError) -> bool:
    """Whether a start failed because a process of the jail was killed, and not for its memory."""
    if error.details.get("oom_kills"):
        return False
    return error.code == "start_failed" or bool(error.details.get("killed"))
