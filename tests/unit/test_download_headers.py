"""Ranges, conditions and names of downloads, as RFC 9110 and RFC 5987 say."""

import pytest
from starlette.requests import Request

from sbx.api.downloads import _bounds, _requested_range, attachment
from sbx.protocol.files import FileEntry
from sbx.runtime.files.streams import FileStream
from sbx.workspace.streams import OpenFile


def stream(size: int) -> FileStream:
    entry = FileEntry("x", "/workspace/x", "file", size, 0.0)
    return FileStream(entry, None, OpenFile(-1, "/workspace/x", size, 0.0), None)  # type: ignore[arg-type]


def found(asked: str, size: int = 10, **headers: str) -> tuple[int, int] | str | None:
    """(start, end), "all", or None for what cannot be satisfied."""
    sent = [(b"range", asked.encode())]
    sent += [(name.replace("_", "-").encode(), text.encode()) for name, text in headers.items()]
    request = Request({"type": "http", "headers": sent})
    bounds = _requested_range(request, '"tag"', stream(size))
    return "all" if bounds is None else _bounds(bounds, size)


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        ("bytes=0-", (0, 10)),
        ("bytes=0-0", (0, 1)),
        ("bytes=2-4", (2, 5)),
        ("bytes=9-99", (9, 10)),
        ("bytes=-3", (7, 10)),
        ("bytes=-99", (0, 10)),
        ("bytes=10-", None),
        ("bytes=-0", None),
        ("bytes=5-4", "all"),
        ("bytes=-", "all"),
        ("bytes=0-1,3-4", "all"),
        ("items=0-1", "all"),
        ("bytes=a-b", "all"),
        ("bytes=" + "9" * 30 + "-", "all"),
        ("bytes=٣-", "all"),
        ("", "all"),
    ],
)
def test_a_range_is_read_as_the_rfc_says(asked: str, answer: tuple[int, int] | str | None) -> None:
    assert found(asked) == answer


def test_no_range_of_an_empty_file_can_be_satisfied() -> None:
    assert found("bytes=0-", 0) is None
    assert found("bytes=-1", 0) is None


@pytest.mark.parametrize(
    ("condition", "answer"),
    [
        ('"tag"', (0, 2)),
        ('"other"', "all"),
        ('W/"tag"', "all"),
        ("Thu, 01 Jan 1970 00:00:00 GMT", (0, 2)),
        ("Fri, 02 Jan 1970 00:00:00 GMT", "all"),
        ("nonsense", "all"),
    ],
)
def test_a_range_of_another_version_is_answered_with_all(
    condition: str, answer: tuple[int, int] | str
) -> None:
    assert found("bytes=0-1", if_range=condition) == answer


@pytest.mark.parametrize(
    ("name", "header"),
    [
        ("a.csv", "attachment; filename=\"a.csv\"; filename*=UTF-8''a.csv"),
        ("€ %.csv", "attachment; filename=\"_ _.csv\"; filename*=UTF-8''%E2%82%AC%20%25.csv"),
        ('a"b;c', "attachment; filename=\"a_b_c\"; filename*=UTF-8''a%22b%3Bc"),
        ("a\r\nb", "attachment; filename=\"a__b\"; filename*=UTF-8''a%0D%0Ab"),
        ("a\udcff", "attachment; filename=\"a_\"; filename*=UTF-8''a%FF"),
    ],
)
def test_any_name_fits_into_the_header(name: str, header: str) -> None:
    assert attachment(name) == header
    assert attachment(name).isascii()
