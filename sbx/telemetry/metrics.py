"""Counters and timers of a service, for Prometheus.

Every function here may be called anywhere and at any time, and never raises. Until `enable` is
called, the functions do nothing and import nothing, so that a program that embeds sbx has no cost.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from msgspec import Struct

from sbx.telemetry.starts import StartCounts

if TYPE_CHECKING:
    from sbx.telemetry.prometheus import Collectors

Labelled = Mapping[tuple[str, ...], float]  # the values of a gauge, by the values of its labels
_PLAIN = "text/plain; version=0.0.4; charset=utf-8"


class _Counting:
    """The collectors of this process, or None while it does not count."""

    by: "Collectors | None" = None


def enable() -> None:
    """Start counting. A second call changes nothing."""
    if _Counting.by is None:
        from sbx.telemetry.prometheus import Collectors

        _Counting.by = Collectors()


def disable() -> None:
    """Forget all counts, as before `enable`. For tests, which share a process."""
    _Counting.by = None


def exposition() -> tuple[bytes, str]:
    """Return all metrics in the format of Prometheus, and its content type."""
    return (b"", _PLAIN) if _Counting.by is None else _Counting.by.exposition()


def watch(
    *,
    kernels: Callable[[], Labelled] | None = None,
    idle: Callable[[], float] | None = None,
    sandboxes: Callable[[], Labelled] | None = None,
    starts: Callable[[], StartCounts] | None = None,
    reserve: Callable[[], float] | None = None,
    unrecorded: Callable[[], float] | None = None,
) -> None:
    """Set the functions that return the gauges.

    They are live kernels by policy, kernels ready in pools, sandboxes by status and policy, kernel
    starts, bytes of the reserve, and records that wait in memory. Each call replaces the functions
    of an earlier call.
    """
    if (by := _Counting.by) is not None:
        gauges: dict[str, Callable[[], float | Labelled] | None] = {
            "kernels": kernels,
            "kernels_idle": idle,
            "sandboxes": sandboxes,
            "disk_reserve_bytes": reserve,
            "unrecorded": unrecorded,
        }
        by.watch(gauges, starts=starts)


def record_lost(count: int = 1) -> None:
    """Count lines of the audit log, ends of runs or revocations that can never be recorded."""
    if (by := _Counting.by) is not None:
        by.records_lost.inc(count)


def loop_lagged(seconds: float) -> None:
    """Observe how late a timer of the event loop was."""
    if (by := _Counting.by) is not None:
        by.loop_lag.observe(seconds)


def acquired(path: str, seconds: float) -> None:
    """Observe the time until a requested kernel was ready, by its path (pool, fork, cold)."""
    if (by := _Counting.by) is not None:
        by.acquire.labels(path).observe(seconds)


def ran(
    kind: str, status: str, policy: str, seconds: float, *, cause: str | None = None, path: str = ""
) -> None:
    """Count a run that ended. `path` is the way in which its kernel was started."""
    if (by := _Counting.by) is not None:
        by.runs.labels(kind, path or "unknown").observe(seconds)
        by.ends.labels(kind, status, policy).inc()
        if status == "killed":
            by.kills.labels(cause or "crashed").inc()


def queued() -> None:
    """Count a run that waits for its turn. Call `unqueued` when it no longer waits."""
    if (by := _Counting.by) is not None:
        by.waiting.inc()


def unqueued() -> None:
    if (by := _Counting.by) is not None:
        by.waiting.dec()


def queue_refused() -> None:
    """Count a run that was refused because too many wait already."""
    if (by := _Counting.by) is not None:
        by.refused.inc()


def kernel_stopped(cause: str) -> None:
    """Count a kernel that sbx stopped: idle, requested, kernels_max, memory_pressure and so on."""
    if (by := _Counting.by) is not None:
        by.stops.labels(cause).inc()


def agent_ran(reason: str) -> None:
    """Count a run of an agent that ended: done, max_steps, aborted, budget, error."""
    if (by := _Counting.by) is not None:
        by.agent_runs.labels(reason).inc()


def agent_stepped() -> None:
    """Count a step of an agent: a reply of the model, and the end of the tools that it called."""
    if (by := _Counting.by) is not None:
        by.agent_steps.inc()


def approval_decided(outcome: str) -> None:
    """Count a decision on a waiting call: approved, denied, timeout, abort, restart."""
    if (by := _Counting.by) is not None:
        by.approvals.labels(outcome).inc()


def upload_began() -> None:
    """Count an upload whose body is being read. Call `upload_ended` at its end, also on failure."""
    if (by := _Counting.by) is not None:
        by.uploading.inc()


def upload_ended(size: int | None) -> None:
    """Count the end of an upload. `size` is in bytes, or None for a failed upload."""
    if (by := _Counting.by) is not None:
        by.uploading.dec()
        by.uploads.labels("failed" if size is None else "ok").inc()
        by.upload_bytes.inc(size or 0)


class UploadTimer(Struct):
    """One upload that is being received. `size` in bytes is set when it is complete."""

    size: int | None = None


@contextmanager
def uploading() -> Iterator[UploadTimer]:
    """Count the upload that the block receives."""
    upload = UploadTimer()
    upload_began()
    try:
        yield upload
    finally:
        upload_ended(upload.size)


def requested(method: str, route: str, status: int, seconds: float) -> None:
    """Observe a completed request.

    `route` is the template of its path. With raw paths, a client could fill the memory.
    """
    if (by := _Counting.by) is not None:
        by.requests.labels(method, route, str(status)).observe(seconds)
