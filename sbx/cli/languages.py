"""Choose the language of the code for `sbx run` and `sbx exec`."""

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
        help=f"{_PYTHON}, {', '.join(LANGUAGES)}. Without it the suffix of FILE decides: .js, "
        ".ts, .java, .go, .sh; any other is Python.",
        metavar="NAME",
    ),
]
Arguments = Annotated[
    list[str] | None,
    typer.Argument(help="An argument for a script in another language.", metavar="[ARG…]"),
]


def chosen(
    language: str | None, file: str | None, args: Sequence[str], *, shell: bool
) -> Language | None:
    """Return the language of a script, or None for a Python cell and for a command.

    Raise BadRequest.
    """
    if shell and language is not None:
        raise BadRequest(
            "--shell and --language exclude each other",
            hint="use --language bash for a script, --shell for a command",
        )
    script: Language | None
    if shell:
        script = None
    elif language is not None:
        script = None if language == _PYTHON else check_language(language)
    else:
        script = language_of(file or "")
    if args and script is None:
        raise BadRequest(
            "arguments are for a script in another language",
            hint="put them into the code, or use --language bash",
        )
    return script
