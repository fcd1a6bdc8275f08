"""The files of a script, below /tmp, for as long as its process lives.

The process that becomes the script writes them, after it has entered its Landlock domain. PID 1
removes them when the script has ended. Neither has more rights than any program inside, and both
follow no link, even if a script changes its directory.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice

_ROOT = "/tmp/"  # noqa: S108  # of the jail
_REMOVED_MAX = 64  # entries: our files, and files that a compiler put next to them


def write(files: Sequence[Sequence[str]]) -> None:
    """Write (path, text) pairs. Make their directories, which must be new or made by this call.

    Raise OSError, and ValueError for a path that is not one directory and a name below /tmp.
    """
    for path, text in files:
        directory, name = _parts(path)
        with suppress(FileExistsError):
            os.mkdir(directory, 0o700)
        with _opened(directory) as inside:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(name, flags, 0o600, dir_fd=inside), "wb") as file:
                file.write(text.encode())


def remove(files: Sequence[Sequence[str]]) -> None:
    """Remove the directories and the entries directly in them.

    Leave entries that cannot be removed.
    """
    for directory in {_parts(path)[0] for path, _ in files}:
        with suppress(OSError), _opened(directory) as inside:
            with os.scandir(inside) as entries:
                names = [entry.name for entry in islice(entries, _REMOVED_MAX)]
            for name in names:
                with suppress(OSError):
                    os.unlink(name, dir_fd=inside)
            os.rmdir(directory)


@contextmanager
def _opened(directory: str) -> Iterator[int]:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(directory, flags)
    try:
        yield fd
    finally:
        os.close(fd)


def _parts(path: str) -> tuple[str, str]:
    directory, _, name = path.rpartition("/")
    top, _, own = directory.rpartition("/")
    if f"{top}/" != _ROOT or not {own, name}.isdisjoint(("", ".", "..")):
        raise ValueError(f"{path} is not a valid path for a file of a script")
    return directory, name
