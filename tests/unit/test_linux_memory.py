"""What linux says of its memory."""

import builtins
import io

import pytest

from sbx.linux import memory


def test_available_is_some_part_of_all() -> None:
    available, total = memory.available()
    assert 0 < available < total


def test_stalled_is_a_share_of_time() -> None:
    assert 0 <= memory.stalled() <= 100


@pytest.mark.parametrize(
    ("text", "share"),
    [
        (None, 0.0),  # built without CONFIG_PSI
        ("", 0.0),
        ("some avg10=1.25 avg60=0.00 avg300=0.00 total=0\nfull avg10=9.00\n", 1.25),
    ],
)
def test_stalled_is_nothing_where_linux_does_not_tell(
    monkeypatch: pytest.MonkeyPatch, text: str | None, share: float
) -> None:
    def opened(path: str, **_: object) -> io.StringIO:
        if text is None:
            raise FileNotFoundError(2, "No such file or directory", path)
        return io.StringIO(text)

    monkeypatch.setattr(builtins, "open", opened)
    assert memory.stalled() == share
