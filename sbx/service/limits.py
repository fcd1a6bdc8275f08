"""How many kernels live at once, in all and per owner.

The least recently used idle kernel makes room. Its event has the cause, and its next run reports
`state_lost`.
"""

from collections.abc import Callable, Iterable

from sbx.errors import Unavailable
from sbx.runtime.run.context import Context
from sbx.service.sandbox import ServiceSandbox

_RETRY_AFTER_S = 5.0


class KernelLimit:
    """`every` returns all sandboxes."""

    def __init__(
        self, limit: int, per_owner: int, every: Callable[[], Iterable[ServiceSandbox]]
    ) -> None:
        self._limit = limit
        self._per_owner = per_owner
        self._every = every

    async def make_room(self, owner: str) -> None:
        """Make room for a kernel of this owner, which its sandbox counts already.

        Raises Unavailable `too_many_kernels` if every other kernel is busy.
        """
        while self._count(owner) > self._per_owner:
            if not await self.evict_one("kernels_max", owner):
                raise _full(self._per_owner)
        while self._count() > self._limit:
            if not await self.evict_one("kernels_max"):
                raise _full(self._limit)

    async def evict_one(self, cause: str, owner: str | None = None) -> bool:
        """End the least recently used idle kernel, of this owner if given. Return False if all are
        busy."""
        for sandbox, context in self._idle(owner):
            if await context.end_if_idle():
                sandbox.evicted(context, cause)
                return True
        return False

    def _count(self, owner: str | None = None) -> int:
        return sum(
            sandbox.kernels for sandbox in self._every() if owner in (None, sandbox.row.owner)
        )

    def _idle(self, owner: str | None) -> list[tuple[ServiceSandbox, Context]]:
        """Return the idle kernels; those of sandboxes that are leased now come last."""
        idle = [
            (sandbox.users > 0, context.used_at, sandbox, context)
            for sandbox in self._every()
            if sandbox.box is not None and owner in (None, sandbox.row.owner)
            for context in sandbox.box.live
            if not context.busy
        ]
        idle.sort(key=lambda item: item[:2])
        return [(sandbox, context) for _, _, sandbox, context in idle]


def _full(limit: int) -> Unavailable:
    return Unavailable(
        f"{limit} kernels run, which is the limit, and none of them is idle",
        code="too_many_kernels",
        hint="wait until a run has ended, or stop a sandbox",
        details={"limit": limit, "retry_after_s": _RETRY_AFTER_S},
    )
