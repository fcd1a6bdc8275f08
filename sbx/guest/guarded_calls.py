"""The calls that the path guard performs: resolve the path, ask the table, act on a descriptor.

A method returns the answer for the caller. `Outside` means that Linux executes the call itself,
which is safe for all but modes: Landlock gives the caller no right to write to the workspace.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from sbx.guest import hard_links
from sbx.guest.guarded_names import GuardedNames, item_of, protected
from sbx.guest.guarded_paths import (
    AT_EMPTY_PATH,
    AT_REMOVEDIR,
    AT_SYMLINK_FOLLOW,
    AT_SYMLINK_NOFOLLOW,
    ITEMS,
    QUARANTINE,
    RECORDS,
    RULES,
    Outside,
    PathResolver,
    ResolvedPath,
    descriptor_of,
    is_item,
    open_path,
    own_view,
    signed,
)
from sbx.guest.path_rules import HIDDEN, RuleMatch
from sbx.guest.quarantine_items import (
    Items,
    content_of,
    discard,
    note_copied,
    note_moved,
    recorded_name,
)
from sbx.linux import procfs, seccomp_notify
from sbx.linux.seccomp_notify import SyscallNotice

_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_TRUNC
_SET_ID = 0o6000
_CREATES = os.O_CREAT | os.O_WRONLY | os.O_TRUNC


class Opened(NamedTuple):
    """The caller gets a copy of `fd`; the guard then closes it. `flags` are those of its call."""

    fd: int
    flags: int


class SlowOpen(NamedTuple):
    """A FIFO or a device, whose open may wait for another process. `fd` is an O_PATH descriptor of
    it, which the guard closes afterwards."""

    fd: int
    flags: int


Answer = Opened | SlowOpen | None


class _At(NamedTuple):
    """The indexes of a call's arguments for a directory descriptor and for a path below it."""

    directory: int | None
    path: int


class GuardedCalls:
    """The calls of one jail, on its workspace.

    `walls` is the `guard` part of the boot frame:

    root            the workspace inside
    link_prefixes   where an absolute symlink in the workspace may lead: read-only directories that
                    inside and the host have in common
    fifos           whether the jail may make FIFOs
    """

    def __init__(self, walls: Mapping[str, Any]) -> None:
        self._paths = PathResolver(walls["root"])
        self._names = GuardedNames(tuple(walls["link_prefixes"]))
        self._items = Items()
        self._makes_fifos: bool = walls["fifos"]
        first, second = _At(None, 0), _At(0, 1)
        calls: dict[str, Callable[[SyscallNotice], Answer]] = {
            "open": lambda c: self._open(c, first, c.arguments[1], c.arguments[2]),
            "openat": lambda c: self._open(c, second, c.arguments[2], c.arguments[3]),
            "creat": lambda c: self._open(c, first, _CREATES, c.arguments[1]),
            "truncate": self._truncate,
            "mkdir": lambda c: self._mkdir(c, first, c.arguments[1]),
            "mkdirat": lambda c: self._mkdir(c, second, c.arguments[2]),
            "mknod": lambda c: self._mknod(c, first, c.arguments[1]),
            "mknodat": lambda c: self._mknod(c, second, c.arguments[2]),
            "symlink": lambda c: self._symlink(c, _At(None, 1)),
            "symlinkat": lambda c: self._symlink(c, _At(1, 2)),
            "link": lambda c: self._link(c, first, _At(None, 1), 0),
            "linkat": lambda c: self._link(c, second, _At(2, 3), c.arguments[4]),
            "rename": lambda c: self._rename(c, first, _At(None, 1), 0),
            "renameat": lambda c: self._rename(c, second, _At(2, 3), 0),
            "renameat2": lambda c: self._rename(c, second, _At(2, 3), c.arguments[4]),
            "unlink": lambda c: self._remove(c, first, is_directory=False),
            "unlinkat": lambda c: self._remove(
                c, second, is_directory=bool(c.arguments[2] & AT_REMOVEDIR)
            ),
            "rmdir": lambda c: self._remove(c, first, is_directory=True),
            "chmod": lambda c: self._chmod(c, first, c.arguments[1], 0),
            "fchmod": lambda c: self._fchmod(c, c.arguments[1]),
            "fchmodat": lambda c: self._chmod(c, second, c.arguments[2], 0),
            "fchmodat2": lambda c: self._chmod(c, second, c.arguments[2], c.arguments[3]),
        }
        numbers = seccomp_notify.path_calls()
        self._calls = {number: calls[name] for name, number in numbers.items()}

    def perform(self, call: SyscallNotice) -> Answer:
        """Perform one call. Raise `Outside`, and OSError for the caller."""
        self._names.refresh()
        return self._calls[call.number](call)

    # -- files ----------------------------------------------------------------------------------

    def _open(self, call: SyscallNotice, at: _At, flags: int, mode: int) -> Answer:
        flags &= 0xFFFFFFFF
        if flags & os.O_PATH:
            raise Outside
        path = self._paths.path(call, at.path)
        if (own := own_view(call, path)) != path and "/fd/" in own:
            return self._reopen_descriptor(own, flags)
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            return self._open_unnamed(call, at, path, flags, mode)
        exclusive = flags & os.O_CREAT and flags & os.O_EXCL
        follow = not flags & os.O_NOFOLLOW and not exclusive
        with self._paths.target(call, at.directory, path, follow=follow) as target:
            try:
                path_fd = target.hold()
            except FileNotFoundError:
                if not flags & os.O_CREAT:
                    raise Outside from None  # Linux returns the right errno
                return self._create(call, target, flags, mode)
            with _closing(path_fd):
                return self._open_existing(path_fd, target, flags)

    def _open_existing(self, path_fd: int, target: ResolvedPath, flags: int) -> Answer:
        """Open an existing file by the O_PATH descriptor that is checked: another context may give
        its name to a protected file at any time."""
        status = os.fstat(path_fd)
        if stat.S_ISLNK(status.st_mode) or stat.S_ISDIR(status.st_mode) or not flags & _WRITES:
            raise Outside
        if flags & os.O_CREAT and flags & os.O_EXCL:
            raise FileExistsError(errno.EEXIST, target.name)
        self._names.check_existing(target)
        self._names.check_inode(status)
        how = flags & ~(os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)
        if not stat.S_ISREG(status.st_mode):
            return SlowOpen(os.dup(path_fd), how)
        return Opened(_reopen(path_fd, target, status, how), flags)

    def _reopen_descriptor(self, descriptor: str, flags: int) -> Opened:
        """Open /dev/stdout and similar paths, if they lead to a file of the workspace."""
        with _closing(open_path(descriptor)) as path_fd:
            status = os.fstat(path_fd)
            if not stat.S_ISREG(status.st_mode):
                raise Outside
            how = flags & ~(os.O_CREAT | os.O_EXCL)
            target = self._paths.target_of(path_fd)
            if target is None:
                return Opened(_open_own(path_fd, how), flags)
            with target:
                self._names.check_existing(target)
                self._names.check_inode(status)
                return Opened(_reopen(path_fd, target, status, how), flags)

    def _create(self, call: SyscallNotice, target: ResolvedPath, flags: int, mode: int) -> Opened:
        mode = (mode & 0o7777 & ~_SET_ID) & ~procfs.umask(call.thread)
        how = flags | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        match = self._names.check(target)
        if match is not None:
            return Opened(self._items.open(target, match, how, mode), flags)
        return Opened(os.open(target.name, how, mode, dir_fd=target.parent), flags)

    def _open_unnamed(
        self, call: SyscallNotice, at: _At, path: str, flags: int, mode: int
    ) -> Opened:
        """Open a file without a name (O_TMPFILE) in a directory. Only linkat can give it a name."""
        inside = f"{path.rstrip('/')}/unnamed"
        with self._paths.target(call, at.directory, inside, follow=False) as target:
            self._names.check(target)
            mode = (mode & 0o7777 & ~_SET_ID) & ~procfs.umask(call.thread)
            return Opened(os.open(".", flags | os.O_CLOEXEC, mode, dir_fd=target.parent), flags)

    def _truncate(self, call: SyscallNotice) -> None:
        size = signed(call.arguments[1], 64)
        with (
            self._paths.target(call, None, self._paths.path(call, 0), follow=True) as target,
            _closing(target.hold()) as path_fd,
        ):
            status = os.fstat(path_fd)
            self._names.check_existing(target)
            self._names.check_inode(status)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "not a regular file")
            flags = os.O_WRONLY | (0 if size else os.O_TRUNC)
            with _closing(_reopen(path_fd, target, status, flags)) as fd:
                os.ftruncate(fd, size)

    # -- names ----------------------------------------------------------------------------------

    def _mkdir(self, call: SyscallNotice, at: _At, mode: int) -> None:
        with self._name(call, at) as target:
            if target.mode() is not None:
                raise FileExistsError(errno.EEXIST, target.name)
            mode = (mode & 0o1777) & ~procfs.umask(call.thread)
            match = self._names.check(target, is_directory=True)
            if match is None:
                os.mkdir(target.name, mode, dir_fd=target.parent)
            else:
                self._items.mkdir(target, match, mode)

    def _mknod(self, call: SyscallNotice, at: _At, mode: int) -> None:
        with self._name(call, at) as target:
            if self._names.check(target) is not None or stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
                raise protected()
            if stat.S_ISFIFO(mode) and not self._makes_fifos:
                raise PermissionError(errno.EACCES, "the policy does not allow FIFOs")
            permissions = (mode & 0o777) & ~procfs.umask(call.thread)
            os.mknod(target.name, stat.S_IFMT(mode) | permissions, dir_fd=target.parent)

    def _symlink(self, call: SyscallNotice, at: _At) -> None:
        link = self._paths.path(call, 0)
        with self._name(call, at) as target:
            if is_item(link):  # mv(1) creates a link to the quarantine again
                match = self._names.check(target)
                if match is not None and match.name != recorded_name(link):
                    raise protected()
                note_copied(link)
                os.symlink(link, target.name, dir_fd=target.parent)
                return
            if self._names.check(target) is not None or ".git" in target.parts:
                raise protected()
            self._names.check_above(target)
            self._names.check_link(link, target.parts)
            os.symlink(link, target.name, dir_fd=target.parent)

    def _link(self, call: SyscallNotice, old: _At, new: _At, flags: int) -> None:
        path = self._paths.path(call, old.path)
        with self._name(call, new) as target:
            if target.mode() is not None:
                raise FileExistsError(errno.EEXIST, target.name)
            descriptor = descriptor_of(call, path, old.directory, flags)
            if descriptor is not None:
                self._link_descriptor(descriptor, target)
                return
            follow = bool(flags & AT_SYMLINK_FOLLOW)
            with (
                self._paths.target(call, old.directory, path, follow=follow) as source,
                _closing(source.hold()) as path_fd,
            ):
                status = os.fstat(path_fd)
                self._names.check_existing(source, is_directory=stat.S_ISDIR(status.st_mode))
                match = self._names.check(target)
                content = content_of(item_of(path_fd, status), path_fd)
                with _closing(content):
                    if match is not None:
                        self._items.copy(content, target, match)
                        return
                    if not os.path.samestat(os.fstat(content), status):
                        self._names.check_above(target)
                        hard_links.place_copy(content, target)
                        return
                self._names.check_linked(path_fd, status)
                self._names.check_above(target)
                hard_links.link(path_fd, target)

    def _link_descriptor(self, descriptor: str, target: ResolvedPath) -> None:
        """Give a name to a file of O_TMPFILE, as linkat(2) describes it without a capability."""
        with _closing(open_path(descriptor)) as path_fd:
            try:
                source = self._paths.target_of(path_fd)
            except Outside:
                raise OSError(errno.EXDEV, "two mounts") from None
            if source is not None:
                with source:
                    self._names.check_existing(source)
            self._names.check_linked(path_fd, os.fstat(path_fd))
            if self._names.check(target):
                raise protected()
            hard_links.link(path_fd, target)

    def _rename(self, call: SyscallNotice, old: _At, new: _At, flags: int) -> None:
        with contextlib.ExitStack() as stack:
            source = self._name_or_none(call, old, stack)
            destination = self._name_or_none(call, new, stack)
            if source is None and destination is None:
                raise Outside
            if source is None or destination is None:
                raise OSError(errno.EXDEV, "two mounts")
            fd = stack.enter_context(_closing(source.hold()))
            status = os.fstat(fd)
            is_directory = stat.S_ISDIR(status.st_mode)
            if flags & _RENAME_NOREPLACE and destination.mode() is not None:
                raise FileExistsError(errno.EEXIST, destination.name)
            self._names.check_existing(source, is_directory=is_directory)
            self._names.check_inode(status)
            item = destination.item()
            match = None if item else self._names.check(destination, is_directory=is_directory)
            if flags & _RENAME_EXCHANGE:
                raise OSError(errno.EINVAL, "not supported in a directory of the host")
            _move(self._names, self._items, fd, source, destination, match, item)

    def _remove(self, call: SyscallNotice, at: _At, *, is_directory: bool) -> None:
        with self._name(call, at) as target:
            mode = target.mode()
            if mode is None:
                raise FileNotFoundError(errno.ENOENT, target.name)
            item = target.item()
            self._names.check_existing(target, is_directory=stat.S_ISDIR(mode))
            if item is not None and is_directory:
                os.rmdir(item)
                os.unlink(target.name, dir_fd=target.parent)
                discard(item)
            elif is_directory:
                os.rmdir(target.name, dir_fd=target.parent)
            else:
                is_last = os.lstat(target.name, dir_fd=target.parent).st_nlink == 1
                os.unlink(target.name, dir_fd=target.parent)
                if is_last and item is not None and recorded_name(item) == HIDDEN:
                    discard(item)

    def _name(self, call: SyscallNotice, at: _At) -> ResolvedPath:
        """Return the target for a name, which may be a symlink, to create or remove it."""
        path = self._paths.path(call, at.path)
        return self._paths.target(call, at.directory, path.rstrip("/") or path, follow=False)

    def _name_or_none(
        self, call: SyscallNotice, at: _At, stack: contextlib.ExitStack
    ) -> ResolvedPath | None:
        try:
            return stack.enter_context(self._name(call, at))
        except Outside:
            return None

    # -- modes ----------------------------------------------------------------------------------
    #
    # Never left to Linux, also outside of the workspace: Landlock has no right for modes, and a
    # caller could exchange the path after the check.

    def _chmod(self, call: SyscallNotice, at: _At, mode: int, flags: int) -> None:
        path = self._paths.path(call, at.path)
        if not path and flags & AT_EMPTY_PATH and at.directory is not None:
            fd = open_path(f"/proc/{call.thread}/fd/{signed(call.arguments[at.directory])}")
        else:
            base = self._paths.base(call, at.directory, path)
            try:
                follow = not flags & AT_SYMLINK_NOFOLLOW
                fd = open_path(own_view(call, path), base, follow=follow)
            finally:
                if base is not None:
                    os.close(base)
        _set_mode(self._paths, self._names, fd, mode, by_path=bool(path))

    def _fchmod(self, call: SyscallNotice, mode: int) -> None:
        fd = open_path(f"/proc/{call.thread}/fd/{signed(call.arguments[0])}")
        _set_mode(self._paths, self._names, fd, mode, by_path=False)


def _move(
    names: GuardedNames,
    items: Items,
    fd: int,
    source: ResolvedPath,
    destination: ResolvedPath,
    match: RuleMatch | None,
    item: str | None,
) -> None:
    """Move the name of an O_PATH descriptor. The destination is an existing `item`, a new one for
    `match`, or free.

    The link of an item is moved itself, and leads nowhere on the host at its new place. But a new
    hidden file gets the meaning of its new name: programs write under a temporary name first.
    """
    status = os.fstat(fd)
    moved = item_of(fd, status)
    if moved is not None and moved == item:
        return  # like rename(2) with two names of one file
    is_same = moved is not None and match is not None and match.name == recorded_name(moved)
    with _closing(content_of(moved, fd)) as content:
        if not stat.S_ISREG(os.fstat(content).st_mode):
            if match is not None and moved is not None and not is_same:
                raise protected()
            if item is not None or (match is not None and moved is None):
                raise OSError(errno.EXDEV, "goes to the quarantine")
        elif item is not None or (not is_same and (match is not None or moved is not None)):
            names.check_move(source, destination, fd, status)
            items.move(content, source, destination, match, item)
            return
    by_name = names.check_move(source, destination, fd, status)
    if stat.S_ISDIR(status.st_mode) or (match is None and by_name):
        _rename(source, destination)
    else:
        hard_links.move(fd, source, destination)
    if moved is not None:
        note_moved(moved, destination)


def _reopen(path_fd: int, target: ResolvedPath, status: os.stat_result, flags: int) -> int:
    """Open a regular file for writing by its O_PATH descriptor. If it has further names, open a
    copy of it."""
    if status.st_nlink > 1:
        # Fails if the caller has no right to write.
        os.close(_open_own(path_fd, flags & ~os.O_TRUNC))
        empty = bool(flags & os.O_TRUNC)
        with _closing(hard_links.separate(path_fd, target, empty=empty)) as copy:
            return _open_own(copy, flags)
    return _open_own(path_fd, flags)


def _set_mode(
    paths: PathResolver, names: GuardedNames, fd: int, mode: int, *, by_path: bool
) -> None:
    """Set the mode of a node by its O_PATH descriptor, and close the descriptor."""
    with _closing(fd), contextlib.ExitStack() as stack:
        own = f"/proc/self/fd/{fd}"
        path, status = os.readlink(own), os.fstat(fd)
        is_directory = stat.S_ISDIR(status.st_mode)
        # Without the right to search a directory, the guard could not see its entries.
        is_needed = path in (QUARANTINE, ITEMS) or path.startswith((RECORDS, RULES))
        if is_needed or paths.below(path) == ():
            raise PermissionError(errno.EPERM, "the guard needs this mode")
        if stat.S_ISLNK(status.st_mode):
            raise OSError(errno.EOPNOTSUPP, "a symlink has no mode")
        with contextlib.suppress(Outside):
            target = paths.target_of(fd)
            if is_directory:
                mode |= 0o700
            if target is not None:
                stack.enter_context(target)
                names.check_existing(target, is_directory=is_directory)
                names.check_inode(status)
                if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
                    if stat.S_IMODE(status.st_mode) == mode & 0o1777:
                        return
                    if not by_path:  # the caller's descriptor would stay with the other names
                        raise OSError(errno.EROFS, "the file has further names")
                    separate = stack.enter_context(_closing(hard_links.separate(fd, target)))
                    own = f"/proc/self/fd/{separate}"
        os.chmod(own, mode & 0o1777)


def _open_own(path_fd: int, flags: int) -> int:
    return os.open(f"/proc/self/fd/{path_fd}", flags | os.O_CLOEXEC)


def _rename(source: ResolvedPath, destination: ResolvedPath) -> None:
    """Rename by the path, where any node may move that another context puts there."""
    os.rename(
        source.name,
        destination.name,
        src_dir_fd=source.parent,
        dst_dir_fd=destination.parent,
    )


@contextlib.contextmanager
def _closing(fd: int) -> Iterator[int]:
    """Close the descriptor at the end."""
    try:
        yield fd
    finally:
        os.close(fd)
