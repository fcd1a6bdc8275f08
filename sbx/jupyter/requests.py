"""What a client may ask: authentic first, then of a known kind, then of the right shape.

`read` takes a message off its envelope, by the key that client and bridge share; what has no valid
signature, or had it before, is nobody's word. `shape` gives the content of a request as one of the
classes here. Keys that they do not name are let pass: clients of a later minor version send some.
"""

from dataclasses import dataclass
from hmac import compare_digest
from typing import Annotated, Any, Literal, cast

import msgspec
from jupyter_client.session import DELIM, Session

from sbx.errors import BadRequest

_PARTS_MAX = 1024  # a widget's state has a buffer for each array in it
_NAMES_MAX = 8  # one, and one more for each proxy on the way
_HEADER_MAX = 16 << 10  # bytes; it goes back with everything that the request causes
_METADATA_MAX = 4 << 20
_NAME_MAX = 256  # characters of an id or a type


class Malformed(Exception):
    """A message that no client of Jupyter would have sent. What is said of it is safe to log."""

    def __init__(self, said: object) -> None:
        super().__init__(str(said)[:200].encode("unicode_escape").decode("ascii"))


@dataclass(frozen=True, slots=True)
class Request:
    """One message of a client. `names` is the way back to it; `content` is any JSON object yet."""

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


def read(session: Session, parts: list[bytes]) -> Request:
    """A message whose signature is right. Raises Malformed."""
    if DELIM not in parts[: _NAMES_MAX + 1]:
        raise Malformed("a message without a delimiter")
    names, rest = session.feed_identities(parts)
    signed = cast("list[bytes]", rest)
    if not 5 <= len(signed) <= 5 + _PARTS_MAX:
        raise Malformed(f"a message of {len(signed)} parts")
    # Session remembers a signature before it looks at it: of whatever size, from anybody.
    if not compare_digest(session.sign(signed[1:5]), signed[0]):
        raise Malformed("a message that is not signed with the key of this connection")
    if max(len(signed[1]), len(signed[2])) > _HEADER_MAX or len(signed[3]) > _METADATA_MAX:
        raise Malformed("a message whose header is too large")
    try:
        told = session.deserialize(signed)
        session.pack(told["header"])  # it must be fit to be given back
    except Exception as error:  # noqa: BLE001  # jupyter_client: any type, for any odd value
        raise Malformed(error) from None
    return _request(told, tuple(names), sum(map(len, parts)))


def _request(told: dict[str, Any], names: tuple[bytes, ...], size: int) -> Request:
    header = told["header"]
    if not isinstance(header, dict) or not _is_name(header.get("msg_id")):
        raise Malformed("a header without an id")
    if not _is_name(header.get("msg_type")):
        raise Malformed("a header without a type")
    if not isinstance(told["content"], dict) or not isinstance(told["metadata"], dict):
        raise Malformed("a content or metadata that is no object")
    return Request(
        names=names,
        kind=header["msg_type"],
        header=header,
        content=told["content"],
        metadata=told["metadata"],
        buffers=tuple(bytes(part) for part in told["buffers"]),
        size=size,
    )


def _is_name(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _NAME_MAX


# -- what each kind says ------------------------------------------------------------------------

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


class History(msgspec.Struct):
    """`range`, `tail` or `search`; which of the rest counts depends on it."""

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
    """A request of the Debug Adapter Protocol; only what its refusal names."""

    seq: _Number = 0
    command: str = ""


class InputReply(msgspec.Struct):
    value: Annotated[str, msgspec.Meta(max_length=1 << 20)]


class Nothing(msgspec.Struct):
    """Of a request that says all by its kind."""


Shape = (
    Execute
    | Complete
    | Inspect
    | IsComplete
    | History
    | CommInfo
    | CommOpen
    | CommMsg
    | Shutdown
    | Debug
    | InputReply
    | Nothing
)

SHAPES: dict[str, type[Shape]] = {
    "execute_request": Execute,
    "complete_request": Complete,
    "inspect_request": Inspect,
    "is_complete_request": IsComplete,
    "history_request": History,
    "comm_info_request": CommInfo,
    "comm_open": CommOpen,
    "comm_msg": CommMsg,
    "comm_close": CommMsg,
    "kernel_info_request": Nothing,
    "connect_request": Nothing,
    "interrupt_request": Nothing,
    "shutdown_request": Shutdown,
    "debug_request": Debug,
    "create_subshell_request": Nothing,
    "delete_subshell_request": Nothing,
    "list_subshell_request": Nothing,
    "input_reply": InputReply,
}


def shape(request: Request) -> Shape | None:
    """What it says; None for a kind that nobody here knows. Raises BadRequest."""
    wanted = SHAPES.get(request.kind)
    if wanted is None:
        return None
    try:
        msgspec.json.encode(request.content)  # some JSON that Python reads is fit for nobody else
        return msgspec.convert(request.content, wanted)
    except (msgspec.ValidationError, ValueError, OverflowError, RecursionError) as error:
        said = str(error)[:200].encode("unicode_escape").decode("ascii")
        raise BadRequest(f"no {request.kind} is like that: {said}") from None
