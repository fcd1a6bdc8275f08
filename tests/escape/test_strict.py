"""The policy `strict`: what works, what is refused, and in which words.

Whatever is refused is tried twice: as a model would write it, which the import rules answer in a
sentence, and by a way around them, which linux answers and the cell's error explains. The walls are
then attacked without any import rules, and each is seen to be missed.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio
from attacking import PATHS, Fresh, altered, attack, by, run, tell

from sbx import Runtime
from sbx.policy import Policy, load
from sbx.policy.tables import Imports, WallsPolicy
from sbx.runtime.sandbox import AsyncSandbox

Bare = Callable[..., Awaitable[AsyncSandbox]]


def strict(**changes: Any) -> Policy:
    """For hosts without cgroups, too."""
    return load("strict").model_copy(update={"walls": WallsPolicy(), **changes})


@pytest_asyncio.fixture(scope="module")
async def model(runtime: Runtime) -> AsyncSandbox:
    """What a model gets."""
    return await runtime.create(strict())


@pytest_asyncio.fixture(scope="module")
async def bare(runtime: Runtime, started_by: str) -> Bare:
    """`await bare("seccomp", …)`: strict without import rules, and without these walls."""
    made: dict[tuple[str, ...], AsyncSandbox] = {}

    async def bare(*walls: str) -> AsyncSandbox:
        if walls not in made:
            made[walls] = await runtime.create(strict(imports=Imports()))
        with altered(*walls), by(started_by):
            await made[walls].start()
        return made[walls]

    return bare


# -- what works ------------------------------------------------------------------------------------

WORK = {
    "numpy": """
import numpy as np
a = np.random.default_rng(1).random((300, 300))
assert np.isfinite(np.linalg.inv(a @ a.T + np.eye(300))).all()
np.save("a.npy", a)
assert np.array_equal(np.load("a.npy", mmap_mode="r"), a)
""",
    "pandas": """
import pandas as pd
frame = pd.DataFrame({"k": list("aab"), "v": [1, 2, 3]})
frame.to_csv("t.csv", index=False)
assert pd.read_csv("t.csv").groupby("k").v.sum().tolist() == [3, 3]
""",
    "threads": """
import threading
from concurrent.futures import ThreadPoolExecutor
seen = []
threads = [threading.Thread(target=seen.append, args=(n,)) for n in range(16)]
[one.start() for one in threads]
[one.join() for one in threads]
with ThreadPoolExecutor(8) as pool:
    assert sum(pool.map(lambda n: n * n, range(100))) == 328350 and len(seen) == 16
""",
    "asyncio": """
import asyncio
async def double(n):
    await asyncio.sleep(0.01)
    return await asyncio.to_thread(lambda: 2 * n)
assert await asyncio.gather(*map(double, range(3))) == [0, 2, 4]
""",
    "files": """
import json, os, pathlib, shutil, sqlite3, tempfile, zipfile
os.makedirs("d/e", exist_ok=True)
pathlib.Path("d/x.json").write_text(json.dumps([1]))
os.replace("d/x.json", "d/e/y.json")  # from one directory to another
shutil.copy("d/e/y.json", "z.json")
with sqlite3.connect("d.sqlite") as rows:
    rows.execute("create table t (x)")
with tempfile.TemporaryDirectory() as there, zipfile.ZipFile(f"{there}/a.zip", "w") as made:
    made.write("z.json")
shutil.rmtree("d")
""",
}


@pytest.mark.full_tier
@pytest.mark.parametrize("started_by", PATHS, indirect=True, scope="module")
@pytest.mark.parametrize("what", WORK)
async def test_computing_works_under_strict(model: AsyncSandbox, what: str) -> None:
    if what in ("numpy", "pandas"):
        pytest.importorskip(what)
    done = await model.run(WORK[what])
    assert done.ok, done.error


@pytest.mark.full_tier
@pytest.mark.parametrize("started_by", PATHS, indirect=True, scope="module")
async def test_figures_are_saved_and_shown_under_strict(model: AsyncSandbox) -> None:
    pytest.importorskip("matplotlib")
    done = await model.run(
        "import matplotlib.pyplot as plt\n"
        "plt.plot([1, 2, 4])\n"
        "plt.title('three')\n"
        "plt.savefig('three.png')\n"
        "plt.savefig('three.pdf')\n"
    )
    assert done.ok, done.error
    shown = [sorted(one) for one in done.outputs]
    assert shown[-1] == ["image/png", "text/plain"]
    assert (await model.files.read_bytes("three.png")).startswith(b"\x89PNG")


# -- what is refused, in words ---------------------------------------------------------------------

FORBIDDEN = {
    "import os; os.system('id')": "forbids 'os.system'",
    "import os as o; o.popen('id')": "forbids 'os.popen'",
    "from os import fork": "forbids 'os.fork'",
    "import subprocess": "forbids 'subprocess'",
    "from subprocess import run": "forbids 'subprocess",
    "__import__('subprocess')": "forbids 'subprocess'",
    "import multiprocessing": "forbids 'multiprocessing'",
    "import socket": "forbids 'socket'",
    "import urllib.request": "forbids 'urllib.request'",
    "import requests": "forbids 'requests'",
    "import os; os.symlink('a', 'b')": "forbids 'os.symlink'",
    "import os; os.link('a', 'b')": "forbids 'os.link'",
    "import os; getattr(os, 'link')('a', 'b')": "forbids 'os.link'",
    "import os; os.chdir('../../etc')": "forbids 'os.chdir'",
    "import contextlib; contextlib.chdir('/etc')": "forbids 'contextlib.chdir'",
    "import ctypes": "forbids 'ctypes'",
    "import importlib": "forbids 'importlib'",
    "import curses": "does not allow importing 'curses'. Allowed: IPython.display,",
}


@pytest.mark.parametrize("code", FORBIDDEN)
async def test_what_a_cell_spells_out_is_refused_in_a_sentence(
    model: AsyncSandbox, code: str
) -> None:
    done = await model.run(f"1\n{code}")
    assert done.error is not None
    assert done.error.name == "ImportRefused"
    assert done.error.value.startswith("line 2: this sandbox's policy ")
    assert FORBIDDEN[code] in done.error.value


SHELLS = ("!id", "%%bash\nid", "x = !id", "%sx id", "%pip list", "%%script bash\nid")


@pytest.mark.parametrize("code", SHELLS)
async def test_the_shell_of_a_notebook_is_refused_in_a_sentence(
    model: AsyncSandbox, code: str
) -> None:
    done = await model.run(code)
    assert done.error is not None
    assert (done.error.name, "allows no processes" in done.error.value) == (
        "ProcessesRefused",
        True,
    )


COMPUTING_ONLY = "allows no processes, no new sockets"
EVADING = {
    "getattr": "import os; getattr(os, 'sys' + 'tem')('id')",
    "getattr, spawn": "import os; getattr(os, 'posix_' + 'spawn')('/bin/id', ['id'], {})",
    "getattr, exec": "import os; getattr(os, 'exec' + 'v')('/bin/id', ['id'])",
    "__import__": "__import__('sub' + 'process').run(['id'])",
    "eval": "eval(\"__import__('subprocess').check_output(['id'])\")",
    "exec": "exec('import os; os.popen(\"id\").read()')",
    "a module that a library holds": "import pandas; pandas.io.common.os.system('id')",
    "modules that are loaded": "import sys; sys.modules['socket'].socket()",
    "loaded, a link": "import pathlib; pathlib.os.symlink('/etc/passwd', 'accounts')",
    "a method": "import pathlib; pathlib.Path('accounts').symlink_to('/etc/passwd')",
    "a method, hard": (
        "import pathlib; pathlib.Path('a').write_text(''); pathlib.Path('b').hardlink_to('a')"
    ),
    "wrapped by a library": "__import__('urllib.' + 'request').request.urlopen('http://1.1.1.1')",
    "asyncio": (
        "import asyncio\nawait getattr(asyncio, 'create_subprocess' + '_exec')('id')"
    ),
    "memory as a file": "import os; os.memfd_create('x')",
    "shared memory": (
        "__import__('multi' + 'processing.shared_memory').shared_memory"
        ".SharedMemory(create=True, size=9)"
    ),
    "a FIFO": "import os; getattr(os, 'mk' + 'fifo')('f')",
    "a file of the system": "open('/usr/lib/planted.py', 'w')",
}  # fmt: skip


@pytest.mark.parametrize("way", EVADING)
async def test_what_evades_the_rules_is_refused_by_linux_and_explained(
    model: AsyncSandbox, way: str
) -> None:
    if "pandas" in EVADING[way]:
        pytest.importorskip("pandas")
    done = await model.run(EVADING[way])
    assert done.error is not None, done
    assert done.error.name in ("PermissionError", "ProcessesRefused", "URLError", "OSError")
    said = done.error.value
    assert COMPUTING_ONLY in said or "allows no processes" in said or "Only /workspace" in said
    assert said.rpartition(". ")[2] in done.error.traceback


async def test_native_code_by_a_library_starts_nothing(model: AsyncSandbox) -> None:
    """ctypes, which numpy has loaded: C answers -1 and says why by errno."""
    pytest.importorskip("numpy")
    code = (
        "import numpy as np\n"
        "ct = getattr(np, 'ctypes' + 'lib').ctypes\n"
        "libc = ct.CDLL(None, use_errno=True)\n"
        "[(f(*a), ct.get_errno()) for f, a in [(libc.fork, ()), (libc.socket, (1, 1, 0)),"
        " (libc.shmget, (0, 4096, 0o1600)), (libc.memfd_create, (b'x', 0)),"
        " (libc.symlink, (b'/etc', b's'))]]"
    )
    done = await model.run(code)
    assert done.ok, done.error
    assert done.result == repr([(-1, 1)] * 5)
    # glibc has several answers for a shell that could not be started; none is success
    assert (await model.run("libc.system(b'id > out')")).result != "0"
    assert (await model.run("open('out')")).error.name == "FileNotFoundError"  # type: ignore[union-attr]


async def test_uploads_of_a_user_stay_and_the_error_says_what_to_do(model: AsyncSandbox) -> None:
    await model.uploads.put_bytes("sales.csv", b"a,b\n")
    for code in (
        "open('/workspace/uploads/temparea/sales.csv', 'a')",
        "import os; os.remove('/workspace/uploads/temparea/sales.csv')",
        "import os; os.rename('/workspace/uploads/temparea/sales.csv', 'mine.csv')",
        "import shutil; shutil.rmtree('/workspace/uploads/temparea')",
        "import pathlib; pathlib.Path('/workspace/uploads/temparea/new').touch()",
    ):
        done = await model.run(code)
        assert done.error is not None, code
        assert done.error.name in ("OSError", "PermissionError")
        assert done.error.value.endswith("work on a copy.")
    assert await tell_plainly(model, "open('uploads/temparea/sales.csv').read()") == "'a,b\\n'"


async def test_by_the_shell_uploads_stay_as_well(fresh: Fresh) -> None:
    box = await fresh()
    await box.uploads.put_bytes("sales.csv", b"a,b\n")
    done = await box.shell("rm -rf /workspace/uploads; ls /workspace/uploads/temparea")
    assert "Read-only file system" in done.stderr
    assert done.stdout == "sales.csv\n"


async def test_errors_of_other_kinds_are_left_as_they_are(model: AsyncSandbox) -> None:
    done = await model.run("open('/nowhere')")
    assert done.error is not None
    assert done.error.value == "[Errno 2] No such file or directory: '/nowhere'"


async def test_no_wall_stops_a_chdir_and_there_is_nothing_to_see(model: AsyncSandbox) -> None:
    code = "import os; getattr(os, 'ch' + 'dir')('../../etc'); (os.getcwd(), sorted(os.listdir()))"
    cwd, names = eval(await tell_plainly(model, code))
    await model.run("import os; getattr(os, 'ch' + 'dir')('/workspace')")
    assert cwd == "/etc"
    assert "shadow" not in names
    assert "hostname" not in names or (await model.run("open('/etc/hostname').read()")).ok


async def tell_plainly(box: AsyncSandbox, code: str) -> str:
    done = await box.run(code)
    assert done.ok, done.error
    assert done.result is not None
    return done.result


# -- the walls, without any import rules -----------------------------------------------------------

# attack: its outcome under strict, without the filters, and without Landlock as well
WALLS = {
    "os.execv('/bin/true', ['true'])": ("EPERM", "EACCES", "killed"),
    "subprocess.run(['/bin/true'], check=True)": ("EPERM", "EACCES", "ok"),
    "os.fork() or os._exit(0)": ("EPERM", "ok", "ok"),
    "socket.socket(socket.AF_UNIX)": ("EPERM", "ok", "ok"),
    "socket.create_server(('127.0.0.1', 0))": ("EPERM", "EACCES", "ok"),
    "socket.socket(socket.AF_UNIX).bind('s')": ("EPERM", "EACCES", "ok"),
    "os.symlink('/etc/passwd', 's')": ("EPERM", "EACCES", "ok"),
    "open('f', 'w').close(); os.link('f', 'l')": ("EPERM", "ok", "ok"),
    "os.mkfifo('p')": ("EACCES", "EACCES", "ok"),
    "open('/dev/shm/s', 'x')": ("EACCES", "EACCES", "ok"),
    "os.mkdir('/dev/shm/d')": ("EACCES", "EACCES", "ok"),
    "import multiprocessing; multiprocessing.Lock()": ("EACCES", "EACCES", "ok"),
    "os.memfd_create('x')": ("EPERM", "ok", "ok"),
    "call('shmget', 0, 4096, 0o1600)": ("EPERM", "ok", "ok"),
    "os.pidfd_open(os.getpid())": ("EPERM", "ok", "ok"),
    "call('keyctl', 0, -3, 0, 0, 0)": ("EPERM", "ok", "ok"),
    "call('openat2', -100, b'/', (ctypes.c_uint64 * 3)(), 24)": ("ENOSYS", "ok", "ok"),
}  # fmt: skip
TIDY = """
for left in ('s', 'f', 'l', 'p', '/dev/shm/s'):
    try: os.unlink(left)
    except OSError: pass
try: os.rmdir('/dev/shm/d')
except OSError: pass
"""


@pytest.mark.parametrize("code", WALLS)
async def test_a_wall_of_strict_holds_and_is_missed(bare: Bare, code: str) -> None:
    held, without_filters, without_both = WALLS[code]
    assert await attack(await bare(), TIDY + code) == held
    assert await attack(await bare("seccomp"), TIDY + code) == without_filters
    missed = await attack(await bare("landlock", "seccomp"), TIDY + code)
    assert missed.partition(":")[0] == without_both


async def test_threads_get_the_walls_of_the_thread_that_started_them(bare: Bare) -> None:
    code = """
found = []
def attack():
    found.append((names_of(os.fork), names_of(socket.socket), names_of(os.mkfifo, 'p')))
thread = threading.Thread(target=attack)
thread.start()
thread.join()
found[0]
"""
    assert await tell(await bare(), code) == ("EPERM", "EPERM", "EACCES")


async def test_a_program_in_memory_is_not_executed_by_any_call(bare: Bare) -> None:
    """execveat by descriptor, and the loader called as a program: both are exec to linux."""
    box = await bare("seccomp")
    code = "fd = os.open('/bin/true', os.O_RDONLY)\nos.execve(fd, ['true'], {})"
    assert await attack(box, code) == "EACCES"


async def test_a_socket_from_before_stays_and_no_new_pair_leads_anywhere(bare: Bare) -> None:
    """socketpair stays, for event loops: both ends are in this process."""
    code = "a, b = socket.socketpair(); a.send(b'x'); b.recv(1)"
    assert await tell(await bare(), code) == b"x"


@pytest.mark.parametrize("started_by", PATHS, indirect=True, scope="module")
async def test_the_receipt_names_each_filter(bare: Bare) -> None:
    box = await bare()
    await run(box, "1")
    assert box.receipt is not None
    assert set(box.receipt.seccomp) == {"default", "allowlist", "strict", "last"}
    assert await tell(box, "int(open('/proc/self/status').read().split('Seccomp_filters:')[1]"
                           ".split()[0])") >= 4  # fmt: skip
