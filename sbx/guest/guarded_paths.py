"""Turn a path of a caller in the jail into a name in a directory of the workspace.

The guard resolves as the caller would: from its working directory or descriptor, in the same mounts
and with the same uid. All decisions are about the result, a descriptor and one name, so that no
change of a path in between matters. Symlinks are followed here; nothing later follows one.
"""

import errno
import os
import re
import stat

from sbx.guest.path_rules import Parts
from sbx.linux import procfs
from sbx.linux.seccomp_notify import SyscallNotice

QUARANTINE = "/.sbx-quarantine"
ITEMS, RECORDS = f"{QUARANTINE}/items", f"{QUARANTINE}/records"
RULES = f"{QUARANTINE}/rules.json"  # written by the host; Landlock keeps the jail from writing it
AT_FDCWD = -100
AT_SYMLINK_NOFOLLOW, AT_REMOVEDIR, AT_SYMLINK_FOLLOW, AT_EMPTY_PATH = 0x100, 0x200, 0x400, 0x1000
_ITEM = re.compile(re.escape(f"{ITEMS}/") + "([0-9a-f]{16})")
_LINKS_MAX = 40  # path_resolution(7)
_PATH_MAX = 4096


class Outside(Exception):
    """The path does not lie in the workspace: Linux executes the call, under Landlock."""


class ResolvedPath:
    """A name in a directory of the workspace. `parent` is an O_PATH descriptor, `parts` the path
    relative to the workspace, in which only the last name may be a symlink. A context manager."""

    __slots__ = ("_above", "_up", "name", "parent", "parts")

    def __init__(self, parent: int, parts: Parts) -> None:
        self.parent = parent
        self.parts = parts
        self.name = parts[-1]
        self._above: int | None = None  # an O_PATH descriptor of the directory `_up` levels above
        self._up = 0

    def __enter__(self) -> "ResolvedPath":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.parent)
        if self._above is not None:
            os.close(self._above)

    def mode(self) -> int | None:
        """Return type and mode of the name itself; None if it does not exist."""
        try:
            return os.lstat(self.name, dir_fd=self.parent).st_mode
        except FileNotFoundError:
            return None

    def hold(self) -> int:
        """Open the name itself with O_PATH: no process can exchange the file between a check of
        this descriptor and its use. Raise FileNotFoundError."""
        return open_path(self.name, self.parent, follow=False)

    def exists(self, parts: Parts) -> bool:
        """Return whether this exists in the workspace. A link to the quarantine does not count.

        `parts` is a name in the target, or in a directory above it. It is looked up from the
        directory that is held, because another context may rename a directory of the path now: no
        program can move this one out of a directory that the table protects.
        """
        up = len(self.parts) - len(parts)
        path = f"{self.name}/{parts[-1]}" if up < 0 else parts[-1]
        try:
            directory = self._ancestor(up) if up > 0 else self.parent
            status = os.lstat(path, dir_fd=directory)
        except (FileNotFoundError, NotADirectoryError):
            return False  # any other error means that the answer is unknown: the caller gets it
        return not stat.S_ISLNK(status.st_mode) or _item(path, directory) is None

    def _ancestor(self, up: int) -> int:
        """Return the directory `up` levels above the parent. Look-ups that go up one level at a
        time open each directory once: from the parent, each would cost its whole depth."""
        if self._above is None or up < self._up:
            start, steps = self.parent, up
        else:
            start, steps = self._above, up - self._up
        if steps:
            above = open_path("../" * steps, start)
            if self._above is not None:
                os.close(self._above)
            self._above, self._up = above, up
        assert self._above is not None
        return self._above

    def item(self) -> str | None:
        """Return the item of the quarantine that the name leads to; None if it leads to none."""
        return _item(self.name, self.parent)


class PathResolver:
    """Resolves paths of callers. `root` is the workspace inside."""

    def __init__(self, root: str) -> None:
        self._root = root

    def path(self, call: SyscallNotice, argument: int) -> str:
        """Return the path that an argument points to. Raise OSError EFAULT, ENAMETOOLONG."""
        return os.fsdecode(procfs.read_string(call.thread, call.arguments[argument], _PATH_MAX))

    def base(self, call: SyscallNotice, directory: int | None, path: str) -> int | None:
        """Open the directory from which the caller resolves `path`; None for an absolute one.

        `directory` is the number of the argument with a descriptor, or None.
        """
        if path.startswith("/"):
            return None
        number = signed(call.arguments[directory]) if directory is not None else AT_FDCWD
        where = "cwd" if number == AT_FDCWD else f"fd/{number}"
        return open_path(f"/proc/{call.thread}/{where}")

    def target(
        self, call: SyscallNotice, directory: int | None, path: str, *, follow: bool
    ) -> ResolvedPath:
        """Resolve `path` as the caller would. Raise `Outside`, OSError."""
        base = self.base(call, directory, path)
        for _ in range(_LINKS_MAX):
            parent, name = _split(path)
            try:
                fd = open_path(parent, base)
            finally:
                if base is not None:
                    os.close(base)
            directory_path = os.readlink(f"/proc/self/fd/{fd}")
            below = self.below(directory_path)
            # A link of /proc leads to the open file of a process, not to its text.
            is_plain = name not in ("", ".", "..") and not directory_path.startswith("/proc/")
            link = _link_at(fd, name) if follow and is_plain else None
            if link is None and (below is None or not is_plain):
                os.close(fd)
                raise Outside
            if link is None and below is not None:
                return ResolvedPath(fd, (*below, name))
            assert link is not None
            base, path = fd, link
        if base is not None:
            os.close(base)
        raise OSError(errno.ELOOP, "too many symlinks")

    def below(self, path: str) -> Parts | None:
        """Return the parts of an absolute path below the workspace; None if it lies elsewhere."""
        if path == self._root:
            return ()
        if not path.startswith(f"{self._root}/"):
            return None
        return tuple(path[len(self._root) + 1 :].split("/"))

    def target_of(self, path_fd: int) -> ResolvedPath | None:
        """Return the name that an O_PATH descriptor was opened by; None for the workspace itself
        and for a file without a name. Raise `Outside`, OSError EROFS if it has only other names.
        """
        path = os.readlink(f"/proc/self/fd/{path_fd}")
        below = self.below(path)
        if below is None:
            raise Outside
        status = os.fstat(path_fd)
        if not below or status.st_nlink == 0:
            return None
        try:
            target = ResolvedPath(open_path(path.rpartition("/")[0]), below)
        except (FileNotFoundError, NotADirectoryError):
            raise _moved() from None
        try:
            is_there = os.path.samestat(status, os.lstat(target.name, dir_fd=target.parent))
        except FileNotFoundError:
            is_there = False
        if not is_there:
            os.close(target.parent)
            raise _moved()
        return target


def _moved() -> OSError:
    return OSError(errno.EROFS, "the file is no longer at its path")


def signed(argument: int, bits: int = 32) -> int:
    """Return an argument of a call as the signed integer that Linux reads."""
    argument &= (1 << bits) - 1
    return argument - (1 << bits) if argument >> (bits - 1) else argument


def open_path(path: str, base: int | None = None, *, follow: bool = True) -> int:
    """Open with O_PATH. For a descriptor of another process, open the file behind it, or a pipe."""
    flags = os.O_PATH | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    return os.open(path, flags, dir_fd=base)


def is_item(link: str) -> bool:
    """Return whether this is the text of a link to a recorded item of this quarantine. The jail can
    choose the text and the files below ITEMS, but not the records."""
    match = _ITEM.fullmatch(link)
    return match is not None and os.path.lexists(f"{RECORDS}/{match[1]}.json")


def own_view(call: SyscallNotice, path: str) -> str:
    """Return `path` so that /proc/self and /dev/fd mean the caller, not the guard."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if path == f"/dev/{name}":
            return f"/proc/{call.thread}/fd/{number}"
    for prefix, process in (
        ("/proc/self/", f"/proc/{call.thread}/"),
        ("/proc/thread-self/", f"/proc/{call.thread}/"),
        ("/dev/fd/", f"/proc/{call.thread}/fd/"),
    ):
        if path.startswith(prefix):
            return process + path[len(prefix) :]
    return path


def descriptor_of(call: SyscallNotice, path: str, directory: int | None, flags: int) -> str | None:
    """Return the descriptor that linkat(2) names by AT_EMPTY_PATH or by /proc/self/fd, as a path;
    None if it names a file otherwise."""
    if not path and directory is not None and flags & AT_EMPTY_PATH:
        return f"/proc/{call.thread}/fd/{signed(call.arguments[directory])}"
    own = own_view(call, path)
    is_descriptor = own != path and own.startswith(f"/proc/{call.thread}/fd/")
    return own if is_descriptor and flags & AT_SYMLINK_FOLLOW else None


def _split(path: str) -> tuple[str, str]:
    parent, slash, name = path.rpartition("/")
    return (parent or slash or "."), name


def _link_at(parent: int, name: str) -> str | None:
    try:
        return os.readlink(name, dir_fd=parent)
    except OSError:
        return None


def _item(name: str, parent: int) -> str | None:
    link = _link_at(parent, name)
    return link if link is not None and is_item(link) else None
