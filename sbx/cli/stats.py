"""`sbx stats`: the resource usage of sandboxes, once or live."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sbx.cli import connect, exits, output
from sbx.cli.output import size
from sbx.cli.terminal import STDERR, one_line, write
from sbx.errors import SbxError
from sbx.protocol.usage import INTERVAL_MAX_S, INTERVAL_MIN_S, SandboxUsage, usage_to_json

if TYPE_CHECKING:
    from sbx.client import Client

_PAGE = 200
_HEADS = ("sandbox", "kernels", "cpu", "cpu time", "memory", "peak", "pids", "disk", "net in/out")


def stats(
    ids: Annotated[
        list[str] | None,
        typer.Argument(help="The ids of sandboxes, from sbx ps; default: all with a live kernel."),
    ] = None,
    follow: connect.Follow = False,
    interval: Annotated[
        float,
        typer.Option(
            help="With --follow: the seconds between two updates.",
            min=INTERVAL_MIN_S,
            max=INTERVAL_MAX_S,
        ),
    ] = 1.0,
    conversation: connect.Conversation = "default",
    as_json: connect.JsonLines = False,
    socket: connect.Address = None,
    key: connect.Key = None,
) -> int:
    """Show the usage of sandboxes: CPU, memory, processes, disk, network.

    The disk usage is that of one conversation. The numbers come from a cgroup. If this host allows
    none, they are estimated from the live processes and marked with ~.
    """
    table = _Table()

    async def look(client: "Client") -> None:
        chosen = ids or await _live(client)
        usages, failed = await _usages(client, chosen, conversation)
        if as_json:
            documents = [{"id": name, **usage_to_json(usage)} for name, usage in usages]
            errors = [{"id": name, "error": error.to_dict()} for name, error in failed]
            output.document({"sandboxes": documents, "failed": errors})
        else:
            table.show(usages, failed)
        if failed and not follow:
            raise failed[0][1]

    connect.repeat(socket, key, look, interval if follow else None)
    return exits.Exit.OK


async def _live(client: "Client") -> list[str]:
    params = {"limit": _PAGE, "status": "ready"}
    page = await client.request("GET", "/v1/sandboxes", params=params)
    return [box["id"] for box in page["items"]]


async def _usages(
    client: "Client", ids: Sequence[str], conversation: str
) -> tuple[list[tuple[str, SandboxUsage]], list[tuple[str, SbxError]]]:
    usages: list[tuple[str, SandboxUsage]] = []
    failed: list[tuple[str, SbxError]] = []
    for name in dict.fromkeys(ids):
        try:
            usages.append((name, await client.sandbox(name).conversation(conversation).usage()))
        except SbxError as error:
            if error.code == "service_unreachable":
                raise
            failed.append((name, error))
    return usages, failed


class _Table:
    """The table of usages."""

    def __init__(self) -> None:
        self._table = output.LiveTable(_HEADS)
        self._before: dict[str, SandboxUsage] = {}

    def show(
        self, usages: Sequence[tuple[str, SandboxUsage]], failed: Sequence[tuple[str, SbxError]]
    ) -> None:
        self._table.show([self._row(name, usage) for name, usage in usages])
        self._before = dict(usages)
        for name, error in failed:
            write(STDERR, f"{one_line(name)}: {one_line(error.message)}\n")

    def _row(self, name: str, usage: SandboxUsage) -> tuple[str, ...]:
        mark = "~" if usage.source == "proc" else ""
        return (
            name,
            str(usage.kernels),
            self._share(name, usage),
            "-" if usage.cpu_s is None else f"{mark}{usage.cpu_s:.1f} s",
            f"{mark}{size(usage.memory)} / {size(usage.memory_max)}",
            f"{mark}{size(usage.memory_peak)}",
            f"{'-' if usage.pids is None else usage.pids} / {usage.pids_max}",
            f"{'' if usage.disk_complete else '>'}{size(usage.disk)} / {size(usage.disk_max)}",
            f"{size(usage.network_received)} / {size(usage.network_sent)}",
        )

    def _share(self, name: str, usage: SandboxUsage) -> str:
        """Return the share of one CPU since the last update."""
        before: Any = self._before.get(name)
        if before is None or before.cpu_s is None or usage.cpu_s is None:
            return "-"
        elapsed_s = usage.at - before.at
        return f"{max(0.0, usage.cpu_s - before.cpu_s) / elapsed_s:.0%}" if elapsed_s > 0 else "-"
