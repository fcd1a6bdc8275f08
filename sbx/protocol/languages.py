"""The languages that a script may be written in, beside Python, and how their files are named."""

from collections.abc import Sequence
from typing import Literal, get_args

from sbx.errors import BadRequest, TooLarge

Language = Literal["bash", "javascript", "typescript", "java", "go"]
RunLanguage = Literal["python"] | Language

LANGUAGES: tuple[Language, ...] = get_args(Language)
ARGUMENTS_MAX = 1000
ARGUMENTS_SIZE_MAX = 120 << 10  # bytes of UTF-8, of all arguments: one is at most 128 KiB long

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
    """The language of a file by the end of its name; None for Python's, and for any other."""
    dot = name.rfind(".")
    return _SUFFIXES.get(name[dot:].lower()) if dot > name.rfind("/") else None


def check_language(name: str) -> Language:
    """Raises BadRequest `unknown_language`."""
    for language in LANGUAGES:
        if language == name:
            return language
    raise BadRequest(
        f"{name!r:.80} is no language that sbx runs scripts of",
        code="unknown_language",
        hint=f"one of {', '.join(LANGUAGES)}; Python is what cells are for",
        details={"available": list(LANGUAGES)},
    )


def check_arguments(args: Sequence[str]) -> tuple[str, ...]:
    """The arguments of a script, if execve(2) can carry them.

    Raises BadRequest `invalid_arguments`, TooLarge `arguments_too_large`.
    """
    if isinstance(args, str) or len(args) > ARGUMENTS_MAX:
        raise _invalid(f"the arguments of a script are a list of at most {ARGUMENTS_MAX} texts")
    try:
        size = sum(len(arg.encode()) + 1 for arg in args)
        carried = not any("\0" in arg for arg in args)
    except (AttributeError, UnicodeEncodeError):
        size, carried = 0, False
    if not carried:
        raise _invalid("an argument is text that UTF-8 can carry, without NUL")
    if size > ARGUMENTS_SIZE_MAX:
        raise TooLarge(
            f"the arguments of {size} bytes are longer than the limit of {ARGUMENTS_SIZE_MAX}",
            code="arguments_too_large",
            hint="hand it data by stdin= or in a file",
            details={"limit": ARGUMENTS_SIZE_MAX},
        )
    return tuple(args)


def _invalid(sentence: str) -> BadRequest:
    return BadRequest(
        sentence, code="invalid_arguments", hint="hand it data by stdin= or in a file"
    )
