"""A store that is missing, empty, older or damaged: no file of a sandbox is lost, whatever is done.

The service is a service on a data directory; it is ended, or killed, between the steps.
"""

# ruff: noqa: ASYNC240  # a look at a file blocks nothing that matters to a test

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from command import environment, sbx
from persistent_sandboxes import ME, create, read

from sbx.errors import SbxError, Unavailable
from sbx.runtime.runtime import Runtime
from sbx.runtime.settings import Settings
from sbx.service.service import Service
from sbx.store.migrations import migrate, shipped


def service_of(data: Path) -> Service:
    return Service(Settings(data_dir=data, gc_interval=0, fast_path=False))


def contents(data: Path) -> list[str]:
    """Of every file that a test wrote, wherever it lies."""
    return sorted(path.read_text() for path in data.rglob("files/kept"))


def unclaimed(data: Path) -> list[str]:
    return sorted(os.listdir(data / "unclaimed")) if (data / "unclaimed").exists() else []


def sbx_store(data: Path, *words: str | Path) -> dict[str, Any]:
    done = sbx("store", *words, "--json", "--data-dir", data)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


async def refusal_of(data: Path) -> Unavailable:
    """The error with which a service does not start; it changes nothing."""
    before = {path: path.stat().st_mtime_ns for path in data.rglob("*") if path.is_file()}
    with pytest.raises(Unavailable) as refused:
        async with service_of(data):
            pass
    after = {path: path.stat().st_mtime_ns for path in data.rglob("*") if path.is_file()}
    assert after == before
    return refused.value


@contextmanager
def moved_away(path: Path) -> Iterator[Path]:
    kept = path.with_name("kept-by-the-test")
    path.rename(kept)
    yield kept
    path.unlink(missing_ok=True)
    kept.rename(path)


async def test_store_that_is_lost_or_older_is_refused_and_no_file_goes(tmp_path: Path) -> None:
    """The next start made a new store, or took the older one, and removed every directory that it
    did not know."""
    data = tmp_path / "data"
    store = data / "store.sqlite"
    async with service_of(data) as service:
        first = await create(service, "first")
    shutil.copy(store, tmp_path / "older")
    async with service_of(data) as service:
        second = await create(service, "second")

    with moved_away(store):
        assert (await refusal_of(data)).code == "store_missing"
    with moved_away(store):
        store.touch()
        error = await refusal_of(data)
        assert error.code == "store_missing"
        assert f"sbx store restore --data-dir {data} --empty" in (error.hint or "")
        assert store.stat().st_size == 0
    with moved_away(store) as latest:
        shutil.copy(tmp_path / "older", store)
        error = await refusal_of(data)
        assert error.code == "store_older"
        assert f"sbx store restore --data-dir {data} {store}" in (error.hint or "")
        shutil.copy(latest, tmp_path / "latest")
    assert contents(data) == ["first", "second"]
    async with service_of(data) as service:
        assert [await read(service, one) for one in (first, second)] == ["first", "second"]

    done = sbx_store(data, "restore", tmp_path / "older")  # the operator wants it so
    assert done["unknown"] == 1
    async with service_of(data) as service:
        assert await read(service, first) == "first"
        with pytest.raises(SbxError):
            await read(service, second)
    assert len(unclaimed(data)) == 1
    assert (data / "unclaimed").stat().st_mode & 0o777 == 0o700
    assert contents(data) == ["first", "second"]

    sbx_store(data, "restore", "--empty")
    async with service_of(data) as service:
        assert (await service.sandboxes.list(ME)).items == []
    assert contents(data) == ["first", "second"]

    done = sbx_store(data, "restore", tmp_path / "latest")  # the files come back with their rows
    assert len(done["brought_back"]) == 2
    async with service_of(data) as service:
        assert [await read(service, one) for one in (first, second)] == ["first", "second"]
    assert unclaimed(data) == []
    verified = sbx("audit", "verify", "--data-dir", data)
    assert verified.returncode == 0, verified.stderr
    assert (data / "audit.jsonl").read_text().count('"store.restore"') == 3


async def test_store_of_another_directory_is_refused_without_force(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for data in (ours, theirs):
        async with service_of(data) as service:
            await create(service, data.name)
    shutil.copy(theirs / "store.sqlite", tmp_path / "store")
    with moved_away(ours / "store.sqlite"):
        shutil.copy(tmp_path / "store", ours / "store.sqlite")
        error = await refusal_of(ours)
        assert error.code == "store_of_another"
    refused = sbx("store", "restore", tmp_path / "store", "--data-dir", ours)
    assert (refused.returncode, "--force" in refused.stderr) == (3, True)
    sbx_store(ours, "restore", "--force", tmp_path / "store")
    async with service_of(ours):
        pass
    assert contents(ours) == ["ours"]
    assert len(unclaimed(ours)) == 1


@pytest.mark.full_tier
async def test_service_says_which_command_to_run(tmp_path: Path) -> None:
    data = tmp_path / "data"
    async with service_of(data) as service:
        await create(service, "1")
    (data / "store.sqlite").rename(tmp_path / "gone")
    ended = sbx("serve", "--json", "--data-dir", data, "--socket", tmp_path / "run" / "s")
    error = json.loads(ended.stdout.splitlines()[-1])["error"]
    assert (ended.returncode, error["code"]) == (3, "store_missing")
    assert f"sbx store restore --data-dir {data} FILE" in error["hint"]
    assert contents(data) == ["1"]


KILLED_AT_A_MARK = """
import asyncio, os, signal, sys
from pathlib import Path
from sbx.service.service import Service
from sbx.runtime.settings import Settings
from sbx.store import marks

left = int(sys.argv[2])
write = marks.write_to_directory

def killed(data, mark):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    write(data, mark)

marks.write_to_directory = killed

async def main():
    async with Service(Settings(data_dir=Path(sys.argv[1]), fast_path=False)):
        pass

asyncio.run(main())
"""


def run_program(program: str, *words: str | int | Path) -> int:
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, words)],
        env=environment(),
        timeout=120,
        check=False,
    ).returncode


async def test_killed_between_the_two_marks_it_starts_again(tmp_path: Path) -> None:
    data = tmp_path / "data"
    assert run_program(KILLED_AT_A_MARK, data, 1) == -signal.SIGKILL  # in the first start
    async with service_of(data) as service:
        made = await create(service, "1")
    for moment in (1, 2):  # in a later start, and at a clean end
        assert run_program(KILLED_AT_A_MARK, data, moment) == -signal.SIGKILL
        async with service_of(data) as service:
            assert await read(service, made) == "1"


KILLED_WITH_IDLE_HOMES = """
import asyncio, os, signal, sys
from pathlib import Path
from sbx.service.caller import Caller
from sbx.service.service import Service
from sbx.runtime.settings import Settings

async def main():
    data = Path(sys.argv[1])
    service = await Service(Settings(data_dir=data)).start()
    await service.runtime.warm(count=2, new=True)
    print(len(os.listdir(data / "sandboxes")))
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


@pytest.mark.full_tier
@pytest.mark.needs("namespaces")
async def test_idle_homes_of_a_killed_service_are_not_kept(tmp_path: Path) -> None:
    data = tmp_path / "data"
    assert run_program(KILLED_WITH_IDLE_HOMES, data) == -signal.SIGKILL
    assert len(list((data / "sandboxes").iterdir())) >= 2
    async with service_of(data):
        assert list((data / "sandboxes").iterdir()) == []
    assert unclaimed(data) == []


KILLED_WITH_A_PROJECT = """
import asyncio, os, signal, sys
from pathlib import Path
from sbx.service.projects.sandbox import open_project
from sbx.service.service import Service
from sbx.runtime.settings import Settings

async def main():
    data = Path(sys.argv[1])
    project = Path(sys.argv[2])
    service = await Service(Settings(data_dir=data, fast_path=False)).start()
    await open_project(service.runtime, "default", project)
    (uploads,) = data.glob("sandboxes/*/*/uploads")
    (uploads / "kept").write_text("copy of an upload")
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


@pytest.mark.full_tier
@pytest.mark.needs("namespaces")
async def test_what_a_killed_service_made_for_a_project_is_not_kept(tmp_path: Path) -> None:
    data, project = tmp_path / "data", tmp_path / "project"
    project.mkdir()
    if os.geteuid() == 0:
        os.chown(project, 1000, 1000)
    assert run_program(KILLED_WITH_A_PROJECT, data, project) == -signal.SIGKILL
    assert len(list((data / "sandboxes").iterdir())) == 1
    async with service_of(data):
        assert list((data / "sandboxes").iterdir()) == []
    assert unclaimed(data) == []


async def test_directory_of_an_unknown_sandbox_is_kept_from_jails_of_its_uid(
    tmp_path: Path,
) -> None:
    data = tmp_path / "data"
    async with service_of(data) as service:
        await create(service, "1")
    for name in ("store.sqlite", "store_mark.json"):
        (data / name).unlink()
    sbx_store(data, "restore", "--empty")
    async with service_of(data):
        pass
    (item,) = sbx_store(data, "unclaimed")["items"]
    (file,) = data.rglob("files/kept")
    assert item["uid"] == file.stat().st_uid
    assert item["files"] == 1
    if os.geteuid() == 0:
        for path in (tmp_path, *tmp_path.parents):
            if path.stat().st_uid == 0 and path != Path("/"):
                path.chmod(path.stat().st_mode | 0o011)
        uid = item["uid"]
        assert not opens_as(uid, file)
        (data / "unclaimed").chmod(0o711)  # as every directory below it is
        assert opens_as(uid, file)
        (data / "unclaimed").chmod(0o700)
    done = sbx_store(data, "unclaimed", "--remove", item["id"])
    assert done == {"removed": [item["id"]], "recorded": True, "errors": []}
    assert contents(data) == []
    assert '"store.unclaimed.remove"' in (data / "audit.jsonl").read_text()


def opens_as(uid: int, path: Path) -> bool:
    script = f"import os; os.setgid({uid}); os.setuid({uid}); open({str(path)!r})"
    words = [sys.executable, "-c", script]
    tried = subprocess.run(words, capture_output=True, text=True, check=False)
    assert tried.returncode == 0 or "PermissionError" in tried.stderr
    return tried.returncode == 0


@pytest.mark.full_tier
async def test_data_of_the_version_before_the_marks_are_adopted(tmp_path: Path) -> None:
    data = tmp_path / "data"
    sandbox, known, unknown = ("a" * 32, "b" * 32, "c" * 32)
    for name in (known, unknown):
        files = data / "sandboxes" / sandbox / name / "files"
        files.mkdir(parents=True)
        (files / "kept").write_text(name[0])
    data.chmod(0o700)
    with closing(sqlite3.connect(data / "store.sqlite", isolation_level=None)) as on:
        migrate(on, shipped()[:4])
        on.execute(
            "INSERT INTO cargos (id, owner, managed_by, directory, created_at, last_accessed_at)"
            " VALUES ('ws-1', 'me', 'sandbox-1', ?, 1, 1)",
            (sandbox,),
        )
        on.execute(
            "INSERT INTO sandboxes (id, owner, profile, cargo_id, created_at)"
            " VALUES ('sandbox-1', 'me', 'default', 'ws-1', 1)"
        )
        on.execute(
            "INSERT INTO conversations (sandbox_id, name, directory, created_at, last_used_at)"
            " VALUES ('sandbox-1', 'default', ?, 1, 1)",
            (known,),
        )
    shutil.copy(data / "store.sqlite", tmp_path / "before")
    async with service_of(data) as service:
        assert await read(service, "sandbox-1") == "b"
    assert contents(data) == ["b", "c"]
    assert [name[-65:] for name in unclaimed(data)] == [f"{sandbox}-{unknown}"]
    mark = sbx_store(data, "check")
    assert mark["store_mark"] == mark["directory_mark"]
    shutil.copy(tmp_path / "before", data / "store.sqlite")
    assert (await refusal_of(data)).code == "store_older"


async def test_program_with_the_data_directory_of_a_service_keeps_its_files(
    tmp_path: Path,
) -> None:
    """A runtime without a store, as `sbx run` has, removed all sandboxes of SBX_DATA_DIR."""
    data = tmp_path / "data"
    async with service_of(data) as service:
        made = await create(service, "1")
    async with Runtime(Settings(data_dir=data, fast_path=False)):
        pass
    async with service_of(data) as service:
        assert await read(service, made) == "1"


async def test_deletion_that_failed_is_finished_and_nothing_is_kept_of_it(tmp_path: Path) -> None:
    data = tmp_path / "data"
    async with service_of(data) as service:
        made = await create(service, "1")

        async def fails(*_: object) -> None:
            pass

        service.garbage.remove_conversations = fails  # type: ignore[assignment,method-assign]
        await service.sandboxes.delete_conversation(ME, made, "default")
        assert contents(data) == ["1"]
    async with service_of(data):
        pass
    assert contents(data) == []
    assert unclaimed(data) == []
