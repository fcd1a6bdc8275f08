"""Which directories of the host may be a notebook's workspace: code inside writes all of it.

So it may hold nothing that decides what runs on the host, or with which policy: no home, nothing of
Jupyter's or of sbx's own. And not what a client reaches the kernel by: a path on the file system
knows no network namespace. The environment that runs us may lie in it: inside that is read-only.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from jupyter_core import paths as jupyter

from sbx.errors import Denied, NotFound
from sbx.jupyter.connection import Connection
from sbx.workspace import allowed_paths
from sbx.workspace.allowed_paths import OwnPaths


def resolve(named: Path, private: Iterable[Path]) -> Path:
    """The directory that is meant, by the path that has no symlink.

    `private` are paths that it may not contain, and in which it may not be, in addition to those
    of Jupyter. Raises NotFound `directory_not_found`, Denied `directory_forbidden`.
    """
    directory = _real(named)
    if not directory.is_dir():
        raise NotFound(
            f"there is no directory {str(named)!r} for the notebook to work in",
            code="directory_not_found",
            hint="start it where its file lies",
        )
    allowed_paths.check(directory, OwnPaths(code=(*private, *_of_jupyter())))
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


def _of_jupyter() -> Iterator[Path]:
    """Connection files with their keys; kernelspecs, which are commands; configuration: code."""
    yield Path(jupyter.jupyter_runtime_dir())
    yield Path(jupyter.jupyter_data_dir())
    yield Path(jupyter.jupyter_config_dir())


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))
