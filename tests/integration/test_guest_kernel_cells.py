"""Cells of the real kernel over its socket, without walls."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from guest_client import Cell, KernelClient, eventually


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KernelClient]:
    with KernelClient(tmp_path_factory.mktemp("kernel")) as client:
        yield client


def test_ready_names_the_versions(kernel: KernelClient) -> None:
    assert set(kernel.ready) == {"python", "ipython"}


def test_importing_the_kernel_imports_neither_ipython_nor_asyncio(tmp_path: Path) -> None:
    import subprocess
    import sys

    from guest_client import ROOT

    code = "import sys, sbx.guest.kernel.setup, sbx.guest.frames; print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True).split()
    assert not {"IPython", "asyncio", "traitlets", "ctypes"} & set(loaded)


def test_variables_and_results_last(kernel: KernelClient) -> None:
    kernel.run("value = 20")
    cell = kernel.run("value + 1")
    count = cell.reply["execution_count"]
    assert cell.of("execute_result") == [
        {"execution_count": count, "data": {"text/plain": "21"}, "metadata": {}}
    ]
    assert cell.reply == {"status": "ok", "execution_count": count, "payload": []}
    assert kernel.run(f"_ == Out[{count}] == _{count} == 21").result == "True"


def test_a_semicolon_silences_the_result(kernel: KernelClient) -> None:
    assert kernel.run("1 + 1;").frames == []
    assert kernel.run("';'").result == "';'"


def test_silent_runs_neither_count_nor_show(kernel: KernelClient) -> None:
    before = kernel.run("None").reply["execution_count"]
    silent = kernel.run("hidden = 1; hidden", silent=True)
    assert (silent.frames, silent.reply["execution_count"]) == ([], before)
    assert kernel.run("hidden", store_history=False).reply["execution_count"] == before


def test_the_namespace_is_a_clean_main(kernel: KernelClient) -> None:
    code = (
        "import sys; (__name__, '__file__' in globals(), sys.argv, sys.path[0], sys.stdin.read())"
    )
    assert kernel.run(code).result == "('__main__', False, [''], '', '')"
    assert kernel.run("get_ipython().kernel is not None").result == "True"


def test_modules_of_the_working_directory_can_be_imported(kernel: KernelClient) -> None:
    kernel.run("open('mine.py', 'w').write('answer = 42')")
    assert kernel.run("import mine; mine.answer").result == "42"


@pytest.mark.parametrize("code", ["a\udc80 = 1", "'\udc80", "x = '\0'"])
def test_code_that_is_no_text_is_an_error_of_the_cell(kernel: KernelClient, code: str) -> None:
    assert kernel.run(code).reply["status"] == "error"
    assert kernel.run("1").result == "1"


def test_exception_groups_reach_the_reply(kernel: KernelClient) -> None:
    cell = kernel.run("raise ExceptionGroup('many', [ValueError('one')])")
    assert cell.reply["ename"] == "ExceptionGroup"
    assert "ValueError: one" in "\n".join(cell.reply["traceback"])


@pytest.mark.parametrize(
    "code",
    [
        "raise ExceptionGroup('g', [ValueError('in' + 'ner')])",
        "try:\n    raise ExceptionGroup('g', [ValueError('in' + 'ner')])\n"
        "except ExceptionGroup: raise KeyError('k')",
        "import asyncio\nasync def bad(): raise ValueError('in' + 'ner')\n"
        "async with asyncio.TaskGroup() as group: group.create_task(bad())",
    ],
)
def test_an_exception_group_is_one_error_frame(kernel: KernelClient, code: str) -> None:
    """IPython printed it to stderr, in place of an error, with frames of its own."""
    cell = kernel.run(code)
    assert cell.kinds == ["error"]
    traceback = "\n".join(cell.of("error")[0]["traceback"])
    assert "ValueError: inner" in traceback
    assert "IPython" not in traceback


@pytest.mark.parametrize("code", ["%no_such_magic", "get_ipython().run_line_magic('no_such', '')"])
def test_a_usage_error_is_one_error_frame(kernel: KernelClient, code: str) -> None:
    """Its text was on stderr and in the reply, so most callers read it twice."""
    cell = kernel.run(code)
    assert cell.kinds == ["error"]
    (line,) = cell.of("error")[0]["traceback"]
    assert line.startswith("UsageError: Line magic function")
    assert cell.reply["ename"] == "UsageError"


def test_an_error_in_a_repr_is_the_cells_error(kernel: KernelClient) -> None:
    cell = kernel.run("class Bad:\n    def __repr__(self): raise KeyError('no')\nBad()")
    assert cell.kinds == ["error"]
    assert (cell.reply["status"], cell.reply["ename"]) == ("error", "KeyError")


def test_sys_exit_and_exit_leave_the_kernel_alive(kernel: KernelClient) -> None:
    assert kernel.run("import sys; sys.exit(3)").of("error")[0]["ename"] == "SystemExit"
    for leave in ("exit(3)\nprint('went on')", "quit()\nprint('went on')", "exit"):
        cell = kernel.run(leave)
        assert cell.of("error")[0]["ename"] == "SystemExit"
        assert cell.text() == ""
        assert cell.text("stderr") == ""
    assert kernel.run("1").result == "1"


# --- Streams.


def test_prints_and_displays_keep_their_order(kernel: KernelClient) -> None:
    cell = kernel.run("print('a'); display(1); print('b', end=''); display(2); print('c')")
    assert cell.kinds == ["stdout", "display_data", "stdout", "display_data", "stdout"]


@pytest.mark.parametrize("printing", ["print('now', end='')", "print('now\\r', end='')"])
def test_the_first_output_does_not_wait_for_the_cell(kernel: KernelClient, printing: str) -> None:
    finish = kernel.start("execute_request", code=f"{printing}\nwhile True: pass")
    frame = kernel.receive()
    assert frame.content["text"].startswith("now")
    kernel.interrupt()
    assert finish().reply["ename"] == "KeyboardInterrupt"


def test_many_small_prints_become_few_frames(kernel: KernelClient) -> None:
    cell = kernel.run("for number in range(5000): print(number)")
    assert cell.text() == "".join(f"{number}\n" for number in range(5000))
    assert len(cell.frames) < 500


def test_flush_sends_at_once(kernel: KernelClient) -> None:
    cell = kernel.run("import sys, os\nfor c in 'abc': sys.stdout.write(c); sys.stdout.flush()")
    assert [c["text"] for c in cell.of("stream")] == ["a", "b", "c"]


def test_descriptors_1_and_2_are_captured(kernel: KernelClient) -> None:
    cell = kernel.run("import os; os.write(1, b'one\\xff'); os.write(2, b'two');")
    assert (cell.text(), cell.text("stderr")) == ("one\ufffd", "two")


def test_what_c_code_buffers_comes_before_the_reply(kernel: KernelClient) -> None:
    assert kernel.run("import ctypes; ctypes.CDLL(None).printf(b'from C');").text() == "from C"


def test_a_finished_childs_output_keeps_its_place(kernel: KernelClient) -> None:
    cell = kernel.run(
        "import subprocess\nfor i in range(30):\n"
        "    print('p', i); subprocess.run(['echo', f'c {i}'])\nprint('end')"
    )
    lines = [line for i in range(30) for line in (f"p {i}", f"c {i}")]
    assert cell.text().splitlines() == [*lines, "end"]


def test_a_childs_last_pipe_full_comes_before_the_reply(kernel: KernelClient) -> None:
    cell = kernel.run("import subprocess; subprocess.run(['head', '-c', '300000', '/dev/zero']);")
    assert len(cell.text()) == 300_000


def test_a_thread_may_print_when_no_cell_runs(kernel: KernelClient) -> None:
    kernel.run("import threading; threading.Timer(0.05, print, ['later']).start()")
    kernel.wait_for_text("later\n")


def test_the_kernel_survives_a_cell_that_closes_its_descriptors(tmp_path: Path) -> None:
    with KernelClient(tmp_path) as kernel:
        kernel.run("import os; os.close(1); os.close(2)")
        assert kernel.run("print('still')").text() == "still\n"


def test_lone_surrogates_are_printed_as_escapes(kernel: KernelClient) -> None:
    assert kernel.run("print('\\udc80')").text() == "\\udc80\n"


def test_stdout_has_what_programs_expect_of_a_stream(kernel: KernelClient) -> None:
    cell = kernel.run(
        "import sys; sys.stdout.buffer.write(b'bytes\\n'); sys.stdout.reconfigure(errors='strict');"
        "(sys.stdout.encoding, sys.stdout.fileno(), sys.stderr.isatty(), sys.stdout.writable())"
    )
    assert (cell.text(), cell.result) == ("bytes\n", "('utf-8', 1, False, True)")
    assert kernel.run("sys.stdout.write(3)").reply["ename"] == "TypeError"
    assert kernel.run("sys.stdout.close(); print('open')").text() == "open\n"


def test_output_stops_at_the_limit_and_says_so_once(kernel: KernelClient) -> None:
    cell = kernel.run("for i in range(100_000): print('é' * 10)", output_max=1001)
    assert len(cell.text().encode()) <= 1001
    assert len(cell.text().encode()) >= 999
    assert cell.of("output_limit") == [{"limit": 1001}]
    assert kernel.run("print('again')").text() == "again\n"


def test_displays_count_towards_the_limit(kernel: KernelClient) -> None:
    cell = kernel.run("for i in range(100): display('x' * 1000)", output_max=10_000)
    assert 1 <= len(cell.of("display_data")) < 10
    assert cell.of("output_limit") == [{"limit": 10_000}]


def test_an_error_is_told_even_beyond_the_limit(kernel: KernelClient) -> None:
    assert kernel.run("print('x' * 100); 1/0", output_max=10).of("error")


def test_a_flood_nobody_reads_does_not_grow_memory(kernel: KernelClient) -> None:
    finish = kernel.start("execute_request", code="while True: print('x' * 1000)")
    kernel.receive()
    assert eventually(lambda: _is_blocked(kernel))
    before = _resident(kernel)
    time.sleep(0.2)
    assert _resident(kernel) - before < 4 << 20
    kernel.interrupt()
    assert finish().reply["ename"] == "KeyboardInterrupt"


def test_a_huge_result_is_cut_and_says_so(kernel: KernelClient) -> None:
    cell = kernel.run("'y' * 100_000_000")
    assert len(cell.result) < 1_000_000
    assert "[cut: 100000002 characters in all]" in cell.result


def test_a_huge_picture_makes_way_for_a_note(tmp_path: Path) -> None:
    with KernelClient(tmp_path, mime_max=1000) as kernel:
        cell = kernel.run("display({'text/plain': 'p', 'image/png': b'0' * 5000}, raw=True)")
    (shown,) = cell.of("display_data")
    assert "image/png of 6666 bytes is not shown" in shown["data"]["text/plain"]


# --- Rich display.


@pytest.mark.parametrize(
    ("method", "value", "mime"),
    [
        ("_repr_html_", "<b>x</b>", "text/html"),
        ("_repr_svg_", "<svg/>", "image/svg+xml"),
        ("_repr_markdown_", "*x*", "text/markdown"),
        ("_repr_latex_", "$x$", "text/latex"),
        ("_repr_json_", {"a": [1]}, "application/json"),
        ("_repr_png_", b"\x89PNG\r\n\x1a\n", "image/png"),
    ],
)
def test_rich_reprs(kernel: KernelClient, method: str, value: object, mime: str) -> None:
    cell = kernel.run(f"class R:\n    def {method}(self): return {value!r}\nR()")
    shown = cell.of("execute_result")[0]["data"][mime]
    assert shown == ("iVBORw0KGgo=" if isinstance(value, bytes) else value)


def test_a_mimebundle_goes_out_as_it_is(kernel: KernelClient) -> None:
    cell = kernel.run(
        "class M:\n def _repr_mimebundle_(self, **kw): return {'x/y': {'n': float('nan')}}\nM()"
    )
    assert cell.of("execute_result")[0]["data"]["x/y"] == {"n": "nan"}


def test_formatters_registered_for_plain_types_are_used(kernel: KernelClient) -> None:
    kernel.run("html = get_ipython().display_formatter.formatters['text/html']")
    kernel.run("html.for_type(int, lambda n: f'<i>{n}</i>')")
    assert kernel.run("7").of("execute_result")[0]["data"]["text/html"] == "<i>7</i>"
    kernel.run("html.pop(int)")
    assert "text/html" not in kernel.run("7").of("execute_result")[0]["data"]


def test_something_that_is_no_json_is_an_error_of_the_cell(kernel: KernelClient) -> None:
    cell = kernel.run("display({'application/json': object()}, raw=True)")
    assert cell.reply["status"] == "error"
    assert kernel.run("1").result == "1"


# --- asyncio.


def test_background_tasks_go_on_between_cells(kernel: KernelClient) -> None:
    code = "async def tick():\n    await asyncio.sleep(0.05); print('tick')\n"
    kernel.run(f"import asyncio\n{code}task = asyncio.create_task(tick())")
    kernel.wait_for_text("tick\n")


def test_background_tasks_go_on_while_a_cell_awaits(kernel: KernelClient) -> None:
    code = "async def one(): pass\nt = asyncio.create_task(one())\nawait asyncio.sleep(0.01)"
    assert kernel.run(f"import asyncio\n{code}\nt.done()").result == "True"


def test_context_variables_last_between_cells(kernel: KernelClient) -> None:
    kernel.run("import contextvars; v = contextvars.ContextVar('v'); v.set(5);")
    assert kernel.run("await asyncio.sleep(0); v.get()").result == "5"


@pytest.mark.parametrize(
    "code",
    [
        "import asyncio\nfor t in asyncio.all_tasks(): t.cancel()",
        "import asyncio; asyncio.get_event_loop().stop()",
        "import asyncio, sys\nasync def leave(): sys.exit()\nt = asyncio.create_task(leave())",
        "import asyncio; asyncio.current_task().cancel(); await asyncio.sleep(1)",
    ],
)
def test_no_use_of_asyncio_ends_the_kernel(kernel: KernelClient, code: str) -> None:
    kernel.run(code)
    assert kernel.run("await asyncio.sleep(0.01, 'alive')").result == "'alive'"


# --- Interrupts.


@pytest.mark.full_tier
@pytest.mark.parametrize(
    "code",
    [
        "print('go'); import time; time.sleep(60)",
        "print('go')\nwhile True: pass",
        "import asyncio; print('go'); await asyncio.sleep(60)",
        "async def hog():\n    print('go')\n    while True: pass\nawait asyncio.gather(hog())",
        "async def hog():\n    print('go')\n    while True: pass\nawait hog()",
        "import asyncio; print('go'); await asyncio.to_thread(__import__('time').sleep, 0.5)",
        "import subprocess; print('go'); subprocess.run(['sleep', '60'])",
        "print('go')\n!sleep 60",
        "class Slow:\n  def __repr__(self):\n    print('go')\n    while True: pass\nSlow()",
        "import asyncio, time\nasync def hog():\n    print('go')\n    time.sleep(60)\n"
        "await asyncio.gather(*[hog() for _ in range(9)])",  # the others are ready to run
        "import asyncio, time\nasync def hog():\n    async with lock:\n        print('go')\n"
        "        time.sleep(60)\nlock = asyncio.Lock()\n"
        "await asyncio.gather(*[hog() for _ in range(9)])",
        "import asyncio, time\n"
        "asyncio.get_running_loop().call_soon(lambda: (print('go'), time.sleep(60)))\n"
        "await asyncio.sleep(90)",
    ],
)
def test_an_interrupt_reads_keyboard_interrupt(kernel: KernelClient, code: str) -> None:
    finish = kernel.start("execute_request", code=code)
    kernel.wait_for_text("go")
    kernel.interrupt()
    cell = finish()
    assert cell.reply["ename"] == "KeyboardInterrupt", cell.reply
    assert kernel.run("await __import__('asyncio').sleep(0, 1)").result == "1"


def test_an_idle_kernel_ignores_interrupts(kernel: KernelClient) -> None:
    for _ in range(20):
        kernel.interrupt()
    assert kernel.run("1").result == "1"
    assert kernel.hears_nothing_for(0.1)


def test_an_interrupt_that_comes_before_the_request_is_read_hits_that_request_only(
    kernel: KernelClient,
) -> None:
    """On a busy host it was lost, and the cell ran on."""
    for earlier, ename in ((0, "KeyboardInterrupt"), (1, None)):
        assert kernel.run("1").result == "1"
        os.kill(kernel.process.pid, signal.SIGSTOP)
        finish = kernel.start("execute_request", code="'ran'")
        kernel.send("interrupt", {}, str(kernel._count - earlier))
        kernel.interrupt()
        os.kill(kernel.process.pid, signal.SIGCONT)
        assert finish().reply.get("ename") == ename


def test_a_cell_may_not_disable_the_interrupts_of_the_next(kernel: KernelClient) -> None:
    kernel.run("import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)")
    finish = kernel.start("execute_request", code="print('go')\nwhile True: pass")
    kernel.wait_for_text("go")
    kernel.interrupt()
    assert finish().reply["ename"] == "KeyboardInterrupt"


@pytest.mark.full_tier
def test_interrupts_at_any_moment_leave_one_reply_each(kernel: KernelClient) -> None:
    """Wherever they strike, also in the middle of a frame."""
    code = "import time\nfor i in range(200): print('x' * 3000); time.sleep(0)"
    for delay in range(40):
        finish = kernel.start("execute_request", code=code)
        time.sleep(delay * 0.0005)
        kernel.interrupt()
        kernel.interrupt()
        assert finish().reply["status"] in {"ok", "error"}
    assert kernel.run("'alive'").result == "'alive'"


# --- Questions.


def _answering(
    kernel: KernelClient, code: str, *answers: str
) -> tuple[Cell, list[dict[str, object]]]:
    waiting = list(answers)
    asked = []
    finish = kernel.start("execute_request", code=code, allow_stdin=True)

    def answer(frame: object) -> None:
        if getattr(frame, "type", "") == "input_request":
            asked.append(frame.content)  # type: ignore[attr-defined]
            kernel.send("input_reply", {"value": waiting.pop(0)})

    return finish(answer), asked


def test_input_and_getpass_ask(kernel: KernelClient) -> None:
    code = "from getpass import getpass\nprint('who'); [input('name? '), getpass()]"
    cell, asked = _answering(kernel, code, "Ada", "secret")
    assert cell.result == "['Ada', 'secret']"
    assert asked == [
        {"prompt": "name? ", "password": False},
        {"prompt": "Password: ", "password": True},
    ]
    assert cell.kinds[:2] == ["stdout", "input_request"]


def test_input_in_a_thread_asks_too(kernel: KernelClient) -> None:
    code = "import asyncio; await asyncio.to_thread(input, 'from a thread')"
    assert _answering(kernel, code, "yes")[0].result == "'yes'"


def test_input_says_clearly_that_nobody_answers(kernel: KernelClient) -> None:
    cell = kernel.run("input('name? ')")
    assert cell.reply["ename"] == "StdinNotImplementedError"
    assert "Put the value into the code" in cell.reply["evalue"]
    assert not cell.of("input_request")


def test_an_answer_to_an_interrupted_question_is_not_given_to_the_next(
    kernel: KernelClient,
) -> None:
    finish = kernel.start("execute_request", code="input('first')", allow_stdin=True)
    assert kernel.receive().type == "input_request"
    kernel.interrupt()
    assert finish().reply["ename"] == "KeyboardInterrupt"
    kernel.send("input_reply", {"value": "too late"})
    assert _answering(kernel, "input('second')", "in time")[0].result == "'in time'"


def test_other_requests_wait_while_a_question_is_open(kernel: KernelClient) -> None:
    finish = kernel.start("execute_request", code="input()", allow_stdin=True)
    assert kernel.receive().type == "input_request"
    kernel.send("execute_request", {"code": "'next'"}, "next")
    kernel.send("input_reply", {"value": "now"})
    assert finish().result == "'now'"
    assert kernel.receive().content["data"]["text/plain"] == "'next'"
    assert kernel.receive().id == "next"


# --- Magics and processes.


def test_shell_escapes_and_magics(kernel: KernelClient) -> None:
    assert kernel.run("!echo $((40 + 2)); exit 3").text() == "42\n"
    assert kernel.run("_exit_code").result == "3"
    assert kernel.run("name = 'x'\n!echo {name} $name").text() == "x x\n"
    assert kernel.run("lines = !printf 'a\\nb'\nlines").result == "['a', 'b']"
    assert kernel.run("%%bash\necho bash; echo err >&2").text() == "bash\n"
    assert "Wall time" in kernel.run("%%time\npass").text()
    assert "per loop" in kernel.run("%timeit -n1 -r1 pass").text()


def test_a_command_reads_an_empty_stdin_and_streams(kernel: KernelClient) -> None:
    assert kernel.run("!cat; echo done").text() == "done\n"
    finish = kernel.start("execute_request", code="!echo early; sleep 60")
    kernel.wait_for_text("early\n")
    kernel.interrupt()
    finish()


def test_what_a_command_leaves_behind_does_not_hold_the_cell(kernel: KernelClient) -> None:
    assert kernel.run("!(sleep 600 &) ; echo here").text() == "here\n"


def test_without_processes_commands_are_refused_in_words(tmp_path: Path) -> None:
    with KernelClient(tmp_path, processes=False) as kernel:
        for code in ("!ls", "x = !ls", "%%bash\nls", "%pip list", "%sx ls"):
            cell = kernel.run(code)
            assert cell.reply["ename"] == "ProcessesRefused", code
            assert "allows no processes" in cell.reply["evalue"]


def test_forks_of_user_code_print_and_end(kernel: KernelClient) -> None:
    code = (
        "import multiprocessing as m\ndef work(n): print('child', n)\n"
        "c = m.get_context('fork')\np = c.Process(target=work, args=(1,)); p.start(); p.join()\n"
        "print('exit', p.exitcode)"
    )
    cell = kernel.run(code)
    assert cell.text() == "child 1\nexit 0\n"


def test_a_fork_that_runs_to_the_end_of_the_cell_ends_there(kernel: KernelClient) -> None:
    cell = kernel.run(
        "import os\npid = os.fork()\nif pid: os.waitpid(pid, 0)\nprint(pid == 0)\n'r'"
    )
    assert sorted(cell.text().split()) == ["'r'", "False", "True"]
    assert cell.kinds.count("execute_result") == 1


def test_a_pool_works(kernel: KernelClient) -> None:
    code = (
        "from concurrent.futures import ProcessPoolExecutor\n"
        "with ProcessPoolExecutor(2) as p: print(list(p.map(abs, [-1, 2])))"
    )
    assert kernel.run(code).text() == "[1, 2]\n"


# --- Import rules.


def test_refused_imports_fail_before_the_cell_runs(tmp_path: Path) -> None:
    rules = {"allow": ["math", "os"], "forbid": ["os.system"]}
    with KernelClient(tmp_path, import_rules=rules) as kernel:
        cell = kernel.run("print('ran')\nimport socket")
        assert cell.kinds == ["error"]
        assert (cell.reply["ename"], cell.reply["status"]) == ("ImportRefused", "error")
        assert "'socket'" in cell.reply["evalue"]
        assert cell.reply["traceback"] == [f"ImportRefused: {cell.reply['evalue']}"]
        kernel.run("import os as o")
        assert kernel.run("o.system('true')").reply["ename"] == "ImportRefused"
        assert kernel.run("import math; math.floor(1.5)").result == "1"
        kernel.run("open('mine.py', 'w').write('answer = 42')")
        assert kernel.run("import mine; mine.answer").result == "42"


def test_preload_names_what_is_missing(tmp_path: Path) -> None:
    with KernelClient(tmp_path, preload=["decimal", "no_such_module"]) as kernel:
        assert list(kernel.ready["preload_failed"]) == ["no_such_module"]
        assert kernel.run("import sys; 'decimal' in sys.modules").result == "True"


def test_a_workspace_module_does_not_shadow_the_preload(tmp_path: Path) -> None:
    (tmp_path / "decimal.py").write_text("raise RuntimeError('planted')")
    (tmp_path / "IPython.py").write_text("raise RuntimeError('planted')")
    with KernelClient(tmp_path, preload=["decimal"]) as kernel:
        assert "preload_failed" not in kernel.ready


@pytest.mark.full_tier
def test_preparing_starts_no_thread_and_writes_no_file(tmp_path: Path) -> None:
    """A zygote prepares once and forks kernels; the seal needs one thread."""
    import subprocess
    import sys

    from guest_client import ROOT

    code = (
        "import os, sys; sys.path.insert(0, sys.argv[1])\n"
        "from sbx.guest.kernel.setup import prepare\n"
        "shell, missing = prepare(['decimal'])\n"
        "shell.run_cell('x = 1 + 1; x')\n"
        "print(len(os.listdir('/proc/self/task')), missing, shell.user_ns['x'])"
    )
    environment = {"IPYTHONDIR": str(tmp_path / "ipython"), "HOME": str(tmp_path)}
    reported = subprocess.check_output([sys.executable, "-I", "-c", code, ROOT], env=environment)
    assert reported == b"1 {} 2\n"
    assert list(tmp_path.iterdir()) == []


# --- Other requests.


def test_complete(kernel: KernelClient) -> None:
    kernel.run("import json")
    reply = kernel.request("complete_request", code="x = json.dum", cursor_pos=12)
    assert reply["status"] == "ok"
    completed = {"x = json.dum"[: reply["cursor_start"]] + match for match in reply["matches"]}
    assert completed == {"x = json.dump", "x = json.dumps"}


def test_complete_under_import_rules(tmp_path: Path) -> None:
    rules = {"allow": ["math"], "forbid": ["os.system"]}
    with KernelClient(tmp_path, import_rules=rules) as kernel:
        for code, matches in (("len('a').bit_l", ["bit_length"]), ("zzzz.qq", [])):
            reply = kernel.request("complete_request", code=code, cursor_pos=len(code))
            assert (reply["status"], reply["matches"]) == ("ok", matches)


def test_complete_of_nothing(kernel: KernelClient) -> None:
    reply = kernel.request("complete_request", code="zzzz.qq", cursor_pos=7)
    assert (reply["matches"], reply["cursor_start"], reply["cursor_end"]) == ([], 7, 7)


def test_inspect(kernel: KernelClient) -> None:
    reply = kernel.request("inspect_request", code="len", cursor_pos=2, detail_level=0)
    assert (reply["status"], reply["found"]) == ("ok", True)
    assert "number of items" in reply["data"]["text/plain"]
    assert not kernel.request("inspect_request", code="nothing_here", cursor_pos=3)["found"]


@pytest.mark.parametrize(
    ("code", "status", "indent"),
    [("1 + 1", "complete", ""), ("for x in y:", "incomplete", "    "), ("x = = 1", "invalid", "")],
)
def test_is_complete(kernel: KernelClient, code: str, status: str, indent: str) -> None:
    reply = kernel.request("is_complete_request", code=code)
    assert reply == {"status": status, "indent": indent}


def test_a_request_that_fails_inside_still_gets_its_reply(kernel: KernelClient) -> None:
    reply = kernel.request("inspect_request", code="len", cursor_pos="not a number")
    assert reply == {"status": "error", "found": False, "data": {}, "metadata": {}}
    reply = kernel.request("complete_request", code="len", cursor_pos="not a number")
    assert (reply["status"], reply["matches"]) == ("error", [])


@pytest.mark.full_tier
@pytest.mark.parametrize(
    "code",
    [
        "display(1, transient={'n': 5}, display_id=3)",
        "display({'text/plain': 1, 2: 'two', 'x/y': None}, raw=True)",
        "display({'x/y': list(range(500_000))}, raw=True)",
        "display('x', metadata={'deep': [[[[{'a': float('inf')}]]]]})",
        "d = []\nfor _ in range(200): d = [d]\ndisplay({'application/json': d}, raw=True)",
        "display('x', metadata={'d': d})",
        "raise type('E\\udc80', (Exception,), {})('\\udc80')",
    ],
)
def test_odd_displays_never_make_a_frame_the_host_calls_malformed(
    kernel: KernelClient, code: str
) -> None:
    """The client checks every frame as the host does."""
    assert kernel.run(code).frames
    assert kernel.run("1").result == "1"


def test_an_output_limit_that_is_no_number_is_answered(kernel: KernelClient) -> None:
    cell = kernel.run("1", output_max="much")
    assert (cell.kinds, cell.reply["status"]) == (["error"], "error")


# --- The end.


@pytest.mark.parametrize("code", ["1", "while True: pass", "import time; time.sleep(60)"])
def test_the_kernel_ends_when_the_host_hangs_up(tmp_path: Path, code: str) -> None:
    client = KernelClient(tmp_path)
    client.start("execute_request", code=f"print('go')\n{code}")
    client.wait_for_text("go")
    client.sock.close()
    assert eventually(lambda: client.process.poll() is not None)
    assert client.process.returncode == 0


def test_an_idle_kernel_uses_no_time(kernel: KernelClient) -> None:
    kernel.run("print('x')")
    assert eventually(lambda: _is_idle(kernel))


def _is_idle(kernel: KernelClient) -> bool:
    """Return whether it uses at most one tick, 10 ms, in half a second."""
    before = _cpu_ticks(kernel)
    time.sleep(0.5)
    return _cpu_ticks(kernel) - before <= 1


def _is_blocked(kernel: KernelClient) -> bool:
    """Return whether it, which would print without end, waits."""
    before = _cpu_ticks(kernel)
    time.sleep(0.1)
    status = Path(f"/proc/{kernel.process.pid}/stat").read_text().rpartition(")")[2].split()[0]
    return status == "S" and _cpu_ticks(kernel) == before


def _resident(kernel: KernelClient) -> int:
    statm = Path(f"/proc/{kernel.process.pid}/statm").read_text()
    return int(statm.split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _cpu_ticks(kernel: KernelClient) -> int:
    fields = Path(f"/proc/{kernel.process.pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
