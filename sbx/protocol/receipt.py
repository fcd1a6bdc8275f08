"""Which walls are truly in force around one live kernel, as told to whoever asks."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Receipt:
    """`path` is how the kernel came to be: cold, fork or pool. Limits in bytes, tasks, cpus.

    `fallback` says why a faster path, which was to serve, did not; empty otherwise.

    `python` is the version inside, and `preload_failed` which modules of the policy's `preload`
    could not be imported, and why: both are the guest's word.
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

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
