"""The events of sandboxes, for those who may see them."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from sbx.protocol.pages import Page
from sbx.service.caller import Caller
from sbx.service.leases import SandboxIndex, row_of
from sbx.service.sandbox import ServiceSandbox
from sbx.store import Store, events, sandboxes
from sbx.store.events import EventRow
from sbx.store.sandboxes import SandboxRow

_LIST_MAX = 500


class SandboxEvents:
    """`page` and `follow` omit the events of conversations beyond the caller's bounds, and raise
    NotFound."""

    def __init__(self, store: Store, index: SandboxIndex) -> None:
        self._store = store
        self._index = index

    async def page(
        self, caller: Caller, sandbox_id: str, *, after: int = 0, limit: int = 100
    ) -> Page[EventRow]:
        """Return the events after this number, the oldest first; also of a deleted sandbox."""
        row = await row_of(self._index, self._store, caller, sandbox_id)
        limit = max(1, min(limit, _LIST_MAX))
        await self._store.settled()
        page = await events.list_for_sandbox(
            self._store,
            row.id,
            after=after,
            limit=limit + 1,
            conversation=caller.conversation_id,
        )
        more = len(page) > limit
        return Page(page[:limit], str(page[limit - 1].seq) if more else None)

    async def ended(self, caller: Caller, *, since: float, limit: int) -> Sequence[SandboxRow]:
        """Return the records of sandboxes within the caller's bounds that were deleted after this
        time, the last one first."""
        ended = await sandboxes.ended_of(self._store, caller.owner, since=since, limit=limit)
        return [row for row in ended if caller.sees(row.user_id, row.agent_id)]

    async def has_ended(self, caller: Caller, sandbox_id: str) -> bool:
        """Return whether the caller may delete this sandbox, and it was deleted before."""
        if not caller.whole_sandbox or not caller.may("admin"):
            return False
        row = await row_of(self._index, self._store, caller, sandbox_id)
        return row.deleted_at is not None

    async def follow(
        self, caller: Caller, sandbox_id: str, *, after: int = 0
    ) -> AsyncGenerator[EventRow, None]:
        """Yield the events after this number as they come; end with the tombstone, or with the
        service."""
        row = await row_of(self._index, self._store, caller, sandbox_id)
        within = caller.conversation_id
        sandbox = self._index.by_id(row.id)
        if sandbox is None:
            for event in await events.list_for_sandbox(
                self._store, row.id, after=after, conversation=within
            ):
                yield event
            return
        sandbox.followers += 1
        try:
            async with aclosing(self._live(sandbox, after, within)) as live:
                async for event in live:
                    yield event
        finally:
            sandbox.followers -= 1

    async def _live(
        self, sandbox: ServiceSandbox, after: int, within: str | None
    ) -> AsyncGenerator[EventRow, None]:
        while True:
            change = sandbox.changes.next
            # Before the read: a deletion that is recorded meanwhile has an event after this page.
            over = sandbox.row.deleted_at is not None or sandbox.shut_down
            await self._store.settled()
            page = await events.list_for_sandbox(
                self._store, sandbox.id, after=after, conversation=within
            )
            for event in page:
                after = event.seq
                yield event
            if page:
                continue  # there may be more than one page
            if not change.is_set() and over:
                return
            if sandbox.row.deleted_at is not None or sandbox.shut_down:
                continue  # read once more
            await change.wait()
