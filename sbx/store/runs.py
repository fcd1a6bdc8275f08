"""The runs of sandboxes: their code, their results, and the annotations of users.

A run is `running` in the store from its start, and has its status after its end. A run that is
still `running` when a service starts was interrupted by the end of the service before it.
"""

import sqlite3
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
from msgspec import Struct

from sbx.protocol.bundles import Bundle, BundlePart, stored, text_of
from sbx.protocol.contexts import DEFAULT_CONTEXT
from sbx.protocol.events import run_from_json, run_to_json, value_to_json
from sbx.protocol.runs import MimeBundle, Run, RunError, Status
from sbx.store import Store, idempotency, record
from sbx.store.idempotency import Slot

RUNNING = "running"
SERVICE_ENDED = RunError("ServiceEnded", "the service ended while this ran", "")

CODE_KEPT = 32 << 10  # characters
_TEXT_KEPT = 8 << 10  # characters, of each text of a result
_PART_KEPT = 8 << 10  # characters of JSON, of each part of a bundle
_OUTPUTS_KEPT = 32 << 10  # characters of JSON, of all bundles
_PAGE_MAX = 8 << 20  # characters of code and results in one page
_ROW = 2 << 10  # bytes in memory, about, of a row without texts
_CONTEXT_EXISTS = (  # see `_context_of`
    "(? = 'default' OR EXISTS (SELECT 1 FROM contexts"
    " WHERE sandbox_id = ? AND conversation = ? AND name = ?))"
)
_OFFSET_MAX = 1 << 60  # SQLite counts up to 2⁶³


class RunRow(Struct, frozen=True):
    """A recorded run. `run` is its shortened result; None while it runs.

    Times are seconds of the epoch. `status` is a `Status`, or `running`.
    """

    id: str
    sandbox_id: str
    conversation: str
    kind: str
    code: str
    status: str
    cause: str | None
    started_at: float
    ended_at: float | None
    duration_ms: float | None
    description: str | None
    tags: str | None
    notes: str | None
    run: Run | None
    context: str = DEFAULT_CONTEXT

    @property
    def success(self) -> bool:
        return self.status == Status.OK


class RunFilter(Struct, frozen=True):
    """Select runs of a sandbox; None selects both. `tags`: any of them, as a part of a tag, in
    either case (of ASCII letters). `running`: also runs that have not ended. `without`: ids that a
    query of the store leaves out."""

    kind: str | None = None
    conversation: str | None = None
    success_only: bool = False
    tags: Sequence[str] = ()
    has_notes: bool | None = None
    has_description: bool | None = None
    running: bool = False
    without: Sequence[str] = ()


class Begun(Struct, frozen=True):
    """A run at its start. `reservation`: the idempotency key of its call."""

    id: str
    sandbox_id: str
    conversation: str
    kind: str
    code: str
    started_at: float
    description: str | None = None
    tags: str | None = None
    context: str = DEFAULT_CONTEXT
    reservation: Slot | None = None


def ended(begun: Begun, run: Run, at: float) -> RunRow:
    return RunRow(
        id=begun.id,
        sandbox_id=begun.sandbox_id,
        conversation=begun.conversation,
        kind=begun.kind,
        code=_cut(begun.code, CODE_KEPT),
        status=run.status.value,
        cause=run.cause and run.cause.value,
        started_at=begun.started_at,
        ended_at=at,
        duration_ms=run.duration_s * 1000,
        description=begun.description,
        tags=begun.tags,
        notes=None,
        run=shortened(run),
        context=begun.context,
    )


def matches(row: RunRow, query: RunFilter) -> bool:
    tags = (row.tags or "").lower()
    return (
        query.kind in (None, row.kind)
        and query.conversation in (None, row.conversation)
        and (row.success or not query.success_only)
        and query.has_notes in (None, bool(row.notes))
        and query.has_description in (None, bool(row.description))
        and (not query.tags or any(tag.lower() in tags for tag in query.tags))
    )


# -- writing: in a transaction of the store --------------------------------------------------------


def begin(on: sqlite3.Connection, begun: Begun) -> None:
    on.execute(
        "INSERT INTO runs (id, sandbox_id, conversation, kind, code, status, started_at,"
        f" description, tags, context) SELECT ?, ?, ?, ?, ?, ?, ?, ?, ?, ? WHERE {_CONTEXT_EXISTS}"
        " ON CONFLICT (id) DO NOTHING",
        (*_first_fields(begun, RUNNING), *_context_of(begun)),
    )
    _note_reservation(on, begun.reservation, begun.id)


def end(on: sqlite3.Connection, begun: Begun, run: Run, at: float) -> None:
    """Record the end of a run, also if its start was not recorded."""
    put(on, ended(begun, run, at), begun.reservation)


def put(on: sqlite3.Connection, row: RunRow, reservation: Slot | None = None) -> None:
    """Record the end of a run by its shortened row. This may run twice. A run whose context was
    deleted is not recorded."""
    assert row.run is not None
    on.execute(
        "INSERT INTO runs (id, sandbox_id, conversation, kind, code, status, started_at,"
        " description, tags, context, cause, result, ended_at, duration_ms)"
        f" SELECT ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ? WHERE {_CONTEXT_EXISTS}"
        " ON CONFLICT (id) DO UPDATE SET"
        " status = excluded.status, cause = excluded.cause, result = excluded.result,"
        " ended_at = excluded.ended_at, duration_ms = excluded.duration_ms",
        (
            *_first_fields(row, row.status),
            row.cause,
            _encoded(row.run),
            row.ended_at,
            row.duration_ms,
            *_context_of(row),
        ),
    )
    _note_reservation(on, reservation, row.id)


def size_of(row: RunRow) -> int:
    texts = (row.code, row.description or "", row.tags or "")
    result = 0 if row.run is None else len(_encoded(row.run))
    return _ROW + 2 * (sum(map(len, texts)) + result)


def prune(on: sqlite3.Connection, sandbox_id: str, history_max: int) -> None:
    on.execute(
        "DELETE FROM runs WHERE sandbox_id = :sandbox AND status != :running AND seq <= ("
        " SELECT seq FROM runs WHERE sandbox_id = :sandbox ORDER BY seq DESC"
        " LIMIT 1 OFFSET :history_max)",
        {"sandbox": sandbox_id, "running": RUNNING, "history_max": history_max},
    )


async def mark_interrupted(store: Store, at: float) -> int:
    """Mark the runs of the previous service as `interrupted`, with an error, and return their
    number. Call this before anything runs."""

    def act(on: sqlite3.Connection) -> int:
        rows = on.execute(
            "SELECT seq, id, started_at FROM runs WHERE status = ?", (RUNNING,)
        ).fetchall()
        for seq, run_id, started_at in rows:
            run = Run(run_id, Status.INTERRUPTED, error=SERVICE_ENDED, state_lost=True)
            on.execute(
                "UPDATE runs SET status = ?, result = ?, ended_at = ? WHERE seq = ?",
                (run.status.value, _encoded(run), max(at, started_at), seq),
            )
        return len(rows)

    return await store.write(act)


async def annotate(
    store: Store,
    sandbox_id: str,
    run_id: str,
    *,
    description: str | None,
    tags: str | None,
    notes: str | None,
) -> bool:
    def act(on: sqlite3.Connection) -> bool:
        changed = on.execute(
            "UPDATE runs SET description = coalesce(?, description), tags = coalesce(?, tags),"
            " notes = coalesce(?, notes) WHERE id = ? AND sandbox_id = ?",
            (description, tags, notes, run_id, sandbox_id),
        )
        return changed.rowcount == 1

    return await store.write(act)


# -- reading ---------------------------------------------------------------------------------------


async def list_for_sandbox(
    store: Store, sandbox_id: str, query: RunFilter, *, limit: int = 100, offset: int = 0
) -> tuple[list[RunRow], int]:
    """Return a page of runs, newest first, and the number of all.

    A page has 8 MiB at most: the next one begins at `offset` plus the number of returned rows.
    """
    where, args = _where(sandbox_id, query)
    count = f"SELECT count(*) FROM runs WHERE {where}"  # noqa: S608  # no text of a caller; values are bound
    page = (
        "SELECT * FROM (SELECT *, sum(length(code) + coalesce(length(result), 0))"  # noqa: S608
        " OVER (ORDER BY seq DESC) AS held"
        f" FROM (SELECT * FROM runs WHERE {where} ORDER BY seq DESC LIMIT ? OFFSET ?))"
        " WHERE held <= ? ORDER BY seq DESC"
    )

    def act(on: sqlite3.Connection) -> tuple[list[RunRow], int]:
        (total,) = on.execute(count, args).fetchone()
        rows = on.execute(page, (*args, limit, min(offset, _OFFSET_MAX), _PAGE_MAX)).fetchall()
        return [_row(row) for row in rows], total

    return await store.read(act)


async def get(store: Store, sandbox_id: str, run_id: str) -> RunRow | None:
    row = await store.row("SELECT * FROM runs WHERE id = ? AND sandbox_id = ?", run_id, sandbox_id)
    return None if row is None else _row(row)


def _where(sandbox_id: str, query: RunFilter) -> tuple[str, list[Any]]:
    parts, args = ["sandbox_id = ?"], [sandbox_id]
    if not query.running:
        parts.append(f"status != '{RUNNING}'")
    if query.kind is not None:
        parts.append("kind = ?")
        args.append(query.kind)
    if query.conversation is not None:
        parts.append("conversation = ?")
        args.append(query.conversation)
    if query.success_only:
        parts.append(f"status = '{Status.OK}'")
    for column, there in (("notes", query.has_notes), ("description", query.has_description)):
        if there is not None:
            parts.append(f"coalesce({column}, '') {'!=' if there else '='} ''")
    if query.tags:
        parts.append(f"({' OR '.join(['tags LIKE ? ESCAPE char(92)'] * len(query.tags))})")
        args += [f"%{_literal(tag)}%" for tag in query.tags]
    if query.without:  # one parameter: SQLite bounds their number
        parts.append("id NOT IN (SELECT value FROM json_each(?))")
        args.append(msgspec.json.encode(query.without).decode())
    return " AND ".join(parts), args


def _literal(tag: str) -> str:
    r"""Return the tag for LIKE … ESCAPE '\', as text and not as a pattern."""
    return tag.replace("\\", "\\\\").replace("%", r"\%").replace("_", r"\_")


def _encoded(run: Run) -> str:
    return msgspec.json.encode(run_to_json(run, encoded=True)).decode()


def _row(row: sqlite3.Row) -> RunRow:
    result = row["result"]
    run = None if result is None else run_from_json(msgspec.json.decode(result))
    return record(RunRow, row, run=run)


def _note_reservation(on: sqlite3.Connection, reservation: Slot | None, run_id: str) -> None:
    if reservation is not None:
        idempotency.began(on, reservation, run_id)


def _context_of(run: Begun | RunRow) -> tuple[str, ...]:
    return run.context, run.sandbox_id, run.conversation, run.context


def _first_fields(begun: Begun | RunRow, status: str) -> tuple[Any, ...]:
    return (
        begun.id,
        begun.sandbox_id,
        begun.conversation,
        begun.kind,
        begun.code if isinstance(begun, RunRow) else _cut(begun.code, CODE_KEPT),
        status,
        begun.started_at,
        begun.description,
        begun.tags,
        begun.context,
    )


# -- shortened results -----------------------------------------------------------------------------


def shortened(run: Run) -> Run:
    """Return the run with shortened texts and bundles; `truncated` is set if something was cut."""
    if _is_small(run):
        return run
    error = run.error
    if error is not None:
        error = RunError(
            _cut(error.name, _TEXT_KEPT),
            _cut(error.value, _TEXT_KEPT),
            _cut(error.traceback_ansi, _TEXT_KEPT),
            None if error.exit_text is None else _cut(error.exit_text, _TEXT_KEPT),
        )
    kept = replace(
        run,
        stdout=_cut(run.stdout, _TEXT_KEPT),
        stderr=_cut(run.stderr, _TEXT_KEPT),
        text=_cut(run.text, _TEXT_KEPT),
        result=run.result if run.result is None else _cut(run.result, _TEXT_KEPT),
        outputs=_small(run.outputs) if run.outputs else (),
        error=error,
    )
    whole = replace(kept, outputs=run.outputs) == run and _parts(kept) == _parts(run)
    return kept if whole else replace(kept, truncated=True)


def _parts(run: Run) -> int:
    return len(run.outputs) + sum(map(len, run.outputs))


def _is_small(run: Run) -> bool:
    plain = not run.outputs or (
        _parts(run) == 2
        and run.result is not None
        and text_of(run.outputs[0], "text/plain") == run.result
    )
    size = len(run.stdout) + len(run.stderr) + len(run.text) + len(run.result or "")
    return plain and run.error is None and size <= _TEXT_KEPT


def _cut(text: str, length: int) -> str:
    if len(text) <= length:
        return text
    half = length // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half} characters left out …]\n{text[-half:]}"


def _small(outputs: Sequence[MimeBundle]) -> tuple[MimeBundle, ...]:
    """Return the bundles without large parts such as figures, as long as there is room."""
    kept = []
    room = _OUTPUTS_KEPT
    for bundle in outputs:
        if room <= 0:
            break
        small = Bundle()
        for mime, part in stored(bundle):
            size = len(mime) + _size(part)
            if size <= min(_PART_KEPT, room):
                small[mime] = part
                room -= size
        if small:
            kept.append(small)
    return tuple(kept)


def _size(part: Any) -> int:
    """Return the size of its JSON in bytes, without an encoding of strings, which may be
    figures."""
    if isinstance(part, BundlePart):
        return len(part.encoded)
    return len(part) if isinstance(part, str) else len(msgspec.json.encode(value_to_json(part)))
