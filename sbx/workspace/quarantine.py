"""Where the path guard puts new host executables: outside the directory, until a user agrees.

    <store>/<id>/quarantine.json    {"directory": …}: for which directory of the host
    <store>/<id>/lock               held by the runtime that uses it
    <store>/<id>/inside/items/      what the code created; mounted read-write into its jails
    <store>/<id>/inside/records/    where each item was to be; only the path guard writes there

In the directory itself each item has a symlink of its name, which leads nowhere on the host. The
links are removed when the runtime is done with the directory; items stay until a user restores or
drops them. Everything below `inside` comes from inside: a record is a claim, which is checked.
"""

import json
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from sbx.errors import Conflict, NotFound
from sbx.guest.guarded_paths import ITEMS
from sbx.linux import locks
from sbx.protocol.runs import Quarantined
from sbx.workspace import copying
from sbx.workspace.beneath import opener
from sbx.workspace.refusals import translated
from sbx.workspace.removal import remove_tree
from sbx.workspace.streams import Owner
from sbx.workspace.tree import Tree

_ID = re.compile(r"[0-9a-f]{16}")
_RECORD_MAX = 64 << 10
_RECORDS_MAX = 10_000
_REMOVE_S = 30.0
_RESTORE_MAX = 8 << 30


@dataclass(frozen=True, slots=True)
class HostProtection:
    """What an operator decides about host executables: where the quarantines lie, and which names
    to `add` to the table or `remove` from it."""

    quarantines: Path
    add: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class QuarantineItem:
    """One item. `id` is unique in all quarantines; `path` is relative to `directory`."""

    id: str
    directory: str
    path: str
    name: str
    program: str
    kind: str


class Quarantine:
    """The quarantine of one conversation, in use; `close` removes its links from the directory."""

    def __init__(self, top: Path, directory: int, lock: ExitStack) -> None:
        self.top = top
        self._directory = directory
        self._held = lock
        self._reported: set[str] = set()

    @classmethod
    def open(cls, store: Path, directory: Path, fd: int, owner: Owner | None) -> Self:
        """Make one for `directory`, which `fd` holds open and stays the caller's.

        Removes links that a killed runtime left in the directory. Raises Unavailable `no_space` and
        the like.
        """
        with translated(str(store)), ExitStack() as held:
            store.mkdir(mode=0o700, parents=True, exist_ok=True)
            for left in _quarantines(store):
                if _directory_of(left) == str(directory) and not _in_use(left):
                    _remove_links(left, fd)
                    _remove_if_empty(left)
            top = store / secrets.token_hex(8)
            top.mkdir(mode=0o711)
            lock = os.open(top / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            held.callback(os.close, lock)
            locks.try_lock(lock)
            (top / "quarantine.json").write_text(json.dumps({"directory": str(directory)}))
            for name in ("inside", "inside/items", "inside/records"):
                (top / name).mkdir(mode=0o700)
                if owner is not None:
                    os.chown(top / name, *owner)
            return cls(top, fd, held.pop_all())

    @property
    def inside(self) -> Path:
        """The directory that is mounted into the jails."""
        return self.top / "inside"

    def unreported(self) -> tuple[Quarantined, ...]:
        """The items that came since the last call."""
        fresh = [item for item in items_of(self.top) if item.id not in self._reported]
        self._reported.update(item.id for item in fresh)
        return tuple(
            Quarantined(item.path, item.name, f"{item.program} would obey it on the host", item.id)
            for item in fresh
        )

    def close(self) -> None:
        """Remove the links from the directory, and the quarantine itself where it has no item."""
        _remove_links(self.top, self._directory)
        self._held.close()
        _remove_if_empty(self.top)


def items(store: Path) -> list[QuarantineItem]:
    """Return every item of all quarantines, sorted by directory and path."""
    found = [item for top in _quarantines(store) for item in items_of(top)]
    return sorted(found, key=lambda item: (item.directory, item.path, item.id))


def get(store: Path, item_id: str) -> tuple[QuarantineItem, Path]:
    """Return an item and the path of its content. Raises NotFound `item_not_found`."""
    for top in _quarantines(store):
        for item in items_of(top):
            if item.id == item_id:
                return item, top / "inside" / "items" / item.id
    raise NotFound(
        f"the quarantine has no item {item_id!r}",
        code="item_not_found",
        hint="list the items: sbx quarantine list",
    )


def restore(store: Path, item_id: str) -> str:
    """Copy an item to its place in the directory, remove it here, and return its path.

    Raises NotFound, Conflict `quarantine_in_use` while a sandbox can still change it, and Conflict
    `file_exists` if its place is taken.
    """
    item, content = get(store, item_id)
    top = content.parents[2]
    _demand_unused(top, item)
    with translated(item.directory), ExitStack() as held:
        fd = os.open(item.directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        held.callback(os.close, fd)
        _remove_links(top, fd)
        found = os.fstat(fd)
        owner = (found.st_uid, found.st_gid) if os.geteuid() == 0 else None
        target = held.enter_context(Tree(os.dup(fd), view=item.directory, owner=owner))
        source_fd = os.open(content.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        source = held.enter_context(Tree(source_fd, view=item.directory))
        copying.copy(
            source,
            (item.id,),
            target,
            tuple(item.path.split("/")),
            file_max=_RESTORE_MAX,
            total_max=_RESTORE_MAX,
            overwrite=False,
        )
    drop(store, item_id)
    return f"{item.directory}/{item.path}"


def drop(store: Path, item_id: str) -> None:
    """Remove an item for good. Raises NotFound, and Conflict `quarantine_in_use`."""
    item, content = get(store, item_id)
    top = content.parents[2]
    _demand_unused(top, item)
    with suppress(OSError):
        fd = os.open(item.directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _remove_links(top, fd)
        finally:
            os.close(fd)
    _remove(content.parent, item.id)
    (top / "inside" / "records" / f"{item.id}.json").unlink(missing_ok=True)
    _remove_if_empty(top)


def items_of(top: Path) -> Iterator[QuarantineItem]:
    """Yield the items of one quarantine. Ignores a record that is damaged, or of a removed item."""
    directory = _directory_of(top)
    if directory is None:
        return
    with suppress(OSError):
        for name in sorted(os.listdir(top / "inside" / "records"))[:_RECORDS_MAX]:
            item_id = name.removesuffix(".json")
            if not _ID.fullmatch(item_id) or not os.path.lexists(top / "inside/items" / item_id):
                continue
            record = _record(top / "inside" / "records" / name)
            if record is not None:
                yield QuarantineItem(item_id, directory, **record)


def _record(path: Path) -> dict[str, str] | None:
    """A record, if it is of the known form and its path stays below the directory."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            data = json.loads(file.read(_RECORD_MAX))
    except (OSError, ValueError, RecursionError):
        return None
    names = ("path", "name", "program", "kind")
    if not isinstance(data, dict) or not all(isinstance(data.get(name), str) for name in names):
        return None
    parts = data["path"].split("/")
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        return None
    return {name: data[name] for name in names}


def _quarantines(store: Path) -> list[Path]:
    with suppress(OSError):
        return [store / name for name in sorted(os.listdir(store)) if _ID.fullmatch(name)]
    return []


def _directory_of(top: Path) -> str | None:
    try:
        directory = json.loads((top / "quarantine.json").read_text())["directory"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return directory if isinstance(directory, str) else None


def _remove_links(top: Path, directory: int) -> None:
    """Remove the symlinks of the items of one quarantine, wherever no other name took the place."""
    for item in list(items_of(top)) + list(_claims_without_item(top)):
        parts: Sequence[str] = item.path.split("/")
        with suppress(OSError):
            parent = opener()(directory, tuple(parts[:-1]), os.O_PATH | os.O_DIRECTORY)
            try:
                if os.readlink(parts[-1], dir_fd=parent) == f"{ITEMS}/{item.id}":
                    os.unlink(parts[-1], dir_fd=parent)
            finally:
                os.close(parent)


def _claims_without_item(top: Path) -> Iterator[QuarantineItem]:
    """Items that the code removed, while their link may have stayed."""
    with suppress(OSError):
        for name in os.listdir(top / "inside" / "records")[:_RECORDS_MAX]:
            item_id = name.removesuffix(".json")
            if _ID.fullmatch(item_id) and not os.path.lexists(top / "inside/items" / item_id):
                record = _record(top / "inside" / "records" / name)
                if record is not None:
                    yield QuarantineItem(item_id, "", **record)


def _remove_if_empty(top: Path) -> None:
    if not any(items_of(top)) and not _in_use(top):
        _remove(top.parent, top.name)


def _remove(parent: Path, name: str) -> None:
    fd = os.open(parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        remove_tree(fd, name, _REMOVE_S)
    finally:
        os.close(fd)


def _in_use(top: Path) -> bool:
    try:
        fd = os.open(top / "lock", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not locks.try_lock(fd)
    finally:
        os.close(fd)


def _demand_unused(top: Path, item: QuarantineItem) -> None:
    if _in_use(top):
        raise Conflict(
            f"a sandbox still uses the quarantine of {item.directory}, and could change the item",
            code="quarantine_in_use",
            hint="stop the sandbox first",
        )
