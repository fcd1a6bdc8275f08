"""Where workspaces lie on the host, made so that a jail of another uid can use its own and no more.

    {data}/sandboxes/{opaque}/                a sandbox
    {data}/sandboxes/{opaque}/shared/         … when its policy shares files
    {data}/sandboxes/{opaque}/temporary/      … empty: it ends with the process that made it
    {data}/sandboxes/{opaque}/{opaque}/       a conversation
        files/                                /workspace inside, the jail's own
        files/uploads/{temparea,generated}/   … its mount points
        uploads/                              mounted read-only on temparea
        staging/                              in no view: files half written, trees half removed
        commands/                             in no view: what background commands printed
    {data}/sandboxes/{opaque}/{opaque}/files/ also a frozen copy of one, for a rehearsal or an undo,
    {data}/sandboxes/{opaque}/{opaque}/copy/  … which this empty directory marks
    {data}/egress/{opaque}/                   where the proxy of a live sandbox listens
    {data}/unclaimed/                         what no row of the store names (unclaimed.py)
    {data}/removed/                           what is deleted, unreachable and on its way out
    {data}/.sbx-data                          empty: by its name no sandbox is shown {data}

Opaque names are random: no id of a caller is ever a path component. With an `owner` (the runtime
is root, the jail has a uid of its own) directories on the way are 0711: passed through by name,
never listed; without one everything is 0700.
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
from sbx.protocol.files import Kind
from sbx.workspace import beneath, paths, unclaimed
from sbx.workspace.logs import CommandLogs
from sbx.workspace.refusals import translated
from sbx.workspace.removal import empty_directory, remove_tree
from sbx.workspace.rollback import roll_back
from sbx.workspace.streams import Owner
from sbx.workspace.tree import Relative, Tree
from sbx.workspace.unclaimed import OPAQUE_NAME
from sbx.workspace.uploads import Uploads

_MOUNT_POINTS = (("uploads",), ("uploads", "temparea"), ("uploads", "generated"))


class ConversationFiles:
    """The files of one conversation, held by three fds: close it when the conversation is idle.

    `files_path` and `uploads_path` are what a jail mounts. `owner` is the uid and gid on the host
    that its jails run as, the same ones each time; None where that is the caller's own uid.
    """

    def __init__(self, parent: int, path: Path, owner: Owner | None) -> None:
        """Make what is missing in the directory `path`, a child of the fd `parent`; hold it."""
        self.path = path
        self.files_path = path / "files"
        self.uploads_path = path / "uploads"
        ours, passed, read = (0o700, 0o700, 0o700) if owner is None else (0o700, 0o711, 0o750)
        with ExitStack() as held, translated(str(path)):
            root = _directory(parent, path.name, passed)
            try:
                staging = _directory(root, "staging", ours)
                held.callback(os.close, staging)
                files = _directory(root, "files", ours, owner, keep_mode=True)
                self.files = Tree(files, view=paths.WORKSPACE, owner=owner, staging=staging)
                held.callback(self.files.close)
                reader = None if owner is None else (os.geteuid(), owner[1])
                uploads = _directory(root, "uploads", read, reader)
                self.uploads = Uploads(Tree(uploads, view=paths.UPLOADS, staging=staging))
                held.callback(self.uploads.close)
            finally:
                os.close(root)
            self.prepare()
            self._staging = staging
            self._held = held.pop_all()

    def prepare(self, *, shared: bool = False) -> None:
        """See to the mount points, before each start of a jail: real directories, and ours to use.

        While a jail lives they are pinned by its mounts. What else may be in their place then was
        put there by the code inside, and gives way.
        """
        for relative in (*_MOUNT_POINTS, ("shared",)) if shared else _MOUNT_POINTS:
            if self._kind(relative) != "directory":
                if self._kind(relative) is not None:
                    self.files.delete(relative)
                self.files.make_directory(relative)
            with translated(self.files.shown(relative)):
                fd = beneath.opener()(self.files.fd, relative, os.O_PATH | os.O_DIRECTORY)
                try:
                    beneath.permit(fd)
                finally:
                    os.close(fd)

    def _kind(self, relative: Relative) -> Kind | None:
        try:
            return self.files.stat(relative).kind
        except NotFound:
            return None

    def logs(self) -> CommandLogs:
        """What its background commands printed; the caller closes it after a few calls."""
        with translated(str(self.path)):
            root = os.open("..", os.O_PATH | os.O_DIRECTORY, dir_fd=self._staging)
            try:
                return CommandLogs(_directory(root, "commands", 0o700))
            finally:
                os.close(root)

    @property
    def staging(self) -> int:
        """The directory fd of what is half written: in no view, on the file system of the files."""
        return self._staging

    def close(self) -> None:
        self._held.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class DataDirectory:
    """The data directory of one runtime: makes, opens and removes what sandboxes keep in it.

    All methods may be called from any thread. Opaque names come from `new_name`, are remembered by
    the caller, and are the only names that are taken.
    """

    def __init__(self, path: Path) -> None:
        """Make or hold `path`. Raises Denied where another user could write there."""
        self.path = path.absolute()
        self._passed = 0o711 if _gives_away() else 0o700
        with ExitStack() as held, translated(str(path)):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                self.path.mkdir()
                self.path.chmod(self._passed)  # whatever the umask is
            root = os.open(self.path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                _refuse_foreign(root, self.path)
                self._sandboxes = _directory(root, "sandboxes", self._passed)
                held.callback(os.close, self._sandboxes)
                self._egress = _directory(root, "egress", self._passed)
                held.callback(os.close, self._egress)
                self._removed = _directory(root, "removed", 0o700)
                held.callback(os.close, self._removed)
                _mark(root)
            finally:
                os.close(root)
            self._held = held.pop_all()

    @staticmethod
    def new_name() -> str:
        """A name that nobody can guess, for a sandbox or a conversation."""
        return secrets.token_hex(16)

    def conversation(
        self, sandbox: str, conversation: str, *, owner: Owner | None = None
    ) -> ConversationFiles:
        """Open the files of a conversation, made where they are missing; the caller closes them."""
        path = self.path / "sandboxes" / _opaque(sandbox) / _opaque(conversation)
        with translated(str(path)):
            parent = _directory(self._sandboxes, sandbox, self._passed)
        try:
            return ConversationFiles(parent, path, owner)
        finally:
            os.close(parent)

    def shared(self, sandbox: str, *, owner: Owner | None = None) -> Tree:
        """Open what the conversations of a sandbox share, made where it is missing."""
        with translated(paths.SHARED):
            parent = _directory(self._sandboxes, _opaque(sandbox), self._passed)
            try:
                fd = _directory(parent, "shared", 0o700, owner, keep_mode=True)
            finally:
                os.close(parent)
        return Tree(fd, view=paths.SHARED, owner=owner)

    def shared_path(self, sandbox: str) -> Path:
        """What a jail mounts as `/workspace/shared`."""
        return self.path / "sandboxes" / _opaque(sandbox) / "shared"

    def frozen(self, sandbox: str, name: str, *, owner: Owner | None = None) -> Tree:
        """Open the tree of a frozen copy, made where it is missing. It lies among the sandbox's
        conversations under an opaque name, and is removed as one."""
        with translated(paths.WORKSPACE):
            parent = _directory(self._sandboxes, _opaque(sandbox), self._passed)
            try:
                root = _directory(parent, _opaque(name), self._passed)
            finally:
                os.close(parent)
            try:
                os.close(_directory(root, unclaimed.COPY, 0o700))  # first: no copy is without it
                fd = _directory(root, "files", 0o700, owner, keep_mode=True)
            finally:
                os.close(root)
        return Tree(fd, view=paths.WORKSPACE, owner=owner)

    def frozen_path(self, sandbox: str, name: str) -> Path:
        """The directory in which the `files` of a frozen copy lie."""
        return self.path / "sandboxes" / _opaque(sandbox) / _opaque(name)

    def egress_path(self, name: str) -> Path:
        """Where a proxy makes its directory, and what its jails mount."""
        return self.path / "egress" / _opaque(name)

    def remove_egress(self, name: str, deadline_s: float = 30.0) -> bool:
        """Remove it; its proxy is closed by then."""
        return remove_tree(self._egress, _opaque(name), deadline_s, trash=self._removed)

    def sweep_egress(self, deadline_s: float = 30.0) -> bool:
        """Remove those of a runtime that was killed: no proxy of this one is open yet."""
        return empty_directory(self._egress, deadline_s)

    def remove(
        self, sandbox: str, conversation: str | None = None, *, deadline_s: float = 30.0
    ) -> bool:
        """Remove a conversation, or a whole sandbox; their kernels are dead by then.

        At once out of reach; False when the time ended before all was gone: `sweep` goes on.
        """
        if conversation is None:
            return remove_tree(self._sandboxes, _opaque(sandbox), deadline_s, trash=self._removed)
        try:
            parent = beneath.opener()(
                self._sandboxes, (_opaque(sandbox),), os.O_PATH | os.O_DIRECTORY
            )
        except FileNotFoundError:
            return True
        try:
            return remove_tree(parent, _opaque(conversation), deadline_s, trash=self._removed)
        finally:
            os.close(parent)

    def sweep(self, deadline_s: float = 30.0) -> bool:
        """Remove what earlier removals left, and say whether nothing is left now."""
        return empty_directory(self._removed, deadline_s)

    def mark_temporary(self, sandbox: str) -> None:
        """Make the directory of a sandbox that ends with this process, and mark it as such."""
        with translated(str(self.path)):
            parent = _directory(self._sandboxes, _opaque(sandbox), self._passed)
            try:
                os.close(_directory(parent, unclaimed.TEMPORARY, 0o700))
            finally:
                os.close(parent)

    def has_no_files(self, sandbox: str, conversation: str | None = None) -> bool:
        """Return whether certainly no user has a file in a conversation, or in a whole sandbox."""
        conversation = conversation and _opaque(conversation)
        return unclaimed.has_no_files(self._sandboxes, _opaque(sandbox), conversation)

    def set_apart(self, sandbox: str, conversation: str | None = None, *, at: float) -> str:
        """Move a directory that no row names to `unclaimed`, and return its id there."""
        item_id = unclaimed.new_id(at, _opaque(sandbox), conversation and _opaque(conversation))
        with ExitStack() as held, translated(str(self.path / unclaimed.UNCLAIMED)):
            root = os.open("..", os.O_PATH | os.O_DIRECTORY, dir_fd=self._sandboxes)
            held.callback(os.close, root)
            target = _directory(root, unclaimed.UNCLAIMED, 0o700)
            held.callback(os.close, target)
            parent = self._sandboxes
            if conversation is not None:
                parent = beneath.opener()(parent, (sandbox,), os.O_PATH | os.O_DIRECTORY)
                held.callback(os.close, parent)
            unclaimed.move(parent, conversation or sandbox, target, item_id)
        return item_id

    def sandboxes(self) -> tuple[str, ...]:
        """The opaque names that exist, for a caller that looks for leftovers at its start."""
        with translated(str(self.path)):
            fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._sandboxes)
            try:
                return tuple(name for name in os.listdir(fd) if OPAQUE_NAME.fullmatch(name))
            finally:
                os.close(fd)

    def conversations(self, sandbox: str) -> tuple[str, ...]:
        """The opaque names that exist in a sandbox; none where there is no such sandbox."""
        with translated(str(self.path)):
            try:
                fd = beneath.opener()(
                    self._sandboxes, (_opaque(sandbox),), os.O_RDONLY | os.O_DIRECTORY
                )
            except FileNotFoundError:
                return ()
            try:
                return tuple(name for name in os.listdir(fd) if OPAQUE_NAME.fullmatch(name))
            finally:
                os.close(fd)

    def roll_back(self, sandbox: str) -> bool:
        """Undo what a kill left half committed in a sandbox that nobody uses. False where that can
        only be done later, and takes what lies there."""
        done = [self._roll_back(sandbox, name) for name in self.conversations(sandbox)]
        return all(done)

    def tidy(self, sandbox: str, conversation: str, *, deadline_s: float = 10.0) -> bool:
        """The same in a conversation, and remove what a crash left half written; True when all of
        it is."""
        if not self._roll_back(sandbox, conversation):
            return False
        with ExitStack() as held:
            staging = self._hold(held, sandbox, conversation, "staging")
            return staging is None or empty_directory(staging, deadline_s)

    def _roll_back(self, sandbox: str, conversation: str) -> bool:
        with ExitStack() as held:
            staging = self._hold(held, sandbox, conversation, "staging")
            files = self._hold(held, sandbox, conversation, "files")
            return staging is None or files is None or roll_back(staging, files)

    def _hold(self, held: ExitStack, *inside: str) -> int | None:
        try:
            fd = beneath.opener()(self._sandboxes, inside, os.O_PATH | os.O_DIRECTORY)
        except FileNotFoundError:
            return None
        held.callback(os.close, fd)
        return fd

    def close(self) -> None:
        self._held.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _opaque(name: str) -> str:
    if not OPAQUE_NAME.fullmatch(name):
        raise Broken(f"'{name}' is no opaque name; ids of callers never reach the disk")
    return name


def _directory(
    parent: int, name: str, mode: int, owner: Owner | None = None, *, keep_mode: bool = False
) -> int:
    """Make or find a directory and give an O_PATH fd of it, its owner and mode as they should be.

    With `keep_mode` a mode that the code inside chose is kept, but for rwx of the owner. Owner and
    mode are seen to each time: a crash may have come between making and giving away.
    """
    with suppress(FileExistsError):
        os.mkdir(name, mode, dir_fd=parent)
    fd = beneath.opener()(parent, (name,), os.O_PATH | os.O_DIRECTORY)
    try:
        found = os.fstat(fd)
        if owner is not None and (found.st_uid, found.st_gid) != owner:
            os.chown(f"/proc/self/fd/{fd}", *owner)
        if keep_mode:
            beneath.permit(fd)
        elif stat.S_IMODE(found.st_mode) != mode:
            os.chmod(f"/proc/self/fd/{fd}", mode)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _mark(root: int) -> None:
    """Make the marker by which every sbx of this host knows the directory."""
    how = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with suppress(FileExistsError):
        os.close(os.open(DATA_MARKER, how, 0o600, dir_fd=root))


def _gives_away() -> bool:
    """Whether jails have uids of their own: a service that gave up root keeps chown for this."""
    return os.geteuid() == 0 or bool(capabilities.effective() >> capabilities.CAP_CHOWN & 1)


def _refuse_foreign(fd: int, path: Path) -> None:
    found = os.fstat(fd)
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise Denied(
            f"'{path}' can be written by other users, so it cannot hold workspaces",
            code="data_directory_not_private",
            hint="choose a directory of your own that only you can write (chmod go-w)",
            details={"path": str(path)},
        )
