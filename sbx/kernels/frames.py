"""The typed frames that a guest may send, with their limits. Frames from inside are hostile.

A frame is a 4-byte big-endian length and a JSON object {"type", "id"?, "content"}. `decode` returns
a typed value or raises `MalformedFrame`. Unknown types and fields, wrong types, deep nesting and
bad UTF-8 all end the kernel that sent them. Bundles and comm data, which only a user of the result
reads, are checked in size, depth and number of values before they are built, so that a small frame
cannot become a large object.
"""

import struct
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec

from sbx.protocol.bundles import Bundle, BundlePart, count_values, outline

FRAME_MAX = 24 << 20
SMALL_MAX = 6 << 20
BUNDLE_PARTS_MAX = 64
JSON_PART_MAX = 2 << 20
DEPTH_MAX = 64
BUFFERS_MAX = 1024  # of a comm's message
VALUES_MAX = 320_000  # in all JSON parts of a frame, keys among them: 25 MiB once they are read
STRINGS_MAX = VALUES_MAX  # in a frame, keys among them
_VALUE_COST = 16  # bytes of output that a value counts as at least; numbers have about eight
_REASON_MAX = 4096  # characters; it is remembered with a command that could not be started
_HEADER = struct.Struct(">I")
_EMPTY = msgspec.Raw(b"{}")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


class MalformedFrame(Exception):
    """A frame that our guest would not have sent.

    The message may quote the frame and is logged, so it is escaped: no byte of it reaches a
    terminal as it is.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message[:200].encode("unicode_escape").decode("ascii"))


_Code = Annotated[int, msgspec.Meta(ge=0, le=255)]  # wait(2)
_Count = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]  # JSON allows larger integers
_Buffers = Annotated[list[bytes], msgspec.Meta(max_length=BUFFERS_MAX)]
_Signal = Annotated[int, msgspec.Meta(ge=1, le=64)]


class _Content(msgspec.Struct, forbid_unknown_fields=True):
    pass


class Stream(_Content):
    name: Literal["stdout", "stderr"]
    text: str


class DisplayData(_Content):
    data: dict[str, msgspec.Raw]
    metadata: msgspec.Raw = msgspec.Raw(b"{}")
    transient: dict[str, str] = {}
    cut: bool = False  # a part was too large, and a note replaces it


class UpdateDisplayData(DisplayData):
    pass


class ExecuteResult(_Content):
    data: dict[str, msgspec.Raw]
    execution_count: _Count | None
    metadata: msgspec.Raw = msgspec.Raw(b"{}")
    cut: bool = False


class ErrorFrame(_Content):
    ename: str
    evalue: str
    traceback: list[str]
    exit_text: str | None = None  # for SystemExit, the text that Python prints


class ClearOutput(_Content):
    wait: bool


class InputRequestFrame(_Content):
    prompt: str
    password: bool


class OutputLimit(_Content):
    limit: int


class CommOpenFrame(_Content):
    comm_id: str
    target_name: str
    data: msgspec.Raw = msgspec.Raw(b"{}")
    metadata: msgspec.Raw = msgspec.Raw(b"{}")
    buffers: _Buffers = []


class CommMsgFrame(_Content):
    comm_id: str
    data: msgspec.Raw = msgspec.Raw(b"{}")
    metadata: msgspec.Raw = msgspec.Raw(b"{}")
    buffers: _Buffers = []


class CommClose(CommMsgFrame):
    pass


class KernelReady(_Content):
    python: str
    ipython: str
    preload_failed: dict[str, str] = {}


class ReplyFrame(_Content):
    """The last frame that a request causes."""

    status: str


class ExecuteReply(ReplyFrame):
    status: Literal["ok", "error", "aborted"]
    execution_count: _Count | None = None
    payload: msgspec.Raw = msgspec.Raw(b"[]")
    user_expressions: msgspec.Raw = msgspec.Raw(b"{}")
    ename: str = ""
    evalue: str = ""
    traceback: list[str] = []
    exit_text: str | None = None
    exit_code: _Code | None = None  # of SystemExit


class ProgramReply(ReplyFrame):
    """The end of a program, with the error that it did not catch."""

    status: Literal["ok", "error"]
    exit_code: _Code
    ename: str = ""
    evalue: str = ""
    traceback: list[str] = []
    exit_text: str | None = None


class CompleteReply(ReplyFrame):
    matches: list[str]
    cursor_start: _Count
    cursor_end: _Count
    status: str
    metadata: msgspec.Raw = msgspec.Raw(b"{}")


class InspectReply(ReplyFrame):
    status: str
    is_found: bool = msgspec.field(name="found")
    data: dict[str, msgspec.Raw]
    metadata: msgspec.Raw = msgspec.Raw(b"{}")


class IsCompleteReply(ReplyFrame):
    status: Literal["complete", "incomplete", "invalid", "unknown"]
    indent: str = ""


class CommReply(ReplyFrame):
    """The handler of a comm message has finished."""

    status: Literal["ok", "error"]


class SupervisorMounted(_Content):
    """Every mount of the jail is in place, and no user code has run."""


class SupervisorReady(_Content):
    landlock: int


class RefusedFrame(_Content):
    layer: str
    message: str
    errno: int


class OutputFrame(_Content):
    name: Literal["stdout", "stderr"]
    text: str


class Fed(_Content):
    """How many bytes a standard input or a pty has read, and whether it is still open."""

    bytes: Annotated[int, msgspec.Meta(ge=0)]
    open: bool


class Spawned(_Content):
    """The pid of a command, inside."""

    pid: Annotated[int, msgspec.Meta(ge=1, le=2**22)]  # PID_MAX_LIMIT: proc_sys_kernel(5)


class Tty(_Content):
    # base64 on the wire: 1.33 for any bytes, where latin-1 is up to 6 for escapes
    data: Annotated[bytes, msgspec.Meta(min_length=1)]


class Exited(_Content):
    code: _Code | None = None
    signal: _Signal | None = None
    error: Annotated[str, msgspec.Meta(max_length=_REASON_MAX)] | None = None


class KernelExited(_Content):
    code: _Code | None = None
    signal: _Signal | None = None


KERNEL_FRAMES: dict[str, type[_Content]] = {
    "ready": KernelReady,
    "refused": RefusedFrame,
    "stream": Stream,
    "display_data": DisplayData,
    "update_display_data": UpdateDisplayData,
    "execute_result": ExecuteResult,
    "error": ErrorFrame,
    "clear_output": ClearOutput,
    "input_request": InputRequestFrame,
    "output_limit": OutputLimit,
    "comm_open": CommOpenFrame,
    "comm_msg": CommMsgFrame,
    "comm_close": CommClose,
    "execute_reply": ExecuteReply,
    "program_reply": ProgramReply,
    "complete_reply": CompleteReply,
    "inspect_reply": InspectReply,
    "is_complete_reply": IsCompleteReply,
    "comm_open_reply": CommReply,
    "comm_msg_reply": CommReply,
    "comm_close_reply": CommReply,
}

SUPERVISOR_FRAMES: dict[str, type[_Content]] = {
    "mounted": SupervisorMounted,
    "ready": SupervisorReady,
    "refused": RefusedFrame,
    "output": OutputFrame,
    "fed": Fed,
    "spawned": Spawned,
    "tty": Tty,
    "exited": Exited,
    "kernel_exited": KernelExited,
}


class Frame(msgspec.Struct, frozen=True):
    """One checked frame. The class of `content` belongs to the frame's type. `values` is the number
    of values, and of keys, in its JSON parts."""

    content: _Content
    id: str | None
    size: int
    values: int = 0

    @property
    def cost(self) -> int:
        """The bytes that count towards the output limit of a run."""
        return max(self.size, _VALUE_COST * self.values)


class _Envelope(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    content: msgspec.Raw
    id: str | None = None


_envelope = msgspec.json.Decoder(_Envelope)

# Frames with one large string, or with parts that `bundle` checks one by one. Any other frame of
# this size would be a list of millions: 800 MiB and a second of the loop for 24 MiB, measured.
_LARGE = frozenset(
    (
        *("stream", "display_data", "update_display_data", "execute_result", "output"),
        *("comm_open", "comm_msg", "comm_close"),
    )
)

# Frames that decode to a dict or a list of strings. Two million keys in one bundle were 280 MiB,
# and kept the loop for seconds; if no task read from the kernel, they were kept indefinitely.
_BUILT = frozenset(
    (
        *("display_data", "update_display_data", "execute_result", "error"),
        *("ready", "inspect_reply", "complete_reply"),
        *("comm_open", "comm_msg", "comm_close"),
    )
)

# Frames with parts whose shape the user decides.
_LOOSE = frozenset((*(_BUILT - {"ready", "error"}), "execute_reply"))


class FrameCodec:
    """The frames that one of the two sockets may carry."""

    def __init__(self, kinds: dict[str, type[_Content]]) -> None:
        self._decoders = {name: msgspec.json.Decoder(kind) for name, kind in kinds.items()}

    def decode(self, body: bytes | bytearray | memoryview) -> Frame:
        """Return the typed frame of one body. Raise Malformed."""
        try:
            envelope = _envelope.decode(body)
            decoder = self._decoders[envelope.type]
            if len(body) > SMALL_MAX and envelope.type not in _LARGE:
                raise MalformedFrame(f"a frame of type {envelope.type} of {len(body)} bytes")
            if envelope.type in _BUILT and len(body) > 2 * STRINGS_MAX and _is_crowded(body):
                raise MalformedFrame(f"a frame of type {envelope.type} of too many strings")
            content = decoder.decode(envelope.content)
            values = 0
            if envelope.type in _LOOSE and (values := _count(content)) > VALUES_MAX:
                raise MalformedFrame(f"a frame of type {envelope.type} of {values} values of JSON")
        except KeyError as error:
            raise MalformedFrame(f"a frame of unknown type {str(error)[:80]}") from None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise MalformedFrame(str(error)[:200]) from None
        return Frame(content, envelope.id, len(body), values)


def _is_crowded(body: bytes | bytearray | memoryview) -> bool:
    """Return whether this JSON has more than STRINGS_MAX strings, without building any.

    A quote without a backslash before it begins or ends a string.
    """
    text = bytes(body)
    if text.count(b'"') <= 2 * STRINGS_MAX:
        return False
    text = text.replace(b"\\\\", b"")
    return text.count(b'"') - text.count(b'\\"') > 2 * STRINGS_MAX


def _count(content: _Content) -> int:
    """Return the number of values in the JSON parts of this content. Raise Malformed for a part
    that is too large."""
    return sum(
        2 if raw.startswith(b'"') else 1 + count_values(raw)
        for raw in map(bytes, _parts(content))
        if raw != b"{}" and _check_size(raw)
    )


def _parts(content: _Content) -> Iterator[msgspec.Raw]:
    for name in content.__struct_fields__:
        match getattr(content, name):
            case msgspec.Raw() as raw:
                yield raw
            case dict() as parts:
                yield from (raw for raw in parts.values() if isinstance(raw, msgspec.Raw))


KERNEL = FrameCodec(KERNEL_FRAMES)
SUPERVISOR = FrameCodec(SUPERVISOR_FRAMES)


def encode(kind: str, content: Any, name: str | None = None) -> bytes:
    """Return a frame for the guest as bytes."""
    frame = {"type": kind, "content": content}
    if name is not None:
        frame["id"] = name
    body = msgspec.json.encode(frame)
    return _HEADER.pack(len(body)) + body


def bundle(parts: Mapping[str, msgspec.Raw]) -> dict[str, Any]:
    """Return a MIME bundle as Python values. Raise Malformed if it is invalid or too large."""
    _check_bundle(parts)
    return {mime: loose(raw) for mime, raw in parts.items()}


def kept(parts: Mapping[str, msgspec.Raw]) -> dict[str, Any]:
    """Return a MIME bundle whose JSON parts stay encoded until a reader needs them.

    Raise like `bundle`.
    """
    _check_bundle(parts)
    return _bundle_of(parts)


def kept_object(raw: msgspec.Raw) -> dict[str, Any]:
    """Return an object whose members stay encoded, as in `kept`. Raise Malformed."""
    if raw == _EMPTY:
        return {}
    encoded = _checked(raw)
    try:
        members = msgspec.json.decode(encoded, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise MalformedFrame(str(error)[:200]) from None
    return _bundle_of(members)


def loose(raw: msgspec.Raw) -> Any:
    """Decode a part of any shape: a string of any size, or JSON of bounded size and depth.

    Raise Malformed.
    """
    try:
        return msgspec.json.decode(_checked(raw))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedFrame(str(error)[:200]) from None


def _bundle_of(parts: Mapping[str, msgspec.Raw]) -> dict[str, Any]:
    """Return a plain dict if all members are text, which is the usual case."""
    members = {name: _kept(raw) for name, raw in parts.items()}
    return (
        Bundle(members) if any(type(part) is BundlePart for part in members.values()) else members
    )


def _kept(raw: msgspec.Raw) -> Any:
    encoded = _checked(raw)
    try:
        if not encoded.startswith((b"[", b"{")):
            return msgspec.json.decode(encoded)
        return BundlePart(encoded)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise MalformedFrame(str(error)[:200]) from None


def _check_bundle(parts: Mapping[str, msgspec.Raw]) -> None:
    if len(parts) > BUNDLE_PARTS_MAX:
        raise MalformedFrame(f"a bundle of {len(parts)} parts")


def _checked(raw: msgspec.Raw) -> bytes:
    """Return the part as bytes without decoding it. Raise Malformed for its size or its depth."""
    encoded = bytes(raw).strip()
    if not encoded.startswith(b'"'):
        _check_size(encoded)
        if len(encoded) > 2 * DEPTH_MAX and nested_deeper(encoded, DEPTH_MAX):
            raise MalformedFrame("a JSON part nested too deep")
    return encoded


def _check_size(encoded: bytes) -> bool:
    if len(encoded) > JSON_PART_MAX and not encoded.startswith(b'"'):
        raise MalformedFrame(f"a JSON part of {len(encoded)} bytes")
    return True


def as_object(value: Any) -> dict[str, Any]:
    """Return a part that must be an object. Raise Malformed."""
    if not isinstance(value, dict):
        raise MalformedFrame("a part that should be an object is not an object")
    return value


def nested_deeper(encoded: bytes, levels: int) -> bool:
    """Return whether a JSON text nests deeper than this. Works without recursion, at C speed.

    Remove strings and everything except brackets, then remove the innermost pairs, level by level.
    """
    brackets = outline(encoded).translate(None, delete=_NO_BRACKETS)
    for _ in range(levels):
        if not brackets:
            return False
        brackets = brackets.replace(b"[]", b"").replace(b"{}", b"")
    return bool(brackets)


class FrameDecoder:
    """Splits a byte stream into frame bodies; never keeps more than one incomplete frame."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, received: bytes | memoryview) -> list[bytes]:
        """Return the bodies that these bytes complete. Raise Malformed for a length > FRAME_MAX."""
        self._buffer += received
        bodies = []
        start = 0
        while len(self._buffer) - start >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._buffer, start)
            if length > FRAME_MAX:
                raise MalformedFrame(f"a frame of {length} bytes")
            end = start + _HEADER.size + length
            if end > len(self._buffer):
                break
            bodies.append(bytes(self._buffer[start + _HEADER.size : end]))
            start = end
        del self._buffer[:start]
        return bodies
