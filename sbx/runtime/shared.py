"""The one runtime of this process that all its embedded `Sandbox`es share.

It lives on an event loop in a thread of its own, started by the first of them and ended by `close`
or with the process. After a fork the child has no such thread: its copies of the parent's sandboxes
raise Broken `used_after_fork`, and a `Sandbox` that it makes itself starts a runtime of its own.
"""

import atexit
import os
import threading

from sbx.aio import Loop
from sbx.runtime.runtime import Runtime
from sbx.runtime.settings import Settings


class SharedRuntime(Loop):
    """The runtime, on its loop, in its thread."""

    def __init__(self) -> None:
        super().__init__("sbx-runtime")
        runtime = Runtime(Settings())
        try:
            self.runtime = self.call(runtime.start())
        except BaseException:
            self.end(runtime.close())
            raise

    @property
    def alive(self) -> bool:
        return self.running and self.runtime.alive

    def close(self) -> None:
        self.end(self.runtime.close())


_shared: SharedRuntime | None = None
_starting = threading.Lock()


def shared_runtime() -> SharedRuntime:
    """Started where there is none."""
    global _shared  # noqa: PLW0603  # one per process is the promise
    with _starting:
        if _shared is not None and _shared.running and not _shared.alive:
            _shared.close()  # its broker died, and every sandbox with it
            _shared = None
        if _shared is None or _shared.pid != os.getpid():
            _shared = SharedRuntime()
            atexit.register(close)
        return _shared


def close() -> None:
    """End every embedded `Sandbox` of this process and what they share."""
    global _shared
    shared, _shared = _shared, None
    atexit.unregister(close)
    if shared is not None:
        shared.close()


def _reset_after_fork() -> None:
    """A lock that another thread held when this process was forked would never be released."""
    global _starting  # noqa: PLW0603
    _starting = threading.Lock()


os.register_at_fork(after_in_child=_reset_after_fork)
