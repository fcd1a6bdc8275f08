"""The directory with the workspaces of a runtime. A lock keeps other runtimes away from it.

Without a `data_dir`, a runtime has a temporary directory. A killed runtime leaves it behind. The
next runtime of the same user finds it without its lock, undoes unfinished commits to directories of
the host, and removes it. It finds the directory by a record in the data directory of the user: code
in a sandbox can create a directory that looks the same, with a hostile journal in it, and a user
may have a directory of such a name.

In a `data_dir`, the next runtime also removes the sandboxes of a killed one, unless it keeps files,
or a store names the kept sandboxes.
"""

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from platformdirs import user_data_path

from sbx.errors import Conflict, SbxError, Unavailable
from sbx.linux import locks
from sbx.workspace.errors import translated
from sbx.workspace.layout import DataDirectory
from sbx.workspace.rmtree import remove_tree

_log = logging.getLogger(__name__)
_PREFIX = "sbx-"
LOCK = "lock"
_UNHELD = "lock.new"
_SWEEP_S = 5.0


class DataDirLock:
    """An open data directory; `close` lets go of it, and removes a temporary one."""

    def __init__(self, path: Path | None, *, keep: bool = False) -> None:
        """Open `path`, or a new temporary directory. With `keep` its content stays.

        Raises Conflict `data_dir_in_use`.
        """
        self._temporary = path is None
        with ExitStack() as stack, translated(str(path or tempfile.gettempdir())):
            if path is None:
                top = Path(tempfile.gettempdir())
                _sweep()
                path = _make_temporary(top)
                stack.callback(_remove, path)
                if (record := _recorded(path)) is not None:
                    stack.callback(record.unlink, missing_ok=True)
            self.directory = DataDirectory(path)
            stack.callback(self.directory.close)
            name = path / (_UNHELD if self._temporary else LOCK)
            stack.enter_context(locked(name))
            self.directory.sweep_egress(_SWEEP_S)
            if self._temporary:
                # Sweepers remove a directory whose file of this name is unlocked.
                name.rename(path / LOCK)
            elif not keep and not _has_store(path):
                for sandbox in self.directory.sandboxes():
                    if self.directory.recover(sandbox):
                        self.directory.remove(sandbox, deadline_s=_SWEEP_S)
                self.directory.sweep(_SWEEP_S)
            self._held = stack.pop_all()

    def close(self) -> None:
        self._held.close()


@contextmanager
def locked(
    name: Path, refusal: Conflict | None = None, *, directory: bool = False
) -> Iterator[None]:
    """Hold the lock file of a data directory, or with `directory` the lock of a directory itself.
    Raises OSError, and `refusal` if it is held; without one Conflict `data_dir_in_use`."""
    kind = os.O_RDONLY | os.O_DIRECTORY if directory else os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    lock = os.open(name, kind | os.O_CLOEXEC, 0o600)
    try:
        if not locks.try_lock(lock):
            raise refusal or Conflict(
                f"another runtime uses the data directory {name.parent}",
                code="data_dir_in_use",
                hint="give each runtime a separate data_dir, or end the other one",
            )
        yield
    finally:
        os.close(lock)


def _has_store(path: Path) -> bool:
    from sbx.store import FILE_NAME, marks  # 7 ms, which a temporary directory does not need

    return (path / FILE_NAME).exists() or (path / marks.FILE).exists()


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


def _records() -> Path:
    """Return the directory of the records. Raise RuntimeError without HOME and without an
    account."""
    return user_data_path("sbx") / "temporary"


def _recorded(path: Path) -> Path | None:
    """Write the record of a temporary directory and return its path; None if the user has no
    place for it: then no later runtime removes the directory."""
    status = path.stat()
    with suppress(OSError, RuntimeError):
        records = _records()
        records.mkdir(mode=0o700, parents=True, exist_ok=True)
        record = records / f"{status.st_dev}-{status.st_ino}"
        record.write_text(str(path))
        return record
    return None


def _sweep() -> None:
    """Remove what runtimes of this user left when they were killed."""
    with suppress(OSError, RuntimeError):
        for record in _records().iterdir():
            with suppress(OSError, ValueError):
                _sweep_one(record)


def _sweep_one(record: Path) -> None:
    path = Path(record.read_text())
    try:
        status = path.lstat()
    except FileNotFoundError:
        record.unlink()
        return
    if record.name != f"{status.st_dev}-{status.st_ino}" or status.st_uid != os.geteuid():
        return  # another file system is mounted there now
    lock = os.open(path / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if locks.try_lock(lock) and _rolled_back(path):
            _remove(path)
            record.unlink()
    finally:
        os.close(lock)


def _rolled_back(path: Path) -> bool:
    """Return whether no directory of the host needs these files, for an interrupted commit."""
    try:
        with DataDirectory(path) as data:
            done = [data.recover(sandbox) for sandbox in data.sandboxes()]
            return all(done)
    except SbxError:
        return True  # it is not even a data directory


def _remove(path: Path) -> None:
    removed = False
    with suppress(OSError):
        parent = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
        try:
            removed = remove_tree(parent, path.name, _SWEEP_S)
        finally:
            os.close(parent)
    if not removed:
        _log.warning("files of a sandbox remain in %s/.sbx-removed-*: remove them", path.parent)
