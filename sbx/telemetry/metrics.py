"""What a service counts and times, for Prometheus.

Every function here may be called from everywhere and at any time, and never raises. Until `enable`
they do nothing, and nothing is imported for them: a program that embeds sbx pays for none of it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sbx.telemetry.starts import Starts

if TYPE_CHECKING:
    from sbx.telemetry.collectors import Collectors

_PLAIN = "text/plain; version=0.0.4; charset=utf-8"


class _Counting:
    """Whether this process counts, and by what."""

    by: "Collectors | None" = None


def enable() -> None:
    """Count from now on. A second call changes nothing."""
    if _Counting.by is None:
        from sbx.telemetry.collectors import Collectors

        _Counting.by = Collectors()


def disable() -> None:
    """Forget everything, as before `enable`; for tests, which share a process."""
    _Counting.by = None


def exposition() -> tuple[bytes, str]:
    """Everything counted so far, as Prometheus reads it, and its content type."""
    return (b"", _PLAIN) if _Counting.by is None else _Counting.by.exposition()


def watch(
    *,
    kernels: Callable[[], float] | None = None,
    parked: Callable[[], float] | None = None,
    sandboxes: Callable[[], float] | None = None,
    starts: Callable[[], Starts] | None = None,
    reserve: Callable[[], float] | None = None,
    unrecorded: Callable[[], float] | None = None,
) -> None:
    """Set the functions that return the gauges: live kernels, kernels ready in pools, sandboxes,
    how kernels came to be, bytes of the reserve, and records that wait in memory. Each call
    replaces the functions of the one before."""
    if (by := _Counting.by) is not None:
        gauges = {
            "kernels": kernels,
            "parked": parked,
            "sandboxes": sandboxes,
            "disk_reserve_bytes": reserve,
            "unrecorded": unrecorded,
        }
        by.watch(gauges, starts=starts)


def record_lost(count: int = 1) -> None:
    """Count lines of the audit log, ends of runs or revocations that could never be recorded."""
    if (by := _Counting.by) is not None:
        by.records_lost.inc(count)


def acquired(path: str, seconds: float) -> None:
    """A kernel was there for who asked, by this path (pool, fork, cold), after so long."""
    if (by := _Counting.by) is not None:
        by.acquire.labels(path).observe(seconds)


def ran(
    kind: str, status: str, seconds: float, *, cause: str | None = None, path: str = ""
) -> None:
    """A run ended. `path`: by which its kernel had come to be."""
    if (by := _Counting.by) is not None:
        by.runs.labels(kind, path or "unknown").observe(seconds)
        by.ends.labels(kind, status).inc()
        if status == "killed":
            by.kills.labels(cause or "crashed").inc()


def queued() -> None:
    """A run waits for its turn; `unqueued` is called when it does no more."""
    if (by := _Counting.by) is not None:
        by.waiting.inc()


def unqueued() -> None:
    if (by := _Counting.by) is not None:
        by.waiting.dec()


def queue_refused() -> None:
    """A run was refused, because too many wait already."""
    if (by := _Counting.by) is not None:
        by.refused.inc()


def kernel_stopped(cause: str) -> None:
    """A kernel was ended by us: idle, requested, kernels_max, memory_pressure …"""
    if (by := _Counting.by) is not None:
        by.stops.labels(cause).inc()


def agent_ran(reason: str) -> None:
    """A run of an agent ended: done, max_steps, aborted, budget, error."""
    if (by := _Counting.by) is not None:
        by.agent_runs.labels(reason).inc()


def agent_stepped() -> None:
    """An agent's model was asked, and the tools that it called have ended."""
    if (by := _Counting.by) is not None:
        by.agent_steps.inc()


def approval_decided(outcome: str) -> None:
    """A call that waited was decided: approved, denied, timeout, abort, restart."""
    if (by := _Counting.by) is not None:
        by.approvals.labels(outcome).inc()


def upload_began() -> None:
    """An upload's body is being read; `upload_ended` is called whatever becomes of it."""
    if (by := _Counting.by) is not None:
        by.uploading.inc()


def upload_ended(size: int | None) -> None:
    """`size` in bytes; None: it failed."""
    if (by := _Counting.by) is not None:
        by.uploading.dec()
        by.uploads.labels("failed" if size is None else "ok").inc()
        by.upload_bytes.inc(size or 0)


@dataclass(slots=True)
class Upload:
    """One upload that is being received; `size` in bytes is set when it is whole."""

    size: int | None = None


@contextmanager
def uploading() -> Iterator[Upload]:
    """Count the upload that the block receives."""
    upload = Upload()
    upload_began()
    try:
        yield upload
    finally:
        upload_ended(upload.size)


def requested(method: str, route: str, status: int, seconds: float) -> None:
    """A request was answered. `route` is the template of its path: a raw path would let whoever
    calls fill the memory."""
    if (by := _Counting.by) is not None:
        by.requests.labels(method, route, str(status)).observe(seconds)
