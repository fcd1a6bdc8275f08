"""What clients of Jupyter may ask, and what they are told: without a socket or a kernel."""

import json
from typing import Any

import msgspec
import pytest
from jupyter_client.session import DELIM, Session

from sbx.errors import BadRequest, Conflict
from sbx.jupyter import parse, serialize
from sbx.jupyter.parse import Execute, KernelRequest, MalformedMessage
from sbx.jupyter.serialize import JupyterMessage
from sbx.kernels import frames
from sbx.protocol.runs import Run, RunError, Status
from sbx.runtime.run.frontend import CellEnd

KEY = b"a key of these tests"


def raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(json.dumps(value).encode())


def signed(kind: str, content: Any, **more: Any) -> list[bytes]:
    """As a client sends it; `more` replaces parts of its header."""
    client = Session(key=KEY)
    answer = client.msg(kind, {})
    answer["header"] |= more
    answer["content"] = json.dumps(content).encode()
    return client.serialize(answer, b"who")


def bridge_session() -> Session:
    return Session(key=KEY, pack=msgspec.json.encode)


def request(kind: str, content: dict[str, Any]) -> KernelRequest:
    return parse.read(bridge_session(), signed(kind, content))


# -- what is shown ---------------------------------------------------------------------------------


def test_frames_become_the_messages_of_their_kind() -> None:
    bundle = {"text/plain": raw("2"), "application/json": raw({"a": [1]})}
    plain = {"text/plain": "2", "application/json": {"a": [1]}}
    answer: list[tuple[Any, JupyterMessage]] = [
        (frames.Stream("stdout", "hi"), JupyterMessage("stream", {"name": "stdout", "text": "hi"})),
        (
            frames.ExecuteResult(bundle, 7, raw({"m": 1})),
            JupyterMessage(
                "execute_result", {"data": plain, "metadata": {"m": 1}, "execution_count": 7}
            ),
        ),
        (
            frames.DisplayData(bundle, raw({}), {"display_id": "d"}),
            JupyterMessage(
                "display_data",
                {"data": plain, "metadata": {}, "transient": {"display_id": "d"}},
            ),
        ),
        (
            frames.UpdateDisplayData(bundle, raw({}), {"display_id": "d", "path": "/etc"}),
            JupyterMessage(
                "update_display_data",
                {"data": plain, "metadata": {}, "transient": {"display_id": "d"}},
            ),
        ),
        (
            frames.ErrorFrame("E", "v", ["t"]),
            JupyterMessage("error", {"ename": "E", "evalue": "v", "traceback": ["t"]}),
        ),
        (frames.ClearOutput(wait=True), JupyterMessage("clear_output", {"wait": True})),
        (
            frames.CommOpenFrame("c", "t", raw({"a": 1})),
            JupyterMessage(
                "comm_open",
                {"comm_id": "c", "target_name": "t", "target_module": None, "data": {"a": 1}},
                buffers=[],
            ),
        ),
        (
            frames.CommClose("c"),
            JupyterMessage("comm_close", {"comm_id": "c", "data": {}}, buffers=[]),
        ),
    ]
    assert [serialize.shown(frame, 3) for frame, _ in answer] == [message for _, message in answer]


def test_a_result_without_a_number_has_that_of_its_cell() -> None:
    message = serialize.shown(frames.ExecuteResult({}, None), 3)
    assert message.content["execution_count"] == 3


def test_buffers_of_a_comm_stay_bytes() -> None:
    answer = frames.CommMsgFrame("c", raw({}), raw({"version": "2"}), [b"hi", b"\xff" * 9])
    message = serialize.shown(answer, 1)
    assert message.metadata == {"version": "2"}
    assert message.buffers == [b"hi", b"\xff" * 9]


@pytest.mark.parametrize(
    "answer",
    [
        frames.CommMsgFrame("c", raw(1)),
        frames.CommMsgFrame("c", raw({}), raw([])),
        frames.DisplayData({"text/plain": raw("x")}, raw("m")),
        frames.ExecuteResult({"application/json": msgspec.Raw(b"[" * 99 + b"]" * 99)}, 1),
        frames.InputRequestFrame("?", password=False),
    ],
)
def test_parts_that_are_not_what_they_should_be_are_malformed(answer: Any) -> None:
    with pytest.raises(frames.MalformedFrame):
        serialize.shown(answer, 1)


# -- what is answered ------------------------------------------------------------------------------


def cell_end(reply: frames.ExecuteReply, **more: Any) -> CellEnd:
    return CellEnd(Run("r", Status.OK), reply, **more)


def test_a_reply_has_only_payloads_that_mean_something_outside() -> None:
    wishes = [{"source": "page", "data": {}}, {"source": "edit_magic", "filename": "/etc/passwd"}]
    reply = frames.ExecuteReply("ok", 4)
    end = cell_end(reply, payload=wishes, user_expressions={"x": {"status": "ok"}})
    assert serialize.executed(end, reply) == {
        "status": "ok",
        "payload": [{"source": "page", "data": {}}],
        "user_expressions": {"x": {"status": "ok"}},
    }


def test_an_error_in_a_reply_is_passed_on() -> None:
    reply = frames.ExecuteReply("error", 1, ename="E", evalue="v")
    content = serialize.executed(cell_end(reply), reply)
    assert (content["status"], content["ename"], content["traceback"]) == ("error", "E", [])


def test_the_cursor_of_a_completion_stays_in_the_code() -> None:
    reply = frames.CompleteReply("ok", ["a"], -5, 10**9)
    assert serialize.completed(reply, "abc") == {
        "status": "ok",
        "matches": ["a"],
        "cursor_start": 0,
        "cursor_end": 3,
        "metadata": {},
    }


def test_kernel_info_tells_no_version_that_is_none() -> None:
    info = serialize.kernel_info(frames.KernelReady("3.12.1rc2", "<script>"))
    assert info["language_info"]["version"] == "3.12.1rc2"
    assert info["help_links"][0]["url"] == "https://docs.python.org/3.12"
    assert "script" not in json.dumps(info)
    assert info["supported_features"] == []


def test_a_refusal_says_the_sentence_and_the_hint() -> None:
    content = serialize.refused(Conflict("it is gone", hint="restart it"))
    assert content["ename"] == "Conflict"
    assert content["evalue"] == "it is gone (hint: restart it)"
    assert serialize.error(
        serialize.ended(RunError("Timeout", "too long", "ours"))
    ) == JupyterMessage(
        "error",
        {
            "ename": "Timeout",
            "evalue": "too long",
            "traceback": ["\x1b[31mTimeout\x1b[0m: too long"],
        },
    )


# -- what may be asked -----------------------------------------------------------------------------


def test_a_signed_message_is_read() -> None:
    asked = request("execute_request", {"code": "1", "stop_on_error": False, "of": "later"})
    assert (asked.names, asked.kind) == ((b"who",), "execute_request")
    assert asked.header["msg_type"] == "execute_request"
    assert parse.shape(asked) == Execute("1", stop_on_error=False)


def test_what_is_not_signed_with_the_key_is_not_read_nor_remembered() -> None:
    session = bridge_session()
    parts = signed("execute_request", {"code": "1"})
    for signature in (b"", b"0" * 64, b"x" * 1_000_000):
        parts[2] = signature
        with pytest.raises(MalformedMessage, match="not signed"):
            parse.read(session, parts)
    assert not session.digest_history


def test_a_message_that_was_sent_again_is_not_read() -> None:
    session = bridge_session()
    parts = signed("execute_request", {"code": "1"})
    parse.read(session, parts)
    with pytest.raises(MalformedMessage, match="Duplicate"):
        parse.read(session, parts)


@pytest.mark.parametrize(
    "header",
    [
        {"msg_type": ["list"]},
        {"msg_type": "x" * 300},
        {"msg_id": None},
        {"msg_id": ""},
        {"version": 5},
        {"date": "2024-99-99T00:00:00Z"},
        {"session": "\ud800"},
        {"more": "x" * 20_000},
    ],
)
def test_a_header_that_cannot_be_given_back_is_not_read(header: dict[str, Any]) -> None:
    answer = {"msg_id": "1", "msg_type": "execute_request", "session": "s", "version": "5.3"}
    packed = [json.dumps({**answer, **header}).encode(), b"{}", b"{}", b"{}"]
    parts = [b"who", DELIM, Session(key=KEY).sign(packed), *packed]
    with pytest.raises(MalformedMessage):
        parse.read(bridge_session(), parts)


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [b"who"],
        [b"who", DELIM],
        [b"x"] * 20 + [DELIM],
        [b"who", DELIM, b"", b"{}"],
        [b"who", DELIM, *[b"{}"] * 5000],
    ],
)
def test_a_message_without_its_parts_is_not_read(parts: list[bytes]) -> None:
    with pytest.raises(MalformedMessage):
        parse.read(bridge_session(), parts)


@pytest.mark.parametrize("content", [[], 1, "x", None, float("nan")])
def test_a_content_that_is_no_object_is_not_read(content: object) -> None:
    with pytest.raises(MalformedMessage):
        parse.read(bridge_session(), signed("execute_request", content))


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("execute_request", {}),
        ("execute_request", {"code": 1}),
        ("execute_request", {"code": "1", "silent": "yes"}),
        ("execute_request", {"code": "\ud800"}),
        ("execute_request", {"code": "1", "user_expressions": {"a": 1}}),
        ("complete_request", {"code": "a", "cursor_pos": -1}),
        ("complete_request", {"code": "a", "cursor_pos": 2**70}),
        ("inspect_request", {"code": "a", "cursor_pos": 1.5}),
        ("inspect_request", {"code": "a", "detail_level": 3}),
        ("history_request", {"hist_access_type": "all"}),
        ("history_request", {"hist_access_type": "tail", "n": 2**70}),
        ("comm_open", {"comm_id": "c"}),
        ("comm_msg", {"comm_id": "c", "data": [1]}),
        ("comm_close", {"comm_id": "c" * 300}),
        ("shutdown_request", {"restart": 1}),
        ("input_reply", {"value": None}),
    ],
)
def test_a_request_of_another_shape_is_refused_in_words(kind: str, content: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match=f"the content of {kind} is invalid"):
        parse.shape(request(kind, content))


def test_a_kind_that_nobody_knows_has_no_shape() -> None:
    assert parse.shape(request("apply_request", {"x": 1})) is None
