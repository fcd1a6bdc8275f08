"""Where a runtime's workspaces lie, held by a lock so that nobody else uses or sweeps them.

A runtime without a `data_dir` has a temporary directory of its own. One that was killed leaves it
behind; the next runtime of the same user finds that nobody holds its lock any more and removes it,
once what it was committing to a directory of the host is undone.
In one with a `data_dir` sandboxes are left over by a killed runtime too, and removed by the next
one: unless it keeps them, because a store says which of them live on.
"""

import os
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path

from sbx.errors import Conflict, SbxError, Unavailable
from sbx.linux import locks
from sbx.workspace import DataDirectory
from sbx.workspace.refusals import translated
from sbx.workspace.removal import remove_tree

_PREFIX = "sbx-"
_LOCK = "lock"
_UNHELD = "lock.new"
_SWEEP_S = 5.0


class Data:
    """An open data directory; `close` lets go of it, and removes a temporary one."""

    def __init__(self, path: Path | None, *, keep: bool = False) -> None:
        """Open `path`, or a new temporary directory. With `keep` what lies in it stays.

        Raises Conflict `data_dir_in_use`.
        """
        self._temporary = path is None
        with ExitStack() as held, translated(str(path or tempfile.gettempdir())):
            if path is None:
                top = Path(tempfile.gettempdir())
                _sweep(top)
                path = _make_temporary(top)
                held.callback(_remove, path)
            self.directory = DataDirectory(path)
            held.callback(self.directory.close)
            name = path / (_UNHELD if self._temporary else _LOCK)
            lock = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            held.callback(os.close, lock)
            if not locks.try_lock(lock):
                raise Conflict(
                    f"another runtime uses the data directory {path}",
                    code="data_dir_in_use",
                    hint="give each runtime a data_dir of its own, or end the other one",
                )
            self.directory.sweep_egress(_SWEEP_S)
            if self._temporary:
                name.rename(path / _LOCK)  # a sweeper takes what has this name and nobody holds
            elif not keep:
                for sandbox in self.directory.sandboxes():
                    if self.directory.roll_back(sandbox):
                        self.directory.remove(sandbox, deadline_s=_SWEEP_S)
                self.directory.sweep(_SWEEP_S)
            self._held = held.pop_all()

    def close(self) -> None:
        self._held.close()


def _make_temporary(top: Path) -> Path:
    try:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=top))
    except OSError as error:
        raise Unavailable(
            f"no temporary directory can be made in {top}: {error.strerror}",
            code="no_space",
            hint="free some space, or set SBX_DATA_DIR or TMPDIR to another place",
        ) from error
    if os.geteuid() == 0:
        path.chmod(0o711)  # jails of a root runtime have other uids, and pass through by name
    return path


def _sweep(top: Path) -> None:
    """Remove what runtimes of this user left when they were killed."""
    for path in top.glob(f"{_PREFIX}*/{_LOCK}"):
        with suppress(OSError):
            if path.parent.lstat().st_uid != os.geteuid():
                continue
            lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if locks.try_lock(lock) and _rolled_back(path.parent):
                    _remove(path.parent)
            finally:
                os.close(lock)


def _rolled_back(path: Path) -> bool:
    """Whether no directory of the host needs what lies there, for a commit that was cut off."""
    try:
        with DataDirectory(path) as data:
            done = [data.roll_back(sandbox) for sandbox in data.sandboxes()]
            return all(done)
    except SbxError:
        return True  # it is not even a data directory


def _remove(path: Path) -> None:
    with suppress(OSError):
        parent = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
        try:
            remove_tree(parent, path.name, _SWEEP_S)
        finally:
            os.close(parent)
