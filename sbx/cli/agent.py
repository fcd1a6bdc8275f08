"""`sbx agent`: give an agent one task, in a new sandbox."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from sbx.cli import agent_model, agent_sandbox, exits
from sbx.errors import BadRequest

_TASK_MAX = 1 << 20


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
    policy: agent_sandbox.Policy = None,
    model: agent_model.Name = None,
    max_steps: agent_model.MaxSteps = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="The budget of tokens, input plus output.", metavar="N"),
    ] = None,
    max_seconds: Annotated[
        float | None, typer.Option(help="The time limit of the task.", metavar="SECONDS")
    ] = None,
    connect: agent_sandbox.Connect = None,
    key: agent_sandbox.Key = None,
    replay: agent_model.Replay = None,
    record: agent_model.Record = None,
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
    import asyncio

    from sbx.cli.agent_output import AgentLinePrinter, AgentPrinter, AgentPrinterMode
    from sbx.cli.run import check_names
    from sbx.cli.save_files import directory_for
    from sbx.cli.task import AgentTask, do

    request = AgentTask(
        text=_text(task),
        files=tuple(file or ()),
        out=directory_for(out) if out is not None else None,
        settings=agent_model.settings(
            model=model, max_steps=max_steps, policy=policy, connect=connect, key=key
        ),
        max_tokens=max_tokens,
        max_seconds=max_seconds,
        as_json=as_json,
    )
    check_names(request.files)
    face: AgentPrinterMode = AgentLinePrinter() if as_json else AgentPrinter()
    chat_model = agent_model.made(request.settings, replay, record)
    return exits.for_agent(asyncio.run(do(request, chat_model, face)))


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
