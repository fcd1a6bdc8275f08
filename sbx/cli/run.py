"""`sbx run`: one run in a sandbox of its own."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sbx.cli import exits, languages
from sbx.errors import BadRequest, NotFound, TooLarge

if TYPE_CHECKING:
    from sbx.cli.screen import Face

_READ_MAX = 64 << 20  # far beyond what a cell may be; only so that /dev/zero has an end


def run(
    file: Annotated[
        str | None, typer.Argument(help="A file of code; - for stdin.", metavar="FILE")
    ] = None,
    args: languages.Arguments = None,
    code: Annotated[
        str | None, typer.Option("--code", "-c", help="The code itself.", metavar="CODE")
    ] = None,
    shell: Annotated[
        bool, typer.Option("--shell", help="It is a bash script and not Python.")
    ] = False,
    language: languages.Option = None,
    policy: Annotated[
        str, typer.Option(help="A policy's name, or its file.", metavar="POLICY")
    ] = "default",
    timeout: Annotated[
        float | None,
        typer.Option(
            help="The longest it may take; else limits.wall_time of the policy, which is the most.",
            metavar="SECONDS",
        ),
    ] = None,
    upload: Annotated[
        list[Path] | None,
        typer.Option(
            help="Copy a file in, read-only at /workspace/uploads/temparea. Repeatable.",
            metavar="FILE",
        ),
    ] = None,
    uploads: Annotated[
        Path | None,
        typer.Option(help="A directory to be the uploads, mounted read-only.", metavar="DIR"),
    ] = None,
    workspace: Annotated[
        Path | None,
        typer.Option(
            help="A directory to be /workspace, read-write; uploads are then at /uploads. "
            "Nothing of sbx is written into it.",
            metavar="DIR",
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(help="An environment variable. Repeatable.", metavar="NAME=VALUE"),
    ] = None,
    figures: Annotated[
        Path | None,
        typer.Option(
            help="Write what is shown as image there: figure-1.png …; never over a file.",
            metavar="DIR",
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print the whole result as one JSON document, at the end."),
    ] = False,
    as_events: Annotated[
        bool, typer.Option("--events", help="Print each event as it comes, as a line of JSON.")
    ] = False,
) -> int:
    """Run code in a sandbox of its own, and show its output as it comes.

    The value of the last expression is shown, as in a notebook. input() asks at the terminal, and
    fails in the code where there is none. Ctrl-C interrupts; a second one, or half a second, kills.
    Colours reach a terminal, other control characters are written out as \\x1b; --json has the
    exact text.
    """
    if as_json and as_events:
        raise BadRequest("--json and --events are two shapes of one output; give one of them")
    if upload and uploads is not None:
        raise BadRequest(
            "--upload copies files in and --uploads mounts a directory; give one of them",
            hint="put the files into that directory",
        )
    env_given = variables(env or [])
    check_names(upload or [])
    script = languages.chosen(language, file, args or (), shell=shell)
    text, from_stdin = code_of(file, code)

    import asyncio

    from sbx.cli.screen import Lines, Screen, Whole
    from sbx.cli.session import Request, run_once

    face: Face = Whole() if as_json else Lines() if as_events else Screen()
    request = Request(
        code=text,
        shell=shell,
        language=script,
        args=tuple(args or ()),
        policy=policy,
        timeout_s=timeout,
        env=env_given,
        upload=tuple(upload or ()),
        uploads=uploads,
        workspace=workspace,
        figures=figures,
        asks=not (as_json or as_events),
        answers=not (from_stdin or as_json or as_events) and os.isatty(0),
    )
    return exits.for_run(asyncio.run(run_once(request, face)))


def code_of(file: str | None, code: str | None) -> tuple[str, bool]:
    """The code, and whether it came from stdin. Raises BadRequest, NotFound, TooLarge."""
    if (file is None) == (code is None):
        raise BadRequest(
            "there is nothing to run" if file is None else "FILE and -c are two things to run",
            hint="give a FILE, or -c CODE, or - for stdin",
        )
    if code is not None:
        return code, False
    name = "stdin" if file == "-" else str(file)
    try:
        if file == "-":
            data = sys.stdin.buffer.read(_READ_MAX + 1)
        else:
            with open(str(file), "rb") as source:
                data = source.read(_READ_MAX + 1)
    except FileNotFoundError:
        raise NotFound(
            f"there is no file {name}",
            code="file_not_found",
            hint="check the path; code itself goes after -c",
        ) from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise BadRequest(
            f"{name} cannot be read: {why}",
            code="unreadable_file",
            hint="name a regular file that you may read",
        ) from error
    if len(data) > _READ_MAX:
        raise TooLarge(
            f"{name} is longer than {_READ_MAX >> 20} MiB, and code is much shorter",
            code="code_too_large",
            hint="give data as --upload",
        )
    try:
        return data.decode("utf-8-sig"), file == "-"
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise BadRequest(
            f"{name} is not UTF-8 text: line {line} has the byte 0x{data[error.start]:02x}",
            code="invalid_code",
            hint="save it as UTF-8",
        ) from None


def variables(pairs: list[str]) -> dict[str, str]:
    """What `--env NAME=VALUE` gave. Raises BadRequest."""
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise BadRequest(
                f"--env {pair}: there is no value", hint="write it as --env NAME=VALUE"
            )
        found[name] = value
    return found


def check_names(files: Sequence[Path]) -> None:
    """Uploads lie flat, so one name is one file. Raises BadRequest."""
    names = [path.name for path in files]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise BadRequest(
            f"two of the uploads are named {twice}, and there is one place for that name",
            hint="rename one of them, or mount a directory with --uploads",
        )
