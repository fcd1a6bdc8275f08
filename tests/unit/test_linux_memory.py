"""What linux says of its memory."""

from sbx.linux import memory


def test_available_is_some_part_of_all() -> None:
    available, total = memory.available()
    assert 0 < available < total


def test_stalled_is_a_share_of_time() -> None:
    assert 0 <= memory.stalled() <= 100
