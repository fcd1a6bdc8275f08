"""The rows of the bench are documented."""

from pathlib import Path

from bench.__main__ import BENCHES

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"


def test_every_row_is_on_the_page_about_performance() -> None:
    text = PAGE.read_text()
    assert [name for name in BENCHES if f"`{name}`" not in text] == []
