"""The calls that the path guard performs: resolve the path, ask the table, act on a descriptor.

A method returns the answer for the caller. `Outside` means that Linux executes the call itself,
which is safe for all but modes: Landlock gives the caller no right to write to the workspace.
"""

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from sbx.guest.guarded_paths import (
    AT_EMPTY_PATH,
    AT_REMOVEDIR,
    AT_SYMLINK_FOLLOW,
    AT_SYMLINK_NOFOLLOW,
    ITEMS,
    QUARANTINE,
    RECORDS,
    Outside,
    Resolver,
    Target,
    descriptor_of,
    is_item,
    open_path,
    own_view,
    signed,
)
from sbx.guest.path_rules import CONTENT_NAMES, Match, Parts, PathRules, leads_out
from sbx.guest.quarantine_items import Items, recorded_name
from sbx.linux import locks, procfs, seccomp_notify
from sbx.linux.seccomp_notify import Call

_WALK_MAX = 20_000  # entries below a directory that is moved
_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_TRUNC
_SET_ID = 0o6000
_LOCK_TRIES, _LOCK_S = 200, 0.005
_CREATES = os.O_CREAT | os.O_WRONLY | os.O_TRUNC


class Opened(NamedTuple):
    """The caller gets a copy of `fd`, which is closed then. `flags` are those of its call."""

    fd: int
    flags: int


class SlowOpen(NamedTuple):
    """A FIFO or a device: its open may wait for another process. `parent` is to be closed."""

    parent: int
    name: str
    flags: int


Answer = Opened | SlowOpen | None


class _At(NamedTuple):
    """Which arguments of a call are a directory descriptor and a path below it."""

    directory: int | None
    path: int


class GuardedCalls:
    """The calls of one jail, on its workspace. `walls` is the `guard` part of the boot frame:

    root            the workspace inside
    rules           `PathRules.to_json()`
    linked          (device, inode) of protected files that have further names
    link_prefixes   where an absolute symlink in the workspace may lead: read-only directories that
                    inside and the host have in common
    fifos           whether the jail may make FIFOs
    """

    def __init__(self, walls: Mapping[str, Any]) -> None:
        self._rules = PathRules.from_json(walls["rules"])
        self._paths = Resolver(walls["root"])
        self._items = Items()
        self._linked = {tuple(identity) for identity in walls["linked"]}
        self._link_prefixes: tuple[str, ...] = tuple(walls["link_prefixes"])
        self._makes_fifos: bool = walls["fifos"]
        first, second = _At(None, 0), _At(0, 1)
        calls: dict[str, Callable[[Call], Answer]] = {
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
        self._locked = contextlib.ExitStack()
        numbers = seccomp_notify.path_calls()
        self._calls = {number: calls[name] for name, number in numbers.items()}

    def perform(self, call: Call) -> Answer:
        """Perform one call. Raises `Outside`, and OSError for the caller."""
        with contextlib.ExitStack() as held:
            self._locked = held
            return self._calls[call.number](call)

    # -- decisions ------------------------------------------------------------------------------

    def _check(self, target: Target) -> Match | None:
        """Return the match if `target` would be new in the quarantine, None if it is free. Raises
        OSError EROFS if it is protected."""
        if target.name.casefold() in CONTENT_NAMES:
            self._locked.enter_context(only_guard())
        match = self._rules.match(target.parts, self._paths.exists)
        if match is not None and not match.is_new:
            raise _protected()
        return match

    def _check_existing(self, target: Target) -> None:
        """For a name that is to be linked, moved or removed: EROFS if the table protects it. A link
        to the quarantine is free."""
        if target.item() is None and self._rules.match(target.parts, self._paths.exists):
            raise _protected()

    def _check_inode(self, target: Target) -> None:
        """A protected file may have a second name. Raises OSError EROFS."""
        if self._linked:
            found = os.lstat(target.name, dir_fd=target.parent)
            if (found.st_dev, found.st_ino) in self._linked:
                raise _protected()

    def _check_link(self, link: str, parts: Parts) -> None:
        """A symlink may not lead out of the workspace on the host: whoever follows it there would
        be in a directory that this or another sandbox filled. Raises OSError EPERM."""
        if link.startswith("/"):
            path = os.path.normpath(link)
            if any(path == top or path.startswith(f"{top}/") for top in self._link_prefixes):
                return
        elif not leads_out(link, parts):
            return
        raise PermissionError(errno.EPERM, "a symlink would lead out of the directory")

    def _check_move(self, source: Target, destination: Target, mode: int) -> None:
        """What lies below a directory keeps its meaning only where it stays. Raises OSError EXDEV,
        upon which mv(1) and others copy: then each name is checked; EROFS above an alias."""
        if any(map(self._rules.is_above_alias, (source.parts, destination.parts))):
            raise _protected()
        if stat.S_ISLNK(mode) and source.item() is None:
            self._check_link(os.readlink(source.name, dir_fd=source.parent), destination.parts)
        if not stat.S_ISDIR(mode):
            return
        if self._zone(source) != self._zone(destination):
            raise OSError(errno.EXDEV, "into or out of a tree of packages")
        if source.parts[:-1] == destination.parts[:-1]:
            return
        if ".git" in (*source.parts, *destination.parts):
            raise OSError(errno.EXDEV, "inside a repository")
        if len(source.parts) != len(destination.parts):
            _check_no_links_below(source)

    def _zone(self, target: Target) -> tuple[bool, bool]:
        """Which scopes of the table hold below a directory."""
        trees = [self._rules.is_package_tree(part) for part in target.parts]
        return any(trees), trees[-1]

    # -- files ----------------------------------------------------------------------------------

    def _open(self, call: Call, at: _At, flags: int, mode: int) -> Answer:
        flags &= 0xFFFFFFFF
        if flags & os.O_PATH:
            raise Outside
        path = self._paths.path(call, at.path)
        if (own := own_view(call, path)) != path and "/fd/" in own:
            return self._reopen(own, flags)
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            return self._open_unnamed(call, at, path, flags, mode)
        exclusive = flags & os.O_CREAT and flags & os.O_EXCL
        follow = not flags & os.O_NOFOLLOW and not exclusive
        with self._paths.target(call, at.directory, path, follow=follow) as target:
            found = target.mode()
            if found is None:
                if not flags & os.O_CREAT:
                    raise Outside  # Linux has the right errno
                return self._create(call, target, flags, mode)
            if stat.S_ISLNK(found) or stat.S_ISDIR(found) or not flags & _WRITES:
                raise Outside
            if exclusive:
                raise FileExistsError(errno.EEXIST, path)
            self._check_existing(target)
            self._check_inode(target)
            flags = flags & ~os.O_CREAT | os.O_NOFOLLOW
            if not stat.S_ISREG(found):
                return SlowOpen(os.dup(target.parent), target.name, flags)
            fd = os.open(target.name, flags | os.O_CLOEXEC, dir_fd=target.parent)
            return Opened(fd, flags)

    def _reopen(self, descriptor: str, flags: int) -> Opened:
        """/dev/stdout and the like, where they are a file of the workspace."""
        fd = open_path(descriptor)
        try:
            own = f"/proc/self/fd/{fd}"
            below, found = self._paths.below(os.readlink(own)), os.fstat(fd)
            if below is None or not stat.S_ISREG(found.st_mode):
                raise Outside
            protected = self._rules.match(below, self._paths.exists)
            if protected or (found.st_dev, found.st_ino) in self._linked:
                raise _protected()
            return Opened(os.open(own, flags & ~(os.O_CREAT | os.O_EXCL) | os.O_CLOEXEC), flags)
        finally:
            os.close(fd)

    def _create(self, call: Call, target: Target, flags: int, mode: int) -> Opened:
        mode = (mode & 0o7777 & ~_SET_ID) & ~procfs.umask(call.thread)
        how = flags | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        match = self._check(target)
        if match is not None:
            return Opened(self._items.open(target, match, how, mode), flags)
        return Opened(os.open(target.name, how, mode, dir_fd=target.parent), flags)

    def _open_unnamed(self, call: Call, at: _At, path: str, flags: int, mode: int) -> Opened:
        """O_TMPFILE: a file without a name, in a directory. It gets one by linkat only."""
        inside = f"{path.rstrip('/')}/unnamed"
        with self._paths.target(call, at.directory, inside, follow=False) as target:
            self._check(target)
            mode = (mode & 0o7777 & ~_SET_ID) & ~procfs.umask(call.thread)
            return Opened(os.open(".", flags | os.O_CLOEXEC, mode, dir_fd=target.parent), flags)

    def _truncate(self, call: Call) -> None:
        with self._paths.target(call, None, self._paths.path(call, 0), follow=True) as target:
            self._check_existing(target)
            self._check_inode(target)
            flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(target.name, flags, dir_fd=target.parent)
            try:
                os.ftruncate(fd, signed(call.arguments[1], 64))
            finally:
                os.close(fd)

    # -- names ----------------------------------------------------------------------------------

    def _mkdir(self, call: Call, at: _At, mode: int) -> None:
        with self._name(call, at) as target:
            if target.mode() is not None:
                raise FileExistsError(errno.EEXIST, target.name)
            mode = (mode & 0o1777) & ~procfs.umask(call.thread)
            match = self._check(target)
            if match is None:
                os.mkdir(target.name, mode, dir_fd=target.parent)
            else:
                self._items.mkdir(target, match, mode)

    def _mknod(self, call: Call, at: _At, mode: int) -> None:
        with self._name(call, at) as target:
            if self._check(target) is not None or stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
                raise _protected()
            if stat.S_ISFIFO(mode) and not self._makes_fifos:
                raise PermissionError(errno.EACCES, "the policy permits no FIFO")
            permissions = (mode & 0o777) & ~procfs.umask(call.thread)
            os.mknod(target.name, stat.S_IFMT(mode) | permissions, dir_fd=target.parent)

    def _symlink(self, call: Call, at: _At) -> None:
        link = self._paths.path(call, 0)
        with self._name(call, at) as target:
            if is_item(link):  # mv(1) makes a link to the quarantine again
                match = self._check(target)
                if match is not None and match.name != recorded_name(link):
                    raise _protected()
                os.symlink(link, target.name, dir_fd=target.parent)
                return
            if self._check(target) is not None or ".git" in target.parts:
                raise _protected()
            self._check_link(link, target.parts)
            os.symlink(link, target.name, dir_fd=target.parent)

    def _link(self, call: Call, old: _At, new: _At, flags: int) -> None:
        path = self._paths.path(call, old.path)
        with self._name(call, new) as target:
            if target.mode() is not None:
                raise FileExistsError(errno.EEXIST, target.name)
            descriptor = descriptor_of(call, path, old.directory, flags)
            if descriptor is not None:
                self._link_descriptor(descriptor, target)
                return
            follow = bool(flags & AT_SYMLINK_FOLLOW)
            with self._paths.target(call, old.directory, path, follow=follow) as source:
                self._check_existing(source)
                match = self._check(target)
                if match is not None:
                    self._items.copy(source, target, match)
                    return
                os.link(
                    source.name,
                    target.name,
                    src_dir_fd=source.parent,
                    dst_dir_fd=target.parent,
                    follow_symlinks=False,
                )

    def _link_descriptor(self, descriptor: str, target: Target) -> None:
        """Give a name to a file of O_TMPFILE, as linkat(2) describes it without a capability."""
        fd = open_path(descriptor)
        try:
            own = f"/proc/self/fd/{fd}"
            below = self._paths.below(os.readlink(own))
            if below is None:
                raise OSError(errno.EXDEV, "two mounts")
            if self._rules.match(below, self._paths.exists) or self._check(target):
                raise _protected()
            os.link(own, target.name, dst_dir_fd=target.parent, follow_symlinks=True)
        finally:
            os.close(fd)

    def _rename(self, call: Call, old: _At, new: _At, flags: int) -> None:
        with contextlib.ExitStack() as held:
            source = self._name_or_none(call, old, held)
            destination = self._name_or_none(call, new, held)
            if source is None and destination is None:
                raise Outside
            if source is None or destination is None:
                raise OSError(errno.EXDEV, "two mounts")
            mode = source.mode()
            if mode is None:
                raise FileNotFoundError(errno.ENOENT, source.name)
            if flags & _RENAME_NOREPLACE and destination.mode() is not None:
                raise FileExistsError(errno.EEXIST, destination.name)
            self._check_existing(source)
            item = destination.item()
            match = None if item else self._check(destination)
            if flags & _RENAME_EXCHANGE:
                raise OSError(errno.EINVAL, "not supported in a directory of the host")
            moved = source.item()
            if moved is not None and item is None:
                if match is not None and match.name != recorded_name(moved):
                    raise _protected()
                match = None  # the link itself moves, and leads nowhere on the host there either
            if item is None and match is None:
                self._check_move(source, destination, mode)
                os.rename(
                    source.name,
                    destination.name,
                    src_dir_fd=source.parent,
                    dst_dir_fd=destination.parent,
                )
            elif stat.S_ISREG(mode):
                self._items.move(source, destination, match, item)
            else:
                raise OSError(errno.EXDEV, "goes to the quarantine")

    def _remove(self, call: Call, at: _At, *, is_directory: bool) -> None:
        with self._name(call, at) as target:
            if target.mode() is None:
                raise FileNotFoundError(errno.ENOENT, target.name)
            item = target.item()
            self._check_existing(target)
            if item is not None and is_directory:
                os.rmdir(item)
                os.unlink(target.name, dir_fd=target.parent)
            elif is_directory:
                os.rmdir(target.name, dir_fd=target.parent)
            else:
                os.unlink(target.name, dir_fd=target.parent)

    def _name(self, call: Call, at: _At) -> Target:
        """The name itself, which may be a symlink, to be created or removed."""
        path = self._paths.path(call, at.path)
        return self._paths.target(call, at.directory, path.rstrip("/") or path, follow=False)

    def _name_or_none(self, call: Call, at: _At, held: contextlib.ExitStack) -> Target | None:
        try:
            return held.enter_context(self._name(call, at))
        except Outside:
            return None

    # -- modes ----------------------------------------------------------------------------------
    #
    # Never left to Linux, also outside the workspace: Landlock has no right for modes, and a caller
    # could exchange the path after the check.

    def _chmod(self, call: Call, at: _At, mode: int, flags: int) -> None:
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
        self._set_mode(fd, mode)

    def _fchmod(self, call: Call, mode: int) -> None:
        self._set_mode(open_path(f"/proc/{call.thread}/fd/{signed(call.arguments[0])}"), mode)

    def _set_mode(self, fd: int, mode: int) -> None:
        try:
            own = f"/proc/self/fd/{fd}"
            path, found = os.readlink(own), os.fstat(fd)
            below = self._paths.below(path)
            # Without the right to search a directory the guard could not see what is in it.
            if below == () or path in (QUARANTINE, ITEMS) or path.startswith(RECORDS):
                raise PermissionError(errno.EPERM, "the guard needs this directory as it is")
            if below and self._rules.match(below, self._paths.exists) is not None:
                raise _protected()
            if (found.st_dev, found.st_ino) in self._linked:
                raise _protected()
            if stat.S_ISLNK(found.st_mode):
                raise OSError(errno.EOPNOTSUPP, "a symlink has no mode")
            if below and stat.S_ISDIR(found.st_mode):
                mode |= 0o700
            os.chmod(own, mode & 0o1777)
        finally:
            os.close(fd)


@contextlib.contextmanager
def only_guard() -> Iterator[None]:
    """Be the only guard of this quarantine meanwhile: two kernels could each create one half of a
    repository. Raises OSError EAGAIN after a second, if code inside holds the lock."""
    fd = os.open(RECORDS, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for _ in range(_LOCK_TRIES):
            if locks.try_lock(fd):
                break
            time.sleep(_LOCK_S)
        else:
            raise BlockingIOError(errno.EAGAIN, "another guard is at work")
        yield
    finally:
        os.close(fd)


def _check_no_links_below(source: Target) -> None:
    """A relative symlink leads elsewhere after a move to another depth. Raises OSError EXDEV."""
    seen = 0
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    top = os.open(source.name, flags, dir_fd=source.parent)
    try:
        for _, directories, files, directory in os.fwalk(".", dir_fd=top):
            seen += len(directories) + len(files)
            if seen > _WALK_MAX:
                raise OSError(errno.EXDEV, "too many entries to look at")
            for name in (*directories, *files):
                if not stat.S_ISLNK(os.lstat(name, dir_fd=directory).st_mode):
                    continue
                if not is_item(os.readlink(name, dir_fd=directory)):
                    raise OSError(errno.EXDEV, "a symlink lies below")
    finally:
        os.close(top)


def _protected() -> OSError:
    return OSError(errno.EROFS, "a program of the host obeys this name")
