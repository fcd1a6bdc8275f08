"""Decide which host directories no sandbox may see: the rule alone, from facts.

    look (directory, mounts) ─► DirectoryFacts ─┐
                                                ├─► refusal (pure) ─► a reason, or None
    host facts (`workspace.allowed_paths`) ─────┘

The rule refuses `/`, homes and the directories above them, the hidden directories of a home, the
files of sbx itself, the system's directories, directories on the caller's PATH, and directories in
the homes of other users. A read-only mount (uploads, an attachment) may show a system directory,
because the code inside cannot change it; it may not show a home, the files of sbx, or a tree with
the host's processes and sockets.

A directory has two names here: its path, and its place in its file system (device and path from the
root of that). Each name is judged, so that a bind mount hides nothing. Each mount below a directory
is judged as the directory itself is.

Two processes use the rule: the runtime, and the broker of a confined service, which imports the
standard library only and gets the facts about the host as JSON.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from sbx.linux import mountinfo
from sbx.linux.mountinfo import MountInfo, Source, is_below

Identity = tuple[int, int]  # device and inode
Location = Source  # like a source, or with the device "" for the path itself

DATA_MARKER = ".sbx-data"  # in each data directory, wherever the setting `data_dir` puts it

# These trees belong to the operating system. A program of the host may execute or obey any file in
# them. The second table lists the places in these trees where people do keep projects.
SYSTEM_TREES = (
    *("/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/libx32", "/proc", "/run"),
    *("/sbin", "/sys", "/usr"),
    *("/var/backups", "/var/cache", "/var/lib", "/var/log", "/var/mail", "/var/spool"),
)
_PROJECTS_BELOW = ("/dev/shm", "/run/media", "/usr/src", "/usr/local/src")  # noqa: S108
# Only these directories themselves are refused: the projects of many users are below them, and in
# the temporary ones the sockets of other programs.
_SYSTEM_TOPS = (
    *("/home", "/media", "/mnt", "/opt", "/srv", "/tmp", "/var", "/var/tmp"),  # noqa: S108
    *_PROJECTS_BELOW,
)
SYSTEM_PATHS = tuple(dict.fromkeys(("/", *SYSTEM_TREES, *_SYSTEM_TOPS)))
# Also refused read-only: processes with their environment, devices, and sockets of daemons.
_LIVE_TREES = ("/dev", "/proc", "/run", "/sys")

# A hidden directory of a home holds credentials (.ssh, .aws), settings that programs obey (.config)
# or programs that are executed (.local/bin, .cargo/bin, .cache/pre-commit). A list of such names
# would never be complete, so all of them are refused. Exceptions: coding agents keep checkouts in
# ~/.NAME/worktrees, and a temporary directory (TMPDIR) may be in ~/.cache.
_WORKTREES = "worktrees"
_CACHE = ".cache"  # a cache of models or data sets may be shown read-only
_ON_PATH = "bin"  # ~/bin is on the PATH of a login shell where it exists


@dataclass(frozen=True, slots=True)
class ForbiddenPlace:
    """A directory or a socket of the host, by its real path and by its file system."""

    path: str
    source: Source | None = None


@dataclass(frozen=True, slots=True)
class HomeDirectory:
    """`identities`: of the home and of each directory above it. `login`: whether the account has a
    shell."""

    place: ForbiddenPlace
    user: str
    uid: int
    login: bool = True
    identities: frozenset[Identity] = frozenset()


@dataclass(frozen=True, slots=True)
class HostDirectoryFacts:
    """`private`: data, configuration and sockets of sbx. `code`: files that decide how sandboxes
    run. `programs`: directories on PATH. `caller`: the uid of this process. `sources`: those of
    SYSTEM_PATHS, by path."""

    caller: int
    homes: tuple[HomeDirectory, ...] = ()
    private: tuple[ForbiddenPlace, ...] = ()
    code: tuple[ForbiddenPlace, ...] = ()
    programs: tuple[ForbiddenPlace, ...] = ()
    temporary: str = "/tmp"  # noqa: S108
    sources: Mapping[str, Source] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        homes = [{**asdict(home), "identities": sorted(home.identities)} for home in self.homes]
        return {**asdict(self), "homes": homes}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "HostDirectoryFacts":
        homes = (
            HomeDirectory(
                _place_of_json(home["place"]),
                home["user"],
                home["uid"],
                home["login"],
                frozenset((device, inode) for device, inode in home["identities"]),
            )
            for home in data["homes"]
        )
        places = {
            name: tuple(map(_place_of_json, data[name])) for name in ("private", "code", "programs")
        }
        sources = {path: (device, root) for path, (device, root) in data["sources"].items()}
        temporary = data["temporary"]
        return cls(data["caller"], tuple(homes), **places, temporary=temporary, sources=sources)

    def system(self, path: str) -> ForbiddenPlace:
        return ForbiddenPlace(path, self.sources.get(path))


@dataclass(frozen=True, slots=True)
class DirectoryFacts:
    """`mounts`: the mounts below the directory; they have none themselves. `shielded`: relative
    paths that the sandbox mounts read-only. `data_directory`: the directory itself, or the nearest
    one above it, with the marker of a data directory of sbx."""

    place: ForbiddenPlace
    owner: int
    identity: Identity | None = None
    mounts: tuple["DirectoryFacts", ...] = ()
    shielded: tuple[str, ...] = ()
    data_directory: str | None = None


def look(fd: int, mounts: Sequence[MountInfo], shielded: tuple[str, ...] = ()) -> DirectoryFacts:
    """Return the facts about an open directory. Reads the disk. Raises OSError."""
    status = os.fstat(fd)
    path = os.readlink(f"/proc/self/fd/{fd}")
    place = place_of(path, mounts)
    below = (mount for mount in mounts if _is_strictly_below(mount.point, path))
    return DirectoryFacts(
        place=place,
        owner=status.st_uid,
        identity=(status.st_dev, status.st_ino),
        mounts=tuple(_look_at_mount(mount, mounts) for mount in below),
        shielded=shielded,
        data_directory=_data_directory(place, mounts),
    )


def _look_at_mount(mount: MountInfo, mounts: Sequence[MountInfo]) -> DirectoryFacts:
    """Return the facts about a mount. If stat fails, it has no owner: only root may show it."""
    place = ForbiddenPlace(mount.point, (mount.device, mount.root))
    owner, identity = -1, None
    with suppress(OSError):
        status = os.stat(mount.point, follow_symlinks=False)
        owner, identity = status.st_uid, (status.st_dev, status.st_ino)
    return DirectoryFacts(place, owner, identity, data_directory=_data_directory(place, mounts))


def _data_directory(place: ForbiddenPlace, mounts: Sequence[MountInfo]) -> str | None:
    paths = [place.path]
    if place.source is not None:
        paths += mountinfo.paths_of(place.source, mounts)
    for above in dict.fromkeys(above for path in paths for above in _with_parents(path)):
        if os.path.lexists(os.path.join(above, DATA_MARKER)):
            return above
    return None


def _with_parents(path: str) -> Iterator[str]:
    yield path
    while path != (path := os.path.dirname(path)):
        yield path


def place_of(path: str, mounts: Sequence[MountInfo]) -> ForbiddenPlace:
    """Return the place of a path without symlinks."""
    return ForbiddenPlace(path, mountinfo.source_of(path, mounts))


def _place_of_json(data: Mapping[str, Any]) -> ForbiddenPlace:
    source = data["source"]
    return ForbiddenPlace(data["path"], None if source is None else (source[0], source[1]))


# -- the rule --------------------------------------------------------------------------------------


def refusal(
    directory: DirectoryFacts, host: HostDirectoryFacts, *, read_only: bool = False
) -> str | None:
    """Return the reason why no sandbox may see this directory, or None. Pure."""
    if reason := _refusal(directory, host, read_only, directory):
        return reason
    for mount in directory.mounts:
        if reason := _refusal(mount, host, read_only, directory):
            what = reason.removeprefix("it ")
            return f"it contains the mount {mount.place.path}, which {what}"
    return None


def _refusal(
    directory: DirectoryFacts, host: HostDirectoryFacts, read_only: bool, top: DirectoryFacts
) -> str | None:
    """Judge a directory, or a mount below the directory `top`."""
    if _is_at(directory.place, host.system("/")):
        return "it is the whole host"
    return (
        _refusal_of_homes(directory, host)
        or _refusal_of_own_files(directory, host, read_only, top)
        or _refusal_in_homes(directory, host, read_only)
        or _refusal_in_system(directory, host, read_only)
        or (None if read_only else _refusal_of_programs(directory, host, top))
    )


def _refusal_of_homes(directory: DirectoryFacts, host: HostDirectoryFacts) -> str | None:
    for home in host.homes:
        if _is_at(directory.place, home.place):
            return f"it is the home of {home.user}"
        if _holds(directory.place, home.place):
            return f"it contains the home of {home.user}, {home.place.path}"
        if directory.identity in home.identities:
            return f"it is, or contains, the home of {home.user} by another path"
    return None


def _refusal_of_own_files(
    directory: DirectoryFacts, host: HostDirectoryFacts, read_only: bool, top: DirectoryFacts
) -> str | None:
    if directory.data_directory is not None:
        return f"it is in {directory.data_directory}, a data directory of sbx"
    for place in host.private:
        if reason := _contact(directory, place, top):
            return f"{reason}, which belongs to sbx"
    for place in () if read_only or _is_shielded(directory.place, top) else host.code:
        if reason := _contact(directory, place, top):
            return f"{reason}, which decides what sbx runs on the host"
    return None


def _contact(directory: DirectoryFacts, place: ForbiddenPlace, top: DirectoryFacts) -> str | None:
    if _lies_in(directory.place, place):
        return f"it is in {place.path}"
    if _holds(directory.place, place) and not _is_shielded(place, top):
        return f"it contains {place.path}"
    return None


def _refusal_in_homes(
    directory: DirectoryFacts, host: HostDirectoryFacts, read_only: bool
) -> str | None:
    for home in host.homes:
        if home.place.path == "/":
            continue
        for below in filter(None, _below(home.place, directory.place)):
            first, *rest = below
            path, hidden = f"{home.place.path}/{'/'.join(below)}", f"{home.place.path}/{first}"
            if first == _ON_PATH and not read_only:
                return f"it is in {hidden}, whose programs {home.user} executes"
            if first.startswith(".") and not (
                (rest[:1] == [_WORKTREES] and len(rest) > 1)
                or (read_only and first == _CACHE and rest)
                or (is_below(host.temporary, hidden) and _is_strictly_below(path, host.temporary))
            ):
                return (
                    f"it is {'' if not rest else 'in '}{hidden}, and a hidden directory of a home"
                    " holds credentials or settings"
                )
            # Root may act for every user; the code inside still has another uid. A read-only mount
            # shows what the user may read, or what the operator named.
            if not read_only and host.caller not in (0, home.uid, directory.owner):
                return f"it is in the home of {home.user}, and belongs to another user"
    return None


def _refusal_in_system(
    directory: DirectoryFacts, host: HostDirectoryFacts, read_only: bool
) -> str | None:
    trees = _LIVE_TREES if read_only else SYSTEM_TREES
    for location in _locations(directory.place):
        place = _place_at(location)
        if any(_is_at(place, host.system(top)) for top in _SYSTEM_TOPS):
            return "it is a directory of the system that several users or programs share"
        if any(_lies_in(place, host.system(top)) for top in _PROJECTS_BELOW):
            continue
        # Some services have their home in the system (/var/lib/jenkins), and projects below it.
        if any(_lies_in(place, home.place) and _is_apart(home) for home in host.homes):
            continue
        for top in trees:
            if _lies_in(place, host.system(top)):
                return f"it is in {top}, a directory of the system"
            if _holds(place, host.system(top)):
                return f"it contains {top}, a directory of the system"
    return None


def _refusal_of_programs(
    directory: DirectoryFacts, host: HostDirectoryFacts, top: DirectoryFacts
) -> str | None:
    """Refuse directories on PATH, and directories that contain one.

    A directory on PATH below the workspace is permitted if the sandbox mounts it read-only. So is
    one that holds much more than programs, such as a home."""
    if _is_shielded(directory.place, top):
        return None
    for place in host.programs:
        is_wide = any(_holds(place, home.place) for home in host.homes) or any(
            _is_at(place, host.system(shared)) for shared in _SYSTEM_TOPS
        )
        if is_wide and not _is_at(directory.place, place):
            continue
        if reason := _contact(directory, place, top):
            return f"{reason}, a directory of PATH, whose programs this user executes"
    return None


def _is_apart(home: HomeDirectory) -> bool:
    return home.login and home.place.path.count("/") >= 2


def _is_strictly_below(path: str, top: str) -> bool:
    return path != top and is_below(path, top)


def _is_at(place: ForbiddenPlace, other: ForbiddenPlace) -> bool:
    return [] in list(_below(other, place))


def _lies_in(place: ForbiddenPlace, top: ForbiddenPlace) -> bool:
    return any(True for _ in _below(top, place))


def _holds(top: ForbiddenPlace, place: ForbiddenPlace) -> bool:
    return _lies_in(place, top)


def _below(top: ForbiddenPlace, place: ForbiddenPlace) -> Iterator[list[str]]:
    """Yield the components of `place` below `top` by each name by which it is there."""
    for device, path in _locations(place):
        for other, above in _locations(top):
            if device == other and is_below(path, above):
                yield [part for part in path[len(above) :].split("/") if part]


def _locations(place: ForbiddenPlace) -> tuple[Location, ...]:
    path = () if not place.path else (("", place.path),)
    return path if place.source is None else (*path, place.source)


def _place_at(location: Location) -> ForbiddenPlace:
    return ForbiddenPlace(location[1]) if not location[0] else ForbiddenPlace("", location)


def _is_shielded(place: ForbiddenPlace, directory: DirectoryFacts) -> bool:
    top = directory.place.path
    return any(is_below(place.path, f"{top}/{name}") for name in directory.shielded)
