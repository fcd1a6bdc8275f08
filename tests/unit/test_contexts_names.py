"""What a context may be called: the same on both sides of the wire."""

from typing import Any

import pytest

from sbx.errors import BadRequest
from sbx.protocol.contexts import check_context


@pytest.mark.parametrize("name", ["a", "default", "a b", "über", "x" * 128, "-", "a.b", "日本"])
def test_text_is_a_name(name: str) -> None:
    assert check_context(name) == name


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "a/b", "a\\b", "\0", "a\x1b[0m", "a\x7f", "\ud800", "x" * 129, None, 7, b"a"],
)
def test_what_is_no_name_is_refused(name: Any) -> None:
    with pytest.raises(BadRequest) as refused:
        check_context(name)
    assert refused.value.details == {"field": "context"}
