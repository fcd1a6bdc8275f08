"""Paths outside of a host directory that its files need and a sandbox over it does not see.

`git_outside` follows git: the `.git` file of a worktree, of a submodule and of --separate-git-dir,
a `.git` that is a symlink, `objects/info/alternates` (clone --shared, --reference), and the
repository of which the directory is a part. sbx does not mount these: they have all branches and
the settings of the repository, the caller did not name them, and a `.git` file from an archive may
name any directory.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from sbx.workspace.git_settings import Repository
from sbx.workspace.small_files import read_small

_ENTRIES_MAX = 1000
_LINKS_SHOWN = 5


def git_outside(directory: Path) -> tuple[str, ...]:
    """Return the topmost directories of git that are outside. `directory` has no symlink."""
    if not os.path.lexists(directory / ".git"):
        if (directory / "HEAD").exists() and (directory / "objects").is_dir():
            return ()  # a bare repository
        above = (str(parent) for parent in directory.parents if (parent / ".git").exists())
        return tuple(above)[:1]
    paths: list[str] = []
    with suppress(OSError, ValueError):
        repository = Repository.at(str(directory))
        objects = os.path.join(repository.common, "objects")
        paths += [repository.git, repository.common]
        lines = read_small(os.path.join(objects, "info/alternates")).splitlines()
        paths += [os.path.join(objects, line) for line in lines if line and line[0] not in '#"']
    outside = {path for path in map(os.path.realpath, paths) if not _is_below(path, str(directory))}
    return tuple(sorted(path for path in outside if not _is_below_any(path, outside - {path})))


def notes(directory: Path, visible: Sequence[str]) -> list[str]:
    """Return sentences that name the paths outside which git and links of the directory need.

    `visible` are directories of the host that the sandbox has at the same path.
    """
    texts = [
        f"git does not work in {directory}: it needs {path}, which the sandbox does not see;"
        + (f" use --workspace {path}" if _is_below(str(directory), path) else " use a clone")
        for path in git_outside(directory)
    ]
    links = [link for link in sorted(_links(directory)) if not _is_below_any(link[1], visible)]
    texts += [
        f"{name} in {directory} leads to {target}, which the sandbox does not see"
        for name, target in links[:_LINKS_SHOWN]
    ]
    if (more := len(links) - _LINKS_SHOWN) > 0:
        texts.append(f"{more} more links in {directory} lead out of it")
    return texts


def _links(directory: Path) -> Iterator[tuple[str, str]]:
    """Yield the symlinks directly in the directory that lead out of it, and their real targets."""
    with suppress(OSError), os.scandir(directory) as entries:
        for _, entry in zip(range(_ENTRIES_MAX), entries, strict=False):
            if entry.is_symlink() and entry.name != ".git":
                target = os.path.realpath(entry.path)
                if os.path.exists(target) and not _is_below(target, str(directory)):
                    yield entry.name, target


def _is_below(path: str, top: str) -> bool:
    return path == top or path.startswith(f"{top.rstrip('/')}/")


def _is_below_any(path: str, tops: Sequence[str] | set[str]) -> bool:
    return any(_is_below(path, top) for top in tops)
