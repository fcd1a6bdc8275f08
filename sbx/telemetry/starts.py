"""How kernels came to be, in counts: what the fast path gives, and why it did not."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Starts:
    """Counts since the runtime started.

    `served`: kernels by path (pool, fork, cold). `failed`: tries by path that the next path had to
    make up for, or nobody could. `parked`: kernels made ready ahead, whose failures are counted in
    `failed` as `park`. `last_cause`: why the last of all that failed did.
    """

    served: Mapping[str, int] = field(default_factory=dict)
    failed: Mapping[str, int] = field(default_factory=dict)
    parked: int = 0
    last_cause: str = ""

    def with_served(self, path: str) -> "Starts":
        return replace(self, served=_one_more(self.served, path))

    def with_failed(self, path: str, cause: str) -> "Starts":
        return replace(self, failed=_one_more(self.failed, path), last_cause=cause)

    def with_parked(self) -> "Starts":
        return replace(self, parked=self.parked + 1)


def _one_more(counts: Mapping[str, int], name: str) -> Mapping[str, int]:
    return {**counts, name: counts.get(name, 0) + 1}
