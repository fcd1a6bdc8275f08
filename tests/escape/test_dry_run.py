"""A dry run changes nothing outside, and what is committed is what was shown."""

import mmap
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import pytest_asyncio
from attacking import one_path
from places import short_directory

from sbx import AsyncSandbox, Runtime
from sbx.errors import Conflict, NotFound
from sbx.linux.reflink import clone
from sbx.policy import Policy, load
from sbx.protocol.runs import Status
from sbx.runtime.snapshots.dry_run import DryRun

pytestmark = [pytest.mark.core, one_path()]

SHOWN = b"#!/bin/sh\necho approved\n"
EVIL = b"#!/bin/sh\necho EVIL ####\n"
# The dry run hands a descriptor of its copy's file to whoever listens.
SEND = """
import os, socket
fd = os.open("/workspace/deploy.sh", os.O_RDWR | os.O_CREAT, 0o755)
os.write(fd, b"#!/bin/sh\\necho approved\\n")
try:
    peer = socket.socket(socket.AF_UNIX)
    peer.connect("/workspace/shared/s")
    socket.send_fds(peer, [b"x"], [fd])
    print("sent")
except OSError as error:
    print(type(error).__name__)
"""
LISTEN = """
import os, socket, threading
listening = socket.socket(socket.AF_UNIX)
listening.bind("/workspace/shared/s")
listening.listen()
got = []
def take():
    peer, _ = listening.accept()
    got.extend(socket.recv_fds(peer, 1, 1)[1])
threading.Thread(target=take, daemon=True).start()
"""


def sharing() -> Policy:
    policy = load("default")
    pool = policy.pool.model_copy(update={"min_idle": 0, "max_idle": 2})
    return policy.model_copy(update={"shared": True, "pool": pool, "host_executables": "allow"})


@pytest.fixture
def top() -> Iterator[Path]:
    with short_directory() as made:
        made.chmod(0o755)
        yield made


@pytest_asyncio.fixture
async def shared(runtime: Runtime) -> AsyncIterator[AsyncSandbox]:
    async with await runtime.create(sharing()) as box:
        yield box


async def of_python(box: AsyncSandbox, code: str) -> DryRun:
    await box.files.write("attack.py", code)
    made = await box.dry_run("python3 attack.py")
    assert made.run.status is Status.OK, made.run.text
    return made


async def test_live_kernel_gets_no_descriptor_of_the_copy(shared: AsyncSandbox) -> None:
    assert (await shared.run(LISTEN)).status is Status.OK
    made = await of_python(shared, SEND)
    assert made.run.stdout in ("FileNotFoundError\n", "ConnectionRefusedError\n")
    assert (await shared.run("len(got)")).result == "0"
    assert "/workspace/shared/s" in made.left_out
    await made.commit()
    assert await shared.files.read_bytes("deploy.sh") == SHOWN


async def test_shared_files_are_readable_and_changes_below_them_are_refused(
    shared: AsyncSandbox,
) -> None:
    await shared.files.write("shared/data", "seen")
    made = await shared.dry_run("cat shared/data; echo x > shared/data; echo x > shared/new")
    assert made.run.stdout == "seen"
    assert made.run.stderr.count("Read-only file system") == 2
    assert made.changes == ()
    await made.commit()
    assert await shared.files.read("shared/data") == "seen"


@pytest.mark.parametrize("how", ["written", "mapped", "grown", "cut"])
async def test_content_written_after_it_was_shown_is_not_committed(
    shared: AsyncSandbox, how: str
) -> None:
    """A descriptor or a mapping of a file of the copy outlived the jail of the dry run, and what
    was written through it after the diff was shown was committed."""
    await shared.files.write("other", "as it was")
    made = await of_python(shared, SEND.partition("try:")[0] + "open('other', 'w').write('later')")
    path = made._copy.path / "files" / "deploy.sh"
    with ExitStack() as held:
        reflinks = clones(path)
        file = held.enter_context(path.open("r+b", buffering=0))
        mapped = held.enter_context(mmap.mmap(file.fileno(), 0))
        match how:
            case "written":
                file.write(EVIL[: len(SHOWN)])
            case "mapped":
                mapped[:] = EVIL[: len(SHOWN)]
            case "grown":
                file.seek(0, os.SEEK_END)
                file.write(EVIL)
            case "cut":
                file.truncate(9)
        if how == "grown" and not reflinks:  # as many bytes are copied as were shown
            await made.commit()
            assert await shared.files.read_bytes("deploy.sh") == SHOWN
            return
        with pytest.raises(Conflict) as raised:
            await made.commit()
    assert raised.value.code == "workspace_changed"
    assert await shared.files.read("other") == "as it was"
    with pytest.raises(NotFound):
        await shared.files.stat("deploy.sh")


def clones(path: Path) -> bool:
    """Whether files are copied with all blocks that they have at the time."""
    with path.open("rb") as source, path.with_name("cloned").open("wb") as made:
        return clone(source.fileno(), made.fileno())


def listener(place: Path, kind: int) -> socket.socket:
    """A socket of a daemon of the host, to which every user may connect."""
    made = socket.socket(socket.AF_UNIX, kind)
    made.bind(str(place))
    place.chmod(0o777)
    made.settimeout(0)
    if kind == socket.SOCK_STREAM:
        made.listen()
    return made


REACH = """
import os, socket
places = {places}
for place in places:
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        try:
            peer = socket.socket(socket.AF_UNIX, kind)
            peer.connect(place)
            peer.send(b"DROP TABLE users")
            print("reached", place)
        except OSError:
            pass
    try:
        os.write(os.open(place, os.O_WRONLY | os.O_NONBLOCK), b"reached")
        print("reached", place)
    except OSError:
        pass
    try:
        print("reached", place, os.read(os.open(place, os.O_RDONLY | os.O_NONBLOCK), 99))
    except OSError:
        pass
"""


@pytest.mark.needs("landlock")
@pytest.mark.parametrize("target", ["/mnt/rod", "/workspace/shared/rod"])
async def test_dry_run_reaches_no_daemon_of_the_host_in_an_mount(
    shared: AsyncSandbox, top: Path, target: str
) -> None:
    source = top / "rod"
    (source / "below").mkdir(parents=True)
    await shared.files.make_directory("shared/rod")
    os.mkfifo(source / "fifo")
    (source / "fifo").chmod(0o777)
    with ExitStack() as held:
        stream = held.enter_context(listener(source / "below" / "s", socket.SOCK_STREAM))
        datagram = held.enter_context(listener(source / "d", socket.SOCK_DGRAM))
        fifo = os.open(source / "fifo", os.O_RDWR | os.O_NONBLOCK)
        held.callback(os.close, fifo)
        os.write(fifo, b"for the host")
        await shared.mount(source, target)
        places = [f"{target}/{name}" for name in ("below/s", "d", "fifo")]
        made = await of_python(shared, REACH.format(places=places))
        assert made.run.stdout == ""
        assert target in made.left_out
        for one in (stream, datagram):
            with pytest.raises(BlockingIOError):
                one.accept() if one is stream else one.recv(99)
        assert os.read(fifo, 99) == b"for the host"


@pytest.mark.needs("landlock")
async def test_dry_run_sees_an_mount_of_files_alone(shared: AsyncSandbox, top: Path) -> None:
    for name in ("data", "written"):
        (top / name / "below").mkdir(parents=True)
        (top / name / "below" / "file").write_text("seen")
        os.chown(top / name, 64_000, 64_000) if os.geteuid() == 0 else None
    await shared.files.make_directory("shared/written")
    await shared.mount(top / "data")
    await shared.mount(top / "written" / "below")
    made = await shared.dry_run("cat /mnt/data/below/file; cat /mnt/below/file; touch /mnt/data/x")
    assert made.run.stdout == "seenseen"
    assert made.left_out == ()
    await shared.mount(top / "written", "/workspace/shared/written", read_only=False)
    made = await shared.dry_run("cat /mnt/data/below/file; ls /mnt shared/written")
    assert made.run.stdout == "seen/mnt:\ndata\n\nshared/written:\n"
    assert made.left_out == ("/mnt/below", "/workspace/shared/written")


async def test_dry_run_reaches_no_socket_in_a_directory_of_uploads(
    runtime: Runtime, top: Path
) -> None:
    (top / "uploads").mkdir()
    (top / "uploads" / "a.csv").write_text("1,2\n")
    with listener(top / "uploads" / "s", socket.SOCK_STREAM):
        async with await runtime.create(uploads=top / "uploads") as box:
            place = "/workspace/uploads/temparea"
            made = await of_python(box, REACH.format(places=[f"{place}/s"]))
            assert made.run.stdout == ""
            made = await box.dry_run(f"cat {place}/a.csv; touch {place}/b")
            assert made.run.stdout == "1,2\n"
            assert "Read-only" in made.run.stderr
