"""The way from a jail's loopback to the proxy outside: copies bytes, and knows nothing of them.

Programs look for their proxy at an address of IP, and the jail's network has nothing but `lo`. So
PID 1 listens there, and forks this process with the first connection: each one is copied to the
Unix socket that is bound into the jail, where the runtime's proxy decides. That is where the wall
is: whoever speaks to that socket without this process gains nothing. Nor is there anything here to
be had by killing it: PID 1 starts another one with the next connection.

It is sealed as PID 1 is, whose child it is, and out of reach of the kernel and of commands, where
linux has Landlock's scopes. When nothing was copied for a while it ends, and its memory is free.
"""

import contextlib
import selectors
import socket

SOCKET = "/run/sbx/egress.sock"

_CHUNK = 1 << 16
_MOST = 256  # connections at once; the next ones wait in the backlog
_CONNECT_S = 5.0
_IDLE_S = 60.0
_NO_PROXY = (
    b"HTTP/1.1 502 Bad Gateway\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n"
    b"sbx: the proxy of this sandbox does not answer; run the code again\n"
)


class _Half:
    """One direction of a connection: what was read from `source` and `sink` has not taken yet."""

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self.source = source
        self.sink = sink
        self.held = bytearray()
        self.ended = False  # nothing more comes from the source
        self.over = False  # and the sink was told

    def read(self) -> None:
        received = self.source.recv(_CHUNK)
        self.held += received
        self.ended = not received

    def write(self) -> None:
        if self.held:
            del self.held[: self.sink.send(self.held)]
        if self.ended and not self.held and not self.over:
            self.over = True
            with contextlib.suppress(OSError):  # the other side may be gone already
                self.sink.shutdown(socket.SHUT_WR)


class _Pair:
    """A program's connection and the one to the proxy."""

    def __init__(self, inside: socket.socket, outside: socket.socket) -> None:
        self.sockets = (inside, outside)
        self.halves = (_Half(inside, outside), _Half(outside, inside))

    @property
    def over(self) -> bool:
        return all(half.over for half in self.halves)

    def wants(self, sock: socket.socket) -> int:
        """What to wait for on one of its sockets, as events of `selectors`."""
        events = 0
        for half in self.halves:
            if half.source is sock and not half.ended and len(half.held) < _CHUNK:
                events |= selectors.EVENT_READ
            if half.sink is sock and half.held:
                events |= selectors.EVENT_WRITE
        return events

    def act(self, sock: socket.socket, events: int) -> None:
        """Copy what can be. Raises OSError when either side is gone."""
        for half in self.halves:
            with contextlib.suppress(BlockingIOError):
                if half.source is sock and events & selectors.EVENT_READ:
                    half.read()
            with contextlib.suppress(BlockingIOError):
                half.write()

    def close(self) -> None:
        for sock in self.sockets:
            sock.close()


class _Relay:
    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._pairs: set[_Pair] = set()

    def serve(self) -> None:
        """Until nobody has used it for a while."""
        while ready := self._selector.select(None if self._pairs else _IDLE_S):
            for key, events in ready:
                pair: _Pair | None = key.data
                if pair is None:
                    self._accept()
                elif pair in self._pairs:  # an earlier event of this turn may have ended it
                    assert isinstance(key.fileobj, socket.socket)
                    self._copy(pair, key.fileobj, events)

    def _accept(self) -> None:
        try:
            inside, _ = self._listener.accept()
        except OSError:  # who had connected is gone, or no descriptor is left
            return
        outside = socket.socket(socket.AF_UNIX)
        try:
            outside.settimeout(_CONNECT_S)
            outside.connect(SOCKET)
        except OSError:
            outside.close()
            _refuse(inside)
            return
        for sock in (inside, outside):
            sock.setblocking(False)
        inside.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pair = _Pair(inside, outside)
        self._pairs.add(pair)
        self._watch(pair)
        if len(self._pairs) == _MOST:
            self._selector.unregister(self._listener)

    def _copy(self, pair: _Pair, sock: socket.socket, events: int) -> None:
        try:
            pair.act(sock, events)
        except OSError:
            self._end(pair)
            return
        if pair.over:
            self._end(pair)
        else:
            self._watch(pair)

    def _watch(self, pair: _Pair) -> None:
        for sock in pair.sockets:
            wanted = pair.wants(sock)
            known = self._selector.get_map().get(sock)
            if known is None and wanted:
                self._selector.register(sock, wanted, pair)
            elif known is not None and not wanted:
                self._selector.unregister(sock)
            elif known is not None and known.events != wanted:
                self._selector.modify(sock, wanted, pair)

    def _end(self, pair: _Pair) -> None:
        for sock in pair.sockets:
            if sock in self._selector.get_map():
                self._selector.unregister(sock)
        pair.close()
        if len(self._pairs) == _MOST:
            self._selector.register(self._listener, selectors.EVENT_READ)
        self._pairs.discard(pair)


def _refuse(inside: socket.socket) -> None:
    """Say what is wrong, in the words of a proxy, whatever was asked."""
    with inside, contextlib.suppress(OSError):
        inside.settimeout(_CONNECT_S)
        inside.recv(_CHUNK)  # a close with something unread would take the answer along
        inside.sendall(_NO_PROXY)


def serve(listener: socket.socket) -> None:
    """Copy for whoever connects; returns after a minute without a connection."""
    _Relay(listener).serve()
