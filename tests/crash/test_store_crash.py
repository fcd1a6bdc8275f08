"""kill -9 of a process in the middle of its writes: what it was told is kept is there, nothing is
there by half, and the next process opens the store as if nothing had been."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

from sbx.store import Store
from sbx.telemetry.audit import Audit
from sbx.telemetry.audit_chain import verify

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = 6
AT_LEAST = 20  # writes before the blow

WRITER = """
import asyncio, sys
from pathlib import Path
from sbx.store import Store
from sbx.telemetry.audit import Audit

async def main(directory):
    store = await Store.open(directory / "sbx.db")
    log = await Audit.open(directory / "audit.jsonl")
    first = (await store.row("SELECT coalesce(max(CAST(key AS INT)), 0) FROM idempotency"))[0] + 1

    def both(on, number):
        for space in ("left", "right"):
            on.execute(
                "INSERT INTO idempotency (owner, key, fingerprint, status, body, created_at)"
                " VALUES (?, ?, 'f', 200, randomblob(3000), 1)",
                (space, str(number)),
            )

    for number in range(first, sys.maxsize):
        store.write_later(lambda on: on.execute("UPDATE idempotency SET created_at = 2"))
        await store.write(lambda on: both(on, number))
        await log.record("me", "wrote", str(number))
        print(number, flush=True)

asyncio.run(main(Path(sys.argv[1])))
"""

OPENER = """
import asyncio, sys
from pathlib import Path
from sbx.store import Store
print("go", flush=True)
asyncio.run(Store.open(Path(sys.argv[1]) / "sbx.db"))
"""


@contextmanager
def process(program: str, directory: Path) -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, "-c", program, str(directory)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT) as running:
        try:
            yield running
        finally:
            running.kill()


def told_before_it_was_killed(running: subprocess.Popen[str], after_s: float) -> int:
    """The last number that the process said was written."""
    assert running.stdout is not None
    answer = [int(running.stdout.readline()) for _ in range(AT_LEAST)]
    time.sleep(after_s)
    os.kill(running.pid, signal.SIGKILL)
    rest = running.stdout.read()
    answer += [int(line) for line in rest.splitlines(keepends=True) if line.endswith("\n")]
    return answer[-1]


def last_recorded(log: Path) -> int:
    whole = [line for line in log.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    return int(json.loads(whole[-1])["object"])


@pytest.fixture
def random() -> Random:
    return Random(4)


async def test_a_killed_writer_leaves_a_whole_store_and_log(tmp_path: Path, random: Random) -> None:
    for _ in range(ROUNDS):
        with process(WRITER, tmp_path) as writer:
            answer = told_before_it_was_killed(writer, random.uniform(0, 0.1))
        async with await Store.open(tmp_path / "sbx.db") as store:
            check = await store.row("PRAGMA integrity_check")
            assert check is not None
            assert check[0] == "ok"
            rows = await store.rows("SELECT owner, key FROM idempotency")
        left, right = (
            sorted(int(row["key"]) for row in rows if row["owner"] == side)
            for side in ("left", "right")
        )
        assert left == right
        assert left == list(range(1, len(left) + 1))
        assert len(left) >= answer
        assert verify(tmp_path / "audit.jsonl").ok
        assert last_recorded(tmp_path / "audit.jsonl") >= answer
    log = await Audit.open(tmp_path / "audit.jsonl")
    await log.record("me", "checked", "all")
    await log.close()
    assert verify(tmp_path / "audit.jsonl").ok


async def test_a_killed_first_start_leaves_no_store_or_a_whole_one(
    tmp_path: Path, random: Random
) -> None:
    for number in range(ROUNDS):
        directory = tmp_path / str(number)
        with process(OPENER, directory) as opener:
            assert opener.stdout is not None
            opener.stdout.readline()
            await asyncio.sleep(random.uniform(0, 0.05))
            os.kill(opener.pid, signal.SIGKILL)
        async with await Store.open(directory / "sbx.db") as store:
            await store.rows("SELECT * FROM runs")
        assert [item.name for item in directory.iterdir()] == ["sbx.db"]
