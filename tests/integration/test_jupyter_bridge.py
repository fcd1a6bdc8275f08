"""A bridge before a real kernel, as Jupyter's own clients and a hand-made one meet it."""

import asyncio
import hashlib
import json
import logging
import os
import queue
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.session import Session
from jupyter_core.utils import ensure_event_loop
from zmq.utils.garbage import gc as garbage

from sbx.errors import BadRequest, SbxError, Unavailable
from sbx.jupyter import channels
from sbx.jupyter.connection import ConnectionInfo
from sbx.jupyter.notebook import Bridge
from sbx.runtime import shared as process_runtime
from sbx.runtime.sandbox import AsyncSandbox
from sbx.runtime.shared import SharedRuntime, shared_runtime

KEY = b"the key of this connection"
WAIT_S = 60.0
WAIT_MS = 60_000
Said = dict[str, Any]


class Bridged:
    """A bridge with its sandbox, on the loop of the shared runtime."""

    def __init__(self, shared: SharedRuntime, asked: ConnectionInfo, **policy: Any) -> None:
        self._shared = shared
        self.box: AsyncSandbox = shared.call(shared.runtime.create("default", **policy))
        self.bridge: Bridge = shared.call(Bridge.bind(asked))
        self.codes: queue.Queue[int] = queue.Queue()

    def start(self) -> None:
        context = self.box.contexts.default
        self._shared.call(self.bridge.start(context, self.codes.put))

    def stop(self) -> None:
        self._shared.call(self.bridge.stop())

    def close(self) -> None:
        self._shared.call(self.bridge.close())
        self._shared.call(self.box.close())

    @property
    def info(self) -> Any:
        """As in a connection file."""
        bound = self.bridge.connection
        ports = {name: getattr(bound, name) for name in PORTS}
        more = {"ip": bound.ip, "transport": bound.transport, "key": bound.key}
        return {**ports, **more, "signature_scheme": bound.signature_scheme}


PORTS = ("shell_port", "iopub_port", "stdin_port", "control_port", "hb_port")


class Client:
    """Jupyter's own client, and what is said to it about one request."""

    def __init__(self, info: Any, **keys: bytes) -> None:
        self.own = BlockingKernelClient(**keys)
        self.own.load_connection_info(info)
        self.own.start_channels(hb=False)
        self.own.get_iopub_msg(timeout=WAIT_S)  # the welcome: it is subscribed now

    def close(self) -> None:
        self.own.stop_channels()

    def ask(self, kind: str, content: Said, channel: str = "shell", **more: Any) -> str:
        answer = self.own.session.msg(kind, content, metadata=more.get("metadata"))
        socket = getattr(self.own, f"{channel}_channel").socket
        self.own.session.send(socket, answer, buffers=more.get("buffers"))
        name: str = answer["header"]["msg_id"]
        return name

    def execute(self, code: str, **how: Any) -> str:
        return self.ask("execute_request", {"code": code, **how})

    def reply(self, name: str, channel: str = "shell") -> Said:
        content: Said = self.own._recv_reply(name, timeout=WAIT_S, channel=channel)["content"]
        return content

    def answered(self, kind: str, content: Said, channel: str = "shell") -> Said:
        return self.reply(self.ask(kind, content, channel), channel)

    def shown(self) -> Said:
        answer: Said = self.own.get_iopub_msg(timeout=WAIT_S)
        return answer

    def shown_by(self, name: str) -> list[Said]:
        """What the request caused, from its `busy` to its `idle`, without these."""
        answer: list[Said] = []
        while True:
            message = self.shown()
            if message["parent_header"].get("msg_id") == name:
                answer.append(message)
                if message["content"].get("execution_state") == "idle":
                    assert answer[0]["content"] == {"execution_state": "busy"}
                    return answer[1:-1]

    def run(self, code: str, **how: Any) -> tuple[Said, list[Said]]:
        """A cell's reply, and what it showed."""
        name = self.execute(code, **how)
        return self.reply(name), self.shown_by(name)


def kinds(answer: list[Said]) -> list[str]:
    return [message["msg_type"] for message in answer]


def printed(answer: list[Said]) -> str:
    return "".join(m["content"]["text"] for m in answer if m["msg_type"] == "stream")


@pytest.fixture(scope="module")
def shared() -> Iterator[SharedRuntime]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PLATFORM_DIRS", "1")  # else jupyter_core warns of what will change
        yield shared_runtime()
        process_runtime.close()
        garbage.stop()  # pyzmq's thread behind large messages
        ensure_event_loop().close()  # jupyter_core made it for this thread, and keeps it


@contextmanager
def bridged(shared: SharedRuntime, asked: ConnectionInfo, **policy: Any) -> Iterator[Bridged]:
    held = Bridged(shared, asked, **policy)
    try:
        yield held
    finally:
        held.close()


@pytest.fixture(scope="module")
def kernel(shared: SharedRuntime) -> Iterator[Bridged]:
    """One that tests leave as alive as they found it."""
    with bridged(shared, ConnectionInfo(KEY)) as held:
        held.start()
        yield held


@pytest.fixture
def client(kernel: Bridged) -> Iterator[Client]:
    with closing(Client(kernel.info)) as client:
        yield client


@pytest.fixture
def mortal(shared: SharedRuntime) -> Iterator[tuple[Bridged, Client]]:
    """A kernel of the test's own, to be ended, and its client."""
    with bridged(shared, ConnectionInfo(KEY)) as held:
        held.start()
        with closing(Client(held.info)) as client:
            yield held, client


# -- Jupyter's own clients -------------------------------------------------------------------------


@pytest.mark.full_tier
def test_a_blocking_client_finds_the_kernel_ready_over_tcp(kernel: Bridged) -> None:
    client = BlockingKernelClient()
    client.load_connection_info(kernel.info)
    client.start_channels()
    try:
        client.wait_for_ready(timeout=WAIT_S)
        answer: list[Said] = []
        reply = client.execute_interactive("6 * 7", output_hook=answer.append, timeout=WAIT_S)
        assert reply["content"]["status"] == "ok"
        assert kinds(answer) == ["status", "execute_input", "execute_result", "status"]
        assert answer[2]["content"]["data"] == {"text/plain": "42"}
        assert client.hb_channel.is_beating()
    finally:
        client.stop_channels()


async def test_an_async_client_finds_the_kernel_ready_over_ipc(shared: SharedRuntime) -> None:
    with tempfile.TemporaryDirectory() as directory:
        there = Path(directory)
        asked = ConnectionInfo(KEY, transport="ipc", ip=f"{directory}/kernel-ipc")
        held = await asyncio.to_thread(Bridged, shared, asked)
        await asyncio.to_thread(held.start)
        sockets = list(there.iterdir())  # noqa: ASYNC240
        assert sorted(path.name for path in sockets) == [f"kernel-ipc-{n}" for n in range(1, 6)]
        assert {stat.S_IMODE(path.stat().st_mode) for path in sockets} == {0o600}
        client = AsyncKernelClient()
        client.load_connection_info(held.info)
        client.start_channels()
        await client.wait_for_ready(timeout=WAIT_S)
        assert (await client.execute("2", reply=True, timeout=WAIT_S))["content"]["status"] == "ok"
        client.stop_channels()
        await asyncio.to_thread(held.close)
        assert not list(there.iterdir())  # noqa: ASYNC240


def test_sockets_whose_files_were_removed_are_there_again_after_a_restart(
    shared: SharedRuntime,
) -> None:
    """jupyter_client removes the files of its ipc sockets at every restart."""
    with tempfile.TemporaryDirectory() as directory:
        asked = ConnectionInfo(KEY, transport="ipc", ip=f"{directory}/kernel-ipc")
        with bridged(shared, asked) as held:
            for _ in range(3):
                held.start()
                with closing(Client(held.info)) as client:
                    assert client.answered("kernel_info_request", {})["status"] == "ok"
                held.stop()
                for path in Path(directory).iterdir():
                    path.unlink()


# -- requests --------------------------------------------------------------------------------------


def test_kernel_info_tells_what_is_there(client: Client) -> None:
    for channel in ("shell", "control"):
        info = client.answered("kernel_info_request", {}, channel)
        assert (info["implementation"], info["protocol_version"]) == ("sbx", "5.4")
        reply, _ = client.run("", user_expressions={"v": "__import__('platform').python_version()"})
        version = reply["user_expressions"]["v"]["data"]["text/plain"]
        assert version == repr(info["language_info"]["version"])


def test_outputs_come_between_busy_and_idle_with_the_header_of_their_cell(client: Client) -> None:
    code = "from IPython.display import display; print('a'); display(1, display_id='d'); 2"
    reply, answer = client.run(code)
    assert kinds(answer) == ["execute_input", "stream", "display_data", "execute_result"]
    assert answer[2]["content"]["transient"] == {"display_id": "d"}
    assert answer[0]["content"]["execution_count"] == reply["execution_count"]
    assert answer[3]["content"]["execution_count"] == reply["execution_count"]


def test_a_failing_cell_shows_its_error_and_replies_it(client: Client) -> None:
    reply, answer = client.run("1 / 0")
    assert kinds(answer) == ["execute_input", "error"]
    assert reply["ename"] == answer[1]["content"]["ename"] == "ZeroDivisionError"
    assert reply["traceback"] == answer[1]["content"]["traceback"]


def test_a_silent_cell_is_not_announced_nor_counted(client: Client) -> None:
    before, _ = client.run("1")
    reply, answer = client.run("x = 5", silent=True)
    assert (reply["status"], answer) == ("ok", [])
    _, answer = client.run("x", store_history=False)
    assert kinds(answer) == ["execute_input", "execute_result"]
    after, _ = client.run("1")
    assert after["execution_count"] == before["execution_count"] + 1


def test_history_remembers_cells_and_their_results(client: Client) -> None:
    client.run("remembered = 'this'")
    client.run("remembered")
    client.run("forgotten = 1", store_history=False)
    asked = {"hist_access_type": "tail", "n": 2, "output": True, "raw": True}
    found = client.answered("history_request", asked)["history"]
    assert [line[2] for line in found] == [["remembered = 'this'", None], ["remembered", "'this'"]]


def test_a_comm_carries_data_and_buffers_both_ways(client: Client) -> None:
    code = (
        "from comm import get_comm_manager\n"
        "def opened(comm, message):\n"
        "    @comm.on_msg\n"
        "    def said(message):\n"
        "        print('handling', message['content']['data'])\n"
        "        comm.send({'back': message['content']['data']}, buffers=message['buffers'])\n"
        "get_comm_manager().register_target('echo', opened)"
    )
    client.run(code)
    large = os.urandom(3 << 20)
    client.shown_by(client.ask("comm_open", {"comm_id": "c1", "target_name": "echo", "data": {}}))
    listed = client.answered("comm_info_request", {"target_name": "echo"})
    assert listed == {"status": "ok", "comms": {"c1": {"target_name": "echo"}}}
    name = client.ask("comm_msg", {"comm_id": "c1", "data": {"n": 1}}, buffers=[b"x", large])
    answer = client.shown_by(name)
    assert printed(answer) == "handling {'n': 1}\n"
    (back,) = (message for message in answer if message["msg_type"] == "comm_msg")
    assert back["content"] == {"comm_id": "c1", "data": {"back": {"n": 1}}}
    assert [bytes(part) for part in back["buffers"]] == [b"x", large]
    client.shown_by(client.ask("comm_close", {"comm_id": "c1", "data": {}}))
    assert client.answered("comm_info_request", {})["comms"] == {}


def test_a_comm_that_nobody_inside_takes_is_closed(client: Client) -> None:
    name = client.ask("comm_open", {"comm_id": "c2", "target_name": "nobody", "data": {}})
    assert "comm_close" in kinds(client.shown_by(name))
    assert client.answered("comm_info_request", {})["comms"] == {}


def test_the_ports_are_told_to_who_asks(client: Client, kernel: Bridged) -> None:
    ports = client.answered("connect_request", {})
    assert {name: ports[name] for name in PORTS} == {name: kernel.info[name] for name in PORTS}


def test_what_a_thread_prints_later_belongs_to_the_cell_that_started_it(client: Client) -> None:
    code = "import threading, os; r, w = os.pipe()\n"
    code += "def late(): os.read(r, 1); print('late')\nthreading.Thread(target=late).start()"
    name = client.execute(code)
    client.shown_by(name)
    client.answered("complete_request", {"code": "o", "cursor_pos": 1})
    client.answered("execute_request", {"code": "os.write(w, b'x')", "silent": True})
    shown = ""
    while "late\n" not in shown:  # print writes the end of the line apart, and the next cell waits
        shown += printed([client.shown()])


def test_a_completion_by_inference_leaves_the_workspace_alone(client: Client) -> None:
    code = "import pathlib; pathlib.Path('größe').exi"
    reply = client.answered("complete_request", {"code": code, "cursor_pos": len(code)})
    assert (reply["matches"], reply["cursor_end"] - reply["cursor_start"]) == (["exists"], 3)
    listed = client.shown_by(client.execute("import os; print('.cache' in os.listdir())"))
    assert printed(listed) == "False\n"


@pytest.mark.parametrize("kind", ["create", "delete", "list"])
def test_subshells_are_refused(client: Client, kind: str) -> None:
    reply = client.answered(f"{kind}_subshell_request", {}, "control")
    assert (reply["status"], reply["evalue"]) == ("error", "a sandbox has no subshells")


def test_a_debugger_is_refused_in_its_own_protocol(client: Client) -> None:
    asked = {"type": "request", "seq": 4, "command": "initialize", "arguments": {}}
    reply = client.answered("debug_request", asked, "control")
    assert (reply["success"], reply["request_seq"], reply["command"]) == (False, 4, "initialize")


# -- input -----------------------------------------------------------------------------------------


def test_output_comes_before_the_cell_ends_and_input_from_who_asked(kernel: Bridged) -> None:
    with ExitStack() as closed:
        asking, other = (closed.enter_context(closing(Client(kernel.info))) for _ in range(2))
        _asked_and_answered(asking, other)


def _asked_and_answered(asking: Client, other: Client) -> None:
    name = asking.execute("print('first'); a = input('name? '); print(a)", allow_stdin=True)
    question = asking.own.get_stdin_msg(timeout=WAIT_S)
    assert question["content"] == {"prompt": "name? ", "password": False}
    assert question["parent_header"]["msg_id"] == name
    other.own.input("mine")
    asking.ask("input_reply", {"value": 5}, "stdin")
    asking.own.input("Ada")
    answer = asking.shown_by(name)
    assert printed(answer) == "first\nAda\n"
    assert asking.reply(name)["status"] == "ok"
    assert not other.own.stdin_channel.msg_ready()


def test_an_answer_that_came_too_early_answers_nothing(client: Client) -> None:
    client.own.input("early")
    name = client.execute("import getpass; print(getpass.getpass())", allow_stdin=True)
    assert client.own.get_stdin_msg(timeout=WAIT_S)["content"]["password"]
    client.own.input("late")
    assert printed(client.shown_by(name)) == "late\n"
    client.reply(name)


def test_a_cell_that_may_not_ask_is_told_so(client: Client) -> None:
    reply, _ = client.run("input()", allow_stdin=False)
    assert reply["ename"] == "StdinNotImplementedError"


def test_a_cell_that_waits_for_input_can_be_interrupted(client: Client) -> None:
    name = client.execute("input()", allow_stdin=True)
    client.own.get_stdin_msg(timeout=WAIT_S)
    assert client.answered("interrupt_request", {}, "control") == {"status": "ok"}
    assert client.reply(name)["ename"] == "KeyboardInterrupt"
    client.shown_by(name)


# -- interrupts, aborts, limits --------------------------------------------------------------------


def test_an_interrupt_ends_the_cell_and_keeps_the_kernel(client: Client) -> None:
    client.run("kept = 1")
    name = client.execute("print('on'); import time\nwhile True: time.sleep(0.01)")
    while "on" not in printed([client.shown()]):
        pass
    assert client.answered("interrupt_request", {}, "control") == {"status": "ok"}
    assert client.reply(name)["ename"] == "KeyboardInterrupt"
    _, answer = client.run("kept")
    assert answer[-1]["content"]["data"] == {"text/plain": "1"}


def test_an_interrupt_while_nothing_runs_changes_nothing(client: Client) -> None:
    assert client.answered("interrupt_request", {}, "control") == {"status": "ok"}
    assert client.run("1")[0]["status"] == "ok"


@pytest.mark.full_tier
def test_cells_behind_one_that_fails_are_aborted(client: Client) -> None:
    failing = client.execute("input(); 1 / 0", allow_stdin=True)
    client.own.get_stdin_msg(timeout=WAIT_S)
    behind = [client.execute(f"ran = {n}") for n in range(300)]
    info = client.ask("kernel_info_request", {})
    time_to_arrive(client)
    client.own.input("")
    assert client.reply(failing)["status"] == "error"
    assert client.reply(info)["status"] == "ok"
    assert kinds(client.shown_by(behind[-1])) == []
    reply, _ = client.run("ran")
    assert reply["ename"] == "NameError"


def time_to_arrive(client: Client) -> None:
    """Until what was sent on the shell channel has arrived, as what was sent later has."""
    for _ in range(3):
        client.answered("kernel_info_request", {}, "control")


def test_cells_behind_one_that_may_fail_run(client: Client) -> None:
    failing = client.execute("1 / 0", stop_on_error=False)
    behind = client.execute("1")
    assert client.reply(failing)["status"] == "error"
    assert client.reply(behind)["status"] == "ok"
    client.shown_by(behind)


@pytest.mark.full_tier
def test_a_cell_beyond_its_time_ends_in_words_of_ours(shared: SharedRuntime) -> None:
    narrower = {"limits": {"wall_time": "1s"}}
    with bridged(shared, ConnectionInfo(KEY), narrower=narrower) as held:
        held.start()
        with closing(Client(held.info)) as client:
            reply, answer = client.run("while True: pass")
        assert (reply["ename"], reply["status"]) == ("Timeout", "error")
        assert answer[-1]["msg_type"] == "error"
        assert answer[-1]["content"]["ename"] == "Timeout"


# -- the end of a kernel ---------------------------------------------------------------------------


def test_a_kernel_that_dies_answers_and_is_told_of_and_the_next_one_finds_the_files(
    mortal: tuple[Bridged, Client],
) -> None:
    held, client = mortal
    client.run("open('kept.txt', 'w').write('kept')")
    name = client.execute("import os; os.kill(os.getpid(), 9)")
    behind = client.execute("1")
    assert client.reply(name)["ename"] == "KernelDied"
    assert client.shown_by(name)[-1]["content"]["ename"] == "KernelDied"
    assert client.reply(behind)["status"] == "aborted"
    assert held.codes.get(timeout=WAIT_S) == 137
    held.start()
    _, answer = client.run("open('kept.txt').read()")
    assert answer[-1]["content"]["data"] == {"text/plain": "'kept'"}
    asked = {"hist_access_type": "range", "session": -1}
    first = client.answered("history_request", asked)["history"]
    assert first[0] == [1, 1, "open('kept.txt', 'w').write('kept')"]


def test_a_kernel_that_dies_while_idle_is_told_of(mortal: tuple[Bridged, Client]) -> None:
    held, client = mortal
    client.run("import threading, os; threading.Timer(0.1, os._exit, [3]).start()")
    assert held.codes.get(timeout=WAIT_S) == 137
    held.stop()
    assert held.codes.empty()


@pytest.mark.parametrize("restart", [True, False])
def test_a_shutdown_is_answered_and_told_to_all(
    mortal: tuple[Bridged, Client], *, restart: bool
) -> None:
    held, client = mortal
    name = client.ask("shutdown_request", {"restart": restart}, "control")
    assert client.reply(name, "control") == {"status": "ok", "restart": restart}
    assert kinds(client.shown_by(name)) == ["shutdown_reply"]
    assert held.codes.get(timeout=WAIT_S) == 0
    held.start()
    assert client.run("1")[0]["execution_count"] == 1


def test_what_runs_and_waits_when_a_kernel_is_stopped_is_answered(
    mortal: tuple[Bridged, Client],
) -> None:
    held, client = mortal
    running = client.execute("print('on'); import time; time.sleep(600)")
    waiting = client.execute("1")
    while "on" not in printed([client.shown()]):
        pass
    held.stop()
    assert client.reply(running)["status"] == "error"
    assert client.reply(waiting)["status"] == "aborted"
    assert held.codes.get(timeout=WAIT_S) == 0


def test_a_bridge_leaves_nothing_on_its_loop(shared: SharedRuntime) -> None:
    async def tasks() -> set[asyncio.Task[Any]]:
        return asyncio.all_tasks() - {asyncio.current_task()}

    before = shared.call(tasks())
    with bridged(shared, ConnectionInfo(KEY)) as held:
        held.start()
        held.stop()
        held.start()
        shared.call(held.bridge.close())
        shared.call(held.bridge.close())
        assert [held.codes.get(timeout=WAIT_S) for _ in range(2)] == [0, 0]
    left = {task for task in shared.call(tasks()) - before if "jupyter" in repr(task.get_coro())}
    assert not left


# -- what nobody should send -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("execute_request", {"code": 5}),
        ("execute_request", {"code": "\ud800"}),
        ("complete_request", {"code": "a", "cursor_pos": 2**70}),
        ("inspect_request", {}),
        ("history_request", {"hist_access_type": "tail", "n": "all"}),
    ],
)
def test_a_request_of_no_known_shape_is_refused(client: Client, kind: str, content: Said) -> None:
    answer = client.own.session.msg(kind, {})
    answer["content"] = json.dumps(content)
    client.own.session.send(client.own.shell_channel.socket, answer)
    reply = client.reply(answer["header"]["msg_id"])
    assert (reply["status"], reply["ename"]) == ("error", "BadRequest")
    shown = ["error"] if kind == "execute_request" else []
    assert kinds(client.shown_by(answer["header"]["msg_id"])) == shown
    assert client.run("1")[0]["status"] == "ok"


def test_a_comm_message_of_any_depth_ends_no_kernel(client: Client) -> None:
    data: Said = {}
    for _ in range(200):
        data = {"in": data}
    client.shown_by(client.ask("comm_msg", {"comm_id": "c", "data": data}))
    client.shown_by(client.ask("comm_msg", {"comm_id": "c", "data": [1]}))
    assert client.run("1")[0]["status"] == "ok"


def test_a_cell_that_is_too_long_is_refused_in_words(client: Client) -> None:
    reply, answer = client.run("#" * (9 << 20))
    assert reply["ename"] == answer[-1]["content"]["ename"] == "TooLarge"
    assert client.run("1")[0]["status"] == "ok"


def test_an_unknown_request_is_passed_over(client: Client) -> None:
    assert kinds(client.shown_by(client.ask("apply_request", {"x": 1}))) == []
    assert client.run("1")[0]["status"] == "ok"


@pytest.mark.full_tier
def test_messages_that_are_not_authentic_are_not_heard(client: Client, kernel: Bridged) -> None:
    stranger = Session(key=b"another key")
    answer = stranger.serialize(stranger.msg("execute_request", {"code": "heard = 1"}))
    own = client.own.session
    replayed = own.serialize(own.msg("execute_request", {"code": "n = globals().get('n', 0) + 1"}))
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        for channel in ("shell", "control", "stdin", "iopub"):
            with context.socket(zmq.DEALER) as raw:
                raw.linger = raw.sndtimeo = 1000
                raw.connect(f"tcp://127.0.0.1:{kernel.info[f'{channel}_port']}")
                for parts in (answer, [b""], [b"\x01\xff"], [b"x"] * 50, answer[:3], answer[1:]):
                    try:
                        raw.send_multipart(parts)
                    except zmq.Again:
                        assert channel == "iopub"  # which refuses this type of socket
        dealer.connect(f"tcp://127.0.0.1:{kernel.info['shell_port']}")
        for parts in (answer, replayed, replayed):
            dealer.send_multipart(parts)
        assert dealer.poll(WAIT_MS)
        reply = own.deserialize(own.feed_identities(dealer.recv_multipart())[1])
        assert reply["content"]["status"] == "ok"
    _, shown = client.run("n, 'heard' in globals()")
    assert shown[-1]["content"]["data"]["text/plain"] == "(1, False)"


def test_a_message_that_is_too_large_ends_its_connection(kernel: Bridged) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        dealer.connect(f"tcp://127.0.0.1:{kernel.info['control_port']}")
        dealer.send(b"x" * (2 << 20))
        assert monitor.poll(WAIT_MS)
        dealer.disable_monitor()
        monitor.close()


@pytest.mark.full_tier
def test_a_client_that_reads_nothing_is_not_waited_for_twice(
    shared: SharedRuntime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The other client keeps up: it reads the four messages of each cell before the next cell. More
    than that could be beyond what waits for a client (`sockets`), and `idle` would be lost, too."""
    monkeypatch.setattr(channels, "_PATIENCE_S", 0.3)
    with (
        bridged(shared, ConnectionInfo(KEY)) as held,
        zmq.Context() as context,
        ExitStack() as closed,
    ):
        held.start()
        deaf = closed.enter_context(context.socket(zmq.SUB))
        deaf.rcvhwm = 1
        deaf.linger = 0
        deaf.setsockopt(zmq.RCVBUF, 4096)
        deaf.subscribe(b"")
        deaf.connect(f"tcp://127.0.0.1:{held.info['iopub_port']}")
        assert deaf.poll(WAIT_MS)  # it was welcomed
        client = closed.enter_context(closing(Client(held.info)))
        said = 0
        with caplog.at_level(logging.WARNING):
            for _ in range(120):
                _, answer = client.run("print('x' * 100_000, end='')")
                said += printed(answer).count("x")
        assert said == 120 * 100_000
        assert [r.message for r in caplog.records if "does not read" in r.message]


def test_nobody_without_the_curve_keys_is_heard(shared: SharedRuntime) -> None:
    public, secret = zmq.curve_keypair()
    keys = {"curve_publickey": public, "curve_secretkey": secret}
    with bridged(shared, ConnectionInfo(KEY, **keys)) as held:  # type: ignore[arg-type]
        held.start()
        with closing(Client(held.info, **keys)) as client:
            assert client.run("1")[0]["status"] == "ok"
        with zmq.Context() as context, context.socket(zmq.SUB) as stranger:
            stranger.linger = 0
            monitor = stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | 0xFFFF)
            stranger.subscribe(b"")
            stranger.connect(f"tcp://127.0.0.1:{held.info['iopub_port']}")
            assert not stranger.poll(300)
            stranger.disable_monitor()
            monitor.close()


# -- sockets that cannot be had --------------------------------------------------------------------


def test_a_connection_that_cannot_be_bound_is_refused(
    shared: SharedRuntime, kernel: Bridged
) -> None:
    taken = kernel.info["shell_port"]
    refused: list[tuple[ConnectionInfo, type[SbxError], str]] = [
        (ConnectionInfo(b""), BadRequest, "connection_unsigned"),
        (ConnectionInfo(KEY, hb_port=taken), Unavailable, "address_in_use"),
        (ConnectionInfo(KEY, hb_port=-1), BadRequest, "invalid_connection"),
        (ConnectionInfo(KEY, ip="203.0.113.1"), BadRequest, "invalid_connection"),
        (ConnectionInfo(KEY, signature_scheme="hmac-md5"), BadRequest, "invalid_connection"),
        (ConnectionInfo(KEY, signature_scheme="none"), BadRequest, "invalid_connection"),
        (ConnectionInfo(KEY, "ipc", ip="@abstract"), BadRequest, "invalid_connection"),
        (ConnectionInfo(KEY, "ipc", ip="/nowhere/at/all"), BadRequest, "invalid_connection"),
        (ConnectionInfo(KEY, "ipc", ip="/tmp/" + "x" * 200), BadRequest, "invalid_connection"),
        (ConnectionInfo(KEY, curve_publickey=b"k" * 40), BadRequest, "invalid_connection"),
    ]
    for asked, error, code in refused:
        with pytest.raises(error) as answer:
            shared.call(Bridge.bind(asked))
        assert answer.value.code == code


def test_a_path_is_taken_from_the_dead_and_not_from_the_living(shared: SharedRuntime) -> None:
    with tempfile.TemporaryDirectory() as directory:
        asked = ConnectionInfo(KEY, "ipc", f"{directory}/k", 1, 2, 3, 4, 5)
        with bridged(shared, asked), pytest.raises(Unavailable):
            shared.call(Bridge.bind(asked))
        asked.path(1).write_text("a file of somebody's")
        with pytest.raises(Unavailable):
            shared.call(Bridge.bind(asked))
        asked.path(1).unlink()
        leave_behind(asked.path(1))
        with bridged(shared, asked) as held:
            assert held.bridge.connection == asked


def leave_behind(path: Path) -> None:
    """A socket's file, as a process leaves it that was killed."""
    import socket

    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))


def test_other_digests_than_the_usual_sign_as_well(shared: SharedRuntime) -> None:
    assert "sha512" in hashlib.algorithms_guaranteed
    with bridged(shared, ConnectionInfo(KEY, signature_scheme="hmac-sha512")) as held:
        held.start()
        with closing(Client(held.info)) as client:
            assert client.run("1")[0]["status"] == "ok"
