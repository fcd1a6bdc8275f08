"""The home of E2B's user, /home/user, which is a name of /workspace inside."""

import posixpath

from sbx.errors import InvalidPath

HOME = "/home/user"
_WORKSPACE = "/workspace"


def absolute(path: str | None) -> str:
    """Return a path as the user means it: absolute, relative to the home, or `~`. Raise
    InvalidPath."""
    text = path or HOME
    if "\0" in text:
        raise InvalidPath("a path has a NUL character")
    if text.startswith("~"):
        if text != "~" and not text.startswith("~/"):
            raise InvalidPath(f"{text[:100]}: the home of another user is unknown")
        text = HOME + text[1:]
    return posixpath.normpath(posixpath.join(HOME, text)).replace("//", "/")


def inside(path: str) -> str:
    """Return the path below /workspace for one of `absolute` below the home."""
    if path == HOME or path.startswith(f"{HOME}/"):
        return _WORKSPACE + path.removeprefix(HOME)
    return path


def shown(path: str, requested: str) -> str:
    """Return a path that was found under a `requested` one, with the home as it was named."""
    if requested != inside(requested) and (path == _WORKSPACE or path.startswith(f"{_WORKSPACE}/")):
        return HOME + path.removeprefix(_WORKSPACE)
    return path
