"""The code inside swaps what the host is at work on: names for links out, FIFOs, other directories.

Each call may be refused. None may read or change anything outside, none may hang, none may fail as
if the host were broken.
"""

import asyncio
import hashlib
import io
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from both_faces.faces import FACES, Box, asynchronous

from sbx.client.files import RemoteFiles
from sbx.errors import Broken, SbxError, Unavailable
from sbx.protocol.runs import Run, Status
from sbx.runtime.files.files import OpenFiles
from sbx.workspace.streams import ReceivedFile
from tests.tiers import rows

pytestmark = pytest.mark.core
SECRET = "what-only-the-host-may-read"
ROUNDS = 60
FULL_TIER = 4  # times as many
ARCHIVES = 8
HUNG_S = 60.0

# `race/x` is by turns a directory, a link to the host's, a FIFO, a file, a link to a file there,
# and nothing; so is `race/x/f` while it is a directory.
RACER = """
import itertools, os, shutil
out, secret = {out!r}, {secret!r}
# An operation of the host that an earlier test cancelled can still write for a moment.
while os.path.lexists('race') or os.path.lexists('pool'):
    shutil.rmtree('race', ignore_errors=True); shutil.rmtree('pool', ignore_errors=True)
os.makedirs('race'); os.makedirs('pool/dir/g')
open('pool/dir/f', 'w').write('inside'); open('pool/dir/g/h', 'w').write('inside')
os.symlink(out, 'pool/linkdir'); os.symlink(secret, 'pool/linkfile')
os.mkfifo('pool/fifo'); open('pool/file', 'w').write('inside')
os.symlink(secret, 'pool/f-link'); os.mkfifo('pool/f-fifo')
os.mkdir('pool/f-dir')
open('ready', 'w').close()
names = itertools.cycle(['dir', 'linkdir', 'dir', 'fifo', 'dir', 'file', 'dir', 'linkfile'])
inner = itertools.cycle(['f-link', 'f-fifo', 'f-dir'])
while not os.path.exists('stop'):
    name = next(names)
    try:
        os.rename('pool/' + name, 'race/x')
        if name == 'dir':
            for _ in range(4):
                other = next(inner)
                os.rename('race/x/f', 'pool/f'); os.rename('pool/' + other, 'race/x/f')
                os.rename('race/x/f', 'pool/' + other); os.rename('pool/f', 'race/x/f')
    except OSError:
        pass
    try:
        os.rename('race/x', 'pool/' + name)
    except OSError:
        shutil.rmtree('race/x', ignore_errors=True)
    for kept, make in (('dir/g', os.makedirs), ('fifo', os.mkfifo), ('f-fifo', os.mkfifo),
                       ('f-dir', os.mkdir),
                       ('linkdir', lambda at: os.symlink(out, at)),
                       ('linkfile', lambda at: os.symlink(secret, at)),
                       ('f-link', lambda at: os.symlink(secret, at)),
                       ('file', lambda at: open(at, 'w').write('inside')),
                       ('dir/f', lambda at: open(at, 'w').write('inside'))):
        if not os.path.lexists('pool/' + kept):
            try: make('pool/' + kept)
            except OSError: pass
"""


class Race:
    """A sandbox whose code races, and what of the host it would like to reach."""

    def __init__(self, box: Box, out: Path, times: int) -> None:
        self.box = box
        self.times = times
        self.out = out
        self.secret = out / "secret"
        self.before = self.seen()

    def seen(self) -> dict[str, tuple[int, bytes]]:
        """All that is in the host's directory, with modes."""
        return {
            str(path.relative_to(self.out)): (
                path.lstat().st_mode,
                path.read_bytes() if path.is_file() else b"",
            )
            for path in sorted(self.out.rglob("*"))
        }

    async def rounds(self, act: Callable[[int], Awaitable[object]], count: int = ROUNDS) -> int:
        """How many of `count` calls, in the full tier of `times` as many, were not refused."""
        done = 0
        for number in range(count * self.times):
            try:
                async with asyncio.timeout(HUNG_S):
                    answer = await act(number)
            except (Broken, Unavailable):
                raise
            except SbxError:
                continue
            else:
                done += 1
                assert SECRET not in repr(answer)
        assert self.seen() == self.before
        return done


@pytest_asyncio.fixture(scope="module", params=rows(FACES, ci_tier=["embedded"]))
async def box(request: pytest.FixtureRequest) -> AsyncIterator[Box]:
    async with asynchronous(request.param) as box:
        yield box


async def swapping(box: Box, code: str) -> Run:
    """Begun anew where its time is up: a busy machine takes longer for a test than a run may."""
    while (run := await box.run(code, timeout=55)).status is Status.TIMEOUT:
        pass
    return run


@pytest_asyncio.fixture
async def race(box: Box, tmp_path: Path, pytestconfig: pytest.Config) -> AsyncIterator[Race]:
    """While it lasts, the code inside does nothing but swap."""
    out = tmp_path / "host"
    (out / "below").mkdir(parents=True)
    (out / "secret").write_text(SECRET)
    (out / "secret").chmod(0o640)
    (out / "below" / "f").write_text(SECRET)
    race = Race(box, out, FULL_TIER if pytestconfig.getoption("--full") else 1)
    code = RACER.format(out=str(out), secret=str(race.secret))
    racing = asyncio.create_task(swapping(box, code))
    try:
        while "ready" not in {entry.name for entry in await box.files.list()}:
            assert not racing.done(), racing.result()
            await asyncio.sleep(0.02)
        yield race
    finally:
        await box.files.write("stop", "")
        async with asyncio.timeout(60):
            run = await racing
    assert run.error is None, run.error
    assert race.seen() == race.before
    for name in ("stop", "ready"):
        await box.files.delete(name)


async def test_what_is_read_and_looked_at_is_inside(race: Race) -> None:
    files = race.box.files

    async def download(number: int) -> object:
        path = ("race/x/f", "race/x/below/f", "race/x")[number % 3]
        if isinstance(files, RemoteFiles):
            async with files.open_stream(path) as incoming:
                return b"".join([piece async for piece in incoming.chunks()])
        stream = await files.open_stream(path)
        try:
            return b"".join([piece async for piece in stream.chunks()])
        finally:
            stream.close()

    await race.rounds(lambda _: files.read_bytes("race/x/f"))
    await race.rounds(lambda _: files.read_bytes("race/x"))
    await race.rounds(download)
    await race.rounds(lambda _: files.stat("race/x/f"))

    async def listed(number: int) -> object:
        found = await files.list(("race/x", "race", ".")[number % 3], max_depth=4)
        assert not [entry for entry in found if entry.name in ("secret", "below")]
        return found

    assert await race.rounds(listed)


async def test_what_is_written_is_written_inside(race: Race, tmp_path: Path) -> None:
    """Whole, as a stream, in pieces; and directories."""
    files = race.box.files
    source = tmp_path / "source"
    source.write_text("mine")

    async def stream() -> AsyncIterator[bytes]:
        yield b"mi"
        yield b"ne"

    async def upload(number: int) -> object:
        path = ("race/x/f", "race/x/below/f")[number % 2]
        if isinstance(files, RemoteFiles):
            return await files.upload(source, path)
        begun = await files.partials.begin(path, 4)
        digest = hashlib.sha256(b"mine").hexdigest()
        try:
            await files.partials.append(begun.id, 0, digest, stream())
            return await files.partials.finish(begun.id, digest, _written)
        except SbxError:
            await files.partials.abort(begun.id)
            raise

    paths = ("race/x/f", "race/x/secret", "race/x/below/f", "race/x")
    await race.rounds(lambda number: files.write(paths[number % 4], "mine"))
    await race.rounds(lambda number: files.write_stream(paths[number % 4], stream()))
    await race.rounds(lambda number: files.make_directory(f"race/x/made{number}/deep"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sbx.client.transfers.RESUMABLE_MIN", 1)
        await race.rounds(upload, ROUNDS // 4)
    await race.rounds(lambda number: race.box.uploads.put_bytes(f"u{number % 5}", b"mine"))


def _written(opened: OpenFiles, path: str, received: ReceivedFile) -> int:
    return opened.files.place(path, received)


async def test_what_is_deleted_was_inside(race: Race) -> None:
    files = race.box.files
    paths = ("race/x/f", "race/x/secret", "race/x/below", "race/x", "race/x/below/f")
    await race.rounds(lambda number: files.delete(paths[number % 5]), 2 * ROUNDS)


async def test_find_and_grep_stay_inside_and_never_hang(race: Race) -> None:
    files = race.box.files
    rounds = ROUNDS // 2
    assert await race.rounds(lambda _: files.find("*", "."), rounds) == rounds * race.times
    await race.rounds(lambda _: files.find("*", "race/x"), ROUNDS // 2)
    for path in (".", "race", "race/x", "race/x/f"):

        async def grep(_: int, path: str = path) -> object:
            found = await files.grep("only", path)
            assert not found
            return found

        done = await race.rounds(grep, ROUNDS // 3)
        assert done or path.startswith("race/x")


async def test_a_move_never_leads_out(race: Race) -> None:
    files = race.box.files

    async def there_and_back(number: int) -> None:
        await files.write(f"mine/{number}", SECRET[:4])
        try:
            await files.move(f"mine/{number}", f"race/x/m{number}")
        finally:
            await files.move(f"race/x/m{number}", f"mine/back{number}")

    await race.rounds(there_and_back)
    await race.rounds(lambda number: files.move("race/x", f"mine/x{number}"), ROUNDS // 3)
    assert not await files.grep(SECRET, "mine")


async def test_a_copy_never_leads_out_and_brings_nothing_in(race: Race) -> None:
    """A few rounds at a time: each copy measures all that is there."""
    files = race.box.files
    await files.write("source/deep/f", "inside")

    async def into(number: int) -> None:
        await files.copy("source", f"race/x/c{number}")
        await files.delete(f"race/x/c{number}")

    async def onto(_: int) -> object:
        return await files.copy("source/deep/f", "race/x/f", overwrite=True)

    for _ in range(ROUNDS // 20):
        await files.write("copies/first", "")
        await race.rounds(lambda number: files.copy("race", f"copies/{number}"), 20)
        await race.rounds(lambda number: files.copy("race/x/f", f"copies/f{number}"), 10)
        assert not await files.grep(SECRET, "copies")
        await files.delete("copies")
        await race.rounds(into, 10)
        await race.rounds(onto, 10)


async def test_text_is_replaced_inside_only(race: Race) -> None:
    files = race.box.files
    done = await race.rounds(lambda _: files.replace("race/x/f", "inside", "inside"))
    done += await race.rounds(lambda _: files.replace("race/x/f", "what", "lost", count=None))
    done += await race.rounds(lambda _: files.replace("race/x", "only", "lost", count=None))
    assert done < 3 * ROUNDS * race.times


async def test_permissions_change_inside_only(race: Race) -> None:
    for path in ("race/x", "race/x/f", "race/x/below/f"):
        await race.rounds(lambda _, path=path: race.box.files.chmod(path, 0o777))  # type: ignore[misc]


async def test_a_watch_follows_nothing_out_and_ends_when_it_is_told(race: Race) -> None:
    """Its bookkeeping is fed faster than it is read: it must not go on for as long as that."""
    touched = race.out / "touched"
    answer = []
    async with asyncio.timeout(HUNG_S):
        async for change in race.box.files.watch("."):
            answer.append(change)
            if change.kind == "started":
                touched.write_text("")
            if len(answer) > 50:
                break
    touched.unlink()
    assert not [change for change in answer if "touched" in change.path]


async def test_an_archive_brings_nothing_in(race: Race) -> None:
    files = race.box.files

    async def pack(number: int) -> None:
        path = ("race", "race/x", ".")[number % 3]
        held = b"".join([piece async for piece in files.archive(path)])
        assert SECRET.encode() not in held
        with tarfile.open(fileobj=io.BytesIO(held)) as tar:
            for member in tar:
                content = tar.extractfile(member) if member.isreg() else None
                assert content is None or SECRET.encode() not in content.read()

    assert await race.rounds(pack, ARCHIVES)


async def test_unpacking_changes_nothing_outside(race: Race) -> None:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as tar:
        for name in ("x/f", "x/below/f", "x/secret", "x/g/h"):
            member = tarfile.TarInfo(name)
            member.size = 4
            tar.addfile(member, io.BytesIO(b"mine"))
    await race.rounds(lambda _: race.box.files.unpack(held.getvalue(), "race"), ARCHIVES // 2)
    await race.rounds(lambda _: race.box.files.unpack(held.getvalue(), "race/x"), ARCHIVES // 2)


async def test_trees_made_to_be_endless_end(race: Race) -> None:
    box = race.box
    made = await box.shell(
        "python3 - <<'E' || exit 1\n"
        "import os\n"
        "os.makedirs('endless', exist_ok=True); os.chdir('endless')\n"
        "fd = os.open('sparse', os.O_CREAT | os.O_RDWR); os.truncate(fd, 20 << 20)\n"
        "for _ in range(300): os.mkdir('d' * 100); os.chdir('d' * 100)\n"
        "E"
    )
    if made.exit_code:
        pytest.skip(f"no python3 as a command: {made.stderr}")
    async with asyncio.timeout(HUNG_S):
        found = await box.files.find("*", "endless")
        assert not found.complete
        grepped = await box.files.grep("x", "endless")
        assert (grepped.complete, list(grepped)) == (False, [])
        copied = await box.files.copy("endless", "endless-copy")
        assert not copied.complete
        async for change in box.files.watch("endless"):
            if change.kind == "overflow":
                break
        assert await box.files.delete("endless")
        assert await box.files.delete("endless-copy")


async def test_no_pattern_takes_for_ever(race: Race) -> None:
    """What takes Python's own engine longer than the sun will shine."""
    files = race.box.files
    await files.write("evil.txt", "a" * 60_000 + "!\n" + "x" * 300_000)
    async with asyncio.timeout(HUNG_S):
        for pattern in (r"(a+)+$", r"(a|aa)*b", r"(.*)*(.*)*c$", "(?:a?){60}a{60}b", "x{500}y"):
            assert await files.grep(pattern, "evil.txt", regex=True) == []
        assert await files.find("*a" * 60 + "b", ".") == []
