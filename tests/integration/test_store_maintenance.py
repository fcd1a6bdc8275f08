"""`sbx store`: a backup while a service writes, a restore, a repair, a check."""

# ruff: noqa: ASYNC240  # a look at a file blocks nothing that matters to a test

import asyncio
import json
import os
import resource
import shutil
import sqlite3
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
from command import in_process, sbx
from persistent_sandboxes import ME, create, eventually, open_service, read

from sbx.errors import BadRequest, Conflict, NotFound, SbxError, Unavailable
from sbx.service.maintenance import backup, place
from sbx.service.maintenance.check import Directories, check, known_directories
from sbx.service.maintenance.repair import repair
from sbx.service.maintenance.salvage import SavedTable, salvage
from sbx.store import Store, database, marks
from sbx.store.migrations import shipped

ROWS = 3000
T = TypeVar("T")


def cli(data: Path, *words: str | Path) -> tuple[int, dict[str, Any]]:
    done = in_process("store", *words, "--json", "--data-dir", data)
    return done.returncode, json.loads(done.stdout)


def add_idempotency(on: sqlite3.Connection, first: int, count: int, size: int = 200) -> None:
    on.executemany(
        "INSERT INTO idempotency (owner, key, fingerprint, status, body, created_at)"
        " VALUES ('me', ?, 'f', 200, randomblob(?), 1)",
        [(str(number), size) for number in range(first, first + count)],
    )


def in_thread(act: Callable[..., T], *args: Any, **options: Any) -> T:
    """Call what has an event loop of its own, as a command does."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(act, *args, **options).result()


def restore(data: Path, source: Path) -> backup.ReplacedStore:
    return in_thread(backup.restore, data, source, force=False)


@pytest.fixture
async def data(tmp_path: Path) -> Path:
    """A data directory with one sandbox, whose service has ended."""
    async with open_service(tmp_path / "data", fast_path=False) as service:
        await create(service, "1")
    return tmp_path / "data"


# -- a backup --------------------------------------------------------------------------------------


@pytest.mark.full_tier
async def test_backup_of_a_writing_service_is_whole_and_holds_nothing_up(tmp_path: Path) -> None:
    data, file = tmp_path / "data", tmp_path / "backup"
    async with open_service(data, fast_path=False) as service:
        first = await create(service, "first")
        await service.store.write(lambda on: add_idempotency(on, 0, ROWS, 10_000))  # 30 MB
        done, writes = asyncio.Event(), 0

        async def write() -> None:
            nonlocal writes
            while not done.is_set():  # a lock of 5 s would make a write fail
                number = ROWS + writes
                await service.store.write(lambda on: add_idempotency(on, number, 1))  # noqa: B023
                writes += 1

        writing = asyncio.create_task(write())
        words = ["store", "backup", str(file), "--json", "--data-dir", str(data)]
        ended = await asyncio.to_thread(sbx, *words)  # a process, while the loop writes
        done.set()
        await writing
        assert ended.returncode == 0, ended.stderr
        assert json.loads(ended.stdout)["bytes"] == file.stat().st_size
        assert file.stat().st_mode & 0o777 == 0o600
        assert writes > 20
        second = await create(service, "second")
        with pytest.raises(Conflict) as running:
            restore(data, file)
        assert running.value.code == "service_running"
    assert [one.name for one in data.iterdir() if "backup" in one.name] == []

    with closing(database.connect(str(file))) as on:
        assert on.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
        assert on.execute("SELECT count(*) FROM idempotency").fetchone()[0] >= ROWS
        assert on.execute("PRAGMA journal_mode").fetchone()[0] == "delete"
    code, body = cli(data, "restore", file)
    assert (code, body["unknown"]) == (0, 1)
    async with open_service(data, fast_path=False) as service:
        assert await read(service, first) == "first"
        assert [item.id for item in (await service.sandboxes.list(ME)).items] == [first]
    back = cli(data, "restore", Path(body["kept"]))[1]
    assert len(back["brought_back"]) == 1
    async with open_service(data, fast_path=False) as service:
        assert await read(service, second) == "second"


def test_backup_replaces_no_file_without_force(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(Conflict) as refused:
        backup.backup(data, file, force=False)
    assert (refused.value.code, file.read_text()) == ("file_exists", "mine")
    done = backup.backup(data, file, force=True)
    assert done.bytes == file.stat().st_size > 1000
    assert [one.name for one in tmp_path.iterdir() if one.name.startswith(".")] == []


async def test_service_does_not_start_from_a_backup_itself(data: Path, tmp_path: Path) -> None:
    backup.backup(data, tmp_path / "backup", force=False)
    (tmp_path / "backup").replace(data / "store.sqlite")
    with pytest.raises(Unavailable) as refused:
        await Store.open_in(data)
    assert refused.value.code == "store_is_backup"
    command = refused.value.hint or ""
    assert command == f"sbx store restore --data-dir {data} {data / 'store.sqlite'}"
    assert in_process(*command.split()[1:]).returncode == 0
    async with open_service(data, fast_path=False) as service:
        assert len((await service.sandboxes.list(ME)).items) == 1


async def test_restore_refuses_what_is_no_backup_and_changes_nothing(
    data: Path, tmp_path: Path
) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in data.iterdir()}
    with pytest.raises(NotFound):
        restore(data, tmp_path / "none")
    for content in (b"", b"no store", b"SQLite format 3\0" + os.urandom(8192)):
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(BadRequest) as refused:
            restore(data, tmp_path / "file")
        assert refused.value.code == "backup_unusable"
        assert str(tmp_path / "file") in refused.value.message
    assert {path.name: path.stat().st_mtime_ns for path in data.iterdir()} == before


async def test_restore_that_is_killed_leaves_a_refusal_and_both_stores(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "backup"
    backup.backup(data, file, force=False)

    def rename(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", rename)
        with pytest.raises(KeyboardInterrupt):
            restore(data, file)
    with pytest.raises(Unavailable) as refused:
        await Store.open_in(data)
    assert refused.value.code == "store_older"
    restore(data, file)
    async with open_service(data, fast_path=False) as service:
        assert len((await service.sandboxes.list(ME)).items) == 1


async def test_backup_goes_to_no_place_in_the_data_directory(data: Path, tmp_path: Path) -> None:
    """With --force it replaced the store of a service that wrote to it, or the mark."""
    (tmp_path / "link").symlink_to(data)
    before = {path.name: path.stat().st_mtime_ns for path in data.iterdir()}
    for target in (data / "store.sqlite", tmp_path / "link" / "x", data / "sandboxes" / "x"):
        with pytest.raises(BadRequest):
            backup.backup(data, target, force=True)
    assert {path.name: path.stat().st_mtime_ns for path in data.iterdir()} == before


async def test_backup_replaces_no_file_but_a_regular_one(data: Path, tmp_path: Path) -> None:
    """With --force it took the place of a device or a FIFO, as /dev/stdout for root."""
    (tmp_path / "directory").mkdir()
    (tmp_path / "link").symlink_to("fifo")
    os.mkfifo(tmp_path / "fifo")
    for target in (tmp_path / "directory", tmp_path / "link", tmp_path / "fifo"):
        before = target.lstat().st_ino
        with pytest.raises(Conflict) as refused:
            backup.backup(data, target, force=True)
        assert (refused.value.code, target.lstat().st_ino) == ("file_exists", before)


async def test_one_backup_of_a_data_directory_at_a_time(data: Path, tmp_path: Path) -> None:
    with place.backing_up(data), pytest.raises(Conflict) as refused:
        backup.backup(data, tmp_path / "backup", force=False)
    assert refused.value.code == "backup_running"
    backup.backup(data, tmp_path / "backup", force=False)


@pytest.mark.full_tier
async def test_backup_that_was_copied_over_a_store_with_a_log_is_refused(
    data: Path, tmp_path: Path
) -> None:
    """SQLite applied the log of the killed service to the backup: pages of both were mixed, and
    the service started."""
    path, log = data / "store.sqlite", data / "store.sqlite-wal"
    backup.backup(data, tmp_path / "backup", force=False)
    with closing(database.open_writing(path, shipped())) as on:
        marks.write_to_store(on, marks.following(marks.read_from_directory(data)))
        add_idempotency(on, 0, 5, 3000)
        shutil.copy(log, tmp_path / "log")
    for ending in ("", "-wal", "-shm"):
        Path(f"{path}{ending}").unlink(missing_ok=True)
    shutil.copy(tmp_path / "backup", path)
    shutil.copy(tmp_path / "log", log)
    with pytest.raises(Unavailable) as refused:
        await Store.open_in(data)
    assert refused.value.code == "store_is_backup"
    restore(data, path)
    with closing(database.connect(str(path))) as on:
        assert on.execute("SELECT count(*) FROM idempotency").fetchone()[0] == 0
    async with open_service(data, fast_path=False) as service:
        assert len((await service.sandboxes.list(ME)).items) == 1


async def test_restore_whose_new_store_cannot_be_written_changes_nothing(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite hides what fails when a connection is closed: the mark was missing in the store."""
    backup.backup(data, tmp_path / "backup", force=False)
    path = data / "store.sqlite"
    before, soft = path.stat().st_ino, resource.getrlimit(resource.RLIMIT_FSIZE)

    def no_more_room(on: sqlite3.Connection) -> Directories:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, soft[1]))
        return known_directories(on)

    monkeypatch.setattr(backup, "known_directories", no_more_room)
    try:
        with pytest.raises(Unavailable):
            restore(data, tmp_path / "backup")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, soft)
    assert path.stat().st_ino == before
    await (await Store.open_in(data)).close()


# -- a repair --------------------------------------------------------------------------------------


async def test_damaged_store_is_repaired_with_what_can_be_read(data: Path) -> None:
    """The hint was to begin with an empty store, and the files of all sandboxes went."""
    path = data / "store.sqlite"
    with closing(database.open_writing(path, shipped())) as on:
        add_idempotency(on, 0, ROWS)
        pages = pages_of(on, "idempotency")
    damaged = damage(path, pages[10:13])
    with pytest.raises(Unavailable) as refused:
        async with open_service(data):
            pass
    assert refused.value.code == "store_corrupt"
    assert f"sbx store repair --data-dir {data}" in (refused.value.hint or "")
    code, body = cli(data, "check")
    assert (code, body["ok"], body["error"]["code"]) == (1, False, "store_corrupt")

    code, body = cli(data, "repair")
    assert (code, body["repaired"]) == (0, True)
    table = body["tables"]["idempotency"]
    assert ROWS - 100 < table["saved"] < ROWS
    assert table["lost"] in (None, ROWS - table["saved"])
    assert Path(body["replaced"]["kept"]).read_bytes() == damaged
    assert cli(data, "check")[1]["ok"]
    async with open_service(data, fast_path=False) as service:
        (one,) = (await service.sandboxes.list(ME)).items
        assert await read(service, one.id) == "1"


def pages_of(on: sqlite3.Connection, table: str) -> list[int]:
    """The leaf pages of a table, by the numbers in its root page, which is an interior one."""
    root = on.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchone()[0]
    on.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    path = Path(on.execute("PRAGMA database_list").fetchone()[2])
    page = path.read_bytes()[(root - 1) * 4096 : root * 4096]
    assert page[0] == 5, "the table has one page only"
    cells = int.from_bytes(page[3:5], "big")
    starts = [int.from_bytes(page[12 + 2 * n : 14 + 2 * n], "big") for n in range(cells)]
    return [int.from_bytes(page[start : start + 4], "big") for start in starts]


def damage(path: Path, pages: list[int]) -> bytes:
    content = bytearray(path.read_bytes())
    for page in pages:
        content[(page - 1) * 4096 : page * 4096] = os.urandom(4096)
    path.write_bytes(content)
    return bytes(content)


@pytest.mark.full_tier
@pytest.mark.parametrize("seed", range(4))
def test_rows_around_any_damage_are_saved(tmp_path: Path, seed: int) -> None:
    path, fresh = tmp_path / "store", tmp_path / "fresh"
    database.make(path, shipped())
    with closing(database.open_writing(path, shipped())) as on:
        add_idempotency(on, 0, ROWS)
        pages = pages_of(on, "idempotency")
    bad = pages[seed :: 7 + seed]
    damage(path, bad)
    database.make(fresh, shipped())
    with (
        database.only_looking(path) as damaged,
        closing(database.open_writing(fresh, shipped())) as on,
    ):
        on.execute("PRAGMA foreign_keys = OFF")
        saved = salvage(damaged, on)
        assert saved["keys"] == SavedTable(0, 0)
        share = saved["idempotency"].saved / ROWS
        assert share == pytest.approx(1 - len(bad) / (len(pages) + 1), abs=0.03)
        assert on.execute("PRAGMA integrity_check").fetchone()[0] == "ok"


async def test_store_without_any_readable_row_is_left_as_it_is(data: Path) -> None:
    path = data / "store.sqlite"
    path.write_bytes(b"SQLite format 3\0" + os.urandom(60_000))
    before = path.read_bytes()
    with pytest.raises(Unavailable) as refused:
        repair(data)
    assert refused.value.code == "store_unreadable"
    assert f"sbx store restore --data-dir {data} --empty" in (refused.value.hint or "")
    assert path.read_bytes() == before
    assert [one.name for one in data.iterdir() if "replacement" in one.name] == []


async def test_sandbox_without_its_workspace_row_gets_one_for_its_files(data: Path) -> None:
    """One such row stopped the start of everything, and no tool could mend it."""
    async with open_service(data, fast_path=False) as service:
        unused = (await service.sandboxes.create(ME)).id
    with closing(sqlite3.connect(data / "store.sqlite")) as on:
        (used,) = on.execute("SELECT id FROM sandboxes WHERE id != ?", (unused,)).fetchone()
        on.execute("DELETE FROM workspaces")
        on.commit()
    found = check(data)
    assert (found.ok, found.without_workspace) == (False, sorted((used, unused)))
    done = in_thread(repair, data)
    assert (done.found_again, done.without_files) == ((used,), (unused,))
    assert check(data).ok
    async with open_service(data, fast_path=False) as service:
        assert await read(service, used) == "1"
        await service.sandboxes.delete(ME, unused)
    again = in_thread(repair, data)
    assert (again.replaced, again.tables) == (None, {})


async def test_sandbox_whose_files_were_not_made_yet_is_repaired(data: Path) -> None:
    """The repair of the whole store failed."""
    with closing(sqlite3.connect(data / "store.sqlite")) as on:
        on.execute("DELETE FROM workspaces")
        on.commit()
    (files,) = data.glob("sandboxes/*/*/files")
    shutil.rmtree(files)
    assert len(in_thread(repair, data).found_again) == 1
    assert check(data).ok


async def test_repair_is_not_for_a_store_that_is_missing(data: Path) -> None:
    (data / "store.sqlite").unlink()
    with pytest.raises(Unavailable) as refused:
        repair(data)
    assert refused.value.code == "store_missing"


# -- a check ---------------------------------------------------------------------------------------


async def test_check_names_rows_and_directories_that_do_not_match(data: Path) -> None:
    async with open_service(data, fast_path=False) as service:
        await eventually(lambda: check(data).ok)
        assert check(data).running
        assert await create(service, "2")
    (first, second) = sorted((data / "sandboxes").iterdir(), key=lambda one: one.stat().st_ctime)
    (conversation,) = first.iterdir()
    conversation.rename(second / ("a" * 32))
    found = check(data)
    assert not found.running
    assert [(one.directory, one.conversation) for one in found.without_directory] == [
        (first.name, conversation.name)
    ]
    assert [(one.directory, one.conversation) for one in found.without_row] == [
        (second.name, "a" * 32)
    ]
    ended = in_process("store", "check", "--data-dir", data)
    assert (ended.returncode, "not ok" in ended.stdout) == (1, True)
    assert f"sandboxes/{second.name}/{'a' * 32}" in ended.stderr


@pytest.mark.needs("root")
def test_store_on_a_read_only_file_system_is_checked_and_changed_by_nothing(
    data: Path, tmp_path: Path
) -> None:
    """Each command failed with an error of sbx itself."""
    (data / "unclaimed" / f"99999999T999999Z-{'a' * 32}").mkdir(parents=True)
    subprocess.run(["mount", "--bind", str(data), str(data)], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(data)], check=True)
        assert check(data).ok
        for change in (
            partial(backup.backup, data, tmp_path / "backup", force=False),
            partial(repair, data),
            partial(backup.restore, data, None, force=False),
        ):
            with pytest.raises(SbxError):
                in_thread(change)
    finally:
        subprocess.run(["umount", str(data)], check=True)


async def test_check_makes_no_file(data: Path) -> None:
    (data / "lock").unlink()
    assert not check(data).running
    assert not (data / "lock").exists()


def test_a_directory_that_is_no_data_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound) as refused:
        place.demand(tmp_path)
    assert refused.value.code == "no_data_directory"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.needs("root")
async def test_root_leaves_all_files_to_the_account_of_the_service(
    data: Path, tmp_path: Path
) -> None:
    """A store of root's could not be opened by the service, which is not root."""
    account = 4242
    for path in [data, *data.iterdir()]:
        os.chown(path, account, account)
    backup.backup(data, tmp_path / "backup", force=False)
    assert (tmp_path / "backup").stat().st_uid == 0
    assert check(data).error is None
    restore(data, tmp_path / "backup")
    assert os.geteuid() == 0
    assert {path.name: path.stat().st_uid for path in data.iterdir()} == {
        path.name: account for path in data.iterdir()
    }


@pytest.mark.needs("root")
def test_root_writes_through_no_link_of_the_account(data: Path, tmp_path: Path) -> None:
    account, victim = 4242, tmp_path / "victim"
    victim.write_text("of root")
    backup.backup(data, tmp_path / "backup", force=False)
    for path in [data, *data.iterdir()]:
        os.chown(path, account, account)
    (data / "audit.jsonl").unlink()
    (data / "audit.jsonl").symlink_to(victim)
    with pytest.raises(Unavailable):
        restore(data, tmp_path / "backup")
    (data / "store.sqlite").unlink()
    (data / "store.sqlite").symlink_to(victim)
    with pytest.raises(Unavailable):
        backup.backup(data, tmp_path / "other", force=False)
    assert victim.read_text() == "of root"
