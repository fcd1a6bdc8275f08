"""The environments below one directory."""

import errno
import hashlib
import os
import stat
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec
from pydantic_core import PydanticCustomError

from sbx.environments.interpreter import interpreter_of
from sbx.environments.manifest import Differences, contents, differences
from sbx.environments.record import ALGORITHM, FORMAT, Environment, EnvironmentRecord
from sbx.errors import BadRequest, Conflict, Denied, NotFound, PolicyError, SbxError, Unavailable
from sbx.isolation.launch_plan import Interpreter
from sbx.linux import locks, mountinfo
from sbx.policy import Policy, available, load
from sbx.policy.checks import environment_name
from sbx.workspace.rmtree import remove_tree

RECORD = "environment.json"
FILES = "files.json"
_RECORD_MAX = 4 << 20
_FILES_MAX = 512 << 20
_REMOVAL_S = 300.0
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Environments:
    def __init__(self, top: Path) -> None:
        self.top = Path(os.path.abspath(top.expanduser()))

    def all(self) -> list[Environment]:
        """Return the complete environments by name. Skip other files."""
        try:
            names = sorted(os.listdir(self.top))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _unreadable(self.top, error) from error
        environments = []
        for name in names:
            with suppress(BadRequest, NotFound, Unavailable):
                environments.append(self.get(name))
        return environments

    def get(self, name: str) -> Environment:
        """Return an environment by name.

        Raise BadRequest `invalid_environment` for an invalid name, NotFound
        `environment_not_found`, Denied `environment_not_private` if other users could change it,
        Unavailable `environment_broken`.
        """
        checked(name)
        try:
            with ExitStack() as stack:
                directory = _enter(stack, self.top, name)
                record = msgspec.json.decode(
                    _read(directory, RECORD, _RECORD_MAX), type=EnvironmentRecord
                )
        except FileNotFoundError:
            raise _not_found(name) from None
        except OSError as error:
            raise _unreadable(self.top / name, error) from error
        except msgspec.DecodeError as error:
            raise _broken(name, f"its record cannot be read: {error}") from error
        if record.format != FORMAT or record.name != name:
            raise _broken(name, "its record is of another version of sbx")
        return Environment(self.top / name, record)

    def interpreter(self, name: str, policy: str) -> Interpreter:
        """Return the interpreter for the kernels of `policy`, which names the environment.

        Raise PolicyError `environment_unavailable`; Denied `environment_not_private`.
        """
        try:
            environment = self.get(name)
        except NotFound:
            raise PolicyError(
                f"policy {policy} names the environment {name}, which does not exist",
                code="environment_unavailable",
                hint=f"create it: sbx env create {name} PACKAGE…; restart a service of root after "
                "that",
                details={"environment": name},
            ) from None
        except (BadRequest, Unavailable) as error:
            raise PolicyError(
                f"policy {policy} names the environment {name}: {error.message}",
                code="environment_unavailable",
                hint=error.hint,
                details={"environment": name},
            ) from error
        if not os.path.exists(environment.record.executable):
            raise PolicyError(
                f"the environment {name} needs the Python {environment.record.base}, which is "
                "missing, or not visible to this process",
                code="environment_unavailable",
                hint="restart a service that started before the environment was created; if that "
                f"Python is gone, run sbx env remove {name} and create it again",
                details={"environment": name},
            )
        return interpreter_of(environment.record.executable, environment.record.prefixes)

    def verify(self, environment: Environment) -> Differences:
        """Read every file again, and compare. Raise Unavailable `environment_broken` if the record
        of the files was changed."""
        with ExitStack() as stack:
            try:
                directory = _enter(stack, self.top, environment.name)
                listed = _read(directory, FILES, _FILES_MAX)
                lock = _read(directory, "requirements.lock", _FILES_MAX)
                now = contents(str(environment.venv)).entries
            except OSError as error:
                raise _unreadable(environment.path, error) from error
        record = environment.record
        for name, data, digest in ((FILES, listed, record.digest), ("its lock", lock, record.lock)):
            if record.algorithm != ALGORITHM or hashlib.new(ALGORITHM, data).hexdigest() != digest:
                raise _broken(environment.name, f"{name} was changed")
        return differences(msgspec.json.decode(listed, type=dict[str, str]), now)

    def claim(self, name: str) -> "NameLock":
        """Return the empty directory of a new environment. `publish` completes it; otherwise `end`
        removes it. If several callers claim a name at once, only one succeeds.

        Raise Conflict `environment_exists`, `environment_in_the_making`; Unavailable.
        """
        checked(name)
        try:
            self.top.mkdir(mode=0o755, parents=True, exist_ok=True)
            with ExitStack() as undo:
                top = os.open(self.top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                undo.callback(os.close, top)
                _check_private(top, self.top)
                with suppress(FileExistsError):
                    os.mkdir(name, 0o755, dir_fd=top)
                directory = self._hold(top, name)
                undo.callback(os.close, directory)
                if _exists(RECORD, directory):
                    raise Conflict(
                        f"there is an environment {name} already",
                        code="environment_exists",
                        hint=f"choose another name, or remove it: sbx env remove {name}",
                    )
                claim = NameLock(top, directory, name, self.top / name)
                claim.clear()
                undo.pop_all()
                return claim
        except OSError as error:
            raise _unreadable(self.top / name, error) from error

    def remove(self, name: str) -> None:
        """Remove an environment, or the rest of a killed creation. Raise NotFound, Conflict
        `environment_in_the_making`, and Unavailable if some files could not be removed."""
        checked(name)
        try:
            with ExitStack() as stack:
                top = os.open(self.top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                stack.callback(os.close, top)
                directory = self._hold(top, name)
                stack.callback(os.close, directory)
                with suppress(FileNotFoundError):
                    os.unlink(RECORD, dir_fd=directory)  # from here on it does not exist
                whole = remove_tree(top, name, _REMOVAL_S)
        except FileNotFoundError:
            raise _not_found(name) from None
        except OSError as error:
            raise _unreadable(self.top / name, error) from error
        if not whole:
            raise Unavailable(
                f"the environment {name} is removed, but some of its files are left",
                code="not_removed",
                hint=f"remove the rest in {self.top}",
            )

    def _hold(self, top: int, name: str) -> int:
        """Lock the directory and return it. Refuse a directory that was removed meanwhile."""
        directory = os.open(name, _DIRECTORY, dir_fd=top)
        try:
            locked = locks.try_lock(directory)
            ours, there = os.fstat(directory), os.stat(name, dir_fd=top, follow_symlinks=False)
            if not locked or (ours.st_dev, ours.st_ino) != (there.st_dev, there.st_ino):
                raise _in_the_making(name)
        except FileNotFoundError:
            os.close(directory)
            raise _in_the_making(name) from None
        except BaseException:
            os.close(directory)
            raise
        return directory


class NameLock:
    """The directory of an environment during its creation; see `Environments.claim`."""

    def __init__(self, top: int, directory: int, name: str, path: Path) -> None:
        self._top = top
        self.directory = directory
        self.name = name
        self.path = path
        self.published = False

    def write(self, name: str, data: bytes) -> None:
        """Write a file and sync it to the disk. Raise OSError."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(name, flags, 0o644, dir_fd=self.directory)
        with open(fd, "wb") as file:
            os.fchmod(fd, 0o644)
            file.write(data)
            file.flush()
            os.fsync(fd)

    def publish(self, record: EnvironmentRecord) -> Environment:
        """Publish the environment by its record. Raise OSError."""
        self.write(f"{RECORD}.new", msgspec.json.encode(record) + b"\n")
        os.fchmod(self.directory, 0o755)
        os.rename(f"{RECORD}.new", RECORD, src_dir_fd=self.directory, dst_dir_fd=self.directory)
        self.published = True
        os.fsync(self.directory)
        os.fsync(self._top)
        return Environment(self.path, record)

    def clear(self) -> None:
        """Remove the rest of killed creations and removals."""
        for name in os.listdir(self.directory):
            remove_tree(self.directory, name, _REMOVAL_S, trash=self._top)
        for name in os.listdir(self._top):
            if name.startswith(".sbx-removed-"):
                remove_tree(self._top, name, _REMOVAL_S)

    def end(self) -> None:
        """Remove an environment that was not published, and release the name."""
        if not self.published:
            remove_tree(self._top, self.name, _REMOVAL_S)
        os.close(self.directory)
        os.close(self._top)


def check_there(policy: Policy, interpreter: Interpreter) -> None:
    """Raise PolicyError `environment_unavailable` if the environment of a sandbox was removed by
    force. This checks one path."""
    if not os.path.lexists(interpreter.executable):
        raise PolicyError(
            f"the environment {policy.environment} was removed while this sandbox was in use",
            code="environment_unavailable",
            hint=f"create it again, then make a new sandbox: sbx env create {policy.environment} …",
            details={"environment": policy.environment},
        )


def checked(name: str) -> str:
    """Return the name if it is valid. Raise BadRequest `invalid_environment`."""
    try:
        return environment_name(name)
    except PydanticCustomError as error:
        raise BadRequest(
            error.message(),
            code="invalid_environment",
            hint="for example science or data-2024; it becomes the name of a directory",
        ) from None


def _enter(stack: ExitStack, top: Path, name: str) -> int:
    """Open its directory, through a parent that other users cannot change."""
    parent = os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    stack.callback(os.close, parent)
    _check_private(parent, top)
    directory = os.open(name, _DIRECTORY, dir_fd=parent)
    stack.callback(os.close, directory)
    _check_private(directory, top / name)
    return directory


def _check_private(fd: int, path: Path) -> None:
    """Raise Denied if other users can write there: they could change the code of every kernel."""
    status = os.fstat(fd)
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
        raise Denied(
            f"other users can change {path}, so its environments are not used",
            code="environment_not_private",
            hint=f"it must belong to the user that runs sbx, or to root: chmod go-w {path}",
        )


def _read(directory: int, name: str, most: int) -> bytes:
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=directory)
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "is not a file")
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, "is too large")
    return data


def _exists(name: str, directory: int) -> bool:
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _not_found(name: str) -> NotFound:
    return NotFound(
        f"environment {name} does not exist",
        code="environment_not_found",
        hint="`sbx env list` shows all environments",
    )


def _in_the_making(name: str) -> Conflict:
    return Conflict(
        f"the environment {name} is being created or removed by another process",
        code="environment_in_the_making",
        hint="wait for its end, or choose another name",
    )


def _broken(name: str, why: str) -> Unavailable:
    return Unavailable(
        f"the environment {name} cannot be used: {why}",
        code="environment_broken",
        hint=f"sbx env remove {name}, and create it again",
    )


def _unreadable(path: Path, error: OSError) -> Unavailable:
    return Unavailable(
        f"{path} cannot be used: {error.strerror or error}",
        code="environment_broken",
        hint="SBX_ENVIRONMENTS names the directory of environments",
    )


def policies_naming(name: str, search: Sequence[Path]) -> list[str]:
    """Return the policies whose interpreter is this environment, except those that cannot be
    loaded."""
    policies = []
    for info in available(search):
        with suppress(SbxError):
            if load(info.name, search=search).environment == name:
                policies.append(info.name)
    return policies


def processes_shown(environment: Environment) -> list[int]:
    """Return the processes of sandboxes and zygotes in whose view the environment is mounted.

    Root sees those of all users. Any other user sees only their own.
    """
    places = {str(environment.venv), os.path.realpath(environment.venv)}
    pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    return [pid for pid in pids if places & {mount.point for mount in mountinfo.read(pid)}]
