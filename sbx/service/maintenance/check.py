"""Whether the store can be used, and whether its rows and the directories on the disk match."""

import os
import sqlite3
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct, field

from sbx.errors import SbxError
from sbx.service.maintenance import place
from sbx.store import FILE_NAME, database, marks
from sbx.store.marks import Mark
from sbx.store.migrations import shipped
from sbx.workspace import unclaimed
from sbx.workspace.safe_open import opener
from sbx.workspace.unclaimed import OPAQUE_NAME

_PROBLEMS_MAX = 20
_LIST = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_RENAMED = 7  # the version of the store that has the names of today
_TODAYS_NAMES = """
CREATE TEMP VIEW workspaces AS SELECT * FROM main.cargos;
CREATE TEMP VIEW sandboxes AS SELECT *, cargo_id AS workspace_id FROM main.sandboxes;
"""

Directories = Mapping[str, frozenset[str]]  # of sandboxes, each with those of its conversations


class DirectoryName(Struct, frozen=True):
    """A directory of a sandbox, or with `conversation` one in it."""

    directory: str
    conversation: str | None = None
    sandbox: str | None = None


class StoreCheck(Struct):
    """`error`: why a service would not start. `problems`: of SQLite's own check.
    `without_directory`: conversations whose files are missing; `without_row`: directories that the
    next start moves to `unclaimed`; `without_workspace`: sandboxes that stop the start."""

    store: Path
    running: bool
    error: SbxError | None = None
    version: int | None = None
    store_mark: Mark | None = None
    directory_mark: Mark | None = None
    problems: list[str] = field(default_factory=list)
    without_directory: list[DirectoryName] = field(default_factory=list)
    without_row: list[DirectoryName] = field(default_factory=list)
    without_workspace: list[str] = field(default_factory=list)
    unclaimed: int = 0

    @property
    def ok(self) -> bool:
        findings = (self.problems, self.without_directory, self.without_row, self.without_workspace)
        return self.error is None and not any(findings)


def check(data: Path) -> StoreCheck:
    """Look at the store of a data directory, also while the service runs; changes nothing."""
    with place.as_owner(data):
        result = StoreCheck(data / FILE_NAME, place.is_running(data))
        there = on_disk(data)
        recorded: Directories | None = None
        try:
            recorded = _look(result, data)
        except SbxError as error:
            result.error = error
        result.unclaimed = len(unclaimed.items(data))
    if recorded is not None:  # as root: the files of sandboxes belong to other users
        result.without_row = [
            name for name in missing_in(recorded, there) if not _has_no_files(data, name)
        ]
        sandboxes = result.without_directory
        result.without_directory = [
            name for name in sandboxes if name.conversation not in there.get(name.directory, ())
        ]
    return result


def _look(result: StoreCheck, data: Path) -> Directories | None:
    """Return the directories that the store lists; None if it is missing or cannot be read."""
    path = result.store
    result.directory_mark = marks.read_from_directory(data)
    exists = not database.is_missing(path)
    if exists:
        with database.translating(path), database.only_looking(path) as on:
            result.problems = [
                str(row[0])
                for row in on.execute(f"PRAGMA integrity_check({_PROBLEMS_MAX})")
                if row[0] != "ok"
            ]
        contents = database.examine(path, shipped()[-1].version)
        result.version, result.store_mark = contents.version, contents.mark
        exists = contents.version > 0
    verdict = marks.judge(
        result.store_mark,
        result.directory_mark,
        exists=exists,
        has_sandboxes=marks.has_sandboxes(data),
    )
    result.error = marks.refusal(verdict, path, result.store_mark, result.directory_mark)
    if not exists:
        return None
    with database.translating(path), database.only_looking(path) as on:
        if contents.version < _RENAMED:
            on.executescript(_TODAYS_NAMES)
        result.without_workspace = sandboxes_without_workspace(on)
        result.without_directory = conversations_of(on)
        return known_directories(on)


def known_directories(on: sqlite3.Connection) -> Directories:
    """Return every directory that a row names: also those that are to be removed."""
    recorded: dict[str, set[str]] = {}
    for workspace, conversation in on.execute(
        "SELECT workspaces.directory, conversations.directory FROM workspaces"
        " LEFT JOIN sandboxes ON sandboxes.workspace_id = workspaces.id"
        " LEFT JOIN conversations ON conversations.sandbox_id = sandboxes.id"
        " WHERE workspaces.deleted_at IS NULL OR (sandboxes.deleted_at IS NOT NULL"
        " AND files_removed = 0)"
    ):
        recorded.setdefault(workspace, set()).add(conversation)
    if on.execute("SELECT 1 FROM sqlite_master WHERE name = 'removals'").fetchone():
        for workspace, conversation in on.execute("SELECT directory, conversation FROM removals"):
            recorded.setdefault(workspace, set()).add(conversation)
    return {workspace: frozenset(names) for workspace, names in recorded.items()}


def conversations_of(on: sqlite3.Connection) -> list[DirectoryName]:
    """Return the directories of all conversations of sandboxes that were not deleted."""
    return [
        DirectoryName(*row)
        for row in on.execute(
            "SELECT workspaces.directory, conversations.directory, sandboxes.id FROM conversations"
            " JOIN sandboxes ON sandboxes.id = conversations.sandbox_id"
            " JOIN workspaces ON workspaces.id = sandboxes.workspace_id"
            " WHERE sandboxes.deleted_at IS NULL ORDER BY sandboxes.id, conversations.name"
        )
    ]


def sandboxes_without_workspace(on: sqlite3.Connection) -> list[str]:
    return [
        row[0]
        for row in on.execute(
            "SELECT id FROM sandboxes WHERE NOT EXISTS"
            " (SELECT 1 FROM workspaces WHERE workspaces.id = sandboxes.workspace_id"
            " AND (workspaces.deleted_at IS NULL OR sandboxes.deleted_at IS NOT NULL))"
            " ORDER BY id"
        )
    ]


def on_disk(data: Path) -> Directories:
    """Return the directories of sandboxes, each with those of its conversations. Raises OSError."""
    try:
        top = os.open(data / "sandboxes", _LIST)
    except FileNotFoundError:
        return {}
    try:
        return {name: _conversations(top, name) for name in _opaque_names(top)}
    finally:
        os.close(top)


def missing_in(recorded: Directories, there: Directories) -> list[DirectoryName]:
    missing = [DirectoryName(sandbox) for sandbox in sorted(there.keys() - recorded.keys())]
    for sandbox in sorted(there.keys() & recorded.keys()):
        if "" not in recorded[sandbox]:  # else all of it is to be removed
            left = sorted(there[sandbox] - recorded[sandbox])
            missing += [DirectoryName(sandbox, name) for name in left]
    return missing


def _conversations(top: int, sandbox: str) -> frozenset[str]:
    try:
        fd = opener()(top, (sandbox,), _LIST)
    except OSError:
        return frozenset()
    try:
        return _opaque_names(fd)
    finally:
        os.close(fd)


def _opaque_names(directory: int) -> frozenset[str]:
    return frozenset(filter(OPAQUE_NAME.fullmatch, os.listdir(directory)))


def _has_no_files(data: Path, name: DirectoryName) -> bool:
    """Return whether it is a sandbox that was made ahead, or a copy, which a start removes."""
    top = os.open(data / "sandboxes", _LIST)
    try:
        return unclaimed.has_no_files(top, name.directory, name.conversation)
    finally:
        os.close(top)
