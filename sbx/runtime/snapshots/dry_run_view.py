"""Directories that the jail of a dry run may see live, although they are not part of its copy.

A dry run must change nothing outside. Read-only access to regular files ensures that. A Unix socket
or a FIFO does not, because connect(2) and a read of a FIFO do not write to the file system.
"""

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from sbx.errors import SbxError
from sbx.runtime.files.open_files import OpenFiles
from sbx.workspace.paths import UPLOADS, UPLOADS_APART
from sbx.workspace.tree import Tree
from sbx.workspace.walk import Walk

_ENTRIES_MAX = 100_000
_DEADLINE_S = 5.0


def is_inert(directory: Path, identity: tuple[int, int], written: Iterable[Path]) -> bool:
    """Return whether `directory`, known by device and inode, holds files, directories and symlinks
    only, and neither lies in one of the directories `written` by live code nor contains one.

    A directory that is too large to look through, has another mount in it or cannot be read
    completely is not.
    """
    if any(_overlap(directory, path) for path in written):
        return False
    walk = Walk(max_entries=_ENTRIES_MAX, deadline_s=_DEADLINE_S)
    try:
        with Tree.at(directory, view=str(directory)) as tree:
            status = os.fstat(tree.fd)
            if (status.st_dev, status.st_ino) != identity:
                return False
            for _, entry in tree.walk(walk):
                kinds = (stat.S_ISREG, stat.S_ISDIR, stat.S_ISLNK)
                if not any(is_kind(entry.st_mode) for is_kind in kinds):
                    return False
    except (OSError, SbxError):
        return False
    return walk.complete


def uploads_of(opened: OpenFiles) -> Tree:
    _, places = opened.files.places(UPLOADS if opened.host_directory is None else UPLOADS_APART)
    return places[0][0]


def uploads_are_inert(opened: OpenFiles) -> bool:
    """Return whether a dry run may see the uploads live. Our own hold regular files only, which no
    code inside writes to."""
    if opened.uploads is not None:
        return True
    host = opened.host_directory
    identity = opened.identities[str(opened.uploads_path)]
    return is_inert(opened.uploads_path, identity, [] if host is None else [host.path])


def _overlap(path: Path, other: Path) -> bool:
    first, second = Path(os.path.realpath(path)), Path(os.path.realpath(other))
    return first.is_relative_to(second) or second.is_relative_to(first)
