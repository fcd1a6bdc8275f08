"""What people run, in real jails, under the filter of `default` and under `filter = "allowlist"`.

Each program is to end well and to say nothing of what a filter answers: some go on after a refusal,
slower or with half of what they do. What the host lacks is a skip that says so.
"""

import re
import shlex
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import wheelhouse

from sbx import Runtime
from sbx.policy import load
from sbx.runtime.sandbox import AsyncSandbox
from tests.tiers import rows

pytestmark = pytest.mark.timeout(180)

# The programs run behind the filter of the default policy in the tests of the runtime as well.
FILTERS = rows(("default", "allowlist"), ci_tier=["allowlist"])
# SIGSYS, EPERM and ENOSYS, as programs word them
SYMPTOMS = re.compile(
    r"Bad system call|SIGSYS|EPERM|ENOSYS|Operation not permitted|Function not implemented"
    r"|Permission denied"
)


@pytest_asyncio.fixture(scope="module", params=FILTERS)
async def box(request: pytest.FixtureRequest) -> AsyncIterator[AsyncSandbox]:
    policy = load("default").model_copy(update={"filter": request.param})
    async with Runtime() as runtime, await runtime.create(policy) as box:
        await box.start()
        assert box.receipt is not None
        assert ("allowlist" in box.receipt.seccomp) == (request.param == "allowlist")
        yield box


def check(done: Any, expected: str) -> None:
    assert done.ok, (done.status, done.cause, done.error, done.stdout, done.stderr)
    assert not SYMPTOMS.search(done.stdout + done.stderr), (done.stdout, done.stderr)
    assert expected in done.stdout


# -- cells, as ipykernel's are ---------------------------------------------------------------------

CELLS = {
    "cells": "import sys\nprint(6 * 7)\n%time x = 1\n!echo shell\n",
    "asyncio": """
import asyncio
async def main():
    one = await asyncio.create_subprocess_shell('echo hi | cat', stdout=-1)
    server = await asyncio.start_server(lambda r, w: w.write(b'x') or w.close(), '127.0.0.1', 0)
    async with server, asyncio.timeout(60):
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        assert await reader.read() == b'x'
        writer.close()
    return (await one.communicate())[0], await asyncio.to_thread(lambda: 42)
print(*await main())
""",
    "sqlite": """
import sqlite3, os
rows = sqlite3.connect('d.sqlite')
rows.execute('pragma journal_mode=wal')
rows.execute('create table if not exists t (x)')
rows.execute('insert into t values (42)')
rows.commit()
print(rows.execute('select x from t').fetchone()[0])
""",
    "multiprocessing": """
import multiprocessing as m, multiprocessing.shared_memory as s
from concurrent.futures import ProcessPoolExecutor
with m.get_context('fork').Pool(2) as pool:
    assert pool.map(abs, [-1, -2]) == [1, 2]
with ProcessPoolExecutor(2, m.get_context('spawn')) as pool:
    assert list(pool.map(abs, [-42])) == [42]
shared = s.SharedMemory(create=True, size=9)
shared.close(); shared.unlink()
print(42)
""",
    "threads": """
import threading, queue, time, signal
done = queue.Queue()
[threading.Thread(target=done.put, args=(n,)).start() for n in range(16)]
assert sorted(done.get(timeout=60) for _ in range(16)) == list(range(16))
seen = []
signal.signal(signal.SIGALRM, lambda *_: seen.append(42))
signal.setitimer(signal.ITIMER_REAL, 0.01)
time.sleep(0.1)
print(*seen)
""",
    "files": """
import mmap, os, shutil, tempfile, tarfile, fcntl, select, socket
with tempfile.TemporaryDirectory() as there:
    open(f'{there}/a', 'wb').write(b'x' * 8192)
    shutil.copytree(there, f'{there}-copy'); shutil.rmtree(f'{there}-copy')
    shutil.copy2(f'{there}/a', f'{there}/b'); os.link(f'{there}/a', f'{there}/c')
    os.symlink('a', f'{there}/d'); os.mkfifo(f'{there}/e'); os.truncate(f'{there}/b', 1)
    os.utime(f'{there}/b', (1, 1)); os.chmod(f'{there}/b', 0o600)
    with open(f'{there}/a', 'r+b') as one:
        fcntl.flock(one, fcntl.LOCK_EX); os.posix_fallocate(one.fileno(), 0, 9000)
        mmap.mmap(one.fileno(), 0).flush(); os.fsync(one.fileno())
        os.pwritev(one.fileno(), [b'y'], 0); os.preadv(one.fileno(), [bytearray(1)], 0)
    with tarfile.open(f'{there}/t.tar.gz', 'w:gz') as made: made.add(f'{there}/a', 'a')
select.epoll().close(); os.eventfd(0); os.getxattr; os.listxattr('.')
socket.getaddrinfo('localhost', 80)
print(42)
""",
    "numpy": """
import numpy as np
a = np.random.default_rng(1).random((400, 400))
assert np.isfinite(np.linalg.inv(a @ a.T + np.eye(400))).all() and np.fft.fft(a).shape == a.shape
print(42)
""",
    "pandas": """
import pandas as pd
frame = pd.DataFrame({'k': list('aab'), 'v': [40, 2, 3], 't': pd.date_range('2024', periods=3)})
frame.to_csv('t.csv'); frame.to_pickle('t.pkl')
assert len(pd.read_csv('t.csv')) == len(pd.read_pickle('t.pkl')) == 3
print(frame.groupby('k').v.sum()['a'])
""",
    "matplotlib": """
import matplotlib.pyplot as plt
plt.plot([1, 2]); plt.savefig('t.png'); plt.savefig('t.svg')
print(42)
""",
}


@pytest.mark.parametrize("what", CELLS)
async def test_a_cell_runs_behind_the_filter(box: AsyncSandbox, what: str) -> None:
    if what in ("numpy", "pandas", "matplotlib"):
        pytest.importorskip(what)
    check(await box.run(CELLS[what], timeout=60), "42")


# -- programs --------------------------------------------------------------------------------------

PROGRAMS = {
    "bash": "seq 41 | sort -rn | while read n; do echo $((n + 1)); done | head -1",
    "tar": "mkdir -p a; echo 42 > a/b; tar czf a.tgz --xattrs a; rm -r a; tar xpf a.tgz; cat a/b",
    "gcc": (
        "printf '#include <stdio.h>\\nint main(void){puts(\"42\");return 0;}' > a.c;"
        "gcc -O2 -pipe -g a.c -o a.out; ./a.out"
    ),
    "make": "printf 'all: one two\\none two:\\n\\t@echo 42\\n' > Makefile; make -j2",
    "git": (
        "rm -rf r; git init -q r; cd r; touch f; git add f;"
        "git -c user.name=a -c user.email=a@b commit -qm 42; git clone -q . ../r2; git gc -q;"
        "git worktree add -q ../r3; git log --oneline --format=%s; rm -rf ../r2 ../r3"
    ),
    "node": (
        "node -e \"require('child_process').execSync('true');"
        "new (require('worker_threads').Worker)('', {eval: true});"
        "const fs = require('fs'); fs.writeFileSync('n', 'x'); const w = fs.watch('.');"
        "require('zlib').gzip('x', () => {});"
        "const s = require('net').createServer(c => c.end('42')).listen(0, '127.0.0.1', () =>"
        " require('net').connect(s.address().port).on('data', d => {"
        ' console.log(String(d)); s.close(); w.close(); }));"'
    ),
    "java": "java -Xmx128m -version 2>&1 && echo 42",
    "javac": (
        "cat > Main.java <<'E'\n"
        "import java.nio.file.*; import java.util.stream.*;\n"
        "public class Main { public static void main(String[] a) throws Exception {\n"
        "  Thread t = new Thread(() -> {}); t.start(); t.join();\n"
        '  new ProcessBuilder("true").start().waitFor();\n'
        '  Files.writeString(Path.of("j"), "x"); System.gc();\n'
        "  System.out.println(IntStream.rangeClosed(1, 42).parallel().max().getAsInt()); } }\n"
        "E\n"
        "javac -J-Xmx256m Main.java && java -Xmx128m Main"
    ),
    "perl": "perl -e 'print 6 * 7, \"\\n\"; $x = `echo y`; fork || exit; wait'",
}


@pytest.mark.parametrize("program", PROGRAMS)
async def test_a_program_runs_behind_the_filter(box: AsyncSandbox, program: str) -> None:
    if shutil.which(program, path="/usr/bin:/bin") is None:
        pytest.skip(f"no {program} on this machine")
    check(await box.shell(f"set -e; {PROGRAMS[program]}", timeout=60), "42")


async def test_pip_installs_from_a_folder_of_wheels(box: AsyncSandbox, tmp_path: Path) -> None:
    pytest.importorskip("pip")
    made = wheelhouse.wheel(tmp_path, "tiny", "1.0", {"tiny.py": "answer = 42\n"})
    await box.files.write(f"wheels/{made.name}", made.read_bytes())
    python = shlex.quote(sys.executable)
    done = await box.shell(
        f"{python} -m pip install --no-index --find-links wheels --target lib --upgrade -q tiny;"
        f"PYTHONPATH=lib {python} -c 'import tiny; print(tiny.answer)'",
        timeout=60,
    )
    check(done, "42")


async def test_a_program_that_the_filter_stops_is_noticed(box: AsyncSandbox) -> None:
    """The control: what is stopped, what goes on after it, and what is killed."""
    for stopped in ("unshare -U true && echo 42", "unshare -U true; echo 42", "kill -SYS $$"):
        with pytest.raises(AssertionError):
            check(await box.shell(stopped), "42")


async def test_an_environment_is_made(box: AsyncSandbox) -> None:
    python = shlex.quote(sys.executable)
    done = await box.shell(
        f"{python} -m venv --without-pip env && env/bin/python -c 'print(42)'", timeout=60
    )
    check(done, "42")
