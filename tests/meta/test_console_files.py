"""The built files of the console: their sizes, and what the page of an installation has."""

import gzip
from pathlib import Path

import pytest

from sbx.console import STATIC

ROOT = Path(__file__).resolve().parents[2]
KB = 1000


@pytest.mark.parametrize(
    ("names", "most"),
    [
        (("app.js",), 90 * KB),
        (("terminal.js",), 95 * KB),
        (("editor.js",), 150 * KB),
        (("app.js", "app.css", "boot.js", "ja.js"), 100 * KB),  # the first page, at most
    ],
)
def test_a_part_of_the_page_stays_small(names: tuple[str, ...], most: int) -> None:
    size = sum(len(gzip.compress((STATIC / name).read_bytes(), 9)) for name in names)
    assert size <= most


def test_all_files_together_stay_small() -> None:
    assert sum(path.stat().st_size for path in STATIC.iterdir()) <= 1300 * KB


def test_the_first_page_asks_for_few_files() -> None:
    index = (STATIC / "index.html").read_text()
    files = index.count("/console/static/") - index.count('rel="icon"')
    assert files + len(("the page itself", "a language")) <= 5
