"""sqlite3's errors in our words."""

import sqlite3

from sbx.errors import Broken, SbxError, Unavailable

_FULL = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE}
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}


def translated(error: sqlite3.Error, path: str) -> SbxError:
    """What to raise for `error` of the store at `path`."""
    extended = getattr(error, "sqlite_errorcode", 0) or 0
    primary = extended & 0xFF
    if extended in _FULL or primary in _FULL:
        return Unavailable(
            "there is no space left for the store",
            code="no_space",
            hint=f"free some on the file system of {path}",
        )
    if primary == sqlite3.SQLITE_BUSY:
        return Unavailable(
            "another process holds the store", code="store_busy", hint="try again in a moment"
        )
    if primary in _DAMAGED:
        return Unavailable(f"the store {path} is damaged: {error}", code="store_corrupt")
    if primary in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
        return Unavailable(
            f"the store {path} cannot be written: {error}",
            code="store_unusable",
            hint="the service's user must own the file and its directory",
        )
    return Broken(f"the store failed: {error}")
