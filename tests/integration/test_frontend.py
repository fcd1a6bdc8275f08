"""A front end over real kernels: what it asks, what it is told, and how its kernel ends."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest
import pytest_asyncio

from sbx import AsyncSandbox, Runtime, Settings
from sbx.errors import BadRequest, Broken, Conflict, Denied, TooLarge
from sbx.kernels import frames
from sbx.protocol.runs import Cause, RunError, Status
from sbx.runtime.run import frontend
from sbx.runtime.run.execution import Published
from sbx.runtime.run.frontend import Cell, CellEnd, JupyterFrontend

PATIENCE_S = 60.0
MIB = 1 << 20
COMM = """
from comm import create_comm
one = create_comm(target_name='t', data={'n': 1}, metadata={'m': 2}, buffers=[b'ab', b''])
def heard(message):
    content = message['content']
    data = content['data']
    one.send({'heard': content}, {'of': message['metadata']}, [bytes(part) for part in message['buffers']])
    if data.get('do'):
        exec(data['do'])
one.on_msg(heard)
"""  # noqa: E501
WIRE = """
import gc, json, os, socket, struct
def outside(fd):
    try:
        with socket.socket(fileno=os.dup(fd)) as one:
            return not struct.unpack('3i', one.getsockopt(1, socket.SO_PEERCRED, 12))[0]
    except OSError:
        return False
fd, = filter(outside, map(int, os.listdir('/proc/self/fd')))
wire = socket.socket(fileno=os.dup(fd))
wire.setblocking(True)
def frame(kind, content, id=None):
    body = {'type': kind, 'content': content} | ({} if id is None else {'id': id})
    body = json.dumps(body).encode()
    return struct.pack('>I', len(body)) + body
"""


class Seen:
    """A front end that remembers. `slow` is awaited before anything is taken."""

    def __init__(self, box: AsyncSandbox) -> None:
        self.received: list[Published] = []
        self.ends: list[RunError] = []
        self.slow: Callable[[Published], Awaitable[object]] | None = None
        self._news = asyncio.Condition()
        self.context = box.contexts.default
        self.front = JupyterFrontend(self.context, self._take, self._ended)

    async def _take(self, reported: Published) -> None:
        if self.slow is not None:
            await self.slow(reported)
        self.received.append(reported)
        async with self._news:
            self._news.notify_all()

    def _ended(self, why: RunError) -> None:
        self.ends.append(why)

    async def run(self, code: str, **options: Any) -> CellEnd:
        return await self.front.execute(Cell(code), **options)

    async def until(self, arrived: Callable[["Seen"], Any]) -> Any:
        async with asyncio.timeout(PATIENCE_S), self._news:
            await self._news.wait_for(lambda: arrived(self))
        return arrived(self)

    async def until_ended(self) -> RunError:
        async with asyncio.timeout(PATIENCE_S):
            while not self.ends:  # noqa: ASYNC110  # the end of another process
                await asyncio.sleep(0.01)
        return self.ends[0]

    def of(self, *kinds: type) -> list[Any]:
        return [one for one in self.received if type(one) in kinds]

    def text(self, name: str = "stdout") -> str:
        return "".join(one.text for one in self.of(frames.Stream) if one.name == name)

    @property
    def kinds(self) -> list[str]:
        """In order; neighbouring pieces of one stream count as one."""
        kinds: list[str] = []
        for one in self.received:
            kind = one.name if isinstance(one, frames.Stream) else type(one).__name__
            if not (isinstance(one, frames.Stream) and kinds and kinds[-1] == kind):
                kinds.append(kind)
        return kinds

    @property
    def comm_id(self) -> str:
        return str(self.of(frames.CommOpenFrame)[0].comm_id)

    async def comm(self, data: dict[str, Any], buffers: Sequence[bytes] = (), **more: Any) -> None:
        content = {"comm_id": self.comm_id, "data": data}
        await self.front.comm("comm_msg", content, {}, buffers, **more)


@pytest_asyncio.fixture(scope="module")
async def own_runtime() -> AsyncIterator[Runtime]:
    async with Runtime(Settings(interrupt_grace=PATIENCE_S)) as runtime:
        yield runtime


Make = Callable[..., Awaitable[Seen]]


@pytest_asyncio.fixture
async def make(own_runtime: Runtime) -> AsyncIterator[Make]:
    made: list[tuple[AsyncSandbox, Seen]] = []

    async def one(**options: Any) -> Seen:
        box = await own_runtime.create(**options)
        seen = Seen(box)
        made.append((box, seen))
        await seen.front.start()
        return seen

    yield one
    for box, seen in made:
        await seen.front.stop()
        await box.close()


@pytest_asyncio.fixture
async def seen(make: Make) -> Seen:
    return await make()


async def refused(call: Awaitable[object]) -> str:
    with pytest.raises(Conflict) as raised:
        await call
    return raised.value.code


# -- cells ----------------------------------------------------------------------------------------


async def test_start_tells_of_the_kernel_that_lives_and_starts_no_second_one(seen: Seen) -> None:
    pids = seen.context.processes
    reported = await seen.front.start()
    assert reported.python.startswith("3.")
    assert seen.context.processes == pids


async def test_a_cell_is_told_in_its_order_and_ends_with_its_reply(seen: Seen) -> None:
    done = await seen.run(
        "import sys\nfrom IPython.display import clear_output, display\n"
        "print('out'); print('err', file=sys.stderr)\n"
        "shown = display('a', display_id='d'); clear_output(wait=True); shown.update('b')\n"
        "6 * 7"
    )
    assert (done.run.status, done.run.error, done.run.execution_count) == (Status.OK, None, 1)
    assert done.reply is not None
    assert (done.reply.status, done.reply.execution_count) == ("ok", 1)
    assert seen.kinds == [
        *("stdout", "stderr", "DisplayData", "ClearOutput", "UpdateDisplayData", "ExecuteResult"),
    ]
    (result,) = seen.of(frames.ExecuteResult)
    assert frames.bundle(result.data) == {"text/plain": "42"}
    assert done.run.outputs == ()  # what went on to the front end is not kept


async def test_an_error_is_told_and_is_the_run_s(seen: Seen) -> None:
    done = await seen.run("1 / 0")
    (error,) = seen.of(frames.ErrorFrame)
    assert error.ename == "ZeroDivisionError"
    assert done.run.status is Status.ERROR
    assert done.run.error is not None
    assert done.run.error.name == "ZeroDivisionError"
    assert done.reply is not None
    assert done.reply.ename == "ZeroDivisionError"


async def test_user_expressions_are_worth_something_or_an_error_each(seen: Seen) -> None:
    wanted = {"sum": "6 * 7", "none": "nothing_like_it", "vast": "'x' * (4 << 20)", "last": "2"}
    done = await seen.front.execute(Cell("6", user_expressions=wanted))
    reported = done.user_expressions
    assert reported["sum"] == {"status": "ok", "data": {"text/plain": "42"}, "metadata": {}}
    assert (reported["none"]["status"], reported["none"]["ename"]) == ("error", "NameError")
    assert (reported["vast"]["status"], reported["last"]["status"]) == ("error", "ok")
    failed = await seen.front.execute(Cell("1 / 0", user_expressions=wanted))
    assert failed.user_expressions == {}


async def test_what_is_not_stored_has_no_number_and_silent_shows_no_result(seen: Seen) -> None:
    await seen.front.execute(Cell("1", store_history=False))
    silent = await seen.front.execute(Cell("print('said'); 2", silent=True))
    assert (seen.text(), len(seen.of(frames.ExecuteResult))) == ("said\n", 1)
    stored = await seen.run("3")
    assert [done.reply and done.reply.execution_count for done in (silent, stored)] == [0, 1]
    await seen.run("print(In)")
    assert seen.text().endswith("['', '3', 'print(In)']\n")


async def test_payloads_say_what_the_cell_asks_of_the_front_end(seen: Seen) -> None:
    done = await seen.run("get_ipython().set_next_input('x = 1')\nlen?")
    sources = {one["source"]: one for one in done.payload}
    assert sources["set_next_input"]["text"] == "x = 1"
    assert "Return the number of items" in sources["page"]["data"]["text/plain"]
    vast = await seen.run("from IPython.core import page\npage.page('x' * (20 << 20))")
    assert len(vast.payload[0]["data"]["text/plain"]) < 2 * MIB
    assert (await seen.run("1")).payload == []


async def test_input_is_told_and_then_asked(seen: Seen) -> None:
    asked: list[tuple[str, frames.InputRequestFrame]] = []

    async def answer(prompt: str) -> str:
        asked.append((prompt, seen.of(frames.InputRequestFrame)[-1]))
        return "Ada"

    code = "import getpass\nprint(input('who? '), getpass.getpass('secret '))"
    done = await seen.run(code, on_input=answer)
    assert (done.run.status, seen.text()) == (Status.OK, "Ada Ada\n")
    assert asked == [
        ("who? ", frames.InputRequestFrame("who? ", False)),
        ("secret ", frames.InputRequestFrame("secret ", True)),
    ]
    unasked = await seen.run("input()")
    assert unasked.run.error is not None
    assert unasked.run.error.name == "StdinNotImplementedError"


async def test_libraries_find_the_id_of_the_request_inside(seen: Seen) -> None:
    code = "print(get_ipython().kernel.get_parent().get('header', {}).get('msg_id'))"
    await seen.front.execute(Cell(code, msg_id="m-1"))
    await seen.run(code)
    assert seen.text() == "m-1\nNone\n"


async def test_requests_are_served_in_their_order(seen: Seen) -> None:
    slow = asyncio.create_task(seen.run("import time; time.sleep(0.2); x = 'set'; print(x)"))
    asked = asyncio.create_task(seen.front.inspect("x", 1, 0))
    await asyncio.gather(slow, asked)
    assert asked.result().is_found
    both = (seen.run("print(1)"), seen.front.complete("x.isal", 6), seen.run("print(2)"))
    await asyncio.gather(*both)
    assert seen.text() == "set\n1\n2\n"


# -- questions ------------------------------------------------------------------------------------


async def test_questions_are_answered(seen: Seen) -> None:
    await seen.run("numbers = [1]")
    completed = await seen.front.complete("numbers.ap", 10)
    assert "append" in completed.matches[0]
    assert (completed.cursor_start, completed.cursor_end) in [(7, 10), (8, 10)]
    found = await seen.front.inspect("numbers", 7, 0)
    assert "list" in frames.bundle(found.data)["text/plain"]
    assert not (await seen.front.inspect("nothing", 7, 0)).is_found
    assert await seen.front.is_complete("for x in y:") == frames.IsCompleteReply(
        "incomplete", "    "
    )


async def test_a_question_that_takes_too_long_is_interrupted(
    seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frontend, "_QUESTION_S", 0.3)
    await seen.run(
        "class Slow:\n  def __repr__(self):\n    while True: pass\none = Slow(); kept = 1"
    )
    assert (await seen.front.inspect("one", 3, 0)).status in ("ok", "error")
    assert (await seen.run("kept")).run.status is Status.OK


async def test_a_question_that_heeds_no_interrupt_ends_the_kernel(
    seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frontend, "_QUESTION_S", 0.3)
    monkeypatch.setattr(seen.context, "grace_s", 0.3)
    await seen.run(
        "class Deaf:\n  def __dir__(self):\n    import signal, time\n"
        "    signal.signal(signal.SIGINT, signal.SIG_IGN)\n    time.sleep(600)\none = Deaf()"
    )
    with pytest.raises(Conflict, match="time-out") as raised:
        await seen.front.complete("one.", 4)
    assert raised.value.code == "kernel_gone"
    assert (await seen.until_ended()).name == "Timeout"


# -- comms ----------------------------------------------------------------------------------------


async def test_comms_speak_both_ways_with_buffers_and_metadata(seen: Seen) -> None:
    await seen.run(COMM)
    (opened,) = seen.of(frames.CommOpenFrame)
    assert (opened.target_name, bytes(opened.data)) == ("t", b'{"n":1}')
    assert (bytes(opened.metadata), opened.buffers) == (b'{"m":2}', [b"ab", b""])
    content = {"comm_id": opened.comm_id, "data": {"v": 5}}
    await seen.front.comm("comm_msg", content, {"version": "2"}, [b"\0\xff", b""], "m-2")
    (answer,) = seen.of(frames.CommMsgFrame)  # told before the call returned
    assert json.loads(bytes(answer.data)) == {"heard": content}
    assert json.loads(bytes(answer.metadata)) == {"of": {"version": "2"}}
    assert answer.buffers == [b"\0\xff", b""]
    await seen.run("one.close()")
    assert seen.of(frames.CommClose)[0].comm_id == opened.comm_id


async def test_a_front_end_opens_and_closes_comms(seen: Seen) -> None:
    await seen.run(
        "def opened(one, message):\n"
        "    one.on_close(lambda m: print('closed', m['content']['data']))\n"
        "    print('opened', message['content']['data'])\n"
        "get_ipython().kernel.comm_manager.register_target('mine', opened)"
    )
    about = {"comm_id": "c1", "target_name": "mine", "data": {"a": 1}}
    await seen.front.comm("comm_open", about, {}, [])
    await seen.front.comm("comm_close", {"comm_id": "c1", "data": {"b": 2}}, {}, [])
    assert seen.text() == "opened {'a': 1}\nclosed {'b': 2}\n"
    await seen.front.comm("comm_open", {**about, "comm_id": "c2", "target_name": "x"}, {}, [])
    assert seen.of(frames.CommClose)[0].comm_id == "c2"


async def test_a_large_buffer_comes_out_whole(seen: Seen) -> None:
    await seen.run(COMM)
    await seen.comm({}, [bytes(range(256)) * (12 << 10)])
    assert seen.of(frames.CommMsgFrame)[0].buffers == [bytes(range(256)) * (12 << 10)]


async def test_what_a_comm_s_handler_prints_and_raises_is_told(seen: Seen) -> None:
    await seen.run(COMM)
    await seen.comm(
        {"do": "print(get_ipython().kernel.get_parent()['header']['msg_id'])"}, msg_id="m-3"
    )
    await seen.comm({"do": "1 / 0"})
    assert (seen.text(), "ZeroDivisionError" in seen.text("stderr")) == ("m-3\n", True)


async def test_a_comm_s_handler_is_interrupted(seen: Seen) -> None:
    await seen.run(COMM + "kept = 1")
    handled = asyncio.create_task(seen.comm({"do": "print('in')\nwhile True: pass"}))
    await seen.until(lambda s: "in" in s.text())
    assert await seen.front.interrupt()
    await handled
    assert "KeyboardInterrupt" in seen.text("stderr")
    assert "loop.py" not in seen.text("stderr")
    assert (await seen.run("kept")).run.status is Status.OK
    assert not await seen.front.interrupt()


async def test_a_comm_s_handler_has_the_time_and_the_output_of_a_cell(make: Make) -> None:
    limits = {"wall_time": "1s", "output_max": "64KiB"}
    seen = await make(narrower={"limits": limits})
    await seen.run(COMM)
    await seen.comm({"do": "while True: pass"})
    assert "longer than its time-out" in seen.text("stderr")
    await seen.comm({"do": "while True: print('x' * 1000)"})
    assert "more output than the limit" in seen.text("stderr")
    assert len(seen.text()) <= 64 << 10
    assert seen.ends == []


async def test_what_no_kernel_could_be_sent_is_refused_before_it_is(
    seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep: Any = 1
    for _ in range(5000):
        deep = [deep]
    for bad in ("\ud800", deep, {1j}):
        with pytest.raises(BadRequest, match="JSON"):
            await seen.front.comm("comm_msg", {"comm_id": "c", "data": bad}, {}, [])
    monkeypatch.setattr(frontend, "_COMM_MAX", 1000)
    with pytest.raises(TooLarge):
        await seen.front.comm("comm_msg", {"comm_id": "c", "data": {}}, {}, [b"x" * 1000])
    with pytest.raises(BadRequest):
        await seen.front.execute(Cell("1", user_expressions={"a": "'\ud800'"}))
    with pytest.raises(BadRequest):
        await seen.front.complete("\ud800", 1)
    assert (await seen.run("1")).run.status is Status.OK


# -- limits, and who listens ----------------------------------------------------------------------


async def test_a_cell_has_every_limit_of_a_run(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"wall_time": "1s", "output_max": "64KiB"}
    seen = await make(narrower={"limits": limits})
    late = await seen.run("while True: pass")
    assert (late.run.status, late.run.error and late.run.error.name) == (Status.TIMEOUT, "Timeout")
    assert late.reply is not None
    loud = await seen.run("while True: print('x' * 1000)")
    assert (loud.run.status, loud.run.cause) == (Status.KILLED, Cause.OUTPUT)
    assert len(seen.text()) <= 64 << 10
    with pytest.raises(BadRequest):
        await seen.run("1", timeout=10)
    monkeypatch.setattr(seen.context, "grace_s", 0.3)
    deaf = await seen.run("import signal, time\nsignal.signal(2, signal.SIG_IGN)\ntime.sleep(600)")
    assert (deaf.run.status, deaf.run.state_lost, deaf.reply) == (Status.TIMEOUT, True, None)
    assert (await seen.until_ended()).name == "Timeout"


async def test_a_policy_without_python_refuses_cells_and_questions(own_runtime: Runtime) -> None:
    policy = (await own_runtime.decide("default"))[0].model_copy(
        update={"capabilities": ("shell",)}
    )
    async with await own_runtime.create(policy) as box:
        front = Seen(box).front
        for call in (
            front.execute(Cell("1")),
            front.complete("x", 1),
            front.comm("comm_msg", {}, {}, []),
        ):
            with pytest.raises(Denied):
                await call


async def test_one_who_takes_slowly_slows_this_kernel_and_no_other(make: Make) -> None:
    slow, other = await make(), await make()
    gate = asyncio.Event()

    async def wait(_: object) -> None:
        await gate.wait()

    slow.slow = wait
    running = asyncio.create_task(slow.run("for n in range(3000): print('x' * 8000)"))
    assert (await other.run("print('on')")).run.status is Status.OK
    assert slow.received == []
    assert not running.done()
    slow.slow = None
    gate.set()
    assert (await running).run.status is Status.OK or (await running).run.cause is Cause.OUTPUT
    assert other.text() == "on\n"


async def test_a_time_out_counts_while_somebody_takes_slowly(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What followed was always there at once, and the deadline never looked at. Then what is left
    is not told: whoever takes it slowly would have the kernel killed."""
    seen = await make(narrower={"limits": {"wall_time": "1s"}})
    monkeypatch.setattr(seen.context, "grace_s", 4.0)

    async def wait(_: object) -> None:
        await asyncio.sleep(0.5)

    seen.slow = wait
    done = await seen.run("while True: print('x' * 9000)")
    assert (done.run.status, done.run.state_lost) == (Status.TIMEOUT, False)
    assert len(seen.received) < 20


async def test_malformed_raised_by_who_is_told_cuts_the_kernel_off(seen: Seen) -> None:
    async def judge(reported: Published) -> None:
        if isinstance(reported, frames.DisplayData):
            raise frames.MalformedFrame("no bundle of ours")

    seen.slow = judge
    done = await seen.run("display(1)\nimport time; time.sleep(600)")
    assert (done.run.status, done.run.cause, done.reply) == (Status.KILLED, Cause.CRASHED, None)
    assert done.run.error is not None
    assert "no bundle of ours" in done.run.error.value
    assert await seen.until_ended() == done.run.error


async def test_a_bug_of_who_is_told_ends_nothing(seen: Seen) -> None:
    async def fail(reported: Published) -> None:
        raise ZeroDivisionError

    seen.slow = fail
    assert (await seen.run("print(1); 2")).run.status is Status.OK
    assert seen.received == []


async def test_a_cancelled_call_interrupts_its_cell(seen: Seen) -> None:
    call = asyncio.create_task(seen.run("kept = 1\nprint('in')\nwhile True: pass"))
    await seen.until(lambda s: "in" in s.text())
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (await seen.run("kept")).run.status is Status.OK


async def test_an_interrupted_cell_says_so(seen: Seen) -> None:
    call = asyncio.create_task(seen.run("print('in')\nimport time; time.sleep(600)"))
    await seen.until(lambda s: "in" in s.text())
    assert await seen.front.interrupt()
    done = await call
    assert done.run.status is Status.INTERRUPTED
    assert done.reply is not None
    assert done.reply.ename == "KeyboardInterrupt"


# -- between requests -----------------------------------------------------------------------------

LATER = """
import threading, time
def later():
    go.wait()
    {}
go = threading.Event()
threading.Thread(target=later, daemon=True).start()
"""


async def test_what_a_thread_and_a_task_show_between_cells_is_told(seen: Seen) -> None:
    await seen.run(
        # print writes the end of the line apart from the text, and the other's may come between
        "import asyncio, os, sys, threading, time\n"
        "def late():\n    while not os.path.exists('now'): time.sleep(0.01)\n"
        "    sys.stdout.write('thread\\n')\n"
        "async def task():\n    while not os.path.exists('now'): await asyncio.sleep(0.01)\n"
        "    sys.stdout.write('task\\n'); display(1)\n"
        "threading.Thread(target=late).start(); t = asyncio.create_task(task())"
    )
    assert seen.received == []
    assert (await seen.context.shell("touch now")).ok
    await seen.until(lambda s: len(s.text().split()) == 2 and s.of(frames.DisplayData))
    assert sorted(seen.text().split()) == ["task", "thread"]


async def test_output_between_cells_is_bounded_and_the_next_cell_not_stopped_for_it(
    make: Make,
) -> None:
    seen = await make(narrower={"limits": {"output_max": "64KiB"}})
    await seen.run(
        "import os, threading, time\n"
        "def flood():\n    while not os.path.exists('now'): time.sleep(0.01)\n"
        "    for _ in range(80): print('x' * 1000)\n"
        "threading.Thread(target=flood).start()"
    )
    assert (await seen.context.shell("touch now")).ok
    await seen.until(lambda s: "is not shown" in s.text("stderr"))
    assert len(seen.text()) <= 64 << 10
    assert (await seen.run("print('next')")).run.status is Status.OK
    assert seen.text().endswith("next\n")


async def test_a_kernel_that_floods_between_cells_is_not_read_without_end(make: Make) -> None:
    seen = await make(narrower={"limits": {"output_max": "64KiB"}})
    code = "threading.Timer(0.1, lambda: [wire.sendall(stream) for _ in range(4000)]).start()"
    flood = "import threading\nstream = frame('stream', {'name': 'stdout', 'text': 'y' * 1000})\n"
    await seen.run(WIRE + flood + code)
    await seen.until(lambda s: len(s.text()) > MIB)
    kept = 0
    while kept != len(seen.text()):  # it comes to rest far below the 4 MB of the flood
        kept = len(seen.text())
        await asyncio.sleep(0.1)
    assert kept < 2 * MIB
    await seen.run("1")
    assert len(seen.text()) > kept


async def test_a_request_is_let_in_while_much_is_told(seen: Seen) -> None:
    """Output between cells and a request are never read by two at once."""
    await seen.run(
        "import threading\n"
        "def chat():\n    for n in range(3000): print(n, flush=True)\n"
        "threading.Thread(target=chat).start()"
    )
    for number in range(20):
        assert (await seen.run(f"{number}")).run.status is Status.OK
    await seen.until(lambda s: "2999" in s.text())
    assert seen.text().split() == [str(number) for number in range(3000)]


BETWEEN = {
    "a question": "frame('input_request', {'prompt': '', 'password': False})",
    "a reply": "frame('execute_reply', {'status': 'ok'}, '7')",
    "a comm's reply": "frame('comm_msg_reply', {'status': 'ok'})",
    "an answer to nobody": "frame('stream', {'name': 'stdout', 'text': ''}, '7')",
    "a second ready": "frame('ready', {'python': '3', 'ipython': '9'})",
    "no bundle": "frame('display_data', {'data': {'a/b': json.loads('[' * 90 + ']' * 90)}})",
}


@pytest.mark.parametrize("what", BETWEEN)
async def test_what_no_kernel_of_ours_says_between_cells_ends_it(seen: Seen, what: str) -> None:
    async def judge(reported: Published) -> None:
        if isinstance(reported, frames.DisplayData):
            frames.bundle(reported.data)

    seen.slow = judge
    sent = f"threading.Timer(0.1, lambda: wire.sendall({BETWEEN[what]})).start()"
    await seen.run(f"{WIRE}import threading\n{sent}")
    assert (await seen.until_ended()).name == "KernelCutOff"
    assert not seen.context.alive


@pytest.mark.parametrize(
    "reply",
    [
        "'complete_reply', {'status': 'ok', 'matches': [], 'cursor_start': 0, 'cursor_end': 0}",
        "'comm_msg_reply', {'status': 'ok'}",
        "'execute_reply', {'status': 'ok', 'payload': {}}",
        "'execute_reply', {'status': 'ok', 'payload': [1]}",
        "'execute_reply', {'status': 'ok', 'user_expressions': {'a': 1}}",
    ],
)
async def test_a_reply_that_is_none_of_its_kind_cuts_the_kernel_off(seen: Seen, reply: str) -> None:
    own = (
        "from sbx.guest.frames import RawFrame\n"
        "own = max((f.id for f in gc.get_objects() if type(f) is RawFrame and f.id), key=int)\n"
    )
    done = await seen.run(f"{WIRE}{own}wire.sendall(frame({reply}, own))\nwhile True: pass")
    assert (done.run.status, done.run.cause, done.reply) == (Status.KILLED, Cause.CRASHED, None)
    assert (await seen.until_ended()).name == "KernelCutOff"


# -- the end --------------------------------------------------------------------------------------


async def test_a_kernel_that_dies_in_a_cell_is_told_once_and_not_replaced(seen: Seen) -> None:
    waiting: list[asyncio.Task[Any]] = []
    dying = asyncio.create_task(seen.run("import os; os.kill(os.getpid(), 9)"))
    await asyncio.sleep(0)
    waiting = [asyncio.create_task(seen.run("1")), asyncio.create_task(seen.front.complete("x", 1))]
    done = await dying
    assert (done.run.cause, done.run.state_lost, done.reply) == (Cause.CRASHED, True, None)
    assert [await refused(one) for one in waiting] == ["kernel_gone"] * 2
    assert await seen.until_ended() == done.run.error
    assert await refused(seen.run("1")) == "kernel_gone"
    assert not seen.context.alive
    await seen.front.start()
    assert (await seen.run("1")).run.execution_count == 1
    assert len(seen.ends) == 1


async def test_a_kernel_killed_while_idle_is_told(seen: Seen) -> None:
    os.kill(seen.context.processes[0], signal.SIGKILL)
    assert (await seen.until_ended()).name == "KernelDied"
    assert await refused(seen.run("1")) == "kernel_gone"


@pytest.mark.needs("memory")
async def test_memory_that_ran_out_between_cells_is_named(make: Make) -> None:
    seen = await make(narrower={"limits": {"memory_max": "128MiB"}})
    eat = "hoard = []\ndef eat():\n    while True: hoard.append(b'x' * (8 << 20))\n"
    await seen.run(f"{eat}import threading; threading.Timer(0.1, eat).start()")
    reported = await seen.until_ended()
    assert (reported.name, str(128 * MIB) in reported.value) == ("MemoryLimit", True)
    assert reported.value.startswith("the kernel used")


async def test_restart_gives_a_clean_namespace_over_the_same_files(seen: Seen) -> None:
    await seen.run("x = 1; open('kept.txt', 'w').write('kept')")
    busy = asyncio.create_task(seen.run("print('in')\nwhile True: pass"))
    await seen.until(lambda s: "in" in s.text())
    waiting = asyncio.create_task(seen.run("1"))
    question = asyncio.create_task(seen.front.complete("x", 1))
    await asyncio.sleep(0)
    assert (await seen.front.restart()).python
    for done in (await busy, await waiting):
        assert (done.run.status, done.reply) == (Status.INTERRUPTED, None)
        assert done.run.error is not None
        assert done.run.error.name == "KernelRestarted"
    assert await refused(question) == "kernel_gone"
    after = await seen.run("print(open('kept.txt').read(), 'x' in globals())")
    assert (after.run.execution_count, after.run.state_lost) == (1, False)
    assert seen.text().endswith("kept False\n")
    assert seen.ends == []


async def test_stop_ends_the_kernel_untold_and_start_starts_another(seen: Seen) -> None:
    await seen.run("open('kept.txt', 'w').write('kept')")
    busy = asyncio.create_task(seen.run("print('in')\nwhile True: pass"))
    await seen.until(lambda s: "in" in s.text())
    await seen.front.stop()
    assert (await busy).run.status is Status.INTERRUPTED
    assert (seen.context.alive, seen.ends) == (False, [])
    assert await refused(seen.run("1")) == "kernel_gone"
    await seen.front.start()
    await seen.run("print(open('kept.txt').read())")
    assert seen.text().endswith("kept\n")


async def test_a_sandbox_that_is_closed_tells_its_front_end(own_runtime: Runtime) -> None:
    box = await own_runtime.create()
    seen = Seen(box)
    await seen.front.start()
    await box.close()
    assert (await seen.until_ended()).name == "SandboxClosed"
    with pytest.raises((Conflict, Broken)):
        await seen.run("1")
    await seen.front.stop()
