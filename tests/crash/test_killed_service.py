"""A service whose process is killed in the middle: the next one on the same data is whole."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sbx.errors import Conflict, NotFound
from sbx.protocol.runs import Run, Status
from sbx.runtime.settings import Settings
from sbx.service.caller import Caller
from sbx.service.lifecycle import State
from sbx.service.run import RunRequest
from sbx.service.service import Service

ROOT = Path(__file__).resolve().parents[2]
ME = Caller("me", "key")

BEGINNING = """
import asyncio, json, sys
from pathlib import Path
from sbx.service.caller import Caller
from sbx.service.service import Service
from sbx.service.run import RunRequest
from sbx.runtime.settings import Settings

me = Caller("me", "key")

def say(**facts):
    print(json.dumps(facts), flush=True)

async def run(service, box, code, conversation="default"):
    request = RunRequest("python", code)
    return await (await service.runs.start(me, box, conversation, request)).result()
"""

IN_THE_MIDDLE = (
    BEGINNING
    + """
async def main():
    service = await Service(Settings(data_dir=Path(sys.argv[1]))).start()
    kept = await service.sandboxes.create(me, ttl_s=3600)
    gone = await service.sandboxes.create(me)
    await run(service, kept.id, "open('kept', 'w').write('precious'); x = 1")
    for name in ("second", "third"):
        await run(service, kept.id, f"open('kept', 'w').write({name!r})", name)
    await run(service, gone.id, "open('gone', 'w')")
    hang = RunRequest("python", "print('on', flush=True); import time; time.sleep(99)")
    handle = await service.runs.start(me, kept.id, "default", hang)
    async for _, event in handle.events():
        if event.type == "stdout":
            break

    there = asyncio.Semaphore(0)
    async def never(*_):  # the rows say that it is deleted, and the files are there
        there.release()
        await asyncio.sleep(99)
    service.garbage.remove = never
    service.garbage.remove_conversations = never

    async def slow():
        yield b"half" * 100000
        there.release()
        await asyncio.sleep(99)
    async def write():
        async with service.sandboxes.using(me, kept.id, scope="files:write") as use:
            await use.active.files.write_stream("half", slow())

    doing = [
        asyncio.create_task(service.sandboxes.delete(me, gone.id)),
        asyncio.create_task(service.sandboxes.delete_conversation(me, kept.id, "third")),
        asyncio.create_task(write()),
    ]
    for _ in doing:
        await there.acquire()
    say(id=kept.id, gone=gone.id, run=handle.run_id)
    await asyncio.sleep(99)

asyncio.run(main())
"""
)

AT_ANY_MOMENT = (
    BEGINNING
    + """
async def live(service, number):
    while True:
        made = await service.sandboxes.create(me)
        say(made=made.id)
        ended = await run(service, made.id, "open('kept', 'w').write('1')")
        say(written=made.id, run=ended.run_id)
        await service.sandboxes.stop(me, made.id)
        if number:
            await service.sandboxes.delete(me, made.id)
            say(deleted=made.id)

async def main():
    service = await Service(Settings(data_dir=Path(sys.argv[1]))).start()
    first = await service.sandboxes.create(me)
    ended = await run(service, first.id, "open('kept', 'w').write('1')")
    say(written=first.id, run=ended.run_id)
    await asyncio.gather(*(live(service, number) for number in range(3)))

asyncio.run(main())
"""
)


def killed(program: str, data: Path, after_s: float = 0.0) -> list[dict[str, Any]]:
    """What the program said before it was killed, so long after its first word."""
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(data)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    with process.stdout as said:
        first = said.readline()
        time.sleep(after_s)
        process.send_signal(signal.SIGKILL)
        process.wait()
        return [json.loads(line) for line in (first, *said) if line.endswith("\n")]


async def run_in(
    service: Service, sandbox_id: str, code: str, conversation: str = "default"
) -> Run:
    handle = await service.runs.start(ME, sandbox_id, conversation, RunRequest("python", code))
    run = await handle.result()
    assert run.status is Status.OK, run
    return run


def owned(service: Service) -> list[Path]:
    """The directories of sandboxes, except prewarmed ones, which nobody owns yet."""
    names = set(service.runtime.data.sandboxes()) - service.runtime.unowned_directories
    return [service.data_dir / "sandboxes" / name for name in names]


async def test_killed_in_the_middle_of_everything_the_next_one_is_whole(tmp_path: Path) -> None:
    data = tmp_path / "data"
    (said,) = killed(IN_THE_MIDDLE, data)
    sandboxes = data / "sandboxes"
    assert len(list(sandboxes.iterdir())) in (2, 3)  # with a home that nobody owned yet
    async with Service(Settings(data_dir=data)) as service:
        view = await service.sandboxes.get(ME, said["id"])
        assert (view.state, view.idle_expires_at) == (State.IDLE, None)
        assert (
            await service.runs.history.entry(ME, said["id"], said["run"])
        ).status == "interrupted"

        run = await run_in(service, said["id"], "import os; print(*sorted(os.listdir()))")
        assert (run.stdout, run.state_lost) == ("kept uploads\n", True)
        run = await run_in(service, said["id"], "print(open('kept').read())", "second")
        assert run.stdout == "second\n"
        assert not [*sandboxes.glob("*/*/staging/*")], "what was half written is still there"

        (sandbox,) = owned(service)  # the deletion is finished
        with pytest.raises(NotFound):
            await service.sandboxes.get(ME, said["gone"])
        with pytest.raises(NotFound):
            await service.sandboxes.delete(ME, said["gone"])
        assert (await service.events.page(ME, said["gone"])).items[-1].cause == "requested"

        assert len(list(sandbox.iterdir())) == 2  # and that of the conversation
        assert not (data / "unclaimed").exists()  # nothing of what was deleted is kept
        found = await service.sandboxes.conversations(ME, said["id"])
        assert [one.name for one in found] == ["default", "second"]


async def test_killed_at_any_moment_nothing_that_was_told_is_lost(tmp_path: Path) -> None:
    data = tmp_path / "data"
    said: list[dict[str, Any]] = []
    for _ in range(2):
        said += killed(AT_ANY_MOMENT, data, random.uniform(0.1, 1.0))
    assert len(said) >= 2
    made = {one["made"] for one in said if "made" in one}
    written = {one["written"]: one["run"] for one in said if "written" in one}
    deleted = {one["deleted"] for one in said if "deleted" in one}
    async with Service(Settings(data_dir=data)) as service:
        there = {view.id for view in (await service.sandboxes.list(ME, limit=500)).items}
        assert not there & deleted
        for sandbox_id in made - deleted - there:  # its deletion was done, and not yet told
            last = (await service.events.page(ME, sandbox_id)).items[-1]
            assert last.type == "deleted"
        for sandbox_id in sorted(there & set(written))[:4]:
            assert (await service.runs.history.entry(ME, sandbox_id, written[sandbox_id])).success
            assert (await run_in(service, sandbox_id, "print(open('kept').read())")).stdout == "1\n"
        assert len(owned(service)) <= len(there)


async def test_what_the_store_does_not_know_is_kept_apart(tmp_path: Path) -> None:
    data = tmp_path / "data"
    async with Service(Settings(data_dir=data)) as service:
        made = await service.sandboxes.create(ME)
        async with service.sandboxes.using(ME, made.id, scope="files:write") as use:
            await use.active.files.write("kept", "1")
        with pytest.raises(Conflict, match="another runtime"):
            async with Service(Settings(data_dir=data)):
                pass
    (known,) = (data / "sandboxes").iterdir()
    for stranger in (data / "sandboxes" / ("a" * 32) / ("b" * 32), known / ("c" * 32)):
        stranger.mkdir(parents=True)
        (stranger / "file").write_text("nobody's")
    async with Service(Settings(data_dir=data)) as service:
        assert list((data / "sandboxes").iterdir()) == [known]
        assert len(list(known.iterdir())) == 1
        kept = [path.read_text() for path in (data / "unclaimed").rglob("file")]
        assert kept == ["nobody's", "nobody's"]
        async with service.sandboxes.using(ME, made.id, scope="files:read") as use:
            assert await use.active.files.read("kept") == "1"
