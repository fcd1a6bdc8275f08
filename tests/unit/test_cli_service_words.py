"""The words of the service's commands: places, times, what is narrower, paths of requests."""

import os
from datetime import UTC, datetime

import pytest

from sbx.cli import connect, output
from sbx.cli.cp import CopyTarget, _as_upload
from sbx.cli.narrowing import narrower
from sbx.cli.terminal import END_OF_INPUT, STDIN, InputLines, one_line
from sbx.errors import BadRequest


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("sandbox-1:a/b.txt", CopyTarget("a/b.txt", "sandbox-1")),
        ("sandbox-1:", CopyTarget("", "sandbox-1")),
        ("sandbox-1:a:b", CopyTarget("a:b", "sandbox-1")),
        ("./a:b", CopyTarget("./a:b")),
        ("/tmp/a:b", CopyTarget("/tmp/a:b")),
        (":a", CopyTarget(":a")),
        ("a.txt", CopyTarget("a.txt")),
    ],
)
def test_a_place_is_in_a_sandbox_when_an_id_comes_first(text: str, place: CopyTarget) -> None:
    assert CopyTarget.read(text) == place


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("uploads/temparea/a.csv", "a.csv"),
        ("/workspace/uploads/temparea/a.csv", "a.csv"),
        ("./uploads//temparea/a.csv", "a.csv"),
        ("uploads/temparea", None),
        ("uploads/generated/a.csv", None),
        ("uploads/temparea/sub/a.csv", None),
        ("a.csv", None),
    ],
)
def test_an_upload_is_told_by_its_path(path: str, name: str | None) -> None:
    assert _as_upload(path) == name


def test_what_is_narrower_becomes_tables() -> None:
    pairs = ["limits.memory_max=256MiB", "limits.tasks_max=16", "processes = false"]
    assert narrower(pairs) == {
        "limits": {"memory_max": "256MiB", "tasks_max": 16},
        "processes": False,
    }
    for wrong in (["limits.memory_max"], ["=1"], ["limits.=1"], ["a=1", "a.b=2"]):
        with pytest.raises(BadRequest):
            narrower(wrong)


@pytest.mark.parametrize(
    ("text", "value"), [("90", 90.0), ("1.5", 1.5), ("10min", 600.0), ("2h", 7200.0)]
)
def test_a_time_is_seconds_or_has_a_unit(text: str, value: float) -> None:
    assert connect.seconds(text, "--ttl") == value


@pytest.mark.parametrize("text", ["0", "-5", "nan", "inf", "soon", "5 parsecs", ""])
def test_a_time_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(BadRequest, match="--ttl"):
        connect.seconds(text, "--ttl")


def test_ids_are_quoted_whole_and_never_a_part_of_the_path() -> None:
    assert connect.sandbox_path("a/../b?c#d", "stop") == "/v1/sandboxes/a%2F..%2Fb%3Fc%23d/stop"
    for bare in ("", ".", ".."):
        with pytest.raises(BadRequest):
            connect.sandbox_path(bare)


def test_moments_are_told_from_now() -> None:
    now = datetime(2026, 1, 1, 12, tzinfo=UTC)
    assert output.since("2026-01-01T11:57:00Z", now) == "3 min ago"
    assert output.since("2026-01-01T14:00:00Z", now) == "in 2 h"
    assert output.since(now.timestamp() - 5, now) == "5 s ago"
    assert output.since("2026-01-01T11:58:30", now) == "90 s ago"  # not "1 min"
    assert output.since(None) == output.since("soon") == output.clock(None) == ""


def test_nothing_in_a_line_of_ours_reorders_it() -> None:
    assert one_line("a\u202egpj.exe\u2028b") == "a\\u202egpj.exe\\u2028b"


@pytest.mark.parametrize("kind", ["pipe", "file"])
async def test_lines_of_stdin_come_one_by_one_and_then_its_end(kind: str) -> None:
    if kind == "pipe":
        source, end = os.pipe()
        os.write(end, b"one\ntwo")
        os.close(end)
    else:
        source = os.memfd_create("stdin")
        os.pwrite(source, b"one\ntwo", 0)
    kept = os.dup(STDIN)
    try:
        os.dup2(source, STDIN)
        lines = InputLines()
        answer = [await lines.read_line() for _ in range(4)]
    finally:
        os.dup2(kept, STDIN)
        os.close(kept)
        os.close(source)
    assert answer == ["one", "two", END_OF_INPUT, END_OF_INPUT]
