"""Frozen copies of the files of a conversation.

A copy is among the conversations of its sandbox, with a name that no store has. The next start
removes the copies of a killed runtime. Between uses a copy has no open files.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from sbx import errors
from sbx.aio import in_thread, long_call, run_to_completion
from sbx.policy import Policy
from sbx.protocol.dry_runs import CHANGES_MAX, FileChange
from sbx.runtime.files.disk_limit import wall
from sbx.runtime.files.open_files import OpenFiles
from sbx.runtime.resources import RuntimeResources
from sbx.runtime.snapshots.dry_run_view import uploads_are_inert, uploads_of
from sbx.workspace import Files, HostDirectory, Tree
from sbx.workspace.quarantine import Quarantine
from sbx.workspace.safe_open import mount_id
from sbx.workspace.snapshots.apply import commit
from sbx.workspace.snapshots.copy import freeze
from sbx.workspace.snapshots.diff import FILE_MAX, plain, shown_in, tell
from sbx.workspace.snapshots.journal import Journal
from sbx.workspace.snapshots.manifest import (
    Manifest,
    Nodes,
    PlannedChange,
    Relative,
    changes,
    excluding,
    missed,
    needs_digest,
    relative,
    with_digests,
    with_specials,
)
from sbx.workspace.snapshots.scan import (
    Bounds,
    ScanScope,
    TreeScan,
    digest,
    digest_of_bytes,
    look,
    node_at,
    sealed,
    written_since,
)
from sbx.workspace.streams import Owner

T = TypeVar("T")
_NAMES = 5  # of an empty workspace


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`base` is the tree that was copied, and `frozen` the copy, each with its own identities."""

    name: str
    path: Path
    scope: ScanScope
    base: Manifest
    frozen: Manifest
    has_quota: bool


@dataclass(frozen=True, slots=True)
class Changes:
    """What would become of a tree, and how a person is told. `truncated`: there is more than is
    told, of the changes or of what was left out."""

    changed: Sequence[PlannedChange]
    before: Nodes
    told: tuple[FileChange, ...]
    truncated: bool
    left_out: tuple[str, ...]


class Snapshots:
    """The copies of one sandbox, in the directory `sandbox`. `host` returns uid and gid of its
    jails."""

    def __init__(
        self, resources: RuntimeResources, policy: Policy, sandbox: str, host: Callable[[], Owner]
    ) -> None:
        self._resources = resources
        self._policy = policy
        self._sandbox = sandbox
        self._host = host

    async def make(self, opened: OpenFiles) -> Snapshot:
        """Make a copy, or leave nothing. Raise TooLarge `workspace_too_large`, Unavailable
        `no_space` and `too_many_searches`."""
        name = self._resources.data.new_name()
        self._resources.copies.add(name)
        try:
            async with long_call():
                return await self._make(opened, name)
        except BaseException:
            await run_to_completion(self.remove(name))
            raise

    async def remove(self, name: str) -> None:
        """Once begun it is done to its end; what cannot be removed in time is swept later."""
        await in_thread(partial(self._resources.data.remove, self._sandbox, name))
        self._resources.copies.discard(name)

    async def effect(self, opened: OpenFiles, copy: Snapshot) -> Changes:
        """Return what was changed in the copy since it was made. Its jail has ended, but another
        process may still hold a descriptor of a file of the copy: each new content is recorded by
        its digest, the diff is of the content recorded, and a commit compares with it.

        Raises Conflict `workspace_changed` when the copy is written meanwhile.
        """
        bounds = self._bounds()
        return await _stoppable(opened, bounds, lambda: self._effect(opened, copy, bounds))

    async def way_back(self, opened: OpenFiles, copy: Snapshot) -> Changes:
        """What makes the files again what they were when the copy was made."""
        bounds = self._bounds()
        return await _stoppable(opened, bounds, lambda: self._way_back(opened, copy, bounds))

    async def commit(
        self,
        opened: OpenFiles,
        copy: Snapshot,
        effect: Changes,
        expected: Nodes,
        approved: Collection[Relative] = (),
    ) -> None:
        """Make these changes, whose content the copy has. Once begun it is done to its end.
        `approved`: new host executables that a person agreed to.

        Raises as `sbx.workspace.snapshots.apply.commit`, and Denied `runs_on_the_host`.
        """

        def act() -> None:
            self._commit(opened, copy, effect.changed, expected, approved)

        await run_to_completion(opened.call(act))

    @asynccontextmanager
    async def shown(self, opened: OpenFiles, copy: Snapshot) -> AsyncIterator[OpenFiles]:
        """Give the files for a jail: the copy in the place of the workspace, and frozen copies of
        other directories in which live code or the host may make a socket.

        Raises as `make`.
        """
        shown: list[OpenFiles] = []
        names: list[str] = []
        try:
            shared = uploads = None
            left_out: tuple[str, ...] = ()
            if opened.shared is not None:
                shared, base = await self._freeze_beside(opened, opened.shared, names)
                left_out = tuple(map(shown_in(opened.shared), base.left_out))
            if not await opened.call(partial(uploads_are_inert, opened)):
                uploads, _ = await self._freeze_beside(opened, uploads_of(opened), names)

            def show() -> None:
                shown.append(self._shown(opened, copy, shared, uploads))

            await run_to_completion(opened.call(show))
            shown[0].left_out += map(plain, left_out)
            yield shown[0]
        finally:
            for files in shown:
                await run_to_completion(files.close())
            for name in names:
                await run_to_completion(self.remove(name))

    async def _make(self, opened: OpenFiles, name: str) -> Snapshot:
        path = self._resources.data.frozen_path(self._sandbox, name)
        await run_to_completion(opened.call(lambda: self.tree(name).close()))
        has_quota = await self._charge(path)
        bounds, scope = self._bounds(), _scope_of(opened)

        def fill() -> Snapshot:
            with self.tree(name) as tree:
                base, frozen = freeze(_tree_of(opened), tree, scope, bounds)
            return Snapshot(name, path, scope, base, frozen, has_quota)

        return await _stoppable(opened, bounds, fill)

    async def _freeze_beside(
        self, opened: OpenFiles, source: Tree, names: list[str]
    ) -> tuple[Path, Manifest]:
        """Freeze a directory that is shown beside the files; `names` gets the name of its copy."""
        name = self._resources.data.new_name()
        self._resources.copies.add(name)
        names.append(name)
        bounds = self._bounds()
        live = Tree(os.dup(source.fd), view=source.view, owner=self._owner())

        def fill() -> Manifest:
            with live, self.tree(name) as tree:
                return freeze(live, tree, ScanScope(), bounds)[0]

        async with long_call():
            base = await _stoppable(opened, bounds, fill)
        return self._resources.data.frozen_path(self._sandbox, name) / "files", base

    async def _charge(self, path: Path) -> bool:
        resources, limits = self._resources, self._policy.limits
        if not resources.capabilities.layer("disk").found or resources.disk_quota == "off":
            return False
        return await resources.broker.charge(
            str(path),
            bytes_max=limits.workspace_max,
            inodes_max=limits.workspace_files + _NAMES,
        )

    async def empty(self, opened: OpenFiles) -> str:
        """Make a tree that no jail sees, for content that is to be committed; its name."""
        name = self._resources.data.new_name()
        self._resources.copies.add(name)
        try:
            await run_to_completion(opened.call(lambda: self.tree(name).close()))
        except BaseException:
            await run_to_completion(self.remove(name))
            raise
        return name

    @staticmethod
    def original(opened: OpenFiles) -> tuple[Tree, ScanScope]:
        """The files that are copied, and which part of them. The tree is that of `opened`."""
        return _tree_of(opened), _scope_of(opened)

    def journal(self, opened: OpenFiles, tree: Tree) -> Journal:
        """Where the changes of a copy's own tree are noted while they are made."""
        staging = opened.own.staging
        return Journal(staging, in_tree=mount_id(staging) != mount_id(tree.fd), host=None)

    async def work(self, opened: OpenFiles, act: Callable[[Bounds], T]) -> T:
        """`act` in a worker thread, within the bounds of a copy; a cancelled caller stops it."""
        bounds = self._bounds()
        return await _stoppable(opened, bounds, lambda: act(bounds))

    def _shown(
        self, opened: OpenFiles, copy: Snapshot, shared: Path | None, uploads: Path | None
    ) -> OpenFiles:
        files_path = copy.path / "files"
        with ExitStack() as resources:
            tree = self.tree(copy.name)
            resources.callback(tree.close)
            directory = quarantine = None
            identities = dict(opened.identities)
            if opened.host_directory is not None:
                directory = HostDirectory.open(files_path, jail_uid=self._host()[0])
                resources.callback(directory.close)
                identities[str(directory.path)] = directory.identity()
                if opened.protection is not None and opened.quarantine is not None:
                    directory.set_patterns_of(opened.host_directory)
                    store, shown = opened.protection.quarantines, opened.host_directory.path
                    quarantine = Quarantine.open(store, shown, directory.fd, self._owner())
                    resources.callback(quarantine.close)
            files = OpenFiles(
                files=Files(tree, None, max_bytes=self._policy.limits.file_size_max),
                uploads=None,
                measured=tree,
                files_path=files_path if directory is None else directory.path,
                uploads_path=opened.uploads_path if uploads is None else uploads,
                own=opened.own,
                shared_path=shared,
                shared_read_only=True,
                host_directory=directory,
                quarantine=quarantine,
                protection=opened.protection,
                identities=identities,
                has_quota=copy.has_quota,
                disk=wall(
                    self._resources.disk_quota,
                    self._resources.capabilities.layer("disk"),
                    charged=copy.has_quota,
                    ours=True,
                    policy=self._policy,
                ),
            )
            files.resources.push(resources.pop_all())
            return files

    def _effect(self, opened: OpenFiles, copy: Snapshot, bounds: Bounds) -> Changes:
        source = _tree_of(opened)

        def as_it_was(path: str) -> bool:
            was = copy.base.nodes[path]
            try:
                now = node_at(source, relative(path))
            except OSError:
                return False
            return now == was and now.identity == was.identity

        def before(change: PlannedChange) -> bytes | None:
            return _content(source, change) if as_it_was(change.path) else None

        with self.tree(copy.name) as tree:
            check = TreeScan(tree, copy.scope, bounds)
            after = look(tree, copy.scope, bounds)
            paths = needs_digest(copy.frozen.nodes, after.nodes)
            was = with_digests(
                copy.frozen.nodes,
                paths,
                lambda path: digest(source, relative(path), check) if as_it_was(path) else None,
            )
            specials = {path: one for path, one in copy.base.nodes.items() if one.kind == "special"}
            becomes = with_digests(
                after.nodes, paths, lambda path: digest(tree, relative(path), check)
            )
            changed = changes({**was, **specials}, with_specials(becomes, specials))
            changed = [
                one for one in excluding(changed, after.left_out) if not protected(opened, one)
            ]
            changed = [_with_set_id(sealed(tree, one, check), copy.base.nodes) for one in changed]
            told, truncated = tell(changed, shown_in(tree), before, partial(_recorded, tree))
            left_out = [*copy.base.left_out, *after.left_out]
            named = tuple(plain(shown_in(tree)(path)) for path in left_out[:CHANGES_MAX])
        return Changes(changed, was, told, truncated or len(left_out) > len(named), named)

    def _way_back(self, opened: OpenFiles, copy: Snapshot, bounds: Bounds) -> Changes:
        """What could not be seen when the copy was made is not of it, and is left alone."""
        target = _tree_of(opened)
        check = TreeScan(target, copy.scope, bounds)
        now = look(target, copy.scope, bounds)
        then = copy.base.nodes
        with self.tree(copy.name) as tree:
            paths = needs_digest(now.nodes, then)
            is_now = with_digests(
                now.nodes, paths, lambda path: digest(target, relative(path), check)
            )
            then = with_digests(then, paths, lambda path: digest(tree, relative(path), check))
            changed = changes(is_now, then)
            spared = [*copy.base.left_out, *now.unseen, *missed(changed, copy.base)]
            changed = [
                _undigested(one) for one in excluding(changed, spared) if _may_change(opened, one)
            ]
            told, truncated = tell(
                changed, shown_in(tree), partial(_content, target), partial(_content, tree)
            )
        return Changes(changed, is_now, told, truncated, ())

    def _commit(
        self,
        opened: OpenFiles,
        copy: Snapshot,
        changed: Sequence[PlannedChange],
        expected: Nodes,
        approved: Collection[Relative],
    ) -> None:
        if opened.host_directory is not None and opened.quarantine is not None:
            opened.host_directory.refuse_changes([one.relative for one in changed], approved)
            for one in changed:
                if one.after is not None and one.after.kind == "symlink":
                    opened.host_directory.refuse_link(one.relative)
        target, staging = _tree_of(opened), opened.own.staging
        host = opened.host_directory
        journal = Journal(
            staging,
            in_tree=mount_id(staging) != mount_id(target.fd),
            host=None if host is None else host.path,
        )
        with self.tree(copy.name) as tree:
            commit(changed, expected, target, tree, journal)

    def tree(self, name: str) -> Tree:
        return self._resources.data.frozen(self._sandbox, name, owner=self._owner())

    def _owner(self) -> Owner | None:
        host = self._host()
        return host if host[0] != os.geteuid() else None

    def _bounds(self) -> Bounds:
        return Bounds(self._policy.limits.workspace_max)


async def outcome(task: asyncio.Task[T], discard: Callable[[T], Awaitable[None]]) -> T | None:
    """What becomes of a task that its waiter ends with itself, with what it made meanwhile; None
    when somebody else has cancelled it."""
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        waiter = asyncio.current_task()
        assert waiter is not None
        if task.cancelled() and not waiter.cancelling():
            return None
        task.cancel()
        await run_to_completion(asyncio.wait([task]))
        if not task.cancelled() and task.exception() is None:
            await run_to_completion(discard(task.result()))
        raise


async def _stoppable(opened: OpenFiles, bounds: Bounds, act: Callable[[], T]) -> T:
    """`act` in a worker thread, which a cancelled caller stops, and waits for."""
    work = asyncio.ensure_future(opened.call(act))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        bounds.stopped.set()
        await run_to_completion(asyncio.wait([work]))
        if not work.cancelled():
            work.exception()  # told to nobody: the waiter has gone
        raise


def _tree_of(opened: OpenFiles) -> Tree:
    """The files themselves, without what is mounted on them."""
    _, places = opened.files.places(".")
    return places[0][0]


def _scope_of(opened: OpenFiles) -> ScanScope:
    if opened.host_directory is not None:
        return ScanScope()
    uploads, temparea = ("uploads",), ("uploads", "temparea")
    reserved = (uploads, temparea, ("uploads", "generated"))
    if opened.shared is None:
        return ScanScope(reserved, (temparea,))
    return ScanScope((*reserved, ("shared",)), (temparea, ("shared",)))


def _refuse(opened: OpenFiles, one: PlannedChange) -> None:
    """What a program of the host would run is read-only for the code inside, and so for us."""
    if opened.host_directory is not None and opened.quarantine is not None:
        opened.host_directory.refuse_change(one.relative)


def protected(opened: OpenFiles, one: PlannedChange) -> bool:
    """Return whether the path guard kept the content: only its times can be others in a copy."""
    host = opened.host_directory
    return host is not None and opened.quarantine is not None and host.is_protected(one.relative)


def _may_change(opened: OpenFiles, one: PlannedChange) -> bool:
    try:
        _refuse(opened, one)
    except errors.Denied:
        return False
    return True


def _with_set_id(one: PlannedChange, base: Nodes) -> PlannedChange:
    """Return the change with the set-id bits that the original has: the copy has none."""
    was = base.get(one.path)
    if one.before is None or was is None:
        return one
    return replace(one, before=replace(one.before, set_id=was.set_id))


def _undigested(one: PlannedChange) -> PlannedChange:
    """Return the change with no digest to compare with: no jail ever sees a checkpoint's copy. A
    file that was cut short while it was copied has another size than its node."""
    return one if one.after is None else replace(one, after=replace(one.after, sha256=None))


def _recorded(tree: Tree, change: PlannedChange) -> bytes | None:
    """Return the content whose digest the change has. Raises Conflict `workspace_changed`."""
    content = _content(tree, change)
    assert change.after is not None
    if content is not None and digest_of_bytes(content) != change.after.sha256:
        raise written_since(tree, change)
    return content


def _content(tree: Tree, change: PlannedChange) -> bytes | None:
    try:
        return tree.read(change.relative, max_bytes=FILE_MAX)
    except errors.SbxError:
        return None
