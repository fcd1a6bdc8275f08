"""The open files of a conversation, and the limit for the open files of a service."""

import asyncio
import logging
import os
import resource
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

from msgspec import Struct

from sbx.aio import WorkerThreads
from sbx.isolation.broker.bind_staging import replaced
from sbx.isolation.launch_plan import GuardPaths, Wall
from sbx.policy import Policy
from sbx.runtime.files.streams import IncomingFiles
from sbx.runtime.files.watch import Watches
from sbx.workspace.allowed_paths import Check
from sbx.workspace.files import Files
from sbx.workspace.host_directory import HostDirectory
from sbx.workspace.host_executable_links import ENTRIES_MAX, ExecutableLinks
from sbx.workspace.layout import ConversationFiles, DataDirectory
from sbx.workspace.paths import UPLOADS, UPLOADS_APART
from sbx.workspace.quarantine import HostProtection, Quarantine
from sbx.workspace.tree import Tree
from sbx.workspace.uploads import Uploads

_log = logging.getLogger(__name__)

Identity = tuple[int, int]  # device and inode
CloseIfIdle = Callable[[], bool]  # whether the files are closed now
_DESCRIPTORS = 4  # of one conversation: its files, uploads, incoming files, and shared files
_SHARE = 4  # at most one of so many descriptors of the process
_OPEN_MIN = 16
_OPEN_MAX = 4096


class OpenFilesLimit:
    """The limit for conversations with open files.

    Open files need several descriptors, of which a process has a limited number. A caller that
    uses many conversations must not take them all. Therefore the least recently used conversation
    that is idle is closed, and opens again with its next use. More than `most` conversations are
    open only while each of them has a kernel or an incoming file, which have their own limits.
    Without `most`, the limit of descriptors decides. A conversation is known by its callback.
    """

    def __init__(self, most: int | None = None) -> None:
        self.most = _by_descriptors() if most is None else most
        self._open: dict[CloseIfIdle, None] = {}  # the least recently used first

    def __len__(self) -> int:
        return len(self._open)

    def used(self, close_if_idle: CloseIfIdle) -> None:
        """Note that these files are open, and about to be used."""
        self._open.pop(close_if_idle, None)
        self._open[close_if_idle] = None
        for close_other in list(self._open):
            if len(self._open) <= self.most:
                return
            if close_other != close_if_idle and close_other():
                self._open.pop(close_other, None)

    def closed(self, close_if_idle: CloseIfIdle) -> None:
        self._open.pop(close_if_idle, None)


def _by_descriptors() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _OPEN_MAX
    return max(_OPEN_MIN, min(_OPEN_MAX, soft // (_DESCRIPTORS * _SHARE)))


class MountPoints(Struct, frozen=True):
    """The directories of the host for the start of a jail, with their identities: the owner may
    replace a directory before it is mounted. `guard` is only for a host workspace."""

    identities: Mapping[str, Identity]
    guard: GuardPaths | None = None


@dataclass(slots=True, eq=False)
class OpenFiles(WorkerThreads):
    """The open files of a conversation, for calls of the host and for the mounts of its jails.

    `uploads` is None if a directory of the host is mounted as the uploads, and `measured` is None
    if the policy does not limit the files. With `has_quota` Linux limits them, and `disk` states it
    in the receipt. `shared` are the files that conversations share. `left_out` are the paths that a
    live kernel sees and the jail of this dry run does not. `identities` are (device, inode) of host
    directories by path. `mapped`: the files belong to another host uid than that of the jail.
    """

    files: Files
    uploads: Uploads | None
    measured: Tree | None
    files_path: Path
    uploads_path: Path
    own: ConversationFiles
    shared_path: Path | None = None
    shared_read_only: bool = False
    host_directory: HostDirectory | None = None
    quarantine: Quarantine | None = None
    protection: HostProtection | None = None
    identities: Mapping[str, Identity] = field(default_factory=dict)
    resources: ExitStack = field(default_factory=ExitStack)
    untouched: bool = False
    shared: Tree | None = None
    has_quota: bool = False
    disk: Wall | None = None
    intakes: IncomingFiles = field(default_factory=IncomingFiles)
    watches: Watches = field(default_factory=Watches)
    left_out: list[str] = field(default_factory=list)
    mapped: bool = False
    looking: threading.Lock = field(default_factory=threading.Lock)

    @property
    def busy(self) -> bool:
        """Whether a call or an incoming file needs the open files."""
        return self.users > 0 or bool(self.working) or self.intakes.filling

    @property
    def any_guard(self) -> GuardPaths | None:
        """A guard of this kind, with the parts that a zygote needs."""
        return GuardPaths("") if self.quarantine is not None else None

    async def prepare(self) -> MountPoints:
        """Prepare the mount points before each start of a jail, and read the identities.

        The first start in a workspace of sbx needs nothing: it was prepared when it was opened, no
        jail has run in it since, and no API removes a mount point.
        """
        if self.untouched:
            self.untouched = False
            return MountPoints(self.identities)
        return await self.call(self._prepare)

    def _prepare(self) -> MountPoints:
        self.own.prepare(shared=self.shared_path is not None)
        if self.host_directory is None or self.quarantine is None:
            return MountPoints(self.identities)
        links = self.look_at_links()
        if not links.complete:
            _log.warning(
                "%s has more than %d entries: a link from a host executable to a file there may be"
                " unprotected",
                self.host_directory.path,
                ENTRIES_MAX,
            )
        inside = str(self.quarantine.inside)
        status = os.stat(inside)
        guard = GuardPaths(inside, None if links.complete else ENTRIES_MAX)
        return MountPoints({**self.identities, inside: (status.st_dev, status.st_ino)}, guard)

    def look_at_links(self) -> ExecutableLinks:
        """Find the targets of host executables, and write the rules of the path guards. Blocks as
        `HostDirectory.find_links`. Raises OSError.

        The start of a kernel and the watch of the links do this in two threads. A call waits for an
        earlier one, so that the rules of the later walk remain.
        """
        assert self.host_directory is not None
        assert self.quarantine is not None
        with self.looking:
            links = self.host_directory.find_links()
            rules = self.host_directory.rules.to_json()
            self.quarantine.set_rules({"rules": rules, "linked": sorted(links.linked)})
        return links

    def close_if_idle(self) -> None:
        """Close the files, which are not busy. A stream has its own descriptor."""
        assert not self.busy
        self.resources.close()

    async def close(self) -> None:
        self.watches.stop()
        await self.intakes.stop()
        if self.working:
            await asyncio.wait(self.working)
        self.resources.close()


def open_files(
    data: DataDirectory,
    sandbox: str,
    conversation: str,
    policy: Policy,
    host: tuple[int, int],
    workspace: Path | None,
    uploads: Path | None,
    *,
    protection: HostProtection,
    new: bool = True,
    check: Check | None = None,
    mapped: bool = False,
    owner_uid: int | None = None,
) -> OpenFiles:
    """Open the files of a conversation: of a `new` one, or of one in which jails have run.

    `sandbox` and `conversation` are opaque names, `host` the uid and gid of its jails,
    `protection` is about host executables of a `workspace`. `check` refuses directories of the host
    by their descriptors. `mapped`: jails see the owner of the `workspace` as `host`, and files that
    are made from outside get the owner that the directory has on disk. `owner_uid`: the owner of
    the `workspace` from which the caller chose `host` and `mapped`.

    Raises Denied `directory_forbidden` and `workspace_owned_by_root`, NotFound, InvalidPath, and
    Broken `path_replaced` for a workspace of another owner.
    """
    owner = host if host[0] != os.geteuid() else None
    largest = policy.limits.file_size_max
    with ExitStack() as resources:
        own = data.conversation(sandbox, conversation, owner=owner)
        resources.callback(own.close)
        identities: dict[str, Identity] = {}
        put: Uploads | None = own.uploads
        uploads_path, uploads_tree = own.uploads_path, own.uploads.tree
        if uploads is not None:
            mounted = resources.enter_context(
                closing(HostDirectory.open(uploads, jail_uid=host[0], read_only=True))
            )
            if check is not None:
                check(mounted.fd, True)
            identities[str(mounted.path)] = mounted.identity()
            put, uploads_path, uploads_tree = None, mounted.path, mounted.tree(view=UPLOADS)
            resources.callback(uploads_tree.close)
        if workspace is None:
            shared = data.shared(sandbox, owner=owner) if policy.shared else None
            if shared is not None:
                resources.callback(shared.close)
            opened = OpenFiles(
                files=Files(
                    own.files,
                    uploads_tree,
                    shared,
                    max_bytes=largest,
                    total_max_bytes=policy.limits.workspace_max,
                ),
                uploads=put,
                measured=own.files,
                files_path=own.files_path,
                uploads_path=uploads_path,
                own=own,
                shared_path=data.shared_path(sandbox) if shared is not None else None,
                shared=shared,
                identities=identities,
                untouched=new and shared is None,
            )
        else:
            directory = HostDirectory.open(workspace, jail_uid=host[0], mapped=mapped)
            resources.callback(directory.close)
            # The uid of the jail was chosen by path: another user may have exchanged the directory.
            if owner_uid is not None and directory.owner[0] != owner_uid:
                raise replaced(str(workspace))
            if check is not None:
                check(directory.fd, False)
            identities[str(directory.path)] = directory.identity()
            tree = directory.tree(owner=directory.owner if mapped else owner)
            resources.callback(tree.close)
            quarantine = None
            if policy.host_executables != "allow":
                directory.set_patterns(add=protection.add, remove=protection.remove)
                store = protection.quarantines
                quarantine = Quarantine.open(store, directory.path, directory.fd, owner)
                resources.callback(quarantine.close)
            uploads_tree.view = UPLOADS_APART
            opened = OpenFiles(
                files=Files(
                    tree,
                    uploads_tree,
                    uploads_apart=True,
                    max_bytes=largest,
                    host=directory if quarantine is not None else None,
                ),
                uploads=put,
                measured=None,
                files_path=directory.path,
                uploads_path=uploads_path,
                own=own,
                host_directory=directory,
                quarantine=quarantine,
                protection=protection,
                identities=identities,
                mapped=mapped,
            )
        opened.resources.push(resources.pop_all())
        return opened
