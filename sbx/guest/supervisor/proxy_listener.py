"""The listener at the address of the proxy, until the relay process accepts there."""

import os
import selectors
import signal
import socket
import time
from typing import NoReturn

from sbx.guest.start import lockdown
from sbx.guest.supervisor.children import OOM_COMMAND, OOM_SUPERVISOR, OomScore

_PROXY = ("127.0.0.1", 3128)
_BACKLOG = 128
_STARTS_WITHIN_S = 0.05


class ProxyListener:
    """Listens before any other process inside can.

    The first connection forks the process that copies the bytes: see
    `sbx.guest.supervisor.proxy_relay`.
    """

    def __init__(self, selector: selectors.BaseSelector, oom: OomScore) -> None:
        self._selector = selector
        self._oom = oom
        self.relay_pid = 0
        self._relay_started_at = 0.0
        self._listener = socket.create_server(_PROXY, backlog=_BACKLOG)
        self._listener.setblocking(False)
        selector.register(self._listener, selectors.EVENT_READ, self._start_relay)

    def _start_relay(self) -> None:
        try:
            self._oom.set(OOM_COMMAND)
            pid = os.fork()
            if pid == 0:
                _become_relay(self._listener)
        except OSError:  # the jail has no task left
            self._hang_up_on_waiting()
            return
        finally:
            self._oom.set(OOM_SUPERVISOR)
        self.relay_pid, self._relay_started_at = pid, time.monotonic()
        self._selector.unregister(self._listener)  # the relay accepts from now on

    def relay_ended(self, status: int) -> None:
        """Clean up after a relay that was idle or was killed. The next connection starts one."""
        self.relay_pid = 0
        lived_s = time.monotonic() - self._relay_started_at
        if (os.WIFEXITED(status) and status) or lived_s < _STARTS_WITHIN_S:
            self._hang_up_on_waiting()  # else a relay that cannot start would be forked without end
        self._selector.register(self._listener, selectors.EVENT_READ, self._start_relay)

    def _hang_up_on_waiting(self) -> None:
        for _ in range(_BACKLOG):
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.close()


def _become_relay(listener: socket.socket) -> NoReturn:
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        lockdown.close_all_but((listener.fileno(),))
        from sbx.guest.supervisor import (
            proxy_relay,  # only in this process: most jails never need it
        )

        proxy_relay.serve(listener)
        os._exit(0)
    except BaseException as error:  # noqa: BLE001  # a forked child never returns into PID 1
        os.write(2, f"the way out: {error!r}\n".encode())
    finally:
        os._exit(1)
