"""The broker of `sbx run`, which starts while typer parses the command line: that takes 80 ms."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sbx.isolation.broker.spawned import SpawnedBroker


@contextmanager
def of(words: Sequence[str]) -> Iterator["SpawnedBroker | None"]:
    """Start the broker for these words of a command line, and end it. None for a command that
    needs none."""
    if words[0] != "run" or "--help" in words or "-h" in words:
        yield None
        return
    from sbx.isolation.broker.spawned import spawn_broker

    with closing(spawn_broker(_label(words))) as broker:
        yield broker


def _label(words: Sequence[str]) -> str:
    """Return the policy and the workspace, as far as they are known without a parser: they help the
    zygote to start early, and decide nothing."""
    from sbx.isolation.broker.spawned import label_of

    return label_of(_value(words, "--policy") or "default", _value(words, "--workspace"))


def _value(words: Sequence[str], option: str) -> str:
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == option:
            return following
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return ""
