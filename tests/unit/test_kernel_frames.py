"""What the host takes from inside: typed frames of its own kind, capped, or Malformed."""

import json
import struct
from typing import Any

import msgspec
import pytest

from sbx.guest import frames as guest
from sbx.kernels import frames
from sbx.kernels.frames import KERNEL, SUPERVISOR, FrameDecoder, MalformedFrame


def body(kind: str, content: Any, **more: Any) -> bytes:
    return json.dumps({"type": kind, "content": content, **more}).encode()


def test_a_frame_is_typed_and_weighs_what_it_took() -> None:
    sent = body("stream", {"name": "stdout", "text": "hé"})
    frame = KERNEL.decode(sent)
    assert frame.content == frames.Stream("stdout", "hé")
    assert (frame.id, frame.size) == (None, len(sent))


def test_a_reply_carries_the_id_of_its_request() -> None:
    frame = KERNEL.decode(body("execute_reply", {"status": "ok", "execution_count": 3}, id="7"))
    assert frame.id == "7"
    assert frame.content == frames.ExecuteReply("ok", 3)


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b'{"type": "stream"}',
        b'{"type": "stream", "content": {"name": "stdout", "text": "\xff"}}',
        b'{"type": "stream", "content": {"name": "stdout", "text": "\\ud800"}}',
        body("stream", {"name": "stdin", "text": "x"}),
        body("stream", {"name": "stdout", "text": 5}),
        body("stream", {"name": "stdout", "text": "x", "more": 1}),
        body("stream", {"name": "stdout", "text": "x"}, more=1),
        body("stream", {"name": "stdout", "text": "x"}, id=7),
        body("status", {"execution_state": "busy"}),
        body("exited", {"code": 0}),
        body("execute_reply", {"status": "fine"}),
        body("execute_reply", {"status": "ok", "execution_count": "1"}),
        body("display_data", {"data": ["text/plain"]}),
        body("error", {"ename": "E", "evalue": "", "traceback": "no list"}),
        b'{"type": "stream", "content": ' + b"[" * 100_000,
        b'{"type": "display_data", "content": {"data": {"a": ' + b"[" * 200_000,
    ],
)
def test_whatever_ours_would_not_send_is_malformed(sent: bytes) -> None:
    with pytest.raises(MalformedFrame):
        KERNEL.decode(sent)


def test_each_socket_has_its_own_words() -> None:
    with pytest.raises(MalformedFrame, match="unknown type"):
        SUPERVISOR.decode(body("stream", {"name": "stdout", "text": "x"}))
    exited = SUPERVISOR.decode(body("exited", {"signal": 9}, id="1"))
    assert exited.content == frames.Exited(signal=9)


@pytest.mark.parametrize("kind", ["comm_open", "comm_msg", "comm_close"])
def test_a_comm_s_message_is_answered_by_a_reply_of_one_kind(kind: str) -> None:
    sent = guest.encode(f"{kind}_reply", {"status": "ok"}, "7")
    frame = KERNEL.decode(sent[4:])
    assert (frame.content, frame.id) == (frames.CommReply("ok"), "7")
    for content in ({}, {"status": "done"}, {"status": "ok", "data": {}}):
        with pytest.raises(MalformedFrame):
            KERNEL.decode(body(f"{kind}_reply", content))


def test_every_reply_is_known_as_one() -> None:
    replies = {
        name for name, kind in frames.KERNEL_FRAMES.items() if issubclass(kind, frames.ReplyFrame)
    }
    assert replies == {name for name in frames.KERNEL_FRAMES if name.endswith("_reply")}


def test_a_comm_s_buffers_are_bytes_and_may_be_large() -> None:
    parts = [bytes(range(256)) * (40 << 10), b"", b"\0"]
    sent = guest.encode("comm_msg", {"comm_id": "c", "data": {}, "buffers": parts})
    assert len(sent) > frames.SMALL_MAX
    content = KERNEL.decode(sent[4:]).content
    assert isinstance(content, frames.CommMsgFrame)
    assert content.buffers == parts
    assert frames.CommMsgFrame("c").buffers == []


@pytest.mark.parametrize(
    "buffers",
    ["YWI=", ["a"], ["\u2028"], [1], [None], {"0": "YWI="}, [""] * (frames.BUFFERS_MAX + 1)],
)
def test_buffers_that_are_none_are_malformed(buffers: Any) -> None:
    with pytest.raises(MalformedFrame):
        KERNEL.decode(body("comm_msg", {"comm_id": "c", "buffers": buffers}))


def test_a_comm_s_message_of_millions_of_strings_is_malformed() -> None:
    with pytest.raises(MalformedFrame, match="too many strings"):
        KERNEL.decode(body("comm_msg", {"comm_id": "c", "buffers": [""] * (3 << 18)}))


def test_an_object_is_one() -> None:
    assert frames.as_object({"a": 1}) == {"a": 1}
    for other in ("[]", '"x"', "1", "null"):
        with pytest.raises(MalformedFrame):
            frames.as_object(json.loads(other))


def test_the_sentence_for_a_malformed_frame_is_short() -> None:
    with pytest.raises(MalformedFrame) as raised:
        KERNEL.decode(body("x" * 100_000, {}))
    assert len(str(raised.value)) < 200


def raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(json.dumps(value).encode())


def test_a_bundle_of_too_many_parts_is_malformed() -> None:
    with pytest.raises(MalformedFrame, match="65 parts"):
        frames.bundle({str(number): raw("") for number in range(65)})


def nested(levels: int) -> msgspec.Raw:
    return msgspec.Raw(b'{"a":' * levels + b"1" + b"}" * levels)


def test_json_nests_up_to_the_limit_and_not_deeper() -> None:
    assert frames.loose(nested(frames.DEPTH_MAX))
    with pytest.raises(MalformedFrame, match="too deep"):
        frames.loose(nested(frames.DEPTH_MAX + 1))


def test_brackets_in_strings_are_no_nesting() -> None:
    text = "[" * 1000 + '\\"{'
    assert frames.loose(raw([text, {text: text}])) == [text, {text: text}]


def test_text_may_be_large_and_json_may_not() -> None:
    assert len(frames.loose(raw("x" * (4 << 20)))) == 4 << 20
    with pytest.raises(MalformedFrame, match="JSON part"):
        frames.loose(raw([0] * (frames.JSON_PART_MAX // 2)))


@pytest.mark.parametrize("text", [b"", b"{", b"nan", b'"\xff"', b'"\\ud800"', b"1 2", b"]["])
def test_a_part_that_is_no_json_is_malformed(text: bytes) -> None:
    with pytest.raises(MalformedFrame):
        frames.loose(msgspec.Raw(text))


def test_splitter_refuses_a_length_before_it_holds_the_bytes() -> None:
    with pytest.raises(MalformedFrame, match="bytes"):
        FrameDecoder().feed(struct.pack(">I", frames.FRAME_MAX + 1))


def test_the_guest_s_largest_frame_fits() -> None:
    assert guest.MAX_SENT < frames.FRAME_MAX
    text = "x" * (guest.MAX_SENT - 200)
    (sent,) = FrameDecoder().feed(guest.encode("stream", {"name": "stdout", "text": text}))
    assert KERNEL.decode(sent).content == frames.Stream("stdout", text)


def test_both_sides_agree_on_the_bounds_of_a_bundle() -> None:
    assert guest.MAX_DEPTH <= frames.DEPTH_MAX
    assert guest.MAX_JSON <= frames.JSON_PART_MAX
    assert guest.MAX_PARTS <= frames.BUNDLE_PARTS_MAX
    assert 2 * guest.MAX_VALUES < frames.VALUES_MAX
    assert 2 * guest.MAX_VALUES < frames.STRINGS_MAX  # each string is a value


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("exited", {"code": 256}),
        ("exited", {"code": -1}),
        ("exited", {"signal": 0}),
        ("exited", {"signal": 1 << 80}),
        ("exited", {"error": "e" * 4097}),
        ("kernel_exited", {"code": 1 << 80}),
        ("fed", {"bytes": -1, "open": True}),
        ("tty", {"data": ""}),
    ],
)
def test_what_pid_1_says_of_a_command_is_what_linux_could_tell(
    kind: str, content: dict[str, Any]
) -> None:
    """It is remembered, by the hundred: no size and no number of its own choice."""
    with pytest.raises(MalformedFrame):
        SUPERVISOR.decode(body(kind, content))


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("exited", {"code": 255}),
        ("exited", {"signal": 64}),
        ("exited", {"error": "e" * 4096}),
        ("fed", {"bytes": 0, "open": False}),
        ("tty", {"data": "YQ=="}),
    ],
)
def test_all_that_linux_does_tell_passes(kind: str, content: dict[str, Any]) -> None:
    SUPERVISOR.decode(body(kind, content))


def crowded(kind: str, strings: int) -> bytes:
    """A frame that has so many strings in all."""
    if kind == "error":
        content: Any = {"ename": "", "evalue": "", "traceback": [""] * (strings - 8)}
    else:
        content = {"data": {"application/json": [""] * (strings - 5)}}
    return body(kind, content)


@pytest.mark.parametrize("kind", ["error", "display_data"])
def test_strings_without_end_are_refused_before_one_is_made(kind: str) -> None:
    few, most = 1000, frames.STRINGS_MAX
    assert crowded(kind, few).count(b'"') == 2 * few
    KERNEL.decode(crowded(kind, most))
    with pytest.raises(MalformedFrame, match="too many strings"):
        KERNEL.decode(crowded(kind, most + 1))


@pytest.mark.parametrize(
    "text", ['"' * 2_000_000, "\\" * 2_000_000, '\\"' * 1_000_000, ":," * 999_999]
)
def test_quotes_within_a_text_are_no_strings(text: str) -> None:
    """HTML has them by the million; also behind backslashes, and behind escaped ones."""
    shown = KERNEL.decode(body("display_data", {"data": {"text/html": text}})).content
    assert isinstance(shown, frames.DisplayData)
    assert frames.bundle(shown.data) == {"text/html": text}


@pytest.mark.parametrize("item", [{}, 0, None, "", {"": 0}])
def test_values_without_end_are_refused_before_one_is_made(item: Any) -> None:
    """`{},` has three bytes and costs about eighty: 2 MiB of it were 60 MiB, of one frame."""
    each = 3 if item == {"": 0} else 1

    def shown(number: int) -> bytes:
        return body("display_data", {"data": {"a/b": [item] * (number // each)}})

    assert KERNEL.decode(shown(frames.VALUES_MAX - 10)).values > frames.VALUES_MAX - 20
    with pytest.raises(MalformedFrame, match=r"values of JSON|too many strings"):
        KERNEL.decode(shown(frames.VALUES_MAX + 10))


HALF: list[Any] = [{}] * (frames.VALUES_MAX // 2)


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("display_data", {"data": {}, "metadata": {"a": [{}] * frames.VALUES_MAX}}),
        (
            "update_display_data",
            {"data": {"a": HALF, "b": HALF}},
        ),
        ("execute_result", {"data": {"a": [{}] * frames.VALUES_MAX}, "execution_count": 1}),
        ("execute_reply", {"status": "ok", "payload": [[] for _ in range(frames.VALUES_MAX)]}),
        ("execute_reply", {"status": "ok", "user_expressions": {"a": [0] * frames.VALUES_MAX}}),
        ("comm_msg", {"comm_id": "c", "data": {"a": [0] * frames.VALUES_MAX}}),
    ],
)
def test_every_part_that_is_json_counts(kind: str, content: Any) -> None:
    with pytest.raises(MalformedFrame, match="values of JSON"):
        KERNEL.decode(body(kind, content))


def test_a_value_counts_as_sixteen_bytes_of_output() -> None:
    frame = KERNEL.decode(body("display_data", {"data": {"a/b": [{}] * 1000}}))
    assert (frame.values, frame.cost) == (1002, 16 * 1002)
    text = KERNEL.decode(body("display_data", {"data": {"text/html": "[{}]" * 1000}}))
    assert (text.values, text.cost) == (2, text.size)
