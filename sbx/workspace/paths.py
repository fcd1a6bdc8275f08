"""The only rule for paths that callers name: turn a text into a `Location`, or raise InvalidPath.

Callers name files as the code inside sees them: relative to `/workspace`, or absolute below it.
Each path is resolved here once, into a tuple of plain components. The rest of the package opens
them beneath a directory fd and never joins them into a path of the host.
"""

import unicodedata
from enum import StrEnum

from msgspec import Struct

from sbx.workspace.errors import invalid_path

WORKSPACE = "/workspace"
UPLOADS = "/workspace/uploads/temparea"
GENERATED = "/workspace/uploads/generated"
UPLOADS_APART = "/uploads"  # if a host directory is the workspace
SHARED = "/workspace/shared"

_NAME_MAX = 255  # bytes
_PATH_MAX = 4095  # bytes, without the closing NUL
# Mount points of a live jail: removing one on the host unmounts it inside.
_RESERVED = frozenset({(), ("uploads",), ("uploads", "temparea"), ("uploads", "generated")})


class WorkspaceArea(StrEnum):
    """The three trees that can contain a path. Each is opened by its own root fd."""

    FILES = "files"
    UPLOADS = "uploads"
    SHARED = "shared"


class Location(Struct, frozen=True):
    """A resolved path: components relative to the root of `part`; () means the root itself."""

    part: WorkspaceArea
    relative: tuple[str, ...]


def resolve(path: str, *, changing: bool = False, uploads_apart: bool = False) -> Location:
    """Resolve `path`: fold `.` and `..` as text, and refuse a path that leaves the workspace.

    `changing`: the caller wants to write, replace or delete the file. Then the mount points are
    `reserved`, and everything below the uploads is `read_only`. `uploads_apart`: a host directory
    is the workspace. Then the uploads are at `/uploads`, and no name in the workspace is reserved.

    Raises InvalidPath, whose `details` are `{"field": "path", "reason": …}`.
    """
    _check_text(path)
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if path.startswith("/"):
        if uploads_apart and parts[:1] == ["uploads"]:
            return _readable(Location(WorkspaceArea.UPLOADS, _folded(parts[1:])), changing)
        parts = _below_workspace(parts)
    relative = _folded(parts)
    if uploads_apart:
        if changing and not relative:
            raise invalid_path("reserved", "the workspace itself cannot be replaced or deleted")
        return Location(WorkspaceArea.FILES, relative)
    if relative[:2] == ("uploads", "temparea") and len(relative) > 2:
        return _readable(Location(WorkspaceArea.UPLOADS, relative[2:]), changing)
    if changing and (relative in _RESERVED or relative == ("shared",)):
        raise invalid_path("reserved", f"'{path}' is part of the structure of the workspace")
    if relative == ("uploads", "temparea"):
        return Location(WorkspaceArea.UPLOADS, ())
    if relative[:1] == ("shared",):
        return Location(WorkspaceArea.SHARED, relative[1:])
    return Location(WorkspaceArea.FILES, relative)


def check_name(name: str) -> str:
    """Return `name` unchanged if it can name an upload, which is one path component.

    Raises InvalidPath like `resolve`. The reason for `/` and for a backslash is `separator`: some
    browsers treat a backslash as a separator.
    """
    _check_text(name)
    if name in (".", ".."):
        raise invalid_path("path_traversal", "'.' and '..' cannot name a file")
    if "/" in name or "\\" in name:
        raise invalid_path("separator", f"'{name}' must be a plain file name, without '/' or '\\'")
    _check_length(name)
    return name


def _check_text(path: str) -> None:
    if not path:
        raise invalid_path("empty_path", "the path is empty")
    if "\0" in path:
        raise invalid_path("null_byte", "the path contains a NUL character")
    if any(unicodedata.category(char) == "Cc" for char in path):
        raise invalid_path("control_character", "the path contains a control character")
    try:
        size = len(path.encode())
    except UnicodeEncodeError as error:
        raise invalid_path("not_utf8", "the path cannot be written as UTF-8") from error
    if size > _PATH_MAX:
        raise invalid_path("name_too_long", f"the path is longer than {_PATH_MAX} bytes")


def _check_length(name: str) -> None:
    if len(name.encode()) > _NAME_MAX:
        raise invalid_path("name_too_long", f"a name on the path is longer than {_NAME_MAX} bytes")


def _below_workspace(parts: list[str]) -> list[str]:
    for prefix in (["workspace"], ["sandbox", "workspace"]):
        if parts[: len(prefix)] == prefix:
            return parts[len(prefix) :]
    raise invalid_path("absolute_path", f"absolute paths must be below {WORKSPACE}")


def _folded(parts: list[str]) -> tuple[str, ...]:
    folded: list[str] = []
    for part in parts:
        if part != "..":
            _check_length(part)
            folded.append(part)
        elif folded:
            folded.pop()
        else:
            raise invalid_path("path_traversal", "the path climbs out of the workspace")
    return tuple(folded)


def _readable(location: Location, changing: bool) -> Location:
    if changing:
        raise invalid_path(
            "read_only", "uploads are read-only at this path; change them by an upload"
        )
    return location
