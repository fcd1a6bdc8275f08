"""What commands print, on the disk: a ring of the latest part, and offsets that stay."""

import os
from pathlib import Path

import pytest

from sbx.errors import Broken, NotFound
from sbx.protocol.commands import (
    CommandCause,
    CommandState,
    CommandStatus,
    piece_of,
    status_from_json,
    to_json,
)
from sbx.workspace.ring_files import CommandLogs, RingFile

NAME = "cmd-0123456789ab"


@pytest.fixture
def logs(tmp_path: Path) -> CommandLogs:
    return CommandLogs(os.open(tmp_path, os.O_PATH | os.O_DIRECTORY))


def put(ring: RingFile, data: bytes) -> None:
    ring.make_room(len(data))
    ring.end = ring.append(data)
    ring.begin = max(ring.begin, ring.end - ring.size)


def test_a_ring_keeps_the_latest_part_under_the_offsets_it_had(logs: CommandLogs) -> None:
    with logs:
        ring = logs.make(NAME, 10)
        for number in range(7):
            put(ring, str(number).encode() * 3)
        assert (ring.begin, ring.end) == (11, 21)
        again = logs.open(NAME)
        assert (again.begin, again.end) == (11, 21)
        assert again.read(11, 100, 21) == b"3444555666"
        assert again.read(15, 3, 21) == b"555"
        again.close()
        ring.close()


def test_more_at_once_than_a_ring_holds_leaves_its_end(logs: CommandLogs, tmp_path: Path) -> None:
    with logs:
        ring = logs.make(NAME, 10)
        put(ring, b"abc")
        put(ring, bytes(range(48, 48 + 25)))
        assert ring.read(ring.begin, 10, ring.end) == bytes(range(48 + 15, 48 + 25))
        assert (tmp_path / f"{NAME}.log").stat().st_size <= 10 + 64
        ring.close()


def test_an_emptied_ring_gives_the_disk_back_and_goes_on(logs: CommandLogs, tmp_path: Path) -> None:
    with logs:
        ring = logs.make(NAME, 1 << 20)
        put(ring, b"x" * 700_000)
        before = (tmp_path / f"{NAME}.log").stat().st_blocks
        ring.begin = ring.end
        ring.empty()
        put(ring, b"after")
        assert ring.read(700_000, 10, 700_005) == b"after"
        assert (tmp_path / f"{NAME}.log").stat().st_blocks < before / 10
        ring.close()


def test_what_a_crash_left_half_made_goes(logs: CommandLogs, tmp_path: Path) -> None:
    with logs:
        logs.make(NAME, 10).close()  # without a record
        (tmp_path / "cmd-aaaaaaaaaaaa.new").write_bytes(b"half")
        logs.write_record("cmd-bbbbbbbbbbbb", b"{}")
        assert logs.records() == {"cmd-bbbbbbbbbbbb": b"{}"}
    assert [path.name for path in tmp_path.iterdir()] == ["cmd-bbbbbbbbbbbb.json"]


def test_a_log_with_a_broken_head_is_no_log(logs: CommandLogs, tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.log").write_bytes(b"sbx-ring" + b"\xff" * 40)
    with logs, pytest.raises(NotFound):
        logs.open(NAME)


def test_a_name_of_a_caller_never_reaches_the_disk(logs: CommandLogs) -> None:
    with logs:
        for name in ("../../etc/passwd", "cmd-", "cmd-0123456789AB", "", "cmd-0123456789ab/x"):
            with pytest.raises(Broken):
                logs.open(name)


@pytest.mark.parametrize("cut", range(1, 12))
def test_pieces_never_split_a_character(cut: int) -> None:
    data = "aé€😀z".encode()
    head, rest = data[:cut], data[cut:]
    piece = piece_of(100, head, more=bool(rest))
    following = piece_of(piece.next_offset, data[piece.next_offset - 100 :], more=False)
    assert piece.text + following.text == "aé€😀z"[: len(piece.text + following.text)]
    assert "\ufffd" not in piece.text + following.text
    assert following.next_offset == 100 + len(data)


def test_an_offset_within_a_character_begins_with_the_next_one() -> None:
    data = "😀b".encode()
    piece = piece_of(1, data[1:], more=False)
    assert (piece.offset, piece.text, piece.next_offset) == (4, "b", 5)


def test_a_status_comes_back_from_json_and_needs_every_field() -> None:
    status = CommandStatus(NAME, "a\ud800", CommandState.KILLED, 1.5, cause=CommandCause.CPU)
    form = to_json(status)
    assert status_from_json({**form, "later": 1}) == status
    for name in form:
        with pytest.raises(ValueError, match=name):
            status_from_json({key: value for key, value in form.items() if key != name})
