"""`Sandbox`: a sandbox without asyncio, in this process or in a service.

It stands above the runtime and the client, which do not know each other, and chooses.
"""

import atexit
import os
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from sbx import errors
from sbx.aio import Loop, check_process
from sbx.sync.blocking import Attribute, BlockingSandbox

if TYPE_CHECKING:
    from sbx.policy import Policy
    from sbx.sync.client import BlockingClient

Connect = str | os.PathLike[str] | bool | None


class Sandbox(BlockingSandbox):
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
            sandbox: Any = shared.call(
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
            sandbox = client.create_until_close(policy, narrower=narrower, env=env)
        super().__init__(loop, sandbox)
        # A sandbox that its program forgets must not keep its jail until the program's end.
        self._forgotten = weakref.finalize(self, _abandon, loop, sandbox)
        self._forgotten.atexit = False  # then `close` ends all of them in order

    policy = Attribute[Any]()  # the Policy; of a sandbox in a service, its name

    @property
    def network_log(self) -> tuple[Any, ...]:
        """The last decisions of its proxy, in order. Empty without a proxy. A service has refusals
        in the events of the sandbox, and all decisions in its audit log."""
        if not hasattr(self._inner, "network_log"):
            raise errors.BadRequest(
                "a service shows its callers only the requests that it refused",
                code="not_over_the_wire",
                hint="ask for the events of the sandbox: GET /v1/sandboxes/{id}/events",
            )
        return tuple(self._inner.network_log)

    def close(self) -> None:
        """End everything inside and remove every file; a second call does nothing."""
        check_process(self._loop.pid)
        if self._loop.running:
            self._loop.call(self._inner.close())
        self._forgotten.detach()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._loop.pid == os.getpid():
            self.close()


def close() -> None:
    """End every `Sandbox` of this process and their shared runtime. Runs by itself at exit."""
    from sbx.runtime import shared

    try:
        _close_clients()
    finally:
        shared.close()


# -- the services that this process is connected to ------------------------------------------------

_clients: "dict[tuple[str, str | None], BlockingClient]" = {}
_making = threading.Lock()


def _client(connect: str | os.PathLike[str] | None, key: str | None) -> "BlockingClient":
    """Return the client of this service and key. All sandboxes in it share its connections."""
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
    """Replace the lock: one that another thread held at the fork would never be released."""
    global _making  # noqa: PLW0603
    _making = threading.Lock()
    _clients.clear()


os.register_at_fork(after_in_child=_reset_after_fork)


def _abandon(loop: Loop, sandbox: Any) -> None:
    """Close a sandbox to which the program has no reference left, without waiting."""
    loop.begin(sandbox.close())
