"""What `Sandbox` promises, in this process and in a service alike: each test runs on both."""

import asyncio
import itertools
import re
import threading
from pathlib import Path

import pytest

from both_faces.faces import Make, says
from sbx import Sandbox, SbxError
from sbx.errors import BadRequest, Closed, Denied, InvalidPath, NotFound, TooLarge
from sbx.protocol.runs import Clear, Display, Result, RunEnd, RunStart, Stderr, Stdout

PENGUINS = "species,mass\nAdelie,3750\nGentoo,5000\nAdelie,3800\n"
TABLE = """\
df = pd.read_csv('/workspace/uploads/temparea/penguins.csv')
df.groupby('species').size()
"""


@pytest.mark.full_tier
def test_a_data_analysis_from_upload_to_figure(tmp_path: Path, cells: Sandbox, make: Make) -> None:
    (tmp_path / "penguins.csv").write_text(PENGUINS)
    with make(policy="data-science") as box:
        box.uploads.put(tmp_path / "penguins.csv")
        run = box.run(
            "df = pd.read_csv('/workspace/uploads/temparea/penguins.csv')\n"
            "df.groupby('species').size()",
        )
        assert run.error is not None
        assert run.error.name == "NameError"
        run = box.run(f"import pandas as pd\n{TABLE}")
        assert (run.status, run.execution_count, run.error) == ("ok", 2, None)
        assert run.result == "species\nAdelie    2\nGentoo    1\ndtype: int64"
        assert run.text == f"{run.result}\n"
        assert 0 < run.duration_s < 60
        figure = box.run("import matplotlib.pyplot as plt\nplt.plot(df.mass)\nplt.show()")
        assert [set(shown) for shown in figure.outputs if "image/png" in shown]
        box.run("plt.plot(df.mass); plt.savefig('mass.png')")
        assert box.files.read_bytes("mass.png").startswith(b"\x89PNG")


@pytest.mark.full_tier
def test_files_are_written_read_and_listed(cells: Sandbox) -> None:
    assert cells.files.write("notes/a.txt", "hi é") == 5
    assert cells.files.read("notes/a.txt") == "hi é"
    assert cells.run("open('notes/a.txt').read()").result == "'hi é'"
    assert [entry.name for entry in cells.files.list("notes")] == ["a.txt"]
    assert cells.files.stat("/workspace/notes/a.txt").size == 5
    assert cells.files.delete("notes")
    with pytest.raises(NotFound):
        cells.files.read("notes/a.txt")


def test_uploads_are_read_only_inside(cells: Sandbox) -> None:
    cells.uploads.put_bytes("a.csv", b"1,2\n")
    assert [upload.name for upload in cells.uploads.list()] == ["a.csv"]
    assert cells.uploads.read_bytes("a.csv") == b"1,2\n"
    run = cells.run("open('uploads/temparea/a.csv', 'w')")
    assert run.error is not None
    assert run.error.name == "OSError"
    cells.uploads.delete("a.csv")
    assert cells.run("import os; os.listdir('uploads/temparea')").result == "[]"


def test_the_receipt_is_there_as_long_as_the_kernel(cells: Sandbox, make: Make) -> None:
    with make() as box:
        assert box.receipt is None
        receipt = box.start()
        assert receipt == box.receipt
        assert receipt.host_uid != 0
        box.stop()
        assert box.receipt is None


def test_state_is_kept_between_cells(cells: Sandbox) -> None:
    first = cells.run("kept = 41")
    second = cells.run("kept + 1")
    assert (first.result, second.result, second.state_lost) == (None, "42", False)
    assert first.execution_count is not None
    assert second.execution_count == first.execution_count + 1


def test_streams_are_told_apart_and_in_order(cells: Sandbox) -> None:
    run = cells.run("import sys\nprint('a'); print('b', file=sys.stderr); print('c')\n'd'")
    assert (run.stdout, run.stderr, run.result) == ("a\nc\n", "b\n", "'d'")
    assert run.text == "a\nb\nc\n'd'\n"


def test_events_come_live_and_in_order(cells: Sandbox) -> None:
    code = """
import sys, time
from IPython.display import HTML, display, clear_output
print('out', flush=True); time.sleep(0.1)
print('err', file=sys.stderr); time.sleep(0.1)
display(HTML('<b>x</b>')); clear_output(wait=True)
'end'
"""
    events = list(cells.stream(code))
    kinds = [kind for kind, _ in itertools.groupby(map(type, events))]
    assert kinds == [RunStart, Stdout, Stderr, Display, Clear, Result, RunEnd]
    end = events[-1]
    assert isinstance(end, RunEnd)
    assert (end.run.status, end.run.result) == ("ok", "'end'")


@pytest.mark.parametrize(
    ("shown", "mime", "start"),
    [
        ("HTML('<b>x</b>')", "text/html", "<b>x</b>"),
        ("Image(b'\\x89PNG\\r\\n\\x1a\\n' + bytes(30), format='png')", "image/png", "iVBORw0K"),
    ],
)
def test_rich_output(cells: Sandbox, shown: str, mime: str, start: str) -> None:
    run = cells.run(f"from IPython.display import *\ndisplay({shown})")
    assert run.status == "ok", run.error
    assert run.outputs[0][mime].startswith(start)


def test_clear_output_takes_away_what_was_shown(cells: Sandbox) -> None:
    run = cells.run(
        "from IPython.display import clear_output\nprint('old')\nclear_output()\nprint('new')"
    )
    assert (run.text, run.stdout) == ("new\n", "old\nnew\n")


def test_an_error_reads_as_in_jupyter(cells: Sandbox) -> None:
    run = cells.run("def f():\n    return 1 / 0\nf()")
    assert (run.status, run.ok) == ("error", False)
    assert run.error is not None
    assert (run.error.name, run.error.value) == ("ZeroDivisionError", "division by zero")
    assert "Traceback (most recent call last)" in run.error.traceback
    plain = re.sub(r"\x1b\[[\d;]*m", "", run.error.traceback)
    assert "----> 2     return 1 / 0" in plain
    assert "/opt/sbx" not in plain


def test_top_level_await_magics_and_shell_lines(cells: Sandbox) -> None:
    assert cells.run("import asyncio; await asyncio.sleep(0.01, 'slept')").result == "'slept'"
    assert cells.run("%%bash\necho from bash").stdout == "from bash\n"
    assert cells.run("!echo to the screen").stdout == "to the screen\n"
    assert cells.run("lines = !echo kept; echo too\nlist(lines)").result == "['kept', 'too']"
    assert "Wall time" in cells.run("%time 1").stdout


def test_input_is_answered_by_a_function(cells: Sandbox) -> None:
    asked: list[str] = []

    def answer(prompt: str) -> str:
        asked.append(prompt)
        return "Ann"

    run = cells.run("a = input('name? '); b = input('again? '); (a, b)", on_input=answer)
    assert (run.result, asked) == ("('Ann', 'Ann')", ["name? ", "again? "])


def test_input_is_answered_by_a_coroutine(cells: Sandbox) -> None:
    async def answer(prompt: str) -> str:
        await asyncio.sleep(0.01)
        return prompt.upper()

    assert cells.run("input('x')", on_input=answer).result == "'X'"


def test_input_that_nobody_answers_fails_in_the_cell(cells: Sandbox) -> None:
    run = cells.run("input('name? ')", timeout=55)
    assert run.status == "error"
    assert run.error is not None
    assert "input" in run.error.value


def test_an_answering_function_that_fails_interrupts_the_cell(cells: Sandbox) -> None:
    def answer(prompt: str) -> str:
        raise RuntimeError("nobody home")

    run = cells.run("input()", on_input=answer, timeout=55)
    assert run.status == "interrupted"
    assert cells.run("1").result == "1"


def test_interrupt_from_another_thread_keeps_the_state(cells: Sandbox) -> None:
    cells.run("before = 5")
    events = cells.stream("import time\nprint('busy')\ntime.sleep(600)")
    for event in events:
        if says(event, "busy"):
            interrupting = threading.Thread(target=cells.interrupt)
            interrupting.start()
            interrupting.join()
    assert isinstance(event, RunEnd)
    assert (event.run.status, event.run.state_lost) == ("interrupted", False)
    assert cells.run("before").result == "5"


@pytest.mark.full_tier
def test_a_time_out_interrupts_and_keeps_the_state(cells: Sandbox) -> None:
    cells.run("before = 6")
    run = cells.run("import time\nprint('x')\ntime.sleep(600)", timeout=2)
    assert (run.status, run.stdout, run.state_lost) == ("timeout", "x\n", False)
    assert run.error is not None
    assert run.error.name == "Timeout"
    assert cells.run("before").result == "6"


@pytest.mark.parametrize("timeout", [0, float("nan"), "x", True])
def test_a_time_out_that_is_none(cells: Sandbox, timeout: float) -> None:
    with pytest.raises(BadRequest) as raised:
        cells.run("1", timeout=timeout)
    assert (raised.value.code, bool(raised.value.hint)) == ("invalid_timeout", True)


@pytest.mark.parametrize("timeout", [3601, float("inf")])
def test_a_time_out_beyond_the_policy_s(cells: Sandbox, timeout: float) -> None:
    with pytest.raises(BadRequest) as raised:
        cells.shell("true", timeout=timeout)
    assert (raised.value.code, bool(raised.value.hint)) == ("limit_widened", True)


@pytest.mark.parametrize("code", ["x = '\udc80'", None, b"1"])
def test_code_that_is_no_text(cells: Sandbox, code: str) -> None:
    with pytest.raises(BadRequest) as raised:
        cells.run(code)
    assert (raised.value.code, bool(raised.value.hint)) == ("invalid_code", True)


def test_a_cell_of_50_mb(cells: Sandbox) -> None:
    with pytest.raises(TooLarge) as raised:
        cells.run("x" * 50_000_000)
    assert raised.value.code == "code_too_large"
    assert raised.value.hint
    assert raised.value.details["limit"] == 8 << 20


def test_code_may_hold_what_python_refuses(cells: Sandbox) -> None:
    run = cells.run("x = '\0'")
    assert run.error is not None
    assert run.error.name in ("SyntaxError", "ValueError")


def test_uploads_that_cannot_be(cells: Sandbox, make: Make, tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        cells.uploads.put(tmp_path / "missing.csv")
    with pytest.raises(InvalidPath):
        cells.uploads.put(tmp_path)
    with pytest.raises(InvalidPath):
        cells.uploads.put_bytes("a/b", b"")
    with pytest.raises(BadRequest):
        cells.uploads.put_bytes("a", None)  # type: ignore[arg-type]
    (tmp_path / "large").write_bytes(b"x" * 2000)
    with make(narrower={"uploads": {"max_file_size": "1KiB"}}) as box:
        with pytest.raises(TooLarge) as raised:
            box.uploads.put(tmp_path / "large")
        assert raised.value.details["limit"] == 1024
        assert box.uploads.list() == ()


@pytest.mark.parametrize("path", ["../x", "\udc80"])
def test_a_path_that_leads_out(cells: Sandbox, path: str) -> None:
    with pytest.raises(InvalidPath):
        cells.files.read(path)
    with pytest.raises(InvalidPath):
        cells.files.write(path, "x")


@pytest.mark.parametrize("content", ["\udc80", None])
def test_content_that_no_file_can_have(cells: Sandbox, content: str) -> None:
    with pytest.raises(BadRequest) as raised:
        cells.files.write("a", content)
    assert raised.value.code == "invalid_content"


def test_a_file_that_is_no_text(cells: Sandbox) -> None:
    cells.files.write("raw", b"\xff")
    with pytest.raises(BadRequest, match="UTF-8"):
        cells.files.read("raw")
    assert cells.files.read_bytes("raw") == b"\xff"


@pytest.mark.parametrize("name", ["a/b", "", ".."])
def test_a_conversation_s_name_that_cannot_be(cells: Sandbox, name: str) -> None:
    with pytest.raises(InvalidPath):
        cells.conversation(name)


def test_a_request_may_not_widen(cells: Sandbox, make: Make) -> None:
    with pytest.raises(BadRequest) as raised:
        make(narrower={"limits": {"memory_max": "64GiB"}})
    assert raised.value.code == "limit_widened"


@pytest.mark.full_tier
def test_a_policy_without_a_shell_says_so(cells: Sandbox, make: Make) -> None:
    try:
        strict = make("strict")
    except SbxError as error:
        pytest.skip(f"strict cannot be enforced here: {error}")
    with strict as box:
        with pytest.raises(Denied) as raised:
            box.shell("ls")
        assert raised.value.code == "capability_not_supported"
        run = box.run("import socket")
        assert run.status == "error"
        assert box.run("1 + 1").result == "2"


def test_everything_after_close_is_refused_and_closing_again_is_not(
    cells: Sandbox, make: Make
) -> None:
    box = make()
    other = box.conversation("other")
    box.run("1")
    box.close()
    box.close()
    for call in (
        lambda: box.run("1"),
        lambda: list(box.stream("1")),
        lambda: box.shell("true"),
        lambda: box.files.read("a"),
        box.uploads.list,
        box.start,
        lambda: box.conversation("new"),
        lambda: other.run("1"),
    ):
        with pytest.raises(Closed) as raised:
            call()
        assert raised.value.hint
