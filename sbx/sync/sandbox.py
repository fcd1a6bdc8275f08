"""`Sandbox`: a sandbox without asyncio, in this process or in a service.

It stands above the runtime and the client, which do not know each other, and chooses.
"""

import atexit
import os
import threading
import weakref
from collections.abc import Coroutine, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from sbx import errors
from sbx.aio import Loop, check_process
from sbx.sync.blocking import AsyncConversation, BlockingConversation

if TYPE_CHECKING:
    from sbx.policy import Policy
    from sbx.protocol.mounts import Mount
    from sbx.sync.client import BlockingClient

Connect = str | os.PathLike[str] | bool | None
_DEFAULT_CONVERSATION = "default"


class _Box(Protocol):
    """A sandbox for asyncio, of either kind."""

    id: str

    @property
    def policy(self) -> Any: ...
    def conversation(self, name: str) -> AsyncConversation: ...
    def mount(
        self, source: str | Path, target: str | None = None, *, read_only: bool = True
    ) -> Coroutine[Any, Any, str]: ...
    def unmount(self, target: str) -> Coroutine[Any, Any, None]: ...
    def mounts(self) -> Coroutine[Any, Any, "tuple[Mount, ...]"]: ...
    def unfreeze(self) -> Coroutine[Any, Any, bool]: ...
    def stop(self) -> Coroutine[Any, Any, None]: ...
    def close(self) -> Coroutine[Any, Any, None]: ...


class Sandbox(BlockingConversation):
    """A sandbox: `with Sandbox(policy="data-science") as box`.

    `policy` is a name, the Path of a file, or a value; `narrower` tightens it, for instance
    `{"limits": {"memory_max": "64MiB"}}`; `env` adds environment variables; `workspace` is a
    directory of the host to be /workspace, `uploads` one to be the read-only uploads.

    With `connect` it is in a service: the path of its socket, `http://HOST:PORT`, or True for
    SBX_SOCKET or the default socket; `key` is a bearer key, None SBX_API_KEY. All methods are the
    same; policies go by name there, no directory can be mounted from the start, and `mount` and
    `unfreeze` are for the service's operator.

    Raises NotFound `policy_not_found`, PolicyError, BadRequest `limit_widened`, CannotEnforce for
    a wall that this host cannot give, Denied `workspace_owned_by_root`; connected also Unavailable
    `service_unreachable`, Denied `unauthorized`.
    """

    def __init__(
        self,
        policy: "str | Path | Policy" = "default",
        *,
        narrower: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        workspace: str | Path | None = None,
        uploads: str | Path | None = None,
        connect: Connect = None,
        key: str | None = None,
    ) -> None:
        loop: Loop
        if connect is None or connect is False:
            from sbx.runtime.shared import shared_runtime

            loop = shared = shared_runtime()
            self._box: _Box = shared.call(
                shared.runtime.create(
                    policy, narrower=narrower, env=env, workspace=workspace, uploads=uploads
                )
            )
        else:
            if workspace is not None or uploads is not None:
                raise errors.BadRequest(
                    "a service mounts no directory of its caller",
                    code="not_over_the_wire",
                    hint="put files in by files.write and uploads.put, or leave connect out",
                )
            client = _client(None if connect is True else connect, key)
            loop = client.loop
            self._box = client.made(policy, narrower=narrower, env=env)
        super().__init__(loop, loop.call(_named(self._box, _DEFAULT_CONVERSATION)))
        # A sandbox that its program forgets must not keep its jail until the program's end.
        self._forgotten = weakref.finalize(self, _abandon, loop, self._box)
        self._forgotten.atexit = False  # then `close` ends all of them in order

    @property
    def id(self) -> str:
        return self._box.id

    @property
    def policy(self) -> Any:
        """The Policy; of a sandbox in a service, its name."""
        return self._box.policy

    def conversation(self, name: str) -> BlockingConversation:
        """A conversation by name, with files and variables of its own; made when there is none."""
        return BlockingConversation(self._loop, self._loop.call(_named(self._box, name)))

    def stop(self) -> None:
        """End every kernel; files stay, and the next run starts another one."""
        self._loop.call(self._box.stop())

    def mount(
        self, source: str | Path, target: str | None = None, *, read_only: bool = True
    ) -> str:
        """Show one more directory of the host inside, also in kernels that live; the path there,
        /mnt/NAME unless `target` says otherwise. See `AsyncSandbox.mount`; of a sandbox in a
        service, `RemoteSandbox.mount`."""
        return self._loop.call(self._box.mount(source, target, read_only=read_only))

    def unmount(self, target: str) -> None:
        """Show it no more. Raises NotFound `not_mounted`."""
        self._loop.call(self._box.unmount(target))

    def mounts(self) -> "tuple[Mount, ...]":
        """What is mounted now, by the path inside."""
        return self._loop.call(self._box.mounts())

    def unfreeze(self) -> bool:
        """Let kernels start again after a honeytoken was sprung; False where none was."""
        return self._loop.call(self._box.unfreeze())

    @property
    def network_log(self) -> tuple[Any, ...]:
        """What its proxy let through and refused lately, the last one last; empty without one. Of a
        sandbox in a service its events tell what was refused, and the audit log all of it."""
        if not hasattr(self._box, "network_log"):
            raise errors.BadRequest(
                "a service tells its callers only what was refused",
                code="not_over_the_wire",
                hint="ask for the events of the sandbox: GET /v1/sandboxes/{id}/events",
            )
        return tuple(self._box.network_log)

    def close(self) -> None:
        """End everything inside and remove every file; a second call does nothing."""
        check_process(self._loop.pid)
        if self._loop.running:
            self._loop.call(self._box.close())
        self._forgotten.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._loop.pid == os.getpid():
            self.close()


def close() -> None:
    """End every `Sandbox` of this process and what they share; called by itself at exit."""
    from sbx.runtime import shared

    try:
        _close_clients()
    finally:
        shared.close()


# -- the services that this process is connected to ------------------------------------------------

_clients: "dict[tuple[str, str | None], BlockingClient]" = {}
_making = threading.Lock()


def _client(connect: str | os.PathLike[str] | None, key: str | None) -> "BlockingClient":
    """One for each service and key: all sandboxes in it share its connections."""
    from sbx.sync.client import BlockingClient

    given = "" if connect is None else os.fspath(connect)
    with _making:
        found = _clients.get((given, key))
        if found is None or not found.loop.running:
            found = _clients[given, key] = BlockingClient(connect, key=key)
            atexit.register(_close_clients)
        return found


def _close_clients() -> None:
    atexit.unregister(_close_clients)
    with _making:
        ending = list(_clients.values())
        _clients.clear()
    for client in ending:
        client.close()


def _reset_after_fork() -> None:
    """A lock that another thread held when this process was forked would never be released."""
    global _making  # noqa: PLW0603
    _making = threading.Lock()
    _clients.clear()


os.register_at_fork(after_in_child=_reset_after_fork)


async def _named(box: _Box, name: str) -> AsyncConversation:
    return box.conversation(name)


def _abandon(loop: Loop, box: _Box) -> None:
    """Close a sandbox that nobody holds any more, without waiting."""
    loop.begin(box.close())
