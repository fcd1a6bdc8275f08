"""`sbx store backup` and `restore` that are killed before any of their steps."""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import count
from pathlib import Path

import pytest

from sbx.errors import Unavailable
from sbx.service.maintenance import backup
from sbx.store import Store, database
from sbx.store.migrations import shipped

ROOT = Path(__file__).resolve().parents[2]
SANDBOX, CONVERSATION = "a" * 32, "b" * 32
ITEM = f"20260101T000000Z-{SANDBOX}"

# Forks for each request, so that one interpreter imports sbx for all steps.
KILLED = """
import json, os, shutil, signal, sys, traceback
from pathlib import Path
from sbx.service.maintenance import backup
from sbx.workspace import unclaimed

def killed_before(module, name):
    real = getattr(module, name)
    def act(*words, **options):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*words, **options)
    setattr(module, name, act)

for step in ("link", "unlink", "rename", "replace", "fsync", "ftruncate"):
    killed_before(os, step)
killed_before(shutil, "copyfileobj")
killed_before(unclaimed, "rename_new")
for line in sys.stdin:
    command, data, file, left = json.loads(line)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            getattr(backup, command)(Path(data), Path(file), force=False)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

WRITTEN = """
import os, signal, sys
from pathlib import Path
from sbx.store import database
from sbx.store.migrations import shipped

on = database.open_writing(Path(sys.argv[1]), shipped())
on.execute("INSERT INTO removals (directory) VALUES ('in the log')")
os.kill(os.getpid(), signal.SIGKILL)
"""


Killed = Callable[[str, Path, Path, int], int]


@pytest.fixture(scope="module")
def killed_before_step() -> Iterator[Killed]:
    """Run `backup` or `restore` in a process that is killed before its step of this number.

    Return its exit status. 0 is no step: the command runs to its end.
    """
    with subprocess.Popen(
        [sys.executable, "-c", KILLED],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        requests, statuses = program.stdin, program.stdout

        def run(command: str, data: Path, file: Path, step: int) -> int:
            print(json.dumps([command, str(data), str(file), step]), file=requests, flush=True)
            return int(statuses.readline())

        yield run
        requests.close()


def kill_writer(store: Path) -> None:
    """Leave a row in the log of the store that is not in the store."""
    command = [sys.executable, "-c", WRITTEN, str(store)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=120, check=False
    )
    assert done.returncode == -signal.SIGKILL


async def new_data(data: Path) -> None:
    """A data directory whose service has ended, with a sandbox that is unclaimed."""
    (data / "sandboxes").mkdir(parents=True)
    (data / "unclaimed" / ITEM / CONVERSATION / "files").mkdir(parents=True)
    (data / "unclaimed" / ITEM / CONVERSATION / "files" / "kept").write_text("1")
    (data / "removed").mkdir()
    async with await Store.open_in(data) as store:
        await store.write(add_sandbox)


def add_sandbox(on: sqlite3.Connection) -> None:
    on.execute(
        "INSERT INTO workspaces (id, owner, managed_by, directory, created_at, last_accessed_at)"
        " VALUES ('ws-1', 'me', 'sandbox-1', ?, 1, 1)",
        (SANDBOX,),
    )
    on.execute(
        "INSERT INTO sandboxes (id, owner, policy_name, workspace_id, created_at)"
        " VALUES ('sandbox-1', 'me', 'default', 'ws-1', 1)"
    )
    on.execute(
        "INSERT INTO conversations (sandbox_id, name, directory, created_at, last_used_at)"
        " VALUES ('sandbox-1', 'default', ?, 1, 1)",
        (CONVERSATION,),
    )


async def refusal_of(data: Path) -> str | None:
    """The code with which a service does not start."""
    try:
        await (await Store.open_in(data)).close()
    except Unavailable as error:
        return error.code
    return None


def has_row_of_the_log(store: Path) -> bool:
    """Whether a store has, with its log, the row of the process that was killed."""
    with database.only_looking(store) as on:
        row = on.execute("SELECT 1 FROM removals WHERE directory = 'in the log'").fetchone()
        return row is not None


async def test_restore_that_is_killed_loses_no_row_and_no_file(
    tmp_path: Path, killed_before_step: Killed
) -> None:
    """A kill between two renames parted the store from its log. One before the unclaimed
    directories were moved left a store that started without them."""
    original, file = tmp_path / "original", tmp_path / "backup"
    await new_data(original)
    backup.backup(original, file, force=False)
    kill_writer(original / "store.sqlite")
    for left in count(1):
        data = tmp_path / str(left)
        shutil.copytree(original, data)
        ended = killed_before_step("restore", data, file, left)
        present = [data / "store.sqlite", *data.glob("store-*.sqlite")]
        assert any(has_row_of_the_log(store) for store in present if store.exists()), left
        files = data / "sandboxes" / SANDBOX / CONVERSATION / "files" / "kept"
        refusal = await refusal_of(data)
        if refusal is None:  # the store stayed, or the backup was restored with the files
            assert any(map(has_row_of_the_log, data.glob("store-*.sqlite"))) == files.exists(), left
        else:
            assert refusal in ("store_older", "store_missing"), left
            assert killed_before_step("restore", data, file, 0) == 0
            assert await refusal_of(data) is None
            assert any(map(has_row_of_the_log, data.glob("store-*.sqlite"))), left
            assert files.exists()
            assert [one.name for one in data.iterdir() if "replacement" in one.name] == []
        if ended == 0:
            break
        assert ended == -signal.SIGKILL
    assert left > 8


async def test_backup_removes_what_a_killed_one_left(
    tmp_path: Path, killed_before_step: Killed
) -> None:
    data, target = tmp_path / "data", tmp_path / "target"
    await new_data(data)
    target.mkdir()
    found: set[str] = set()
    for left in count(1):
        ended = killed_before_step("backup", data, target / str(left), left)
        found.update(one.name for one in (*data.iterdir(), *target.glob(".*")))
        if (target / str(left)).exists():
            assert is_whole(target / str(left))
        if ended == 0:
            break
        assert ended == -signal.SIGKILL
    assert [name for name in found if "backup" in name]
    for directory in (data, target):
        assert [one.name for one in directory.iterdir() if "backup" in one.name] == []
    assert is_whole(target / str(left))


def is_whole(store: Path) -> bool:
    with closing(database.connect(str(store))) as on:
        version = on.execute("PRAGMA user_version").fetchone()[0]
        return (
            version == shipped()[-1].version and "ok" in on.execute("PRAGMA quick_check").fetchone()
        )
