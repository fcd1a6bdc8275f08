"""Limit the files of a conversation by a project quota of the data directory's file system.

    hard      a project quota: Linux itself refuses further writes; root's broker sets it
    watched   without one the runtime measures and kills: sbx.runtime.files.disk_limit

The project id of a conversation comes from the inode number of its directory of files: no two live
conversations share it, and no record is needed. The quota counts the files and those on the way to
them (`staging`, from which they are renamed), not the uploads, which have separate limits.

Why no loop image for each sandbox: its creation and mount took 64 ms, and a sandbox with its first
run takes 8 ms. One image for the whole data directory gives the same wall. See `REMEDY`.
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
    " mounted: tune2fs -O quota,project -Q prjquota DEVICE), or give it a separate one: truncate"
    " -s 50G /var/lib/sbx.img; mkfs.ext4 -O quota,project -E quotatype=prjquota /var/lib/sbx.img;"
    " mount -o loop,prjquota,nosuid,nodev /var/lib/sbx.img /var/lib/sbx. It takes a Linux with"
    " CONFIG_QFMT_V2, or xfs with CONFIG_XFS_QUOTA"
)
_CHARGED = ("files", "staging")
_CREATED_FIRST = ("uploads", "uploads/temparea", "uploads/generated")
_WATCHED = "no quota: watched"
_FIRST = 1 << 31  # above the ids of an operator's /etc/projid
_IDS = 1 << 30


class Mounted(NamedTuple):
    """The file system of a directory: its kind, its source, its block device."""

    kind: str
    source: str
    device: str | None


def layer(path: str) -> Layer:
    """Return whether this process can set hard quotas below `path`. Change nothing."""
    kind = mounted(path).kind
    with _directory(path) as fd:
        try:
            enforced = quota.enforced(fd)
        except OSError:
            enforced = False
        if not enforced:
            cause = f"{path} lies on {kind} without project quotas"
            return Layer("disk", False, _WATCHED, cause, REMEDY)
        try:
            quota.used(fd, _FIRST)
        except OSError as error:
            if error.errno == errno.EPERM:
                cause = "only root, in no container, may set the limits of a project"
                return Layer("disk", False, _WATCHED, cause, "start sbx as root")
    return Layer("disk", True, f"project quota of {kind}")


def with_disk(capabilities: Capabilities, facts: Mapping[str, Any], path: str) -> Capabilities:
    """Add the facts about the data directory `path`, which the broker reports; pure."""
    layers = [*capabilities.layers, Layer(**facts["layer"])]
    io = capabilities.layer("io")
    if io.available and facts["device"] is None:
        place = f"{path} lies on {facts['kind']} ({facts['source']})"
        cause = f"{place}, which is not a disk that can be slowed"
        remedy = "put the data directory on a disk"
        layers[layers.index(io)] = Layer("io", False, "no device", cause, remedy)
    return replace(capabilities, layers=tuple(layers))


def mounted(path: str) -> Mounted:
    """Return the file system of `path`; `device` is the whole disk, as io limits need it."""
    number = os.stat(path).st_dev
    own = f"{os.major(number)}:{os.minor(number)}"
    kind, source = kind_of(own, mountinfo.read())
    return Mounted(kind, source, disk_of(own))


def kinds_at(path: str) -> tuple[str, ...]:
    """Return the kinds of the nearest file system at or above `path`, and of all below it."""
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
    """Put a conversation's directory, or the shared one, under a separate project with limits.

    Return False if it already has files without a project: those would not count, and could not be
    renamed. Raise OSError.
    """
    with _directory(directory) as top:
        parts = _CHARGED if _is_there(top, "files") else (".",)
        with _directory(parts[0], top) as files:
            own = _FIRST + os.fstat(files).st_ino % _IDS
            if quota.project(files) != own:
                if not _is_new(files):
                    return False
                for name in _CREATED_FIRST:
                    _assign(name, files, own)
                for name in reversed(parts):  # `files` last: it marks the end
                    _assign(name, top, own)
            quota.limit(files, own, bytes_max=bytes_max, inodes_max=inodes_max)
    return True


def _is_new(files: int) -> bool:
    """Return whether it has only the directories of a new workspace."""
    if not set(os.listdir(files)) <= {"uploads", "shared"}:
        return False
    created = {"uploads": {"temparea", "generated"}}
    return all(
        set(_names(name, files)) <= created.get(name, set()) for name in (*_CREATED_FIRST, "shared")
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
    """Open a directory. No jail of it lives yet, so no process replaces it; refuse symlinks."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(path, flags, dir_fd=above)
    try:
        yield fd
    finally:
        os.close(fd)
