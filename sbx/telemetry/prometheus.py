"""The collectors behind `metrics`: names, labels and buckets, in one place."""

import logging
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from sbx.telemetry.starts import StartCounts

_log = logging.getLogger(__name__)
_ACQUIRE = (0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_RUN = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 1800)
_REQUEST = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 30, 120)
_LAG = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 30)
_WATCHED = {
    "kernels": "Live kernels, by policy.",
    "kernels_idle": "Kernels that wait in pools, ready for the next request.",
    "sandboxes": "Sandboxes that are not deleted, by status and policy.",
    "disk_reserve_bytes": "Space reserved for records on a full disk; less while the disk is full.",
    "unrecorded": "Ends of runs, revocations and audit lines in memory that could not be written.",
}
_LABELS = {"kernels": ("policy",), "sandboxes": ("status", "policy")}


class Collectors:
    """A separate registry, without the other metrics that this process may have in the default
    one."""

    def __init__(self) -> None:
        # Otherwise each counter has a second, unwanted series. The function has no types.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.acquire = Histogram(
            "sbx_acquire_seconds",
            "Time from the request for a kernel to its lockdown, by path: pool, fork, cold.",
            ["path"],
            buckets=_ACQUIRE,
            registry=registry,
        )
        self.runs = Histogram(
            "sbx_run_seconds",
            "Runs, by kind and by the path by which their kernel was started.",
            ["kind", "path"],
            buckets=_RUN,
            registry=registry,
        )
        self.ends = Counter(
            "sbx_runs",
            "Runs that ended, by kind, status and policy.",
            ["kind", "status", "policy"],
            registry=registry,
        )
        self.kills = Counter(
            "sbx_kills", "Runs that were killed, by cause.", ["cause"], registry=registry
        )
        self.waiting = Gauge(
            "sbx_queue_waiting", "Runs that wait for their turn.", registry=registry
        )
        self.refused = Counter(
            "sbx_queue_refused", "Runs refused by a full queue.", registry=registry
        )
        self.stops = Counter(
            "sbx_kernel_stops", "Kernels ended by the service, by cause.", ["cause"],
            registry=registry,
        )  # fmt: skip
        self.uploading = Gauge(
            "sbx_uploads_active", "Uploads being received now.", registry=registry
        )
        self.uploads = Counter(
            "sbx_uploads", "Uploads, by outcome.", ["outcome"], registry=registry
        )
        self.upload_bytes = Counter("sbx_upload_bytes", "Bytes uploaded.", registry=registry)
        self.requests = Histogram(
            "sbx_http_request_seconds",
            "HTTP requests, by method, route and status.",
            ["method", "route", "status"],
            buckets=_REQUEST,
            registry=registry,
        )
        self.agent_runs = Counter(
            "sbx_agent_runs", "Runs of agents that ended, by reason.", ["reason"],
            registry=registry,
        )  # fmt: skip
        self.agent_steps = Counter("sbx_agent_steps", "Steps of agents.", registry=registry)
        self.approvals = Counter(
            "sbx_approvals", "Calls that waited for a user's decision, by outcome.", ["outcome"],
            registry=registry,
        )  # fmt: skip
        self.records_lost = Counter(
            "sbx_records_lost", "Records that could never be written.", registry=registry
        )
        self.loop_lag = Histogram(
            "sbx_loop_lag_seconds",
            "Delay of a timer of the event loop that is due every 100 ms.",
            buckets=_LAG,
            registry=registry,
        )
        self._watched = _Watched()
        registry.register(self._watched)

    def watch(
        self,
        gauges: Mapping[str, Callable[[], float | Mapping[tuple[str, ...], float]] | None],
        *,
        starts: Callable[[], StartCounts] | None,
    ) -> None:
        self._watched.gauges |= {name: ask for name, ask in gauges.items() if ask is not None}
        if starts is not None:
            self._watched.starts = starts

    def exposition(self) -> tuple[bytes, str]:
        return generate_latest(self._registry), CONTENT_TYPE_LATEST


class _Watched:
    """Gauges that are read at each collection. A gauge that fails is left out."""

    def __init__(self) -> None:
        self.gauges: dict[str, Callable[[], float | Mapping[tuple[str, ...], float]]] = {}
        self.starts: Callable[[], StartCounts] | None = None

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        for name, ask in self.gauges.items():
            try:
                value = ask()
            except Exception:  # noqa: BLE001  # boundary: the other gauges remain available
                _log.warning("the number of %s is not available", name, exc_info=True)
                continue
            values = value if isinstance(value, Mapping) else {(): value}
            family = GaugeMetricFamily(f"sbx_{name}", _WATCHED[name], labels=_LABELS.get(name, ()))
            for labels, each in values.items():
                family.add_metric(labels, each)
            yield family
        if self.starts is not None:
            yield from _of_starts(self.starts())


def _of_starts(starts: StartCounts) -> Iterable[Metric]:
    served = CounterMetricFamily("sbx_kernel_starts", "Kernels started, by path.", labels=["path"])
    failed = CounterMetricFamily(
        "sbx_kernel_start_failures", "Failed attempts to start a kernel.", labels=["path"]
    )
    for path, count in starts.served.items():
        served.add_metric([path], count)
    for path, count in starts.failed.items():
        failed.add_metric([path], count)
    yield served
    yield failed
    yield CounterMetricFamily(
        "sbx_kernels_started_ahead", "Kernels started in advance.", value=starts.started_ahead
    )
