"""An item of a quarantine for a person to read, before they decide about it."""

import os
import stat
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from sbx.workspace import quarantine
from sbx.workspace.tree import Tree

_CONTENT_MAX = 64 << 10  # bytes of a file
_ENTRIES_MAX = 500  # of a directory


def item_body(item: quarantine.QuarantineItem) -> dict[str, Any]:
    """Return an item as JSON, without its content. Half of a surrogate pair is escaped: the code
    inside chose the texts, and UTF-8 cannot represent it."""
    body = {**asdict(item), "why": item.why}
    return {name: _text(value) for name, value in body.items()}


def read(store: Path, item_id: str, path: str = "") -> dict[str, Any]:
    """Return an item with the begin of its file, the entries of its directory or the target of its
    symlink, which is not followed. `path` is one in an item that is a directory. The values are
    hostile. Raise NotFound, InvalidPath."""
    item, _ = quarantine.get(store, item_id)
    below = (item.id, *(part for part in path.split("/") if part))
    with quarantine.content_of(store, item_id) as tree:
        kind = tree.stat(below).kind
        body: dict[str, Any] = {**item_body(item), "kind": kind}
        if kind == "directory":
            body |= _entries(tree, below)
        elif kind == "file":
            body |= _content(tree, below)
        elif kind == "symlink":
            body["target"] = _target(tree, below)
    return body


def _entries(tree: Tree, below: tuple[str, ...]) -> dict[str, Any]:
    listing = tree.list(below, max_entries=_ENTRIES_MAX, max_depth=64)
    top = f"{tree.shown(below)}/"
    entries = []
    for entry in listing:
        path = entry.path.removeprefix(top)
        body = {"path": path, "kind": entry.kind, "size": entry.size}
        if entry.kind == "symlink":
            body["target"] = _target(tree, (*below, *path.split("/")))
        entries.append(body)
    return {"entries": entries, "complete": listing.complete}


def _target(tree: Tree, path: tuple[str, ...]) -> str:
    try:
        link = tree.hold(path)
    except OSError:  # the name is not valid text
        return "?"
    try:
        return _text(os.fsdecode(os.readlink("", dir_fd=link)))
    finally:
        os.close(link)


def _text(value: str) -> str:
    return value.encode("utf-8", "backslashreplace").decode()


def _content(tree: Tree, below: tuple[str, ...]) -> dict[str, Any]:
    with tree.open(below) as file:
        mode = stat.S_IMODE(os.fstat(file.fd).st_mode)
        content = os.pread(file.fd, _CONTENT_MAX, 0)
        return {
            "size": file.size,
            "executable": bool(mode & 0o111),
            "content": content.decode(errors="backslashreplace"),
            "complete": len(content) >= file.size,
        }
