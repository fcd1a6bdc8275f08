"""`run.text` is what a person would have read: a line that was written over is read once."""

import pytest

from sbx.runtime.run.active_run import apply_carriage_returns


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("10%\r20%\r100%\ndone\n", "100%\ndone\n"),
        ("windows\r\nlines\r\n", "windows\r\nlines\r\n"),
        ("ends in a return\r", "ends in a return\r"),
        ("plain\ntext", "plain\ntext"),
        ("a\rb\nc\rd\n", "b\nd\n"),
        ("returns at the end\r\r\n", "returns at the end\r\r\n"),
    ],
)
def test_what_was_written_over_is_left_out(written: str, read: str) -> None:
    assert apply_carriage_returns(written) == read


@pytest.mark.timeout(60)
@pytest.mark.parametrize("line", ["x", "x\r", "\r"])
def test_the_longest_output_is_read_in_linear_time(line: str) -> None:
    """A regular expression took minutes over one line of 16 MiB, in the loop of all sandboxes."""
    assert len(apply_carriage_returns(line * (8 << 20))) <= len(line) * (8 << 20)
