"""Contexts of one conversation share its files and its limits, and nothing else: they have the same
host uid and the same cgroup, and still neither sees the other."""

import secrets

import pytest
from attacking import Fresh

from sbx.runtime.run.context import Context
from sbx.runtime.sandbox import AsyncSandbox

pytestmark = pytest.mark.core


async def pair(box: AsyncSandbox) -> tuple[Context, Context]:
    return box.contexts.default, await box.contexts.create(f"c-{secrets.token_hex(4)}")


@pytest.mark.parametrize(
    ("make", "find"),
    [
        ("open('/tmp/made', 'w')", "open('/tmp/made')"),
        ("open('/dev/shm/made', 'w')", "open('/dev/shm/made')"),
        (
            "import socket; s = socket.socket(socket.AF_UNIX); s.bind('\\0made'); s.listen()",
            "import socket; socket.socket(socket.AF_UNIX).connect('\\0made')",
        ),
        (
            "import socket; s = socket.socket(); s.bind(('127.0.0.1', 4567)); s.listen()",
            "import socket; socket.create_connection(('127.0.0.1', 4567), 2)",
        ),
    ],
)
async def test_what_one_makes_outside_the_files_the_other_does_not_find(
    fresh: Fresh, make: str, find: str
) -> None:
    one, other = await pair(await fresh())
    assert (await one.run(make)).status == "ok"
    assert (await one.run(find)).status == "ok"
    assert (await other.run(find)).status == "error"


async def test_one_sees_and_ends_no_process_of_the_other(fresh: Fresh) -> None:
    one, other = await pair(await fresh())
    await other.run("import subprocess; p = subprocess.Popen(['sleep', '4321']); x = 1")
    look = (
        "import glob\n"
        "[at for at in glob.glob('/proc/[0-9]*/cmdline') if b'4321' in open(at, 'rb').read()]"
    )
    assert (await other.run(look)).result != "[]"
    assert (await one.run(look)).result == "[]"
    kill = "import os, signal\ntry: os.kill(-1, signal.SIGKILL)\nexcept OSError: pass"
    await one.run(kill)
    assert (await other.run("x, p.poll()")).result == "(1, None)"


async def test_a_fork_bomb_in_one_leaves_the_other_its_kernel(fresh: Fresh) -> None:
    one, other = await pair(await fresh())
    await other.run("x = 1")
    bomb = "import os, time\nwhile True:\n    try: os.fork()\n    except OSError: time.sleep(0.1)"
    run = await one.run(bomb, timeout=2)
    assert run.status in ("timeout", "killed")
    await one.stop()
    after = await other.run("x")
    assert (after.result, after.state_lost) == ("1", False)
