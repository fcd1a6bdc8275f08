"""Keep the watch of a limit alive. Without its watch, a jail has no such limit."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

_log = logging.getLogger(__name__)
_AGAIN_S = 0.1
_FAILURES_MAX = 5  # in a row
_IN_A_ROW_S = 60.0


async def keep_watching(
    look: Callable[[], Awaitable[None]], end: Callable[[], Awaitable[object]]
) -> None:
    """Run `look` until it returns. Run it again after an error. If it fails five times in a row,
    call `end`, which ends the watched kernels."""
    failures, failed_at = 0, 0.0
    while True:
        try:
            await look()
            return
        except Exception:  # noqa: BLE001  # the border: a background task
            _log.exception("the watch of a limit failed")
        now = time.monotonic()
        failures = failures + 1 if now - failed_at < _IN_A_ROW_S else 1
        failed_at = now
        if failures == _FAILURES_MAX:
            break
        await asyncio.sleep(_AGAIN_S)
    _log.error("a watch fails again and again: its kernels are ended")
    await end()
