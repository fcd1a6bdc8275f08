"""Which walls are truly in force around one live kernel, as told to whoever asks."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Receipt:
    """`path` is how the kernel came to be: cold, fork or pool. Limits in bytes, tasks, cpus.

    `fallback` says why a faster path, which was to serve, did not; empty otherwise.

    `python` is the version inside, and `preload_failed` which modules of the policy's `preload`
    could not be imported, and why: both are the guest's word, as is `landlock_abi`, given before
    any user code ran: linux shows neither.

    `host_namespaces` are those of the runtime, for comparison; `seccomp_mode` 2 is a filter, and
    `filters` how many linux counts. `read_at` is when linux was asked, in seconds since 1970, and
    `changed` what it says otherwise than when the kernel started: by the name of the field, `was`
    and `now`. Receipts that differ in `read_at` only are equal.
    """

    path: str
    host_uid: int
    namespaces: Mapping[str, int]
    no_new_privs: bool
    capabilities: int
    seccomp: Mapping[str, str]
    landlock_abi: int
    network: str
    limits: Mapping[str, Any]
    walls: tuple[Mapping[str, Any], ...]
    python: str = ""
    preload_failed: Mapping[str, str] = field(default_factory=dict)
    fallback: str = ""
    host_namespaces: Mapping[str, int] = field(default_factory=dict)
    seccomp_mode: int = 2
    filters: int = 1
    read_at: float = field(default=0.0, compare=False)
    changed: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it. Not by `asdict`, which takes 0.3 ms of each start."""
        told = {name: getattr(self, name) for name in _FIELDS}
        return {k: dict(v) if isinstance(v, Mapping) else v for k, v in told.items()}

    @property
    def digest(self) -> str:
        """SHA-256 over all that it says: what a log that names it can be held against."""
        said = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(said.encode()).hexdigest()


_FIELDS = tuple(one.name for one in fields(Receipt))
