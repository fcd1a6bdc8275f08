"""`Sandbox`: a sandbox without asyncio, in this process or in a service.

This module imports the runtime and the client, which do not import each other, and chooses one.
"""

import atexit
import os
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sbx import errors
from sbx.aio import Loop, check_process
from sbx.sync.blocking import BlockingSandbox
from sbx.sync.methods import Attribute

if TYPE_CHECKING:
    from sbx.policy import Policy
    from sbx.sync.client import BlockingClient

Connect = str | os.PathLike[str] | bool | None


class Sandbox(BlockingSandbox):
    """A sandbox: `with Sandbox(policy="data-science") as box`.

    `policy` is a name, the Path of a file, or a value. `narrower` tightens it, for instance
    `{"limits": {"memory_max": "64MiB"}}`. `env` adds environment variables. `workspace` is a
    directory of the host that becomes /workspace, and `uploads` one that becomes the read-only
    uploads. Seconds after its last use, `idle_timeout` ends its kernels, and `ttl` closes it.

    With `connect` the sandbox is in a service: the path of its socket, `http://HOST:PORT`, or True
    for SBX_SOCKET or the default socket. `key` is a bearer key; None is SBX_KEY. All methods
    are the same, and `ttl` counts from its creation. A service accepts policies only by name and
    mounts no directory of its caller; `mount` and `unfreeze` are for its operator.

    Raise NotFound `policy_not_found`, PolicyError, BadRequest `limit_widened`, CannotEnforce for
    a wall that this host cannot enforce, Denied `workspace_owned_by_root`. With `connect` also
    raise Unavailable `service_unreachable`, Denied `unauthorized`.
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
        ttl: float | None = None,
        idle_timeout: float | None = None,
    ) -> None:
        loop: Loop
        if connect is None or connect is False:
            from sbx.isolation.broker.spawned import label_of
            from sbx.runtime.shared import shared_runtime

            label = label_of(str(getattr(policy, "name", policy)), workspace)
            loop = shared = shared_runtime(label)
            sandbox: Any = shared.call(
                shared.runtime.create(
                    policy,
                    narrower=narrower,
                    env=env,
                    workspace=workspace,
                    uploads=uploads,
                    ttl=ttl,
                    idle_timeout=idle_timeout,
                )
            )
        else:
            if workspace is not None or uploads is not None:
                raise errors.BadRequest(
                    "a service mounts no directory of its caller",
                    code="not_over_the_wire",
                    hint="put files in by files.write and uploads.put, or leave connect out",
                )
            if idle_timeout is not None:
                raise errors.BadRequest(
                    "the idle time-out of a service is its own setting",
                    code="not_over_the_wire",
                    hint="the operator sets idle_timeout (SBX_IDLE_TIMEOUT), or leave it out",
                )
            client = _client(None if connect is True else connect, key)
            loop = client.loop
            sandbox = client.create_until_close(policy, narrower=narrower, env=env, ttl_s=ttl)
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
                hint="read the events of the sandbox: GET /v1/sandboxes/{id}/events",
            )
        return tuple(self._inner.network_log)

    def __repr__(self) -> str:
        policy = self.policy
        return f"<Sandbox {self._inner.id}, policy {getattr(policy, 'name', policy)}>"

    def close(self) -> None:
        """Stop everything inside and delete every file. A second call does nothing."""
        check_process(self._loop.pid)
        if self._loop.running:
            self._loop.call(self._inner.close())
        self._forgotten.detach()

    def __exit__(self, *_: object) -> None:
        if self._loop.pid == os.getpid():
            self.close()


def close() -> None:
    """Close every `Sandbox` of this process and their shared runtime. Python calls this at exit."""
    from sbx.runtime import shared

    try:
        _close_clients()
    finally:
        shared.close()


# -- the services that this process is connected to ------------------------------------------------

_clients: "dict[tuple[str, str | None], BlockingClient]" = {}
_clients_lock = threading.Lock()


def _client(connect: str | os.PathLike[str] | None, key: str | None) -> "BlockingClient":
    """Return the client of this service and key. All sandboxes in it share its connections."""
    from sbx.sync.client import BlockingClient

    address = "" if connect is None else os.fspath(connect)
    with _clients_lock:
        client = _clients.get((address, key))
        if client is None or not client.loop.running:
            client = _clients[address, key] = BlockingClient(connect, key=key)
            atexit.register(_close_clients)
        return client


def _close_clients() -> None:
    atexit.unregister(_close_clients)
    with _clients_lock:
        ending = list(_clients.values())
        _clients.clear()
    for client in ending:
        client.close()


def _reset_after_fork() -> None:
    """Replace the lock: one that another thread held at the fork would never be released."""
    global _clients_lock  # noqa: PLW0603
    _clients_lock = threading.Lock()
    _clients.clear()


os.register_at_fork(after_in_child=_reset_after_fork)


def _abandon(loop: Loop, sandbox: Any) -> None:
    """Close a sandbox to which the program has no reference left, without waiting."""
    loop.begin(sandbox.close())
