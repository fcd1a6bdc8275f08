"""Directories of the host that were mounted into a sandbox while it lives.

Each is seen in every kernel of the sandbox, whichever path it came by, and in those that start
later, until it is unmounted or the sandbox is closed; a service keeps them for a sandbox that it
closes and opens again, for as long as its own process lives. How it is done is known to
`sbx.isolation.broker.live_mounts`.
"""

import asyncio
import logging
import os
import re
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from sbx import errors
from sbx.aio import in_thread, run_to_completion
from sbx.guest.granted_packages import PREFIX, TOP
from sbx.isolation.broker.live_mounts import SHARED, refuse_without_namespaces
from sbx.kernels.kernel import Kernel
from sbx.policy.checks import mount_source
from sbx.protocol.mounts import Mount
from sbx.runtime.snapshots.dry_run_view import is_inert
from sbx.workspace.allowed_paths import Check, MountSources

_log = logging.getLogger(__name__)
_PACKAGES = f"{TOP}/{PREFIX}"  # `mount` does not take such a target
MOUNTS_MAX = 32
_TARGET = re.compile(rf"(?:{TOP}|{SHARED})/[A-Za-z0-9][A-Za-z0-9._-]{{0,63}}")
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9._-]+")


class _Mounted(Struct, frozen=True):
    """`identity`: (device, inode) of the source. `conversation`: the only one that sees it; None:
    every one."""

    mount: Mount
    identity: tuple[int, int]
    conversation: str | None = None

    @property
    def target(self) -> str:
        return self.mount.target

    def overlaps(self, other: "_Mounted") -> bool:
        """Return whether a kernel would see both at the same path."""
        seers = {self.conversation, other.conversation}
        return self.target == other.target and (None in seers or len(seers) == 1)


class LiveMounts:
    """The live mounts of one sandbox. Call the methods from one event loop; calls may be
    concurrent."""

    def __init__(
        self,
        shares: bool,
        *,
        guarded: bool,
        possible: bool,
        check: Check,
        sources: MountSources | None = None,
    ) -> None:
        """`shares`: whether there is a /workspace/shared. `guarded`: whether the policy keeps host
        executables from code inside, so that nothing is mounted to be written to. `possible`:
        whether the broker has power over the mounts of a jail that lives. `check` refuses
        directories that no sandbox may see. `sources`: the allowed ones; None allows each."""
        self._shares = shares
        self._guarded = guarded
        self._possible = possible
        self._check = check
        self._sources = sources
        self._lock = asyncio.Lock()
        self._there: dict[tuple[str | None, str], _Mounted] = {}  # by conversation and target
        self._kernels: dict[Kernel, set[str]] = {}  # the mounts of each live kernel
        self._conversations: dict[Kernel, str] = {}
        self._dry_runs: set[Kernel] = set()  # which see nothing that is mounted later

    @property
    def there(self) -> tuple[Mount, ...]:
        """The mounts that every conversation sees."""
        shared = {entry.target: entry for entry in self._there.values() if not entry.conversation}
        return tuple(shared[target].mount for target in sorted(shared))

    async def mount(
        self,
        source: str | Path,
        target: str | None = None,
        *,
        read_only: bool = True,
        conversation: str | None = None,
        sources: MountSources | None = None,
    ) -> Mount:
        """Mount the directory `source` at `target`, or at `/mnt/NAME` with its own name: read-only,
        without set-id bits and devices.

        A writable directory is mounted at `/workspace/shared/NAME`, which must exist as an empty
        directory by a policy that shares: Landlock allows no writes elsewhere. A directory of root
        is never writable. With a `conversation` no other one sees it. `sources`: see
        `show_to`.

        Raise BadRequest `invalid_target` and `invalid_source`, Denied `directory_forbidden`,
        `mount_not_guarded`, `source_of_root` and `not_granted`, Conflict `already_mounted`,
        `too_many_mounts` and `target_moved`, Unavailable `live_mount_unavailable`, `mount_failed`
        and `sockets_not_masked`. Then no kernel sees the directory.
        """
        path = Path(source)
        target = target or f"{TOP}/{_name_of(path)}"
        self._check_target(target, read_only=read_only)
        if not self._possible:
            raise refuse_without_namespaces()
        if self._sources is not None:
            self._sources.check(path, read_only=read_only)
        sources = sources or self._sources
        identity = await in_thread(_identity, path, read_only, self._check, sources)
        if not read_only and self._guarded:
            raise errors.Denied(
                f"code inside could create files in {path} that programs of the host obey",
                code="mount_not_guarded",
                hint="mount it read-only, or make it the workspace; a policy with"
                ' host_executables = "allow" allows it',
            )
        mount = Mount(str(path), target, read_only)
        return await run_to_completion(self._mount(_Mounted(mount, identity, conversation)))

    async def show_to(self, conversation: str, sources: MountSources, source: str) -> str:
        """Mount a directory read-only for one conversation, and return its path inside. `sources`
        are allowed in addition to those of the service; no symlink below them is followed. Raise
        as `mount`."""
        mounted = await self.mount(source, conversation=conversation, sources=sources)
        return mounted.target

    async def show_packages(self, conversation: str, top: Path, name: str) -> str:
        """Mount a directory of installed packages, which sbx has made, read-only for one
        conversation, and return its path inside. Raise as `mount`."""
        if not self._possible:
            raise refuse_without_namespaces()
        identity = await in_thread(_identity, top, True, lambda *_: None, None)
        mount = Mount(str(top), f"{_PACKAGES}{name}", True)
        await run_to_completion(self._mount(_Mounted(mount, identity, conversation)))
        return mount.target

    async def hide_from(self, conversation: str, target: str) -> None:
        """Unmount the directory of one conversation. Raise as `unmount`."""
        await run_to_completion(self._unmount(target, conversation))

    async def unmount(self, target: str) -> None:
        """Unmount a directory; open files of it stay open. Raise NotFound `not_mounted`, and the
        errors of the broker."""
        await run_to_completion(self._unmount(target))

    async def mount_into(self, kernel: Kernel, conversation: str) -> None:
        """Mount the current mounts into a started kernel of a conversation. If this fails, the
        kernel ends."""
        self._register(kernel)
        self._conversations[kernel] = conversation
        if self._there or self._lock.locked():
            try:
                async with self._lock:
                    for entry in self._there.values():
                        await self._show(entry, kernel)
            except BaseException:
                await run_to_completion(kernel.kill())
                raise

    async def mount_into_dry_run(self, kernel: Kernel, written: Sequence[Path]) -> list[str]:
        """Show the kernel of a dry run the mounts through which it cannot act on anything,
        and return the paths of the others. It ends where that fails.

        A mount is shown when it is read-only, holds no socket and no FIFO, and live code
        cannot make one there. `written`: further directories that live code writes to.
        """
        self._dry_runs.add(kernel)
        self._register(kernel)
        left_out = []
        if self._there or self._lock.locked():
            try:
                async with self._lock:
                    mounted = [each for each in self._there.values() if not each.conversation]
                    sources = [
                        Path(entry.mount.source) for entry in mounted if not entry.mount.read_only
                    ]
                    sources += written
                    for entry in mounted:
                        if entry.conversation is None and await in_thread(
                            _is_inert, entry, sources
                        ):
                            await self._show(entry, kernel)
                        else:
                            left_out.append(entry.target)
            except BaseException:
                await run_to_completion(kernel.kill())
                raise
        return left_out

    def _register(self, kernel: Kernel) -> None:
        self._kernels = {entry: shown for entry, shown in self._kernels.items() if entry.alive}
        self._conversations = {k: name for k, name in self._conversations.items() if k.alive}
        self._kernels[kernel] = set()
        self._dry_runs &= self._kernels.keys()

    async def _mount(self, entry: _Mounted) -> Mount:
        async with self._lock:
            if any(entry.overlaps(other) for other in self._there.values()):
                raise errors.Conflict(
                    f"something is mounted at {entry.target} already",
                    code="already_mounted",
                    hint="unmount it first, or choose another name",
                )
            if len(self._there) >= MOUNTS_MAX:
                raise errors.Conflict(
                    f"a sandbox has at most {MOUNTS_MAX} directories mounted",
                    code="too_many_mounts",
                    details={"limit": MOUNTS_MAX},
                )
            try:
                for kernel in self._live():
                    if kernel not in self._dry_runs:
                        await self._show(entry, kernel)
            except BaseException:
                for kernel in self._live():
                    with suppress(errors.SbxError):
                        if self._sees(kernel, entry.conversation):
                            await self._hide(entry.target, kernel)
                raise
            self._there[entry.conversation, entry.target] = entry
            return entry.mount

    async def _unmount(self, target: str, conversation: str | None = None) -> None:
        async with self._lock:
            if (conversation, target) not in self._there:
                raise not_mounted(target)
            for kernel in self._live():
                if self._sees(kernel, conversation):
                    await self._hide(target, kernel)
            del self._there[conversation, target]

    async def _show(self, entry: _Mounted, kernel: Kernel) -> None:
        shown = self._kernels.get(kernel, set())
        if entry.target in shown or entry.conversation not in (
            None,
            self._conversations.get(kernel),
        ):
            return
        try:
            mount = entry.mount
            rule = kernel.jail.plan.unix_sockets
            masked = await kernel.jail.attach(
                mount.source,
                mount.target,
                read_only=mount.read_only,
                expected=entry.identity,
                mask=rule != "any",
                partly=rule == "none",
            )
            if masked:
                _log.info("%d sockets and FIFOs of %s are covered", masked, mount.source)
        except errors.Broken as error:
            if kernel.alive or error.code == "path_replaced":
                raise
        else:
            shown.add(entry.target)

    async def _hide(self, target: str, kernel: Kernel) -> None:
        shown = self._kernels.get(kernel, set())
        if target not in shown:
            return
        try:
            await kernel.jail.detach(target)
        except errors.Broken:
            if kernel.alive:
                raise
        shown.discard(target)

    def _sees(self, kernel: Kernel, conversation: str | None) -> bool:
        """Return whether the kernel sees a mount for this conversation; None: for every one."""
        return conversation in (None, self._conversations.get(kernel))

    def _live(self) -> list[Kernel]:
        return [kernel for kernel in self._kernels if kernel.alive]

    def _check_target(self, target: str, *, read_only: bool) -> None:
        if not _TARGET.fullmatch(target):
            raise errors.BadRequest(
                f"nothing can be mounted at {target!r}",
                code="invalid_target",
                hint=f"{TOP}/NAME or {SHARED}/NAME: letters, digits and ._- with a letter first",
            )
        shared = target.startswith(f"{SHARED}/")
        if shared and not self._shares:
            raise errors.BadRequest(
                f"this sandbox has no {SHARED}",
                code="invalid_target",
                hint=f"mount at {TOP}/NAME, or use a policy with shared = true",
            )
        if not read_only and not shared:
            raise errors.BadRequest(
                f"at {target} nothing can be written, by Landlock's rules",
                code="invalid_target",
                hint=f"mount a writable directory at {SHARED}/NAME",
            )


def not_mounted(target: str) -> errors.NotFound:
    return errors.NotFound(f"nothing is mounted at {target[:200]!r}", code="not_mounted")


def _name_of(source: Path) -> str:
    return _NOT_IN_A_NAME.sub("-", source.name).lstrip("._-")[:64] or "mounted"


def _is_inert(entry: _Mounted, written: Sequence[Path]) -> bool:
    """Return whether a dry run may see it. Below /workspace Landlock lets FIFOs be written to."""
    if not entry.mount.read_only or not entry.target.startswith(f"{TOP}/"):
        return False
    return is_inert(Path(entry.mount.source), entry.identity, written)


def _identity(
    source: Path, read_only: bool, check: Check, sources: MountSources | None
) -> tuple[int, int]:
    try:
        how = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(source, how) if sources is None else sources.open(source)
        try:
            check(fd, read_only)
            status = os.fstat(fd)
        finally:
            os.close(fd)
        mount_source(str(source))
    except ValueError as error:
        raise _unusable(source, str(error)) from None
    except OSError as error:
        raise _unusable(source, os.strerror(error.errno) if error.errno else str(error)) from None
    if not source.is_absolute() or str(source) != os.path.normpath(source):
        raise _unusable(source, "it is not an absolute path without . and ..")
    if not stat.S_ISDIR(status.st_mode):
        raise _unusable(source, "it is not a directory")
    if not read_only and status.st_uid == 0:
        raise errors.Denied(
            f"{source} belongs to root, and nothing inside may write to it",
            code="source_of_root",
            hint="mount it read-only, or give the directory to another user",
        )
    return status.st_dev, status.st_ino


def _unusable(source: Path, why: str) -> errors.BadRequest:
    return errors.BadRequest(
        f"{source} cannot be mounted: {why}",
        code="invalid_source",
        hint="name a directory of the host by its own absolute path, and not by a symlink",
    )
