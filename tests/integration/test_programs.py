"""A file of Python runs as `python3 FILE`, on each surface, and ends as CPython ends."""

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from command import in_process
from serving import Service

import sbx
from sbx import AsyncSandbox, Run, Runtime, Sandbox
from sbx.client import Client
from sbx.protocol.runs import Status

EXITS = {
    "none": "None",
    "false": "False",
    "true": "True",
    "number": "7",
    "large": "256 + 5",
    "negative": "-1",
    "huge": "2 ** 70",
    "digits": "'5'",
    "empty": "''",
    "list": "['x']",
}
WAYS = {
    "exit": "import sys\nsys.exit({})",
    "raise": "raise SystemExit({})",
    "function": "def main():\n    raise SystemExit({})\nmain()",
    "subclass": "class Leave(SystemExit):\n    pass\nraise Leave({})",
    "hook": "import sys\ndef hook(*_): sys.exit({})\nsys.excepthook = hook\n1/0",
}
READERS = {
    "lines": "import sys\nprint([line for line in sys.stdin])",
    "input": "print(input(), input())\ntry:\n    input()\nexcept EOFError:\n    print('end')",
    "mixed": "import sys\nprint(input('? '), sys.stdin.read().split())",
    "bytes": "import sys\nprint(sys.stdin.buffer.read())",
    "descriptor": "import os\nprint(os.read(0, 100))",
    "device": "print(open('/dev/stdin').read())",
    "child": "import subprocess\nsubprocess.run(['cat'])",
    "shell": "import os\nos.system('cat')",
}
PROGRAMS = {
    "asyncio": "import asyncio\nasync def main(): return 42\nprint(asyncio.run(main()))",
    "names": "print(sorted(globals()), __name__, __doc__, __spec__)",
    "no echo": "6*7",
    "await": "await x",
    "error": "import sys\nprint('out')\ndef f(): 1/0\nf()",
    "chain": "try:\n    1/0\nexcept ZeroDivisionError as e:\n    raise ValueError('x') from e",
    "syntax": "print(1)\nx = (\n",
    "hook": "import sys\nsys.excepthook = lambda *e: print('mine', e[0].__name__)\n1/0",
    "broken hook": "import sys\ndef h(*e): raise KeyError(1)\nsys.excepthook = h\n1/0",
    "atexit": "import atexit\natexit.register(print, 'a')\natexit.register(print, 'b')\nprint('m')",
    "thread": "import threading, time\n"
    "threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()\nprint('main')",
    "open file": "f = open('o.txt', 'w')\nf.write('data')\n"
    "import atexit, os\natexit.register(lambda: os.system('wc -c < o.txt'))",
    "finaliser": "class D:\n    def __del__(self): print('gone')\nd = D()",
    "fork": "import os, sys\npid = os.fork()\nif not pid:\n    print('child'); 1/0\n"
    "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))",
    "term": "import os\nprint('a', flush=True)\nos.kill(os.getpid(), 15)",
    "abort": "import os\nprint('step', 1, flush=True)\nprint('step', 2, flush=True)\nos.abort()",
    "interrupt": "raise KeyboardInterrupt",
    "unittest": "import unittest\nclass T(unittest.TestCase):\n    def test(self): pass\n"
    "unittest.main(argv=['x'], verbosity=0)",
    "pool": "import multiprocessing as m\nif __name__ == '__main__':\n"
    "    with m.get_context('fork').Pool(2) as p: print(p.map(abs, [-1, 2]))",
    "closed": "import sys\nsys.stdout.write('x\\n')\nsys.stdout.close()",
}


@pytest.fixture(scope="module", autouse=True)
def shared_runtime() -> Iterator[None]:
    yield
    sbx.close()


def outcome(directory: Path, code: str, stdin: bytes = b"") -> tuple[str, str, int]:
    """Return the output and the exit code of python3, in its own process."""
    (directory / "reference.py").write_text(code)
    ended = subprocess.run(
        [sys.executable, "reference.py"],
        cwd=directory,
        input=stdin,
        capture_output=True,
        check=False,
        timeout=60,
    )
    number = ended.returncode if ended.returncode >= 0 else 128 - ended.returncode
    path = str(directory / "reference.py")
    err = ended.stderr.decode(errors="replace").replace(path, "FILE")
    return ended.stdout.decode(errors="replace"), _seconds_removed(err), number


def _seconds_removed(text: str) -> str:
    return "\n".join("Ran" if line.startswith("Ran ") else line for line in text.split("\n"))


def shown(run: Run) -> tuple[str, str, int | None]:
    err = run.stderr.replace("/workspace/p.py", "FILE")
    return run.stdout, _seconds_removed(err), run.exit_code


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("value", EXITS)
async def test_exit_code_is_that_of_python(
    box: AsyncSandbox, tmp_path: Path, value: str, way: str
) -> None:
    code = WAYS[way].format(EXITS[value])
    expected = outcome(tmp_path, code)
    await box.files.write("p.py", code.encode())
    run = await box.run_file("p.py")
    assert shown(run) == expected
    assert run.status is (Status.ERROR if expected[2] else Status.OK)


@pytest.mark.parametrize("reader", READERS)
async def test_readers_get_the_same_stdin(box: AsyncSandbox, tmp_path: Path, reader: str) -> None:
    for stdin in (b"one\ntwo\n", b"\xff\x00\nx", b""):
        expected = outcome(tmp_path, READERS[reader], stdin)
        await box.files.write("p.py", READERS[reader].encode())
        assert shown(await box.run_file("p.py", stdin=stdin)) == expected, stdin
    without = await box.run_file("p.py")
    assert shown(without) == outcome(tmp_path, READERS[reader])


@pytest.mark.parametrize("name", PROGRAMS)
async def test_program_is_the_same_as_under_python(
    box: AsyncSandbox, tmp_path: Path, name: str
) -> None:
    expected = outcome(tmp_path, PROGRAMS[name])
    await box.files.write("p.py", PROGRAMS[name].encode())
    assert shown(await box.run_file("p.py")) == expected


@pytest.mark.parametrize("policy", ["default", "strict"])
def test_program_leaves_the_variables_of_cells_alone(policy: str) -> None:
    with Sandbox(policy=policy) as sandbox:
        sandbox.run("x = 1\nkept = open('kept.txt', 'w')\n_ = kept.write('once')")
        run = sandbox.run_file(b"x = 2\nprint('kept' in globals(), __name__)\nraise SystemExit(3)")
        assert (run.stdout, run.exit_code, run.state_lost) == ("False __main__\n", 3, False)
        assert sandbox.run("x").result == "1"
        sandbox.stop()
        assert sandbox.files.read_bytes("kept.txt") == b"once"


@pytest.mark.parametrize("policy", ["default", "strict"])
def test_finalisation_counts_against_the_limits(policy: str) -> None:
    code = b"class D:\n    def __del__(self):\n        while True: pass\nd = D()\nprint('main')"
    with Sandbox(policy=policy) as sandbox:
        run = sandbox.run_file(code, timeout=1)
        assert (run.status, run.stdout) == (Status.TIMEOUT, "main\n")
        flood = code.replace(b"pass", b"print('x' * 10_000)")
        run = sandbox.run_file(flood, timeout=60)
        assert (run.status, run.cause) == (Status.KILLED, "output")
        assert sandbox.run("1").result == "1"


async def test_display_and_figures_of_a_program_are_outputs(box: AsyncSandbox) -> None:
    code = (
        b"import matplotlib.pyplot as plt\nprint('before')\nplt.plot([1, 2])\nplt.show()\n"
        b"display({'a': 1})\nprint('after')"
    )
    run = await box.run_file(code)
    assert run.stdout == "before\nafter\n"
    assert [sorted(bundle) for bundle in run.outputs] == [
        ["image/png", "text/plain"],
        ["text/plain"],
    ]
    lines = run.text.splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")


# -- the orderly ends ------------------------------------------------------------------------------

LAST_WORK = """
import atexit
file = open('file.txt', 'w')
_ = file.write('data')
_ = atexit.register(lambda: open('atexit.txt', 'w').write('ran'))
"""


async def _stop(sandbox: AsyncSandbox) -> None:
    await sandbox.stop()


async def _restart(sandbox: AsyncSandbox) -> None:
    await sandbox.contexts.default.restart()


async def _evict(sandbox: AsyncSandbox) -> None:
    for _ in range(100):  # the task of the run ends a step after its result
        if await sandbox.contexts.default.end_if_idle():
            return
        await asyncio.sleep(0)
    raise AssertionError("the kernel is busy")


@pytest.mark.parametrize("end", [_stop, _restart, _evict])
async def test_end_in_order_lets_the_kernel_finish(
    box: AsyncSandbox, end: Callable[[AsyncSandbox], Awaitable[None]]
) -> None:
    assert (await box.run(LAST_WORK)).ok
    await end(box)
    assert await box.files.read_bytes("file.txt") == b"data"
    assert await box.files.read_bytes("atexit.txt") == b"ran"


def test_close_lets_the_kernel_finish(tmp_path: Path) -> None:
    with Sandbox(workspace=tmp_path) as sandbox:
        sandbox.run(LAST_WORK)
    assert (tmp_path / "file.txt").read_text() == "data"
    assert (tmp_path / "atexit.txt").read_text() == "ran"


async def test_kernels_that_do_not_end_are_killed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sbx.runtime.run.context_kernel._FINISH_S", 1.0)
    async with Runtime() as runtime:
        for _ in range(3):
            sandbox = await runtime.create("default")
            await sandbox.run("import atexit\n@atexit.register\ndef f():\n    while True: pass")


async def test_fork_in_a_cell_ends_as_under_python(box: AsyncSandbox) -> None:
    """It ended with os._exit(0): its buffers were lost, and its code was 0."""
    run = await box.run(
        "import os\nfile = open('fork.txt', 'w')\npid = os.fork()\nif not pid:\n"
        "    file.write('child')\n    1/0\n"
        "code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])\ncode"
    )
    assert run.result == "1"
    assert await box.files.read_bytes("fork.txt") == b"child"
    assert "ZeroDivisionError" in run.stderr


def test_files_are_complete_when_they_are_saved(tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text("f = open('totals.csv', 'w')\nf.write('1,2\\n' * 5)")
    out = tmp_path / "out"
    assert in_process("run", tmp_path / "p.py", "--out", out).returncode == 0
    assert (out / "totals.csv").read_text() == "1,2\n" * 5


# -- the other surfaces ----------------------------------------------------------------------------


def test_command_c_shows_the_value_of_its_last_expression() -> None:
    ended = in_process("run", "-c", "import sys\nprint(sys.argv)\n6 * 7")
    assert (ended.returncode, ended.stdout) == (0, "['-c']\n42\n")


def test_exec_runs_a_file_next_to_the_variables(service: Service, tmp_path: Path) -> None:
    box = service.quick("create").stdout.strip()
    service.quick("exec", box, "-c", "x = 1")
    code = "import sys\nx = 2\nprint(sys.argv[1:], __file__, input())\nsys.exit(9)"
    (tmp_path / "p.py").write_text(code)
    ended = service.quick("exec", box, "-i", tmp_path / "p.py", "a", "b", stdin=b"line\n")
    assert (ended.returncode, ended.stdout) == (9, "['a', 'b'] /workspace/p.py line\n")
    assert service.quick("exec", box, "-c", "x").stdout == "1\n"
    service.quick("rm", box)


async def test_client_runs_a_file(service: Service) -> None:
    async with Client(service.socket) as client, await client.create() as sandbox:
        await sandbox.files.write("p.py", b"import sys\nprint(sys.argv, sys.stdin.buffer.read())")
        run = await sandbox.run_file("p.py", ["a"], stdin=b"\xff")
        assert (run.stdout, run.exit_code) == ("['p.py', 'a'] b'\\xff'\n", 0)
        run = await sandbox.run_file(b"raise SystemExit('no')")
        assert (run.stderr, run.exit_code, run.ok) == ("no\n", 1, False)
