"""netdevice(7): the interfaces of the caller's network namespace."""

import fcntl
import socket
import sys

_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1
_IFNAMSIZ = 16
_SIZE_OF_IFREQ = 40


def loopback_up() -> None:
    """Switch on `lo`, which is switched off in a new network namespace. Needs CAP_NET_ADMIN in it.

    From then on the namespace has 127.0.0.1 and ::1.
    """
    request = b"lo".ljust(_IFNAMSIZ, b"\0") + _IFF_UP.to_bytes(2, sys.byteorder)
    # Any socket is suitable. Linux always supports this family.
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as any_socket:
        try:
            fcntl.ioctl(any_socket, _SIOCSIFFLAGS, request.ljust(_SIZE_OF_IFREQ, b"\0"))
        except OSError as error:
            raise OSError(error.errno, f"ioctl(SIOCSIFFLAGS): {error.strerror}") from None
