"""Decide which names in a directory of the host a program of the host obeys; pure code.

The table itself is `sbx.workspace.host_executables`. Both sides of the wall use the matching here:
the path guard inside, and the file calls of the host. Nothing here reads a file: the caller passes
a function that returns whether a path exists.

Names are compared as the most tolerant file system of a host compares them: see `fold`.
"""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase, translate
from typing import Any, Literal, NamedTuple

Parts = tuple[str, ...]
Exists = Callable[[Parts], bool]
"""Whether a path relative to the directory exists. A link of the quarantine does not count."""

_GIT_DIRECTORY = "git directory"
_ENVIRONMENT = "Python environment"
_SHORT = "short name of another file"
# git(1) takes a directory for a repository if it holds a HEAD, which is not a directory, and one of
# these sets of names: setup.c, is_git_directory. A new HEAD is never free. So no order of events
# completes a repository: the parts can only come to a HEAD of the user, where they are not free.
HEAD = "HEAD"
# The entries of new names by their first character: a program may obey a hidden file that no table
# has, and a command takes the others for an option (`tar cf x.tar *`, and vim executes `+!id`).
HIDDEN, OPTION = ".*", "-*"
_BY_FIRST = {
    HIDDEN[0]: (HIDDEN, "a program that reads hidden files"),
    OPTION[0]: (OPTION, "a command with * in its arguments"),
    "+": (OPTION, "vim, less or another command with * in its arguments"),
}
_GIT_PARTS = (("objects", "refs"), ("commondir",))
_ENVIRONMENT_MARKS = ("pyvenv.cfg", "conda-meta")
# The modules that `python -m NAME` looks for in its working directory first. The second set belongs
# to pre-commit, whose hook is started in this way at the top of a repository.
_IMPORTED = frozenset(name.casefold() for name in sys.stdlib_module_names) | {
    "pre_commit", "cfgv", "identify", "nodeenv", "yaml", "_yaml", "virtualenv", "distlib",
    "filelock", "platformdirs", "ruamel", "toml", "setuptools", "pkg_resources",
    "importlib_metadata", "importlib_resources",
}  # fmt: skip
# Code points that Linux ignores in a directory with FS_CASEFOLD_FL: Default_Ignorable_Code_Point.
_IGNORED = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e"
    "\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8\U0001bca0-\U0001bca3"
    "\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
# `GIT~1` is `.git` on FAT, NTFS, and the drives of Windows in WSL.
_SHORT_NAME = re.compile(r"(?=[^.]{3,8}(\.|$))[^.]{1,6}~\d{1,6}(\.[^.]{0,3})?")


class RuleMatch(NamedTuple):
    """`depth`: how many parts of the path lead to the matching name. `is_new`: it does not exist
    yet, so the call would create it. `name` and `program` come from the table's entry."""

    depth: int
    name: str
    program: str
    is_new: bool


class NameRule(NamedTuple):
    """One pattern of the table.

    `scope`:

    root       directly in the directory only
    tree       at any depth, but not inside a tree of packages: no program reads it there
    any        at any depth
    packages   directly in a tree of packages only

    `parents`: the name counts only directly below a directory with one of these names. The scope is
    then that of the parent.
    `is_module`: the pattern is `x.py` and stands for every file that `import x` may execute:
    `x.py`, `x.pyc`, `x.so`, `x.*.so`, and `__init__` with these endings in a directory `x`. Without
    `__init__` Python prefers a module that lies later on its path.
    """

    pattern: str
    program: str
    scope: Literal["root", "tree", "any", "packages"]
    parents: tuple[str, ...] = ()
    is_module: bool = False


# Git takes no link for a HEAD: in the quarantine a bare repository works only as a whole.
_BARE_REPOSITORY = NameRule("*.git", "git", "any")


def fold(name: str) -> str:
    """Return the form in which one name is compared: without case, without ignored code points, and
    without the dots and blanks at its end that FAT and Windows drop."""
    plain = name.casefold()
    if not plain.isascii():
        plain = _IGNORED.sub("", plain)
    return plain.rstrip(". ") or plain


class PathRules:
    """The table as data. `package_trees`: names of directories that hold installed packages.
    `aliases`: paths that an existing entry leads to (a symlink, a configured hook).
    `import_roots`: directories from which a host executable in Python imports its modules. Only the
    names of the standard library, and a few others, are protected there: the rest is the project's
    own code. `data`: patterns of new names that are free although their first character is `.`, `-`
    or `+`. `build_directories`: patterns of directories below which all of them are free."""

    def __init__(
        self,
        names: Sequence[NameRule],
        package_trees: Sequence[str],
        aliases: Sequence[str] = (),
        import_roots: Sequence[str] = (),
        data: Sequence[str] = ("*",),
        build_directories: Sequence[str] = (),
    ) -> None:
        self.package_trees = frozenset(package_trees)
        self.data, self.build_directories = tuple(data), tuple(build_directories)
        self._is_data = _any_of(data)
        self._is_build_directory = _any_of((*package_trees, *build_directories))
        self.import_roots = frozenset(import_roots)
        self.aliases = frozenset(aliases)
        self._aliases = frozenset(map(_folded_path, aliases))
        self._import_roots = frozenset(map(_folded_path, import_roots))
        self._names = tuple(names)
        self._exact: dict[str, list[NameRule]] = {}
        self._patterns: list[NameRule] = []
        self._modules: dict[str, list[NameRule]] = {}
        self._parents: dict[str, list[NameRule]] = {}
        for rule in (*names, _BARE_REPOSITORY):
            for parent in rule.parents:
                self._parents.setdefault(parent, []).append(rule)
            if rule.is_module:
                module = rule.pattern.removesuffix(".py")
                self._modules.setdefault(module, []).append(rule)
                self._parents.setdefault(module, []).append(rule)
            elif any(sign in rule.pattern for sign in "*?["):
                self._patterns.append(rule)
            else:
                self._exact.setdefault(rule.pattern, []).append(rule)
        # One expression for all: a walk over 20,000 names took 0.3 s with a pattern at a time.
        self._any_pattern = _any_of([rule.pattern for rule in self._patterns])

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "PathRules":
        names = [
            NameRule(pattern, program, scope, tuple(parents), is_module)
            for pattern, program, scope, parents, is_module in data["names"]
        ]
        lists = ("package_trees", "aliases", "import_roots", "data", "build_directories")
        return cls(names, *(data[name] for name in lists))

    def to_json(self) -> dict[str, Any]:
        return {
            "names": [list(rule) for rule in self._names],
            "package_trees": sorted(self.package_trees),
            "aliases": sorted(self.aliases),
            "import_roots": sorted(self.import_roots),
            "data": list(self.data),
            "build_directories": list(self.build_directories),
        }

    def match(
        self, path: Sequence[str], exists: Exists, *, is_directory: bool = False
    ) -> RuleMatch | None:
        """Return the first entry that forbids a change at `path`, or None if it is free.

        The parent of `path` exists and has no symlink in it. `is_directory`: `path` is a directory,
        or will be.
        """
        parts = tuple(path)
        folded = tuple(map(fold, parts))
        return (
            self._by_name(parts, folded, exists)
            or self._by_content(parts, exists)
            or _by_part(parts, folded[-1:], exists, is_directory=is_directory)
            or _by_short_name(parts, folded, exists)
            or self._by_alias(parts, folded)
            or self._by_import(parts, folded, exists)
            or self._by_first_character(parts, folded, exists)
        )

    def match_name(self, path: Sequence[str]) -> RuleMatch | None:
        """Return the entry that an existing path fits by its names alone."""
        parts = tuple(path)
        return self._by_name(parts, tuple(map(fold, parts)), lambda _: True)

    def match_new(self, path: Sequence[str]) -> RuleMatch | None:
        """Return the entry that a path fits by the first character of a name, if it is new."""
        parts = tuple(path)
        folded = tuple(map(fold, parts))
        for depth in range(1, len(parts) + 1):
            match = self._by_first_character(parts[:depth], folded[:depth], lambda _: False)
            if match is not None:
                return match
        return None

    def is_above_alias(self, path: Sequence[str]) -> bool:
        """Return whether an alias lies below this path: to move it would put another file there."""
        top = "/".join(map(fold, path)) + "/"
        return any(alias.startswith(top) for alias in self._aliases)

    def is_import_name(self, path: Sequence[str]) -> bool:
        """Return whether a directory at this path would be a module of a host executable, if it had
        `__init__.py`."""
        *parents, name = map(fold, path)
        return name in _IMPORTED and "/".join(parents) in self._import_roots

    def is_package_tree(self, name: str) -> bool:
        return fold(name) in self.package_trees

    def is_build(self, path: Sequence[str]) -> bool:
        """Return whether new hidden names are free below a directory at this path."""
        return any(self._is_build_directory(fold(part)) for part in path)

    def is_parent(self, path: Sequence[str]) -> bool:
        """Return whether names directly below a directory would count for its name.

        A directory that gets this path may bring a name that was free at its old path.
        """
        folded = tuple(map(fold, path))
        in_packages = any(part in self.package_trees for part in folded[:-1])
        index = len(folded) - 1
        rules = self._parents.get(folded[-1], ()) if folded else ()
        return any(_applies(rule, index, in_packages, False) for rule in rules)

    def rules_for(self, name: str, parent: str) -> list[NameRule]:
        """Return the rules whose pattern a name fits, at any depth. `parent` is the name of the
        directory that holds it, "" for none. Both are in lower case."""
        fits = self._exact.get(name, [])
        if self._any_pattern(name) is not None:
            fits = [*fits, *(rule for rule in self._patterns if fnmatchcase(name, rule.pattern))]
        module = _module(name, parent)
        if module in self._modules:
            fits = [*fits, *self._modules[module]]
        return [rule for rule in fits if not rule.parents or parent in rule.parents]

    @property
    def exact_names(self) -> tuple[str, ...]:
        """The names of the table that are not patterns, in lower case."""
        return tuple(self._exact)

    def _by_name(self, parts: Parts, folded: Parts, exists: Exists) -> RuleMatch | None:
        in_packages = False
        for index, name in enumerate(folded):
            parent = folded[index - 1] if index > 0 else ""
            directly_in_packages = parent in self.package_trees
            for rule in self.rules_for(name, parent):
                by_parent = bool(rule.parents) or (rule.is_module and name.startswith("__init__."))
                if not _applies(rule, index - by_parent, in_packages, directly_in_packages):
                    continue
                is_new = index == len(parts) - 1 and not exists(parts)
                return RuleMatch(index + 1, rule.pattern, rule.program, is_new)
            in_packages = in_packages or name in self.package_trees
        return None

    def _by_content(self, parts: Parts, exists: Exists) -> RuleMatch | None:
        match = None
        # The directory itself too, because it may be moved. From the lowest one upwards: see
        # `ResolvedPath.exists`. The topmost match counts.
        for depth in range(len(parts), -1, -1):
            directory = parts[:depth]
            if exists((*directory, HEAD)) and _has_git_parts(directory, exists):
                match = RuleMatch(max(depth, 1), _GIT_DIRECTORY, "git", is_new=False)
            elif any(exists((*directory, mark)) for mark in _ENVIRONMENT_MARKS):
                match = RuleMatch(max(depth, 1), _ENVIRONMENT, "python", is_new=False)
        return match

    def _by_alias(self, parts: Parts, folded: Parts) -> RuleMatch | None:
        for depth in range(1, len(parts) + 1 if self._aliases else 0):
            if "/".join(folded[:depth]) in self._aliases:
                return RuleMatch(depth, "/".join(parts[:depth]), "the link or setting to it", False)
        return None

    def _by_import(self, parts: Parts, folded: Parts, exists: Exists) -> RuleMatch | None:
        """Match a new module, such as `argparse.py`, `argparse/__init__.py` or
        `argparse.cpython-311-x86_64-linux-gnu.so`."""
        stem, _, ending = folded[-1].partition(".")
        if not self.import_roots or not ending.endswith(("py", "pyc", "so")):
            return None
        directory, name = parts[:-1], stem
        if stem == "__init__" and len(parts) > 1:
            directory, name = parts[:-2], folded[-2]
        if not self.is_import_name((*directory, name)):
            return None
        return RuleMatch(len(parts), parts[-1], "python", is_new=not exists(parts))

    def _by_first_character(self, parts: Parts, folded: Parts, exists: Exists) -> RuleMatch | None:
        name = folded[-1] if folded else ""
        entry = _BY_FIRST.get(name[:1])
        if entry is None or self._is_data(name) or self.is_build(folded[:-1]) or exists(parts):
            return None
        return RuleMatch(len(parts), *entry, is_new=True)


def reason(name: str, program: str) -> str:
    """Return why a file with an entry of the table is kept from the host, as a clause."""
    match name:
        case ".*":  # HIDDEN
            return "its name is new and begins with a dot, so a program may obey it on the host"
        case "-*":  # OPTION
            return "a command would take its name for an option on the host"
    return f"{program} would obey it on the host"


def leads_out(link: str, parts: Sequence[str]) -> bool:
    """Return whether a relative symlink at this path could lead out of the directory.

    Its parent has no symlink in it, so a leading `..` leads exactly one level up. After a name that
    is a link, `..` leads up from the target of that link.
    """
    steps = [part for part in link.split("/") if part not in ("", ".")]
    up = next((index for index, part in enumerate(steps) if part != ".."), len(steps))
    return up >= len(parts) or ".." in steps[up:]


def _folded_path(path: str) -> str:
    return "/".join(map(fold, path.split("/")))


def _has_git_parts(directory: Parts, exists: Exists) -> bool:
    return any(all(exists((*directory, name)) for name in parts) for parts in _GIT_PARTS)


def _by_part(
    parts: Parts, folded_name: Parts, exists: Exists, *, is_directory: bool
) -> RuleMatch | None:
    """Return the match of a name that makes its directory a repository or an environment."""
    name = folded_name[0] if folded_name else ""
    if name in _ENVIRONMENT_MARKS:
        return RuleMatch(len(parts), _ENVIRONMENT, "python", is_new=not exists(parts))
    is_head = parts[-1:] == (HEAD,) and not is_directory
    if is_head or (any(name in group for group in _GIT_PARTS) and exists((*parts[:-1], HEAD))):
        return RuleMatch(len(parts), _GIT_DIRECTORY, "git", is_new=not exists(parts))
    return None


def _any_of(patterns: Sequence[str]) -> Callable[[str], Any]:
    return re.compile("|".join(map(translate, patterns)) or r"(?!)").match


def _by_short_name(parts: Parts, folded: Parts, exists: Exists) -> RuleMatch | None:
    """Match an existing name that may be the second one of a protected file. File systems with such
    names ignore case."""
    for index, name in enumerate(folded):
        if "~" in name and _SHORT_NAME.fullmatch(name):
            swapped = (*parts[:index], parts[index].swapcase())
            if exists(parts[: index + 1]) and exists(swapped):
                return RuleMatch(index + 1, _SHORT, "file systems of Windows", is_new=False)
    return None


def _module(name: str, parent: str) -> str:
    """Return the module name of a file, or "" if Python does not import such a file."""
    stem, _, ending = name.partition(".")
    if ending not in ("py", "pyc", "so") and not ending.endswith(".so"):
        return ""
    return parent if stem == "__init__" else stem


def _applies(rule: NameRule, index: int, in_packages: bool, directly_in_packages: bool) -> bool:
    match rule.scope:
        case "root":
            return index == 0
        case "tree":
            return not in_packages
        case "packages":
            return directly_in_packages
    return True
