"""Idempotency: a call that is made twice with one key is done once, and answered twice alike.

The key is reserved before the work. A second call that comes meanwhile waits for the first and gets
its reply; one that comes later, even after a restart, gets the reply that was kept. Only successes
are kept: after a failure the key is free.

One process uses a store, and it knows in memory which calls are in progress. A reservation without
a reply and without such a call was left by a crash, or by a reply that could not be written. The
store cannot prove that the call was not begun: code runs before its run is recorded. So the same
call again is refused with `outcome_unknown`, for runs and for new sandboxes alike, until the key is
forgotten.

The size of the table is bounded, see store/idempotency.py: where a reply was too long to be kept,
the same call again is refused, and still not done again.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping

from msgspec import Struct

from sbx.aio import Clock
from sbx.errors import Conflict, SbxError
from sbx.service.caller import Caller
from sbx.store import Store
from sbx.store.idempotency import Reservation, Slot, StoredReplies, StoredReply

KEY = re.compile(r"[a-zA-Z0-9_-]{1,128}")
_FAILED = 400  # a status from here on is not kept
_SHOWN = 140  # characters of a malformed key
_log = logging.getLogger(__name__)

Reply = tuple[int, bytes]


class _Call(Struct):
    """A call in progress. `done` once it is over, with its reply if there is one to share;
    `reserved` once the key belongs to this call, and not to a stored reply."""

    fingerprint: str
    done: "asyncio.Future[Reply | None]"
    reserved: bool = False


class IdempotencyCache:
    """Replies of the last `ttl_s` seconds. A second call waits `wait_s` seconds at most."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        *,
        ttl_s: float = 3600.0,
        wait_s: float = 120.0,
        kept: StoredReplies | None = None,
    ) -> None:
        self._table = kept or StoredReplies(store)
        self._clock = clock
        self._ttl_s = ttl_s
        self._wait_s = wait_s
        self._calls: dict[Slot, _Call] = {}

    async def once(
        self,
        caller: Caller,
        key: str | None,
        fingerprint: str,
        work: Callable[[], Awaitable[Reply]],
    ) -> Reply:
        """Return the reply to this call: of `work`, or of an earlier call with this key.

        Callers share keys only within `Caller.space`. `fingerprint` identifies the request. Check
        the rights of the caller before this: a stored reply is returned without `work`. Raise
        Conflict, `details` key and hint, for a malformed key, a key that was used for another
        request, a first call that lasts longer than this one can wait, `reply_not_kept` if the
        reply was too long to store, and `outcome_unknown` if an earlier process began the call
        (details run_id and status, if its run is recorded); Unavailable
        `too_many_idempotency_keys`.
        """
        if key is None:
            return await work()
        if not KEY.fullmatch(key):
            raise _conflict("the idempotency key is malformed", key, "1 to 128 of A-Z a-z 0-9 _ -")
        slot = (caller.space, key)
        deadline = asyncio.get_running_loop().time() + self._wait_s
        while (call := self._calls.get(slot)) is not None:
            if call.reserved and call.fingerprint != fingerprint:
                raise _reused(key)
            reply = await _of_other(call, deadline, key)
            if reply is not None and call.fingerprint == fingerprint:
                return reply
        return await self._first(slot, fingerprint, work)

    async def _first(
        self, slot: Slot, fingerprint: str, work: Callable[[], Awaitable[Reply]]
    ) -> Reply:
        call = _Call(fingerprint, asyncio.get_running_loop().create_future())
        reservation = Reservation(slot)
        self._calls[slot] = call
        shared: Reply | None = None
        try:
            shared = await self._kept(reservation, fingerprint)
            if shared is not None:
                return shared
            call.reserved = True
            reply = await work()
            if reply[0] < _FAILED:
                shared = reply
                await self._keep(slot, fingerprint, reply)
            return reply
        finally:
            del self._calls[slot]
            call.done.set_result(shared)
            if shared is None:
                self._table.release(reservation)

    async def _kept(self, reservation: Reservation, fingerprint: str) -> Reply | None:
        """Return the stored reply for this call. Return None if the key is now reserved for it."""
        now = self._clock.now()
        kept = await self._table.reserve(reservation, fingerprint, at=now, since=now - self._ttl_s)
        if kept is None:
            return None
        key = reservation.slot[1]
        if kept.fingerprint != fingerprint:
            raise _reused(key)
        if kept.status is None:
            raise _unknown(key, kept)
        if kept.body is None:
            raise _conflict(
                "this call was made before and has been done; its reply was too long to be kept",
                key,
                "look for its effect, as in the history of the sandbox",
                code="reply_not_kept",
            )
        return kept.status, kept.body

    async def _keep(self, slot: Slot, fingerprint: str, reply: Reply) -> None:
        """Store the reply. If that fails, the caller still gets it, because the work is done."""
        try:
            await self._table.keep(slot, fingerprint, *reply, self._clock.now())
        except SbxError as error:
            _log.error("the reply to an idempotent call was not kept: %s", error)


async def _of_other(call: _Call, deadline: float, key: str) -> Reply | None:
    left = deadline - asyncio.get_running_loop().time()
    done, _ = await asyncio.wait({call.done}, timeout=max(0.0, left))
    if not done:
        raise _conflict("the first call with this key is still in progress", key, "ask again later")
    return call.done.result()


def _reused(key: str) -> Conflict:
    return _conflict(
        "this idempotency key was used for another request", key, "use a new key for a new request"
    )


def _unknown(key: str, kept: StoredReply) -> Conflict:
    run_details = {"run_id": kept.run_id, "status": kept.run_status}
    where = "list the resources" if kept.run_id is None else "find the run in the history"
    return _conflict(
        "an earlier call with this key was begun, and its reply is unknown",
        key,
        f"{where} to see whether it was done, and use a new key to make the call again",
        code="outcome_unknown",
        details={name: value for name, value in run_details.items() if value is not None},
    )


def _conflict(
    message: str,
    key: str,
    hint: str,
    *,
    code: str | None = None,
    details: Mapping[str, str] | None = None,
) -> Conflict:
    all_details = {"key": key[:_SHOWN], "hint": hint, **(details or {})}
    return Conflict(message, code=code, hint=hint, details=all_details)
