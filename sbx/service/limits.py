"""How many kernels live at once: in all, and of one owner. Who is to make room is the least
recently used idle one; its event says why, and its next run `state_lost`."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from sbx.errors import Unavailable

if TYPE_CHECKING:
    from sbx.runtime.run.context import Context
    from sbx.service.sandbox import ServiceSandbox

_RETRY_AFTER_S = 5.0


class KernelLimit:
    """`every` gives the sandboxes there are."""

    def __init__(
        self, most: int, per_owner: int, every: Callable[[], "Iterable[ServiceSandbox]"]
    ) -> None:
        self._most = most
        self._per_owner = per_owner
        self._every = every

    async def make_room(self, one: "ServiceSandbox") -> None:
        """Make room for the kernel that starts in `one`, and is counted among its `starts`.

        Raises Unavailable `too_many_kernels` when every other one is busy.
        """
        owner = one.row.owner
        while self._count(owner) > self._per_owner:
            if not await self.evict_one("kernels_max", owner):
                raise _full(self._per_owner)
        while self._count() > self._most:
            if not await self.evict_one("kernels_max"):
                raise _full(self._most)

    async def evict_one(self, cause: str, owner: str | None = None) -> bool:
        """End the least recently used idle kernel, of this owner where one is given; False when
        there is none."""
        for living, context in self._idle(owner):
            if await context.end_if_idle():
                living.ended_one(context, cause)
                return True
        return False

    def _count(self, owner: str | None = None) -> int:
        return sum(one.kernels for one in self._every() if owner in (None, one.row.owner))

    def _idle(self, owner: str | None) -> "list[tuple[ServiceSandbox, Context]]":
        """Those of sandboxes that somebody is using right now last."""
        found = [
            (one.users > 0, context.used_at, one, context)
            for one in self._every()
            if one.box is not None and owner in (None, one.row.owner)
            for context in one.box.live
            if not context.busy
        ]
        found.sort(key=lambda each: each[:2])
        return [(one, context) for _, _, one, context in found]


def _full(limit: int) -> Unavailable:
    return Unavailable(
        f"{limit} kernels run, which is as many as there may be, and none of them is idle",
        code="too_many_kernels",
        hint="wait until a run has ended, or stop a sandbox",
        details={"limit": limit, "retry_after_s": _RETRY_AFTER_S},
    )
