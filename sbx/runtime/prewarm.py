"""A prewarmed sandbox: a cgroup, a host uid and one empty conversation, without an owner.

Most of the work for a new sandbox depends on its policy only. So a kernel can enter such a sandbox
and lock itself down before a request. The next request for a sandbox by this policy gets all of it
at once. It never had files of a user, runs no code of a user before, and is used once.
"""

import asyncio
import logging
import secrets
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from sbx.aio import in_thread, run_to_completion
from sbx.errors import SbxError
from sbx.isolation.broker.client import HostIds
from sbx.isolation.launch_plan import Interpreter
from sbx.kernels.kernel import Kernel
from sbx.kernels.pool.warm_pool import LaunchRequest, PrewarmedKernel, PrewarmSpec, destroy
from sbx.kernels.pool.zygotes import Key
from sbx.policy import Policy
from sbx.runtime.resources import RuntimeResources

if TYPE_CHECKING:
    from sbx.runtime.files.open_files import OpenFiles

_log = logging.getLogger(__name__)


class PrewarmedSandbox(Struct, eq=False):
    """See the module. `group` is its name at the broker, `directory` and `conversation` are opaque
    names below the data directory. `opened` and `kernel` are there until they are taken."""

    resources: RuntimeResources
    group: str
    host: HostIds
    directory: str
    conversation: str
    files_path: Path
    opened: "OpenFiles | None"
    order: LaunchRequest
    kernel: Kernel | None = None
    key: Key | None = None

    def take_files(self) -> "OpenFiles | None":
        """Return the open files of its conversation to the first caller, then None."""
        taken, self.opened = self.opened, None
        return taken

    def take_kernel(self) -> Kernel | None:
        """Return its kernel to the first caller, if it still lives, then None."""
        taken, self.kernel = self.kernel, None
        if taken is not None and not taken.alive:
            taken.close()
            return None
        return taken

    async def leave(self) -> None:
        """End the parts that were not taken. The owner removes the cgroup and the directory."""
        await self.end_kernel()
        if (opened := self.take_files()) is not None:
            await opened.close()

    async def end_kernel(self) -> None:
        if (kernel := self.take_kernel()) is not None:
            await destroy(kernel)

    async def leave_group(self) -> None:
        """Do the same, and remove the cgroup."""
        await self.leave()
        await self.resources.broker.drop_sandbox(self.group)

    async def give_up(self) -> None:
        """Remove all of it if it got no owner; the next start removes the rest."""
        try:
            await self.leave()
        except (SbxError, OSError) as error:
            _log.warning("an unused prewarmed sandbox is left over: %s", error)
        finally:
            await _remove(self.resources, self.group, self.directory)


async def make_prewarmed(
    resources: RuntimeResources, policy: Policy, interpreter: Interpreter
) -> PrewarmedSandbox:
    """Make a prewarmed sandbox. Raise the errors of the broker, and OSError; then nothing is
    left."""
    making = asyncio.ensure_future(_make(resources, policy, interpreter))
    try:
        return await run_to_completion(making)
    except asyncio.CancelledError:
        if not making.cancelled() and making.exception() is None:
            await run_to_completion(making.result().give_up())
        raise


async def _make(
    resources: RuntimeResources, policy: Policy, interpreter: Interpreter
) -> PrewarmedSandbox:
    from sbx.runtime.files.disk_limit import limited  # after the first kernel has started
    from sbx.runtime.files.open_files import open_files

    group = f"prewarmed-{secrets.token_hex(6)}"
    directory, conversation = resources.data.new_name(), resources.data.new_name()
    resources.unowned_directories.add(directory)
    opened = None
    try:
        host = await resources.broker.make_sandbox(group, resources.group_limits(policy))
        ids = (host.uid, host.gid)
        opened = await asyncio.to_thread(
            open_files,
            resources.data,
            directory,
            conversation,
            policy,
            ids,
            None,
            None,
            protection=resources.protection,
        )
        await limited(resources, policy, opened)
        ready = await opened.prepare()
        paths = resources.paths(opened, ready, interpreter)
        order = resources.order(group, policy, paths, ready, None)
    except BaseException:
        try:
            if opened is not None:
                await opened.close()
        finally:
            await _remove(resources, group, directory)
        raise
    return PrewarmedSandbox(
        resources, group, host, directory, conversation, opened.files_path, opened, order
    )


async def _remove(resources: RuntimeResources, group: str, directory: str) -> None:
    """Each whatever becomes of the other; from then on a collection may remove the directory."""
    try:
        try:
            await resources.broker.drop_sandbox(group)
        finally:
            await in_thread(resources.data.remove, directory)
    except (SbxError, OSError) as error:
        _log.warning("an unused prewarmed sandbox is left over: %s", error)
    finally:
        resources.unowned_directories.discard(directory)


def prewarm_spec(
    resources: RuntimeResources, loaded: Policy, decided: Policy, of: Interpreter
) -> PrewarmSpec | None:
    """Return how to make prewarmed sandboxes by this policy. Return None if a request changed the
    policy, or if a sandbox by it has parts that cannot be made before a request."""
    if decided != loaded or decided.network.mode != "none" or decided.environment is not None:
        return None
    if decided.honeytoken.enabled:
        return None
    return PrewarmSpec((decided, of), partial(make_prewarmed, resources, decided, of))


def to_prewarmed_sandbox(
    prewarmed: PrewarmedKernel | None, key: Key | None
) -> PrewarmedSandbox | None:
    """Return the prewarmed sandbox with its kernel, which the caller owns from here on. `key`: the
    key of its later kernels."""
    if prewarmed is None:
        return None
    sandbox = prewarmed.slot
    assert isinstance(sandbox, PrewarmedSandbox)
    sandbox.kernel, sandbox.key = prewarmed.kernel, key
    return sandbox
