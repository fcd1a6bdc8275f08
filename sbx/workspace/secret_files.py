"""Files that hold a secret: written atomically, mode 0600, refused if other users may read them."""

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sbx.errors import Unavailable
from sbx.linux.descriptors import closing
from sbx.linux.new_files import new_file_beside

_SECRET_BYTES = 32
_READ_MAX = 4096
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def secret_at(path: Path) -> bytes:
    """Return the secret at `path`. Create it from the system's randomness if it does not exist.

    Two processes that call this at the same time get the same secret. Raise Unavailable
    `secret_unusable`.
    """
    with _translated(path):
        if not path.exists():
            _write(path, secrets.token_hex(_SECRET_BYTES).encode() + b"\n", replace=False)
        return _read(path)


def read_secret(path: Path) -> bytes:
    """Return the secret at `path`. Raise as `secret_at` does."""
    with _translated(path):
        return _read(path)


def keep_secret(path: Path, content: bytes) -> None:
    """Write `content` to `path` and replace an existing file. Raise as `secret_at` does."""
    with _translated(path):
        _write(path, content, replace=True)


def _write(path: Path, content: bytes, *, replace: bool) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with new_file_beside(path, 0o600) as (fresh, file):
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        if replace:
            fresh.replace(path)
        else:
            with suppress(FileExistsError):
                os.link(fresh, path)


def _read(path: Path) -> bytes:
    with closing(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as fd:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise _unusable(path, "it is not a regular file")
        if status.st_mode & _OTHERS:
            raise _unusable(path, "other users may read it", hint=f"chmod 600 {path}")
        content = os.read(fd, _READ_MAX).strip()
    if len(content) < _SECRET_BYTES:
        raise _unusable(path, "it is too short")
    return content


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        raise _unusable(path, why, hint="the service's user must own its directory") from error


def _unusable(path: Path, why: str, hint: str | None = None) -> Unavailable:
    return Unavailable(
        f"the secret {path} cannot be used: {why}",
        code="secret_unusable",
        hint=hint
        or "remove it: sbx then creates a new one, and rejects everything that the old one signed",
    )
