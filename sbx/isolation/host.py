"""The launch plan without walls, and the process that it describes: only the policy `host` has it.

    host_plan ─► HostPlan ─► HostProcess.start ─► a guest that Kernel drives like that of a jail

`plan.plan` returns a LaunchPlan, which always has walls, and the broker starts nothing else. A plan
without walls is another type, made and started here alone. No broker takes part: a child of this
process needs no privilege. The code has all rights of the user who runs sbx. As far as it stays in
the process groups that the guest knows, it ends with the session.
"""

import asyncio
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from sbx import errors
from sbx.isolation import process_state
from sbx.isolation.broker.jail import Jail, JailExit
from sbx.isolation.launch_plan import Wall
from sbx.isolation.receipt import Receipt
from sbx.linux import hidden_files, procfs

HOST_POLICY = "host"
_GUEST = str(Path(__file__).parents[1] / "guest/start/unwalled.py")
_END_S = 5.0
_NO_WALL = Wall("all", "none", "nothing: the policy host has no walls", weaker=True)


class HostPlan(Struct, frozen=True):
    command: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    directory: str


def host_plan(policy: str, directory: Path, environment: Mapping[str, str]) -> HostPlan:
    """Return the plan of a session in `directory`. Raise CannotEnforce for any policy but `host`,
    because the plan enforces nothing."""
    if policy != HOST_POLICY:
        raise errors.CannotEnforce(
            f"the policy {policy} has walls, and a start without walls was planned for it",
            hint="report this: only the policy host is started without walls",
        )
    # -P: no module of the directory is imported before the kernel is ready
    command = (sys.executable, "-P", _GUEST)
    return HostPlan(command, tuple(environment.items()), str(directory))


class HostProcess(Jail):
    """A guest without walls: a child of this process, in its own session."""

    def __init__(self) -> None:
        super().__init__(_refuse_order, secrets.token_hex(8))
        self._process: asyncio.subprocess.Process | None = None
        self._watching: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, plan: HostPlan) -> "HostProcess":
        """Raise Unavailable `not_started`."""
        started = cls()
        inside = started.control_inside.fileno(), started.kernel_inside.fileno()
        try:
            process = await asyncio.create_subprocess_exec(
                *plan.command,
                *map(str, inside),
                cwd=plan.directory,
                env=dict(plan.environment),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                pass_fds=inside,
                start_new_session=True,
            )
        except BaseException as error:
            started.close()
            if not isinstance(error, OSError | ValueError):
                raise
            raise errors.Unavailable(
                f"{plan.command[0]} cannot be started in {plan.directory}: {error}",
                code="not_started",
                hint="check that the directory exists",
            ) from error
        started.close_inside()
        started.pid, started._process = process.pid, process
        started._watching = asyncio.create_task(started._watch(process))
        return started

    async def kill(self) -> JailExit:
        """End the guest and wait for its end.

        It ends its process groups when its sockets close. If it does not, kill it: Linux then kills
        its children.
        """
        self.close()
        try:
            async with asyncio.timeout(_END_S):
                return await self.end()
        except TimeoutError:
            assert self._process is not None
            self._process.kill()
            return await self.end()

    def walls(self) -> dict[str, Any]:
        return {}

    @property
    def masked_places(self) -> Sequence[str]:
        return ()

    async def inspect(self, *, fresh: bool = False) -> dict[str, Any]:
        assert self.pid is not None
        kernel = next(iter(procfs.children(self.pid)), None)
        return {**process_state.read(self.pid, kernel), "limits": {}}

    def make_receipt(self, facts: Mapping[str, Any], **seen: Any) -> Receipt:
        """Return a receipt that names no wall but one: none is in force."""
        kernel = facts["kernel"] or facts["pid1"]
        return Receipt(
            path=HOST_POLICY,
            host_uid=kernel["uid"],
            namespaces=dict(seen["host"]),
            no_new_privs=kernel["no_new_privs"],
            capabilities=kernel["capabilities"],
            seccomp={},
            landlock_abi=0,
            network=HOST_POLICY,
            limits={},
            walls=(asdict(_NO_WALL),),
            python=seen["python"],
            preload_failed=dict(seen["preload_failed"]),
            host_namespaces=dict(seen["host"]),
            seccomp_mode=kernel["seccomp"],
            filters=kernel["filters"],
            read_at=seen["read_at"],
        )

    async def unlinked(self, device: int) -> hidden_files.Unlinked:
        return hidden_files.Unlinked(0, 0)

    async def counters(self) -> JailExit:
        return JailExit()

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        self.set_ended(JailExit(f"it ended with code {code}"))


async def _refuse_order(do: str, **_: Any) -> dict[str, Any]:
    raise errors.Unavailable(
        f"a session without a sandbox has no jail, so nothing can {do} there",
        code="live_mount_unavailable",
        hint="turn the sandbox of the project on",
    )
