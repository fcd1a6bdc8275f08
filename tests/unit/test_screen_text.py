"""`run.text` is what a person would have read: a line that was written over is read once."""

import pytest

from sbx.runtime.live import _OVERWRITTEN


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("10%\r20%\r100%\ndone\n", "100%\ndone\n"),
        ("windows\r\nlines\r\n", "windows\r\nlines\r\n"),
        ("ends in a return\r", "ends in a return\r"),
        ("plain\ntext", "plain\ntext"),
        ("a\rb\nc\rd\n", "b\nd\n"),
    ],
)
def test_what_was_written_over_is_left_out(written: str, read: str) -> None:
    assert _OVERWRITTEN.sub("", written) == read
