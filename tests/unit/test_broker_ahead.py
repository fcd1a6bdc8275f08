"""The broker of `sbx run`, which starts before typer has parsed the command line."""

from collections.abc import Sequence

import pytest

from sbx.cli import broker_ahead


@pytest.mark.parametrize(
    ("words", "label"),
    [
        (["run"], "default"),
        (["run", "-c", "1"], "default"),
        (["run", "--policy", "strict", "x.py"], "strict"),
        (["run", "--policy=lab.toml"], "lab.toml"),
        (["run", "--policy"], "default"),  # typer reports it
        (["run", "--workspace", "/a/../b", "x.py"], "default /b"),
        (["run", "--workspace=/b", "--policy", "strict"], "strict /b"),
        (["run", "x.py", "--", "--policy", "other"], "other"),  # wrong, and without an effect
    ],
)
def test_label_of_a_command_line(words: Sequence[str], label: str) -> None:
    assert broker_ahead._label(words) == label


@pytest.mark.parametrize("words", [["ps"], ["run", "--help"], ["run", "-h"], ["--version"]])
def test_a_command_without_a_sandbox_starts_no_broker(words: Sequence[str]) -> None:
    with broker_ahead.of(words) as broker:
        assert broker is None


def test_the_broker_ends_with_the_command() -> None:
    with broker_ahead.of(["run", "--nothing"]) as broker:
        assert broker is not None
        assert broker.process.poll() is None
    assert broker.process.returncode == 0
