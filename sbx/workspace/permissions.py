"""Set the read, write and execute permissions of a file or a directory, but never a set-id bit.

The mode is set on the checked inode, so replacing the name has no effect. Only files of the jail
can be changed.
"""

import os
import stat

from sbx.errors import BadRequest, Denied
from sbx.workspace.errors import not_a_file, translated, wrong_path
from sbx.workspace.tree import Relative, Tree


def chmod(tree: Tree, relative: Relative, mode: int, *, in_host_directory: bool = False) -> None:
    """Set the permissions to `mode`, 0 to 0o777.

    `in_host_directory`: refuse a file with further hard links, which may be outside the directory.

    Raises Denied `set_id_refused` for a set-user-id, set-group-id or sticky bit, BadRequest
    `invalid_mode`, and Denied `file_not_permitted` for a file that is not the sandbox's.
    """
    check_mode(mode)
    path = tree.shown(relative)
    uid = os.geteuid() if tree.owner is None else tree.owner[0]
    with translated(path):
        fd = tree.hold(relative)
        try:
            status = os.fstat(fd)
            if stat.S_ISLNK(status.st_mode):
                raise wrong_path(path, "symlink", "is a symlink, which the host never follows")
            if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
                raise not_a_file(path)
            if status.st_uid != uid:
                raise Denied(
                    f"'{path}' belongs to another user of the host",
                    code="file_not_permitted",
                    hint="only files of the sandbox can be changed",
                )
            if in_host_directory and stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
                raise Denied(
                    f"'{path}' has further hard links, which may be outside of the directory",
                    code="file_not_permitted",
                    hint="replace it by a copy first",
                )
            os.chmod(f"/proc/self/fd/{fd}", mode)
        finally:
            os.close(fd)


def check_mode(mode: int) -> None:
    """Check a mode. Raises the errors of `chmod`."""
    if isinstance(mode, bool) or not isinstance(mode, int) or not 0 <= mode <= 0o7777:
        raise BadRequest(
            "a mode must be a number from 0 to 0o777",
            code="invalid_mode",
            hint="0o644 for a file, 0o755 for a program or a directory",
            details={"field": "mode"},
        )
    if mode & ~0o777:
        raise Denied(
            f"the mode {mode:#o} has a set-id or a sticky bit, which is never set",
            code="set_id_refused",
            hint="use the lower nine bits only",
            details={"field": "mode"},
        )
