"""What a live sandbox uses now, as a call and as a stream tell it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

Source = Literal["cgroup2", "cgroup1", "proc"]
INTERVAL_MIN_S, INTERVAL_MAX_S = 0.2, 3600.0


@dataclass(frozen=True, slots=True)
class Usage:
    """All jails of a sandbox together, save that `disk` is of one conversation. Bytes, seconds,
    processes and threads; None where this host does not tell.

    `source` says who counted: a cgroup, of whatever ran in the sandbox since it was opened; or
    `proc`, the processes that live now: best effort, `cpu_s` falls when a kernel ends, and
    `memory_peak` is the highest of the looks there were. `disk` is allocated blocks, *at least* so
    many where `disk_complete` is false, and None for a directory of the host. `network_received`
    and `network_sent` are of every interface of the live jails but `loopback`, what they sent to
    themselves. `at` is seconds of the epoch; limits are the policy's.
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


def usage_to_json(usage: Usage) -> dict[str, Any]:
    """Every field by its own name."""
    return asdict(usage)


def usage_from_json(told: Mapping[str, Any]) -> Usage:
    """Raises ValueError for what is none; fields that are unknown here are left aside."""
    try:
        usage = Usage(**{field.name: told[field.name] for field in fields(Usage)})
    except (KeyError, TypeError) as error:
        raise ValueError(f"a usage lacks or garbles {error}") from None
    if usage.source not in get_args(Source):
        raise ValueError(f"no usage is of the source {str(usage.source)[:80]!r}")
    return usage
