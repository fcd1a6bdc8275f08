"""A hostile kernel behind the bridge, and hostile clients before it: a client is told a valid,
signed message or nothing, memory stays bounded, and others are served as before.

The kernel's socket is held by the test: what a jailed process writes on its own, it writes. Attacks
on what all front ends share are in test_hostile_kernel.py; here is what a notebook's client sees.
"""

import asyncio
import json
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import zmq
from attacking import watched
from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.session import Session
from notebooks import (
    KEY,
    PATIENCE_S,
    Bridged,
    Impostor,
    Raw,
    bridged,
    client_of,
    execute,
    finished,
    greeted,
    never_reading,
    reply_to,
    until,
)

from sbx.guest import frames as guest
from sbx.jupyter import channels
from sbx.jupyter.channels import FULL
from tests.tiers import rows

MIB = 1 << 20
DEEP = 100_000


async def works(kc: AsyncKernelClient, inside: Impostor) -> None:
    """A cell of an honest client, and all that it is told of it."""
    running = asyncio.create_task(execute(kc, "x"))
    frame = await inside.asked()
    await inside.say("stream", {"name": "stdout", "text": "still here"})
    await inside.say("execute_reply", {"status": "ok", "execution_count": 7}, to=frame.id)
    answer = await running
    assert answer.reply["content"]["status"] == "ok"
    assert answer.stdout == "still here"


# -- what a kernel says ----------------------------------------------------------------------------

BUNDLE = {"text/plain": "x"}
HOSTILE: dict[str, bytes] = {
    "garbage": b"GET / HTTP/1.1\r\n\r\n",
    "unknown type": guest.encode("kernel_info_reply", {}),
    "a request": guest.encode("execute_request", {"code": "1"}),
    "a status": guest.encode("status", {"execution_state": "idle"}),
    "a shutdown": guest.encode("shutdown_reply", {"restart": False}),
    "another's id": guest.encode("stream", {"name": "stdout", "text": "x"}, "999"),
    "a reply to nobody": guest.encode("execute_reply", {"status": "ok"}, "999"),
    "a reply without id": guest.encode("execute_reply", {"status": "ok"}),
    "an unasked question": guest.encode("input_request", {"prompt": "?", "password": True}),
    "ready again": guest.encode("ready", {"python": "3", "ipython": "9"}),
    "metadata no object": guest.encode("display_data", {"data": BUNDLE, "metadata": [1]}),
    "a comm's data no object": guest.encode(
        "comm_open", {"comm_id": "c", "target_name": "jupyter.widget", "data": 7}
    ),
    "a comm's metadata no object": guest.encode(
        "comm_open", {"comm_id": "c", "target_name": "t", "data": {}, "metadata": "x"}
    ),
    "a comm's message of a list": guest.encode("comm_msg", {"comm_id": "c", "data": ["state"]}),
    "buffers that are none": guest.encode(
        "comm_msg", {"comm_id": "c", "data": {}, "buffers": "AAAA"}
    ),
    "buffers of numbers": guest.encode("comm_msg", {"comm_id": "c", "buffers": [1, 2]}),
    "buffers no base64": guest.encode("comm_msg", {"comm_id": "c", "buffers": ["\u2028", "a"]}),
    "a million buffers": guest.encode("comm_msg", {"comm_id": "c", "buffers": [""] * 1_000_000}),
    "a deep comm": guest.encode("comm_msg", {"comm_id": "c", "data": 0}).replace(
        b'"data": 0', b'"data":' + b'{"a":' * 100 + b"1" + b"}" * 100
    ),
}


def reframed(sent: bytes) -> bytes:
    return (len(sent) - 4).to_bytes(4, "big") + sent[4:]


@pytest.mark.parametrize("what", HOSTILE)
async def test_what_ours_would_not_say_ends_that_kernel_with_an_error_told(what: str) -> None:
    """The reply is an error in words of ours, the cell becomes idle, and the owner is told 137."""
    async with bridged() as it, client_of(it.connection) as kc:
        running = asyncio.create_task(execute(kc, "x"))
        await it.inside.asked()
        await it.inside.pour(reframed(HOSTILE[what]))
        answer = await running
        content = answer.reply["content"]
        assert content["status"] == "error", answer
        assert content["ename"] == "KernelCutOff"
        assert "Traceback" not in "".join(content["traceback"])
        (error,) = answer.contents("error")
        assert error["ename"] == "KernelCutOff"
        assert not [one for one in answer.published if one["msg_type"].startswith("comm")]
        await until(lambda: it.exits == [137])
        assert it.inside.killed


REPLIES: dict[str, dict[str, Any]] = {
    "payload no list": {"payload": {"source": "set_next_input"}},
    "payload of numbers": {"payload": [1, 2]},
    "expressions no object": {"user_expressions": [1]},
    "expressions of numbers": {"user_expressions": {"a": 1}},
    "a count beyond all": {"execution_count": 2**70},
    "a deep payload": {"payload": json.loads("[" * 90 + "]" * 90)},
}


@pytest.mark.parametrize("what", REPLIES)
async def test_a_reply_of_wrong_types_is_none(what: str) -> None:
    """A client that looks into it would fall over: it is told that the kernel was ended."""
    async with bridged() as it, client_of(it.connection) as kc:
        running = asyncio.create_task(execute(kc, "x"))
        frame = await it.inside.asked()
        body = {"status": "ok", "execution_count": 1, **REPLIES[what]}
        await it.inside.say("execute_reply", body, to=frame.id)
        assert (await running).reply["content"]["status"] == "error"
        await until(lambda: it.exits == [137])


async def test_questions_are_answered_by_a_kernel_of_wrong_types_with_an_error() -> None:
    async with bridged() as it, client_of(it.connection) as kc:
        name = kc.complete("pri", 3)
        frame = await it.inside.asked("complete_request")
        wrong = {"matches": ["x"], "cursor_start": 0, "cursor_end": 0, "status": "ok"}
        await it.inside.say("complete_reply", {**wrong, "metadata": [1]}, to=frame.id)
        reply = (await reply_to(kc, name))["content"]
        assert reply["status"] == "error"
        await until(lambda: it.exits == [137])


async def test_what_a_completion_says_of_places_lies_within_the_code() -> None:
    """A front end replaces what lies between them."""
    async with bridged() as it, client_of(it.connection) as kc:
        for start, end in ((-(2**63), 2**63 - 1), (3, 1)):
            name = kc.complete("print", 5)
            frame = await it.inside.asked("complete_request")
            places = {"cursor_start": start, "cursor_end": end}
            await it.inside.say(
                "complete_reply", {"matches": ["x"], "status": "ok", **places}, to=frame.id
            )
            reply = (await reply_to(kc, name))["content"]
            assert reply["status"] == "error" or (
                0 <= reply["cursor_start"] <= reply["cursor_end"] <= 5
            )


async def test_a_kernel_that_says_strange_but_lawful_things_is_passed_on_whole() -> None:
    """Names that are no names, no text at all, NUL, all of Unicode: the user's own business."""
    strange = "\x00\x1b[2J\u2028\U0001f4a9<script>"
    async with bridged() as it, client_of(it.connection) as kc:
        running = asyncio.create_task(execute(kc, "x"))
        frame = await it.inside.asked()
        say = it.inside.say
        await say("stream", {"name": "stderr", "text": strange})
        await say("display_data", {"data": {strange: strange, "a/b": {strange: 10**400}}})
        await say("display_data", {"data": {}, "transient": {"display_id": strange, "x": "y"}})
        await say("update_display_data", {"data": BUNDLE})
        await say("execute_result", {"data": BUNDLE, "execution_count": None})
        await say("error", {"ename": strange, "evalue": "", "traceback": [strange] * 100})
        await say("clear_output", {"wait": True})
        await say("comm_open", {"comm_id": strange, "target_name": strange, "data": {strange: 1}})
        await say("comm_close", {"comm_id": "never opened"})
        await say("execute_reply", {"status": "aborted"}, to=frame.id)
        answer = await running
        assert [one["text"] for one in answer.contents("stream")] == [strange]
        assert answer.contents("comm_open")[0]["comm_id"] == strange
        assert answer.contents("display_data")[0]["data"]["a/b"] == {strange: 10**400}


async def test_nothing_that_comes_after_the_end_is_part_of_the_cell() -> None:
    """Said between cells it belongs to none that is running; another cell does not get it as its
    result."""
    async with bridged() as it, client_of(it.connection) as kc:
        first = asyncio.create_task(execute(kc, "x"))
        frame = await it.inside.asked()
        await it.inside.say("execute_reply", {"status": "ok", "execution_count": 1}, to=frame.id)
        answer = await first
        await it.inside.say("stream", {"name": "stdout", "text": "late"})
        async with asyncio.timeout(60):
            while (late := await kc.get_iopub_msg())["msg_type"] != "stream":
                pass
        assert late["content"]["text"] == "late"
        assert answer.stdout == ""
        await works(kc, it.inside)


async def test_a_second_reply_ends_the_kernel_and_answers_nobody() -> None:
    async with bridged() as it, client_of(it.connection) as kc:
        running = asyncio.create_task(execute(kc, "x"))
        frame = await it.inside.asked()
        reply = guest.encode("execute_reply", {"status": "ok", "execution_count": 1}, frame.id)
        await it.inside.pour(reply * 2)
        assert (await running).reply["content"]["status"] == "ok"
        await until(lambda: it.exits == [137])
        assert not await kc.shell_channel.msg_ready()


async def test_comms_without_end_cost_bounded_memory() -> None:
    """And who asks for the list gets one that can be read. Nobody reads them: that is quicker."""
    async with bridged(output_max=1 << 40) as it:
        with Raw(it.connection, "shell", zmq.DEALER) as other:
            session = Session(key=KEY)
            asking = asyncio.to_thread(heard, other, session, "execute_request", {"code": "x"})
            running = asyncio.create_task(asking)
            frame = await it.inside.asked()
            number = iter(range(10**9))

            def some() -> bytes:
                names = (f"{next(number):0200}" for _ in range(1000))
                opened = ({"comm_id": name, "target_name": "t"} for name in names)
                return b"".join(guest.encode("comm_open", content) for content in opened)

            taken, grown, _ = await watched(it.inside.pour(some, 21))
            assert grown < 96 * MIB, f"{grown >> 20} MiB"
            assert taken == 21
            await it.inside.say("execute_reply", {"status": "ok"}, to=frame.id)
            assert (await running)["content"]["status"] == "ok"
            listed = await asyncio.to_thread(heard, other, session, "comm_info_request", {})
            assert len(listed["content"]["comms"]) == 20_000


def heard(by: zmq.Socket[bytes], session: Session, kind: str, content: Any) -> Any:
    """Ask, and wait for the answer."""
    session.send(by, kind, content)
    assert by.poll(60_000)
    _, reply = session.recv(by)
    return reply


# -- floods, and who does not read -----------------------------------------------------------------


def stream(size: int) -> bytes:
    return guest.encode("stream", {"name": "stdout", "text": "x" * size})


# What is sent, how often, and by how much it may be that this process grows.
FLOODS = {
    "tiny": (stream(1) * 500, 20, 48 * MIB),
    "empty": (guest.encode("display_data", {"data": {}}) * 500, 20, 48 * MIB),
    "of pages": (stream(60_000), 5000, 96 * MIB),
    "of the largest": (stream(15 * MIB), 24, 256 * MIB),
}


@pytest.fixture
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who does not read is waited for as little as a test may."""
    monkeypatch.setattr(channels, "_PATIENCE_S", 0.5)


@pytest.mark.parametrize("when", rows(["in a cell", "between cells"], ["between cells"]))
@pytest.mark.parametrize("what", FLOODS)
async def test_a_flood_to_one_who_never_reads_costs_bounded_memory(
    what: str, when: str, briefly: None
) -> None:
    """Neither the subscriber without a key nor the kernel is given more than a bounded part of this
    process, and its loop stays free."""
    data, times, most = FLOODS[what]
    async with bridged(output_max=1 << 40) as it:
        with never_reading(it.connection), Raw(it.connection, "shell", zmq.DEALER) as other:
            session = Session(key=KEY)
            asking = asyncio.to_thread(heard, other, session, "execute_request", {"code": "x"})
            running = asyncio.create_task(asking)
            frame = await it.inside.asked()
            reply = partial(it.inside.say, "execute_reply", {"status": "ok"}, to=frame.id)
            if when == "between cells":
                await reply()
                await running
            taken, grown, stalled = await watched(it.inside.pour(data, times))
            assert taken == times
            assert grown < most, f"{grown >> 20} MiB"
            assert stalled < 5, f"{stalled} s"
            if when == "in a cell":
                await reply()
            assert (await running)["content"]["status"] == "ok"


async def test_one_who_subscribes_and_never_reads_takes_nothing_from_others(
    briefly: None, caplog: pytest.LogCaptureFixture
) -> None:
    """No key is needed to subscribe: whoever can reach the port could stop every notebook. The
    client that keeps up loses nothing; the test sends as fast as this client reads."""
    text = guest.encode("stream", {"name": "stdout", "text": "x" * FULL})  # not gathered
    async with bridged(output_max=1 << 40) as it, client_of(it.connection) as kc:
        with never_reading(it.connection):
            name = kc.execute("x", allow_stdin=False)
            frame = await it.inside.asked()
            for sent in range(1, 201):
                assert await it.inside.pour(text)
                assert await received(kc, name) == FULL, f"of message {sent}"
            await it.inside.say(
                "execute_reply", {"status": "ok", "execution_count": 1}, to=frame.id
            )
            assert (await finished(kc, name)).stdout == ""
    assert "a client on iopub does not read" in caplog.text


async def received(kc: AsyncKernelClient, name: str) -> int:
    """Read up to the next text of the cell `name`. Return its length."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            message = await kc.get_iopub_msg()
            if message["msg_type"] == "stream" and message["parent_header"].get("msg_id") == name:
                return len(message["content"]["text"])


async def test_a_client_that_never_reads_its_replies_costs_bounded_memory() -> None:
    """Large questions are echoed by nobody, and small ones have replies that are dropped."""
    async with bridged() as it, client_of(it.connection) as kc:
        deaf = {"rcvhwm": 1, "sndhwm": 1, "rcvbuf": 4096}
        with Raw(it.connection, "control", zmq.DEALER, **deaf) as other:

            def ask() -> None:
                for _ in range(1000):
                    message = kc.session.msg("kernel_info_request", {})
                    parts = kc.session.serialize(message)
                    if other.poll(1000, zmq.POLLOUT):
                        other.send_multipart(parts)

            _, grown, stalled = await watched(asyncio.to_thread(ask))
            assert grown < 96 * MIB, f"{grown >> 20} MiB"
            assert stalled < 5
        await works(kc, it.inside)


# -- clients that are broken, or have no key -------------------------------------------------------


def signed(kc: AsyncKernelClient, *parts: bytes) -> list[bytes]:
    return [b"<IDS|MSG>", kc.session.sign(list(parts[:4])), *parts]


def header(kind: Any = "execute_request", **more: Any) -> bytes:
    answer = {"msg_id": "m", "session": "s", "username": "u", "date": "2026-01-01T00:00:00Z"}
    return json.dumps({**answer, "version": "5.4", "msg_type": kind, **more}).encode()


CODE = json.dumps({"code": "1", "silent": False}).encode()
EMPTY = b"{}"
HEADERS: dict[str, bytes] = {
    "a list": b"[]",
    "a number": b"7",
    "null": b"null",
    "no JSON": b"\xff\xfe{",
    "nothing": b"",
    "no type": b'{"msg_id": "m"}',
    "no id": b'{"msg_type": "execute_request"}',
    "a type that is a list": header(["execute_request"]),
    "a type that is a number": header(7),
    "an unknown type": header("no_such_request"),
    "a method's name": header("__class__"),
    "an id that is an object": header(msg_id={"a": 1}),
    "an id that is a date": header(msg_id="2020-01-01T00:00:00Z"),
    "an id of a megabyte": header(msg_id="m" * MIB),
    "a surrogate": header(msg_id="\ud800"),
    "a surrogate elsewhere": header(username="\udfff"),
    "no day of any month": header(date="2026-99-99T99:99:99"),
    "a naive date": header(date="2026-01-01T00:00:00"),
    "a date that is a number": header(date=10**400),
    "deep": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "many digits": header(username=7).replace(b"7", b"7" * 10_000),
}
DEEP_JSON = b"[" * DEEP + b"]" * DEEP
CONTENTS: dict[str, tuple[str, Any]] = {
    "a list": ("execute_request", []),
    "null": ("execute_request", None),
    "no code": ("execute_request", {}),
    "code that is a number": ("execute_request", {"code": 7}),
    "code with a surrogate": ("execute_request", {"code": "'\ud800'"}),
    "code of megabytes": ("execute_request", {"code": "#" * (8 * MIB)}),
    "flags of another kind": (
        "execute_request",
        {"code": "1", "silent": "yes", "store_history": [], "allow_stdin": {}, "stop_on_error": 7},
    ),
    "expressions of another kind": ("execute_request", {"code": "1", "user_expressions": [1]}),
    "expressions of numbers": ("execute_request", {"code": "1", "user_expressions": {"a": 1}}),
    "many expressions": (
        "execute_request",
        {"code": "1", "user_expressions": {str(n): "1" for n in range(200_000)}},
    ),
    "a deep content": ("execute_request", DEEP_JSON),
    "a cursor before the code": ("complete_request", {"code": "x", "cursor_pos": -5}),
    "a cursor beyond all": ("complete_request", {"code": "x", "cursor_pos": 2**70}),
    "a cursor that is half": ("complete_request", {"code": "x", "cursor_pos": 0.5}),
    "a cursor that is none": ("inspect_request", {"code": "x", "cursor_pos": "1"}),
    "a detail beyond all": (
        "inspect_request",
        {"code": "x", "cursor_pos": 1, "detail_level": 2**70},
    ),
    "no completeness": ("is_complete_request", {"code": None}),
    "history of another kind": ("history_request", {"hist_access_type": ["tail"], "n": "x"}),
    "history of less than nothing": (
        "history_request",
        {"hist_access_type": "tail", "n": -(2**70), "output": True, "raw": True},
    ),
    "history of a bad pattern": (
        "history_request",
        {"hist_access_type": "search", "pattern": "[" * 1000 + "*" * 1000, "n": 2**70},
    ),
    "history of a far range": (
        "history_request",
        {"hist_access_type": "range", "session": -(2**70), "start": -5, "stop": 2**70},
    ),
    "a comm without id": ("comm_open", {}),
    "a comm whose id is a list": ("comm_msg", {"comm_id": [1], "data": {}}),
    "a comm of a list": ("comm_msg", {"comm_id": "c", "data": [1]}),
    "a deep comm": ("comm_msg", {"comm_id": "c", "data": json.loads("[" * 400 + "]" * 400)}),
    "a comm with a surrogate": ("comm_msg", {"comm_id": "c", "data": {"a": "\ud800"}}),
    "a large comm": ("comm_msg", {"comm_id": "c", "data": {"a": "x" * (8 * MIB)}}),
    "comms of another kind": ("comm_info_request", {"target_name": [1]}),
    "a debugger": ("debug_request", {"type": "request", "command": "attach", "seq": "x"}),
    "a subshell": ("create_subshell_request", {}),
    "an input unasked": ("input_reply", {"value": 7}),
    "an interrupt of a list": ("interrupt_request", []),
}


def as_sent(head: bytes, content: bytes, kc: AsyncKernelClient) -> list[bytes]:
    return signed(kc, head, EMPTY, EMPTY, content)


SHAPES: dict[str, Callable[[AsyncKernelClient], list[bytes]]] = {
    "nothing": lambda _: [b""],
    "no delimiter": lambda _: [b"x" * 1000] * 10,
    "only a delimiter": lambda _: [b"<IDS|MSG>"],
    "no signature": lambda _: [b"<IDS|MSG>", b"", header(), EMPTY, EMPTY, CODE],
    "a wrong signature": lambda _: [b"<IDS|MSG>", b"0" * 64, header(), EMPTY, EMPTY, CODE],
    "a signature no text": lambda _: [b"<IDS|MSG>", b"\xff" * 64, header(), EMPTY, EMPTY, CODE],
    "too few parts": lambda kc: signed(kc, header(), EMPTY),
    "two delimiters": lambda kc: [b"<IDS|MSG>", *signed(kc, header(), EMPTY, EMPTY, CODE)],
    "a thousand identities": lambda kc: [b"i"] * 1000 + signed(kc, header(), EMPTY, EMPTY, CODE),
    "a thousand buffers": lambda kc: [*signed(kc, header(), EMPTY, EMPTY, CODE), *[b"x"] * 1000],
    "a parent that is a list": lambda kc: signed(kc, header(), b"[]", EMPTY, CODE),
    "a deep parent": lambda kc: signed(kc, header(), DEEP_JSON, EMPTY, CODE),
    "metadata that is a list": lambda kc: signed(kc, header(), EMPTY, b"[1]", CODE),
    "deep metadata": lambda kc: signed(kc, header(), EMPTY, DEEP_JSON, CODE),
}
for _name, _sent in HEADERS.items():
    SHAPES[f"header: {_name}"] = partial(as_sent, _sent, CODE)
for _name, (_kind, _content) in CONTENTS.items():
    _body = _content if isinstance(_content, bytes) else json.dumps(_content).encode()
    SHAPES[f"content: {_name}"] = partial(as_sent, header(_kind), _body)
FEW = [*SHAPES.items()][::5]  # for channels that are read by the same function


async def served(it: Bridged) -> None:
    """Every request that reaches the kernel is answered, with as little as it takes."""
    answers: dict[str, dict[str, Any]] = {
        "execute_request": {"status": "ok", "execution_count": 1},
        "complete_request": {"matches": [], "cursor_start": 0, "cursor_end": 0, "status": "ok"},
        "inspect_request": {"status": "ok", "found": False, "data": {}},
        "is_complete_request": {"status": "complete"},
    }
    while True:
        frame = await it.inside.asked(None)
        kind = frame.type.removesuffix("_request") + "_reply"
        body = answers.get(frame.type, {"status": "ok"})
        if frame.id is not None:
            await it.inside.say(kind, body, to=frame.id)


async def status_of_a_cell(kc: AsyncKernelClient) -> str:
    return str((await execute(kc, "x")).reply["content"]["status"])


@pytest.mark.filterwarnings("ignore:Interpreting naive datetime:DeprecationWarning")
@pytest.mark.parametrize("channel", ["shell", "control", "stdin"])
async def test_whatever_a_broken_client_sends_others_are_served(channel: str) -> None:
    """One after the other on one bridge: the first that ends a task of its ends all that follows.
    Also no kernel ends for what a client says."""
    async with bridged() as it, client_of(it.connection) as kc:
        serving = asyncio.create_task(served(it))
        try:
            with Raw(it.connection, channel, zmq.DEALER) as broken:
                for what, shape in SHAPES.items() if channel == "shell" else FEW:
                    await asyncio.to_thread(broken.send_multipart, shape(kc))
                    while (ended := await status_of_a_cell(kc)) == "aborted":
                        pass  # what waited behind a cell that was refused
                    assert ended == "ok", what
                    assert it.exits == [], what
        finally:
            serving.cancel()


async def test_a_client_with_a_wrong_key_is_answered_by_silence() -> None:
    async with (
        bridged() as it,
        client_of(it.connection) as kc,
        client_of(it.connection, key="f" * 32) as other,
    ):
        other.kernel_info()
        other.execute("x")
        other.control_channel.send(other.session.msg("interrupt_request", {}))
        other.shutdown()
        await works(kc, it.inside)
        assert it.exits == []
        assert not await other.shell_channel.msg_ready()
        assert not await other.control_channel.msg_ready()


async def test_a_request_that_is_sent_again_is_done_once() -> None:
    """Whoever listens on the loopback has no key, and could send what was signed a second time."""
    async with bridged() as it, client_of(it.connection) as kc:
        parts = signed(kc, header(), EMPTY, EMPTY, CODE)
        with Raw(it.connection, "shell", zmq.DEALER) as first:
            await asyncio.to_thread(first.send_multipart, parts)
            frame = await it.inside.asked()
            await it.inside.say("execute_reply", {"status": "ok"}, to=frame.id)
            with Raw(it.connection, "shell", zmq.DEALER) as again:
                await asyncio.to_thread(again.send_multipart, parts)
                running = asyncio.create_task(execute(kc, "not the same"))
                frame = await it.inside.asked()
                assert frame.content["code"] == "not the same"
                await it.inside.say(
                    "execute_reply", {"status": "ok", "execution_count": 2}, to=frame.id
                )
                await running


@pytest.mark.parametrize("channel", ["hb", "iopub", "shell", "control", "stdin"])
async def test_what_is_large_and_has_no_key_is_not_taken_in(channel: str) -> None:
    """512 MiB in one message, to a port that anybody on this host reaches: it hangs up. (Parts
    without end are beyond what ZeroMQ can bound: see sbx/jupyter/sockets.py.)"""
    length = 512 * MIB

    def pour(sock: socket.socket) -> int:
        with sock:
            sock.settimeout(60)
            sock.sendall(b"\x02" + length.to_bytes(8, "big"))
            sent = 0
            with suppress(ConnectionError):
                while sent < length:
                    sent += sock.send(bytes(MIB))
        return sent

    async with bridged() as it, client_of(it.connection) as kc:
        sock = await asyncio.to_thread(greeted, it.connection, channel)
        sent, grown, _ = await watched(asyncio.to_thread(pour, sock))
        assert grown < 100 * MIB, f"{grown >> 20} MiB"
        assert sent < length
        await works(kc, it.inside)


async def test_subscriptions_of_any_bytes_are_borne() -> None:
    """Welcomes are told in JSON, and these bytes are none; not all of it is a subscription."""
    async with bridged() as it, client_of(it.connection) as kc:
        with Raw(it.connection, "iopub", zmq.XSUB) as other:
            for number in range(2000):
                other.send(b"\x01\xff\xfe" + number.to_bytes(4, "big"))
                other.send(b"\x00\xff\xfe" + number.to_bytes(4, "big"))
            other.send(b"anything \xff")
            other.send(b"")
            other.send_multipart([b"\x01", b"\x01", b"\xff"])
            await works(kc, it.inside)


async def test_the_heartbeat_answers_whoever_asks_and_outlives_those_who_do_not_listen() -> None:
    async with bridged() as it:
        with Raw(it.connection, "hb", zmq.DEALER, rcvhwm=1, rcvbuf=4096) as deaf:

            def flood() -> None:
                for _ in range(5_000):
                    if not deaf.poll(200, zmq.POLLOUT):
                        return
                    deaf.send_multipart([b"", b"x" * 200])

            _, grown, _ = await watched(asyncio.to_thread(flood))
            assert grown < 48 * MIB
        with Raw(it.connection, "hb", zmq.REQ) as beating:
            beating.send(b"ping")
            assert await asyncio.to_thread(beating.poll, 60_000)
            assert beating.recv() == b"ping"


# -- questions to the user -------------------------------------------------------------------------


async def test_an_answer_that_nobody_asked_for_answers_nothing() -> None:
    """Not one that came before the question, and not a second one after it."""
    async with bridged() as it, client_of(it.connection) as kc:
        kc.input("too early")
        await kc_is_heard(kc)
        name = kc.execute("input()", allow_stdin=True)
        frame = await it.inside.asked()
        await it.inside.say("input_request", {"prompt": "? ", "password": False})
        async with asyncio.timeout(60):
            assert (await kc.get_stdin_msg())["content"]["prompt"] == "? "
        kc.input("in time")
        assert (await it.inside.asked("input_reply")).content == {"value": "in time"}
        kc.input("a second")
        await kc_is_heard(kc)
        await it.inside.say("input_request", {"prompt": "again ", "password": True})
        async with asyncio.timeout(60):
            assert (await kc.get_stdin_msg())["content"]["password"] is True
        kc.input("the right one")
        assert (await it.inside.asked("input_reply")).content == {"value": "the right one"}
        await it.inside.say("execute_reply", {"status": "ok", "execution_count": 1}, to=frame.id)
        assert (await finished(kc, name)).reply["content"]["status"] == "ok"


async def kc_is_heard(kc: AsyncKernelClient) -> None:
    """What was sent on stdin before has arrived: a request on another channel may overtake it, and
    is asked several times."""
    for _ in range(3):
        asking = kc.session.msg("kernel_info_request", {})
        kc.control_channel.send(asking)
        await reply_to(kc, asking["msg_id"], on="control")


async def test_another_client_does_not_answer_for_the_one_who_was_asked() -> None:
    """It has the key, and a mistake is enough; the question is that of whoever ran the cell."""
    async with bridged() as it, client_of(it.connection) as kc, client_of(it.connection) as other:
        name = kc.execute("input()", allow_stdin=True)
        frame = await it.inside.asked()
        await it.inside.say("input_request", {"prompt": "? ", "password": False})
        async with asyncio.timeout(60):
            await kc.get_stdin_msg()
        other.input("not mine")
        await kc_is_heard(other)
        assert not await other.stdin_channel.msg_ready()
        kc.input("mine")
        assert (await it.inside.asked("input_reply")).content == {"value": "mine"}
        await it.inside.say("execute_reply", {"status": "ok", "execution_count": 1}, to=frame.id)
        await finished(kc, name)


async def test_who_asks_without_end_is_ended() -> None:
    async with bridged() as it, client_of(it.connection) as kc:
        name = kc.execute("input()", allow_stdin=True)
        await it.inside.asked()
        question = guest.encode("input_request", {"prompt": "", "password": False})
        await it.inside.pour(question * 1000)
        assert (await finished(kc, name)).reply["content"]["status"] == "error"
        await until(lambda: it.exits == [137])


# -- others go on ----------------------------------------------------------------------------------


async def test_one_bridge_does_not_speak_for_another() -> None:
    """Their keys differ: what one signed the other does not take."""
    async with bridged() as one, bridged(key=b"e" * 32) as two:
        assert one.connection.key == KEY
        async with client_of(one.connection) as kc:
            parts = signed(kc, header(), EMPTY, EMPTY, CODE)
            with Raw(two.connection, "shell", zmq.DEALER) as other:
                await asyncio.to_thread(other.send_multipart, parts)
                assert not await asyncio.to_thread(other.poll, 300)
            await works(kc, one.inside)


async def test_a_kernel_cut_off_leaves_the_bridge_beside_it_alone() -> None:
    async with (
        bridged() as bad,
        bridged() as good,
        client_of(bad.connection) as first,
        client_of(good.connection) as second,
    ):
        running = asyncio.create_task(execute(first, "x"))
        await bad.inside.asked()
        await bad.inside.pour(b"\xff" * 100)
        assert (await running).reply["content"]["status"] == "error"
        await works(second, good.inside)
        assert good.exits == []
