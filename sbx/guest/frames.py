"""The frames on both sockets of a jail: a 4-byte big-endian length, then that much UTF-8 JSON.

    {"type": "stream", "content": {"name": "stdout", "text": "hi\\n"}}
    {"type": "execute_reply", "id": "7", "content": {"status": "ok", …}}

`id` links a reply to its request. Frames that answer no request have no `id`. `FrameReader` cuts a
stream of bytes into frames for a loop. `receive` takes exactly one frame from a blocking socket and
not a byte more. `FrameWriter` sends whole frames, from any thread.
"""

import base64
import codecs
import io
import json
import math
import numbers
import os
import socket
import struct
from _thread import RLock  # `threading` does much in every fork: 450 KiB of a supervisor's
from collections import deque
from collections.abc import Iterable, Mapping
from datetime import date
from typing import Any, NamedTuple

MAX_SENT = 16 * 1024 * 1024
"""Bytes of the largest body that the guest sends; callers cut larger content, and mark it."""

MAX_RECEIVED = 256 * 1024 * 1024
"""Bytes of the largest body that the guest accepts; only the runtime sends here."""

MAX_DEPTH = 64
"""Deepest nesting of content that user code may publish. The host has the same limit for …"""

MAX_JSON = 2 * 1024 * 1024
"""… bytes of a part that is JSON and not a string …"""

MAX_VALUES = 150_000
"""… values in all of its JSON, including keys: less than half of the host's limit for a frame …"""

_VALUE_COST = 16  # bytes: the minimum that a value counts if JSON has a limit of its size

MAX_BUFFERS = 1024
"""… buffers of a comm's message …"""

MAX_PARTS = 64
"""… and parts of one bundle. A frame beyond any of these would end the kernel as malformed."""

_LENGTH = struct.Struct(">I")


class FrameError(ValueError):
    """The bytes are not a frame, or the content cannot be one."""


class RawFrame(NamedTuple):
    type: str
    content: dict[str, Any]
    id: str | None = None


def encode(kind: str, content: Mapping[str, Any], id: str | None = None) -> bytes:
    """Return one frame as bytes.

    Content is treated as in Jupyter: bytes become base64, dates ISO 8601, sets and arrays lists.
    NaN and infinities become strings, because JSON cannot express them. Lone surrogates, which
    UTF-8 cannot carry, arrive as the text `\\udc80`. Raise FrameError for content that has no JSON
    (a cycle, an object of an unknown kind) or that is larger than MAX_SENT.
    """
    frame: dict[str, Any] = {"type": kind, "content": content}
    if id is not None:
        frame["id"] = id
    try:
        try:
            text = _dumps(frame)
        except (TypeError, ValueError):  # keys that are not strings, NaN: rare, so cleaned late
            text = _dumps(_clean(frame))
    except (TypeError, ValueError, RecursionError) as error:
        raise FrameError(f"{kind} cannot be sent as JSON: {error}") from error
    try:
        body = text.encode()
    except UnicodeEncodeError:
        body = text.encode(errors="sbx.spell-surrogates")
    if len(body) > MAX_SENT:
        raise FrameError(f"{kind} of {len(body)} bytes is larger than a frame of {MAX_SENT}")
    return _LENGTH.pack(len(body)) + body


def too_deep(value: Any, limit: int = MAX_DEPTH) -> bool:
    """Return whether lists and dicts in `value` nest deeper than `limit`."""
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, (list, tuple, set)):
        return False
    return limit <= 0 or any(too_deep(item, limit - 1) for item in value)


def check_json(value: Any) -> int:
    """Return the size of `value` as JSON in bytes. Raise FrameError if the host would refuse it."""
    if too_deep(value):
        raise FrameError(f"nested deeper than {MAX_DEPTH} levels")
    encoded = encode("", {"": value})
    size = len(encoded)
    if size > MAX_JSON:
        raise FrameError(f"JSON of {size} bytes: the limit is {MAX_JSON}")
    values = values_in(encoded)
    if _VALUE_COST * values > MAX_JSON:
        raise FrameError(f"JSON of {values} values: the limit is {MAX_JSON // _VALUE_COST}")
    return max(size, _VALUE_COST * values)


def values_in(encoded: bytes) -> int:
    """Return the number of values in this JSON, including keys. White space is not counted.

    The host counts in the same way: see `sbx.protocol.bundles.count_values`.
    """
    text = encoded.replace(b"\\\\", b"").replace(b'\\"', b"")
    text = b'"'.join(text.split(b'"')[::2])
    opened = text.count(b"[") + text.count(b"{")
    empty = text.count(b"[]") + text.count(b"{}")
    return 1 + opened - empty + text.count(b",") + text.count(b":")


def receive(sock: socket.socket) -> RawFrame | None:
    """Block for one frame. Return None at the end of the stream. Raise FrameError, OSError."""
    head = _receive_exactly(sock, _LENGTH.size)
    if head is None:
        return None
    body = _receive_exactly(sock, _length(head))
    if body is None:
        raise FrameError("the stream ended inside a frame")
    return _parse(body)


class FrameReader:
    """Cuts a stream of bytes, arriving in any pieces, into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[RawFrame]:
        """Return the frames that `data` completes, in order. Raise FrameError."""
        buffer = self._buffer
        buffer += data
        frames = []
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            end = start + _LENGTH.size + _length(buffer[start : start + _LENGTH.size])
            if len(buffer) < end:
                break
            frames.append(_parse(bytes(buffer[start + _LENGTH.size : end])))
            start = end
        del buffer[:start]
        return frames


class FrameWriter:
    """Sends frames on a blocking stream socket, each whole, from any thread.

    A Python signal handler that raises (KeyboardInterrupt) may interrupt a send. With
    `socket.sendall`, the count of the bytes already written would then be lost, and the next frame
    would begin inside this one. `io.BufferedWriter` keeps its position: it owns the frame before
    the first write, and sends the rest before the next frame.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._sock = sock
        raw = io.FileIO(sock.fileno(), "wb", closefd=False)
        # An allocation of this size is mapped lazily: the unused part costs nothing.
        self._out = io.BufferedWriter(raw, buffer_size=MAX_SENT + _LENGTH.size)
        self._lock = RLock()
        self._waiting: deque[bytes] = deque()
        self._sending = False
        self._muted = False

    def send(self, kind: str, content: Mapping[str, Any], id: str | None = None) -> None:
        """Send a frame. Block while the other side does not read. Raise FrameError, OSError."""
        self.send_encoded(encode(kind, content, id))

    def send_encoded(self, frame: bytes) -> None:
        if self._muted:
            return
        with self._lock:
            self._waiting.append(frame)
            if self._sending:  # a signal handler that prints, inside a send: its frame is next
                return
            self._sending = True
            try:
                while self._waiting:
                    while self._waiting:
                        self._out.write(self._waiting.popleft())
                    self._out.flush()
            finally:
                self._sending = False

    def hold(self, frame: bytes) -> None:
        """Send `frame` with the next one, in one write and one wake-up of the other side."""
        with self._lock:
            self._waiting.append(frame)

    @property
    def holds(self) -> bool:
        """Whether a frame is held for the next one."""
        return bool(self._waiting)

    def flush(self) -> None:
        """Send the held frames, if there are any."""
        if self._waiting and not self._muted:
            self.send_encoded(b"")

    def mute_forks(self) -> None:
        """Make sure that no fork of this process can write to the socket, or read from it.

        The child's descriptor is replaced by /dev/null, so that not even a half-sent frame in the
        inherited buffer, flushed at the child's exit, can reach the other side.
        """
        os.register_at_fork(after_in_child=self._silence)

    def _silence(self) -> None:
        self._muted = True
        self._lock = RLock()  # a thread that does not exist in the child may have held it
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        os.dup2(null, self._sock.fileno(), inheritable=False)
        os.close(null)


def _length(head: bytes | bytearray) -> int:
    length: int = _LENGTH.unpack(head)[0]
    if length > MAX_RECEIVED:
        raise FrameError(f"a frame of {length} bytes is larger than {MAX_RECEIVED}")
    return length


def _parse(body: bytes) -> RawFrame:
    try:
        frame = _loads(body.decode())
        kind, content = frame["type"], frame.get("content") or {}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FrameError(f"not a frame: {error!r}") from error
    if not isinstance(kind, str) or not isinstance(content, dict):
        raise FrameError("not a frame: type must be a string and content an object")
    return RawFrame(kind, content, frame.get("id"))


def _receive_exactly(sock: socket.socket, size: int) -> bytes | None:
    parts: list[bytes] = []
    while size:
        part = sock.recv(min(size, 1 << 20))
        if not part:
            if parts:
                raise FrameError("the stream ended inside a frame")
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _as_json(value: Any) -> Any:
    """Convert a value that json.dumps does not support, like jupyter_client."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, Iterable):
        return list(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def _clean(value: Any, depth: int = 0) -> Any:
    if depth > 4 * MAX_DEPTH:
        raise FrameError("nested too deeply, or in a circle")
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else repr(float(value))
    if isinstance(value, Mapping):
        return {str(key): _clean(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_clean(item, depth + 1) for item in value]
    return _clean(_as_json(value), depth + 1)


def _spell_surrogates(error: UnicodeError) -> tuple[str, int]:
    # Inside JSON text: the doubled backslash makes it the characters `\udc80` in the value.
    assert isinstance(error, UnicodeEncodeError)
    lone = error.object[error.start : error.end]
    return "".join(f"\\\\u{ord(character):04x}" for character in lone), error.end


codecs.register_error("sbx.spell-surrogates", _spell_surrogates)
_loads = json.JSONDecoder().decode
_dumps = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_as_json
).encode
