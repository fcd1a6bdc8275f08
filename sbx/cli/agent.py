"""`sbx agent`: one task for an agent in a sandbox of its own."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from sbx.cli import agent_model, agent_sandbox, exits
from sbx.errors import BadRequest

_TASK_MAX = 1 << 20


def agent(
    task: Annotated[str, typer.Argument(help="What it is to do; - for stdin.", metavar="TASK")],
    file: Annotated[
        list[Path] | None,
        typer.Option(help="Upload a file, read-only for the agent. Repeatable.", metavar="FILE"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Save the files that it wrote there, at the end; not hidden ones, and none that a "
            "program of this host would obey.",
            metavar="DIR",
        ),
    ] = None,
    policy: agent_sandbox.Policy = None,
    model: agent_model.Name = None,
    max_steps: agent_model.MaxSteps = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens that it may spend, of input and output.", metavar="N"),
    ] = None,
    max_seconds: Annotated[
        float | None, typer.Option(help="How long it may take.", metavar="SECONDS")
    ] = None,
    connect: agent_sandbox.Connect = None,
    key: agent_sandbox.Key = None,
    replay: agent_model.Replay = None,
    record: agent_model.Record = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print each event as it comes, as a line of JSON.")
    ] = False,
) -> int:
    """Give an agent one task: it runs code in a sandbox, reads and writes files, and answers.

    The answer goes to stdout as it comes, and what its tools do to stderr. The sandbox is gone at
    the end. Ctrl-C aborts.

    \b
    The model is named by the environment, or by a file .env:
      MODEL_PROVIDER  openai (the default; whatever speaks chat completions) or anthropic
      MODEL_NAME      the model
      API_KEY         its key, which never reaches the sandbox
      BASE_URL        where it is, if not at the provider's own address

    \b
    exit codes:
      0    done
      1    it failed: the model's provider refused, or did not answer
      4    it took as many steps as it may (--max-steps)
      5    its budget was spent (--max-tokens, --max-seconds)
      130  aborted
    """
    import asyncio

    from sbx.cli.run import check_names
    from sbx.cli.saving import directory_for
    from sbx.cli.task import Task, do
    from sbx.cli.telling import Face, Lines, Telling

    asked = Task(
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
    check_names(asked.files)
    face: Face = Lines() if as_json else Telling()
    made = agent_model.made(asked.settings, replay, record)
    return exits.for_agent(asyncio.run(do(asked, made, face)))


def _text(task: str) -> str:
    """Raises BadRequest for no text, and for too much of it."""
    text = task
    if task == "-":
        data = sys.stdin.buffer.read(_TASK_MAX + 1)
        if len(data) > _TASK_MAX:
            raise BadRequest(
                f"the task is longer than {_TASK_MAX >> 20} MiB", hint="give data as --file"
            )
        text = data.decode(errors="replace")
    if not text.strip():
        raise BadRequest("there is no task", hint='sbx agent "…", or - for stdin')
    return text
