"""The broker's event loop: one thread, one selector, and the socket to the runtime."""

import json
import os
import selectors
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any

from sbx.errors import SbxError, kind_of


class BrokerLoop:
    """Calls a function when its file can be read, and sends packets to the runtime.

    `children` are the child processes that the broker waits for. Every other child is an orphan
    that a killed bubblewrap left.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.serving = True
        self.children: set[int] = set()
        self._selector = selectors.DefaultSelector()

    def turn(self, timeout_s: float | None) -> None:
        for key, _ in self._selector.select(timeout_s):
            # An earlier one of this turn may have ended it, and given its number to another.
            if self._selector.get_map().get(key.fd) is key:
                key.data()

    def watch(self, fd: int, on_readable: Callable[[], None]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, on_readable)

    def unwatch(self, fd: int) -> None:
        self._selector.unregister(fd)

    def send(self, packet: dict[str, Any]) -> None:
        try:
            self.sock.send(json.dumps(packet, default=_encoded).encode())
        except OSError:
            self.serving = False

    def close(self) -> None:
        self._selector.close()


def _encoded(error: SbxError) -> dict[str, Any]:
    return {**error.to_dict(), "kind": kind_of(error)}


def close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def log(text: str) -> None:
    """Write a line to standard error, which is dropped unless SBX_DEBUG is set."""
    print(f"sbx broker: {text}", file=sys.stderr, flush=True)
