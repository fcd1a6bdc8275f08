"""The place for directories that a jail's own uid cannot reach by their path.

bwrap runs as the jail's host uid and resolves every source path as that uid, so an interpreter or a
data directory below root's home (mode 0700) is out of its reach; an fd does not help
(bwrap 0.8: "Can't find source path"). In the broker's private mount namespace each such directory
is bound below a tmpfs that anyone can walk.

The tmpfs is on /sys/kernel: a directory of every host that all users can enter, and that has no
workspace below. So nothing of the host is hidden from a later launch, and nothing of sbx is left on
the host when the broker is killed.
"""

import os
import stat
from collections.abc import Sequence
from contextlib import suppress

from sbx.errors import Broken
from sbx.guest import shares
from sbx.linux import mounts

STAGE = "/sys/kernel"
DEVPTS = "pts"


def open_stage() -> None:
    """Mount the tmpfs. This needs a private mount namespace and the right to mount in it."""
    mounts.tmpfs(STAGE, "mode=0755")


def place(jail: str, index: int | str) -> str:
    """Return the place of a jail's `index`-th mount, or of its devpts."""
    return f"{STAGE}/{jail}/{index}"


def mount_devpts(jail: str, *, ptys_max: int) -> None:
    """Mount a limited devpts for one jail at `place(jail, DEVPTS)`: bubblewrap cannot limit the one
    that its --dev mounts."""
    target = place(jail, DEVPTS)
    os.makedirs(target, mode=0o755)
    mounts.devpts(target, ptys_max=ptys_max)


def limit_tmpfs(jail: str, args: Sequence[str], owner: tuple[int, int]) -> list[str]:
    """Return the words of bubblewrap with its tmpfs replaced by ours, which have a limit of names,
    and belong to the ids of the jail."""
    words = list(args)
    for at in range(len(words) - 6, -1, -1):
        # Not the value of a variable: "--setenv NAME --tmpfs" has no such words before it.
        if words[at : at + 6 : 2] != ["--perms", "--size", "--tmpfs"]:
            continue
        mode, size, path = words[at + 1], words[at + 3], words[at + 5]
        target = place(jail, f"tmpfs{at}")
        os.makedirs(target, mode=0o755)
        limits = f"size={size},nr_inodes={shares.TMPFS_NAMES_MAX}"
        mounts.tmpfs(target, f"mode={mode},uid={owner[0]},gid={owner[1]},{limits}")
        words[at : at + 6] = ["--bind", target, path]
    return words


def bind(
    source: str, target: str, expected: tuple[int, int] | None, userns: int | None = None
) -> None:
    """Bind one source to its place, idmapped with `userns` if there is one.

    `expected` is the (device, inode) that the runtime opened and checked: the directory's owner
    could have put another in its place since.
    """
    status = os.stat(source)
    os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
    if stat.S_ISDIR(status.st_mode):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    if userns is None:
        mounts.bind(source, target)
    else:
        _bind_mapped(source, target, userns)
    bound = os.stat(target)
    if expected is not None and (bound.st_dev, bound.st_ino) != expected:
        raise replaced(source)


def _bind_mapped(source: str, target: str, userns: int) -> None:
    """Idmap a detached mount, because an attached one cannot be. bwrap's bind keeps the map."""
    tree = mounts.open_tree(source)
    try:
        mounts.restrict_tree(tree, read_only=False, userns=userns)
        place = os.open(target, os.O_PATH | os.O_CLOEXEC)
        try:
            mounts.attach(tree, place)
        finally:
            os.close(place)
    finally:
        os.close(tree)


def replaced(source: str) -> Broken:
    """Return the error for a source that is not the one that the runtime opened."""
    return Broken(
        f"{source} was replaced while its sandbox was being started",
        code="path_replaced",
        hint="start again; a user who can rename directories there can do this",
    )


def clear(jail: str) -> None:
    """Undo every bind of a jail. A mount that is in use inside stays there until its end."""
    top = f"{STAGE}/{jail}"
    if not os.path.isdir(top):
        return
    for name in os.listdir(top):
        target = f"{top}/{name}"
        is_directory = os.path.isdir(target)
        with suppress(OSError):  # EINVAL: the bind itself had failed
            mounts.detach(target)
        os.rmdir(target) if is_directory else os.unlink(target)
    os.rmdir(top)
