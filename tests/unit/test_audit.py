"""The audit log: every change of a line that was written shows."""

# ruff: noqa: ASYNC240  # a look at a file blocks nothing that matters to a test

import asyncio
import json
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sbx.errors import Closed, Unavailable
from sbx.telemetry import audit, audit_chain
from sbx.telemetry.audit import Audit
from sbx.telemetry.audit_chain import verify
from sbx.telemetry.audit_rotation import ROTATED, Rotation, rotated_files


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log" / "audit.jsonl"


KEY = b"k" * 32


async def write(path: Path, *whats: str, key: bytes | None = None) -> None:
    log = await Audit.open(path, clock=lambda: 1000.0, key=key)
    for what in whats:
        await log.record("uid:7", what, "sandbox-1", ip="::1")
    await log.close()


async def test_lines_say_who_did_what_and_to_what(path: Path) -> None:
    await write(path, "sandbox.create")
    entry = json.loads(path.read_text())
    del entry["hash"]
    assert entry == {
        "at": 1000.0,
        "who": "uid:7",
        "what": "sandbox.create",
        "object": "sandbox-1",
        "details": {"ip": "::1"},
    }
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_chain_goes_on_when_the_log_is_opened_again(path: Path) -> None:
    await write(path, "a", "b")
    await write(path, "c")
    verified = verify(path)
    assert (verified.count, verified.ok, verified.broken_at, verified.torn) == (3, True, None, 0)
    assert verified.head == json.loads(path.read_text().splitlines()[-1])["hash"]


def test_an_empty_log_is_whole(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert verify(tmp_path / "empty") == audit_chain.Verified(0, True, None, audit_chain.FIRST, 0)


TAMPERINGS: dict[str, tuple[Callable[[list[bytes]], list[bytes]], int]] = {
    "a word changed": (lambda x: [x[0], x[1].replace(b"uid:7", b"uid:8"), *x[2:]], 2),
    "a space added": (lambda x: [x[0], x[1].replace(b'"who"', b' "who"'), *x[2:]], 2),
    "a line removed": (lambda x: [x[0], *x[2:]], 2),
    "the first removed": (lambda x: x[1:], 1),
    "two swapped": (lambda x: [x[0], x[2], x[1], x[3]], 2),
    "a line repeated": (lambda x: [*x[:2], *x[1:]], 3),
    "a line of another's": (lambda x: [x[0], b'{"who":"me"}\n', *x[1:]], 2),
    "the last made unreadable": (lambda x: [*x[:3], b"#" * 20 + b"\n"], 4),
    "a hash changed": (lambda x: [x[0], x[1][:-6] + b'000"}\n', *x[2:]], 2),
    "an empty line added": (lambda x: [x[0], b"\n", *x[1:]], 2),
}


@pytest.mark.parametrize("how", TAMPERINGS)
async def test_tampering_is_found_at_its_line(path: Path, how: str) -> None:
    await write(path, "a", "b", "c", "d")
    tamper, line = TAMPERINGS[how]
    path.write_bytes(b"".join(tamper(path.read_bytes().splitlines(keepends=True))))
    verified = verify(path)
    assert (verified.ok, verified.broken_at) == (False, line)


async def test_a_removed_end_shows_only_by_the_head(path: Path) -> None:
    await write(path, "a", "b", "c")
    whole = verify(path)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))
    cut = verify(path)
    assert cut.ok
    assert cut.head != whole.head


@pytest.mark.parametrize("kept", [1, -2])
async def test_a_torn_line_is_told_of_by_the_next(path: Path, kept: int) -> None:
    await write(path, "a", "b")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1][:kept])
    assert (verify(path).ok, verify(path).torn) == (True, 1)
    await write(path, "c")
    verified = verify(path)
    assert (verified.ok, verified.torn, verified.count) == (True, 1, 3)
    assert json.loads(path.read_bytes().splitlines()[2])["what"] == audit_chain.TORN


async def test_a_line_that_lost_only_its_end_of_line_counts(path: Path) -> None:
    await write(path, "a")
    path.write_bytes(path.read_bytes()[:-1])
    await write(path, "b")
    assert (verify(path).count, verify(path).ok, verify(path).torn) == (2, True, 0)


async def test_what_was_torn_cannot_be_changed_later(path: Path) -> None:
    await write(path, "a")
    with path.open("ab") as file:
        file.write(b'{"at":1,"wh')
    await write(path, "b")
    assert verify(path).ok
    path.write_bytes(path.read_bytes().replace(b'{"at":1,"wh\n', b'{"at":2,"wh\n'))
    assert verify(path).broken_at == 2


async def test_hostile_words_stay_in_their_line(path: Path) -> None:
    log = await Audit.open(path)
    hostile = 'x\n{"hash":"' + "0" * 64 + '"}\n\ud800\x00'
    await log.record(hostile, "a", "o" * 100_000, hash="0" * 64, text=hostile)
    await log.record("b", "b", "b", text="y" * 1_000_000)
    await log.close()
    lines = path.read_bytes().splitlines()
    assert [len(lines) < 3, len(lines[0]) < 20_000] == [True, True]
    assert json.loads(lines[0])["who"] == hostile
    assert json.loads(lines[1])["details"] == {"left_out": pytest.approx(1_000_100, abs=100)}
    assert verify(path).ok


async def test_records_at_once_make_one_chain(path: Path) -> None:
    log = await Audit.open(path)
    await asyncio.gather(*(log.record("a", str(n), "c") for n in range(200)))
    await log.close()
    assert [json.loads(line)["what"] for line in path.read_bytes().splitlines()] == [
        str(n) for n in range(200)
    ]
    assert verify(path).ok


async def test_closing_leaves_no_thread_and_refuses_more(path: Path) -> None:
    before = set(threading.enumerate())
    log = await Audit.open(path)
    await log.record("a", "b", "c")
    await log.close()
    await log.close()
    with pytest.raises(Closed):
        await log.record("a", "b", "c")
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("sbx-audit"):
            thread.join(60)
            assert not thread.is_alive()


async def test_a_log_that_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("pipe", "link"):
        with pytest.raises(Unavailable) as refused:
            await Audit.open(tmp_path / name)
        assert refused.value.code == "audit_unusable"
    assert not (tmp_path / "elsewhere").exists()


def test_a_log_that_is_not_there_cannot_be_verified(tmp_path: Path) -> None:
    with pytest.raises(Unavailable):
        verify(tmp_path / "none")


# -- signatures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", TAMPERINGS)
async def test_tampering_with_a_signed_log_is_found_at_its_line(path: Path, how: str) -> None:
    await write(path, "b", "c", "d", key=KEY)  # a line that begins to sign comes before
    tamper, line = TAMPERINGS[how]
    path.write_bytes(b"".join(tamper(path.read_bytes().splitlines(keepends=True))))
    verified = verify(path, KEY)
    assert (verified.ok, verified.broken_at) == (False, line)


async def test_a_chain_made_anew_without_the_key_does_not_hold(path: Path) -> None:
    """Without signatures it would: that is what they are for."""
    await write(path, "a", "b", key=KEY)
    assert verify(path, KEY) == verify(path)
    assert verify(path, KEY).signed == 3
    path.unlink()
    await write(path, "a", "forged", key=b"another" * 8)
    assert verify(path).ok
    assert (verify(path, KEY).ok, verify(path, KEY).broken_at) == (False, 1)
    path.unlink()
    await write(path, "a", "forged")
    assert (verify(path, KEY).ok, verify(path, KEY).broken_at) == (False, 2)


async def test_lines_without_a_signature_come_before_the_first_only(path: Path) -> None:
    await write(path, "old", "old")
    await write(path, "new", key=KEY)
    lines = [json.loads(line)["what"] for line in path.read_bytes().splitlines()]
    assert lines == ["old", "old", audit_chain.SIGNED, "new"]
    assert (verify(path, KEY).ok, verify(path, KEY).signed) == (True, 2)
    await write(path, "x")
    assert (verify(path, KEY).broken_at, verify(path).broken_at) == (5, 5)


async def test_a_signature_written_as_text_is_none(path: Path) -> None:
    log = await Audit.open(path)
    await log.record("a", "b", 'c,"sig":"' + "0" * 64, text='x,"sig":"' + "0" * 64 + '"')
    await log.close()
    assert verify(path).signed == 0


async def test_a_torn_line_of_a_signed_log_is_told_of(path: Path) -> None:
    await write(path, "a", key=KEY)
    path.write_bytes(path.read_bytes()[:-30])
    await write(path, "b", key=KEY)
    verified = verify(path, KEY)
    assert (verified.ok, verified.torn) == (True, 1)


# -- notes: what nobody waits for ------------------------------------------------------------------


async def test_notes_keep_their_place_among_records(path: Path) -> None:
    log = await Audit.open(path, key=KEY)
    for n in range(50):
        log.note("a", f"note {n}", "c")
    assert len(path.read_bytes().splitlines()) == 1  # nothing was written while one was told
    await log.record("a", "record", "c")
    log.note("a", "last", "c")
    await log.close()
    whats = [json.loads(line)["what"] for line in path.read_bytes().splitlines()]
    assert whats == [audit_chain.SIGNED, *(f"note {n}" for n in range(50)), "record", "last"]
    assert verify(path, KEY).ok


async def test_a_note_is_written_without_anything_that_follows(path: Path) -> None:
    log = await Audit.open(path)
    log.note("a", "b", "c")
    async with asyncio.timeout(60):
        while not path.read_bytes():  # noqa: ASYNC110  # a file has no event
            await asyncio.sleep(0.01)
    await log.close()


async def test_notes_beyond_what_may_wait_are_counted(path: Path) -> None:
    log = await Audit.open(path)
    for n in range(1250):
        log.note("a", str(n), "c")
    await log.close()
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert (lines[0]["what"], lines[0]["details"]) == (audit.MISSED, {"count": 250})
    assert len(lines) == 1001
    assert verify(path).ok


def full(_fd: int, _line: bytes) -> None:
    raise OSError(28, "No space left on device")


async def test_a_full_disk_delays_lines_and_loses_none(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The act is done when its line is written: it must not fail for the line."""
    log = await Audit.open(path)
    log.note("a", "first", "c")
    with monkeypatch.context() as patched:
        patched.setattr(audit, "_write", full)
        assert not await log.record("a", "second", "c", number=2)
        assert (log.refused, log.waiting) == (True, 2)
    async with asyncio.timeout(60):
        while log.refused:  # noqa: ASYNC110  # a file has no event
            await asyncio.sleep(0.01)
    assert await log.record("a", "third", "c")
    await log.close()
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert [(one["what"], one["details"]) for one in lines] == [
        ("first", {}), ("second", {"number": 2}), ("third", {}),
    ]  # fmt: skip
    assert verify(path).ok


async def test_a_line_is_tried_again_after_room_was_made(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms: list[bool] = []

    def make_room() -> bool:
        rooms.append(len(rooms) == 1)
        patched.undo()
        return True

    log = await Audit.open(path, on_full=make_room)
    with monkeypatch.context() as patched:
        patched.setattr(audit, "_write", full)
        assert await log.record("a", "b", "c")
    await log.close()
    assert len(rooms) == 1
    assert verify(path) == audit_chain.Verified(1, True, None, verify(path).head, 0)


async def test_lines_beyond_what_may_wait_are_lost_and_counted(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "_NOTES_MAX", 3)
    log = await Audit.open(path)
    with monkeypatch.context() as patched:
        patched.setattr(audit, "_write", full)
        for number in range(5):
            assert not await log.record("a", str(number), "c")
    assert await log.record("a", "after", "c")
    await log.close()
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert [one["what"] for one in lines] == [audit.MISSED, "0", "1", "2", "after"]
    assert lines[0]["details"] == {"count": 2}


async def test_a_note_that_cannot_be_told_costs_none_of_those_behind_it(path: Path) -> None:
    log = await Audit.open(path, key=KEY)
    endless: dict[str, Any] = {}
    endless["endless"] = endless
    log.note_by("a", "fails", "c", lambda: {"a": 1 // 0})
    log.note("a", "endless", "c", **endless)
    log.note("a", "behind", "c", answer=1)
    await log.close()
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    answer = {line["what"]: line["details"] for line in lines}
    assert answer["fails"] == answer["endless"] == {"untold": True}
    assert answer["behind"] == {"answer": 1}
    assert verify(path, KEY).ok


# -- rotation --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rotation", "size", "began_at", "now", "due"),
    [
        (Rotation(100, "never"), 99, 0.0, 1e9, False),
        (Rotation(100, "never"), 100, 0.0, 1e9, True),
        (Rotation(100, "never"), 100, None, 1e9, False),  # no line yet
        (Rotation(100, "day"), 1, 86399.0, 86400.0, True),
        (Rotation(100, "day"), 1, 86400.0, 2 * 86400.0 - 1, False),
        (Rotation(100, "month"), 1, 0.0, 30 * 86400.0, False),
        (Rotation(100, "month"), 1, 0.0, 31 * 86400.0, True),
        (Rotation(100, "month"), 1, 31 * 86400.0, 0.0, False),  # the clock was set back
    ],
)
def test_a_file_is_complete_by_its_size_or_when_its_day_or_month_is_over(
    rotation: Rotation, size: int, began_at: float | None, now: float, due: bool
) -> None:
    assert rotation.is_due(size, began_at, now) is due


async def rotated(path: Path, count: int, *, key: bytes | None = KEY) -> list[Path]:
    """Write so many lines, three in each file and the line that links it. Return all files."""
    log = await Audit.open(path, clock=lambda: 1000.0, key=key, rotation=Rotation(700, "never"))
    for number in range(count):
        await log.record("uid:7", f"action-{number}", "sandbox-1")
    await log.close()
    return [*rotated_files(path), path]


async def test_the_chain_goes_through_all_files(path: Path) -> None:
    files = await rotated(path, 20)
    assert len(files) > 4
    assert [file.name for file in files[:2]] == [
        "audit-000001-19700101.jsonl",
        "audit-000002-19700101.jsonl",
    ]
    lines = [json.loads(line) for file in files for line in file.read_bytes().splitlines()]
    links = [line for line in lines if line["what"] == ROTATED]
    assert [line["what"] for line in lines if line not in links] == [
        audit_chain.SIGNED,
        *(f"action-{number}" for number in range(20)),
    ]
    assert [link["details"]["file"] for link in links] == [file.name for file in files[:-1]]
    verified = verify(path, KEY)
    assert (verified.ok, verified.count, verified.signed) == (True, len(lines), len(lines))
    assert (verified.files, verified.earlier, verified.broken_in) == (len(files), 0, None)
    assert all(file.stat().st_size < 1100 for file in files)
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)


async def test_a_log_that_is_opened_again_continues_its_numbers(path: Path) -> None:
    first = await rotated(path, 8)
    for file in first[:-1]:
        file.unlink()  # moved away
    second = await rotated(path, 8)
    assert second[0].name == f"audit-{len(first):06}-19700101.jsonl"
    verified = verify(path, KEY)
    assert (verified.ok, verified.earlier > 0) == (True, True)


async def test_the_oldest_files_may_be_moved_away_and_are_reported(path: Path) -> None:
    files = await rotated(path, 20)
    whole = verify(path, KEY).count
    removed = sum(file.read_bytes().count(b"\n") for file in files[:2])
    for file in files[:2]:
        file.unlink()
    verified = verify(path, KEY)
    assert (verified.ok, verified.earlier, verified.count) == (True, removed, whole - removed)


async def test_a_file_that_is_missing_between_two_breaks_the_chain(path: Path) -> None:
    files = await rotated(path, 20)
    files[1].unlink()
    verified = verify(path, KEY)
    assert (verified.ok, verified.broken_at, verified.broken_in) == (False, 1, files[2])


async def test_a_changed_or_cut_line_of_a_complete_file_is_found_there(path: Path) -> None:
    files = await rotated(path, 20)
    content = files[1].read_bytes()
    files[1].write_bytes(content.replace(b"uid:7", b"uid:8", 1))
    verified = verify(path, KEY)
    assert (verified.ok, verified.broken_in) == (False, files[1])
    files[1].write_bytes(b"".join(content.splitlines(keepends=True)[:-1]))
    verified = verify(path, KEY)
    assert (verified.broken_at, verified.broken_in) == (1, files[2])
    files[1].write_bytes(content[:-20])
    assert not verify(path, KEY).ok


async def test_a_beginning_that_somebody_invents_has_no_signature(path: Path) -> None:
    """Whoever removes lines could claim that they were moved away, but not sign that claim."""
    files = await rotated(path, 6)
    for file in files[:-1]:
        file.unlink()
    rest = path.read_bytes().splitlines(keepends=True)[2:]
    entry = {"at": 1.0, "who": "sbx", "what": ROTATED, "object": "audit"}
    head = json.loads(path.read_bytes().splitlines()[1])["hash"]
    details = {"file": "audit-000001-19700101.jsonl", "head": head, "count": 5}
    line, _ = audit_chain.format_line(entry | {"details": details}, head, b"another key")
    path.write_bytes(b"".join([line, *rest]))
    assert not verify(path, KEY).ok


async def test_a_rotation_that_was_killed_between_its_renames_is_completed(path: Path) -> None:
    files = await rotated(path, 5)
    before = verify(path, KEY).count
    path.rename(files[0].with_name("audit-000009-19700101.jsonl"))
    assert (verify(path, KEY).ok, verify(path, KEY).count) == (True, before)
    await write(path, "after", key=KEY)
    verified = verify(path, KEY)
    links = (ROTATED, audit_chain.SIGNED, "after")
    whats = tuple(json.loads(line)["what"] for line in path.read_bytes().splitlines())
    assert (verified.ok, verified.count, whats) == (True, before + 3, links)


async def test_a_log_that_cannot_be_rotated_grows(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "_ROTATE_AGAIN_S", 0.0)
    log = await Audit.open(path, key=KEY, rotation=Rotation(300, "never"))
    path.with_suffix(".next").mkdir()  # no file can have this name
    for _ in range(5):
        assert await log.record("uid:7", "a", "b")
    path.with_suffix(".next").rmdir()
    await log.record("uid:7", "a", "b")
    await log.close()
    verified = verify(path, KEY)
    assert (verified.ok, verified.files) == (True, 2)


async def test_a_check_while_the_log_is_rotated_finds_nothing(path: Path) -> None:
    log = await Audit.open(path, key=KEY, rotation=Rotation(2000, "never"))
    ended = asyncio.Event()

    async def write_on() -> None:
        for _ in range(400):
            await log.record("uid:7", "a", "b")
        ended.set()

    writing = asyncio.create_task(write_on())
    checks = 0
    while not ended.is_set():
        assert (await asyncio.to_thread(verify, path, KEY)).ok
        checks += 1
    await writing
    await log.close()
    assert checks > 1
    assert verify(path, KEY).files > 10
