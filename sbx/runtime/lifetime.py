"""The life of an embedded sandbox: seconds after its last use its kernels end, or it closes.

A use is a run, a command, a terminal with a client, or a call for files.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable

from msgspec import Struct

from sbx.errors import BadRequest

_LOOK_S = (0.05, 5.0)  # between two looks at a sandbox whose kernels have ended


class Lifetime(Struct, frozen=True):
    """Seconds since the last use; infinite without a limit. Raise BadRequest `invalid_lifetime`."""

    ttl_s: float = math.inf
    idle_s: float = math.inf

    def __post_init__(self) -> None:
        for name, seconds in (("ttl", self.ttl_s), ("idle_timeout", self.idle_s)):
            if not seconds > 0:
                raise BadRequest(
                    f"{name} is a number of seconds above 0, not {seconds!r}",
                    code="invalid_lifetime",
                    hint="leave it out for a sandbox that lives until its close",
                )

    @classmethod
    def of(cls, ttl_s: float | None, idle_s: float | None) -> "Lifetime":
        return cls(math.inf if ttl_s is None else ttl_s, math.inf if idle_s is None else idle_s)

    @property
    def limited(self) -> bool:
        return min(self.ttl_s, self.idle_s) < math.inf

    def next_look_s(self, unused_s: float) -> float:
        """Return the seconds until the next limit, for a sandbox that is unused for so long."""
        least, most = _LOOK_S
        ahead = [limit - unused_s for limit in (self.ttl_s, self.idle_s) if limit > unused_s]
        due = min(ahead, default=math.inf)
        if due == math.inf:  # only a use changes anything, and it moves the limit
            return max(least, min(most, self.idle_s / 4))
        return max(least, due)


UNLIMITED = Lifetime()


async def watch(
    lifetime: Lifetime,
    last_use: Callable[[], float],
    end_kernels: Callable[[], Awaitable[None]],
    close: Callable[[], Awaitable[None]],
) -> None:
    """End the kernels and close, each when it is due. `last_use` returns a monotonic time."""
    while True:
        unused_s = time.monotonic() - last_use()
        if unused_s >= lifetime.ttl_s:
            await close()
            return
        if unused_s >= lifetime.idle_s:
            await end_kernels()
        await asyncio.sleep(lifetime.next_look_s(unused_s))
