"""`sbx exec`: one run in a sandbox of a running service."""

from contextlib import suppress
from dataclasses import replace
from os import isatty
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, cast

import typer

from sbx.cli import command, connect, exits, output
from sbx.cli.narrowing import variables
from sbx.cli.run import (
    CodeOption,
    EventsOption,
    FileArgument,
    LanguageOption,
    ResultOption,
    ScriptArguments,
    ShellOption,
    TimeoutOption,
    code_of,
    text_of,
)
from sbx.cli.script import NOTEBOOK, WORKSPACE, NotebookCell, cells_of, is_program, language_for
from sbx.cli.terminal import STDIN
from sbx.errors import BadRequest, NotFound, SbxError
from sbx.protocol.contexts import DEFAULT_CONTEXT
from sbx.protocol.runs import Status

if TYPE_CHECKING:
    from sbx.cli.run_driver import RunSpec, SignalHandler, Step
    from sbx.cli.run_output import Printer
    from sbx.client import Client
    from sbx.client.contexts import RemoteContext
    from sbx.client.conversation import RemoteConversation
    from sbx.client.runs import RemoteRun
    from sbx.protocol.runs import Run

_GRACE_S = 2.0  # the time for the service to react to a signal


def execute(
    sandbox_id: connect.Id,
    file: FileArgument = None,
    args: ScriptArguments = None,
    code: CodeOption = None,
    shell: ShellOption = False,
    language: LanguageOption = None,
    conversation: connect.Conversation = "default",
    context: Annotated[
        str,
        typer.Option(
            help="The kernel of the conversation; created if it does not exist.", metavar="NAME"
        ),
    ] = "default",
    timeout: TimeoutOption = None,
    cwd: Annotated[
        str | None,
        typer.Option(help="For a command, script or FILE: the working directory.", metavar="DIR"),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            help="For a command, script or FILE: an environment variable. Repeatable.",
            metavar="NAME=VALUE",
        ),
    ] = None,
    send_stdin: Annotated[
        bool, typer.Option("--stdin", "-i", help="Pass stdin to the command, script or FILE.")
    ] = False,
    background: Annotated[
        bool,
        typer.Option(
            "--background",
            "-d",
            help="With --shell: start the command, print its id, and exit; see sbx command. With "
            "-i its stdin stays open, for sbx command write.",
        ),
    ] = False,
    as_json: ResultOption = False,
    as_events: EventsOption = False,
    socket: connect.Address = None,
    key: connect.Key = None,
) -> int:
    """Run code in a sandbox, and stream its output.

    Files stay for the next run, and so do the variables of -c, which shows the value of its last
    expression, as in a notebook. A Python FILE runs as with python3, next to these variables, as
    /workspace/FILE, which it replaces; its imports are those of the sandbox. A notebook (.ipynb)
    runs cell by cell. input() in -c reads lines of stdin. Ctrl-C interrupts the run. A second
    Ctrl-C ends the kernel, and its variables are lost.
    """
    if as_json and as_events:
        raise BadRequest("--json and --events exclude each other")
    source, from_stdin = code_of(file, code)
    script = language_for(language, file, source, shell=shell)
    program = script is None and not shell and is_program(file)
    if args and script is None and not program:
        raise BadRequest(
            "arguments are for a script or a FILE: this kernel keeps its sys.argv",
            hint="put them into the code, or name a FILE",
        )
    if not shell and script is None and not program and (cwd or env or send_stdin):
        raise BadRequest(
            "--cwd, --env and --stdin are for a command or a FILE",
            hint="add --shell, or do it in the code: os.chdir, os.environ, input()",
        )
    text = "" if program else text_of(source, file)
    if script is not None and context != DEFAULT_CONTEXT:
        raise BadRequest(
            "--context is for Python and commands: a script has no variables to isolate",
            hint="omit --context",
        )
    if background:
        if not shell or as_events or timeout is not None or context != DEFAULT_CONTEXT:
            raise BadRequest(
                "--background needs --shell, and excludes --events, --timeout and --context",
                hint="use sbx command stop to end it, and sbx command logs for its output",
            )
        return command.start(
            socket,
            key,
            sandbox_id,
            conversation,
            text,
            cwd=cwd,
            env=variables(env or []),
            stdin_open=send_stdin,
            as_json=as_json,
        )
    if from_stdin and send_stdin:
        raise BadRequest("stdin is already the script, so it cannot be the input, too")

    from sbx.cli.run_driver import RunSpec, input_of_program, reads_answers, stdin_of
    from sbx.cli.run_output import printer

    notebook = file is not None and not shell and file.lower().endswith(NOTEBOOK)
    if notebook and as_json:
        raise BadRequest("--json is for one result, and each cell of a notebook has one: --events")
    cells = cells_of(text, str(file)) if notebook else [NotebookCell(text)]
    call = None
    if program:
        from sbx.run_methods import RunCall

        call = RunCall(
            "file",
            f"{WORKSPACE}/{PurePath(str(file)).name}",
            args=tuple(args or ()),
            source=source,
            stdin_data=input_of_program() if send_stdin else None,
            cwd=cwd,
            env=variables(env or []),
        )
    spec = RunSpec(
        "",
        file=call,
        shell=shell,
        language=script,
        args=tuple(args or ()),
        timeout_s=timeout,
        cwd=cwd,
        env=variables(env or []),
        stdin=stdin_of() if send_stdin and not program else None,
        answers=reads_answers(from_stdin, as_json or as_events) and (not program or isatty(STDIN)),
    )
    shown = printer(as_json=as_json, as_events=as_events)

    async def run(client: "Client") -> int:
        where = await _where(client, sandbox_id, conversation, context)
        for cell in cells:
            ended = await _run(replace(spec, code=cell.code), where, shown)
            if not (ended.ok or cell.expects(ended)):
                break
        return exits.Exit.OK if cell.expects(ended) else exits.for_run(ended)

    return connect.ask(socket, key, run)


async def _where(
    client: "Client", sandbox_id: str, name: str, context: str
) -> "RemoteConversation | RemoteContext":
    """Return the conversation or the context of the run. Create a missing context."""
    conversation = client.sandbox(sandbox_id).conversation(name)
    if context == DEFAULT_CONTEXT:
        return conversation
    try:
        return await conversation.contexts.get(context)
    except NotFound:
        return await conversation.contexts.create(context)


async def _run(
    spec: "RunSpec", where: "RemoteConversation | RemoteContext", printer: "Printer"
) -> "Run":
    """Run the code and show its events.

    Raise StoppedBySignal for a signal before the result, ReaderGone, and the errors of the service.
    """
    from sbx.cli.run_driver import RunPrinter, signals_of

    run_printer = RunPrinter(printer)
    run = cast("RemoteRun", spec.start(where, run_printer))
    async with signals_of(run_printer) as signals:
        interrupt, stop, end = _steps(where, run, signals)
        signals.react([interrupt, stop], on_end=end)
        ended = await run_printer.follow(run.events(), answers=spec.answers)
        if ended.status is Status.INTERRUPTED and signals.received is None:
            output.note("another client stopped the run or its sandbox, or the service ended")
        return ended
    raise AssertionError  # the block returns or raises


def _steps(
    where: "RemoteConversation | RemoteContext", run: "RemoteRun", signals: "SignalHandler"
) -> "tuple[Step, Step, Step]":
    """Return the steps of the first Ctrl-C, of the second one, and of SIGTERM or SIGHUP."""
    import asyncio  # a lazy import keeps `sbx --help` fast

    async def interrupt() -> None:
        """Interrupt the run. Its end event then ends this command."""
        try:
            await run.interrupt()
        except SbxError:  # the service cannot interrupt the run
            signals.cancel()

    async def stop() -> None:
        """Stop the kernel."""
        with suppress(SbxError, TimeoutError):
            async with asyncio.timeout(_GRACE_S):
                await where.stop()
            await asyncio.sleep(_GRACE_S)
        signals.cancel()

    async def end() -> None:
        with suppress(SbxError, TimeoutError):
            async with asyncio.timeout(_GRACE_S):
                await run.interrupt()
        signals.cancel()

    return interrupt, stop, end
