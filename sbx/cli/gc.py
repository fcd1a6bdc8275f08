"""`sbx gc`: collect garbage in a running service."""

from enum import StrEnum
from typing import Annotated

import typer

from sbx.cli import connect, exits, output


class GcTask(StrEnum):
    IDLE = "idle_session"
    EXPIRED = "expired_sandbox"
    WORKSPACE = "orphan_workspace"
    CONTAINER = "orphan_container"


_BAY = {GcTask.WORKSPACE: "orphan_cargo"}  # in the request and the reply, which are those of Bay
_OWN = {name: task.value for task, name in _BAY.items()}


def gc(
    task: Annotated[
        list[GcTask] | None, typer.Option(help="Report only this task; all tasks run. Repeatable.")
    ] = None,
    as_json: connect.Json = False,
    socket: connect.Address = None,
    key: connect.Key = None,
) -> int:
    """Collect idle, expired and orphaned resources now. The service also does so periodically."""
    request = {"tasks": [_BAY.get(each, each) for each in task]} if task else {}
    summary = connect.ask(
        socket, key, lambda client: client.request("POST", "/v1/admin/gc/run", json=request)
    )
    if as_json:
        output.document(summary)
    else:
        rows = []
        for result in summary["results"]:
            name = _OWN.get(result["task_name"], result["task_name"])
            rows.append((name, str(result["cleaned_count"]), str(result["skipped_count"])))
            for error in result["errors"]:
                output.failure(f"{name}: {error}")
        output.print_table(("task", "collected", "left"), rows)
    return exits.Exit.FAILED if summary["total_errors"] else exits.Exit.OK
