"""Move or rename: one step of linux where it can be, else a copy and then a removal."""

import errno
import os
import stat
from collections.abc import Callable

from sbx.errors import Denied
from sbx.linux.renameat2 import rename_new
from sbx.workspace.beneath import encoded
from sbx.workspace.copying import copy, refuse_into_itself
from sbx.workspace.refusals import file_exists, is_a_directory, translate
from sbx.workspace.tree import Relative, Tree


def move(
    source: Tree,
    of: Relative,
    target: Tree,
    to: Relative,
    *,
    file_max: int,
    total_max: int,
    overwrite: bool,
    check: Callable[[Tree], None] | None = None,
    by_copy: bool = False,
) -> None:
    """Give what `of` names the name `to`, with the directories that needs; a symlink is moved
    itself.

    Without `overwrite` nothing may have that name; with it, a file gives way to a file in one step,
    and a directory never does. `by_copy`: copy it in any case, and remove it then; `check` as in
    `copy`. Raises NotFound, InvalidPath, Conflict `file_exists`, Denied.
    """
    refuse_into_itself(source, of, target, to)
    moved, shown = source.shown(of), target.shown(to)
    try:
        above = source.opener(source.fd, of[:-1], os.O_PATH | os.O_DIRECTORY)
    except OSError as error:
        raise translate(error, moved) from error
    try:
        # A directory would take the place of an empty one.
        overwrite = overwrite and not _is_directory(above, encoded(of[-1]), moved)
        try:
            parent = target.parent(to[:-1])
        except OSError as error:
            raise translate(error, shown) from error
        try:
            if not by_copy or not _is_directory(above, encoded(of[-1]), moved):
                _rename(above, encoded(of[-1]), parent, encoded(to[-1]), overwrite=overwrite)
                return
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise file_exists(shown) from error
            if error.errno == errno.EISDIR:
                raise is_a_directory(shown) from error
            if error.errno != errno.EXDEV:
                raise translate(error, moved) from error
        finally:
            os.close(parent)
    finally:
        os.close(above)
    told = copy(
        source,
        of,
        target,
        to,
        file_max=file_max,
        total_max=total_max,
        overwrite=overwrite,
        check=check,
    )
    if not told.complete:
        raise Denied(
            f"not all of '{moved}' could be copied to where it was to be moved",
            code="file_not_permitted",
            hint="what could be is at the target; the source is as it was",
        )
    source.delete(of)


def _is_directory(above: int, name: bytes, shown: str) -> bool:
    """Raises NotFound."""
    try:
        found = os.stat(name, dir_fd=above, follow_symlinks=False)
    except OSError as error:
        raise translate(error, shown) from error
    return stat.S_ISDIR(found.st_mode)


def _rename(above: int, name: bytes, parent: int, new: bytes, *, overwrite: bool) -> None:
    if overwrite:
        os.rename(name, new, src_dir_fd=above, dst_dir_fd=parent)
    else:
        rename_new(above, name, parent, new)
