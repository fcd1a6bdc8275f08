"""Code plants and removes host executables without a pause while the user works in the directory.

The path guard leaves no window: the path that it checks is the descriptor that it uses, and what it
lets Linux execute is under Landlock. So nothing may be executed in any order of events. Each test
goes on until the user's program has run often, and until the attack has got through to its calls.
"""

import asyncio
from pathlib import Path

import pytest
from planting import Place, make_place, sandbox

from sbx import Runtime

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.parametrize("started_by", ["fork"], indirect=True, scope="module"),
    pytest.mark.timeout(600),
]
ROUNDS, ROUNDS_FULL = 60, 3000

PREPARE = """
import ctypes, os, shutil, threading
libc = ctypes.CDLL(None, use_errno=True)
CONFIG = "[core]\\n\\trepositoryformatversion = 0\\n\\tfsmonitor = \\"touch 'MARKER'; false\\"\\n"
os.makedirs("/tmp/made/objects", exist_ok=True); os.makedirs("/tmp/made/refs", exist_ok=True)
open("/tmp/made/HEAD", "w").write("ref: refs/heads/x\\n")
open("/tmp/made/config", "w").write(CONFIG)
counts = {"tried": 0, "refused": 0}
def forever(step):
    while not os.path.exists("/tmp/stop"):
        counts["tried"] += 1
        try:
            step()
        except OSError:
            counts["refused"] += 1
def race(*steps):
    threads = [threading.Thread(target=forever, args=(step,)) for step in steps]
    for one in threads: one.start()
    for one in threads: one.join()
    print(counts["tried"], counts["refused"])
"""

# A buffer whose path changes while another thread makes the call with it.
SWAPPED = """
path = ctypes.create_string_buffer(64)
def swap():
    path.value = b"{first}"; path.value = b"{second}"
def write():
    fd = libc.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    if fd < 0: raise OSError(ctypes.get_errno(), "open")
    os.write(fd, CONFIG.encode()); os.close(fd)
race(swap, write, write)
"""

ATTACKS = {
    "a repository": """
def plant(): shutil.copytree("/tmp/made", ".git")
def remove(): shutil.rmtree(".git")
def unlink(): os.unlink(".git")
race(plant, remove, unlink)
""",
    "a repository by renames": """
def plant():
    shutil.copytree("/tmp/made", "way", dirs_exist_ok=True); os.rename("way", ".git")
def back(): os.rename(".git", "way")
race(plant, back, plant)
""",
    "the configuration of the user, swapped with a free name": SWAPPED.format(
        first="free.txt", second="sub/.git/config"
    ),
    "the configuration of the user, swapped with a path outside": SWAPPED.format(
        first="/tmp/outside.txt", second="sub/.git/config"
    ),
    "a directory that is swapped with a link": """
os.makedirs("free/.x", exist_ok=True)
def swap():
    os.symlink("sub/.git", "way"); os.unlink("way"); os.mkdir("way"); os.rmdir("way")
def write(): open("way/config", "w").write(CONFIG)
race(swap, write, write)
""",
    "a directory that is renamed": """
def there(): os.rename("sub", "moved")
def back(): os.rename("moved", "sub")
def write(): open("sub/.git/config", "w").write(CONFIG)
def other(): open("moved/.git/config", "w").write(CONFIG)
race(there, back, write, other)
""",
    "the parts of a repository": """
def head():
    os.makedirs("lib", exist_ok=True); open("lib/HEAD", "w").write("ref: refs/heads/x\\n")
def rest():
    os.makedirs("lib/objects"); os.makedirs("lib/refs"); open("lib/config", "w").write(CONFIG)
def remove(): shutil.rmtree("lib")
race(head, rest, remove)
""",
}


@pytest.mark.parametrize("attack", ATTACKS)
async def test_race_executes_nothing_on_the_host(
    runtime: Runtime, own_temporary_directory: Path, request: pytest.FixtureRequest, attack: str
) -> None:
    place = make_place(own_temporary_directory / f"race-{abs(hash(attack))}")
    place.user("git", "init", "-q", "sub")
    rounds = ROUNDS_FULL if request.config.getoption("--full") else ROUNDS
    async with sandbox(runtime, place) as box:
        prepared = await box.run(PREPARE.replace("MARKER", str(place.marker)))
        assert prepared.ok, prepared.error
        done = asyncio.ensure_future(box.run(ATTACKS[attack]))
        for _ in range(rounds):
            if done.done():  # the policy's wall time
                done = asyncio.ensure_future(box.run(ATTACKS[attack]))
            await asyncio.to_thread(use, place)
        await box.shell("touch /tmp/stop")
        tried, refused = map(int, (await done).stdout.split())
    assert not place.executed
    assert tried > rounds
    assert refused > 0


def use(place: Place) -> None:
    for where in (".", "sub", "moved", "lib"):
        if (place.directory / where).is_dir():
            place.user("git", "-C", where, "status")
