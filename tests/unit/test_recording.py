"""What a full disk, and records that wait, mean for new work."""

import errno
import os
from pathlib import Path

import pytest

from sbx.api.errors import status_of
from sbx.errors import Unavailable, is_disk_full
from sbx.protocol.runs import Run, Status
from sbx.service import recording
from sbx.service.reserve import Reserve, has_room, reserve_size
from sbx.store import runs as rows
from sbx.store.errors import translated
from sbx.store.runs import Begun, RunFilter, RunRow

MIB = 1 << 20


@pytest.mark.parametrize(
    ("file_system", "size"),
    [(0, 0), (32 * MIB, 2 * MIB), (256 * MIB, 16 * MIB), (1 << 50, 16 * MIB)],
)
def test_size_of_the_reserve(file_system: int, size: int) -> None:
    assert reserve_size(file_system) == size


@pytest.mark.parametrize(
    ("available", "missing", "room"),
    [(0, 0, False), (4, 0, True), (16, 16, False), (20, 16, True), (19, 16, False)],
)
def test_room_for_the_reserve(available: int, missing: int, room: bool) -> None:
    assert has_room(available, missing, 16) is room


@pytest.mark.parametrize(
    ("number", "full"), [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EIO, False)]
)
def test_errors_of_a_full_disk(number: int, full: bool) -> None:
    assert is_disk_full(OSError(number, "")) is full


@pytest.mark.parametrize(
    ("full", "audit_waits", "store_waits", "codes"),
    [
        (False, False, False, []),
        (True, False, False, ["no_space"]),
        (False, True, False, ["not_recording"]),
        (False, False, True, ["not_recording"]),
        (True, True, True, ["no_space", "not_recording"]),
    ],
)
def test_problems(full: bool, audit_waits: bool, store_waits: bool, codes: list[str]) -> None:
    waits = {"audit_waits": audit_waits, "store_waits": store_waits}
    assert recording.problems(full=full, **waits) == codes
    assert recording.problems(full=full, **waits, damaged=True) == ["store_corrupt", *codes]


@pytest.mark.parametrize(("code", "status"), [("no_space", 507), ("not_recording", 503)])
def test_refusal(code: str, status: int) -> None:
    error = recording.refusal(code)
    assert (error.code, status_of(error), error.details["retry_after_s"]) == (code, status, 1.0)


def test_reserve_is_allocated_and_given_up_in_parts(tmp_path: Path) -> None:
    reserve = Reserve(tmp_path / "reserve")
    size = reserve.allocated
    disk = os.statvfs(tmp_path)
    assert size == reserve_size(disk.f_blocks * disk.f_frsize)
    assert (tmp_path / "reserve").stat().st_blocks * 512 >= size
    assert not reserve.full
    parts = 0
    while reserve.give_up():
        parts += 1
        assert reserve.full
    assert (parts, reserve.allocated, (tmp_path / "reserve").stat().st_size) == (8, 0, 0)
    reserve.allocate()
    assert (reserve.allocated, reserve.full) == (size, False)
    reserve.close()
    reserve.close()
    assert not reserve.give_up()


def test_reserve_of_an_earlier_process_is_taken_over(tmp_path: Path) -> None:
    first = Reserve(tmp_path / "reserve")
    first.give_up()
    first.close()
    again = Reserve(tmp_path / "reserve")
    assert (again.allocated, again.full) == (first.allocated * 8 // 7, False)
    again.close()


def test_reserve_that_was_copied_as_a_hole_is_allocated_again(tmp_path: Path) -> None:
    """`cp -a` of a data directory makes a hole of it, which had no space to give up."""
    path = tmp_path / "reserve"
    with path.open("wb") as file:
        file.truncate(16 * MIB)
    reserve = Reserve(path)
    assert path.stat().st_blocks * 512 >= reserve.allocated > 0
    reserve.close()


# -- runs whose end the store does not have yet ----------------------------------------------------

BEGUN = Begun("run-1", "sandbox-1", "c", "python", "x" * 50_000, 1.0, "about", "One,two")
ROW = rows.ended(BEGUN, Run("run-1", Status.OK, stdout="y" * 50_000, duration_s=2.0), 3.0)


def test_row_of_an_ended_run_is_shortened() -> None:
    assert ROW.run is not None
    assert (ROW.status, ROW.ended_at, ROW.duration_ms, ROW.success) == ("ok", 3.0, 2000.0, True)
    assert len(ROW.code) < 40_000
    assert len(ROW.run.stdout) < 10_000
    assert 80_000 < rows.size_of(ROW) < 100_000


@pytest.mark.parametrize(
    ("wanted", "matches"),
    [
        (RunFilter(), True),
        (RunFilter(kind="python", conversation="c", success_only=True, tags=("ONE",)), True),
        (RunFilter(kind="shell"), False),
        (RunFilter(conversation="d"), False),
        (RunFilter(tags=("three", "tw")), True),
        (RunFilter(tags=("three",)), False),
        (RunFilter(has_notes=True), False),
        (RunFilter(has_notes=False, has_description=True), True),
        (RunFilter(has_description=False), False),
    ],
)
def test_matches(wanted: RunFilter, matches: bool) -> None:
    assert rows.matches(ROW, wanted) is matches


def test_matches_only_successes() -> None:
    failed: RunRow = rows.ended(BEGUN, Run("run-1", Status.ERROR), 3.0)
    assert not rows.matches(failed, RunFilter(success_only=True))


# -- messages --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code", ["SQLITE_FULL", "SQLITE_IOERR_WRITE", "SQLITE_CORRUPT", "SQLITE_READONLY"]
)
def test_errors_of_the_store_name_its_path_for_operators_only(code: str) -> None:
    import sqlite3

    error = sqlite3.OperationalError("x")
    error.sqlite_errorcode = getattr(sqlite3, code)
    shown, named = translated(error), translated(error, "/data/store.sqlite")
    assert isinstance(shown, Unavailable)
    assert "/" not in f"{shown.message}{shown.hint}"
    assert "/data/store.sqlite" in f"{named.message}{named.hint}"
