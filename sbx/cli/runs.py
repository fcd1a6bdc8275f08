"""`sbx runs`: the runs of agents in a service, once or live, and a report on ended ones."""

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sbx.cli import connect, exits, output
from sbx.cli.terminal import one_line

if TYPE_CHECKING:
    from sbx.client import Client

app = typer.Typer(
    help="Show the active runs of agents, and report on ended ones.",
    rich_markup_mode=None,
    invoke_without_command=True,
)
_HEADS = ("conversation", "agent", "step", "now", "plan", "tokens", "cost", "began")
_WORDS = 60  # characters of the current call


@app.callback()
def runs(
    ctx: typer.Context,
    follow: connect.Follow = False,
    interval: Annotated[
        float,
        typer.Option(help="With --follow: the seconds between two updates.", min=0.1, max=3600),
    ] = 1.0,
    as_json: connect.JsonLines = False,
    socket: connect.Address = None,
    key: connect.Key = None,
) -> int:
    """Show the active runs of agents: step, current call, plan, tokens and cost."""
    if ctx.invoked_subcommand is not None:
        return exits.Exit.OK
    table = output.LiveTable(_HEADS)

    async def look(client: "Client") -> None:
        active = await client.active_runs()
        if as_json:
            output.document({"runs": active})
        elif active or follow:
            table.show([_row(run) for run in active])
        else:
            output.note("no agent is at work")

    connect.repeat(socket, key, look, interval if follow else None)
    return exits.Exit.OK


@app.command()
def report(
    days: Annotated[
        float | None, typer.Option(help="Only runs of the last days.", min=0.001, max=36_500)
    ] = None,
    agent: Annotated[
        str | None, typer.Option(help="Only runs of this agent.", metavar="AGENT")
    ] = None,
    as_json: connect.Json = False,
    socket: connect.Address = None,
    key: connect.Key = None,
) -> int:
    """Report on the last 10,000 runs that have ended.

    It shows the tools that they used, failed calls by their code, and the mean time and tokens of
    each step.
    """
    since = 0.0 if days is None else time.time() - days * 86_400
    body = connect.ask(socket, key, lambda client: client.run_report(since=since, agent_id=agent))
    if as_json:
        output.document(body)
    elif not body["runs"]:
        output.note("no run has ended in this time")
    else:
        _print(body)
    return exits.Exit.OK


def _row(run: Mapping[str, Any]) -> tuple[str, ...]:
    calls: Sequence[Mapping[str, Any]] = run["pending_calls"]
    waits = [call for call in calls if call["approval_required"]]
    call = next(iter(waits or calls), None)
    now = "the model answers" if call is None else str(call["tool_name"])
    if waits:
        now = f"{now} waits for an approval"
    plan = run["plan"]
    done = sum(step["state"] == "done" for step in plan)
    return (
        one_line(str(run["conversation_id"])),
        one_line(str(run["agent_id"])),
        f"{run['step']} of {run['max_steps']}",
        one_line(now)[:_WORDS],
        f"{done} of {len(plan)}" if plan else "",
        str(sum(run["usage"].values())),
        "" if run["cost"] is None else f"{run['cost']:.4f}",
        output.since(run["started_at"]),
    )


def _print(body: Mapping[str, Any]) -> None:
    usage = body["usage"]
    ends = ", ".join(f"{count} {one_line(reason)}" for reason, count in body["reasons"].items())
    totals = [
        ("runs", f"{body['runs']}: {ends}"),
        ("time", f"{body['seconds']:.1f} s"),
        ("tokens", f"{usage['input_tokens']} in, {usage['output_tokens']} out"),
    ]
    if body["cost"]:
        totals.append(("cost", f"{body['cost']:.4f}"))
    output.print_table(("all", ""), totals)
    if body["tools"]:
        rows = [
            (one_line(tool["name"]), str(tool["calls"]), str(tool["failed"]), _s(tool["seconds"]))
            for tool in body["tools"]
        ]
        output.print_table(("tool", "calls", "failed", "time"), rows)
    if body["failures"]:
        rows_of_codes = [(one_line(code), str(count)) for code, count in body["failures"].items()]
        output.print_table(("failure", "calls"), rows_of_codes)
    steps = [
        (
            str(step["step"]),
            str(step["runs"]),
            _s(step["seconds"]),
            str(step["input_tokens"]),
            str(step["output_tokens"]),
        )
        for step in body["steps"]
    ]
    if steps:
        output.print_table(("step", "runs", "mean time", "tokens in", "tokens out"), steps)


def _s(seconds: float) -> str:
    return f"{seconds:.2f} s"
