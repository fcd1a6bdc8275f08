"""What differs between the CI tier and the full tier within a test; see scripts/test."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest
from hypothesis import settings


def rows(matrix: Iterable[Any], ci_tier: Collection[Any]) -> list[Any]:
    """Mark the rows of a matrix that the CI tier leaves out. A row of several values is a tuple."""
    rows = list(matrix)
    assert all(row in rows for row in ci_tier)
    return [row if row in ci_tier else _in_full_tier(row) for row in rows]


def _in_full_tier(row: Any) -> Any:
    values = row if isinstance(row, tuple) else (row,)
    return pytest.param(*values, marks=pytest.mark.full_tier)


def examples(ci_tier: int) -> int:
    """Return `ci_tier`, or the number of the full tier where that tier runs.

    For a property whose number in the CI tier is not the one of the profile in tests/conftest.py.
    """
    full_tier = settings.get_profile("full").max_examples
    return full_tier if settings().max_examples == full_tier else ci_tier
