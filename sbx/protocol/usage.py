"""The current resource usage of a live sandbox, for a call and for a stream."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

Source = Literal["cgroup2", "cgroup1", "proc"]
INTERVAL_MIN_S, INTERVAL_MAX_S = 0.2, 3600.0


@dataclass(frozen=True, slots=True)
class SandboxUsage:
    """The usage of all jails of a sandbox together; only `disk` is that of one conversation.

    Values are in bytes, seconds, processes and threads. A value is `None` if this host does not
    report it.

    `source` is the counter. A cgroup counts everything that ran in the sandbox since it was opened.
    `proc` sums the processes that are alive now. It is a best effort: `cpu_s` falls when a kernel
    ends, and `memory_peak` is the highest of the samples. `disk` is the number of allocated bytes
    on disk. If `disk_complete` is false, it is a lower bound. It is `None` for a directory of the
    host. `network_received` and `network_sent` count all interfaces of the live jails except the
    loopback; `loopback` counts their traffic to themselves. `at` is in seconds of the epoch. Limits
    are those of the policy.
    """

    at: float
    source: Source
    kernels: int
    cpu_s: float | None
    memory: int | None
    memory_peak: int | None
    pids: int | None
    disk: int | None
    disk_files: int | None
    disk_complete: bool
    network_received: int | None
    network_sent: int | None
    loopback: int | None
    memory_max: int
    pids_max: int
    cpu_quota: float | None
    disk_max: int


def usage_to_json(usage: SandboxUsage) -> dict[str, Any]:
    """Return every field by its own name."""
    return asdict(usage)
