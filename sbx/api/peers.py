"""Who made a connection over a Unix socket, as linux tells it (SO_PEERCRED, unix(7))."""

import asyncio
import socket
import struct

PEER = "sbx.peer"  # in the extensions of a scope
_CREDENTIALS = struct.Struct("3i")  # struct ucred


def peer_of(transport: asyncio.Transport) -> dict[str, int] | None:
    """Its uid, gid and pid; None for TCP."""
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family != socket.AF_UNIX:
        return None
    pid, uid, gid = _CREDENTIALS.unpack(
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return {"uid": uid, "gid": gid, "pid": pid}
