"""How output leaves a kernel: at once after a silence, gathered while it flows, never reordered."""

import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from guest_client import KernelClient, in_python

BUSY = "\nimport os\nwhile not os.path.exists('go'): pass"


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[KernelClient]:
    with KernelClient(tmp_path) as client:
        yield client


def test_first_line_of_a_busy_cell_leaves_whole_and_at_once(
    kernel: KernelClient, tmp_path: Path
) -> None:
    """print() writes the newline apart. A crash after the first write cut the line."""
    finish = kernel.start("execute_request", code="print('now', 1)" + BUSY)
    assert kernel.receive().content["text"] == "now 1\n"
    (tmp_path / "go").touch()
    assert finish().text() == ""


def test_part_of_a_line_leaves_while_the_cell_is_busy(kernel: KernelClient, tmp_path: Path) -> None:
    finish = kernel.start("execute_request", code="print('now', end='')" + BUSY)
    assert kernel.receive().content["text"] == "now"
    (tmp_path / "go").touch()
    finish()


def test_what_follows_the_first_text_gathers(kernel: KernelClient) -> None:
    began = time.monotonic()
    cell = kernel.run("print('a')\nfor i in range(50): print(i)")
    took_s = time.monotonic() - began
    texts = [content["text"] for content in cell.of("stream")]
    assert texts[0] == "a\n"
    assert len(texts) < 10 + took_s / 0.01  # of 102 writes: one each 10 ms, as long as that took


def test_gathered_text_goes_out_while_the_cell_is_busy(
    kernel: KernelClient, tmp_path: Path
) -> None:
    finish = kernel.start("execute_request", code="print('a'); print('b')" + BUSY)
    kernel.wait_for_text("a\nb\n")
    (tmp_path / "go").touch()
    assert finish().reply["status"] == "ok"


def test_8_kib_do_not_wait_for_more(kernel: KernelClient) -> None:
    cell = kernel.run("import sys\nfor i in range(64): sys.stdout.write('x' * 1024)")
    sizes = [len(content["text"]) for content in cell.of("stream")]
    assert sum(sizes) == 65536
    assert max(sizes) <= 8 * 1024


@pytest.mark.parametrize(
    "write",
    [
        "write = sys.stdout.buffer.write",
        "write = lambda data: os.write(1, data)",
        "write = lambda data: (sys.stdout.buffer.write(data), os.getpid())",
        "write = io.open(sys.stdout.fileno(), 'wb', buffering=0, closefd=False).write",
    ],
)
def test_parts_of_a_character_are_joined(kernel: KernelClient, write: str) -> None:
    """Each write to the buffer was decoded alone, so that a copy in pieces lost characters."""
    kernel.run(f"import io, os, sys\n{write}")
    cell = kernel.run("for byte in 'é€😀'.encode(): write(bytes([byte]));")
    assert cell.text() == "é€😀"


def test_a_part_of_a_character_does_not_reach_the_next_run(kernel: KernelClient) -> None:
    for write in ("os.write(1, b'a\\xe2');", "sys.stdout.buffer.write(b'a\\xe2');"):
        assert kernel.run(f"import os, sys\n{write}").text() == "a\ufffd"
        assert kernel.run("os.write(1, b'b');").text() == "b"


def test_streams_have_the_attributes_of_those_of_python(kernel: KernelClient) -> None:
    cell = kernel.run(
        "import io, sys\n"
        "def lacks(stream, kind):\n"
        "    names = [name for name in dir(kind) if not name.startswith('_')]\n"
        "    return [name for name in [*names, 'mode'] if not hasattr(stream, name)]\n"
        "lacks(sys.stdout, io.TextIOWrapper), lacks(sys.stdout.buffer, io.BufferedWriter)"
    )
    assert cell.result == "([], [])"
    again = "import codecs\nsys.stdout = codecs.getwriter('utf-8')(sys.stdout.detach())\nprint('é')"
    assert kernel.run(again).text() == "é\n"


def test_every_run_begins_after_a_silence(kernel: KernelClient) -> None:
    for number in range(3):
        assert kernel.run(f"print({number})").of("stream")[0]["text"] == f"{number}\n"


def test_a_result_comes_with_its_reply(kernel: KernelClient) -> None:
    """One write and one wake-up of the host, for the most frequent of all cells."""
    kernel.run("1")
    kernel.start("execute_request", code="40 + 2")
    piece = kernel.sock.recv(1 << 16)
    (length,) = struct.unpack_from(">I", piece)
    assert b"execute_result" in piece[: 4 + length]
    assert b"execute_reply" in piece[4 + length :]


def test_a_result_does_not_wait_for_what_is_done_at_the_end_of_a_cell(
    kernel: KernelClient, tmp_path: Path
) -> None:
    """Matplotlib draws then."""
    os.mkfifo(tmp_path / "drawn")
    kernel.run(
        "runs = []\n"
        "def draw():\n"
        "    runs.append(1)\n"
        "    len(runs) == 1 or open('drawn').read()\n"
        "get_ipython().events.register('post_execute', draw)"
    )
    finish = kernel.start("execute_request", code="'shown'")
    assert kernel.receive().type == "execute_result"
    (tmp_path / "drawn").write_text("")
    assert finish().reply["status"] == "ok"


def test_a_value_shown_in_the_middle_of_a_cell_is_shown_then(
    kernel: KernelClient, tmp_path: Path
) -> None:
    finish = kernel.start("execute_request", code="import sys\nsys.displayhook(1)" + BUSY)
    assert kernel.receive().type == "execute_result"
    (tmp_path / "go").touch()
    assert finish().reply["status"] == "ok"


@pytest.mark.full_tier
@pytest.mark.parametrize(
    ("mode", "code"),
    [
        ("all", f"7{BUSY}"),
        ("last", "if True:\n    7\n    while not os.path.exists('go'): pass"),
        ("last_expr", f"get_ipython().run_cell('7'){BUSY}"),
        ("last_expr", "[get_ipython().run_cell('7'), open('go').read()][0]"),
        ("last_expr", "sys.displayhook(7), open('go').read()"),
    ],
)
def test_a_value_after_which_the_cell_runs_on_is_shown_then(
    kernel: KernelClient, tmp_path: Path, mode: str, code: str
) -> None:
    """Not only with its reply, for which it was held where nothing else can follow it."""
    os.mkfifo(tmp_path / "go") if "open('go')" in code else None
    kernel.run(f"import os, sys; get_ipython().ast_node_interactivity = {mode!r}")
    finish = kernel.start("execute_request", code=code)
    shown = kernel.receive()
    assert (shown.type, shown.content["data"]) == ("execute_result", {"text/plain": "7"})
    (tmp_path / "go").write_text("")
    assert finish().reply["status"] == "ok"


@pytest.mark.full_tier
@pytest.mark.parametrize(
    ("mode", "code", "expected"),
    [
        ("last_expr", "7", [True]),
        ("all", "7\n8", [False, False]),
        ("last_expr", "ran = get_ipython().run_cell('7')", [False]),
        ("last_expr", "ran = get_ipython().run_cell('7')\n8", [False, True]),
    ],
)
def test_only_the_value_that_ends_a_cell_is_held(
    tmp_path: Path, mode: str, code: str, expected: list[bool]
) -> None:
    """The others are with the host at once, and wait for no other thread."""
    answer = in_python(
        "from sbx.guest.kernel import shell\n"
        "from sbx.guest.start.warmup import _run\n"
        "ip, held = shell.build(), []\n"
        f"ip.ast_node_interactivity = {mode!r}\n"
        "ip.attach(lambda kind, content, hold: held.append(hold))\n"
        f"_run(ip, {code!r})\n"
        "print(held)",
        tmp_path,
    )
    assert answer.splitlines()[-1] == str(expected)


def test_what_was_held_back_keeps_its_place(kernel: KernelClient) -> None:
    kernel.run("ip = get_ipython(); ip.events.register('post_execute', lambda: print('after'));")
    assert kernel.run("print('before')\n'value'").kinds == ["stdout", "execute_result", "stdout"]


@pytest.mark.full_tier
def test_a_kernel_is_made_without_a_thread_and_before_it_knows_for_whom(tmp_path: Path) -> None:
    """So an idle one is ready, and can still be sealed."""
    answer = in_python(
        "import os, socket\n"
        "from sbx.guest.kernel.setup import prepare\n"
        "shell, missing = prepare()\n"
        "from sbx.guest.kernel.loop import KernelLoop\n"
        "stdout = os.dup(1)  # which a kernel takes over\n"
        "KernelLoop(socket.socketpair()[0], shell)\n"
        "os.write(stdout, b'%d\\n' % len(os.listdir('/proc/self/task')))",
        tmp_path,
    )
    assert answer == "1\n"
    assert list(tmp_path.iterdir()) == []
