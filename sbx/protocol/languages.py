"""The languages of scripts other than Python, and the endings of their file names."""

from collections.abc import Sequence
from typing import Any, Literal, get_args

from sbx.errors import BadRequest, TooLarge

Language = Literal["bash", "javascript", "typescript", "java", "go"]
RunLanguage = Literal["python"] | Language

LANGUAGES: tuple[Language, ...] = get_args(Language)
ALIASES = {"js": "javascript", "node": "javascript", "ts": "typescript", "sh": "bash"}
ARGUMENTS_MAX = 1000
ARGUMENTS_SIZE_MAX = 120 << 10  # bytes of UTF-8 of all arguments; Linux allows 128 KiB for one

_SUFFIXES: dict[str, Language] = {
    ".sh": "bash",
    ".bash": "bash",
    ".js": "javascript",
    ".mjs": "javascript",
    ".cjs": "javascript",
    ".ts": "typescript",
    ".mts": "typescript",
    ".cts": "typescript",
    ".java": "java",
    ".go": "go",
}


def language_of(name: str) -> Language | None:
    """Return the language of a file by the ending of its name; None for Python and any other."""
    dot = name.rfind(".")
    return _SUFFIXES.get(name[dot:].lower()) if dot > name.rfind("/") else None


def full_name(name: Any) -> Any:
    """Return the name of the language with this alias; anything else as it is."""
    return ALIASES.get(name, name) if isinstance(name, str) else name


def check_language(name: str) -> Language:
    """Return the language of a name or alias. Raise BadRequest `unknown_language`."""
    full = full_name(name)
    for language in LANGUAGES:
        if language == full:
            return language
    raise BadRequest(
        f"{name!r:.80} is not a language that sbx runs scripts in",
        code="unknown_language",
        hint=f"use one of {', '.join(LANGUAGES)}; run Python as a cell",
        details={"available": list(LANGUAGES)},
    )


def check_arguments(args: Sequence[str]) -> tuple[str, ...]:
    """Return the arguments of a script if execve(2) accepts them.

    Raise BadRequest `invalid_arguments`, TooLarge `arguments_too_large`.
    """
    if isinstance(args, str) or len(args) > ARGUMENTS_MAX:
        raise _invalid(
            f"the arguments of a script must be a list of at most {ARGUMENTS_MAX} strings"
        )
    try:
        size = sum(len(arg.encode()) + 1 for arg in args)
        is_valid = not any("\0" in arg for arg in args)
    except (AttributeError, UnicodeEncodeError):
        size, is_valid = 0, False
    if not is_valid:
        raise _invalid("an argument must be valid UTF-8 text without NUL")
    if size > ARGUMENTS_SIZE_MAX:
        raise TooLarge(
            f"the arguments of {size} bytes are longer than the limit of {ARGUMENTS_SIZE_MAX}",
            code="arguments_too_large",
            hint="pass data by stdin= or in a file",
            details={"limit": ARGUMENTS_SIZE_MAX},
        )
    return tuple(args)


def _invalid(sentence: str) -> BadRequest:
    return BadRequest(sentence, code="invalid_arguments", hint="pass data by stdin= or in a file")
