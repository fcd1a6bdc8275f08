"""What a person is told, or, with --json, a program."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from sbx.cli.terminal import STDERR, STDOUT, colours, one_line, write
from sbx.errors import SbxError
from sbx.protocol.runs import Quarantined, quarantine_notice

_RED, _CYAN, _RESET = "\x1b[31m", "\x1b[36m", "\x1b[0m"


def document(value: Mapping[str, Any]) -> None:
    """One JSON document on a line of stdout; ASCII, so that no control character is in it."""
    write(STDOUT, json.dumps(value) + "\n")


def outcome(value: Mapping[str, Any], line: str, *, as_json: bool) -> None:
    """What was done: the document, or the one line that the next command takes."""
    if as_json:
        document(value)
    else:
        write(STDOUT, f"{line}\n")


def error(problem: SbxError, *, as_json: bool) -> None:
    """The one way in which a command says why it failed."""
    if as_json:
        with suppress(SbxError):  # stdout itself may be what failed
            document({"error": problem.to_dict()})
        return
    failure(problem.message, problem.hint)


def failure(message: str, hint: str | None = None) -> None:
    _say("error", _RED, message)
    if hint:
        _say("hint", _CYAN, hint)


def note(message: str) -> None:
    _say("note", _CYAN, message)


def quarantined(items: Sequence[Quarantined]) -> None:
    """The host executables that code created in a directory of the host, and how to get them."""
    for line in quarantine_notice(items).splitlines():
        word, _, message = line.partition(": ")
        _say(word, _CYAN, message)


def _say(word: str, colour: str, message: str) -> None:
    head = f"{colour}{word}:{_RESET}" if colours(STDERR) else f"{word}:"
    with suppress(SbxError):  # nobody is there to be told
        write(STDERR, f"{head} {one_line(message)}\n")
