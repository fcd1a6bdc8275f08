"""Damage at any place: a store gives a beginning of what was written or says that it cannot; an
audit log tells."""

import asyncio
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sbx.errors import SbxError
from sbx.store import Store
from sbx.telemetry.audit import Audit
from sbx.telemetry.audit_chain import verify
from tests.tiers import examples

KEYS = 12
LINES = 6
whole = settings(
    max_examples=examples(60),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def add(on: sqlite3.Connection, number: int) -> None:
    on.execute(
        "INSERT INTO keys (id, owner, name, hash, created_at) VALUES (?, 'me', ?, ?, 1)",
        (f"key-{number}", "x" * 700, str(number)),
    )


async def keys_in(path: Path) -> list[int]:
    async with await Store.open(path) as store:
        rows = await store.rows("SELECT id FROM keys ORDER BY rowid")
        return [int(row["id"].removeprefix("key-")) for row in rows]


async def refusal_of(path: Path) -> str | None:
    """The code with which a store is not opened."""
    try:
        store = await Store.open(path)
    except SbxError as refused:
        return refused.code
    await store.close()
    return None


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store as a killed process leaves it: most of its rows are in the log alone."""
    path, left = tmp_path_factory.mktemp("live") / "sbx.db", tmp_path_factory.mktemp("left")

    async def fill() -> None:
        async with await Store.open(path) as store:
            for number in range(KEYS):
                await store.write(lambda on, number=number: add(on, number))  # type: ignore[misc]
            for name in ("sbx.db", "sbx.db-wal"):
                shutil.copy(path.parent / name, left / name)

    asyncio.run(fill())
    return left


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("log") / "audit.jsonl"

    async def fill() -> None:
        log = await Audit.open(path)
        for number in range(LINES):
            await log.record("uid:1", "sandbox.create", f"sandbox-{number}", policy="default")
        await log.close()

    asyncio.run(fill())
    return path.read_bytes()


@pytest.fixture
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def copied(killed: Path, to: Path) -> Path:
    shutil.rmtree(to / "copy", ignore_errors=True)
    shutil.copytree(killed, to / "copy")
    return to / "copy"


def damaged(content: bytes, data: st.DataObject) -> bytes:
    """Cut short, changed in places, or with something put in between."""
    at = data.draw(st.integers(0, len(content) - 1))
    match data.draw(st.sampled_from(["cut", "changed", "added", "taken"])):
        case "cut":
            return content[:at]
        case "changed":
            return (
                content[:at]
                + bytes([content[at] ^ data.draw(st.integers(1, 255))])
                + content[at + 1 :]
            )
        case "added":
            return content[:at] + data.draw(st.binary(min_size=1, max_size=50)) + content[at:]
        case _:
            return content[:at] + content[at + data.draw(st.integers(1, 300)) :]


@whole
@given(data=st.data())
def test_a_damaged_log_of_the_store_gives_a_beginning_of_the_writes(
    killed: Path, scratch: Path, data: Any
) -> None:
    copy = copied(killed, scratch)
    wal = copy / "sbx.db-wal"
    wal.write_bytes(damaged(wal.read_bytes(), data))
    found = asyncio.run(keys_in(copy / "sbx.db"))
    assert found == list(range(len(found)))


@whole
@given(data=st.data())
def test_a_damaged_store_opens_or_is_refused_by_a_named_error(
    killed: Path, scratch: Path, data: Any
) -> None:
    copy = copied(killed, scratch)
    path = copy / "sbx.db"
    path.write_bytes(damaged(path.read_bytes(), data))
    before = {item.name: item.read_bytes() for item in copy.iterdir()}
    refusal = asyncio.run(refusal_of(path))
    if refusal in ("store_corrupt", "store_newer"):
        assert {item.name: item.read_bytes() for item in copy.iterdir()} == before
    else:
        assert refusal is None


@pytest.mark.parametrize(
    ("text", "damaged_text"),
    [
        pytest.param(b"CHECK (only_row = 1)", b"CHECK (\xefnly_row = 1)", id="not UTF-8"),
        pytest.param(b"CHECK (only_row = 1)", b"CHECK (onlx_row = 1)", id="no such column"),
        pytest.param(b"id         TEXT NOT NULL,\n    generation", b"ix", id="a column renamed"),
    ],
)
def test_a_store_with_a_damaged_schema_is_refused_unchanged(
    killed: Path, scratch: Path, text: bytes, damaged_text: bytes
) -> None:
    """A connection that only reads accepted it, and the one that writes changed its log."""
    copy = copied(killed, scratch)
    path = copy / "sbx.db"
    content = path.read_bytes()
    assert content.count(text) == 1
    path.write_bytes(content.replace(text, damaged_text + text[len(damaged_text) :]))
    before = {item.name: item.read_bytes() for item in copy.iterdir()}
    assert asyncio.run(refusal_of(path)) == "store_corrupt"
    assert {item.name: item.read_bytes() for item in copy.iterdir()} == before


def test_a_store_with_invalid_names_opens_or_is_refused_by_a_named_error(
    killed: Path, scratch: Path
) -> None:
    """The report of SQLite's check contains these names. Reading it raised UnicodeDecodeError."""
    copy = copied(killed, scratch)
    with closing(sqlite3.connect(copy / "sbx.db")) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        names = [name for (name,) in db.execute("SELECT name FROM sqlite_master")]
    content = (copy / "sbx.db").read_bytes()
    refusals = set()
    for name in names:
        start = content.index(name.encode())
        invalid = content[:start] + b"\xce" + content[start + 1 :]
        (copy / "sbx.db").write_bytes(invalid)
        refusals.add(asyncio.run(refusal_of(copy / "sbx.db")))
    assert refusals <= {"store_corrupt", None}
    assert "store_corrupt" in refusals


@whole
@given(data=st.data())
def test_no_damage_of_an_audit_log_passes_but_a_missing_end(
    log: bytes, scratch: Path, data: Any
) -> None:
    path = scratch / "audit.jsonl"
    after = damaged(log, data)
    path.write_bytes(after)
    verified = verify(path)
    beginning = log.startswith(after.removesuffix(after.rpartition(b"\n")[2]))
    if after != log and not (beginning and len(after) < len(log)):
        # What follows the last end of line may be a line that was torn just now.
        assert not verified.ok or (verified.torn == 1 and beginning)


@whole
@given(
    words=st.lists(st.tuples(st.text(), st.text(), st.text(), st.text()), max_size=5),
    torn=st.binary(max_size=200),
)
def test_whatever_is_recorded_after_whatever_was_torn_makes_a_whole_log(
    scratch: Path, words: list[tuple[str, str, str, str]], torn: bytes
) -> None:
    path = scratch / "log"
    path.unlink(missing_ok=True)

    async def fill() -> None:
        for who, what, thing, detail in words:
            log = await Audit.open(path)
            await log.record(who, f"a.{what}", thing, detail=detail)
            await log.close()
            with path.open("ab") as file:
                file.write(torn.replace(b"\n", b""))
        log = await Audit.open(path)
        await log.record("me", "end", "x")
        await log.close()

    asyncio.run(fill())
    verified = verify(path)
    assert verified.ok
    assert verified.count == len(words) + 1 + verified.torn
