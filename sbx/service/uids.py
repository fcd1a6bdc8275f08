"""Which host uid the files of a cargo belong to, where the broker is root."""

import secrets
from functools import partial

from sbx.errors import Unavailable
from sbx.store import Store
from sbx.store import sandboxes as rows

_ATTEMPTS = 1000


async def own_uid(store: Store, cargo_id: str, uids: tuple[int, int]) -> int:
    """The one it has, or one that no other cargo's files have; random, as other runtimes choose
    from the range too."""
    first, count = uids
    for _ in range(_ATTEMPTS):
        chosen = first + secrets.randbelow(count)
        uid = await store.write(partial(rows.take_uid, cargo_id=cargo_id, uid=chosen))
        if uid is not None:
            return uid
    raise Unavailable(
        "nearly every host uid of the range for sandboxes is in use",
        hint="widen the setting uid_range, or delete sandboxes",
    )
