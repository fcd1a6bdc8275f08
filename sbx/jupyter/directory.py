"""Decide which host directories may be a notebook's workspace: code inside may write all of it.

The directory must not contain files that decide which code runs on the host, or with which policy:
no home, and nothing of Jupyter or of sbx. It must not contain the files by which a client reaches
the kernel either: a network namespace does not hide a path in the file system. The environment that
runs sbx may lie in it: inside, it is read-only.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from jupyter_core import paths as jupyter

from sbx.errors import Denied, NotFound
from sbx.jupyter.connection import ConnectionInfo
from sbx.workspace import allowed_paths
from sbx.workspace.allowed_paths import OwnPaths


def resolve(path: Path, private: Iterable[Path]) -> Path:
    """Return the real path of the directory, without symlinks.

    The directory must not contain, or lie in, one of the `private` paths or of Jupyter's. Raise
    NotFound `directory_not_found` and Denied `directory_forbidden`.
    """
    directory = _real(path)
    if not directory.is_dir():
        raise NotFound(
            f"the directory {str(path)!r} of the notebook does not exist",
            code="directory_not_found",
            hint="start the notebook in the directory of its file",
        )
    allowed_paths.check(directory, OwnPaths(code=(*private, *_of_jupyter())))
    return directory


def check_apart(directory: Path, file: Path, connection: ConnectionInfo) -> None:
    """Check that the connection file, and the sockets of ipc, lie outside the directory.

    Code that can read the file or connect to the sockets is a client. Raise Denied
    `connection_in_workspace`.
    """
    for path in (file, *([Path(connection.ip)] if connection.transport == "ipc" else [])):
        if _real(path).is_relative_to(directory) or _real(path.parent).is_relative_to(directory):
            raise Denied(
                f"{path}, by which clients reach the kernel, lies in its workspace {directory}",
                code="connection_in_workspace",
                hint="name another place for the connection file, or set JUPYTER_RUNTIME_DIR",
            )


def _of_jupyter() -> Iterator[Path]:
    """Yield Jupyter's directories: connection files with keys, kernelspecs (commands), config."""
    yield Path(jupyter.jupyter_runtime_dir())
    yield Path(jupyter.jupyter_data_dir())
    yield Path(jupyter.jupyter_config_dir())


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))
