"""Files in a directory of the host whose program runs with more rights than its caller has.

A jail that is shown such a file as its own cannot make another one: its filter refuses set-id bits,
and it has no capability. But it could change this one. write(2) takes the bits away; a write
through a shared mapping (mmap(2)) does not. Every user of the host could then run the code of the
jail as the owner of the file.
"""

import errno
import os
import stat
import time
from contextlib import suppress

from sbx.errors import Denied, Unavailable
from sbx.linux import openat2
from sbx.workspace.host_directory import HostDirectory
from sbx.workspace.refusals import translated

_DEADLINE_S = 30.0
_RESOLVE = (
    openat2.RESOLVE_BENEATH | openat2.RESOLVE_NO_SYMLINKS | openat2.RESOLVE_NO_MAGICLINKS
)  # mounts below it are crossed: the jail is shown them as well
_CAPABILITIES = "security.capability"


def refuse_set_id(directory: HostDirectory, *, deadline_s: float = _DEADLINE_S) -> None:
    """Look at all files below the directory that belong to its owner.

    Raises Denied `workspace_has_set_id` for a set-user-id or set-group-id file and for one with
    file capabilities, and Unavailable `workspace_too_large` when there are too many to look at.
    """
    with translated(str(directory.path)):
        found = _first(directory.fd, directory.owner[0], time.monotonic() + deadline_s)
    if found is not None:
        name = os.fsdecode(found)
        raise Denied(
            f"'{directory.path}/{name}' runs with the rights of its owner (a set-id bit or file"
            " capabilities), and code inside could change it",
            code="workspace_has_set_id",
            hint=f"take them away (chmod ug-s, setcap -r) or move the file elsewhere: {name}",
            details={"path": f"{directory.path}/{name}"},
        )


def _first(top: int, uid: int, deadline: float) -> bytes | None:
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


def _first_in(fd: int, place: bytes, uid: int, below: list[bytes]) -> bytes | None:
    with os.scandir(fd) as entries:
        for entry in entries:
            last = os.fsencode(entry.name)
            if entry.is_dir(follow_symlinks=False):
                below.append(b"%s/%s" % (place, last))
            elif entry.is_file(follow_symlinks=False):
                with suppress(FileNotFoundError):
                    seen = entry.stat(follow_symlinks=False)
                    if seen.st_uid == uid and _gives_rights(fd, last, seen.st_mode):
                        return (b"%s/%s" % (place, last)).removeprefix(b"./")
    return None


def _gives_rights(parent: int, name: bytes, mode: int) -> bool:
    if mode & (stat.S_ISUID | stat.S_ISGID):
        return True
    try:
        path = b"/proc/self/fd/%d/%s" % (parent, name)
        return bool(os.getxattr(path, _CAPABILITIES, follow_symlinks=False))
    except OSError as error:
        if error.errno in (errno.ENODATA, errno.EOPNOTSUPP):
            return False
        raise
