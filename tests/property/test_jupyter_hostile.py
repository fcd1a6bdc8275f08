"""Whatever a kernel says that passes as a frame becomes a message that Jupyter's own client reads,
or is Malformed; whatever a client says is a request, or is not heard.
"""

import contextlib
import json
from collections.abc import Callable
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import ValidationError
from jupyter_client.session import Session
from jupyter_kernel_test.msgspec_v5 import schema_fragments, validate_message

from sbx.errors import BadRequest
from sbx.jupyter import parse, serialize
from sbx.kernels import frames
from sbx.protocol.runs import Status
from sbx.runtime.run.execution import ForwardedRun, Published
from sbx.runtime.run.frontend import CellEnd
from tests.tiers import examples

KEY = b"k" * 32
TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
NUMBERS = st.integers(-(2**70), 2**70) | st.integers(-3, 3)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)
OBJECT = st.dictionaries(TEXT, JSON, max_size=4)
LOOSE = OBJECT | OBJECT | JSON
BUFFERS = st.lists(st.binary(max_size=9), max_size=3) | st.lists(TEXT, max_size=3) | JSON
WORDS = {
    "name": st.sampled_from(["stdout", "stderr"]),
    "transient": st.dictionaries(st.just("display_id") | TEXT, TEXT, max_size=2),
    "buffers": BUFFERS,
    "payload": st.lists(OBJECT, max_size=2) | JSON,
    "user_expressions": st.dictionaries(TEXT, OBJECT, max_size=2) | LOOSE,
    "traceback": st.lists(TEXT, max_size=3),
    "matches": st.lists(TEXT, max_size=3),
    "execution_count": st.none() | NUMBERS,
    "cursor_start": NUMBERS,
    "cursor_end": NUMBERS,
    "data": LOOSE,
    "preload_failed": st.dictionaries(TEXT, TEXT, max_size=2),
    "limit": NUMBERS,
    "errno": NUMBERS,
    "status": st.sampled_from(
        ["ok", "error", "aborted", "complete", "incomplete", "invalid", "unknown"]
    ),
}
FLAGS = {"wait", "cut", "password", "found"}


async def nobody(_: object) -> None:
    """Listens."""


def executed(reply: frames.ExecuteReply) -> dict[str, Any]:
    """As the front end decodes it; the number of the cell is counted beside."""
    live = ForwardedRun("run", 1 << 20, nobody)
    live.replied(reply)
    end = CellEnd(live.finish(Status.OK), reply, live.payload, live.expressions)
    return {**serialize.executed(end, reply), "execution_count": 7}


SAID: dict[type[Any], Callable[[Any], dict[str, Any]]] = {
    frames.ExecuteReply: executed,
    frames.CompleteReply: lambda reply: serialize.completed(reply, "print"),
    frames.InspectReply: serialize.inspected,
    frames.IsCompleteReply: serialize.is_complete,
    frames.KernelReady: serialize.kernel_info,
}


def word(name: str) -> st.SearchStrategy[Any]:
    return st.booleans() if name in FLAGS else WORDS.get(name, TEXT)


@st.composite
def said(draw: st.DrawFn) -> tuple[str, bytes]:
    """A frame of any type, with the words of that type, of the types that they have."""
    kind = draw(st.sampled_from(sorted(frames.KERNEL_FRAMES)))
    fields = msgspec.structs.fields(frames.KERNEL_FRAMES[kind])
    needed = {one.name: word(one.name) for one in fields if one.required}
    others = {one.name: word(one.name) for one in fields if not one.required}
    content = draw(st.fixed_dictionaries(needed, optional=others))
    encoded = msgspec.json.encode({"type": kind, "content": content})
    return kind, encoded


def published_by(kind: str, content: Any) -> serialize.JupyterMessage | None:
    """As the bridge does it. Raises frames.Malformed."""
    if isinstance(content, frames.InputRequestFrame):
        return None  # of which only the words go on
    if isinstance(content, Published):
        return serialize.shown(content, 7)
    if (made := SAID.get(type(content))) is not None:
        kind = "kernel_info_reply" if kind == "ready" else kind
        return serialize.JupyterMessage(kind, made(content))
    return None


def as_a_client_reads_it(message: serialize.JupyterMessage) -> dict[str, Any]:
    ours = Session(key=KEY, pack=msgspec.json.encode)
    made = ours.msg(message.kind, dict(message.content), metadata=dict(message.metadata))
    parts = [*ours.serialize(made), *message.buffers]
    _, rest = ours.feed_identities(parts)
    read: dict[str, Any] = Session(key=KEY).deserialize(rest)
    return read


def check(read: dict[str, Any]) -> None:
    """By the schema that Jupyter tests kernels with; MIME types are the user's own."""
    if read["msg_type"] not in schema_fragments or read["content"].get("status") == "aborted":
        return
    shown = read["content"].get("data")
    if isinstance(shown, dict):
        read = {**read, "content": {**read["content"], "data": {}}}
    try:
        validate_message(read)
    except ValidationError as error:
        raise AssertionError(f"{read['msg_type']}: {error.message}") from None


@settings(max_examples=examples(200))
@given(said())
def test_what_passes_as_a_frame_is_read_by_jupyters_own_client(frame: tuple[str, bytes]) -> None:
    kind, encoded = frame
    with contextlib.suppress(frames.MalformedFrame):
        content = frames.KERNEL.decode(encoded).content
        message = published_by(kind, content)
        if message is None:
            return
        read = as_a_client_reads_it(message)
        check(read)
        assert read["msg_type"] == message.kind
        assert read["content"] == json.loads(json.dumps(message.content))
        assert [bytes(one) for one in read["buffers"]] == list(message.buffers)
        if message.kind.startswith("comm"):
            assert isinstance(read["content"]["data"], dict)


PARTS = st.lists(st.binary(max_size=30), max_size=9) | st.lists(
    st.sampled_from([b"<IDS|MSG>", b"", b"{}", b"[]", b"x"]), max_size=9
)


@given(PARTS)
def test_bytes_are_a_request_or_not_heard(parts: list[bytes]) -> None:
    with contextlib.suppress(parse.MalformedMessage):
        parse.read(Session(key=KEY), parts)


HEADER = st.fixed_dictionaries(
    {
        "msg_id": TEXT | LOOSE,
        "msg_type": st.sampled_from(sorted(parse.SHAPES)) | TEXT | LOOSE,
        "session": TEXT | JSON,
        "date": st.just("2026-01-01T00:00:00Z") | JSON,
        "version": st.just("5.4") | TEXT | JSON,
    },
    optional={"username": TEXT | JSON},
)
ASKED = {one.name for kind in parse.SHAPES.values() for one in msgspec.structs.fields(kind)}
CONTENT = st.dictionaries(
    st.sampled_from(sorted(ASKED)), JSON | OBJECT | st.just("tail"), max_size=5
)


@settings(max_examples=examples(150))
@given(HEADER | JSON, JSON, LOOSE, CONTENT | JSON, st.lists(st.binary(max_size=5), max_size=3))
def test_what_is_signed_is_a_request_of_its_shape_or_refused(
    header: Any, parent: Any, metadata: Any, content: Any, buffers: list[bytes]
) -> None:
    """Nothing else is raised, and what is given back with each answer can be packed."""
    session = Session(key=KEY)
    body = [json.dumps(part).encode() for part in (header, parent, metadata, content)]
    parts = [b"name", b"<IDS|MSG>", session.sign(body), *body, *buffers]
    with contextlib.suppress(parse.MalformedMessage, BadRequest):
        request = parse.read(session, parts)
        msgspec.json.encode(request.header)
        assert isinstance(request.msg_id, str)
        parse.shape(request)
