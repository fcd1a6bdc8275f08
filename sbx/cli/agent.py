"""`sbx agent`: give an agent one task, in a new sandbox; list, show and check profiles."""

import sys
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from sbx.cli import agent_options, exits, narrowing, output
from sbx.cli.connect import Json, ask
from sbx.cli.run import check_names
from sbx.cli.terminal import STDOUT, write
from sbx.errors import BadRequest

if TYPE_CHECKING:
    from sbx.cli.agent_output import AgentLinePrinter, AgentPrinter
    from sbx.cli.agent_task import AgentHost, AgentTask
    from sbx.protocol.agent import AgentEvent, Reason

_TASK_MAX = 1 << 20
_PACK_THEM = "the agent can pack them into an archive; inspect it before you unpack it"


class _TaskOrCommand(TyperGroup):
    """`sbx agent TASK` is `sbx agent run TASK`."""

    default = "run"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        first = args[0] if args else ""
        is_task = first not in self.commands and first not in ctx.help_option_names
        return super().parse_args(ctx, [self.default, *args] if is_task else args)


app = typer.Typer(
    cls=_TaskOrCommand,
    help="Give an agent one task. `sbx agent TASK` is `sbx agent run TASK`; `sbx agent run --help` "
    "has its options. The other commands are about profiles of agents.",
    rich_markup_mode=None,
)


@app.command("run")
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
    profile: agent_options.Profile = None,
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
    completion_check: Annotated[
        str | None,
        typer.Option(
            "--check",
            help="A command in the sandbox. The task is done once it succeeds; after a failure the "
            "agent gets its output and continues.",
            metavar="COMMAND",
        ),
    ] = None,
    connect: agent_options.Connect = None,
    key: agent_options.Key = None,
    env_file: agent_options.EnvFile = None,
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
    Environment variables, or a file that --env-file names, select the model:
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
    from sbx.cli.agent_task import AgentTask, agent_host
    from sbx.cli.save_files import directory_for

    chosen = agent_options.profile_of(profile)
    settings = agent_options.settings(
        model=model,
        max_steps=max_steps,
        policy=policy,
        connect=connect,
        key=key,
        env_file=env_file,
        profile=chosen,
    )
    request = AgentTask(
        text=_text(task),
        files=tuple(file or ()),
        out=directory_for(out) if out is not None else None,
        max_steps=settings.max_steps,
        max_tokens=max_tokens or chosen.limits.max_tokens,
        max_seconds=max_seconds or chosen.limits.max_seconds,
        completion_check=completion_check,
    )
    check_names(request.files)
    printer = AgentLinePrinter() if as_json else AgentPrinter()
    host = agent_host(
        settings,
        agent_options.model_of(settings, replay, record, chosen.model.options),
        chosen,
        agent_options.agent_id_of(profile),
        narrowing.sandbox_options(memory=memory, cpus=cpus, network_allow=network_allow, env=env),
    )
    return exits.for_agent(asyncio.run(_do(request, host, printer, as_json=as_json)))


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


async def _do(
    task: "AgentTask",
    host: "AbstractAsyncContextManager[AgentHost]",
    printer: "AgentLinePrinter | AgentPrinter",
    *,
    as_json: bool,
) -> "Reason":
    """Run a task and return the reason of its end.

    Ctrl-C aborts a running agent. Raise the errors of creating a sandbox, StoppedBySignal for any
    other signal, and ReaderGone.
    """
    import asyncio

    from sbx.cli.agent_task import perform
    from sbx.cli.host_executables import report_left_out
    from sbx.cli.signals import CancelOnSignal

    async def show(event: "AgentEvent") -> None:
        # In a thread, so that a slow reader of stdout delays no deadline and no Ctrl-C.
        await asyncio.to_thread(printer.show, event)

    with CancelOnSignal() as ending:
        async with host as opened:
            end, saved, *_ = await perform(
                task, opened, show, lambda abort: setattr(ending, "on_interrupt", abort)
            )
    if saved is not None:
        for path in saved.paths:
            output.note(f"saved: {path}")
        if as_json:
            output.document(saved.to_json())
        report_left_out(saved.left_out, _PACK_THEM)
    return end.reason


# -- profiles -------------------------------------------------------------------------------------


@app.command("list")
def list_profiles(
    connect: agent_options.Connect = None,
    key: agent_options.Key = None,
    as_json: Json = False,
) -> None:
    """List the profiles in the directory of this user, or those of a service."""
    entries = _entries(connect, key)
    if as_json:
        output.document({"agents": entries})
        return
    rows = [
        (
            entry["agent_id"],
            "" if entry["version"] is None else str(entry["version"]),
            "file" if entry["is_file"] else "service",
            f"cannot be used: {entry['problem']['message']}"
            if entry["problem"]
            else entry["profile"]["description"],
        )
        for entry in entries
    ]
    heads = ("agent", "version", "source", "its purpose")
    output.print_table(heads, rows, empty="no agents have a profile")


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="The id of an agent.", metavar="AGENT")],
    connect: agent_options.Connect = None,
    key: agent_options.Key = None,
    as_json: Json = False,
) -> None:
    """Print the profile of an agent, as the text of a file."""
    from sbx.settings_files import to_toml

    for entry in _entries(connect, key):
        if entry["agent_id"] == name:
            if entry["problem"]:
                raise BadRequest(entry["problem"]["message"], code=entry["problem"]["code"])
            if as_json:
                output.document(entry)
                return
            write(STDOUT, to_toml(_without_none(entry["profile"])))
            return
    raise agent_options.no_profile(name)


@app.command()
def check(
    files: Annotated[list[Path], typer.Argument(help="Profiles of agents.", metavar="FILE…")],
    as_json: Json = False,
) -> int:
    """Check profiles. List every problem with its field."""
    from sbx.agent.profile import read_profile

    return agent_options.check_files(files, read_profile, as_json=as_json)


def _entries(connect: str | None, key: str | None) -> list[dict[str, Any]]:
    """Return the profiles in the form of the service's list."""
    if connect is not None:
        return ask(connect, key, lambda client: client.agents())
    from sbx.agent.profile import profile_files, read_profile

    directory = agent_options.profile_directory()
    entries: list[dict[str, Any]] = []
    for name in sorted(profile_files(directory)):
        entry: dict[str, Any] = {"agent_id": name, "version": None, "is_file": True}
        entry |= {"created_at": None, "profile": None, "problem": None}
        try:
            entry["profile"] = read_profile(directory / f"{name}.toml").model_dump(mode="json")
        except BadRequest as error:
            entry["problem"] = {"code": error.code, "message": error.message}
        entries.append(entry)
    return entries


def _without_none(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table without None, which TOML does not have, and without empty tables."""
    tables = {
        name: _without_none(value) if isinstance(value, Mapping) else value
        for name, value in table.items()
        if value is not None
    }
    return {name: value for name, value in tables.items() if value != {}}
