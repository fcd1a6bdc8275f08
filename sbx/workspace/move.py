"""Move or rename a path: by one rename(2) if possible, else by a copy and a removal."""

import errno
import os
import stat
from collections.abc import Callable

from sbx.errors import Denied
from sbx.linux.descriptors import closing
from sbx.linux.renameat2 import rename_new
from sbx.workspace.copy import copy, refuse_into_itself
from sbx.workspace.errors import file_exists, is_a_directory, translate
from sbx.workspace.safe_open import encoded
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
    """Move the path `of` to the path `to`, and create the missing parents. Move a symlink itself.

    Without `overwrite`, `to` must not exist. With it, a file replaces a file in one step, and a
    directory is never replaced. `by_copy`: copy a directory and then remove it, even if a rename is
    possible. `check` is the one of `copy`. Raises NotFound, InvalidPath, Conflict `file_exists`,
    Denied.
    """
    refuse_into_itself(source, of, target, to)
    source_path, target_path = source.shown(of), target.shown(to)
    try:
        above = source.opener(source.fd, of[:-1], os.O_PATH | os.O_DIRECTORY)
    except OSError as error:
        raise translate(error, source_path) from error
    with closing(above):
        # rename(2) would replace an empty directory by a directory.
        overwrite = overwrite and not _is_directory(above, encoded(of[-1]), source_path)
        try:
            parent = target.parent(to[:-1])
        except OSError as error:
            raise translate(error, target_path) from error
        try:
            if not by_copy or not _is_directory(above, encoded(of[-1]), source_path):
                _rename(above, encoded(of[-1]), parent, encoded(to[-1]), overwrite=overwrite)
                return
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise file_exists(target_path) from error
            if error.errno == errno.EISDIR:
                raise is_a_directory(target_path) from error
            if error.errno != errno.EXDEV:
                raise translate(error, source_path) from error
        finally:
            os.close(parent)
    copied = copy(
        source,
        of,
        target,
        to,
        file_max=file_max,
        total_max=total_max,
        overwrite=overwrite,
        check=check,
    )
    if not copied.complete:
        raise Denied(
            f"not all of '{source_path}' could be copied to the target of the move",
            code="file_not_permitted",
            hint="the copied part is at the target; the source is unchanged",
        )
    source.delete(of)


def _is_directory(above: int, name: bytes, shown: str) -> bool:
    """Return whether the name is a directory. Raises NotFound."""
    try:
        status = os.stat(name, dir_fd=above, follow_symlinks=False)
    except OSError as error:
        raise translate(error, shown) from error
    return stat.S_ISDIR(status.st_mode)


def _rename(above: int, name: bytes, parent: int, new: bytes, *, overwrite: bool) -> None:
    if overwrite:
        os.rename(name, new, src_dir_fd=above, dst_dir_fd=parent)
    else:
        rename_new(above, name, parent, new)
