"""Files in a directory of root through which code inside would get rights of root.

A jail that is shown such a file as its own cannot make another one: its filter refuses set-id bits,
and it has no capability. But it could change this one. write(2) takes the bits away; a write
through a shared mapping (mmap(2)) does not. Every user of the host could then run the code of the
jail as the owner of the file.

A socket of root that nobody else may connect to is open to a jail that is shown it as its own: a
service of root, docker's for one, may listen there.
"""

import errno
import os
import stat
import time
from contextlib import suppress
from typing import NamedTuple

from sbx.errors import Denied, Unavailable
from sbx.linux import openat2
from sbx.workspace.host_directory import HostDirectory
from sbx.workspace.refusals import translated

_DEADLINE_S = 30.0
_RESOLVE = (
    openat2.RESOLVE_BENEATH | openat2.RESOLVE_NO_SYMLINKS | openat2.RESOLVE_NO_MAGICLINKS
)  # mounts below it are crossed: the jail is shown them as well
_CAPABILITIES = "security.capability"


def refuse_rights(directory: HostDirectory, *, deadline_s: float = _DEADLINE_S) -> None:
    """Look at all files below the directory that belong to its owner.

    Raises Denied `workspace_has_set_id` for a set-user-id or set-group-id file and for one with
    file capabilities, Denied `workspace_has_socket` for a socket, and Unavailable
    `workspace_too_large` when there are too many to look at.
    """
    with translated(str(directory.path)):
        found = _first(directory.fd, directory.owner[0], time.monotonic() + deadline_s)
    if found is None:
        return
    name = os.fsdecode(found.name)
    if found.is_socket:
        raise Denied(
            f"'{directory.path}/{name}' is a socket, and code inside could connect to it as its"
            " owner",
            code="workspace_has_socket",
            hint=f"end the program that listens there, and remove it: {name}",
            details={"path": f"{directory.path}/{name}"},
        )
    raise Denied(
        f"'{directory.path}/{name}' runs with the rights of its owner (a set-id bit or file"
        " capabilities), and code inside could change it",
        code="workspace_has_set_id",
        hint=f"take them away (chmod ug-s, setcap -r) or move the file elsewhere: {name}",
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
                "the directory has more files than can be looked at before a start",
                code="workspace_too_large",
                hint="name a smaller directory",
            )
        with suppress(FileNotFoundError):  # removed meanwhile
            fd = openat2.openat2(top, name, os.O_RDONLY | os.O_DIRECTORY, resolve=_RESOLVE)
            try:
                found = _first_in(fd, name, uid, below)
            finally:
                os.close(fd)
            if found is not None:
                return found
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
                seen = entry.stat(follow_symlinks=False)
                is_socket = stat.S_ISSOCK(seen.st_mode)
                if seen.st_uid == uid and (is_socket or _gives_rights(fd, last, seen.st_mode)):
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
