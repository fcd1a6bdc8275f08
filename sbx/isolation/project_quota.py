"""What the file system of the data directory can do for a conversation's limits, and doing it.

    hard      a project quota: linux itself refuses what goes beyond, root's broker sets it
    watched   without one the runtime looks and kills: sbx.runtime.files.disk_limit

The project of a conversation is made from the inode number of its directory of files: no two live
ones share it, and nothing has to be remembered. Charged are the files and what is on its way to
them (`staging`, which a file is renamed from), not the uploads, which have limits of their own.

Why no file system of a loop image for each sandbox: making and mounting one took 64 ms where
creating a sandbox and its first run take 8 in all; one image for the whole data directory, made by
the operator, costs nothing then and gives the same wall. See `REMEDY`.
"""

import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from sbx.isolation.probe import Capabilities, Layer
from sbx.linux import mountinfo, quota
from sbx.linux.mountinfo import MountInfo

REMEDY = (
    "mount the file system of the data directory with prjquota (on ext4 first, while it is not"
    " mounted: tune2fs -O quota,project -Q prjquota DEVICE), or give it one of its own: truncate"
    " -s 50G /var/lib/sbx.img; mkfs.ext4 -O quota,project -E quotatype=prjquota /var/lib/sbx.img;"
    " mount -o loop,prjquota,nosuid,nodev /var/lib/sbx.img /var/lib/sbx. It takes a linux with"
    " CONFIG_QFMT_V2, or xfs with CONFIG_XFS_QUOTA"
)
_CHARGED = ("files", "staging")
_MADE_AHEAD = ("uploads", "uploads/temparea", "uploads/generated")
_WATCHED = "no quota: watched"
_FIRST = 1 << 31  # above what an operator's /etc/projid has
_IDS = 1 << 30


class Mounted(NamedTuple):
    """The file system a directory lies on: its kind, where it comes from, its block device."""

    kind: str
    source: str
    device: str | None


def layer(path: str) -> Layer:
    """Whether this process can give conversations below `path` a hard quota; nothing is changed."""
    kind = mounted(path).kind
    with _directory(path) as fd:
        try:
            held = quota.enforced(fd)
        except OSError:
            held = False
        if not held:
            cause = f"{path} lies on {kind} without project quotas"
            return Layer("disk", False, _WATCHED, cause, REMEDY)
        try:
            quota.used(fd, _FIRST)
        except OSError as error:
            if error.errno == errno.EPERM:
                cause = "only root, in no container, may set the limits of a project"
                return Layer("disk", False, _WATCHED, cause, "start sbx as root")
    return Layer("disk", True, f"project quota of {kind}")


def with_disk(found: Capabilities, told: Mapping[str, Any], path: str) -> Capabilities:
    """What is known when the data directory is, too: `told` by the broker of `path`; pure."""
    layers = [*found.layers, Layer(**told["layer"])]
    io = found.layer("io")
    if io.found and told["device"] is None:
        cause = f"{path} lies on {told['kind']} ({told['source']}), which is no disk to be slowed"
        remedy = "let the data directory lie on a disk"
        layers[layers.index(io)] = Layer("io", False, "no device", cause, remedy)
    return replace(found, layers=tuple(layers))


def mounted(path: str) -> Mounted:
    """Of the mount that `path` lies on; `device` is that of a whole disk, which io limits want."""
    number = os.stat(path).st_dev
    own = f"{os.major(number)}:{os.minor(number)}"
    kind, source = kind_of(own, mountinfo.read())
    return Mounted(kind, source, disk_of(own))


def kinds_at(path: str) -> tuple[str, ...]:
    """The kinds of the file systems mounted at or above `path`, nearest only, and below it."""
    top = os.path.realpath(path)
    above = f"{top.rstrip('/')}/"
    below = (mount.kind for mount in mountinfo.read() if mount.point.startswith(above))
    return tuple(dict.fromkeys([mounted(top).kind, *below]))


def kind_of(device: str, mounts: Sequence[MountInfo]) -> tuple[str, str]:
    """Return the kind and the source of the file system with this device number; pure."""
    kinds = ((mount.kind, mount.source) for mount in mounts if mount.device == device)
    return next(kinds, ("a file system", "unknown"))  # a subvolume of btrfs has another number


def disk_of(device: str, devices: str = "/sys/dev/block") -> str | None:
    """Return the whole disk of a block device, which may be one of its partitions; None for a
    device number without a disk."""
    place = f"{devices}/{device}"
    if not os.path.exists(place):
        return None
    if not os.path.exists(f"{place}/partition"):
        return device
    with open(f"{os.path.realpath(place)}/../dev", encoding="ascii") as number:
        return number.read().strip()


def charge(directory: str, *, bytes_max: int, inodes_max: int) -> bool:
    """Put a conversation's directory, or what conversations share, under a project of its own with
    these limits.

    False for one that holds files already which are of no project: those would not count, and
    could not be renamed. Raises OSError.
    """
    with _directory(directory) as top:
        parts = _CHARGED if _is_there(top, "files") else (".",)
        with _directory(parts[0], top) as files:
            own = _FIRST + os.fstat(files).st_ino % _IDS
            if quota.project(files) != own:
                if not _is_new(files):
                    return False
                for name in _MADE_AHEAD:
                    _assign(name, files, own)
                for name in reversed(parts):  # `files` last: it says that all of it was done
                    _assign(name, top, own)
            quota.limit(files, own, bytes_max=bytes_max, inodes_max=inodes_max)
    return True


def _is_new(files: int) -> bool:
    """Whether nothing is there but the directories that a workspace is made with."""
    if not set(os.listdir(files)) <= {"uploads", "shared"}:
        return False
    made = {"uploads": {"temparea", "generated"}}
    return all(
        set(_names(name, files)) <= made.get(name, set()) for name in (*_MADE_AHEAD, "shared")
    )


def _names(name: str, above: int) -> list[str]:
    try:
        with _directory(name, above) as fd:
            return os.listdir(fd)
    except FileNotFoundError:
        return []


def _assign(name: str, above: int, project: int) -> None:
    try:
        with _directory(name, above) as fd:
            quota.assign(fd, project, inherited=True)
    except FileNotFoundError:
        return


def _is_there(above: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=above, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


@contextmanager
def _directory(path: str, above: int | None = None) -> Iterator[int]:
    """No jail of it lives yet, so nobody swaps what lies below; a symlink is none of ours."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(path, flags, dir_fd=above)
    try:
        yield fd
    finally:
        os.close(fd)
