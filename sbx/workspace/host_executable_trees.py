"""Find a host executable below a directory, for a host call that moves, copies or deletes it.

The name of the directory itself says nothing about its content: `node_modules/x/.envrc` is free,
since no program reads it there, and is obeyed once `x` lies elsewhere.
"""

import os
import stat
from collections.abc import Callable, Iterable

from sbx.errors import Denied, TooLarge
from sbx.guest.guarded_paths import ITEMS
from sbx.guest.path_rules import Match, PathRules, leads_out
from sbx.workspace.tree import Relative, Tree
from sbx.workspace.walk import Walk

ENTRIES_MAX = 1_000_000
DEADLINE_S = 30.0

Exists = Callable[[Relative], bool]


def find_below(
    tree: Tree, of: Relative, rules: PathRules, exists: Exists, *, at: Relative | None = None
) -> tuple[Relative, Match] | None:
    """Return the first path that the rules protect below `of`, as if `of` lay at the path `at`;
    None if there is none, or `of` is not a directory. A link to the quarantine is free where it is.

    Raises TooLarge `tree_too_large`, and Denied `symlink_leads_out` for a relative symlink that
    would lead out of the directory from `at`.
    """
    links: list[Relative] = []
    kind = tree.stat(of).kind if of else "directory"
    if kind == "symlink":
        links.append(of)
    walk = Walk(max_entries=ENTRIES_MAX, deadline_s=DEADLINE_S)
    below: list[Relative] = []
    if kind == "directory":
        for path, found in tree.walk(walk, of):
            below.append(path)
            if stat.S_ISLNK(found.st_mode):
                links.append(path)
    if walk.exhausted or not walk.in_time:
        raise TooLarge(
            "the directory has too many entries to look for host executables",
            code="tree_too_large",
            hint="handle its parts one by one",
            details={"limit": ENTRIES_MAX},
        )
    top = of if at is None else at
    for link in links if at is not None else ():
        _refuse_link(_text(tree, link), (*top, *link[len(of) :]), rules)
    placed = {(*top, *path[len(of) :]): path for path in below}
    for path, match in matches(placed, rules, exists):
        if at is not None or not _is_item(tree, placed[path]):
            return path, match
    return None


def matches(
    paths: Iterable[Relative], rules: PathRules, exists: Exists
) -> Iterable[tuple[Relative, Match]]:
    """Yield each path that the rules protect, once all of `paths` exist."""
    new = {path[:depth] for path in paths for depth in range(1, len(path) + 1)}
    for path in paths:
        match = rules.match(path, lambda parts: parts in new or exists(parts))
        if match is not None:
            yield path, match


def _refuse_link(text: str, at: Relative, rules: PathRules) -> None:
    """Whoever follows a link out of the directory would be where another sandbox may write. A link
    within it may give a directory a name below which the table has names."""
    if text.startswith("/"):
        return
    if not leads_out(text, at) and rules.is_parent(at) and at[-2:-1] != ("bin",):
        raise Denied(
            f"the symlink '{'/'.join(at)}' would give a directory a name that the host obeys",
            code="runs_on_the_host",
            hint="give the symlink another name",
        )
    if leads_out(text, at):
        raise Denied(
            f"the symlink '{'/'.join(at)}' would lead out of the directory",
            code="symlink_leads_out",
            hint="remove the symlink, or make one for its new place",
        )


def _is_item(tree: Tree, path: Relative) -> bool:
    return _text(tree, path).startswith(f"{ITEMS}/")


def _text(tree: Tree, path: Relative) -> str:
    """The text of a symlink, "" for anything else."""
    try:
        fd = tree.hold(path)
    except OSError:
        return ""
    try:
        return os.readlink("", dir_fd=fd)
    except OSError:
        return ""
    finally:
        os.close(fd)
