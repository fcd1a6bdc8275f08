"""The quarantine: the path guard puts new host executables there until a user approves them.

    <store>/<id>/quarantine.json    {"directory": …}: the host directory of the quarantine
    <store>/<id>/lock               locked by the runtime, or the command, that uses it
    <store>/<id>/moved.json         {item: path}: where the code moved the link of an item to
    <store>/<id>/inside/items/      files of the code; mounted read-write into its jails
    <store>/<id>/inside/records/    the path of each item; only the path guard writes there

The quarantine is outside the host directory. In the directory itself, each item has a symlink with
its name, which is dangling on the host. The links are removed when the runtime no longer uses the
directory. Items stay until a user restores or drops them. Everything below `inside` comes from the
code inside, so each record is checked.
"""

import json
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from msgspec import Struct

from sbx.errors import Conflict, Denied, NotFound, SbxError, Unavailable
from sbx.guest.guarded_paths import ITEMS
from sbx.guest.path_rules import OPTION, reason
from sbx.guest.quarantine_items import ITEMS_MAX
from sbx.linux import locks
from sbx.linux.descriptors import closing
from sbx.protocol.runs import Quarantined
from sbx.workspace import copy
from sbx.workspace.errors import translated
from sbx.workspace.rmtree import remove_tree
from sbx.workspace.safe_open import encoded, opener
from sbx.workspace.streams import Owner
from sbx.workspace.tree import Tree
from sbx.workspace.walk import Walk

_ID = re.compile(r"[0-9a-f]{16}")
_RECORD_MAX = 64 << 10
_RECORDS_MAX = 10_000
_FULL = (
    f"the quarantine of this sandbox is full with {ITEMS_MAX} items: further ones fail with"
    " 'No space left on device'"
)
_PATH_MAX = 4096
_REMOVE_S = 30.0
_RESTORE_MAX = 8 << 30
_RESTORE_ENTRIES_MAX = 2_000_000  # a repository of loose objects, an environment of packages
_RESTORE_S = 900.0


class HostProtection(Struct, frozen=True):
    """The operator's settings for host executables: the directory of the quarantines, and the names
    to `add` to the table or `remove` from it."""

    quarantines: Path
    add: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()


class QuarantineItem(Struct, frozen=True):
    """One item. `id` is unique in all quarantines; `path` is relative to `directory`."""

    id: str
    directory: str
    path: str
    name: str
    program: str
    kind: str

    @property
    def why(self) -> str:
        return reason(self.name, self.program)

    @property
    def reported(self) -> Quarantined:
        return Quarantined(self.path, self.name, self.why, self.id)


class Quarantine:
    """The quarantine of one conversation. `close` removes its links from the directory."""

    def __init__(self, top: Path, directory: int, lock: ExitStack) -> None:
        self.top = top
        self._directory = directory
        self._held = lock
        self._tree = Tree.at(top / "inside", view="")
        lock.callback(self._tree.close)
        self._reported: set[str] = set()
        self._rules = ""

    @classmethod
    def open(cls, store: Path, directory: Path, fd: int, owner: Owner | None) -> Self:
        """Create a quarantine for `directory`, whose `fd` still belongs to the caller.

        Removes links that a killed runtime left in the directory. Raises Unavailable `no_space` and
        the other errors of `refusals`; Denied for a store that another user made.
        """
        with translated(str(store)), ExitStack() as stack:
            store.mkdir(mode=0o700, parents=True, exist_ok=True)
            _refuse_foreign(store)
            for top in _quarantines(store):
                if _directory_of(top) == str(directory):
                    with suppress(Conflict), _claimed(top):
                        _remove_links(top, fd)
                        _remove_if_empty(top)
            item_id = secrets.token_hex(8)
            building = store / f".new-{item_id}"  # renamed when it is complete and locked
            building.mkdir(mode=0o711)
            try:
                lock = os.open(building / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                stack.callback(os.close, lock)
                locks.try_lock(lock)
                (building / "quarantine.json").write_text(json.dumps({"directory": str(directory)}))
                for name in ("inside", "inside/items", "inside/records"):
                    (building / name).mkdir(mode=0o700)
                    if owner is not None:
                        os.chown(building / name, *owner)
                building.rename(store / item_id)
            except BaseException:
                _remove(store, building.name)
                raise
            return cls(store / item_id, fd, stack.pop_all())

    @property
    def inside(self) -> Path:
        """Return the directory that is mounted into the jails."""
        return self.top / "inside"

    def set_rules(self, rules: Mapping[str, Any]) -> None:
        """Write the rules for the path guards of the jails, which read them before each call.

        Unchanged rules are not written again. Raises OSError.
        """
        text = json.dumps(rules)
        if text != self._rules:
            written = self.top / "rules.json"
            written.write_text(text)
            written.chmod(0o644)
            written.replace(self.inside / "rules.json")
            self._rules = text

    @property
    def tree(self) -> Tree:
        """Return the tree that is mounted into the jails, for measuring; open until `close`."""
        return self._tree

    def names(self) -> frozenset[str]:
        """Return the names of all items. Code inside may have created some without a record.

        Raises OSError.
        """
        return frozenset(os.listdir(self.inside / "items")) | frozenset(_recorded(self.top))

    def drop_others(self, kept: Set[str]) -> None:
        """Remove each item that is not in `kept`, and its link. Raises OSError.

        Items that cannot be removed stay.
        """
        others = self.names() - kept
        if not others:
            return
        _remove_links_to(others, self._directory)
        for name in others:
            _remove(self.inside / "items", name)
            (self.inside / "records" / f"{name}.json").unlink(missing_ok=True)
            self._reported.discard(name)

    def unreported(self) -> tuple[Quarantined, ...]:
        """Return the items that are new since the last call."""
        fresh = list(items_of(self.top, without=self._reported))
        self._reported.update(item.id for item in fresh)
        reported = [item.reported for item in fresh]
        if reported and len(self.names()) >= ITEMS_MAX:
            reported[0] = replace(reported[0], why=f"{reported[0].why}; {_FULL}")
        return tuple(reported)

    def close(self) -> None:
        """Remove the links from the directory, and an empty quarantine itself."""
        with suppress(OSError):
            _note_moved(self.top, self._directory)
        _remove_links(self.top, self._directory)
        _remove_if_empty(self.top)
        self._held.close()


def items(store: Path) -> list[QuarantineItem]:
    """Return every item of all quarantines, sorted by directory and path."""
    with translated(str(store)):
        listed = [item for top in _quarantines(store) for item in items_of(top)]
    return sorted(listed, key=lambda item: (item.directory, item.path, item.id))


def get(store: Path, item_id: str) -> tuple[QuarantineItem, Path]:
    """Return an item and the path of its content. Raises NotFound `item_not_found`."""
    with translated(str(store)):
        for top in _quarantines(store):
            for item in items_of(top):
                if item.id == item_id:
                    return item, top / "inside" / "items" / item.id
    raise NotFound(
        f"the quarantine has no item {item_id!r}",
        code="item_not_found",
        hint="list the items: sbx quarantine list",
    )


def content_of(store: Path, item_id: str) -> Tree:
    """Open the directory that contains the item under the name `item_id`. The caller closes it.

    The tree follows no symlink, so nothing below it leads out. Raises NotFound.
    """
    _, content = get(store, item_id)
    return _items_tree(content.parent)


def restore(store: Path, item_id: str) -> str:
    """Copy an item to its path in the directory, remove it here, and return the path.

    Symlinks in the item are copied as links. FIFOs, sockets and devices are not copied; the item
    then stays. Raises NotFound, InvalidPath, TooLarge, Conflict `quarantine_in_use` while a sandbox
    can still change it, `directory_moved`, `restored_in_part`, and `file_exists` if the path
    exists.
    """
    item, content = get(store, item_id)
    top = content.parents[2]
    with _claimed(top, item), translated(item.directory), ExitStack() as stack:
        fd = _open_directory(item)
        stack.callback(os.close, fd)
        _remove_links(top, fd)
        status = os.fstat(fd)
        owner = (status.st_uid, status.st_gid) if os.geteuid() == 0 else None
        target = stack.enter_context(Tree(os.dup(fd), view=item.directory, owner=owner))
        copied = copy.copy(
            stack.enter_context(_items_tree(content.parent)),
            (item.id,),
            target,
            tuple(item.path.split("/")),
            file_max=_RESTORE_MAX,
            total_max=_RESTORE_MAX,
            overwrite=False,
            entries_max=_RESTORE_ENTRIES_MAX,
            deadline_s=_RESTORE_S,
        )
        if not copied.complete:
            raise Conflict(
                f"'{item.path}' was restored without its sockets, FIFOs and devices; the item"
                f" {item.id} stays in the quarantine",
                code="restored_in_part",
                hint=f"look at the rest: sbx quarantine show {item.id}",
            )
        _discard(top, item)
    return f"{item.directory}/{item.path}"


def drop(store: Path, item_id: str) -> None:
    """Delete an item. Raises NotFound, Conflict `quarantine_in_use`, and Unavailable
    `not_removed`."""
    item, content = get(store, item_id)
    top = content.parents[2]
    with _claimed(top, item), translated(item.directory):
        # The directory may be gone.
        with suppress(OSError, SbxError), closing(_open_directory(item)) as fd:
            _remove_links(top, fd)
        _discard(top, item)


def drop_all(top: Path) -> None:
    """Remove a whole quarantine that no sandbox uses. Raises Conflict `quarantine_in_use`."""
    with translated(str(top)), _claimed(top):
        _remove(top.parent, top.name)


def items_of(top: Path, without: Set[str] = frozenset()) -> Iterator[QuarantineItem]:
    """Yield the items of one quarantine. Ignore damaged records and records of removed items."""
    directory = _directory_of(top)
    if directory is None:
        return
    moved = _moved(top)
    with suppress(OSError):
        for item_id in _recorded(top):
            if item_id in without or not os.path.lexists(top / "inside/items" / item_id):
                continue
            record = _record(top, item_id)
            if record is not None:
                record["path"] = moved.get(item_id, record["path"])
                yield QuarantineItem(item_id, directory, **record)


def _recorded(top: Path) -> list[str]:
    """Return the names of the items that have a record."""
    names = sorted(os.listdir(top / "inside" / "records"))[:_RECORDS_MAX]
    item_ids = (name.removesuffix(".json") for name in names if name.endswith(".json"))
    return [name for name in item_ids if _ID.fullmatch(name)]


def _record(top: Path, item_id: str) -> dict[str, str] | None:
    """Return a record if it is valid and its path stays below the directory, else None."""
    try:
        path = top / "inside" / "records" / f"{item_id}.json"
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            data = json.loads(file.read(_RECORD_MAX))
    except (OSError, ValueError, RecursionError):
        return None
    names = ("path", "name", "program", "kind")
    if not isinstance(data, dict) or not all(isinstance(data.get(name), str) for name in names):
        return None
    return {name: data[name] for name in names} if _is_below(data["path"]) else None


def _is_below(path: str) -> bool:
    """Return whether a path stays below the directory from which it is resolved."""
    if len(path) > _PATH_MAX:
        return False
    try:
        for part in path.split("/"):
            encoded(part)
    except (OSError, ValueError):  # "..", NUL, or not encodable as a file name
        return False
    return True


def _refuse_foreign(store: Path) -> None:
    """Without a home the store is below /tmp, where another user could have made it first."""
    for place in (store.parent, store):
        status = place.lstat()
        if status.st_uid != os.geteuid():
            raise Denied(
                f"'{place}' belongs to another user, so it cannot contain a quarantine",
                code="data_directory_not_private",
                hint="set SBX_DATA_DIR to a directory that only you can write to",
                details={"path": str(place)},
            )


def _quarantines(store: Path) -> list[Path]:
    """Return the quarantines; a missing store has none. Raises OSError for an unreadable store."""
    with suppress(FileNotFoundError):
        return [store / name for name in sorted(os.listdir(store)) if _ID.fullmatch(name)]
    return []


def _directory_of(top: Path) -> str | None:
    try:
        directory = json.loads((top / "quarantine.json").read_text())["directory"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return directory if isinstance(directory, str) else None


# -- links in the directory ------------------------------------------------------------------------


def _note_moved(top: Path, directory: int) -> None:
    """Record the new paths of items whose links were moved. Raises OSError.

    Code may have moved the link, or a directory above it: `git clone x a; mv a b`.
    """
    absent = {
        item.id for item in items_of(top) if item.name != OPTION and not _is_linked(item, directory)
    }
    if not absent:
        return
    moved = _moved(top)
    tree = Tree(os.dup(directory), view="")
    with tree, suppress(SbxError):
        for path, status in tree.walk(Walk()):
            if stat.S_ISLNK(status.st_mode):
                with suppress(OSError, ValueError):
                    link = _link(directory, path).removeprefix(f"{ITEMS}/")
                    if link in absent:
                        moved[link] = "/".join(path)
    if moved:
        written = top / "moved.json.new"
        written.write_text(json.dumps(moved))
        written.rename(top / "moved.json")


def _remove_links_to(names: Set[str], directory: int) -> None:
    """Remove the links of these items, even if code has moved them in the directory."""
    links = []
    with Tree(os.dup(directory), view="") as tree, suppress(SbxError):
        for path, status in tree.walk(Walk()):
            if stat.S_ISLNK(status.st_mode):
                with suppress(OSError, ValueError):
                    link = _link(directory, path)
                    if link.startswith(f"{ITEMS}/") and link.removeprefix(f"{ITEMS}/") in names:
                        links.append((path, link))
    for path, link in links:
        _remove_link(directory, path, link)


def _moved(top: Path) -> dict[str, str]:
    try:
        data = json.loads((top / "moved.json").read_text())
    except (OSError, ValueError):
        return {}
    return {name: path for name, path in data.items() if _is_below(path)}


def _is_linked(item: QuarantineItem, directory: int) -> bool:
    try:
        return _link(directory, tuple(item.path.split("/"))) == f"{ITEMS}/{item.id}"
    except OSError:
        return False


def _link(directory: int, path: Sequence[str]) -> str:
    """Read a symlink. Raises OSError."""
    with closing(opener()(directory, tuple(path), os.O_PATH | os.O_NOFOLLOW)) as fd:
        return os.readlink("", dir_fd=fd)


def _remove_links(top: Path, directory: int) -> None:
    """Remove the symlinks of one quarantine, also those of items that the code removed.

    A file that replaced a symlink stays.
    """
    moved = _moved(top)
    with suppress(OSError):
        for item_id in _recorded(top):
            record = _record(top, item_id)
            for path in {record["path"] if record else "", moved.get(item_id, "")} - {""}:
                _remove_link(directory, path.split("/"), f"{ITEMS}/{item_id}")


def _remove_link(directory: int, parts: Sequence[str], link: str) -> None:
    with (
        suppress(OSError),
        closing(opener()(directory, tuple(parts[:-1]), os.O_PATH | os.O_DIRECTORY)) as parent,
    ):
        name = encoded(parts[-1])
        if os.readlink(name, dir_fd=parent) == link.encode():
            os.unlink(name, dir_fd=parent)


# -- the store -------------------------------------------------------------------------------------


def _open_directory(item: QuarantineItem) -> int:
    """Open the directory of an item. Raises OSError, and Conflict `directory_moved` if its path is
    now a symlink to another directory."""
    fd = os.open(item.directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    if (real := os.readlink(f"/proc/self/fd/{fd}")) == item.directory:
        return fd
    os.close(fd)
    raise Conflict(
        f"'{item.directory}' is now a symlink to '{real}'",
        code="directory_moved",
        hint="move the directory back to its path",
    )


def _items_tree(directory: Path) -> Tree:
    """Open the items of one quarantine.

    If this process is root, the items and their hard links may belong to the user of the jail.
    """
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    status = os.fstat(fd)
    owner = (status.st_uid, status.st_gid) if os.geteuid() == 0 else None
    return Tree(fd, view="", owner=owner)


def _discard(top: Path, item: QuarantineItem) -> None:
    """Remove an item and its record. Raises Unavailable `not_removed`."""
    if not _remove(top / "inside" / "items", item.id):
        raise Unavailable(
            f"the item {item.id} could not be removed from the quarantine",
            code="not_removed",
            hint=f"try again: sbx quarantine drop {item.id}",
        )
    (top / "inside" / "records" / f"{item.id}.json").unlink(missing_ok=True)
    _remove_if_empty(top)


def _remove_if_empty(top: Path) -> None:
    if not any(items_of(top)):
        _remove(top.parent, top.name)


def _remove(parent: Path, name: str) -> bool:
    with closing(os.open(parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
        return remove_tree(fd, name, _REMOVE_S) or not os.path.lexists(parent / name)


@contextmanager
def _claimed(top: Path, item: QuarantineItem | None = None) -> Iterator[None]:
    """Lock a quarantine for the block. Raises Conflict `quarantine_in_use`."""
    with ExitStack() as stack:
        with suppress(FileNotFoundError):
            fd = os.open(top / "lock", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            if not locks.try_lock(fd):
                directory = item.directory if item is not None else str(top)
                raise Conflict(
                    f"a sandbox still uses the quarantine of {directory} and could change the item",
                    code="quarantine_in_use",
                    hint="stop the sandbox first",
                )
        yield
