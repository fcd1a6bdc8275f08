"""/proc/PID/mountinfo, see proc_pid_mountinfo(5): the mount points and their file systems.

The device and the root of a mount identify a directory within its file system. A bind mount of
/etc/cron.d has the device of / and the root /etc/cron.d, wherever it is mounted. The device alone
identifies only the file system, which several subvolumes or bind mounts may share.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

Source = tuple[str, str]  # the device of a file system, and a path from its root


class MountInfo(NamedTuple):
    """`root` is the path in the file system `device` that is mounted at `point`. `kind` is the type
    of the file system, and `source` the name of its device."""

    point: str
    device: str
    root: str
    kind: str = ""
    source: str = ""


def read(pid: int | str = "self") -> tuple[MountInfo, ...]:
    """Return the mounts of a process in order; an empty tuple if /proc cannot be read."""
    try:
        with open(f"/proc/{pid}/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
            return parse(lines)
    except OSError:
        return ()


def parse(lines: Iterable[str]) -> tuple[MountInfo, ...]:
    return tuple(map(_parse_line, lines))


def _parse_line(line: str) -> MountInfo:
    fields, _, rest = line.partition(" - ")
    _, _, device, root, point, *_ = fields.split(" ")
    kind, source, *_ = [*rest.split(" "), "", ""]
    return MountInfo(_unescaped(point), device, _unescaped(root), kind, source)


def source_of(path: str, mounts: Sequence[MountInfo]) -> Source | None:
    """Return the source of a path that contains no symlinks.

    If several mounts have the same nearest point above the path, the last one hides the others.
    """
    above = [mount for mount in mounts if is_below(path, mount.point)]
    if not above:
        return None
    nearest = max(reversed(above), key=lambda mount: len(mount.point))
    return nearest.device, _joined(nearest.root, path[len(nearest.point.rstrip("/")) :])


def paths_of(source: Source, mounts: Sequence[MountInfo]) -> Iterator[str]:
    """Yield the paths at which a source is visible."""
    device, path = source
    for mount in mounts:
        if mount.device == device and is_below(path, mount.root):
            seen = _joined(mount.point, path[len(mount.root.rstrip("/")) :])
            if source_of(seen, mounts) == source:
                yield seen


def is_below(path: str, top: str) -> bool:
    """Return whether `path` is `top` or below it."""
    return path == top or path.startswith(f"{top.rstrip('/')}/")


def _joined(top: str, below: str) -> str:
    return "/" + "/".join(part for part in f"{top}/{below}".split("/") if part)


def _unescaped(field: str) -> str:
    for escape, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(escape, character)
    return field
