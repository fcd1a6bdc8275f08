"""The rows of the bench, as they are told to its users."""

from pathlib import Path

from bench.__main__ import BENCHES

README = Path(__file__).parents[2] / "README.md"


def test_every_row_is_in_the_readme() -> None:
    told = README.read_text()
    assert [name for name in BENCHES if f"`{name}`" not in told] == []
