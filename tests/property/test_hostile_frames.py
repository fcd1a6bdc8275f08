"""The host's side of the wall, against anything: a typed frame or Malformed, and nothing else."""

import contextlib
import json
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from sbx.guest import frames as guest
from sbx.kernels import frames
from sbx.kernels.frames import KERNEL, SUPERVISOR, FrameDecoder, MalformedFrame
from sbx.runtime.run.execution import ForwardedRun

TEXT = st.text(st.characters(codec="utf-8"))
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)
KINDS = st.sampled_from(sorted(frames.KERNEL_FRAMES | frames.SUPERVISOR_FRAMES)) | TEXT
FIELDS = st.sampled_from(
    [
        *("name", "text", "data", "metadata", "transient", "status", "code", "traceback", "wait"),
        *("comm_id", "target_name", "buffers", "payload", "user_expressions"),
    ]
)


@given(st.binary(max_size=400))
def test_bytes_are_a_frame_or_malformed(sent: bytes) -> None:
    for dialect in (KERNEL, SUPERVISOR):
        with contextlib.suppress(MalformedFrame):
            assert dialect.decode(sent).size == len(sent)


@given(KINDS, st.dictionaries(FIELDS, JSON) | JSON, st.none() | TEXT | JSON)
def test_json_is_a_frame_or_malformed(kind: str, content: Any, name: Any) -> None:
    sent = json.dumps({"type": kind, "content": content, "id": name}).encode()
    for dialect in (KERNEL, SUPERVISOR):
        with contextlib.suppress(MalformedFrame):
            dialect.decode(sent)


@given(st.binary(max_size=200))
def test_a_loose_part_is_a_value_or_malformed(part: bytes) -> None:
    with contextlib.suppress(MalformedFrame):
        frames.loose(msgspec.Raw(part))


@given(JSON)
def test_a_loose_part_is_what_was_sent(value: Any) -> None:
    assert frames.loose(msgspec.Raw(json.dumps(value).encode())) == value


@given(st.lists(st.tuples(TEXT, TEXT), max_size=6), st.data())
def test_splitter_gives_the_same_frames_for_any_pieces(
    texts: list[tuple[str, str]], data: st.DataObject
) -> None:
    sent = b"".join(guest.encode("stream", {"name": "stdout", "text": t}, i) for i, t in texts)
    splitter, got, start = FrameDecoder(), [], 0
    while start < len(sent):
        size = data.draw(st.integers(1, len(sent) - start))
        got += splitter.feed(sent[start : start + size])
        start += size
    decoded = [KERNEL.decode(body) for body in got]
    assert [(frame.id, frame.content) for frame in decoded] == [
        (name, frames.Stream("stdout", text)) for name, text in texts
    ]


@given(st.lists(st.binary(max_size=50), max_size=10))
def test_splitter_never_holds_more_than_it_was_given(pieces: list[bytes]) -> None:
    splitter = FrameDecoder()
    got = 0
    with contextlib.suppress(MalformedFrame):
        for piece in pieces:
            got += sum(4 + len(body) for body in splitter.feed(piece))
    assert got <= sum(map(len, pieces))


@given(st.text(st.characters()), st.sampled_from(["stdout", "stderr"]))
def test_whatever_a_cell_prints_is_decoded(text: str, name: str) -> None:
    """Lone surrogates too: the guest spells them out, since UTF-8 cannot carry them."""
    (body,) = FrameDecoder().feed(guest.encode("stream", {"name": name, "text": text}))
    content = KERNEL.decode(body).content
    assert isinstance(content, frames.Stream)
    if text.isascii():
        assert content.text == text


@given(st.dictionaries(st.text(min_size=1), JSON, max_size=5), st.dictionaries(TEXT, JSON))
def test_whatever_a_cell_displays_is_decoded(
    data: dict[str, Any], metadata: dict[str, Any]
) -> None:
    content = {"data": data, "metadata": metadata, "transient": {}}
    (body,) = FrameDecoder().feed(guest.encode("display_data", content))
    shown = KERNEL.decode(body).content
    assert isinstance(shown, frames.DisplayData)
    assert list(frames.bundle(shown.data).values()) == list(data.values())


@given(KINDS, st.dictionaries(TEXT, JSON), st.none() | TEXT)
def test_the_guest_decodes_whatever_the_host_encodes(
    kind: str, content: dict[str, Any], name: str | None
) -> None:
    assert guest.FrameReader().feed(frames.encode(kind, content, name)) == [
        guest.RawFrame(kind, content, name)
    ]


@given(st.sampled_from(["comm_open", "comm_msg", "comm_close"]), st.lists(st.binary()), JSON)
def test_a_comm_s_message_is_what_the_guest_sent(
    kind: str, buffers: list[bytes], data: Any
) -> None:
    answer = {"comm_id": "c", "data": data, "buffers": buffers}
    if kind == "comm_open":
        answer["target_name"] = "t"
    content = KERNEL.decode(guest.encode(kind, answer)[4:]).content
    assert isinstance(content, frames.CommOpenFrame | frames.CommMsgFrame)
    assert (frames.loose(content.data), content.buffers) == (data, buffers)


@given(st.sampled_from(["payload", "user_expressions", "metadata", "data"]), JSON)
def test_a_reply_is_taken_or_malformed(field: str, value: Any) -> None:
    """As a front end's run takes it: what is kept has the shape that it is used by."""
    contents: dict[str, dict[str, Any]] = {
        "execute_reply": {"status": "ok"},
        "complete_reply": {"status": "ok", "matches": [], "cursor_start": 0, "cursor_end": 0},
        "inspect_reply": {"status": "ok", "found": True, "data": {}},
    }
    for kind, content in contents.items():
        run = ForwardedRun("run-1", 1000, _ignored)
        with contextlib.suppress(MalformedFrame):
            sent = json.dumps({"type": kind, "content": content | {field: value}}).encode()
            reply = KERNEL.decode(sent).content
            assert isinstance(reply, frames.ReplyFrame)
            run.replied(reply)
            assert run.reply is reply
        assert all(isinstance(one, dict) for one in (*run.payload, *run.expressions.values()))


async def _ignored(_: object) -> None:
    pass
