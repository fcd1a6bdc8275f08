"""What systemd hands to a service, and what it is told: sd_listen_fds(3), sd_notify(3).

Both protocols are a few lines, so no library is taken for them. The variables are removed once they
are read: what the service starts is not to think that they are its own.
"""

import os
import socket
from collections.abc import MutableMapping

from sbx.errors import BadRequest

_FIRST_FD = 3


def inherited_sockets(environment: MutableMapping[str, str] | None = None) -> list[socket.socket]:
    """The listening sockets that systemd opened for this process; none without activation.

    Raises BadRequest `wrong_socket` for what is no listening stream socket.
    """
    environment = os.environ if environment is None else environment
    pid, count = environment.pop("LISTEN_PID", ""), environment.pop("LISTEN_FDS", "")
    environment.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()) or not count.isdecimal():
        return []
    found = [socket.socket(fileno=fd) for fd in range(_FIRST_FD, _FIRST_FD + int(count))]
    for one in found:
        one.set_inheritable(False)
        if one.type != socket.SOCK_STREAM or not one.getsockopt(
            socket.SOL_SOCKET, socket.SO_ACCEPTCONN
        ):
            raise BadRequest(
                "systemd handed over a socket that cannot be listened on",
                code="wrong_socket",
                hint="the .socket unit is to have ListenStream=",
            )
    return found


class Notifier:
    """Tells systemd how the service is; without one it does nothing.

    It connects when it is made: afterwards the process may be where it cannot see the socket.
    """

    def __init__(self, environment: MutableMapping[str, str] | None = None) -> None:
        environment = os.environ if environment is None else environment
        self._socket: socket.socket | None = None
        if not (path := environment.pop("NOTIFY_SOCKET", "")):
            return
        made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        try:
            made.connect("\0" + path[1:] if path.startswith("@") else path)
        except OSError:
            made.close()
            return
        made.setblocking(False)
        self._socket = made

    def ready(self, status: str) -> None:
        """The service answers from now on."""
        self._tell(f"READY=1\nSTATUS={status}")

    def stopping(self) -> None:
        self._tell("STOPPING=1\nSTATUS=draining")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def _tell(self, text: str) -> None:
        if self._socket is not None:
            try:
                self._socket.send(text.encode())
            except OSError:
                self.close()
                self._socket = None
