"""`sbx exec`: one run in a sandbox of a running service."""

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from sbx.cli import exits, reach, terminal
from sbx.errors import BadRequest, TooLarge

if TYPE_CHECKING:
    from sbx.cli.screen import Face

_STDIN_MAX = 1 << 20  # it travels in the JSON body of the request


def execute(
    sandbox_id: reach.Id,
    file: Annotated[
        str | None, typer.Argument(help="A file of Python; - for stdin.", metavar="FILE")
    ] = None,
    code: Annotated[
        str | None, typer.Option("--code", "-c", help="The code itself.", metavar="CODE")
    ] = None,
    shell: Annotated[
        bool, typer.Option("--shell", help="It is a bash script and not Python.")
    ] = False,
    conversation: reach.Conversation = "default",
    timeout: Annotated[
        float | None,
        typer.Option(
            help="The longest it may take; else limits.wall_time of the policy, which is the most.",
            metavar="SECONDS",
        ),
    ] = None,
    cwd: Annotated[
        str | None, typer.Option(help="With --shell: where it starts.", metavar="DIR")
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            help="With --shell: an environment variable. Repeatable.", metavar="NAME=VALUE"
        ),
    ] = None,
    send_stdin: Annotated[
        bool, typer.Option("--stdin", "-i", help="With --shell: it reads our stdin.")
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print the whole result as one JSON document, at the end."),
    ] = False,
    as_events: Annotated[
        bool, typer.Option("--events", help="Print each event as it comes, as a line of JSON.")
    ] = False,
    socket: reach.Socket = None,
    key: reach.Key = None,
) -> int:
    """Run code in a sandbox, and show its output as it comes.

    What it leaves, variables and files, is there for the next one. The value of the last expression
    is shown, as in a notebook. input() reads lines of our stdin. Ctrl-C interrupts the run; a
    second one ends the kernel, and its variables with it.
    """
    from sbx.cli.run import code_of, variables

    if as_json and as_events:
        raise BadRequest("--json and --events are two shapes of one output; give one of them")
    if not shell and (cwd or env or send_stdin):
        raise BadRequest(
            "--cwd, --env and --stdin are for a command",
            hint="add --shell, or do it in the code: os.chdir, os.environ, input()",
        )
    text, from_stdin = code_of(file, code)
    if from_stdin and send_stdin:
        raise BadRequest("stdin is the script already, and cannot be its input too")

    from sbx.cli.screen import Lines, Screen, Whole
    from sbx.cli.visit import Visit

    face: Face = Whole() if as_json else Lines() if as_events else Screen()
    asked = Visit(
        sandbox_id,
        conversation,
        text,
        shell=shell,
        timeout_s=timeout,
        cwd=cwd,
        env=variables(env or []),
        stdin=_stdin() if send_stdin else None,
        # A prompt is for people, and they are shown none of it in these shapes.
        answers=not from_stdin and not ((as_json or as_events) and os.isatty(terminal.STDIN)),
    )
    return exits.for_run(reach.ask(socket, key, lambda client: asked.run(client, face)))


def _stdin() -> str:
    """All of stdin, as text. Raises TooLarge, BadRequest."""
    data = sys.stdin.buffer.read(_STDIN_MAX + 1)
    if len(data) > _STDIN_MAX:
        raise TooLarge(
            f"stdin is longer than the {_STDIN_MAX >> 20} MiB that a command may be given",
            code="stdin_too_large",
            hint="copy it in with sbx cp, and let the command read the file",
            details={"limit": _STDIN_MAX},
        )
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise BadRequest(
            "stdin is not UTF-8 text",
            hint="copy it in with sbx cp, and let the command read the file",
        ) from None
