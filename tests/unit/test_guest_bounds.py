"""Outputs that are too large become smaller ones that say so."""

import pytest

pytest.importorskip("IPython")

from sbx.guest.frames import FrameError
from sbx.guest.kernel.display import bounded, cut
from sbx.guest.kernel.errors import describe, error_content


def test_a_bundle_within_the_limit_is_left_alone() -> None:
    data = {"text/plain": "x", "image/png": b"123", "application/json": {"a": [1]}}
    assert bounded(data, 100) == data


def test_the_largest_part_makes_way_for_a_note() -> None:
    data = {"text/plain": "<table>", "text/html": "h" * 1000, "image/png": b"p" * 30}
    kept = bounded(data, 100)
    assert kept["image/png"] == b"p" * 30
    assert "text/html" not in kept
    assert kept["text/plain"] == "[text/html of 1000 bytes is not shown: too large]\n<table>"


def test_plain_text_is_cut_not_dropped() -> None:
    kept = bounded({"text/plain": "y" * 1000}, 100)
    assert kept["text/plain"].startswith("y" * 100 + "\n… [cut: 1000")


def test_cut_leaves_short_text_alone() -> None:
    assert cut("abc", 3) == "abc"


def test_json_deeper_than_the_host_takes_is_refused() -> None:
    deep: list[object] = []
    for _ in range(100):
        deep = [deep]
    with pytest.raises(FrameError, match="nested deeper"):
        bounded({"application/json": deep}, 10**6)


def test_json_larger_than_the_host_takes_makes_way_for_a_note() -> None:
    kept = bounded({"application/json": [0] * 2_000_000, "text/html": "h" * 4_000_000}, 8 << 20)
    assert set(kept) == {"text/html", "text/plain"}


def test_json_of_more_strings_than_the_host_takes_makes_way_for_a_note() -> None:
    """In all of its parts: half a million keys are 6 MB here, and 100 MB where they are read."""
    part = {f"{number:x}": 1 for number in range(70_000)}
    one = {"application/json": part, "text/plain": "x"}
    assert bounded(one, 8 << 20) == one
    two = {**one, "application/vnd.x+json": {**part, "z": 2}}
    assert set(bounded(two, 8 << 20)) == {"application/json", "text/plain"}


def test_more_formats_than_the_host_takes_are_refused() -> None:
    with pytest.raises(FrameError, match="100 formats"):
        bounded({f"x/{number}": "" for number in range(100)}, 10**6)


def test_errors_are_bounded_whatever_they_say() -> None:
    content = describe(ValueError("z" * 10_000_000))
    assert content["ename"] == "ValueError"
    assert len(content["evalue"]) < 100_000
    assert sum(map(len, content["traceback"])) < 1_000_000


def test_an_error_whose_str_fails_is_still_told() -> None:
    class RudeError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert error_content(RudeError, RudeError())["ename"] == "RudeError"
