"""Print results and messages, for people or (with --json) for programs."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from sbx.cli.terminal import STDERR, STDOUT, colours, one_line, write
from sbx.errors import SbxError
from sbx.protocol.runs import Quarantined, quarantine_notice

_RED, _CYAN, _RESET = "\x1b[31m", "\x1b[36m", "\x1b[0m"


def document(value: Mapping[str, Any]) -> None:
    """Print a JSON document as a line on stdout. It is ASCII, so it has no control characters."""
    write(STDOUT, json.dumps(value) + "\n")


def outcome(value: Mapping[str, Any], line: str, *, as_json: bool) -> None:
    """Print the result of a command: the document, or one line that another command can read."""
    if as_json:
        document(value)
    else:
        write(STDOUT, f"{line}\n")


def error(problem: SbxError, *, as_json: bool) -> None:
    """Print an error. All commands report their failure this way."""
    if as_json:
        with suppress(SbxError):  # stdout itself may be what failed
            document({"error": problem.to_dict()})
        return
    failure(problem.message, problem.hint)


def failure(message: str, hint: str | None = None) -> None:
    _print("error", _RED, message)
    if hint:
        _print("hint", _CYAN, hint)


def note(message: str) -> None:
    _print("note", _CYAN, message)


def quarantined(items: Sequence[Quarantined]) -> None:
    """List the quarantined host executables of a run, and how to restore them."""
    for line in quarantine_notice(items).splitlines():
        word, _, message = line.partition(": ")
        _print(word, _CYAN, message)


def _print(word: str, colour: str, message: str) -> None:
    head = f"{colour}{word}:{_RESET}" if colours(STDERR) else f"{word}:"
    with suppress(SbxError):  # the reader of stderr is gone
        write(STDERR, f"{head} {one_line(message)}\n")
