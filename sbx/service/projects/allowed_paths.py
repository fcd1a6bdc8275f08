"""Which directories of the host may be projects: whoever names one comes by HTTP, or has a model.

The path that is kept has no symlink in it, and it is opened again without following one before each
use: whoever may write beside a project does not choose what is mounted later.
"""

import errno
import os
import stat
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from sbx.errors import BadRequest, Denied
from sbx.linux import openat2
from sbx.workspace import allowed_paths
from sbx.workspace.allowed_paths import OwnPaths

_HOW = os.O_PATH | os.O_DIRECTORY
_RESOLVE = openat2.RESOLVE_BENEATH | openat2.RESOLVE_NO_SYMLINKS
_PATH_MAX = 4095


@dataclass(frozen=True, slots=True)
class ProjectGrounds:
    """`within`: directories of which, and of what lies below them, any may be a project. `own`: the
    paths of sbx. `owners`: whose directories may be mapped; root's are refused without it, and with
    `mapped_only` everybody's.

    Its methods look at the disk. They raise BadRequest `invalid_directory`, and Denied
    `not_granted`, `directory_forbidden` and `workspace_owned_by_root`.
    """

    within: Sequence[Path]
    own: OwnPaths
    owners: Collection[int] = ()
    mapped_only: bool = False

    def resolve(self, asked: str) -> Path:
        """The directory that is meant, by the one path that has no symlink."""
        parts = asked.split("/")
        if not asked.startswith("/") or ".." in parts or "\0" in asked or len(asked) > _PATH_MAX:
            raise _invalid(asked, "it is no absolute path without ..")
        try:
            real = Path(os.path.realpath(asked))
            asked.encode()
        except (OSError, UnicodeEncodeError):
            raise _invalid(asked, "no file has such a name") from None
        self.look_at(real)
        return real

    def look_at(self, directory: Path) -> None:
        """Whether it, by a path without symlinks, may be a project now."""
        top = self._top_of(directory)
        try:
            outer = os.open(top, _HOW | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                below = os.fsencode(directory.relative_to(top))
                inner = openat2.openat2(outer, below, _HOW, resolve=_RESOLVE)
            finally:
                os.close(outer)
        except OSError as error:
            raise _unusable(directory, error) from None
        try:
            allowed_paths.check(inner, self.own)
            self._check(directory, os.fstat(inner))
        finally:
            os.close(inner)

    def _top_of(self, directory: Path) -> Path:
        for top in map(Path, map(os.path.realpath, self.within)):
            if directory.is_relative_to(top):
                return top
        raise Denied(
            f"{directory} lies in none of the directories that may hold projects here",
            code="not_granted",
            hint="the operator names them in the setting project_dirs (SBX_PROJECT_DIRS)",
        )

    def _check(self, directory: Path, found: os.stat_result) -> None:
        if not stat.S_ISDIR(found.st_mode):
            raise _invalid(str(directory), "it is no directory")
        if found.st_uid == 0 and 0 not in self.owners:
            raise Denied(
                f"'{directory}' belongs to root, and the operator allows no project of root",
                code="workspace_owned_by_root",
                hint="the operator names root in the setting project_owners (SBX_PROJECT_OWNERS);"
                " or give the directory to another user (chown)",
            )
        if self.mapped_only and found.st_uid not in self.owners:
            raise Denied(
                f"'{directory}' belongs to uid {found.st_uid}, whom the operator does not name",
                code="not_granted",
                hint="the operator names the owner in the setting project_owners"
                " (SBX_PROJECT_OWNERS)",
            )


def _unusable(directory: Path, error: OSError) -> BadRequest:
    if error.errno in (errno.ELOOP, errno.EXDEV):
        return _invalid(str(directory), "a symlink has taken its place, or one above it")
    return _invalid(str(directory), os.strerror(error.errno or errno.EIO))


def _invalid(asked: str, why: str) -> BadRequest:
    return BadRequest(
        f"{str(asked)[:200]!r} cannot be a working directory: {why}",
        code="invalid_directory",
        hint="name a directory of the host by its absolute path",
    )
