"""User namespaces that no process lives in: for a zygote to enter, and for idmapped mounts.

An idmapped mount shows other owners than the file system has on disk. The broker uses one to show
the owner of a host directory as the uid of a jail:

    on disk                      in the jail's mount             files that the jail makes, on disk
    the directory's uid and gid  the jail's uid and gid          the directory's uid and gid
    every other uid and gid      none: the overflow ids (65534)  -

Linux lets no process write to a file whose uid or gid has no place in the map, or make a name in
such a directory. The mode bits for others still decide about reading.

The process in the jail keeps its own host uid. Only the view of this one mount differs.
"""

import errno
import os
import socket
from collections.abc import Callable, Sequence

from sbx.errors import Broken, Denied
from sbx.isolation.broker import bind_staging
from sbx.linux import mounts, namespaces

Ids = tuple[int, int]  # uid and gid

_REMEDY = "give the directory to another user (chown), or copy it to one of your own"
_CAUSES = {
    errno.ENOSYS: ("this Linux has no idmapped mounts", "use Linux 5.12 or later"),
    errno.EPERM: (
        "this process may not idmap it: it is root in a user namespace only, as in a rootless"
        " container, or the mount is idmapped already",
        "start sbx as root of the host",
    ),
    errno.ENOSPC: (
        "no user namespace can be made",
        "raise the limit: sysctl user.max_user_namespaces",
    ),
}


def make(enter: Callable[[], object], write_maps: Callable[[int], object]) -> int:
    """Return an fd of a new user namespace. `enter` creates it in a child process; `write_maps`
    gets the pid of the child and runs in the caller, where a root broker may map any id.

    Only a process with one thread may call this. Raise OSError.
    """
    ours, its = socket.socketpair()
    with ours, its:
        pid = os.fork()
        if pid == 0:
            try:
                ours.close()
                enter()
                its.send(b"made")
                its.recv(1)
            except OSError as error:
                its.send((error.errno or errno.EPERM).to_bytes(4, "big"))
            finally:
                os._exit(0)
        its.close()
        try:
            reply = ours.recv(4)
            if reply != b"made":
                number = int.from_bytes(reply, "big") or errno.EPERM
                raise OSError(number, "no user namespace can be made")
            write_maps(pid)
            return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            ours.close()
            os.waitpid(pid, 0)


def map_owner(
    source: str, expected: Sequence[int] | None, become: Ids, shown: str | None = None
) -> int:
    """Return an fd of a user namespace for mounts of `source` that show its owner as `become`.

    `expected` is the (device, inode) that the runtime opened, `shown` the path for messages. A
    detached clone is idmapped once, so that a refusal comes before anything starts. Raise Denied
    `workspace_owned_by_root` if Linux or the file system refuses, Broken `path_replaced`, and
    OSError.
    """
    tree = mounts.open_tree(source)
    try:
        status = os.fstat(tree)
        if expected is not None and [status.st_dev, status.st_ino] != list(expected):
            raise bind_staging.replaced(source)
        owner = status.st_uid, status.st_gid
        try:
            userns = _for_owner(owner, become)
        except OSError as error:
            raise _refusal(shown or source, owner[0], error) from error
        try:
            mounts.restrict_tree(tree, read_only=False, userns=userns)
        except OSError as error:
            os.close(userns)
            raise _refusal(shown or source, owner[0], error) from error
        return userns
    finally:
        os.close(tree)


def of(mapped: bool, owners: int | None) -> int | None:
    """Return the user namespace for one mount of a sandbox. `owners`: the one of the sandbox.

    Raise Broken for a mapped mount in a sandbox without one.
    """
    if mapped and owners is None:
        raise Broken("no directory of this sandbox was mapped")
    return owners if mapped else None


def _for_owner(owner: Ids, become: Ids) -> int:
    return make(
        lambda: namespaces.unshare(namespaces.Namespace.USER),
        lambda pid: namespaces.map_one(pid, owner, become),
    )


def _refusal(source: str, uid: int, error: OSError) -> Denied:
    from sbx.isolation import project_quota

    if error.errno in _CAUSES:
        cause, remedy = _CAUSES[error.errno]
    elif error.errno == errno.EINVAL:
        kinds = ", ".join(project_quota.kinds_at(source))
        cause = f"not every file system there ({kinds}) has idmapped mounts on this Linux"
        remedy = "keep the directory on ext4, xfs, btrfs, or tmpfs (Linux 6.3)"
    else:
        cause, remedy = f"mount_setattr failed: {error.strerror}", "run `sbx doctor`"
    owner = "root" if uid == 0 else f"uid {uid}"
    return Denied(
        f"'{source}' belongs to {owner}, and no jail can be given it: {cause}",
        code="workspace_owned_by_root",
        hint=f"{remedy}; or {_REMEDY}",
        details={"path": source, "errno": error.errno},
    )
