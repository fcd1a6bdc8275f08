"""Socket activation and notification of systemd: sd_listen_fds(3), sd_notify(3).

Both protocols take a few lines, so no library is used. The variables are removed after they are
read, so that child processes do not use them.
"""

import os
import socket
from collections.abc import MutableMapping

from sbx.errors import BadRequest

_FIRST_FD = 3


def inherited_sockets(environment: MutableMapping[str, str] | None = None) -> list[socket.socket]:
    """Return the listening sockets that systemd opened for this process; none without activation.

    Raise BadRequest `wrong_socket` for a socket that is not a listening stream socket.
    """
    environment = os.environ if environment is None else environment
    pid, count = environment.pop("LISTEN_PID", ""), environment.pop("LISTEN_FDS", "")
    environment.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()) or not count.isdecimal():
        return []
    sockets = [socket.socket(fileno=fd) for fd in range(_FIRST_FD, _FIRST_FD + int(count))]
    for sock in sockets:
        sock.set_inheritable(False)
        if sock.type != socket.SOCK_STREAM or not sock.getsockopt(
            socket.SOL_SOCKET, socket.SO_ACCEPTCONN
        ):
            raise BadRequest(
                "systemd handed over a socket that cannot be listened on",
                code="wrong_socket",
                hint="the .socket unit needs ListenStream=",
            )
    return sockets


class Notifier:
    """Notify systemd of the state of the service, if it asks for that.

    Connect at once, because the process may later hide the socket from itself.
    """

    def __init__(self, environment: MutableMapping[str, str] | None = None) -> None:
        environment = os.environ if environment is None else environment
        self._socket: socket.socket | None = None
        if not (path := environment.pop("NOTIFY_SOCKET", "")):
            return
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        try:
            sock.connect("\0" + path[1:] if path.startswith("@") else path)
        except OSError:
            sock.close()
            return
        sock.setblocking(False)
        self._socket = sock

    def ready(self, status: str) -> None:
        """Report that the service answers."""
        self._send(f"READY=1\nSTATUS={status}")

    def stopping(self) -> None:
        self._send("STOPPING=1\nSTATUS=draining")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def _send(self, text: str) -> None:
        if self._socket is not None:
            try:
                self._socket.send(text.encode())
            except OSError:
                self.close()
                self._socket = None
