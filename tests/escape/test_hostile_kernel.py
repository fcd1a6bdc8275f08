"""The kernel's own process speaks to the runtime as it likes: it ends itself, and nobody else.

User code finds the socket among its descriptors and writes on it. A control in each direction: the
first test forges a frame as ours would be, and that one is taken.
"""

# ruff: noqa: ASYNC240  # a look at /proc blocks nothing that matters to a test

import asyncio
import json
import logging
import os
import struct
import threading
import time
from typing import Any

import psutil
import pytest
from attacking import Fresh, attack, one_path, prelude, run, tell, watched
from chain import until_stopped, until_there

from sbx.kernels import kernel
from sbx.protocol.runs import Cause, Status
from sbx.runtime.sandbox import AsyncSandbox
from tests.tiers import rows

SOCKET = """
import json, struct
def peers():
    'Whose process made each Unix socket here; 0 is one outside.'
    found = {}
    for fd in map(int, os.listdir('/proc/self/fd')):
        try:
            with socket.socket(fileno=os.dup(fd)) as one:
                assert one.family == socket.AF_UNIX
                maker = one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                found[fd] = struct.unpack('3i', maker)[0]
        except OSError:
            pass
    return found
wire, = [fd for fd, maker in peers().items() if not maker]
sock = socket.socket(fileno=os.dup(wire))
sock.setblocking(True)
def frame(kind, content, id=None):
    body = {'type': kind, 'content': content}
    if id is not None:
        body['id'] = id
    body = json.dumps(body).encode()
    return struct.pack('>I', len(body)) + body
def own_id():
    'The id of the request that runs now.'
    import gc
    from sbx.guest.frames import RawFrame
    return max((f.id for f in gc.get_objects() if type(f) is RawFrame and f.id), key=int)
"""


async def send(box: AsyncSandbox, code: str, **options: Any) -> Any:
    return await run(box, SOCKET + code, **options)


async def test_a_frame_in_its_turn_is_taken_as_the_kernels_own_word(fresh: Fresh) -> None:
    """That is all that forging can gain: it lies about itself."""
    box = await fresh()
    done = await send(box, "sock.sendall(frame('stream', {'name': 'stdout', 'text': 'forged'}))")
    assert (done.status, done.stdout) == (Status.OK, "forged")


HOSTILE = {
    "garbage": "b'\\xff' + os.urandom(4095)",
    "text": "b'HTTP/1.1 200 OK\\r\\n\\r\\n'",
    "length beyond all bounds": "struct.pack('>I', 0xFFFFFFFF)",
    "length without body": "struct.pack('>I', 25 << 20) + b'x'",
    "no JSON": "struct.pack('>I', 4) + b'}{}{'",
    "bad UTF-8": "struct.pack('>I', 24) + b'{\"type\":\"' + bytes([255] * 14) + b'\"}'",
    "a list": "struct.pack('>I', 2) + b'[]'",
    "unknown type": "frame('no such thing', {})",
    "of the supervisor": "frame('exited', {'code': 0}, '1')",
    "unknown field": "frame('stream', {'name': 'stdout', 'text': '', 'more': 1})",
    "missing field": "frame('stream', {'name': 'stdout'})",
    "wrong type": "frame('stream', {'name': 'stdout', 'text': 7})",
    "another stream": "frame('stream', {'name': 'syslog', 'text': ''})",
    "deep content": "frame('display_data', {'data': {'a/b': json.loads('[' * 900 + ']' * 900)}})",
    "deeper than any parser": (
        "(lambda b: struct.pack('>I', len(b)) + b)"
        "(b'{\"type\":\"stream\",\"content\":' + b'[' * 2000000)"
    ),
    "many parts": "frame('display_data', {'data': {str(n): '' for n in range(100)}})",
    "metadata no object": "frame('display_data', {'data': {}, 'metadata': []})",
    "large list": "frame('execute_reply', {'status': 'ok', 'payload': [1] * (4 << 20)}, own_id())",
    "large JSON part": "frame('display_data', {'data': {'a/b': [0] * (2 << 20)}})",
    "many values": "frame('display_data', {'data': {'a/b': [{}] * 330_000}})",
    "many values of metadata": (
        "frame('display_data', {'data': {}, 'metadata': {'a': [0] * 330_000}})"
    ),
    "many values of comms": "frame('comm_msg', {'comm_id': 'x', 'data': [[]] * 330_000})",
    "many values of a reply": (
        "frame('execute_reply', {'status': 'ok', 'payload': [[]] * 330_000}, own_id())"
    ),
    "infinite number": (
        "frame('display_data', {'data': {'a/b': 12345}}).replace(b'12345', b'1e999')"
    ),
    "second ready": "frame('ready', {'python': '3', 'ipython': '9'})",
    "refused": "frame('refused', {'layer': 'x', 'message': 'x', 'errno': 1})",
    "reply to nobody": "frame('execute_reply', {'status': 'ok'}, '999')",
    "reply without id": "frame('execute_reply', {'status': 'ok'})",
    "reply of another kind": "frame('complete_reply', {'matches': [], 'cursor_start': 0,"
    " 'cursor_end': 0, 'status': 'ok'}, '999')",
    "unasked question": "frame('input_request', {'prompt': 'password: ', 'password': True})",
}  # fmt: skip


@one_path()  # the runtime reads every kernel's socket alike
@pytest.mark.parametrize("what", rows(HOSTILE, ci_tier=[*HOSTILE][::2]))
async def test_a_frame_that_ours_would_not_send_ends_that_kernel_and_no_other(
    fresh: Fresh, box: AsyncSandbox, what: str
) -> None:
    await attack(box, "x = 41")
    hostile = await fresh()
    done = await send(hostile, f"sock.sendall({HOSTILE[what]})\ntime.sleep(600)")
    assert (done.status, done.cause, done.state_lost) == (Status.KILLED, Cause.CRASHED, True)
    assert done.error is not None
    assert done.error.name == "KernelCutOff"
    assert done.error.value.startswith("the kernel was ended: it")
    assert await tell(hostile, "6 * 7") == 42
    assert await tell(box, "x + 1") == 42


# What is large, and what becomes of the run; each as bytes, or as what sends them itself.
GIB = """
def send(head, size, piece=b'x' * (1 << 20)):
    sock.sendall(head)
    for _ in range(size >> 20):
        sock.sendall(piece)
"""
LARGE = {
    "a message of 1 GB": ("send(struct.pack('>I', 1 << 30), 1 << 30)", "KernelCutOff"),
    "1 GB in the largest frames": (
        'body = b\'{"type":"stream","content":{"name":"stdout","text":"\'\n'
        "for _ in range(43):\n"
        "    send(struct.pack('>I', len(body) + (23 << 20) + 3) + body, 23 << 20)\n"
        "    sock.sendall(b'\"}}')",
        "OutputLimit",
    ),
    "depth 100,000": (
        "n = 100_000\n"
        'deep = b\'{"type":"display_data","content":{"data":{"a/b":%s}}}\''
        " % (b'[' * n + b']' * n)\n"
        "sock.sendall(struct.pack('>I', len(deep)) + deep)",
        "KernelCutOff",
    ),
    "depth 100,000 of metadata": (
        "n = 100_000\n"
        'deep = b\'{"type":"display_data","content":{"data":{},"metadata":%s}}\''
        " % (b'{\"a\":' * n + b'1' + b'}' * n)\n"
        "sock.sendall(struct.pack('>I', len(deep)) + deep)",
        "KernelCutOff",
    ),
    "no number": (
        "sock.sendall(frame('display_data', {'data': {'a/b': [float('nan')] * 100_000}}))",
        "KernelCutOff",
    ),
    "beyond all numbers": (
        "sock.sendall(frame('display_data', {'data': {'a/b': [7] * 100_000}})"
        ".replace(b'7', b'1e999'))",
        "KernelCutOff",
    ),
    "a number of 4,000 digits": (
        "sock.sendall(frame('execute_result', {'data': {}, 'execution_count': 10 ** 4000}))",
        "KernelCutOff",
    ),
    "two million keys": (
        "keys = b','.join(b'\"%x\":1' % n for n in range(1_800_000))\n"
        'many = b\'{"type":"display_data","content":{"data":{%s}}}\' % keys\n'
        "sock.sendall(struct.pack('>I', len(many)) + many)",
        "KernelCutOff",
    ),
    "two million lines": (
        "many = frame('error', {'ename': '', 'evalue': '', 'traceback': [''] * 1_500_000})\n"
        "sock.sendall(many)",
        "KernelCutOff",
    ),
    "values without end": (
        "many = frame('display_data', {'data': {'a/b': [{}] * 300_000}})\n"
        "for _ in range(100): sock.sendall(many)",
        "OutputLimit",
    ),
    "comms without end": (
        "one = frame('comm_msg', {'comm_id': 'x', 'data': 'y' * (5 << 20)})\n"
        "for _ in range(100): sock.sendall(one)",
        "OutputLimit",
    ),
    "errors without end": (
        "one = frame('error', {'ename': 'E', 'evalue': 'v' * 1000, 'traceback': ['t' * 9000]})\n"
        "for _ in range(20_000): sock.sendall(one)",
        "OutputLimit",
    ),
    "displays without end": (
        "one = frame('display_data', {'data': {}})\n"
        "for _ in range(1_000_000): sock.sendall(one * 1000)",
        "OutputLimit",
    ),
}


@one_path()  # the runtime reads every kernel's socket alike
@pytest.mark.parametrize("what", rows(LARGE, ci_tier={*LARGE} - {"displays without end"}))
async def test_what_is_large_costs_bounded_memory_and_time(fresh: Fresh, what: str) -> None:
    """The runtime's memory and the loop that all kernels share are watched meanwhile."""
    sending, ended_by = LARGE[what]
    hostile = await fresh(narrower={"limits": {"output_max": "4MiB"}})
    await hostile.start()
    done, grown, stalled = await watched(send(hostile, f"{GIB}\n{sending}\ntime.sleep(600)"))
    assert done.status is Status.KILLED, done
    assert done.error is not None
    assert done.error.name == ended_by, done.error
    assert grown < 160 << 20, f"{grown >> 20} MiB"
    assert stalled < 5, f"{stalled} s of the loop"  # 0.2 s where nobody else is at work
    assert await tell(hostile, "6 * 7") == 42


@one_path()  # the runtime reads every kernel's socket alike
async def test_a_reply_from_before_its_request_is_nobodys(
    fresh: Fresh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread answers, between two runs, what is asked next. The control: a runtime whose requests
    can be told ahead takes the forged word for the run's own."""
    early = """
def answer():
    while not os.path.exists('now'):
        time.sleep(0.01)
    for n in range(1, 40):
        sock.sendall(frame('execute_reply', {'status': 'ok', 'execution_count': 7}, f'{n}{0:016d}'))
    os.rename('now', 'done')
threading.Thread(target=answer).start()
"""
    outcomes = []
    for unguessed in (kernel._UNGUESSED, 1):
        monkeypatch.setattr(kernel, "_UNGUESSED", unguessed)
        box = await fresh()
        first = early if unguessed > 1 else early.replace("range(1, 40)", "range(2, 3)")
        assert (await send(box, first)).ok
        await box.files.write("now", "")
        await until_there(box, "done")
        outcomes.append(await box.run("1 / 0"))
    guarded, control = outcomes
    assert guarded.status is Status.KILLED
    assert guarded.error is not None
    assert guarded.error.value == "the kernel was ended: it answered a request that was not sent"
    assert control.status is Status.OK
    assert control.execution_count == 7


@one_path()  # the runtime reads every kernel's socket alike
async def test_output_after_the_end_of_a_run_is_no_part_of_it(fresh: Fresh) -> None:
    """It shows in the next run, as a thread's does in Jupyter; said in the name of the one that has
    ended, it ends the kernel."""
    box = await fresh()
    late = """
def speak(kind, content, id=None):
    while not os.path.exists('now'):
        time.sleep(0.01)
    sock.sendall(frame(kind, content, id))
    os.rename('now', 'done')
"""
    said = "('stream', {'name': 'stdout', 'text': 'late'}"
    first = await send(box, f"{late}threading.Thread(target=speak, args={said})).start()")
    assert (first.status, first.stdout) == (Status.OK, "")
    await box.files.write("now", "")
    await until_there(box, "done")
    assert (await box.run("print('next')")).stdout == "latenext\n"
    named = f"number = own_id()\nthreading.Thread(target=speak, args={said}, number)).start()"
    assert (await box.run(named)).ok
    await box.files.write("now", "")
    await until_there(box, "done")
    assert (await box.run("1")).status is Status.KILLED


@one_path()  # the runtime reads every kernel's socket alike
async def test_a_kernel_that_never_reads_costs_bounded_memory_and_time(fresh: Fresh) -> None:
    """It stops itself: each run ends by its time-out, and what it was sent is dropped with it."""
    box = await fresh()
    assert (
        await send(box, "threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGSTOP)).start()")
    ).ok
    await until_stopped(box)
    code = "#" + "x" * 900_000
    done, grown, stalled = await watched(box.run(code, timeout=2))
    assert done.status in (Status.KILLED, Status.TIMEOUT)
    assert done.state_lost
    assert grown < 64 << 20
    assert stalled < 5
    assert await tell(box, "6 * 7") == 42


@one_path()  # the runtime reads every kernel's socket alike
async def test_between_two_runs_a_hostile_frame_ends_the_process_by_itself(fresh: Fresh) -> None:
    """Nobody runs anything more: what was cut off must not live on unseen, even if it ignores that
    its socket is closed."""
    box = await fresh()
    later = """
def later():
    while not os.path.exists('now'):
        time.sleep(0.01)
    sock.sendall(b'garbage' * 100)
    while True:
        time.sleep(1)
os._exit = lambda code: time.sleep(600)
threading.Thread(target=later).start()
"""
    assert (await send(box, later)).ok
    pid1 = box._default.contexts.default._kernel.jail.pid  # type: ignore[union-attr]
    await box.files.write("now", "")
    async with asyncio.timeout(60):
        while os.path.exists(f"/proc/{pid1}"):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@one_path()  # the runtime reads every kernel's socket alike
async def test_a_forged_reply_ends_the_cell_and_not_more(fresh: Fresh) -> None:
    """Code that replies for itself goes on in the background, as a thread of it could. The second
    reply, ours, answers what nobody asks any more."""
    box = await fresh()
    done = await send(box, "sock.sendall(frame('execute_reply', {'status': 'ok'}, own_id()))")
    assert done.ok
    assert (await box.run("6 * 7")).status in (Status.OK, Status.KILLED)
    assert await tell(box, "6 * 7") == 42


@one_path()  # the runtime reads every kernel's socket alike
async def test_a_hundred_thousand_frames_end_at_the_limit_and_leave_others_time(
    fresh: Fresh, box: AsyncSandbox
) -> None:
    """Empty ones count: each costs the runtime time and memory."""
    await box.start()
    hostile = await fresh(narrower={"limits": {"output_max": "4MiB"}})
    empty = (
        "sock.sendall(frame('stream', {'name': 'stdout', 'text': ''}) * 100_000)\ntime.sleep(600)"
    )
    flood = asyncio.create_task(send(hostile, empty))
    async with asyncio.timeout(100):
        while not flood.done():
            assert await tell(box, "1") == 1
    assert (await flood).status in (Status.KILLED, Status.TIMEOUT)


@pytest.mark.full_tier
@one_path()  # the runtime reads every kernel's socket alike
async def test_updates_of_many_displays_leave_others_time(fresh: Fresh, box: AsyncSandbox) -> None:
    """Each used to be looked for among all displays: minutes of the loop for one run."""
    await box.start()
    hostile = await fresh()
    shows = """
show = frame('display_data', {'data': {}, 'transient': {'display_id': 'x'}})
update = frame('update_display_data', {'data': {}, 'transient': {'display_id': 'x'}})
sock.sendall(show * 15000 + update * 15000)
"""
    flood = asyncio.create_task(send(hostile, shows, timeout=30))
    slowest = 0.0
    while not flood.done():
        began = time.monotonic()
        await asyncio.sleep(0.01)
        slowest = max(slowest, time.monotonic() - began)
    assert slowest < 5  # seconds; unbounded it was minutes
    assert (await flood).status is Status.OK


@one_path()  # the runtime reads every kernel's socket alike
async def test_questions_without_end_cost_the_program_no_threads(fresh: Fresh) -> None:
    """Whoever answers may take for ever, and each question may hold a thread of the program."""
    box = await fresh()
    asked = threading.Event()
    before = threading.active_count()
    question = "frame('input_request', {'prompt': '', 'password': False})"
    ask = f"sock.sendall({question} * 1000)\ntime.sleep(600)"
    answering = threading.Event()

    def on_input(prompt: str) -> str:
        asked.set()
        answering.wait(60)
        return ""

    done = await box.run(prelude() + SOCKET + ask, on_input=on_input)
    threads = threading.active_count() - before
    answering.set()
    assert asked.is_set()
    assert done.status is Status.KILLED
    assert threads < 20


@one_path()  # the runtime reads every kernel's socket alike
async def test_what_is_said_of_a_hostile_frame_is_safe_in_a_log(
    fresh: Fresh, caplog: pytest.LogCaptureFixture
) -> None:
    """No escape code, no second line: a log is read in a terminal, and line by line."""
    box = await fresh()
    body = json.dumps({"type": "stream", "content": {"\x1b[2J\nroot: all is well": 1}}).encode()
    forged = struct.pack(">I", len(body)) + body
    with caplog.at_level(logging.INFO):
        await send(box, f"sock.sendall({forged!r})\ntime.sleep(600)")
    said = "".join(record.getMessage() for record in caplog.records)
    assert "all is well" in said
    assert said.isprintable()


@one_path("fork")  # a kernel that is being added to the pool has descriptors, too
async def test_descriptors_sent_to_the_runtime_are_not_kept(fresh: Fresh) -> None:
    """SCM_RIGHTS with every frame: the host receives without room for them, so linux drops them."""
    box = await fresh()
    before = psutil.Process().num_fds()
    passing = """
held = [os.open('/dev/null', os.O_RDONLY) for _ in range(10)]  # linux allows 1024 on their way
for _ in range(50):
    socket.send_fds(sock, [frame('stream', {'name': 'stdout', 'text': '.'})], held)
"""
    await box.start()
    open_now = psutil.Process().num_fds()
    assert (await send(box, passing)).stdout == "." * 50
    assert psutil.Process().num_fds() <= max(before, open_now)


async def test_no_socket_of_pid_1_is_in_reach(fresh: Fresh) -> None:
    """The control socket starts processes and passes signals: only PID 1 has it."""
    box = await fresh()
    makers = await tell(box, SOCKET + "sock.close()\nsorted(peers().values())")
    own = await tell(box, "os.getpid()")
    assert makers == [0, own, own]  # the pair is the one by which asyncio wakes itself


async def test_a_kernel_that_closes_its_socket_is_gone(fresh: Fresh) -> None:
    box = await fresh()
    done = await send(box, "os.close(wire); sock.shutdown(socket.SHUT_RDWR)\ntime.sleep(600)")
    assert done.status is Status.KILLED
    assert await tell(box, "6 * 7") == 42


@one_path()  # the runtime reads every kernel's socket alike
async def test_a_mountain_of_frames_before_a_reader_comes_stays_inside(fresh: Fresh) -> None:
    """Between two runs nobody reads: the sender waits, and the runtime holds a bounded part."""
    box = await fresh()
    behind = """
def pour():
    while True:
        sock.sendall(frame('stream', {'name': 'stdout', 'text': 'x' * 60000}))
threading.Thread(target=pour, daemon=True).start()
"""
    before = psutil.Process().memory_info().rss
    await send(box, behind)
    await asyncio.sleep(1)
    assert psutil.Process().memory_info().rss - before < 48 << 20
