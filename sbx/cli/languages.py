"""In which language `sbx run` and `sbx exec` run what they are given."""

from collections.abc import Sequence
from typing import Annotated

import typer

from sbx.errors import BadRequest
from sbx.protocol.languages import LANGUAGES, Language, check_language, language_of

_PYTHON = "python"

Option = Annotated[
    str | None,
    typer.Option(
        "--language",
        "-l",
        help=f"{_PYTHON}, {', '.join(LANGUAGES)}. Without it the end of FILE's name tells: .js, "
        ".ts, .java, .go, .sh; all else is Python.",
        metavar="NAME",
    ),
]
Arguments = Annotated[
    list[str] | None,
    typer.Argument(help="What a script in another language is given.", metavar="[ARG…]"),
]


def chosen(
    language: str | None, file: str | None, args: Sequence[str], *, shell: bool
) -> Language | None:
    """The language of a script; None for a cell of Python, and for a command.

    Raises BadRequest.
    """
    if shell and language is not None:
        raise BadRequest(
            "--shell and --language are two answers to what it is",
            hint="say --language bash for a script, --shell for a command",
        )
    found: Language | None
    if shell:
        found = None
    elif language is not None:
        found = None if language == _PYTHON else check_language(language)
    else:
        found = language_of(file or "")
    if args and found is None:
        raise BadRequest(
            "arguments are for a script in another language",
            hint="put them into the code, or say --language bash",
        )
    return found
