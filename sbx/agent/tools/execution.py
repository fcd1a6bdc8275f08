"""run_code and execute_command: a run with live output, and its result as text."""

import dataclasses
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing, suppress
from typing import Any

from sbx.agent.sandbox import ToolRun, ToolSandbox, in_project
from sbx.agent.tools.figures import figures, kept, shown_outputs
from sbx.agent.tools.tool import (
    Arguments,
    Effect,
    Emit,
    ToolCallRequest,
    ToolDefinition,
    ToolResult,
    define_builtin,
)
from sbx.aio import run_to_completion
from sbx.errors import Broken, SbxError
from sbx.protocol.bundles import text_of
from sbx.protocol.runs import (
    Cause,
    Run,
    RunEnd,
    Status,
    Stderr,
    Stdout,
    quarantine_notice,
    strip_escapes,
)
from sbx.protocol.surroundings import Surroundings
from sbx.telemetry import spans

_CAUSES = {
    Cause.MEMORY: "it used more memory than it may",
    Cause.PIDS: "it started more processes or threads than it may",
    Cause.CPU: "it used more CPU time than it may",
    Cause.DISK: "it wrote more to the disk than it may",
    Cause.OUTPUT: "it printed more than it may",
    Cause.CRASHED: "its process crashed or ended itself",
    Cause.DESCRIPTORS: "it held more pipes or epoll instances than it may",
    Cause.HONEYTOKEN: "it used a planted credential, and the sandbox is frozen",
}

_QUARANTINED = (
    "These new names work in the sandbox, but a program of the user's computer would obey them. So"
    " they are kept outside of the user's directory until the user restores them:"
)


# -- run_code --------------------------------------------------------------------------------------


async def _run_code(call: ToolCallRequest, arguments: Arguments) -> ToolResult:
    code, language = arguments["code"], arguments.get("language", "python")
    if language == "python":
        live = call.sandbox.start_run(code)
    else:
        live = call.sandbox.start_script(code, language)
    run = await _followed(call, live, language)
    lines, images, files = await kept(call, figures(run.outputs))
    return ToolResult(
        describe_run(run, lines),
        is_error=not run.ok,
        images=images,
        outputs=shown_outputs(run.outputs, files),
    )


def _effect_of_code(arguments: Arguments) -> Effect:
    return "code" if arguments.get("language", "python") == "python" else "command"


def _define_run_code(around: Surroundings) -> ToolDefinition | None:
    names = around.run_languages
    if not names:
        return None
    has_python, has_scripts = "python" in names, names != ["python"]
    sentences = [
        f"Run code {_where(around)}.",
        *([_PYTHON] * has_python),
        *([f"{'Other languages run' if has_python else 'It runs'} {_SCRIPTS}"] * has_scripts),
        f"The working directory is {around.shown_directory}.",
    ]
    language: dict[str, Any] = {"type": "string", "enum": names}
    return ToolDefinition(
        name="run_code",
        description=" ".join(sentences),
        parameters={
            "type": "object",
            "properties": {
                "code": {"type": "string", "description": "The code."},
                "language": language | ({"default": "python"} if has_python else {}),
            },
            "required": ["code", *([] if has_python else ["language"])],
            "additionalProperties": False,
        },
    )


_PYTHON = (
    "Python runs in one notebook kernel: variables, imports and functions stay for the next call,"
    " the value of the last expression is the result, and figures that are shown come back as"
    " images."
)
_SCRIPTS = "as a script each time, and keep nothing but files."


def _where(around: Surroundings) -> str:
    return "on the computer of the user" if around.place == "host" else "in the sandbox"


RUN_CODE = define_builtin(_define_run_code, _run_code, _effect_of_code)


# -- execute_command -------------------------------------------------------------------------------


async def _execute_command(call: ToolCallRequest, arguments: Arguments) -> ToolResult:
    live = call.sandbox.start_shell(
        arguments["command"], timeout=arguments.get("timeout"), cwd=arguments.get("cwd")
    )
    run = await _followed(call, live, "shell")
    return ToolResult(describe_run(run), is_error=not run.ok)


def _define_execute_command(around: Surroundings) -> ToolDefinition | None:
    if "shell" not in around.capabilities:
        return None
    return ToolDefinition(
        name="execute_command",
        description=(
            f"Run a bash command {_where(around)}, and get its output and exit code. Each command"
            " is a shell of its own: directory and variables do not stay, files do. It has no"
            " terminal and no input, so use options that ask for none."
        ),
        parameters={
            "type": "object",
            "properties": {
                "command": {"type": "string", "minLength": 1, "description": "For bash -c."},
                "cwd": {
                    "type": "string",
                    "description": f"Its directory; {around.shown_directory} where none is given.",
                },
                "timeout": {
                    "type": "number",
                    "exclusiveMinimum": 0,
                    "description": "Seconds after which it is stopped.",
                },
            },
            "required": ["command"],
            "additionalProperties": False,
        },
    )


EXECUTE_COMMAND = define_builtin(
    _define_execute_command, _execute_command, lambda _arguments: "command"
)


async def _followed(call: ToolCallRequest, live: ToolRun, kind: str) -> Run:
    """Follow a run. The user sees the names of quarantined items, as the model does."""
    run = await followed(call.sandbox, live, call.emit, kind=kind)
    if call.is_dropped:
        return dataclasses.replace(run, quarantined=())
    if notice := quarantine_notice(run.quarantined):
        call.emit("stderr", f"\n{notice}" if run.text and run.text[-1] != "\n" else notice)
    return run


def unheard(stream: str, text: str) -> None:
    """Discard the output: an `emit` for a caller that shows nothing."""


async def followed(
    sandbox: ToolSandbox, live: ToolRun, emit: Emit = unheard, *, kind: str | None = None
) -> Run:
    """Return the result of a run and emit its output meanwhile. If an exception ends this before
    the run, for example a cancellation, interrupt the run. Record the span of a run in a project;
    sessions record theirs themselves."""
    started_at, status = time.monotonic(), Status.INTERRUPTED.value
    try:
        async with aclosing(live.events()) as events:
            async for event in events:
                match event:
                    case Stdout(text):
                        emit("stdout", text)
                    case Stderr(text):
                        emit("stderr", text)
                    case RunEnd(run):
                        status = run.status.value
                        return run
    except BaseException:
        with suppress(SbxError):  # raise the original error, not this one
            await run_to_completion(sandbox.give_up(live))
        raise
    finally:
        if in_project(sandbox):
            spans.record("sbx.run", time.monotonic() - started_at, kind=kind, status=status)
    raise Broken("a run ended without its result", code="run_lost", hint="run it again")


# -- the result in words ---------------------------------------------------------------------------


def describe_run(run: Run, figure_lines: Sequence[str] = ()) -> str:
    """Return the output, the displays and the outcome of a run as text. The outcome is last, where
    shortening the text keeps it."""
    parts = [
        ("stdout", _as_on_terminal(run.stdout)),
        ("stderr", _as_on_terminal(run.stderr)),
        ("shown", "\n".join(_shown(run))),
        ("result", strip_escapes(run.result or "")),
        ("figures", "\n".join(figure_lines)),
        ("error", run.error.traceback if run.error is not None else ""),
    ]
    sections = [f"[{name}]\n{text.rstrip()}" for name, text in parts if text.strip()]
    ending = " ".join(_ending(run))
    if not sections and run.ok:
        sections = ["(no output)"]
    return "\n\n".join([*sections, *([ending] if ending else [])])


def _as_on_terminal(text: str) -> str:
    """Return the text as a terminal finally shows it: a progress bar overwrites its line."""
    lines = (line.rstrip("\r").rpartition("\r")[2] for line in strip_escapes(text).split("\n"))
    return "\n".join(lines)


def _shown(run: Run) -> Iterator[str]:
    """Yield the texts of displays, without the bundle of the result."""
    same = (
        output for output in reversed(run.outputs) if text_of(output, "text/plain") == run.result
    )
    results = next(same, None)
    for bundle in (output for output in run.outputs if output is not results):
        text = text_of(bundle, "text/markdown") or text_of(bundle, "text/plain")
        is_figure = any(kind.startswith("image/") for kind in bundle)
        if text is not None and not is_figure:
            yield strip_escapes(text)


def _ending(run: Run) -> Iterator[str]:
    match run.status:
        case Status.INTERRUPTED:
            yield "The run was interrupted before its end."
        case Status.TIMEOUT:
            yield "The run took longer than its time-out, and was stopped."
        case Status.KILLED:
            yield f"The run was killed: {_why_killed(run)}."
        case Status.ERROR if run.error is not None and not run.error.traceback.strip():
            yield f"{run.error.name}: {strip_escapes(run.error.value)}"
    if run.cause is Cause.PIDS and run.status is not Status.KILLED:
        yield "It was refused a further process or thread: there is a limit."
    if run.exit_code is not None:
        yield f"Exit code: {run.exit_code}{_signal(run.exit_code)}."
    if run.truncated:
        yield "There was more output than may be kept; the rest is lost."
    if run.state_lost:
        yield "The variables and imports of earlier runs are lost: run again what you need of them."
    if notice := quarantine_notice(run.quarantined):
        yield f"\n\n{_QUARANTINED}\n{notice}"


def _why_killed(run: Run) -> str:
    """Return the message of the sandbox, which names the limit, or a general one."""
    if run.error is not None and not run.error.traceback.strip():
        return strip_escapes(run.error.value).rstrip(".")
    return _CAUSES.get(run.cause, "a limit was reached") if run.cause else "a limit was reached"


def _signal(exit_code: int) -> str:
    try:
        return f" (ended by {signal.Signals(exit_code - 128).name})" if exit_code > 128 else ""
    except ValueError:
        return ""
