"""Translate the errors of sqlite3."""

import json
import sqlite3
from pathlib import Path
from typing import Any

from sbx.errors import Broken, SbxError, Unavailable
from sbx.store.marks import damaged_hint

_FULL = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE}
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
_NOT_JSON = "malformed JSON"  # SQLite's error of a function for JSON


def is_full(error: BaseException) -> bool:
    """Return whether a write failed because the disk is full, or may have failed for that reason:
    SQLite reports a quota as any failed write."""
    code = _code(error)
    return code in _FULL or code & 0xFF in _FULL or code == sqlite3.SQLITE_IOERR_WRITE


def no_space(place: str) -> Unavailable:
    return Unavailable(
        "the disk has no space left for the store",
        code="no_space",
        hint=f"free some on the file system of {place}",
    )


def _code(error: BaseException) -> int:
    return getattr(error, "sqlite_errorcode", 0) or 0


def decoded(text: str) -> Any:
    """Return the value of a column with JSON. Raise Unavailable `store_corrupt` if it has none: its
    row was changed by another program."""
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise _damaged("the store", f"a value is not JSON ({error})") from error


def _damaged(store: str, why: object, path: str | None = None) -> Unavailable:
    return Unavailable(
        f"{store} is damaged: {why}",
        code="store_corrupt",
        hint=None if path is None else damaged_hint(Path(path)),
    )


def translated(error: sqlite3.Error, path: str | None = None) -> SbxError:
    """Return the error to raise for `error`. Give `path` for operators only, never for a tenant."""
    store = "the store" if path is None else f"the store {path}"
    extended = _code(error)
    primary = extended & 0xFF
    if extended in _FULL or primary in _FULL:
        return no_space(path or "the data directory")
    if primary == sqlite3.SQLITE_BUSY:
        return Unavailable(
            "another process holds the store", code="store_busy", hint="try again in a moment"
        )
    if primary in _DAMAGED or str(error) == _NOT_JSON:
        return _damaged(store, error, path)
    if primary in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
        return Unavailable(
            f"{store} cannot be written: {error}",
            code="store_unusable",
            hint="the service's user must own the file and its directory",
        )
    if primary == sqlite3.SQLITE_IOERR:
        return Unavailable(f"{store} cannot be written: {error}", code="store_unusable")
    return Broken(f"the store failed: {error}")
