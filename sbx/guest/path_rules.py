"""Which names in a directory of the host a program of the host obeys: the decision, as pure code.

The table itself is `sbx.workspace.host_executables`; here is the matching, which both sides of the
wall use: the path guard inside, and the file calls of the host. Nothing here reads a file: the
caller passes a function that states whether a path exists.

Names are compared without case, because the file system of the host may fold it.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase, translate
from typing import Any, Literal, NamedTuple

Parts = tuple[str, ...]
Exists = Callable[[Parts], bool]
"""Whether a path relative to the directory exists. A link of the quarantine does not count."""

_GIT_DIRECTORY = "git directory"
_ENVIRONMENT = "Python environment"
# git(1) takes a directory for a repository by these names in it: setup.c, is_git_directory.
_GIT_DIRECTORIES = (("HEAD", "objects", "refs"), ("HEAD", "commondir"))
CONTENT_NAMES = frozenset(
    ("pyvenv.cfg", *(part.casefold() for kind in _GIT_DIRECTORIES for part in kind))
)
"""Names, in lower case, by which a directory becomes a repository or an environment."""


class Match(NamedTuple):
    """`depth`: how many parts of the path lead to the matching name. `is_new`: it does not exist
    yet, so the call would create it. `name` and `program` are of the table's entry."""

    depth: int
    name: str
    program: str
    is_new: bool


class NameRule(NamedTuple):
    """One pattern of the table. `scope`:

    root       directly in the directory only
    tree       at any depth, but not inside a tree of packages: no program reads it there
    any        at any depth
    packages   directly in a tree of packages only
    """

    pattern: str
    program: str
    scope: Literal["root", "tree", "any", "packages"]


class PathRules:
    """The table as data. `package_trees`: names of directories that hold installed packages.
    `aliases`: paths that an existing entry leads to (a symlink, a configured hook)."""

    def __init__(
        self,
        names: Sequence[NameRule],
        package_trees: Sequence[str],
        aliases: Sequence[str] = (),
    ) -> None:
        self.package_trees = frozenset(package_trees)
        self.aliases = frozenset(aliases)
        self._names = tuple(names)
        self._exact: dict[str, list[NameRule]] = {}
        self._patterns: list[NameRule] = []
        for rule in names:
            if any(sign in rule.pattern for sign in "*?["):
                self._patterns.append(rule)
            else:
                self._exact.setdefault(rule.pattern, []).append(rule)
        # One expression for all: a walk over 20,000 names took 0.3 s with a pattern at a time.
        patterns = "|".join(translate(rule.pattern) for rule in self._patterns)
        self._any_pattern = re.compile(patterns or r"(?!)").match

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "PathRules":
        names = [NameRule(*rule) for rule in data["names"]]
        return cls(names, data["package_trees"], data["aliases"])

    def to_json(self) -> dict[str, Any]:
        return {
            "names": [list(rule) for rule in self._names],
            "package_trees": sorted(self.package_trees),
            "aliases": sorted(self.aliases),
        }

    def match(self, path: Sequence[str], exists: Exists) -> Match | None:
        """Return the first entry that forbids a change at `path`, or None if it is free.

        The parent of `path` exists and has no symlink in it.
        """
        parts = tuple(path)
        folded = tuple(part.casefold() for part in parts)
        return (
            self._by_name(parts, folded, exists)
            or self._by_content(parts, folded, exists)
            or self._by_alias(parts)
        )

    def match_name(self, path: Sequence[str]) -> Match | None:
        """Return the entry that an existing path fits by its names alone."""
        parts = tuple(path)
        return self._by_name(parts, tuple(part.casefold() for part in parts), lambda _: True)

    def is_above_alias(self, path: Sequence[str]) -> bool:
        """Return whether an alias lies below this path: to move it would put another file there."""
        top = "/".join(path) + "/"
        return any(alias.startswith(top) for alias in self.aliases)

    def is_package_tree(self, name: str) -> bool:
        return name.casefold() in self.package_trees

    def rules_for(self, name: str) -> list[NameRule]:
        """The rules whose pattern a name fits, wherever it lies. `name` is in lower case."""
        exact = self._exact.get(name, [])
        if self._any_pattern(name) is None:
            return exact
        return [*exact, *(rule for rule in self._patterns if fnmatchcase(name, rule.pattern))]

    def _by_name(self, parts: Parts, folded: Parts, exists: Exists) -> Match | None:
        in_packages = False
        for at, name in enumerate(folded):
            directly_in_packages = at > 0 and folded[at - 1] in self.package_trees
            for rule in self.rules_for(name):
                if not _applies(rule, at, in_packages, directly_in_packages):
                    continue
                is_new = at == len(parts) - 1 and not exists(parts)
                return Match(at + 1, rule.pattern, rule.program, is_new)
            in_packages = in_packages or name in self.package_trees
        return None

    def _by_content(self, parts: Parts, folded: Parts, exists: Exists) -> Match | None:
        for depth in range(len(parts) + 1):  # the directory itself too: it may be moved
            directory = parts[:depth]
            if exists((*directory, "HEAD")) and _is_git_directory(directory, exists):
                return Match(max(depth, 1), _GIT_DIRECTORY, "git", is_new=False)
            if exists((*directory, "pyvenv.cfg")):
                return Match(max(depth, 1), _ENVIRONMENT, "python", is_new=False)
        directory, name = parts[:-1], folded[-1]
        if any(name == part.casefold() for kind in _GIT_DIRECTORIES for part in kind):
            # The name that would complete a repository.
            if _is_git_directory(directory, lambda p: p[-1].casefold() == name or exists(p)):
                return Match(len(parts), _GIT_DIRECTORY, "git", is_new=not exists(parts))
        elif name == "pyvenv.cfg":
            return Match(len(parts), _ENVIRONMENT, "python", is_new=not exists(parts))
        return None

    def _by_alias(self, parts: Parts) -> Match | None:
        for depth in range(1, len(parts) + 1):
            if "/".join(parts[:depth]) in self.aliases:
                return Match(depth, "/".join(parts[:depth]), "the link or setting to it", False)
        return None


def leads_out(link: str, parts: Sequence[str]) -> bool:
    """Return whether a relative symlink at this path could lead out of the directory. Its parent
    has no symlink in it, so a leading `..` leads up exactly; one after a name leads up from
    wherever that name is a link to."""
    steps = [part for part in link.split("/") if part not in ("", ".")]
    up = next((at for at, part in enumerate(steps) if part != ".."), len(steps))
    return up >= len(parts) or ".." in steps[up:]


def _is_git_directory(directory: Parts, exists: Exists) -> bool:
    return any(all(exists((*directory, name)) for name in kind) for kind in _GIT_DIRECTORIES)


def _applies(rule: NameRule, at: int, in_packages: bool, directly_in_packages: bool) -> bool:
    match rule.scope:
        case "root":
            return at == 0
        case "tree":
            return not in_packages
        case "packages":
            return directly_in_packages
    return True
