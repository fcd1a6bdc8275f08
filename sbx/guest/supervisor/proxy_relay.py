"""The way from a jail's loopback to the proxy outside: copies bytes without looking at them.

Programs reach their proxy at an IP address, and the jail's network has only `lo`. So PID 1 listens
there, and forks this process with the first connection. It copies each connection to the Unix
socket that is bound into the jail, where the runtime's proxy decides. The wall is in that proxy: a
program that connects to the socket directly gains nothing. Killing this process gains nothing
either: PID 1 starts another one with the next connection.

It is a child of PID 1 and sealed like it, and out of reach of the kernel and of commands if Linux
has Landlock's scopes. After a minute without a connection it ends, which frees its memory.
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
    """One direction of a connection, with the bytes that `sink` has not accepted yet."""

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self.source = source
        self.sink = sink
        self.buffered = bytearray()
        self.ended = False  # the source has reached its end
        self.over = False  # and the sink was shut down

    def read(self) -> None:
        received = self.source.recv(_CHUNK)
        self.buffered += received
        self.ended = not received

    def write(self) -> None:
        if self.buffered:
            del self.buffered[: self.sink.send(self.buffered)]
        if self.ended and not self.buffered and not self.over:
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

    def needed_events(self, sock: socket.socket) -> int:
        """Return the events of `selectors` to wait for on one of its sockets."""
        events = 0
        for half in self.halves:
            if half.source is sock and not half.ended and len(half.buffered) < _CHUNK:
                events |= selectors.EVENT_READ
            if half.sink is sock and half.buffered:
                events |= selectors.EVENT_WRITE
        return events

    def act(self, sock: socket.socket, events: int) -> None:
        """Copy the available bytes. Raise OSError if either side is gone."""
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
        """Serve until no connection was open for a while."""
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
        except OSError:  # the client is gone, or no descriptor is left
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
            events = pair.needed_events(sock)
            registered = self._selector.get_map().get(sock)
            if registered is None and events:
                self._selector.register(sock, events, pair)
            elif registered is not None and not events:
                self._selector.unregister(sock)
            elif registered is not None and registered.events != events:
                self._selector.modify(sock, events, pair)

    def _end(self, pair: _Pair) -> None:
        for sock in pair.sockets:
            if sock in self._selector.get_map():
                self._selector.unregister(sock)
        pair.close()
        if len(self._pairs) == _MOST:
            self._selector.register(self._listener, selectors.EVENT_READ)
        self._pairs.discard(pair)


def _refuse(inside: socket.socket) -> None:
    """Send an error in the form of a proxy's answer to any request."""
    with inside, contextlib.suppress(OSError):
        inside.settimeout(_CONNECT_S)
        inside.recv(_CHUNK)  # closing with unread data would discard the answer
        inside.sendall(_NO_PROXY)


def serve(listener: socket.socket) -> None:
    """Copy all connections. Return after a minute without a connection."""
    _Relay(listener).serve()
