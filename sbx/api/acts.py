"""What callers did, for the audit log: whatever changes something, or opens a door.

Runs are not here: the history of their sandbox has each of them, with its code.
"""

from typing import Any

from sbx.runtime.access import Caller
from sbx.runtime.house import House

_TEXT_MAX = 1000  # characters; a line whose details are too long would lose all of them


async def record(house: House, caller: Caller, what: str, object: str, **details: Any) -> None:
    """Write down who did what to what, once it is done. Long texts are cut, None is left out.

    Raises Unavailable `no_space` or `audit_unusable`.
    """
    told = {name: _cut(value) for name, value in details.items() if value is not None}
    await house.audit.record(caller.who, what, object, **told)


def _cut(value: Any) -> Any:
    if isinstance(value, str) and len(value) > _TEXT_MAX:
        return f"{value[: _TEXT_MAX - 1]}…"
    return value
