"""`sbx agent`: give an agent one task, in a new sandbox."""

import sys
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sbx.cli import agent_options, exits, narrowing, output
from sbx.cli.run import check_names
from sbx.errors import BadRequest

if TYPE_CHECKING:
    from sbx.agent.models import Model
    from sbx.agent.settings import AgentSettings
    from sbx.cli.agent_output import AgentLinePrinter, AgentPrinter
    from sbx.protocol.agent import AgentEvent, AgentRunEnd, Reason

_TASK_MAX = 1 << 20
_PACK_THEM = "the agent can pack them into an archive; inspect it before you unpack it"


def agent(
    task: Annotated[str, typer.Argument(help="The task; - for stdin.", metavar="TASK")],
    file: Annotated[
        list[Path] | None,
        typer.Option(help="Upload a file, read-only for the agent. Repeatable.", metavar="FILE"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="At the end, save the files that the agent wrote there. Hidden files, and files "
            "that a program of this host would obey, are left out.",
            metavar="DIR",
        ),
    ] = None,
    policy: agent_options.Policy = None,
    memory: narrowing.Memory = None,
    cpus: narrowing.Cpus = None,
    network_allow: narrowing.NetworkAllow = None,
    env: narrowing.Env = None,
    model: agent_options.ModelName = None,
    max_steps: agent_options.MaxSteps = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="The budget of tokens, input plus output.", metavar="N"),
    ] = None,
    max_seconds: Annotated[
        float | None, typer.Option(help="The time limit of the task.", metavar="SECONDS")
    ] = None,
    connect: agent_options.Connect = None,
    key: agent_options.Key = None,
    replay: agent_options.Replay = None,
    record: agent_options.Record = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print each event as it occurs, as a line of JSON.")
    ] = False,
) -> int:
    """Give an agent one task: it runs code in a sandbox, reads and writes files, and answers.

    The answer is streamed to stdout, and the activity of the tools to stderr. The sandbox is
    deleted at the end. Ctrl-C aborts.

    \b
    Environment variables, or a file .env, select the model:
      MODEL_PROVIDER  openai (the default; any server for chat completions) or anthropic
      MODEL_NAME      the model
      API_KEY         its key, which never reaches the sandbox
      BASE_URL        its address, if not the provider's default

    \b
    exit codes:
      0    done
      1    failed: the model's provider refused, or did not answer
      4    the agent reached the step limit (--max-steps)
      5    the agent used up its budget (--max-tokens, --max-seconds)
      130  aborted
    """
    import asyncio  # lazy imports keep `sbx --help` fast

    from sbx.cli.agent_output import AgentLinePrinter, AgentPrinter
    from sbx.cli.save_files import directory_for

    request = AgentTask(
        text=_text(task),
        files=tuple(file or ()),
        out=directory_for(out) if out is not None else None,
        settings=agent_options.settings(
            model=model, max_steps=max_steps, policy=policy, connect=connect, key=key
        ),
        max_tokens=max_tokens,
        max_seconds=max_seconds,
        as_json=as_json,
        sandbox=narrowing.sandbox_options(
            memory=memory, cpus=cpus, network_allow=network_allow, env=env
        ),
    )
    check_names(request.files)
    printer = AgentLinePrinter() if as_json else AgentPrinter()
    chat_model = agent_options.model_of(request.settings, replay, record)
    return exits.for_agent(asyncio.run(_do(request, chat_model, printer)))


def _text(task: str) -> str:
    """Return the text of the task. Raise BadRequest if it is empty or too long."""
    text = task
    if task == "-":
        data = sys.stdin.buffer.read(_TASK_MAX + 1)
        if len(data) > _TASK_MAX:
            raise BadRequest(
                f"the task is longer than {_TASK_MAX >> 20} MiB", hint="pass data with --file"
            )
        text = data.decode(errors="replace")
    if not text.strip():
        raise BadRequest("the task is empty", hint='sbx agent "…", or - for stdin')
    return text


@dataclass(frozen=True, slots=True)
class AgentTask:
    """The options of `sbx agent`."""

    text: str
    files: tuple[Path, ...]
    out: Path | None
    settings: "AgentSettings"
    max_tokens: int | None
    max_seconds: float | None
    as_json: bool = False
    sandbox: Mapping[str, Any] = field(default_factory=dict)


async def _do(
    task: AgentTask, model: "Model", printer: "AgentLinePrinter | AgentPrinter"
) -> "Reason":
    """Run a task and return the reason of its end.

    Ctrl-C aborts a running agent. Raise the errors of creating a sandbox, StoppedBySignal for any
    other signal, and ReaderGone.
    """
    from sbx.agent.agent import Agent, Budget
    from sbx.cli.agent_options import own_sandbox
    from sbx.cli.host_executables import report_left_out
    from sbx.cli.save_files import save_files
    from sbx.cli.signals import CancelOnSignal

    budget = Budget(tokens=task.max_tokens, seconds=task.max_seconds)
    with CancelOnSignal() as ending:
        try:
            async with own_sandbox(task.settings, task.sandbox) as sandbox:
                for path in task.files:
                    await sandbox.uploads.put(path)
                agent = Agent(sandbox, model, budget=budget)
                ending.on_interrupt = agent.abort
                events = agent.stream(task.text, max_steps=task.settings.max_steps)
                end = await _show(events, printer)
                ending.on_interrupt = None
                if task.out is not None:
                    saved = await save_files(sandbox, task.out)
                    for path in saved.paths:
                        output.note(f"saved: {path}")
                    if task.as_json:
                        output.document(saved.to_json())
                    report_left_out(saved.left_out, _PACK_THEM)
        finally:
            await model.close()
    return end.reason


async def _show(
    events: "AsyncGenerator[AgentEvent, None]", printer: "AgentLinePrinter | AgentPrinter"
) -> "AgentRunEnd":
    """Show all events of a run and return the last one.

    Print in a thread, so that a slow reader of stdout delays no deadline and no Ctrl-C.
    """
    import asyncio
    from contextlib import aclosing

    from sbx.protocol.agent import AgentRunEnd

    async with aclosing(events):
        async for event in events:
            await asyncio.to_thread(printer.show, event)
            if isinstance(event, AgentRunEnd):
                return event
    raise AssertionError  # a run ends with its RunEnd
