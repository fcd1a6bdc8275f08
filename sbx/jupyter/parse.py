"""Check the requests of a client: authentic first, then of a known kind, then of the right shape.

`read` takes a message out of its envelope, with the key that client and bridge share. It rejects a
message without a valid signature, or with a signature that was used before. `shape` returns the
content of a request as one of the classes here. Unknown keys are accepted: clients of a later minor
version send some.
"""

from hmac import compare_digest
from typing import Annotated, Any, Literal, cast

import msgspec
from jupyter_client.session import DELIM, Session
from msgspec import Struct

from sbx.errors import BadRequest

_PARTS_MAX = 1024  # the state of a widget has a buffer for each of its arrays
_NAMES_MAX = 8  # one for the client, and one more for each proxy on the way
_HEADER_MAX = 16 << 10  # bytes; every message that the request causes contains the header
_METADATA_MAX = 4 << 20
_NAME_MAX = 256  # characters of an id or a type


class MalformedMessage(Exception):
    """A message that no Jupyter client would have sent. Its text is safe to log."""

    def __init__(self, message: object) -> None:
        super().__init__(str(message)[:200].encode("unicode_escape").decode("ascii"))


class KernelRequest(Struct, frozen=True):
    """One message of a client. `names` is the route back to it; `content` is any JSON object."""

    names: tuple[bytes, ...]
    kind: str
    header: dict[str, Any]
    content: dict[str, Any]
    metadata: dict[str, Any]
    buffers: tuple[bytes, ...]
    size: int

    @property
    def msg_id(self) -> str:
        name: str = self.header["msg_id"]
        return name


def read(session: Session, parts: list[bytes]) -> KernelRequest:
    """Return a message with a valid signature. Raise Malformed."""
    if DELIM not in parts[: _NAMES_MAX + 1]:
        raise MalformedMessage("a message without a delimiter")
    names, rest = session.feed_identities(parts)
    signed = cast("list[bytes]", rest)
    if not 5 <= len(signed) <= 5 + _PARTS_MAX:
        raise MalformedMessage(f"a message of {len(signed)} parts")
    # Session stores a signature before it checks it: of any size, from any process.
    if not compare_digest(session.sign(signed[1:5]), signed[0]):
        raise MalformedMessage("a message that is not signed with the key of this connection")
    if max(len(signed[1]), len(signed[2])) > _HEADER_MAX or len(signed[3]) > _METADATA_MAX:
        raise MalformedMessage("a message whose header is too large")
    try:
        message = session.deserialize(signed)
        session.pack(message["header"])  # the replies contain it, so it must be valid JSON
    except Exception as error:  # noqa: BLE001  # jupyter_client: any type, for any odd value
        raise MalformedMessage(error) from None
    return _request(message, tuple(names), sum(map(len, parts)))


def _request(message: dict[str, Any], names: tuple[bytes, ...], size: int) -> KernelRequest:
    header = message["header"]
    if not isinstance(header, dict) or not _is_name(header.get("msg_id")):
        raise MalformedMessage("a header without an id")
    if not _is_name(header.get("msg_type")):
        raise MalformedMessage("a header without a type")
    if not isinstance(message["content"], dict) or not isinstance(message["metadata"], dict):
        raise MalformedMessage("the content or the metadata is not an object")
    return KernelRequest(
        names=names,
        kind=header["msg_type"],
        header=header,
        content=message["content"],
        metadata=message["metadata"],
        buffers=tuple(bytes(part) for part in message["buffers"]),
        size=size,
    )


def _is_name(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _NAME_MAX


# -- the content of each kind -------------------------------------------------------------------

_Position = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_Number = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
_Name = Annotated[str, msgspec.Meta(max_length=_NAME_MAX)]


class Execute(msgspec.Struct):
    code: str
    silent: bool = False
    store_history: bool = True
    user_expressions: dict[str, str] | None = None
    allow_stdin: bool = False
    stop_on_error: bool = True


class Complete(msgspec.Struct):
    code: str
    cursor_pos: _Position | None = None


class Inspect(msgspec.Struct):
    code: str
    cursor_pos: _Position | None = None
    detail_level: Literal[0, 1, 2] = 0


class IsComplete(msgspec.Struct):
    code: str


class HistoryRequest(msgspec.Struct):
    """`range`, `tail` or `search`; the kind decides which of the other fields count."""

    hist_access_type: Literal["range", "tail", "search"] = "tail"
    output: bool = False
    session: _Number = 0
    start: _Number | None = None
    stop: _Number | None = None
    n: _Number | None = None
    pattern: Annotated[str, msgspec.Meta(max_length=200)] | None = None
    unique: bool = False


class CommInfo(msgspec.Struct):
    target_name: str | None = None


class CommOpen(msgspec.Struct):
    comm_id: _Name
    target_name: _Name
    data: dict[str, Any] = {}


class CommMsg(msgspec.Struct):
    comm_id: _Name
    data: dict[str, Any] = {}


class Shutdown(msgspec.Struct):
    restart: bool = False


class Debug(msgspec.Struct):
    """A request of the Debug Adapter Protocol; only the fields that its refusal repeats."""

    seq: _Number = 0
    command: str = ""


class InputReply(msgspec.Struct):
    value: Annotated[str, msgspec.Meta(max_length=1 << 20)]


class EmptyRequest(msgspec.Struct):
    """The content of a request that has no fields."""


Shape = (
    Execute
    | Complete
    | Inspect
    | IsComplete
    | HistoryRequest
    | CommInfo
    | CommOpen
    | CommMsg
    | Shutdown
    | Debug
    | InputReply
    | EmptyRequest
)

SHAPES: dict[str, type[Shape]] = {
    "execute_request": Execute,
    "complete_request": Complete,
    "inspect_request": Inspect,
    "is_complete_request": IsComplete,
    "history_request": HistoryRequest,
    "comm_info_request": CommInfo,
    "comm_open": CommOpen,
    "comm_msg": CommMsg,
    "comm_close": CommMsg,
    "kernel_info_request": EmptyRequest,
    "connect_request": EmptyRequest,
    "interrupt_request": EmptyRequest,
    "shutdown_request": Shutdown,
    "debug_request": Debug,
    "create_subshell_request": EmptyRequest,
    "delete_subshell_request": EmptyRequest,
    "list_subshell_request": EmptyRequest,
    "input_reply": InputReply,
}


def shape(request: KernelRequest) -> Shape | None:
    """Return the checked content of a request; None for an unknown kind. Raise BadRequest."""
    shape_class = SHAPES.get(request.kind)
    if shape_class is None:
        return None
    try:
        msgspec.json.encode(request.content)  # some JSON that Python reads is invalid for others
        return msgspec.convert(request.content, shape_class)
    except (msgspec.ValidationError, ValueError, OverflowError, RecursionError) as error:
        text = str(error)[:200].encode("unicode_escape").decode("ascii")
        raise BadRequest(f"the content of {request.kind} is invalid: {text}") from None
