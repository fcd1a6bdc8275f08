"""Permissions of a file or a directory: read, write and execute, and never what would give rights.

Through the inode that was looked at, so no name can be swapped; and of the jail's own files only.
"""

import os
import stat

from sbx.errors import BadRequest, Denied
from sbx.workspace.refusals import not_a_file, translated, wrong_path
from sbx.workspace.tree import Relative, Tree


def chmod(tree: Tree, relative: Relative, mode: int, *, in_host_directory: bool = False) -> None:
    """Set the permissions to `mode`, 0 to 0o777. `in_host_directory`: not of a file that has
    further names, because they may lie outside.

    Raises Denied `set_id_refused` for a set-user-id, set-group-id or sticky bit, BadRequest
    `invalid_mode`, and Denied `file_not_permitted` for a file that is not the sandbox's own.
    """
    check_mode(mode)
    path = tree.shown(relative)
    uid = os.geteuid() if tree.owner is None else tree.owner[0]
    with translated(path):
        fd = tree.hold(relative)
        try:
            found = os.fstat(fd)
            if stat.S_ISLNK(found.st_mode):
                raise wrong_path(path, "symlink", "is a symlink, never followed from outside")
            if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
                raise not_a_file(path)
            if found.st_uid != uid:
                raise Denied(
                    f"'{path}' belongs to another user of the host",
                    code="file_not_permitted",
                    hint="only files of the sandbox's own can be changed",
                )
            if in_host_directory and stat.S_ISREG(found.st_mode) and found.st_nlink > 1:
                raise Denied(
                    f"'{path}' has further names, which may lie outside of the directory",
                    code="file_not_permitted",
                    hint="replace it by a copy of its own first",
                )
            os.chmod(f"/proc/self/fd/{fd}", mode)
        finally:
            os.close(fd)


def check_mode(mode: int) -> None:
    """Raises as `chmod`."""
    if isinstance(mode, bool) or not isinstance(mode, int) or not 0 <= mode <= 0o7777:
        raise BadRequest(
            "a mode is a number from 0 to 0o777",
            code="invalid_mode",
            hint="0o644 for a file, 0o755 for a program or a directory",
            details={"field": "mode"},
        )
    if mode & ~0o777:
        raise Denied(
            f"the mode {mode:#o} has a set-id or a sticky bit, and no file here gets one",
            code="set_id_refused",
            hint="use the lower nine bits only",
            details={"field": "mode"},
        )
