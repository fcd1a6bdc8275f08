"""Code plants and removes host executables without a pause while the user works in the directory.

The path guard leaves no window: the path that it checks is the descriptor that it uses, and what it
lets Linux execute is under Landlock. So nothing may be executed in any order of events. A race ends
when the interesting order has occurred ROUNDS times: the attack went on with its calls while the
user's programs ran. Some of the calls must have been refused by then.
"""

import asyncio
from pathlib import Path

import pytest
from planting import Place, make_place, sandbox

from sbx import Runtime
from tests.tiers import rows

pytestmark = [
    pytest.mark.parametrize("started_by", ["fork"], indirect=True, scope="module"),
    pytest.mark.timeout(600),
]
ROUNDS, ROUNDS_FULL = 5, 1000
MOST = 50  # times as many rounds, and the order has not occurred: the attack is stuck

PREPARE = """
import ctypes, os, shutil, threading, time
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
    while any(one.is_alive() for one in threads):
        with open("/tmp/counts", "w") as file: file.write("{tried} {refused}".format(**counts))
        shutil.copy("/tmp/counts", "counts.new"); os.rename("counts.new", "counts")
        time.sleep(0.01)
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


@pytest.mark.parametrize("attack", rows(ATTACKS, [*ATTACKS][::2]))
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
        met = tried = refused = 0
        for _ in range(MOST * rounds):
            if done.done():  # the policy's wall time
                done = asyncio.ensure_future(box.run(ATTACKS[attack]))
            await asyncio.to_thread(use, place)
            before, (tried, refused) = tried, counts(place)
            met += tried > before
            if met >= rounds and refused:
                break
        await box.shell("touch /tmp/stop")
        assert (await done).ok
    assert not place.executed
    assert met >= rounds
    assert refused > 0


def counts(place: Place) -> tuple[int, int]:
    """Calls that the attack has tried, and those of them that were refused."""
    try:
        tried, refused = (place.directory / "counts").read_text().split()
    except FileNotFoundError:
        return 0, 0  # it has not begun
    return int(tried), int(refused)


def use(place: Place) -> None:
    for where in (".", "sub", "moved", "lib"):
        if (place.directory / where).is_dir():
            place.user("git", "-C", where, "status")


CONFIG = (
    "[core]\n\trepositoryformatversion = 0\n\tbare = false\n\tworktree = .\n"
    "\tfsmonitor = \"touch '{marker}'; false\"\n"
)
# Two parties that see only their own half.
HALVES = {
    "head": """
def step():
    os.close(os.open("lib/HEAD", os.O_CREAT | os.O_WRONLY))
    try: look()
    finally: os.unlink("lib/HEAD")
""",
    "objects": """
def step():
    os.mkdir("lib/objects")
    try: look()
    finally: os.rmdir("lib/objects")
""",
}
TRIES = """
import os, stat
complete = 0
def look():
    global complete
    modes = [os.lstat("lib/" + name).st_mode for name in ("HEAD", "objects")]
    complete += stat.S_ISREG(modes[0]) and stat.S_ISDIR(modes[1])
def repeat(*steps):
    for _ in range({tries}):
        for step in steps:
            try: step()
            except OSError: pass
"""


@pytest.mark.parametrize("by", rows(["two sandboxes", "two contexts"], ["two sandboxes"]))
async def test_two_guards_put_no_repository_together(
    runtime: Runtime, own_temporary_directory: Path, request: pytest.FixtureRequest, by: str
) -> None:
    """Each guard used to check the parts, and could miss one that the other created then."""
    place = make_place(own_temporary_directory / f"halves-{abs(hash(by))}")
    place.write("lib/config", CONFIG.format(marker=place.marker))
    place.write("lib/refs/x", "")
    tries = TRIES.format(tries=20_000 if request.config.getoption("--full") else 2_000)
    async with sandbox(runtime, place) as box, sandbox(runtime, place) as second:
        other = second if by == "two sandboxes" else await box.contexts.create("other")
        runs = await asyncio.gather(
            box.run(tries + HALVES["head"] + "repeat(step); print(complete)"),
            other.run(tries + HALVES["objects"] + "repeat(step); print(complete)"),
        )
        assert [run.stdout for run in runs] == ["0\n", "0\n"]
        await box.run("open('lib/HEAD', 'w').write('ref: refs/heads/x')")
        await box.run("import os; os.mkdir('lib/objects')")
        await asyncio.to_thread(place.user, "git", "-C", "lib", "status")
    assert not place.executed


async def test_a_renamed_directory_hides_no_repository(
    runtime: Runtime, own_temporary_directory: Path, request: pytest.FixtureRequest
) -> None:
    """The guard looked for HEAD by a path, which another context had given to a directory without
    one since: it wrote to the configuration of the user."""
    place = make_place(own_temporary_directory / "hidden")
    for path in ("up/repo/HEAD", "up/repo/objects/x", "up/repo/refs/x", "up/repo/config"):
        place.write(path, "of the user")
    place.write("fake/repo/x", "")
    tries = TRIES.format(tries=20_000 if request.config.getoption("--full") else 3_000)
    write = """
done = 0
def write():
    global done
    open("up/repo/config", "a").write("planted")
    done += 1
repeat(write); print(done)
"""
    swap = """
def swap(): os.rename("up", "away"); os.rename("fake", "up")
def back(): os.rename("up", "fake"); os.rename("away", "up")
repeat(swap, back)
for step in (back, swap, back):
    try: step()
    except OSError: pass
"""
    async with sandbox(runtime, place) as box:
        other = await box.contexts.create("other")
        await asyncio.gather(box.run(tries + write), other.run(tries + swap))
    configs = [
        path for path in place.directory.glob("*/repo/config") if (path.parent / "HEAD").exists()
    ]
    assert [path.read_text() for path in configs] == ["of the user"]


async def test_a_fifo_is_not_exchanged_for_a_protected_file(
    runtime: Runtime, own_temporary_directory: Path
) -> None:
    """The guard opened a FIFO by its name after the check, in a thread."""
    place = make_place(own_temporary_directory / "fifo")
    place.write(".git/hooks/pre-commit", "of the user")
    place.user("ln", ".git/hooks/pre-commit", "notes.txt")
    code = """
import os, stat, threading
got = []
def opens():
    try:
        fd = os.open("f", os.O_RDWR)
    except OSError:
        return
    if stat.S_ISREG(os.fstat(fd).st_mode): got.append(os.write(fd, b"planted"))
    os.close(fd)
def renames():
    try: os.rename("notes.txt", "f")
    except OSError: pass
for _ in range(600):
    if os.path.lexists("f"): os.unlink("f")
    os.mkfifo("f")
    threads = [threading.Thread(target=one) for one in (opens, renames)]
    for one in threads: one.start()
    for one in threads: one.join()
    if not os.path.lexists("notes.txt"):
        os.rename("f", "notes.txt")
print(len(got))
"""
    async with sandbox(runtime, place) as box:
        run = await box.run(code)
        assert run.stdout == "0\n", run
    assert (place.directory / ".git/hooks/pre-commit").read_text() == "of the user"
