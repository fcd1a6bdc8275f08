"""`sbx run`: one run in a new sandbox."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from os import isatty
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sbx.cli import exits, narrowing, output
from sbx.cli.script import NOTEBOOK, NotebookCell, PythonScript, cells_of, language_for
from sbx.cli.terminal import STDIN
from sbx.errors import BadRequest, NotFound, TooLarge
from sbx.protocol.languages import ALIASES, LANGUAGES

if TYPE_CHECKING:
    from sbx.cli.run_driver import RunSpec, SignalHandler, Step
    from sbx.cli.run_output import Printer
    from sbx.isolation.broker.spawned import SpawnedBroker
    from sbx.runtime.conversation import Conversation
    from sbx.runtime.sandbox import AsyncSandbox

_READ_MAX = 64 << 20  # far above the limit of a cell; ends the read of a file such as /dev/zero
_GRACE_S = 0.4  # from Ctrl-C to SIGKILL: the jail must be gone within a second
_KILLED_S = 0.5  # from SIGKILL until the command stops waiting for the run's last event
_PYTHON = "python"
_REFUSED_SHOWN = 3

FileArgument = Annotated[
    str | None, typer.Argument(help="A file of code; - for stdin.", metavar="FILE")
]
CodeOption = Annotated[
    str | None, typer.Option("--code", "-c", help="The code itself.", metavar="CODE")
]
ShellOption = Annotated[bool, typer.Option("--shell", help="Run a bash script instead of Python.")]
TimeoutOption = Annotated[
    float | None,
    typer.Option(help="The time limit; default: the policy's run_timeout.", metavar="SECONDS"),
]
ResultOption = Annotated[
    bool, typer.Option("--json", help="Print the whole result as one JSON document, at the end.")
]
EventsOption = Annotated[
    bool, typer.Option("--events", help="Print each event as it occurs, as a line of JSON.")
]
LanguageOption = Annotated[
    str | None,
    typer.Option(
        "--language",
        "-l",
        help=f"{', '.join((_PYTHON, *LANGUAGES, *ALIASES))}. Without it the first line (#!) or the"
        " ending of FILE decides: .py, .js, .ts, .java, .go, .sh.",
        metavar="NAME",
    ),
]
UploadOption = Annotated[
    list[Path] | None,
    typer.Option(
        help="Copy a file in, read-only at /workspace/uploads/temparea. Repeatable.",
        metavar="FILE",
    ),
]
ScriptArguments = Annotated[
    list[str] | None,
    typer.Argument(help="An argument of the script; its options after --.", metavar="[ARG…]"),
]


def run(
    context: typer.Context,
    file: FileArgument = None,
    args: ScriptArguments = None,
    code: CodeOption = None,
    shell: ShellOption = False,
    language: LanguageOption = None,
    policy: Annotated[
        str, typer.Option(help="The name or the file of a policy.", metavar="POLICY")
    ] = "default",
    timeout: TimeoutOption = None,
    upload: UploadOption = None,
    uploads: Annotated[
        Path | None,
        typer.Option(help="Mount a directory read-only as the uploads.", metavar="DIR"),
    ] = None,
    workspace: Annotated[
        Path | None,
        typer.Option(
            help="Mount a directory read-write as /workspace; uploads are then at /uploads. "
            "sbx itself writes no files there.",
            metavar="DIR",
        ),
    ] = None,
    memory: narrowing.Memory = None,
    cpus: narrowing.Cpus = None,
    network_allow: narrowing.NetworkAllow = None,
    env: narrowing.Env = None,
    figures: Annotated[
        Path | None,
        typer.Option(
            help="Write displayed images there: figure-1.png …; never replaces a file.",
            metavar="DIR",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Copy the files that the code made there. Existing files are replaced; hidden "
            "files, and files that a program of this host would obey, are left out.",
            metavar="DIR",
        ),
    ] = None,
    send_stdin: Annotated[
        bool,
        typer.Option("--stdin", "-i", help="Let the code read stdin, also a command or a script."),
    ] = False,
    as_json: ResultOption = False,
    as_events: EventsOption = False,
) -> int:
    """Run code in a new sandbox, and stream its output.

    A Python FILE runs as with python3, with the modules of its directory, and so does the code of
    -c, which also shows the value of its last expression. A notebook (.ipynb) runs cell by cell.
    With -i the code reads stdin. Without it, stdin is empty, and at a terminal input() asks.
    Ctrl-C interrupts the run. If it does not end within half a second, or at a second Ctrl-C, it is
    killed. Colours reach a terminal. Other control characters are printed as \\x1b; --json has the
    exact text.
    """
    if as_json and as_events:
        raise BadRequest("--json and --events exclude each other")
    if upload and uploads is not None:
        raise BadRequest(
            "--upload copies files in and --uploads mounts a directory: they exclude each other",
            hint="put the files into that directory",
        )
    narrowed = narrowing.sandbox_options(
        memory=memory, cpus=cpus, network_allow=network_allow, env=env
    )
    check_names(upload or [])
    source, from_stdin = code_of(file, code)
    if from_stdin and send_stdin:
        raise BadRequest("stdin is already the script, so it cannot be the input, too")
    script = language_for(language, file, source, shell=shell)
    path = None if file is None or from_stdin or shell or script is not None else Path(file)
    if args and script is None and path is None:
        raise BadRequest(
            "arguments are for a script in a FILE", hint="put them into the code, or name a FILE"
        )
    notebook = path is not None and path.suffix.lower() == NOTEBOOK
    is_program = not (notebook or shell or script is not None)
    text = "" if is_program else text_of(source, file)
    cells = cells_of(text, str(path)) if notebook else [NotebookCell(text)]
    if notebook and as_json:
        raise BadRequest("--json is for one result, and each cell of a notebook has one: --events")
    if out is not None and workspace is not None:
        raise BadRequest("--out is not needed with --workspace: the files are in that directory")

    import asyncio  # lazy imports keep `sbx --help` fast

    from sbx.cli.run_driver import RunSpec, input_of_program, reads_answers, stdin_of
    from sbx.cli.run_output import printer
    from sbx.run_methods import RunCall

    script_file = PythonScript.of(path, source, workspace) if path and not notebook else None
    program = None
    if is_program:
        program = RunCall(
            "file",
            script_file.path if script_file is not None else "-" if from_stdin else "-c",
            args=tuple(args or ()),
            source=source,
            stdin_data=input_of_program() if send_stdin else None,
            shows_value=code is not None,
        )
    spec = RunSpec(
        "",
        file=program,
        shell=shell,
        language=script,
        args=tuple(args or ()),
        timeout_s=timeout,
        # Hostile code must not read the stdin of a pipeline that only starts it.
        answers=(isatty(STDIN) or (send_stdin and notebook))
        and reads_answers(from_stdin, as_json or as_events),
        stdin=stdin_of() if send_stdin and (shell or script is not None) else None,
    )
    options = {"workspace": workspace, "uploads": uploads, **narrowed}
    work = _Work(spec, cells, script_file, upload or (), figures, out)
    asks = not (as_json or as_events)
    shown = printer(as_json=as_json, as_events=as_events)
    once = _run_once(work, shown, policy, options, context.obj, asks=asks)
    return asyncio.run(once)


@dataclass(frozen=True, slots=True)
class _Work:
    """`spec` is for each of the `cells`. `script`: the one that they are, in Python."""

    spec: "RunSpec"
    cells: Sequence[NotebookCell]
    script: PythonScript | None
    upload: Sequence[Path]
    figures: Path | None
    out: Path | None


async def _run_once(
    work: _Work,
    printer: "Printer",
    policy: str,
    options: dict[str, Any],
    broker: "SpawnedBroker | None",
    *,
    asks: bool,
) -> int:
    """Create a sandbox, copy the uploads, follow the run, and clean up. Return the exit code.

    Raise every SbxError of the core, StoppedBySignal for a signal before the result, ReaderGone.
    """
    from contextlib import ExitStack, closing

    from sbx.cli.host_executables import report_left_out
    from sbx.cli.quarantine import offer
    from sbx.cli.run_driver import RunPrinter, signals_of
    from sbx.cli.save_files import Figures, directory_for, save_files
    from sbx.policy import reference
    from sbx.runtime.runtime import Runtime
    from sbx.runtime.settings import Settings
    from sbx.workspace import quarantine

    run_printer = RunPrinter(printer)
    with ExitStack() as stack:
        directory = None
        if work.figures is not None:  # open it before code inside can replace it
            directory = stack.enter_context(closing(Figures(work.figures)))
        out = directory_for(work.out) if work.out is not None else None
        settings = Settings()
        async with signals_of(run_printer) as signals, Runtime(settings, broker=broker) as runtime:
            try:
                box = await runtime.create(reference(policy), **options)
                for note in box.notes if asks else ():
                    output.note(note)
                for path in work.upload:
                    await box.uploads.put(path)
                where = box.conversation("default")
                signals.react(_on_interrupt(where, signals))
                if work.script is not None:
                    await work.script.copy(box)
                results = []
                for cell in work.cells:
                    run = replace(work.spec, code=cell.code).start(where, run_printer)
                    followed = run_printer.follow(run.events(), answers=work.spec.answers)
                    results.append(result := await followed)
                    if not (result.ok or cell.expects(result)):
                        break
                copied = work.script.copied if work.script is not None else ()
                saved = await save_files(where, out, copied) if out is not None else None
                if asks:
                    _note_about(box)
                    if work.script is not None:
                        work.script.hint_for(result.error)
            finally:
                signals.ignore()
        quarantined = [item for each in results for item in each.quarantined]
        if asks and quarantined and box.policy.host_executables == "ask":
            store = settings.protection.quarantines
            offer([quarantine.get(store, item.id)[0] for item in quarantined], store)
        for each in results:
            for path in directory.save(each) if directory is not None else ():
                output.note(f"figure: {path}")
        if saved is not None:
            for path in saved.paths:
                output.note(f"saved: {path}")
            report_left_out(saved.left_out, "pack them inside, and save the archive")
        return exits.Exit.OK if cell.expects(result) else exits.for_run(result)


def _note_about(box: "AsyncSandbox") -> None:
    """Report what the code inside may not have seen: requests that the policy refused, and modules
    that were not preloaded."""
    if (receipt := box.receipt) is not None:
        for module, reason in receipt.preload_failed.items():
            output.note(f"preload: {module} was not imported: {reason}")
    refused = [decision for decision in box.network_log if not decision.allowed]
    for decision in refused[:_REFUSED_SHOWN]:
        output.note(f"a request was refused by {decision.rule}: {decision.reason}")
    if (more := len(refused) - _REFUSED_SHOWN) > 0:
        output.note(f"{more} more requests were refused")


def _on_interrupt(where: "Conversation", signals: "SignalHandler") -> "list[Step]":
    """Return the steps of Ctrl-C: interrupt the cell, and kill it if it continues. A second Ctrl-C
    kills at once."""
    from asyncio import sleep

    async def interrupt() -> None:
        if await where.interrupt():
            await sleep(_GRACE_S)
        await kill()

    async def kill() -> None:
        if where.receipt is not None:
            await where.stop()  # the run ends as interrupted, with its output so far
            await sleep(_KILLED_S)
        signals.cancel()

    return [interrupt, kill]


def code_of(file: str | None, code: str | None) -> tuple[bytes, bool]:
    """Return the code, and whether it came from stdin. Raise BadRequest, NotFound, TooLarge."""
    if (file is None) == (code is None):
        raise BadRequest(
            "the code is missing" if file is None else "FILE and -c exclude each other",
            hint="pass a FILE, or -c CODE, or - for stdin",
        )
    if code is not None:
        return code.encode(errors="surrogateescape"), False
    name = "stdin" if file == "-" else str(file)
    try:
        if file == "-":
            data = sys.stdin.buffer.read(_READ_MAX + 1)
        else:
            with open(str(file), "rb") as source:
                data = source.read(_READ_MAX + 1)
    except FileNotFoundError:
        raise NotFound(
            f"file {name} does not exist",
            code="file_not_found",
            hint="check the path; to pass code, use -c CODE, or --shell -c COMMAND",
        ) from None
    except (OSError, ValueError) as error:
        cause = getattr(error, "strerror", None) or str(error)
        raise BadRequest(
            f"{name} cannot be read: {cause}",
            code="unreadable_file",
            hint="name a regular file that you may read",
        ) from error
    if len(data) > _READ_MAX:
        raise TooLarge(
            f"{name} is longer than {_READ_MAX >> 20} MiB, which is too long for code",
            code="code_too_large",
            hint="pass data with --upload",
        )
    return data, file == "-"


def text_of(data: bytes, file: str | None) -> str:
    """Return code that is not Python, or a notebook, as text. Raise BadRequest `invalid_code`."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        name = "the code" if file is None else "stdin" if file == "-" else file
        line = data.count(b"\n", 0, error.start) + 1
        raise BadRequest(
            f"{name} is not UTF-8 text: line {line} has the byte 0x{data[error.start]:02x}",
            code="invalid_code",
            hint="save it as UTF-8",
        ) from None


def check_names(files: Sequence[Path]) -> None:
    """Raise NotFound for a file that does not exist, and BadRequest if two files have the same
    name: all uploads are in one directory."""
    names = [path.name for path in files]
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate is not None:
        raise BadRequest(
            f"two uploads are named {duplicate}, and all uploads are in one directory",
            hint="rename one of them, or mount a directory with --uploads",
        )
    missing = next((path for path in files if not path.exists()), None)
    if missing is not None:
        raise NotFound(
            f"file {missing} does not exist",
            code="file_not_found",
            hint=f"relative paths are looked up in {Path.cwd()}",
        )
