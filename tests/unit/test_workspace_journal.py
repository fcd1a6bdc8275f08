"""An entry of a journal is whole, or it is not there."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sbx.workspace.snapshots.journal import Journal, JournalFile, JournalHeader, unfinished
from sbx.workspace.snapshots.recover import recover

RECORD = JournalHeader(".sbx-" + "0" * 32, False, 1, None, None)


@pytest.fixture
def staging(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_PATH)
    yield fd
    os.close(fd)


class _KilledError(BaseException):
    pass


def test_entry_that_is_cut_off_while_it_is_written_has_no_name(
    staging: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill between create and write left an empty entry, and each start reported that a commit
    could not be undone yet."""

    def killed(*_: object) -> None:
        assert unfinished(staging) == []
        raise _KilledError

    dump = json.dump
    for writes in (0, 1):
        calls = iter([dump] * writes)
        monkeypatch.setattr(json, "dump", lambda *answer, c=calls: next(c, killed)(*answer))
        with pytest.raises(_KilledError):
            JournalFile.begin(Journal(staging), RECORD)
    monkeypatch.undo()
    entry = JournalFile.begin(Journal(staging), RECORD)
    assert entry.read().stage == RECORD.stage
    assert len(unfinished(staging)) == 1


def test_empty_entry_of_an_older_version_is_forgotten(staging: int, tmp_path: Path) -> None:
    entry = tmp_path / f"journal-{'0' * 32}"
    entry.touch()
    (tmp_path / f"{entry.name}.settled").write_text("{}")
    assert recover(staging, staging)
    assert os.listdir(tmp_path) == []
