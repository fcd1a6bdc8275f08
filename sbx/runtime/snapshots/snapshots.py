"""Frozen copies of the files of a conversation.

A copy is among the conversations of its sandbox, with a name that no store has. The next start
removes the copies of a killed runtime. Between uses a copy has no open files.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from msgspec import Struct

from sbx.aio import in_thread, long_call, run_to_completion
from sbx.policy import Policy
from sbx.protocol.dry_runs import CHANGES_MAX
from sbx.runtime.files.disk_limit import wall
from sbx.runtime.files.open_files import OpenFiles
from sbx.runtime.resources import RuntimeResources
from sbx.runtime.snapshots.changes import (
    Changes,
    content_of,
    may_change,
    protected,
    recorded_content,
    with_set_id,
    without_digest,
)
from sbx.runtime.snapshots.dry_run_view import uploads_are_inert, uploads_of
from sbx.workspace.files import Files
from sbx.workspace.host_directory import HostDirectory
from sbx.workspace.quarantine import Quarantine
from sbx.workspace.safe_open import mount_id
from sbx.workspace.snapshots.apply import commit
from sbx.workspace.snapshots.copy import freeze
from sbx.workspace.snapshots.diff import plain, shown_in, tell
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
from sbx.workspace.snapshots.scan import Bounds, ScanScope, TreeScan, digest, look, node_at, sealed
from sbx.workspace.streams import Owner
from sbx.workspace.tree import Tree

T = TypeVar("T")
_NAMES = 5  # of an empty workspace


class Snapshot(Struct, frozen=True):
    """`base` is the tree that was copied, and `frozen` the copy, each with its own identities."""

    name: str
    path: Path
    scope: ScanScope
    base: Manifest
    frozen: Manifest
    has_quota: bool


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
        name = self._new_name()
        try:
            async with long_call():
                return await self._make(opened, name)
        except BaseException:
            await run_to_completion(self.remove(name))
            raise

    async def remove(self, name: str) -> None:
        """Remove a copy. A cancelled call still completes; the next start removes the rest."""
        await in_thread(partial(self._resources.data.remove, self._sandbox, name))
        self._resources.copies.discard(name)

    async def effect(self, opened: OpenFiles, copy: Snapshot) -> Changes:
        """Return the changes in the copy since it was made. Its jail has ended, but another process
        may still have a descriptor of a file of the copy: record each new content by its digest,
        so that a commit can compare with it, and diff the recorded content.

        Raise Conflict `workspace_changed` if the copy is written meanwhile.
        """
        return await self.work(opened, lambda bounds: self._effect(opened, copy, bounds))

    async def way_back(self, opened: OpenFiles, copy: Snapshot) -> Changes:
        """Return the changes that restore the files of the copy."""
        return await self.work(opened, lambda bounds: self._way_back(opened, copy, bounds))

    async def commit(
        self,
        opened: OpenFiles,
        copy: Snapshot,
        effect: Changes,
        expected: Nodes,
        approved: Collection[Relative] = (),
    ) -> None:
        """Make these changes, whose content the copy has. A cancelled call still completes.
        `approved`: the new host executables that the user approved.

        Raise as `sbx.workspace.snapshots.apply.commit`, and Denied `runs_on_the_host`.
        """

        act = partial(self._commit, opened, copy, effect.changed, expected, approved)
        await run_to_completion(opened.call(act))

    @asynccontextmanager
    async def shown(self, opened: OpenFiles, copy: Snapshot) -> AsyncIterator[OpenFiles]:
        """Yield the files for a jail: the copy instead of the workspace, and frozen copies of other
        directories in which live code or the host may create a socket. Raise as `make`."""
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
        scope = _scope_of(opened)

        def fill(bounds: Bounds) -> Snapshot:
            with self.tree(name) as tree:
                base, frozen = freeze(_tree_of(opened), tree, scope, bounds)
            return Snapshot(name, path, scope, base, frozen, has_quota)

        return await self.work(opened, fill)

    async def _freeze_beside(
        self, opened: OpenFiles, source: Tree, names: list[str]
    ) -> tuple[Path, Manifest]:
        """Freeze a directory that a jail sees in addition to the files. Append the name of the copy
        to `names`."""
        name = self._new_name()
        names.append(name)
        live = Tree(os.dup(source.fd), view=source.view, owner=self._owner())

        def fill(bounds: Bounds) -> Manifest:
            with live, self.tree(name) as tree:
                return freeze(live, tree, ScanScope(), bounds)[0]

        async with long_call():
            base = await self.work(opened, fill)
        return self._resources.data.frozen_path(self._sandbox, name) / "files", base

    async def _charge(self, path: Path) -> bool:
        resources, limits = self._resources, self._policy.limits
        if not resources.capabilities.layer("disk").available or resources.disk_quota == "off":
            return False
        return await resources.broker.charge(
            str(path),
            bytes_max=limits.workspace_max,
            inodes_max=limits.workspace_files + _NAMES,
        )

    async def empty(self, opened: OpenFiles) -> str:
        """Make a tree that no jail sees, for content to commit. Return its name."""
        name = self._new_name()
        try:
            await run_to_completion(opened.call(lambda: self.tree(name).close()))
        except BaseException:
            await run_to_completion(self.remove(name))
            raise
        return name

    def _new_name(self) -> str:
        name = self._resources.data.new_name()
        self._resources.copies.add(name)
        return name

    @staticmethod
    def original(opened: OpenFiles) -> tuple[Tree, ScanScope]:
        """Return the files to copy, as the tree of `opened`, and the part of them."""
        return _tree_of(opened), _scope_of(opened)

    def journal(self, opened: OpenFiles, tree: Tree, host: Path | None = None) -> Journal:
        """Return the journal for changes of a tree, which is a directory `host` or a copy."""
        staging = opened.own.staging
        return Journal(staging, in_tree=mount_id(staging) != mount_id(tree.fd), host=host)

    async def work(self, opened: OpenFiles, act: Callable[[Bounds], T]) -> T:
        """Call `act` in a worker thread, with the bounds of a copy. A cancelled caller stops the
        call, and waits for its end."""
        bounds = Bounds(self._policy.limits.workspace_max)
        work = asyncio.ensure_future(opened.call(lambda: act(bounds)))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            bounds.stopped.set()
            await run_to_completion(asyncio.wait([work]))
            if not work.cancelled():
                work.exception()  # the caller is cancelled: mark the error as seen
            raise

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
            return content_of(source, change) if as_it_was(change.path) else None

        with self.tree(copy.name) as tree:
            check = TreeScan(tree, copy.scope, bounds)
            after = look(tree, copy.scope, bounds)
            paths = needs_digest(copy.frozen.nodes, after.nodes)
            was = with_digests(
                copy.frozen.nodes,
                paths,
                lambda path: digest(source, relative(path), check) if as_it_was(path) else None,
            )
            specials = {
                path: change for path, change in copy.base.nodes.items() if change.kind == "special"
            }
            becomes = with_digests(
                after.nodes, paths, lambda path: digest(tree, relative(path), check)
            )
            changed = changes({**was, **specials}, with_specials(becomes, specials))
            changed = [
                node for node in excluding(changed, after.left_out) if not protected(opened, node)
            ]
            changed = [
                with_set_id(sealed(tree, change, check), copy.base.nodes) for change in changed
            ]
            summary, truncated = tell(
                changed, shown_in(tree), before, partial(recorded_content, tree)
            )
            left_out = [*copy.base.left_out, *after.left_out]
            named = tuple(plain(shown_in(tree)(path)) for path in left_out[:CHANGES_MAX])
        return Changes(changed, was, summary, truncated or len(left_out) > len(named), named)

    def _way_back(self, opened: OpenFiles, copy: Snapshot, bounds: Bounds) -> Changes:
        """Leave files alone that could not be read for the copy: the copy does not have them."""
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
                without_digest(change)
                for change in excluding(changed, spared)
                if may_change(opened, change)
            ]
            summary, truncated = tell(
                changed, shown_in(tree), partial(content_of, target), partial(content_of, tree)
            )
        return Changes(changed, is_now, summary, truncated, ())

    def _commit(
        self,
        opened: OpenFiles,
        copy: Snapshot,
        changed: Sequence[PlannedChange],
        expected: Nodes,
        approved: Collection[Relative],
    ) -> None:
        if opened.host_directory is not None and opened.quarantine is not None:
            opened.host_directory.refuse_changes([change.relative for change in changed], approved)
            for change in changed:
                if change.after is not None and change.after.kind == "symlink":
                    opened.host_directory.refuse_link(change.relative)
        target, host = _tree_of(opened), opened.host_directory
        journal = self.journal(opened, target, None if host is None else host.path)
        with self.tree(copy.name) as tree:
            commit(changed, expected, target, tree, journal)

    def tree(self, name: str) -> Tree:
        return self._resources.data.frozen(self._sandbox, name, owner=self._owner())

    def _owner(self) -> Owner | None:
        host = self._host()
        return host if host[0] != os.geteuid() else None


def _tree_of(opened: OpenFiles) -> Tree:
    """Return the files without the mounts on them."""
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
