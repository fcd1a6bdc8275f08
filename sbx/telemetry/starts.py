"""Counts of kernel starts: how often the fast paths worked, and why they failed."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class StartCounts:
    """Counts since the runtime started.

    `served` are kernels by path (pool, fork, cold). `failed` are failed attempts by path, whether
    or not the next path then succeeded. `parked` are kernels that were started in advance; their
    failures are counted in `failed` as `park`. `last_cause` is the reason of the latest failure.
    """

    served: Mapping[str, int] = field(default_factory=dict)
    failed: Mapping[str, int] = field(default_factory=dict)
    parked: int = 0
    last_cause: str = ""

    def with_served(self, path: str) -> "StartCounts":
        return replace(self, served=_one_more(self.served, path))

    def with_failed(self, path: str, cause: str) -> "StartCounts":
        return replace(self, failed=_one_more(self.failed, path), last_cause=cause)

    def with_parked(self) -> "StartCounts":
        return replace(self, parked=self.parked + 1)


def _one_more(counts: Mapping[str, int], name: str) -> Mapping[str, int]:
    return {**counts, name: counts.get(name, 0) + 1}
