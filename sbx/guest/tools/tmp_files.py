"""One operation on a file below /tmp, for a tool of an agent: no host process can reach that tmpfs.

The host sends this text inside, with `main("…")` of a base64 JSON request as its last line. It runs
as a script next to the kernel or, if no process may be started, as a cell (see
sbx/agent/tools/paths.py):

    {"act": "read", "path", "most"}         → size, content; only size if larger than `most`
    {"act": "write", "path", "content"}     → size; with parents, replaced in one step
    {"act": "list", "path", "pattern", "most"}   → entries, complete

A list stays on the file system of its path: a virtual environment of the host below /tmp is mounted
there, and its tens of thousands of files would fill the list.

The answer is one line of JSON; `error` in it is a sentence. Bytes are base64 in both directions.
Standard library only.
"""

import base64
import fnmatch
import json
import os
import stat
import sys
from collections.abc import Callable
from typing import Any

_WALK_MAX = 20_000  # entries looked at


def main(request: str) -> None:
    arguments = json.loads(base64.b64decode(request))
    acts: dict[str, Callable[..., dict[str, Any]]]
    acts = {"read": _read, "write": _write, "list": _list}
    try:
        answer = acts[arguments.pop("act")](**arguments)
    except OSError as error:
        answer = {"error": error.strerror or "it failed", "errno": error.errno}
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _read(path: str, most: int) -> dict[str, Any]:
    # A FIFO would keep the open waiting for a writer.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return {"error": "Not a regular file"}
        content = file.read(most + 1) if status.st_size <= most else b""
    size = max(status.st_size, len(content))
    return {"size": size} if size > most else {"size": size, "content": _text(content)}


def _write(path: str, content: str) -> dict[str, Any]:
    data = base64.b64decode(content)
    parent = os.path.dirname(path)
    os.makedirs(parent, exist_ok=True)
    if os.path.isdir(path):
        return {"error": "Is a directory"}
    staged = os.path.join(parent, f".{os.urandom(8).hex()}.part")
    try:
        with open(staged, "xb") as file:
            file.write(data)
        os.replace(staged, path)
    except BaseException:
        if os.path.lexists(staged):
            os.unlink(staged)
        raise
    return {"size": len(data)}


def _list(path: str, pattern: str, most: int) -> dict[str, Any]:
    entries: list[dict[str, Any]] = []
    seen = 0
    deep = pattern != "*"
    device = os.stat(path).st_dev
    for top, directories, files in os.walk(path):
        names = sorted(directories + files)
        directories[:] = [
            name for name in sorted(directories) if _is_on(device, os.path.join(top, name))
        ]
        for name in names:
            seen += 1
            if seen > _WALK_MAX or len(entries) >= most:
                return {"entries": entries, "complete": False}
            full = os.path.join(top, name)
            if fnmatch.fnmatchcase(
                os.path.relpath(full, path) if "/" in pattern else name, pattern
            ):
                entries.append(_entry(full))
        if not deep:
            break
    return {"entries": entries, "complete": True}


def _is_on(device: int, path: str) -> bool:
    try:
        return os.lstat(path).st_dev == device
    except OSError:
        return False


def _entry(path: str) -> dict[str, Any]:
    shown = os.fsencode(path).decode(errors="backslashreplace")
    try:
        status = os.lstat(path)
    except OSError:
        return {"path": shown, "kind": "other", "size": None}
    kind = _kind(status.st_mode)
    return {"path": shown, "kind": kind, "size": status.st_size if kind == "file" else None}


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _kind(mode: int) -> str:
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "directory"
    return "symlink" if stat.S_ISLNK(mode) else "other"
