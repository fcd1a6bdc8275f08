"""The broker of `sbx run`, which starts while typer parses the command line: that takes 80 ms."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sbx.isolation.broker.spawned import SpawnedBroker

_POLICY = "--policy"


@contextmanager
def of(words: Sequence[str]) -> Iterator["SpawnedBroker | None"]:
    """Start the broker for these words of a command line, and end it. None for a command that
    needs none."""
    if words[0] != "run" or "--help" in words or "-h" in words:
        yield None
        return
    from sbx.isolation.broker.spawned import spawn_broker

    with closing(spawn_broker(_policy(words))) as broker:
        yield broker


def _policy(words: Sequence[str]) -> str:
    """Return the name of the policy, as far as it is known without a parser: it helps the zygote
    to start early, and decides nothing."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == _POLICY:
            return following
        if word.startswith(f"{_POLICY}="):
            return word.partition("=")[2]
    return "default"
