"""sock_diag(7): the memory in the queues of all sockets of a network namespace.

A netlink socket belongs to the namespace in which it was created, and shows its sockets to any
process that holds it. Linux 3.3; the parts for Unix, TCP and UDP sockets can be left out of a
Linux, which then answers ENOENT.
"""

import os
import socket
import struct
from collections.abc import Iterator

_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY = 4, 20
_NLM_F_REQUEST_DUMP = 0x301
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_HEADER = struct.Struct("=IHHII")
_UNIX_REQUEST = struct.Struct("=BBHIIIII")
_UNIX_SHOW = 0x10 | 0x20  # UDIAG_SHOW_RQLEN, UDIAG_SHOW_MEMINFO
_UNIX_MESSAGE = 16
_UNIX_RQLEN, _UNIX_MEMINFO = 4, 5
_INET_REQUEST = struct.Struct("=BBBBI48x")
_INET_MESSAGE = 72
_INET_MEMINFO = 7
_ALL_STATES = 0xFFFFFFFF
_RMEM_ALLOC, _WMEM_ALLOC, _SNDBUF, _FORWARD, _WMEM_QUEUED = 0, 2, 3, 4, 5
_DATAGRAMS = 10  # net.unix.max_dgram_qlen: at most so many wait in one socket
_REPLY_MAX = 1 << 16
_WAIT_S = 2.0


def open_diag() -> socket.socket:
    """Return a socket for the network namespace of the caller. Raise OSError."""
    return socket.socket(
        socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG
    )


def queued(diag: socket.socket) -> int:
    """Return the bytes in the queues of all Unix, TCP and UDP sockets, also of those that no
    process has open because they are in flight. Raise OSError."""
    diag.settimeout(_WAIT_S)
    return _unix(diag) + sum(
        _inet(diag, family, protocol)
        for family in (socket.AF_INET, socket.AF_INET6)
        for protocol in (socket.IPPROTO_TCP, socket.IPPROTO_UDP)
    )


def _unix(diag: socket.socket) -> int:
    """Linux charges the sender. A sender that was closed no longer shows: then the length of the
    queue counts, and for datagrams, of which only the first has a length, as much as fits."""
    request = _UNIX_REQUEST.pack(socket.AF_UNIX, 0, 0, _ALL_STATES, 0, _UNIX_SHOW, 0, 0)
    sent = waiting = 0
    for message in _dump(diag, request):
        kind = message[1]
        memory, length = (), 0
        for name, value in _attributes(message, _UNIX_MESSAGE):
            if name == _UNIX_MEMINFO:
                memory = struct.unpack_from("=9I", value)
            elif name == _UNIX_RQLEN:
                length = struct.unpack_from("=I", value)[0]
        if memory:
            sent += memory[_WMEM_ALLOC]
            if kind == socket.SOCK_DGRAM and length:
                length = _DATAGRAMS * max(length, memory[_SNDBUF])
        waiting += length
    return max(sent, waiting)


def _inet(diag: socket.socket, family: int, protocol: int) -> int:
    request = _INET_REQUEST.pack(family, protocol, 1 << (_INET_MEMINFO - 1), 0, _ALL_STATES)
    total = 0
    for message in _dump(diag, request):
        for name, value in _attributes(message, _INET_MESSAGE):
            if name == _INET_MEMINFO:
                memory = struct.unpack_from("=9I", value)
                sending = max(memory[_WMEM_ALLOC], memory[_WMEM_QUEUED])
                total += memory[_RMEM_ALLOC] + sending + memory[_FORWARD]
    return total


def _dump(diag: socket.socket, request: bytes) -> Iterator[bytes]:
    header = _HEADER.pack(
        _HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST_DUMP, 1, 0
    )
    diag.send(header + request)
    while True:
        reply = diag.recv(_REPLY_MAX)
        at = 0
        while at < len(reply):
            size, kind, *_ = _HEADER.unpack_from(reply, at)
            body = reply[at + _HEADER.size : at + size]
            if kind == _NLMSG_DONE:
                return
            if kind == _NLMSG_ERROR:
                number = -struct.unpack_from("=i", body)[0]
                raise OSError(number, f"sock_diag: {os.strerror(number)}")
            yield body
            at += size + 3 & ~3


def _attributes(message: bytes, at: int) -> Iterator[tuple[int, bytes]]:
    while at < len(message):
        size, name = struct.unpack_from("=HH", message, at)
        yield name, message[at + 4 : at + size]
        at += size + 3 & ~3
