"""Operations on files as the code inside sees them: any path, owner, symlinks as they are.

The host starts this file next to the kernel, and writes one JSON list of requests to its standard
input. Each request is an object with `act` and the arguments of the function below of that name.
The answer is one JSON list; it ends at the first failure, {"error": sentence, "errno": number}.
Bytes are base64 in both directions. `mode` is the number that os.chmod takes. Standard library
only.
"""

import base64
import fnmatch
import grp
import json
import os
import pwd
import shutil
import stat
import sys
from collections.abc import Callable
from typing import Any

_ENTRIES_MAX = 20_000
_READ_MAX = 4 << 20
_ATTRIBUTES = "user.e2b."
_ATTRIBUTES_MAX = 64


def main() -> None:
    requests = json.load(sys.stdin)
    answers: list[Any] = []
    for request in requests:
        try:
            answers.append(_ACTS[request.pop("act")](**request))
        except OSError as error:
            reason = error.strerror or str(error) or "it failed"
            answers.append({"error": reason, "errno": error.errno or 0})
            break
    json.dump(answers, sys.stdout)
    sys.stdout.write("\n")


def _stat(path: str) -> dict[str, Any]:
    return {"entries": [_entry(path)]}


def _list(path: str, depth: int) -> dict[str, Any]:
    """List a directory by path, each parent before its children. Links are not followed."""
    os.scandir(path).close()
    entries: list[dict[str, Any]] = []
    complete = _walk(path, depth, entries, os.stat(path).st_dev)
    return {"entries": entries, "complete": complete}


def _walk(path: str, depth: int, entries: list[dict[str, Any]], device: int) -> bool:
    """Stay on the file system: a virtual environment of the host may be mounted below /tmp."""
    if depth < 1:
        return True
    try:
        names = sorted(os.listdir(path))
    except OSError:
        return True
    for name in names:
        if len(entries) >= _ENTRIES_MAX:
            return False
        full = os.path.join(path, name)
        try:
            entry = _entry(full)
        except OSError:
            continue
        entries.append(entry)
        inner = entry["kind"] == "directory" and _device(full) == device
        if inner and not _walk(full, depth - 1, entries, device):
            return False
    return True


def _device(path: str) -> int:
    try:
        return os.lstat(path).st_dev
    except OSError:
        return -1


def _search(path: str, pattern: str) -> dict[str, Any]:
    """Find the files below a directory whose base name matches one of the alternatives."""
    patterns = _alternatives(pattern)
    os.scandir(path).close()
    entries: list[dict[str, Any]] = []
    device = os.stat(path).st_dev
    for top, directories, files in os.walk(path):
        inner = (name for name in directories if _device(os.path.join(top, name)) == device)
        directories[:] = sorted(inner)
        for name in sorted(files):
            if not any(fnmatch.fnmatchcase(name, each) for each in patterns):
                continue
            if len(entries) >= _ENTRIES_MAX:
                return {"entries": entries, "complete": False}
            try:
                entry = _entry(os.path.join(top, name))
            except OSError:
                continue
            if entry["kind"] == "file":
                entries.append(entry)
    return {"entries": entries, "complete": True}


def _alternatives(pattern: str) -> list[str]:
    """Return the patterns of `{a,b}`; at most a hundred."""
    patterns = [pattern]
    for _ in range(8):
        for index, each in enumerate(patterns):
            opened, closed = each.find("{"), each.find("}", each.find("{"))
            if 0 <= opened < closed:
                words = each[opened + 1 : closed].split(",")
                patterns[index : index + 1] = [
                    each[:opened] + word + each[closed + 1 :] for word in words
                ]
                break
        else:
            break
    return patterns[:100]


def _read(path: str, offset: int, length: int) -> dict[str, Any]:
    # A FIFO would keep the open waiting for a writer.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(21, os.strerror(21))
        if not stat.S_ISREG(status.st_mode):
            raise OSError(22, "Not a regular file")
        file.seek(offset)
        content = file.read(min(length, _READ_MAX))
    return {"size": status.st_size, "content": base64.b64encode(content).decode()}


def _write(path: str, content: str, part: str, first: bool, last: bool) -> dict[str, Any]:
    """Write a piece of a file to `part`, next to it; the last piece replaces the file."""
    parent = os.path.dirname(path) or "/"
    os.makedirs(parent, exist_ok=True)
    if os.path.isdir(path):
        raise IsADirectoryError(21, os.strerror(21))
    staged = os.path.join(parent, part)
    try:
        with open(staged, "xb" if first else "ab") as file:
            file.write(base64.b64decode(content))
        if last:
            if os.path.exists(path):
                os.chmod(staged, stat.S_IMODE(os.stat(path).st_mode))
            os.replace(staged, os.path.realpath(path))
    except BaseException:
        if os.path.lexists(staged):
            os.unlink(staged)
        raise
    return {}


def _make_directory(path: str, mode: int | None) -> dict[str, Any]:
    """Create a directory and its parents. `mode` is that of a new one."""
    is_new = not os.path.isdir(path)
    os.makedirs(path, exist_ok=True)
    if is_new and mode is not None:
        os.chmod(path, mode)
    return {"is_new": is_new}


def _delete(path: str, tree: bool) -> dict[str, Any]:
    """Delete a file, or with `tree` a directory and all below it. It accepts a missing one."""
    try:
        if stat.S_ISDIR(os.lstat(path).st_mode):
            if not tree:
                raise IsADirectoryError(21, os.strerror(21))
            shutil.rmtree(path)
        else:
            os.unlink(path)
    except FileNotFoundError:
        return {"was_there": False}
    return {"was_there": True}


def _move(source: str, target: str, replace: bool) -> dict[str, Any]:
    os.lstat(source)
    if os.path.lexists(target) and (not replace or os.path.isdir(target)):
        raise FileExistsError(17, os.strerror(17))
    os.makedirs(os.path.dirname(target) or "/", exist_ok=True)
    shutil.move(source, target)
    return {}


def _permissions(
    path: str, mode: int | None, owner: str | None, group: str | None
) -> dict[str, Any]:
    if mode is not None:
        os.chmod(path, mode)
    if owner or group:
        status = os.stat(path)
        if (owner or _user(status.st_uid), group or _group(status.st_gid)) != (
            _user(status.st_uid),
            _group(status.st_gid),
        ):
            raise PermissionError(1, "The owner of a file is the user of the sandbox")
    return {}


def _replace(path: str, old: str, new: str) -> dict[str, Any]:
    with open(path, "rb") as file:
        content = file.read()
    before = old.encode()
    count = content.count(before)
    if count:
        changed = base64.b64encode(content.replace(before, new.encode())).decode()
        _write(path, changed, f".{os.urandom(8).hex()}.part", True, True)
    return {"count": count}


def _attributes(path: str, values: dict[str, str]) -> dict[str, Any]:
    """Replace the extended attributes of a file below `_ATTRIBUTES`."""
    for name in os.listxattr(path):
        if name.startswith(_ATTRIBUTES):
            os.removexattr(path, name)
    for name, value in values.items():
        os.setxattr(path, _ATTRIBUTES + name, os.fsencode(value))
    return {}


def _attributes_of(path: str) -> dict[str, str]:
    try:
        names = [name for name in os.listxattr(path) if name.startswith(_ATTRIBUTES)]
        return {
            name.removeprefix(_ATTRIBUTES): os.getxattr(path, name).decode(errors="replace")
            for name in names[:_ATTRIBUTES_MAX]
        }
    except OSError:
        return {}


def _entry(path: str) -> dict[str, Any]:
    """Return an entry. A link also has its target, with its kind and its mode."""
    status = os.lstat(path)
    link: dict[str, Any] = {}
    if stat.S_ISLNK(status.st_mode):
        try:
            target = os.stat(path)
        except OSError:
            target = status
        link = {
            "target": os.fsencode(os.path.realpath(path)).decode(errors="backslashreplace"),
            "target_kind": _kind(target.st_mode),
            "target_mode": stat.S_IMODE(target.st_mode),
        }
    return {
        **link,
        "attributes": _attributes_of(path),
        "path": os.fsencode(path).decode(errors="backslashreplace"),
        "kind": _kind(status.st_mode),
        "size": status.st_size,
        "modified_s": status.st_mtime,
        "created_s": status.st_ctime,
        "mode": stat.S_IMODE(status.st_mode),
        "owner": _user(status.st_uid),
        "group": _group(status.st_gid),
    }


def _kind(mode: int) -> str:
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "directory"
    return "symlink" if stat.S_ISLNK(mode) else "other"


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


_ACTS: dict[str, Callable[..., dict[str, Any]]] = {
    "stat": _stat,
    "list": _list,
    "search": _search,
    "read": _read,
    "write": _write,
    "make_directory": _make_directory,
    "delete": _delete,
    "move": _move,
    "permissions": _permissions,
    "replace": _replace,
    "attributes": _attributes,
}

if __name__ == "__main__":
    main()
