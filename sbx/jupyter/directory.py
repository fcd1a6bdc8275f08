"""Which directories of the host may be a notebook's workspace: code inside writes all of it.

So it may hold nothing that decides what runs on the host, or with which policy: no home, nothing of
Jupyter's or of sbx's own. And not what a client reaches the kernel by: a path on the file system
knows no network namespace. The environment that runs us may lie in it: inside that is read-only.
"""

import os
import pwd
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from jupyter_core import paths as jupyter

from sbx.errors import Denied, NotFound
from sbx.jupyter.connection import Connection
from sbx.workspace.host_directory import own_code

_OWN = 'give the notebook a directory of its own, or a kernel whose policy says workspace = "own"'
_CODE = ("stdlib", "platstdlib", "purelib", "platlib", "scripts")


def resolve(named: Path, private: Iterable[Path]) -> Path:
    """The directory that is meant, by the path that has no symlink.

    `private` is what it may neither hold nor lie in, besides what is Jupyter's and Python's own.
    Raises NotFound `directory_not_found`, Denied `workspace_too_wide` and `not_granted`.
    """
    directory = _real(named)
    if not directory.is_dir():
        raise NotFound(
            f"there is no directory {str(named)!r} for the notebook to work in",
            code="directory_not_found",
            hint="start it where its file lies",
        )
    for home in _homes(directory):
        if home.is_relative_to(directory):
            raise _too_wide(directory, "the whole host" if home == Path("/") else f"a home, {home}")
    for own in map(_real, (*private, *_of_jupyter(), *_of_python())):
        if own.is_relative_to(directory) and not _is_shielded(own, directory):
            raise _too_wide(directory, f"what decides how kernels run, {own}")
        if directory.is_relative_to(own):
            raise Denied(
                f"{directory} lies in {own}, which decides how kernels run",
                code="not_granted",
                hint=_OWN,
            )
    return directory


def check_apart(directory: Path, file: Path, connection: Connection) -> None:
    """Whether the connection file, and for ipc the sockets, lie outside: who reads the one or
    connects to the other is a client. Raises Denied `connection_in_workspace`."""
    for way in (file, *([Path(connection.ip)] if connection.transport == "ipc" else [])):
        if _real(way).is_relative_to(directory) or _real(way.parent).is_relative_to(directory):
            raise Denied(
                f"{way}, by which clients reach the kernel, lies in its workspace {directory}",
                code="connection_in_workspace",
                hint="name another place for the connection file, or set JUPYTER_RUNTIME_DIR",
            )


def _too_wide(directory: Path, what: str) -> Denied:
    return Denied(
        f"{directory} holds {what}: too much for the code of a notebook to write to",
        code="workspace_too_wide",
        hint=_OWN,
    )


def _homes(directory: Path) -> Iterator[Path]:
    """The user's who runs this, by every name that it has, and the one's whom it belongs to."""
    yield Path("/")
    with suppress(RuntimeError):  # neither HOME nor an entry
        yield _real(Path.home())
    for uid in {os.geteuid(), directory.stat().st_uid}:
        with suppress(KeyError):
            yield _real(Path(pwd.getpwuid(uid).pw_dir))


def _of_jupyter() -> Iterator[Path]:
    """Connection files with their keys; kernelspecs, which are commands; configuration: code."""
    yield Path(jupyter.jupyter_runtime_dir())
    yield Path(jupyter.jupyter_data_dir())
    yield Path(jupyter.jupyter_config_dir())


def _of_python() -> Iterator[Path]:
    found = sysconfig.get_paths()
    yield from (Path(found[name]) for name in _CODE)
    yield Path(__file__).parents[1]


def _is_shielded(own: Path, directory: Path) -> bool:
    """Whether it is read-only inside, being part of the environment that runs us."""
    return any(own.is_relative_to(directory / name) for name in own_code(directory))


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))
