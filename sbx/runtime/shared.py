"""The one runtime of this process that all its embedded `Sandbox`es share.

It lives on an event loop in a separate thread. The first `Sandbox` starts it; `close` or the end of
the process ends it. A forked child does not have this thread: its copies of the sandboxes raise
Broken `used_after_fork`, and a `Sandbox` that it creates starts another runtime.
"""

import atexit
import os
import threading

from sbx.aio import Loop
from sbx.imports import without_collections
from sbx.isolation.broker.spawned import spawn_broker


class SharedRuntime(Loop):
    """The runtime, on its loop, in its thread."""

    def __init__(self, label: str) -> None:
        """`label`: of the first sandbox, for early orders."""
        broker = spawn_broker(label)  # it starts while this process imports the runtime
        try:
            with without_collections():
                from sbx.runtime.runtime import Runtime
                from sbx.runtime.settings import Settings
            self.runtime = Runtime(Settings(), broker=broker)
            super().__init__("sbx-runtime")
            try:
                self.call(self.runtime.start())
            except BaseException:
                self.end(self.runtime.close())
                raise
        except BaseException:
            broker.close()
            raise

    @property
    def alive(self) -> bool:
        return self.running and self.runtime.alive

    def close(self) -> None:
        self.end(self.runtime.close())


_shared: SharedRuntime | None = None
_starting = threading.Lock()


def shared_runtime(label: str = "") -> SharedRuntime:
    """Return the runtime of this process. `label`: of its first sandbox, which starts sooner."""
    global _shared  # noqa: PLW0603  # one per process is the promise
    with _starting:
        if _shared is not None and _shared.running and not _shared.alive:
            _shared.close()  # its broker died, and every sandbox with it
            _shared = None
        if _shared is None or _shared.pid != os.getpid():
            _shared = SharedRuntime(label)
            atexit.register(close)
        return _shared


def close() -> None:
    """End every embedded `Sandbox` of this process, and the shared runtime."""
    global _shared
    shared, _shared = _shared, None
    atexit.unregister(close)
    if shared is not None:
        shared.close()


def _reset_after_fork() -> None:
    """Replace the lock: if another thread held it during the fork, it would never be released."""
    global _starting  # noqa: PLW0603
    _starting = threading.Lock()


os.register_at_fork(after_in_child=_reset_after_fork)
