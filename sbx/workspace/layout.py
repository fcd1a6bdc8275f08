"""The layout of the data directory. A jail with another uid can use its own workspace only.

    {data}/sandboxes/{opaque}/                a sandbox
    {data}/sandboxes/{opaque}/shared/         … if its policy shares files
    {data}/sandboxes/{opaque}/temporary/      … empty: the sandbox ends with its process
    {data}/sandboxes/{opaque}/{opaque}/       a conversation
        files/                                /workspace inside, the jail's own
        files/uploads/{temparea,generated}/   … its mount points
        uploads/                              mounted read-only on temparea
        staging/                              in no view: partly written files, partly removed trees
        commands/                             in no view: the output of background commands
    {data}/sandboxes/{opaque}/{opaque}/files/ also a frozen copy, for a dry run or an undo,
    {data}/sandboxes/{opaque}/{opaque}/copy/  … which this empty directory marks
    {data}/egress/{opaque}/                   the socket of the proxy of a live sandbox
    {data}/unclaimed/                         directories without a row of the store (unclaimed.py)
    {data}/removed/                           deleted trees, unreachable, that are being removed
    {data}/.sbx-data                          empty: its name keeps {data} out of each sandbox

Opaque names are random: an id of a caller is never a path component. With an `owner` (the runtime
is root, and the jail has another uid), parent directories have the mode 0711: a process can pass
through them by name, but cannot list them. Without an owner, every directory has the mode 0700.
"""

import os
import secrets
import stat
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from sbx.errors import Broken, Denied, NotFound
from sbx.forbidden_directories import DATA_MARKER
from sbx.linux import capabilities
from sbx.linux.descriptors import closing
from sbx.protocol.files import Kind
from sbx.workspace import paths, safe_open, unclaimed
from sbx.workspace.errors import translated
from sbx.workspace.ring_files import CommandLogs
from sbx.workspace.rmtree import empty_directory, remove_tree
from sbx.workspace.streams import Owner
from sbx.workspace.tree import Relative, Tree
from sbx.workspace.unclaimed import OPAQUE_NAME
from sbx.workspace.uploads import Uploads

_MOUNT_POINTS = (("uploads",), ("uploads", "temparea"), ("uploads", "generated"))


class ConversationFiles:
    """The files of one conversation, open by three fds: close it when the conversation is idle.

    A jail mounts `files_path` and `uploads_path`. `owner` is the uid and gid on the host of its
    jails. They are the same each time. None means the caller's own uid.
    """

    def __init__(self, parent: int, path: Path, owner: Owner | None) -> None:
        """Open the directory `path`, a child of the fd `parent`, and create its missing parts."""
        self.path = path
        self.files_path = path / "files"
        self.uploads_path = path / "uploads"
        own_mode, parent_mode, uploads_mode = (
            (0o700, 0o700, 0o700) if owner is None else (0o700, 0o711, 0o750)
        )
        with ExitStack() as stack, translated(str(path)):
            with closing(_directory(parent, path.name, parent_mode)) as root:
                staging = _directory(root, "staging", own_mode)
                stack.callback(os.close, staging)
                files = _directory(root, "files", own_mode, owner, keep_mode=True)
                self.files = Tree(files, view=paths.WORKSPACE, owner=owner, staging=staging)
                stack.callback(self.files.close)
                reader = None if owner is None else (os.geteuid(), owner[1])
                uploads = _directory(root, "uploads", uploads_mode, reader)
                self.uploads = Uploads(Tree(uploads, view=paths.UPLOADS, staging=staging))
                stack.callback(self.uploads.close)
            self.prepare()
            self._staging = staging
            self._stack = stack.pop_all()

    def prepare(self, *, shared: bool = False) -> None:
        """Make each mount point a real directory that this process can use.

        Call it before each start of a jail. While a jail lives, its mounts keep the directories in
        place. Any other node in their place was created by the code inside, and is deleted.
        """
        for relative in (*_MOUNT_POINTS, ("shared",)) if shared else _MOUNT_POINTS:
            if self._kind(relative) != "directory":
                if self._kind(relative) is not None:
                    self.files.delete(relative)
                self.files.make_directory(relative)
            with (
                translated(self.files.shown(relative)),
                closing(
                    safe_open.opener()(self.files.fd, relative, os.O_PATH | os.O_DIRECTORY)
                ) as fd,
            ):
                safe_open.permit(fd)

    def _kind(self, relative: Relative) -> Kind | None:
        try:
            return self.files.stat(relative).kind
        except NotFound:
            return None

    def logs(self) -> CommandLogs:
        """Open the logs of its background commands. The caller closes them after a few calls."""
        with (
            translated(str(self.path)),
            closing(os.open("..", os.O_PATH | os.O_DIRECTORY, dir_fd=self._staging)) as root,
        ):
            return CommandLogs(_directory(root, "commands", 0o700))

    @property
    def staging(self) -> int:
        """Return the fd of the staging directory: in no view, on the file system of the files."""
        return self._staging

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class DataDirectory:
    """The data directory of one runtime: create, open and remove the directories of sandboxes.

    All methods may be called from any thread. They accept only opaque names. These come from
    `new_name`, and the caller stores them.
    """

    def __init__(self, path: Path) -> None:
        """Create or open `path`. Raises Denied if another user can write to it."""
        self.path = path.absolute()
        self._parent_mode = 0o711 if _gives_away() else 0o700
        with ExitStack() as stack, translated(str(path)):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                self.path.mkdir()
                self.path.chmod(self._parent_mode)  # independent of the umask
            with closing(os.open(self.path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)) as root:
                _refuse_foreign(root, self.path)
                self._sandboxes = _directory(root, "sandboxes", self._parent_mode)
                stack.callback(os.close, self._sandboxes)
                self._egress = _directory(root, "egress", self._parent_mode)
                stack.callback(os.close, self._egress)
                self._removed = _directory(root, "removed", 0o700)
                stack.callback(os.close, self._removed)
                _mark(root)
            self._stack = stack.pop_all()

    @staticmethod
    def new_name() -> str:
        return secrets.token_hex(16)

    def conversation(
        self, sandbox: str, conversation: str, *, owner: Owner | None = None
    ) -> ConversationFiles:
        """Open or create the files of a conversation. The caller closes them."""
        path = self.path / "sandboxes" / _opaque(sandbox) / _opaque(conversation)
        with translated(str(path)):
            parent = _directory(self._sandboxes, sandbox, self._parent_mode)
        with closing(parent):
            return ConversationFiles(parent, path, owner)

    def shared(self, sandbox: str, *, owner: Owner | None = None) -> Tree:
        """Open or create the files that the conversations of a sandbox share."""
        with (
            translated(paths.SHARED),
            closing(_directory(self._sandboxes, _opaque(sandbox), self._parent_mode)) as parent,
        ):
            fd = _directory(parent, "shared", 0o700, owner, keep_mode=True)
        return Tree(fd, view=paths.SHARED, owner=owner)

    def shared_path(self, sandbox: str) -> Path:
        """Return the path that a jail mounts as `/workspace/shared`."""
        return self.path / "sandboxes" / _opaque(sandbox) / "shared"

    def frozen(self, sandbox: str, name: str, *, owner: Owner | None = None) -> Tree:
        """Open or create the tree of a frozen copy.

        It has an opaque name next to the conversations of the sandbox, and is removed like one.
        """
        with translated(paths.WORKSPACE):
            with closing(
                _directory(self._sandboxes, _opaque(sandbox), self._parent_mode)
            ) as parent:
                root = _directory(parent, _opaque(name), self._parent_mode)
            with closing(root):
                os.close(_directory(root, unclaimed.COPY, 0o700))  # first, so that no copy lacks it
                fd = _directory(root, "files", 0o700, owner, keep_mode=True)
        return Tree(fd, view=paths.WORKSPACE, owner=owner)

    def frozen_path(self, sandbox: str, name: str) -> Path:
        """Return the directory that contains the `files` of a frozen copy."""
        return self.path / "sandboxes" / _opaque(sandbox) / _opaque(name)

    def egress_path(self, name: str) -> Path:
        """Return the path of the directory that a proxy creates and its jails mount."""
        return self.path / "egress" / _opaque(name)

    def remove_egress(self, name: str, deadline_s: float = 30.0) -> bool:
        """Remove the directory of a closed proxy."""
        return remove_tree(self._egress, _opaque(name), deadline_s, trash=self._removed)

    def sweep_egress(self, deadline_s: float = 30.0) -> bool:
        """Remove the directories of a killed runtime, before this one opens a proxy."""
        return empty_directory(self._egress, deadline_s)

    def remove(
        self, sandbox: str, conversation: str | None = None, *, deadline_s: float = 30.0
    ) -> bool:
        """Remove a conversation or a whole sandbox, whose kernels have ended.

        Its path is gone at once. Return False if the deadline passed before all of it was removed:
        `sweep` continues.
        """
        if conversation is None:
            return remove_tree(self._sandboxes, _opaque(sandbox), deadline_s, trash=self._removed)
        try:
            parent = safe_open.opener()(
                self._sandboxes, (_opaque(sandbox),), os.O_PATH | os.O_DIRECTORY
            )
        except FileNotFoundError:
            return True
        with closing(parent):
            return remove_tree(parent, _opaque(conversation), deadline_s, trash=self._removed)

    def sweep(self, deadline_s: float = 30.0) -> bool:
        """Finish earlier removals, and return whether nothing remains."""
        return empty_directory(self._removed, deadline_s)

    def make_packages(self, name: str) -> Path:
        """Create a directory for installed packages. It is marked, and removed, like that of a
        temporary sandbox."""
        self.mark_temporary(name)
        path = self.path / "sandboxes" / name / "packages"
        with (
            translated(str(path)),
            closing(_directory(self._sandboxes, name, self._parent_mode)) as parent,
        ):
            os.close(_directory(parent, path.name, self._parent_mode))
        return path

    def mark_temporary(self, sandbox: str) -> None:
        """Create the directory of a sandbox that ends with this process, and mark it."""
        with (
            translated(str(self.path)),
            closing(_directory(self._sandboxes, _opaque(sandbox), self._parent_mode)) as parent,
        ):
            os.close(_directory(parent, unclaimed.TEMPORARY, 0o700))

    def has_no_files(self, sandbox: str, conversation: str | None = None) -> bool:
        """Return whether a conversation, or a whole sandbox, certainly has no file of a user."""
        conversation = conversation and _opaque(conversation)
        return unclaimed.has_no_files(self._sandboxes, _opaque(sandbox), conversation)

    def set_apart(self, sandbox: str, conversation: str | None = None, *, at: float) -> str:
        """Move a directory without a row of the store to `unclaimed`, and return its id there."""
        item_id = unclaimed.new_id(at, _opaque(sandbox), conversation and _opaque(conversation))
        with ExitStack() as stack, translated(str(self.path / unclaimed.UNCLAIMED)):
            root = os.open("..", os.O_PATH | os.O_DIRECTORY, dir_fd=self._sandboxes)
            stack.callback(os.close, root)
            target = _directory(root, unclaimed.UNCLAIMED, 0o700)
            stack.callback(os.close, target)
            parent = self._sandboxes
            if conversation is not None:
                parent = safe_open.opener()(parent, (sandbox,), os.O_PATH | os.O_DIRECTORY)
                stack.callback(os.close, parent)
            unclaimed.move(parent, conversation or sandbox, target, item_id)
        return item_id

    def sandboxes(self) -> tuple[str, ...]:
        """Return the opaque names that exist. The caller looks for leftovers at its start."""
        with (
            translated(str(self.path)),
            closing(os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._sandboxes)) as fd,
        ):
            return tuple(name for name in os.listdir(fd) if OPAQUE_NAME.fullmatch(name))

    def conversations(self, sandbox: str) -> tuple[str, ...]:
        """Return the opaque names in a sandbox, or an empty tuple if it has no directory."""
        with translated(str(self.path)):
            try:
                fd = safe_open.opener()(
                    self._sandboxes, (_opaque(sandbox),), os.O_RDONLY | os.O_DIRECTORY
                )
            except FileNotFoundError:
                return ()
            with closing(fd):
                return tuple(name for name in os.listdir(fd) if OPAQUE_NAME.fullmatch(name))

    def recover(self, sandbox: str) -> bool:
        """Undo the commits that a kill interrupted, in a sandbox that no process uses.

        Return False if a commit can only be undone later. Its staging directory must stay until
        then.
        """
        undone = [self._roll_back(sandbox, name) for name in self.conversations(sandbox)]
        return all(undone)

    def tidy(self, sandbox: str, conversation: str, *, deadline_s: float = 10.0) -> bool:
        """Undo interrupted commits in a conversation, and remove the partly written files of a
        crash. Return whether all of it is done."""
        if not self._roll_back(sandbox, conversation):
            return False
        with ExitStack() as stack:
            staging = self._hold(stack, sandbox, conversation, "staging")
            return staging is None or empty_directory(staging, deadline_s)

    def _roll_back(self, sandbox: str, conversation: str) -> bool:
        from sbx.workspace.snapshots.recover import recover  # 5 ms, for old sandboxes only

        with ExitStack() as stack:
            staging = self._hold(stack, sandbox, conversation, "staging")
            files = self._hold(stack, sandbox, conversation, "files")
            return staging is None or files is None or recover(staging, files)

    def _hold(self, stack: ExitStack, *inside: str) -> int | None:
        try:
            fd = safe_open.opener()(self._sandboxes, inside, os.O_PATH | os.O_DIRECTORY)
        except FileNotFoundError:
            return None
        stack.callback(os.close, fd)
        return fd

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _opaque(name: str) -> str:
    if not OPAQUE_NAME.fullmatch(name):
        raise Broken(f"'{name}' is not an opaque name; ids of callers never reach the disk")
    return name


def _directory(
    parent: int, name: str, mode: int, owner: Owner | None = None, *, keep_mode: bool = False
) -> int:
    """Create or open a directory, set its owner and mode, and return an O_PATH fd.

    With `keep_mode`, a mode that the code inside chose is kept, except that the owner gets rwx.
    Owner and mode are set each time: a crash may have occurred between mkdir and chown.
    """
    with suppress(FileExistsError):
        os.mkdir(name, mode, dir_fd=parent)
    fd = safe_open.opener()(parent, (name,), os.O_PATH | os.O_DIRECTORY)
    try:
        status = os.fstat(fd)
        if owner is not None and (status.st_uid, status.st_gid) != owner:
            os.chown(f"/proc/self/fd/{fd}", *owner)
        if keep_mode:
            safe_open.permit(fd)
        elif stat.S_IMODE(status.st_mode) != mode:
            os.chmod(f"/proc/self/fd/{fd}", mode)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _mark(root: int) -> None:
    """Create the marker by which each sbx on this host recognizes the directory."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with suppress(FileExistsError):
        os.close(os.open(DATA_MARKER, flags, 0o600, dir_fd=root))


def _gives_away() -> bool:
    """Return whether jails have other uids: a service that drops root keeps CAP_CHOWN for this."""
    return os.geteuid() == 0 or bool(capabilities.effective() >> capabilities.CAP_CHOWN & 1)


def _refuse_foreign(fd: int, path: Path) -> None:
    status = os.fstat(fd)
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise Denied(
            f"'{path}' is writable for other users, so it cannot contain workspaces",
            code="data_directory_not_private",
            hint="choose a directory that you own and only you can write to (chmod go-w)",
            details={"path": str(path)},
        )
