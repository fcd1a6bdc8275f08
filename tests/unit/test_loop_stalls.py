"""Work on the event loop has a bound, or lets other tasks run: the parts, without a service.

`bench/stalls.py` measures the whole service; here are the reasons why it stays below its bound.
"""

import ast
import asyncio
import gc
import io
import json
import socket
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import h11
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bench import stalls
from sbx import errors
from sbx.agent.compaction import Compaction, to_cover
from sbx.agent.export import IMPORT_MAX, import_history
from sbx.agent.external.http import read_operations
from sbx.agent.external.source import OpenApiSource
from sbx.agent.history import MemoryHistory
from sbx.agent.messages import Message
from sbx.agent.models.openai import OpenAIModel
from sbx.aio import LoopMonitor, SmallReads
from sbx.api.encoding import encoded_list, text_and_images
from sbx.api.line_events import LineBuffer
from sbx.api.opensandbox.commands import _variables
from sbx.api.opensandbox.files import _lines
from sbx.api.ports import _Exchange
from sbx.imports import import_in_thread
from sbx.kernels import frames
from sbx.protocol.bundles import ValueCounter, count_values
from sbx.protocol.events import _pieces, encode
from sbx.protocol.runs import Status
from sbx.runtime.run.active_run import ActiveRun, apply_carriage_returns

SBX = Path(__file__).resolve().parents[2] / "sbx"
PATIENCE_S = 30.0


@asynccontextmanager
async def turns() -> AsyncIterator[list[int]]:
    """Count the iterations of the loop in which another task runs."""
    count = [0]

    async def run() -> None:
        while True:
            count[0] += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(run())
    try:
        yield count
    finally:
        task.cancel()


# -- each route, and each loop over a stream -------------------------------------------------------


def test_each_route_has_a_largest_input_or_a_reason() -> None:
    assert stalls.uncovered() == []
    assert stalls.unknown() == []


def _loops() -> Iterator[tuple[str, ast.AST]]:
    for path in sorted([*(SBX / "api").rglob("*.py"), *(SBX / "egress").rglob("*.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.While | ast.For | ast.AsyncFor):
                yield f"{path.relative_to(SBX)}:{node.lineno}", node


def test_each_loop_over_the_messages_of_a_websocket_yields() -> None:
    """`receive` does not wait while there are messages, and neither does `send`, so one client with
    thousands of small messages kept the loop."""
    names = {"receive", "receive_text", "receive_bytes", "recv"}
    silent = []
    for place, loop in _loops():
        awaited = [each.value for each in ast.walk(loop) if isinstance(each, ast.Await)]
        calls = {
            ast.unparse(each.func).split(".")[-1] for each in awaited if isinstance(each, ast.Call)
        }
        relays = isinstance(loop, ast.AsyncFor) and ast.unparse(loop.iter) == "inner"
        if (calls & names or relays) and "sleep" not in calls:
            silent.append(place)
    # bytes of a bounded number, and the end of a request
    allowed = ("egress/http_heads.py", "egress/connection.py", "api/bodies.py", "api/middleware.py")
    assert [place for place in silent if not place.startswith(allowed)] == []


def test_one_function_reads_the_events_of_http_messages() -> None:
    """The relay of ports had another loop than the proxy: it took any number of interim replies and
    never let another task run (holes 1.3)."""
    users = {
        str(path.relative_to(SBX))
        for path in SBX.rglob("*.py")
        if "http.next_event()" in path.read_text()
    }
    assert users == {"egress/http_heads.py"}


# -- servers inside --------------------------------------------------------------------------------


@asynccontextmanager
async def exchange(sent: bytes) -> AsyncIterator[_Exchange]:
    """An exchange with a server that has sent these bytes already."""
    near, far = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=near)
    with far:
        reader.feed_data(sent)
        each = _Exchange(reader, writer, 8000)
        each._http.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
        try:
            yield each
        finally:
            each.close()


async def test_interim_replies_of_a_server_inside_are_counted_and_yield() -> None:
    async with exchange(b"HTTP/1.1 100 C\r\n\r\n" * 3000) as each, turns() as count:
        with pytest.raises(errors.Unavailable):
            await each.head()
        assert 16 <= count[0] < 100


async def test_chunks_of_one_byte_are_joined_and_yield() -> None:
    head = b"HTTP/1.1 200 O\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with exchange(head + b"1\r\na\r\n" * 6400 + b"0\r\n\r\n") as each, turns() as count:
        await each.head()
        pieces = [piece async for piece in each.body()]
        assert b"".join(pieces) == b"a" * 6400
        assert len(pieces) < 200
        assert count[0] >= len(pieces)


def test_dense_data_is_read_in_smaller_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvloop gave 250 KB of empty messages to the parser of WebSockets at once: 1.5 s."""
    now = 0.0
    monkeypatch.setattr("sbx.aio.time.perf_counter", lambda: now)

    class Slow(asyncio.Protocol):
        work = 0.0

        def data_received(self, data: bytes) -> None:
            nonlocal now
            now += self.work

    slow = Slow()
    reads = SmallReads(slow)
    for _ in range(10):
        reads.buffer_updated(len(reads.get_buffer(-1)))
    largest = len(reads.get_buffer(-1))
    slow.work = 0.001
    reads.buffer_updated(largest)
    assert len(reads.get_buffer(-1)) < largest <= 16 << 10


# -- texts and documents ---------------------------------------------------------------------------


class Searched(str):
    """A text that counts the characters that searches pass."""

    passed = 0

    def find(self, part: str, start: int = 0) -> int:  # type: ignore[override]
        end = super().find(part, start)
        self.passed += (len(self) if end < 0 else end) - start
        return end


def test_texts_of_images_are_left_out_in_one_pass() -> None:
    """`replace` over the whole text for each of 3,000 images took 20 s (holes 2.1b)."""
    plains = [f"q{number}" for number in range(300)]
    text = Searched("z" * 10_000 + "\n" + "".join(f"{plain}\nprinted\n" for plain in plains))
    outputs = [{"image/png": "aa", "text/plain": plain} for plain in plains]
    left, images = text_and_images({"text": text, "outputs": outputs, "result": None})
    assert left == "z" * 10_000 + "\n" + "printed\n" * 300
    assert len(images) == 300
    assert text.passed <= len(text)


@given(
    st.recursive(st.text('a"\\,:[]{}\n') | st.integers(), lambda each: st.lists(each, min_size=1))
)
def test_values_are_counted_in_pieces_as_in_the_whole(value: Any) -> None:
    data = json.dumps(value).encode()
    for size in (1, 2, 7, len(data)):
        counter = ValueCounter()
        for start in range(0, len(data), size):
            counter.feed(data[start : start + size])
        assert counter.count == count_values(data)


@given(st.text(), st.integers(1, 5))
def test_long_texts_are_encoded_as_short_ones(text: str, times: int) -> None:
    form = {"run": {"text": text * times * 20_000, "n": [1]}, "b": text}
    assert encode(form) == json.dumps(form, separators=(",", ":")).encode()


@pytest.mark.parametrize("form", [{"a": "\n" * 500_000}, {"a": [{"b": ["\n" * 500_000]}]}])
def test_long_texts_are_encoded_in_pieces(
    form: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call for a text of 15 MiB keeps the interpreter lock for 60 ms, in any thread."""
    pieces = list[bytes]()

    def encoded(value: Any) -> bytes:
        pieces.append(json.dumps(value).encode())
        return pieces[-1]

    monkeypatch.setattr("sbx.protocol.events._encoded", encoded)
    assert json.loads(encode(form)) == form
    assert max(map(len, [*pieces, *_pieces(form)])) <= 2 * 65_536


async def test_a_long_list_is_encoded_entry_by_entry_in_a_thread() -> None:
    """`json.dumps` of 10,000 entries in a thread stopped the loop for 50 ms."""
    threads = set[int]()

    def form(number: int) -> dict[str, Any]:
        threads.add(threading.get_ident())
        return {"path": f"d/{number}", "text": "é\udc80"}

    async with turns() as count:
        encoded = await encoded_list(range(20_000), form)
        assert count[0] > 1
    assert json.loads(encoded) == [form(number) for number in range(20_000)]
    assert len(threads) == 2


@example("a" * 40, 0, None)
@given(st.text("ab\n\r", max_size=40), st.integers(0, 9), st.none() | st.integers(0, 12))
def test_lines_of_a_file_are_sent_in_parts(text: str, begin: int, count: int | None) -> None:
    """60 MiB of empty lines stopped the loop for seconds."""
    end = None if count is None else begin + count
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sbx.api.opensandbox.files._PART", 7)
        parts = [*_lines(io.BytesIO(text.encode()), begin, end)]
    assert "".join(parts) == "\n".join(text.splitlines()[begin:end])
    assert all(len(part) <= 8 for part in parts)


async def test_an_import_in_a_thread_lets_the_loop_run_and_is_not_collected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_module.py").write_text("import time\ntime.sleep(0.2)\nvalues = [[]]\n")
    monkeypatch.syspath_prepend(tmp_path)
    async with turns() as count:
        modules = await asyncio.gather(*(import_in_thread("slow_module") for _ in range(2)))
        assert count[0] > 10
    assert modules[0] is modules[1] is sys.modules.pop("slow_module")
    assert gc.isenabled()
    assert not any(each is modules[0].values for each in gc.get_objects(generation=0))


def test_a_long_line_is_sent_in_parts_and_never_copied_for_each_piece() -> None:
    lines = LineBuffer()
    sent = [lines.feed("stdout", "z" * 1000) for _ in range(3000)]
    assert "".join(sent + [text for _, text in lines.flush()]) == "z" * 3_000_000
    assert sum(map(bool, sent)) == 2


async def test_long_output_is_rendered_before_the_end_of_a_run() -> None:
    """15 MiB of `\\r\\n` stopped the loop for 2.5 s at the end of the run."""
    run = ActiveRun("run-1", 1 << 30)
    text = "a\rb\n" * 200_000
    run.add(frames.Frame(frames.Stream("stdout", text), None, len(text)))
    assert run.is_long
    await run.render()
    (shown,) = run._screen
    assert shown.is_final
    assert run.finish(Status.OK).text == "b\n" * 200_000 == apply_carriage_returns(text)


def test_a_file_of_variables_keeps_its_meaning() -> None:
    assert _variables(b"A=1\nexport B='x y'\nC\nA=2\n") == {"A": "2", "B": "x y"}


async def test_a_history_of_many_messages_is_not_imported() -> None:
    """240,000 messages were imported, and each chat there stopped the service for 37 s
    (holes 2.1d)."""
    message = {"role": "user", "content": "a"}
    for count in (IMPORT_MAX, IMPORT_MAX + 1):
        history = MemoryHistory()
        text = json.dumps({"format": 1, "messages": [message] * count})
        if count > IMPORT_MAX:
            with pytest.raises(errors.TooLarge, match="5000 messages"):
                await import_history(history, text)
        else:
            assert await import_history(history, text) == count
        assert len(await history.messages()) == (count if count <= IMPORT_MAX else 0)


async def test_many_short_messages_are_summarised() -> None:
    history = MemoryHistory(
        [Message("user" if n % 2 else "assistant", "a") for n in range(1, 1500)]
    )
    covers = to_cover(await history.messages(), Compaction())
    assert covers is not None
    assert covers > 1000


def test_the_sdk_gets_the_messages_as_part_of_the_body() -> None:
    """The SDK of openai converts each message of its parameter, 150 µs for each on the loop."""
    model = OpenAIModel("m", api_key="k", base_url="http://127.0.0.1:1/v1")
    request = model._request("s", [Message("user", "a")], (), True)
    assert request["messages"] == ()
    assert [each["role"] for each in request["extra_body"]["messages"]] == ["system", "user"]


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (["a: &a [1]", *(f"b{n}: &b{n} [*a, *a]" for n in range(9))], "aliases"),
        ([f"x: [{'1,' * 500_001}]"], "500000 nodes"),
    ],
)
def test_a_yaml_document_that_grows_is_refused(
    tmp_path: Path, lines: list[str], problem: str
) -> None:
    """412 bytes with 10^7 aliases stopped the loop for 7 s (holes 2.13)."""
    path = tmp_path / "api.yaml"
    path.write_text("\n".join(["openapi: 3.0.0", *lines]))
    with pytest.raises(errors.BadRequest, match=problem):
        read_operations("api", OpenApiSource(document=path))


# -- the monitor -----------------------------------------------------------------------------------


async def test_the_monitor_reports_a_stall_with_its_stack() -> None:
    stopped, measured = threading.Event(), asyncio.Event()
    stacks: list[str] = []

    def on_lag(seconds: float) -> None:
        if seconds >= 0.05:
            measured.set()

    def on_stall(_seconds: float, stack: str) -> None:
        stacks.append(stack)
        stopped.set()

    monitor = LoopMonitor(on_lag, on_stall, period_s=0.01, stall_s=0.05)
    try:
        stop_the_loop(stopped)
        await asyncio.wait_for(measured.wait(), PATIENCE_S)
    finally:
        monitor.close()
    assert "stop_the_loop" in stacks[0]


def stop_the_loop(until: threading.Event) -> None:
    assert until.wait(PATIENCE_S)


async def test_the_monitor_ends_with_its_owner() -> None:
    monitor = LoopMonitor(lambda _: None, lambda *_: None)
    monitor.close()
    assert not monitor._thread.is_alive()
