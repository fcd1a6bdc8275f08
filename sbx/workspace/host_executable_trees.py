"""Find a host executable below a directory, for a host call that moves, copies or deletes it.

The rules for a path depend on its place. `node_modules/x/.envrc` is not protected, because no
program reads it there. Programs obey it as soon as `x` is moved elsewhere.
"""

import os
import stat
from collections.abc import Callable, Iterable

from sbx.errors import Denied, TooLarge
from sbx.guest.guarded_paths import ITEMS
from sbx.guest.path_rules import PathRules, RuleMatch, leads_out
from sbx.workspace.tree import Relative, Tree
from sbx.workspace.walk import Walk

ENTRIES_MAX = 1_000_000
DEADLINE_S = 30.0

Exists = Callable[[Relative], bool]


def find_below(
    tree: Tree, of: Relative, rules: PathRules, exists: Exists, *, at: Relative | None = None
) -> tuple[Relative, RuleMatch] | None:
    """Return the first path below `of` that the rules protect if `of` is placed at the path `at`.

    Return None if the rules protect no path, or if `of` is not a directory. Without `at`, a link to
    the quarantine does not count. Raises TooLarge `tree_too_large`, and Denied `symlink_leads_out`
    for a relative symlink that would lead out of the directory from `at`.
    """
    links: list[Relative] = []
    kind = tree.stat(of).kind if of else "directory"
    if kind == "symlink":
        links.append(of)
    walk = Walk(max_entries=ENTRIES_MAX, deadline_s=DEADLINE_S)
    below: list[Relative] = []
    if kind == "directory":
        for path, status in tree.walk(walk, of):
            below.append(path)
            if stat.S_ISLNK(status.st_mode):
                links.append(path)
    if walk.exhausted or not walk.in_time:
        raise TooLarge(
            "the directory has too many entries to search it for host executables",
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
) -> Iterable[tuple[Relative, RuleMatch]]:
    """Yield each path that the rules protect, once all of `paths` exist."""
    new = {path[:depth] for path in paths for depth in range(1, len(path) + 1)}
    for path in paths:
        match = rules.match(path, lambda parts: parts in new or exists(parts))
        if match is not None:
            yield path, match


def _refuse_link(text: str, at: Relative, rules: PathRules) -> None:
    """Refuse a symlink that would be dangerous at the path `at`.

    A link out of the directory leads programs to a place where another sandbox may write. A link
    within the directory may give another directory a name below which the table protects names.
    """
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
            hint="remove the symlink, or create one that fits its new place",
        )


def _is_item(tree: Tree, path: Relative) -> bool:
    return _text(tree, path).startswith(f"{ITEMS}/")


def _text(tree: Tree, path: Relative) -> str:
    """Return the target of a symlink, or "" for any other node."""
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
