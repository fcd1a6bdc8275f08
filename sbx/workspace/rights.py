"""Refuse directories of root with files that would give code inside the rights of root.

An idmapped mount shows such a file to the jail as its own. The jail cannot create another such
file: its filter refuses set-id bits, and it has no capabilities. But it could change this file.
write(2) clears the bits, but a write through a shared mapping (mmap(2)) does not. Every user of the
host could then run the code of the jail as the owner of the file.

The jail could also connect to a socket of root that no other user may connect to. A service of root
may listen there, for example the docker daemon.
"""

import errno
import os
import stat
import time
from contextlib import suppress
from typing import NamedTuple

from sbx.errors import Denied, Unavailable
from sbx.linux import openat2
from sbx.linux.descriptors import closing
from sbx.workspace.errors import translated
from sbx.workspace.host_directory import HostDirectory

_DEADLINE_S = 30.0
_RESOLVE = (
    openat2.RESOLVE_BENEATH | openat2.RESOLVE_NO_SYMLINKS | openat2.RESOLVE_NO_MAGICLINKS
)  # cross mounts: the jail sees them, too
_CAPABILITIES = "security.capability"


def refuse_rights(directory: HostDirectory, *, deadline_s: float = _DEADLINE_S) -> None:
    """Check all files below the directory that belong to its owner.

    Raises Denied `workspace_has_set_id` for a set-user-id or set-group-id file and for one with
    file capabilities, Denied `workspace_has_socket` for a socket, and Unavailable
    `workspace_too_large` if there are too many files for the deadline.
    """
    with translated(str(directory.path)):
        finding = _first(directory.fd, directory.owner[0], time.monotonic() + deadline_s)
    if finding is None:
        return
    name = os.fsdecode(finding.name)
    if finding.is_socket:
        raise Denied(
            f"'{directory.path}/{name}' is a socket, and code inside could connect to it as its"
            " owner",
            code="workspace_has_socket",
            hint=f"stop the program that listens on it, and remove the socket: {name}",
            details={"path": f"{directory.path}/{name}"},
        )
    raise Denied(
        f"'{directory.path}/{name}' runs with the rights of its owner (a set-id bit or file"
        " capabilities), and code inside could change it",
        code="workspace_has_set_id",
        hint=f"remove the rights (chmod ug-s, setcap -r), or move the file elsewhere: {name}",
        details={"path": f"{directory.path}/{name}"},
    )


class _Found(NamedTuple):
    name: bytes
    is_socket: bool


def _first(top: int, uid: int, deadline: float) -> _Found | None:
    below = [b"."]
    while below:
        name = below.pop()
        if time.monotonic() > deadline:
            raise Unavailable(
                "the directory has more files than sbx can check before a start",
                code="workspace_too_large",
                hint="name a smaller directory",
            )
        with suppress(FileNotFoundError):  # removed meanwhile
            with closing(
                openat2.openat2(top, name, os.O_RDONLY | os.O_DIRECTORY, resolve=_RESOLVE)
            ) as fd:
                finding = _first_in(fd, name, uid, below)
            if finding is not None:
                return finding
    return None


def _first_in(fd: int, place: bytes, uid: int, below: list[bytes]) -> _Found | None:
    with os.scandir(fd) as entries:
        for entry in entries:
            last = os.fsencode(entry.name)
            if entry.is_dir(follow_symlinks=False):
                below.append(b"%s/%s" % (place, last))
                continue
            if entry.is_symlink():
                continue
            with suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                is_socket = stat.S_ISSOCK(status.st_mode)
                if status.st_uid == uid and (is_socket or _gives_rights(fd, last, status.st_mode)):
                    return _Found((b"%s/%s" % (place, last)).removeprefix(b"./"), is_socket)
    return None


def _gives_rights(parent: int, name: bytes, mode: int) -> bool:
    if not stat.S_ISREG(mode):
        return False
    if mode & (stat.S_ISUID | stat.S_ISGID):
        return True
    try:
        path = b"/proc/self/fd/%d/%s" % (parent, name)
        return bool(os.getxattr(path, _CAPABILITIES, follow_symlinks=False))
    except OSError as error:
        if error.errno in (errno.ENODATA, errno.EOPNOTSUPP):
            return False
        raise
