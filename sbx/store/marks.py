"""Decide whether a store is the one of its data directory, and the latest one.

    store      table `store_mark`           id, generation
    directory  {data}/store_mark.json       id, generation

The id is random. The generation rises at each start and at each clean end of a service: in the
store first, and then in the directory, each on the disk before the next step. So the store of a
service that was killed at any moment has the generation of the directory, or a higher one. A lower
generation is that of an earlier copy, whose rows do not know all directories of sandboxes.
"""

import json
import os
import secrets
import shlex
import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import Literal

from msgspec import Struct
from msgspec.structs import asdict

from sbx.errors import Unavailable
from sbx.workspace.unclaimed import OPAQUE_NAME

FILE = "store_mark.json"
_READ_MAX = 4096

Verdict = Literal["create", "adopt", "continue", "store_missing", "store_older", "store_of_another"]


class Mark(Struct, frozen=True):
    id: str
    generation: int


def judge(
    store: Mark | None, directory: Mark | None, *, exists: bool, has_sandboxes: bool
) -> Verdict:
    """Decide about a store by its mark and that of its data directory.

    `exists`: the store has a schema. Without either mark it is of an earlier version of sbx. A
    directory that lost its file is adopted, because sbx keeps files that the store does not know.
    """
    if not exists:
        return "store_missing" if directory is not None or has_sandboxes else "create"
    if directory is None:
        return "adopt"
    if store is None:
        return "store_older"
    if store.id != directory.id:
        return "store_of_another"
    return "store_older" if store.generation < directory.generation else "continue"


def following(*earlier: Mark | None) -> Mark:
    """Return a mark that is later than all these, with the id of the first one."""
    marks = [mark for mark in earlier if mark is not None]
    name = marks[0].id if marks else secrets.token_hex(16)
    return Mark(name, max((mark.generation for mark in marks), default=0) + 1)


def refusal(
    verdict: Verdict, path: Path, store: Mark | None, directory: Mark | None
) -> Unavailable | None:
    """Return the error for a verdict, with the commands to run; None if the store may be used."""
    restore = command("restore", path.parent)
    itself = shlex.quote(str(path))
    match verdict:
        case "store_missing":
            message = f"the store {path} is missing or empty, but its data directory is in use"
            hint = (
                f"put a backup in its place: {restore} FILE; or begin with an empty store, which"
                f" keeps the files of all sandboxes apart: {restore} --empty"
            )
        case "store_older":
            has = 0 if store is None else store.generation
            wants = 0 if directory is None else directory.generation
            message = (
                f"the store {path} is older than its data directory: it has the generation {has},"
                f" and the directory {wants}"
            )
            hint = f"put the latest store back; or continue with this one: {restore} {itself}"
        case "store_of_another":
            message = f"the store {path} belongs to another data directory"
            hint = (
                "put the store of this directory back; or continue with this one:"
                f" {restore} --force {itself}"
            )
        case _:
            return None
    return Unavailable(message, code=verdict, hint=hint)


def command(name: str, data: Path) -> str:
    return f"sbx store {name} --data-dir {shlex.quote(str(data))}"


def damaged_hint(path: Path) -> str:
    data = path.parent
    return (
        f"it was left as it is; see {command('check', data)}, then save its rows with"
        f" {command('repair', data)}, or put a backup in its place with"
        f" {command('restore', data)} FILE"
    )


# -- the store ---------------------------------------------------------------------------------


def read_from_store(on: sqlite3.Connection) -> Mark | None:
    """Return the mark of an open store; None for a store of an earlier version."""
    if not on.execute("SELECT 1 FROM sqlite_master WHERE name = 'store_mark'").fetchone():
        return None
    row = on.execute("SELECT id, generation FROM store_mark").fetchone()
    if row is None or not isinstance(row[1], int):  # a damaged page
        return None
    return Mark(str(row[0]), row[1])


def write_to_store(on: sqlite3.Connection, mark: Mark) -> None:
    """Write the mark, and return when it is on the disk. No transaction may be open."""
    on.execute("PRAGMA synchronous = FULL")
    try:
        on.execute(
            "INSERT OR REPLACE INTO store_mark (only_row, id, generation) VALUES (1, ?, ?)",
            (mark.id, mark.generation),
        )
    finally:
        on.execute("PRAGMA synchronous = NORMAL")


# -- the data directory ------------------------------------------------------------------------


def read_from_directory(data: Path) -> Mark | None:
    """Return the mark of a data directory, if it has one. Raise Unavailable `store_unusable`, and
    OSError."""
    try:
        fd = os.open(data / FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with open(fd, "rb") as file:
        content = file.read(_READ_MAX)
    with suppress(ValueError, TypeError, KeyError):
        fields = json.loads(content)
        return Mark(str(fields["id"]), int(fields["generation"]))
    raise Unavailable(
        f"the mark of the store, {data / FILE}, cannot be read: it is not JSON with id and"
        " generation",
        code="store_unusable",
        hint=f"look at the store ({command('check', data)}), then remove that file",
    )


def write_to_directory(data: Path, mark: Mark) -> None:
    """Write the mark, and return when it is on the disk. Raise OSError."""
    fresh = data / f".{FILE}.new"
    fresh.unlink(missing_ok=True)  # of a service that was killed
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(fd, "w", encoding="ascii") as file:
        json.dump(asdict(mark), file)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(data / FILE)
    sync(data)


def has_sandboxes(data: Path) -> bool:
    """Return whether there are directories of sandboxes. Raises OSError."""
    try:
        names = os.listdir(data / "sandboxes")
    except FileNotFoundError:
        return False
    return any(map(OPAQUE_NAME.fullmatch, names))


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a directory, are on the disk. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
