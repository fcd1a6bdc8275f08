"""The mount namespace of the process that parses HTTP: a small view of the host.

A directory below the root is either visible as a whole, read-only, or covered by an empty tmpfs
that shows only the named paths. Landlock restricts which of them may be read. But it does not
restrict connections to Unix sockets, so their directories are covered.
"""

import os
import stat
from collections.abc import Collection, Iterable, Mapping

from msgspec import Struct

from sbx.linux import mounts, namespaces

_TMPFS = "mode=0755,size=256k"


class _Tree(Struct, frozen=True):
    """A detached clone of the mount tree at `path`. `read_only` None: unchanged."""

    path: str
    fd: int
    read_only: bool | None

    @classmethod
    def of(cls, path: str, *, read_only: bool | None) -> "_Tree":
        return cls(path, mounts.open_tree(path), read_only)

    def make_place(self) -> None:
        if stat.S_ISDIR(os.fstat(self.fd).st_mode):
            os.makedirs(self.path, exist_ok=True)
        elif not os.path.exists(self.path):
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            os.close(os.open(self.path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o444))

    def attach(self) -> None:
        if self.read_only is not None:
            mounts.restrict_tree(self.fd, read_only=self.read_only)
        place = os.open(self.path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            mounts.attach(self.fd, place)
        finally:
            os.close(place)
            os.close(self.fd)


def show_only(
    whole: Collection[str],
    readable: Iterable[str],
    writable: Iterable[str],
    *,
    devices: Iterable[str],
    links: Mapping[str, str],
) -> None:
    """Move to a new mount namespace, irrevocably, and keep only the named paths in it.

    The directories `whole` below the root stay as they are. `links` are symlinks to create (path:
    target); symlinks on the way to a named path are created as well. Raise OSError.
    """
    namespaces.unshare(namespaces.Namespace.MOUNT)
    mounts.private("/")
    with os.scandir("/") as tops:
        hidden = [
            top.path for top in tops if top.is_dir(follow_symlinks=False) and top.path not in whole
        ]
    named = {path: True for path in readable if _is_below(os.path.realpath(path), hidden)}
    named.update(dict.fromkeys(writable, False))
    real = {path: os.path.realpath(path) for path in named}
    read_only = {real[path]: named[path] for path in named}
    trees = [
        *(_Tree.of(path, read_only=None) for path in devices),
        *(_Tree.of(path, read_only=read_only[path]) for path in sorted(read_only)),
    ]
    for top in hidden:
        mounts.tmpfs(top, _TMPFS)
    places = [tree.path for tree in trees]
    for tree in trees:
        if not _is_below(tree.path, [other for other in places if other != tree.path]):
            tree.make_place()
    for path, target in {**links, **{path: to for path, to in real.items() if path != to}}.items():
        if _is_below(path, hidden) and not _is_below(path, places) and not os.path.lexists(path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.symlink(target, path)
    mounts.make_read_only("/")
    for tree in trees:  # sorted: a tree inside another one comes after it
        tree.attach()


def _is_below(path: str, tops: Iterable[str]) -> bool:
    return any(path == top or path.startswith(f"{top}/") for top in tops)
