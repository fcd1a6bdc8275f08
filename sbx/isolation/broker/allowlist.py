"""The grants of a confined runtime, and the check of every order against them.

A service that dropped root's rights has a broker that kept them. Before that, it sends the grants
for the jails of its policies once (`grants`, from real plans). An attacker that takes the service
over later can order nothing else: the broker checks each argument of bwrap, the command, the
filter, the files and the source of every mount, and refuses with Denied `not_granted`.

    options     the skeleton of bwrap's words is one of those that a plan has; only mounts, files
                and variables differ, and each of these is one that a plan could have
    sources     what the policies show, at their places, read-only; and of the data directory the
                files of a conversation, and the directory of a proxy's socket, the only socket that
                is ever shown: each opened beneath it with no symlink on the way, and mounted by the
                open file: nothing that is swapped meanwhile is mounted
    filter      the shipped one. A zygote demands it, and Landlock, of every jail that it forks
    zygotes     no file of the data directory, no variable and no import that no policy names
    attaching   read-only, and of the directories that the settings name for it, or below them
    projects    a directory is mapped once for a sandbox: one below the directories that the
                settings name, of an owner whom they name. Opened beneath them with no symlink on
                the way, held open, and mounted with what lies below it at its place in /workspace

A hostile runtime can still do this: start jails of any granted kind with any code, limits and
variables inside, so without a policy's narrower limits and second filter; mix the mounts of several
policies; show a jail the files of any sandbox, which it can read and write itself; pass its own
open files to a jail;
show a granted project without the path guard and its quarantine; set the disk quota of any
conversation; leave the sockets uncovered that lie in a directory which a policy mounts; and, in
jails of the cold path, leave out Landlock and rlimits, which the boot frame brings. Such a jail has
the namespaces, the uid of the range, no
capability, the filter and the read-only view all the same. And it can end every sandbox.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from sbx.errors import Broken
from sbx.guest.machine import MEMINFO
from sbx.isolation.broker import bind_staging
from sbx.isolation.broker.spawn import DATA_FD
from sbx.isolation.mapped import MappedProjects
from sbx.isolation.mapped import denied as _denied
from sbx.isolation.seccomp import load_filter
from sbx.linux import openat2

# No word of bwrap holds a NUL.
_VIEW, _FILE, _VARIABLE, _DEVPTS = "\0view", "\0file", "\0variable", "\0devpts"
_NAME = re.compile(r"[0-9a-f]{16}")
_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SIZE = re.compile(r"[1-9][0-9]*")
_KEPT = re.compile(
    r"sandboxes/[0-9a-f]{32}/(?:(shared)|[0-9a-f]{32}/(files|files/uploads|uploads))"
    r"|(egress)/[0-9a-f]{32}|(quarantine)/[0-9a-f]{16}/inside"
)
_CHARGED = re.compile(r"sandboxes/[0-9a-f]{32}/(?:shared|[0-9a-f]{32})")
_BINDS = ("--bind", "--ro-bind", "--bind-try", "--ro-bind-try")
_BINDING = ("landlock", "read", "write", "devices", "filter")


class BwrapArgs(NamedTuple):
    """Parsed arguments of bwrap. `skeleton` has one mark in place of the variable parts."""

    skeleton: tuple[str, ...]
    binds: list[tuple[str, str, str]]
    created: list[tuple[str, ...]]
    tmpfs: list[tuple[str, str, str]]
    files: list[tuple[str, str]]
    variables: list[tuple[str, str]]
    devpts: list[str]


def take_apart(args: Sequence[str]) -> BwrapArgs:
    """Parse each option with all of its words, as bwrap reads them: a granted skeleton has only
    granted options, and no option that takes a word of another one."""
    words = BwrapArgs((), [], [], [], [], [], [])
    skeleton: list[str] = []
    at = 0
    while at < len(args):
        match list(args[at : at + 6]):
            case ["--perms", mode, "--dir", path, *_]:
                words.created.append(("--dir", mode, path))
                mark, taken = _VIEW, 4
            case ["--symlink", points_to, path, *_]:
                words.created.append(("--symlink", points_to, path))
                mark, taken = _VIEW, 3
            case ["--perms", mode, "--size", size, "--tmpfs", path]:
                words.tmpfs.append((mode, size, path))
                mark, taken = _VIEW, 6
            case [verb, source, target, *_] if verb in _BINDS:
                words.binds.append((verb, source, target))
                mark, taken = _VIEW, 3
            case ["--dev-bind", place, "/dev/pts", *_]:
                words.devpts.append(place)
                mark, taken = _DEVPTS, 3
            case ["--perms", "0444", "--file", fd, path, *_]:
                words.files.append((fd, path))
                mark, taken = _FILE, 5
            case ["--perms", "0644", "--bind-data", fd, path, *_] if path == MEMINFO:
                words.files.append((fd, path))
                mark, taken = _FILE, 5
            case ["--setenv", name, value, *_]:
                words.variables.append((name, value))
                mark, taken = _VARIABLE, 3
            case [word, *_]:
                mark, taken = word, 1
        if not (skeleton and skeleton[-1] == mark and mark[0:1] == "\0"):
            skeleton.append(mark)
        at += taken
    return words._replace(skeleton=tuple(skeleton))


@dataclass(frozen=True, slots=True)
class LaunchGrant:
    skeletons: frozenset[Any]
    binds: frozenset[Any]
    created: frozenset[Any]
    tmpfs: frozenset[Any]
    files: frozenset[Any]
    variables: frozenset[Any]
    commands: frozenset[Any]

    @classmethod
    def of(cls, granted: Mapping[str, Any]) -> "LaunchGrant":
        return cls(**{name: frozenset(map(tuple, items)) for name, items in granted.items()})

    def without(self, tops: Sequence[str]) -> "LaunchGrant":
        """Return the grant without sources that the confined process could change."""
        kinds = {item for item in self.binds if not item[1].startswith("/")}
        fixed = {
            item for item in self.binds - kinds if not _is_below(os.path.realpath(item[1]), tops)
        }
        return replace(self, binds=frozenset(kinds | fixed))


class BrokerAllowlist:
    """The grants of `grants`, opened once, in the mount namespace of the broker."""

    def __init__(self, granted: Mapping[str, Any]) -> None:
        """Raise OSError without a data directory."""
        self._jails = LaunchGrant.of(granted["jail"]).without(granted["writable"])
        self._zygotes = LaunchGrant.of(granted["zygote"]).without(granted["writable"])
        self._preload = frozenset(granted["preload"])
        self._walls = granted["walls"]
        self._filter = load_filter("default", os.uname().machine).program.hex()
        self._attachable = {
            top: os.open(top, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            for top in granted.get("attachable", ())
            if os.path.isdir(top) and not _is_below(os.path.realpath(top), granted["writable"])
        }
        self._projects = MappedProjects(granted.get("projects"), granted["writable"])
        self._data = granted["data"]
        self._data_fd = os.open(
            self._data, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        )

    @contextmanager
    def checked(self, order: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the order with sources that cannot be replaced inside the block. Raise Denied."""
        with ExitStack() as stack, _named():
            match order["do"]:
                case "launch":
                    yield self._launch(order, stack)
                case "start_zygote":
                    yield self._start_zygote(order)
                case "enter":
                    yield self._enter(order, stack)
                case "look_at_disk":
                    yield {**order, "path": self._data}
                case "charge":
                    yield {**order, "path": self._charged(order["path"], stack)}
                case "attach":
                    yield self._attach(order, stack)
                case "map_owner":
                    with self._projects.mapping(order) as allowed:
                        yield allowed
                case "drop_sandbox":
                    self._projects.forget(order["sandbox"])
                    yield order
                case "fork":
                    _check_name(order["jail"])
                    yield order
                case _:
                    yield order

    def _launch(self, order: dict[str, Any], stack: ExitStack) -> dict[str, Any]:
        _check_name(order["jail"])
        if order["filter"] != self._filter:
            raise _denied("the filter is not the one that comes with sbx")
        words = self._words(order, self._jails)
        _check_variables(words.variables)
        _check_all(words.devpts, [bind_staging.place(order["jail"], bind_staging.DEVPTS)], "devpts")
        stage = self._stage(order, order["jail"], words, self._jails, stack)
        return {**order, "stage": stage}

    def _start_zygote(self, order: dict[str, Any]) -> dict[str, Any]:
        _check_name(order["zygote"])
        words = self._words(order, self._zygotes)
        _check_all(words.variables, self._zygotes.variables, "variable of a zygote")
        stage = self._stage(order, order["zygote"], words, self._zygotes, None)
        requested = order["prepare"]
        walls = requested["walls"]
        _check_all(requested["preload"], self._preload, "module to import before the fork")
        self._check_tmpfs(requested["tmpfs"])
        shown = {item[-1] for item in (*words.binds, *words.created)}
        _check_all(requested["kept"], shown, "place of a zygote's view")
        if not any(all(walls[name] == like[name] for name in _BINDING) for like in self._walls):
            raise _denied("the walls of the zygote are those of no policy")
        prepare = {
            "preload": requested["preload"],
            "tmpfs": requested["tmpfs"],
            "kept": requested["kept"],
            "walls": {**walls, "binding": True},
        }
        return {**order, "stage": stage, "prepare": prepare}

    def _enter(self, order: dict[str, Any], stack: ExitStack) -> dict[str, Any]:
        self._check_tmpfs(order["tmpfs"])
        _check_variables(order["environment"].items())
        mounts = []
        for mount in order["mounts"]:
            if mount["mapped"]:
                opened = self._projects.opened(
                    order["sandbox"], mount["source"], mount["target"], stack
                )
                mounts.append({**mount, "source": opened})
                continue
            kind, opened = self._open(mount["source"], stack)
            verb = "--bind" if mount["writable"] else "--ro-bind"
            if (verb, kind, mount["target"]) not in self._jails.binds:
                raise _denied(f"no policy shows {mount['source']} at {mount['target']}")
            mounts.append({**mount, "source": opened, "mapped": False})
        return {**order, "mounts": mounts}

    def _attach(self, order: dict[str, Any], stack: ExitStack) -> dict[str, Any]:
        source = order["source"]
        if order["read_only"] is not True or not isinstance(source, str):
            raise _denied("live mounts are read-only")
        for top, opened in self._attachable.items():
            if source == top or source.startswith(f"{top}/"):
                checked = {**order, "mask": True}  # a hostile runtime cannot leave it out
                return {**checked, "source": _held_beneath(opened, source[len(top) :], stack)}
        raise _denied(f"{source} is in none of the directories that may be mounted (mount_dirs)")

    def _words(self, order: Mapping[str, Any], grant: LaunchGrant) -> BwrapArgs:
        """Check the arguments of bwrap and the command, except for the sources."""
        args = order["args"]
        if not all(isinstance(item, str) and "\0" not in item for item in args):
            raise _denied("an option of bwrap is not plain text")
        words = take_apart(args)
        if words.skeleton not in grant.skeletons:
            raise _denied("the options of bwrap are not those of a jail")
        if tuple(order["command"]) not in grant.commands:
            raise _denied(f"no jail begins with the command {order['command']}")
        created = [item for item in words.created if item not in _above_mapped(order, words)]
        _check_all(created, grant.created, "directory or link")
        _check_all([(mode, path) for mode, _, path in words.tmpfs], grant.tmpfs, "tmpfs")
        if not all(_SIZE.fullmatch(size) for _, size, _ in words.tmpfs):
            raise _denied("a tmpfs has no limit")
        if [fd for fd, _ in words.files] != [str(DATA_FD + i) for i in range(len(words.files))]:
            raise _denied("the files are not in order")
        targets = [path for _, path in words.files]
        files = list(zip(targets, order["files"], strict=True))
        _check_all(files, grant.files, "file")
        return words

    def _stage(
        self,
        order: Mapping[str, Any],
        name: str,
        words: BwrapArgs,
        grant: LaunchGrant,
        stack: ExitStack | None,
    ) -> list[tuple[int, str, Any, bool]]:
        """Check every source. Return the staged ones, those of conversations as open files."""
        staged = {
            bind_staging.place(name, index): (index, source, expected, mapped)
            for index, source, expected, mapped in order["stage"]
            if type(index) is int and isinstance(source, str)
        }
        used: list[tuple[int, str, Any, bool]] = []
        for verb, place, target in words.binds:
            index, source, expected, mapped = staged.pop(place, (-1, place, None, False))
            shown, opened = source, source
            if mapped and stack is not None:
                opened = self._projects.opened(order["sandbox"], source, target, stack)
                used.append((index, opened, expected, True))
                continue
            if index >= 0 and stack is not None and source.startswith(f"{self._data}/"):
                shown, opened = self._open(source, stack)
            elif not source.startswith("/"):
                raise _denied(f"{source} is not a path")
            if (verb, shown, target) not in grant.binds:
                raise _denied(f"no policy shows {source} at {target}")
            if index >= 0:
                used.append((index, opened, expected, False))
        if len(used) != len(order["stage"]):
            raise _denied("something is staged that the jail does not show")
        return used

    def _open(self, source: str, stack: ExitStack) -> tuple[str, str]:
        """Return the kind of a source in the data directory, and a path to it as an open file."""
        relative = source.removeprefix(f"{self._data}/")
        match = _KEPT.fullmatch(relative)
        if match is None or relative == source:
            raise _denied(f"{source} is nothing of a sandbox")
        return match[1] or match[2] or match[3] or match[4], self._held(relative, stack)

    def _held(self, relative: str, stack: ExitStack) -> str:
        return _held_beneath(self._data_fd, relative, stack)

    def _charged(self, path: str, stack: ExitStack) -> str:
        """Return a path to the open directory of a conversation, or to the shared one."""
        relative = path.removeprefix(f"{self._data}/")
        if _CHARGED.fullmatch(relative) is None or relative == path:
            raise _denied(f"{path} is nothing of a sandbox")
        return self._held(relative, stack)

    def _check_tmpfs(self, requested: Iterable[Sequence[Any]]) -> None:
        for path, size, mode in requested:
            if (mode, path) not in self._zygotes.tmpfs or type(size) is not int or size <= 0:
                raise _denied(f"no jail has a tmpfs {path} like that")


def _held_beneath(top: int, relative: str, stack: ExitStack) -> str:
    try:
        fd = openat2.openat2(
            top,
            (relative.strip("/") or ".").encode(),
            os.O_PATH | os.O_DIRECTORY,
            resolve=openat2.RESOLVE_BENEATH | openat2.RESOLVE_NO_SYMLINKS,
        )
    except OSError as error:
        raise _denied(f"{relative} cannot be shown: {error.strerror}") from error
    stack.callback(os.close, fd)
    return f"/proc/self/fd/{fd}/."


def _above_mapped(order: Mapping[str, Any], words: BwrapArgs) -> set[tuple[str, ...]]:
    """Return the directories that bwrap creates above mounts in a mapped workspace. They exist
    already: `_stage` checks each of these mounts, and no symlink leads to one."""
    name = order.get("jail")
    places = {
        bind_staging.place(name, item[0]) for item in order["stage"] if name and item[3] is True
    }
    directories: set[tuple[str, ...]] = set()
    for _, place, target in words.binds:
        above = os.path.dirname(target)
        while place in places and above.startswith("/workspace/"):
            directories.add(("--dir", "0755", above))
            above = os.path.dirname(above)
    return directories


@contextmanager
def _named() -> Iterator[None]:
    """Hide the paths of open directories in errors: they mean nothing to other processes."""
    try:
        yield
    except Broken as error:
        if error.code != "path_replaced":
            raise
        raise bind_staging.replaced("a directory of the sandbox") from error


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _denied("that is not the name of a jail")


def _check_variables(variables: Iterable[tuple[Any, Any]]) -> None:
    for name, value in variables:
        if not isinstance(value, str) or "\0" in value or not _VARIABLE_NAME.fullmatch(name):
            raise _denied("that is not a variable")


def _check_all(items: Iterable[Any], granted: Iterable[Any], what: str) -> None:
    for item in items:
        if item not in granted:
            raise _denied(f"no policy has the {what} {item}")


def _is_below(path: str, tops: Sequence[str]) -> bool:
    return any(path == top or path.startswith(f"{top}/") for top in tops)
