"""Counts of kernel starts: how often the fast paths worked, and why they failed."""

from collections.abc import Mapping

from msgspec import Struct, field
from msgspec.structs import replace


class StartCounts(Struct, frozen=True):
    """Counts since the runtime started.

    `served` are kernels by path (pool, fork, cold). `failed` are failed attempts by path, whether
    or not the next path then succeeded. `started_ahead` is the number of kernels that were started
    in advance; their failures are counted in `failed` as `refill`. `last_cause` is the reason of
    the latest failure.
    """

    served: Mapping[str, int] = field(default_factory=dict)
    failed: Mapping[str, int] = field(default_factory=dict)
    started_ahead: int = 0
    last_cause: str = ""

    def with_served(self, path: str) -> "StartCounts":
        return replace(self, served=_one_more(self.served, path))

    def with_failed(self, path: str, cause: str) -> "StartCounts":
        return replace(self, failed=_one_more(self.failed, path), last_cause=cause)

    def with_started_ahead(self) -> "StartCounts":
        return replace(self, started_ahead=self.started_ahead + 1)


def _one_more(counts: Mapping[str, int], name: str) -> Mapping[str, int]:
    return {**counts, name: counts.get(name, 0) + 1}
