"""The other end of a connection, as Linux reports it: its user (SO_PEERCRED, unix(7)), and whether
it has hung up (poll(2))."""

import asyncio
import select
import socket
import struct

PEER = "sbx.peer"  # in the extensions of a scope
_CREDENTIALS = struct.Struct("3i")  # struct ucred


def peer_of(transport: asyncio.Transport) -> dict[str, int] | None:
    """Return the uid, gid and pid of the peer; None for TCP."""
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family != socket.AF_UNIX:
        return None
    pid, uid, gid = _CREDENTIALS.unpack(
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return {"uid": uid, "gid": gid, "pid": pid}


def has_hung_up(transport: asyncio.Transport) -> bool:
    """Return whether the client can no longer read: its Unix socket is closed, or an RST came."""
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), 0)  # POLLHUP, POLLERR in any case
    return bool(poll.poll(0))
