"""The recorded runs of a service.

The end of a run that the store refuses is kept in memory, and written later.
"""

import logging
import sqlite3
from collections.abc import Callable
from functools import partial

from msgspec.structs import replace

from sbx.aio import Clock
from sbx.errors import BadRequest, NotFound
from sbx.protocol.runs import Run
from sbx.runtime.run import checks
from sbx.service.caller import Caller
from sbx.service.models import SandboxView
from sbx.service.recording import refusal
from sbx.service.sandboxes import Sandboxes
from sbx.store import Store
from sbx.store import runs as rows
from sbx.store.pending import PendingWrites
from sbx.store.runs import RunFilter
from sbx.store.runs import RunRow as RunRow

_NOTE_MAX = 16 << 10  # bytes of a description, of tags, of notes
_TAGS_MAX = 32  # of one query
_PRUNED_EVERY = 64  # runs
_log = logging.getLogger(__name__)


class RunHistory:
    """The runs in the store, and those that have ended and are not there yet."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        sandboxes: Sandboxes,
        pending: PendingWrites | None,
        max_runs: int,
    ) -> None:
        """`max_runs` of each sandbox are kept."""
        self._store = store
        self._clock = clock
        self._sandboxes = sandboxes
        self._pending = pending or PendingWrites(store)
        self._max = max_runs
        self._unrecorded: dict[str, RunRow] = {}
        self._until_pruned = _PRUNED_EVERY

    def begin(self, begun: rows.Begun) -> None:
        self._store.write_later(partial(rows.begin, begun=begun))

    async def end(self, begun: rows.Begun, run: Run, on_done: Callable[[bool], None]) -> bool:
        """Record the end, or keep it in memory until the store takes it. Return whether the store
        has it now; `on_done` reports whether it took it later."""
        run_id, at = begun.id, self._clock.now()

        def kept() -> tuple[Callable[[sqlite3.Connection], None], int]:
            row = self._unrecorded[run_id] = rows.ended(begun, run, at)
            put = partial(rows.put, row=row, reservation=begun.reservation)
            return put, rows.size_of(row)

        def done(stored: bool) -> None:
            on_done(stored)
            self._unrecorded.pop(run_id, None)

        act = partial(rows.end, begun=begun, run=run, at=at)
        try:
            return await self._pending.write(run_id, act, kept=kept, on_done=done)
        except Exception as error:  # noqa: BLE001  # the border: its waiters continue anyway
            _log.error("the end of %s was not recorded: %s", run_id, error, exc_info=error)
            return False

    def forget(self, sandbox_id: str, conversation: str | None) -> None:
        """Forget the ends that the store does not have yet: the content is deleted."""
        for row in [*self._unrecorded.values()]:
            if row.sandbox_id == sandbox_id and conversation in (None, row.conversation):
                self._pending.discard(row.id)
                del self._unrecorded[row.id]

    def prune_sometimes(self, sandbox_id: str) -> None:
        self._until_pruned -= 1
        if self._until_pruned == 0:
            self._until_pruned = _PRUNED_EVERY
            limit = self._max
            self._store.write_later(lambda db: rows.prune(db, sandbox_id, limit))

    async def entries(
        self,
        caller: Caller,
        sandbox_id: str,
        *,
        exec_type: str | None = None,
        success_only: bool = False,
        limit: int = 100,
        offset: int = 0,
        tags: str | None = None,
        has_notes: bool | None = None,
        has_description: bool | None = None,
        conversation: str | None = None,
        running: bool = False,
    ) -> tuple[list[RunRow], int]:
        """Return a page of runs, the newest first, and the number of all. `tags`: any of these,
        separated by commas. A page may end before its limit; the next page begins at `offset`
        plus the number of returned rows."""
        query = RunFilter(
            kind=exec_type,
            conversation=conversation,
            success_only=success_only,
            tags=_tags(tags),
            has_notes=has_notes,
            has_description=has_description,
            running=running,
        )
        within, query = await self._history_of(caller, sandbox_id, query)
        first = [
            row
            for row in reversed(self._unrecorded.values())
            if row.sandbox_id == within and rows.matches(row, query)
        ]
        # The store may have their beginnings, and takes their ends while it is read.
        without = tuple(row.id for row in first)
        page, count = await rows.list_for_sandbox(
            self._store,
            within,
            replace(query, without=without),
            limit=max(0, limit - len(first[offset:])),
            offset=max(0, offset - len(first)),
        )
        return first[offset : offset + limit] + page, count + len(first)

    async def last(
        self, caller: Caller, sandbox_id: str, *, exec_type: str | None = None
    ) -> RunRow:
        """Return the newest run that has ended. Raise NotFound."""
        page, _ = await self.entries(caller, sandbox_id, exec_type=exec_type, limit=1)
        if not page:
            raise NotFound(f"nothing was run in {sandbox_id} yet")
        return page[0]

    async def entry(self, caller: Caller, sandbox_id: str, run_id: str) -> RunRow:
        """Return one run, also while it is in progress. Raise NotFound."""
        within, query = await self._history_of(caller, sandbox_id, RunFilter())
        row = self._unrecorded.get(run_id)
        if row is None or row.sandbox_id != within:
            row = await rows.get(self._store, within, run_id)
        if row is None or query.conversation not in (None, row.conversation):
            raise no_run(run_id)
        return row

    async def annotate(
        self,
        caller: Caller,
        sandbox_id: str,
        run_id: str,
        *,
        description: str | None = None,
        tags: str | None = None,
        notes: str | None = None,
    ) -> RunRow:
        """Change the texts that are not None. Raises NotFound, TooLarge."""
        check_notes(description=description, tags=tags, notes=notes)
        row = await self.entry(caller, sandbox_id, run_id)
        if run_id in self._unrecorded:
            await self._pending.flush()
        if run_id in self._unrecorded:
            raise refusal("not_recording")
        await rows.annotate(
            self._store,
            row.sandbox_id,
            run_id,
            description=description,
            tags=tags,
            notes=notes,
        )
        return await self.entry(caller, sandbox_id, run_id)

    async def _history_of(
        self, caller: Caller, sandbox_id: str, query: RunFilter
    ) -> tuple[str, RunFilter]:
        """Return the id of the sandbox, and the query within the caller's bounds."""
        view = await self._sandboxes.get(caller, sandbox_id)
        if not reaches(caller, view, query.conversation):
            raise no_conversation(query.conversation or "")
        if caller.conversation_id is None:
            return view.id, query
        return view.id, replace(query, conversation=caller.conversation_id)


def reaches(caller: Caller, view: SandboxView, conversation: str | None) -> bool:
    return caller.may("execute") and caller.sees(view.user_id, view.agent_id, conversation)


def check_notes(**notes: str | None) -> None:
    """Raise BadRequest `invalid_code`, TooLarge `code_too_large`."""
    for name, text in notes.items():
        if text is not None:
            checks.check_text(text, name, _NOTE_MAX)


def _tags(listed: str | None) -> tuple[str, ...]:
    tags = tuple(tag.strip() for tag in (listed or "").split(",") if tag.strip())
    if len(tags) > _TAGS_MAX:
        raise BadRequest(f"at most {_TAGS_MAX} tags can be asked for at once")
    return tags


def no_run(run_id: str) -> NotFound:
    return NotFound(f"run {run_id[:80]!r} does not exist")


def no_conversation(name: str) -> NotFound:
    return NotFound(f"conversation {name[:80]!r} does not exist")
