"""`sbx stats`: what sandboxes use, once or live."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sbx.cli import exits, reach, report
from sbx.cli.terminal import STDERR, STDOUT, one_line, write
from sbx.errors import SbxError
from sbx.protocol.usage import INTERVAL_MAX_S, INTERVAL_MIN_S, Usage, usage_to_json

if TYPE_CHECKING:
    from sbx.client import Client

_PAGE = 200
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_HEADS = ("sandbox", "kernels", "cpu", "cpu time", "memory", "peak", "pids", "disk", "net in/out")


def stats(
    ids: Annotated[
        list[str] | None,
        typer.Argument(help="Sandboxes, as in sbx ps; without any, those with a kernel."),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C; a table that stays.")
    ] = False,
    interval: Annotated[
        float,
        typer.Option(
            help="With --follow: seconds between two looks.",
            min=INTERVAL_MIN_S,
            max=INTERVAL_MAX_S,
        ),
    ] = 1.0,
    conversation: reach.Conversation = "default",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print each look as one line of JSON.")
    ] = False,
    socket: reach.Socket = None,
    key: reach.Key = None,
) -> int:
    """What sandboxes use: CPU, memory, processes, disk, network.

    The disk is that of one conversation. Numbers are of a cgroup; where this host gives none they
    are counted by the processes that live, best effort, and marked with ~.
    """
    import asyncio  # not for `sbx --help`

    table = _Table()

    async def look(client: "Client") -> None:
        while True:
            chosen = ids or await _live(client)
            found, failed = await _usages(client, chosen, conversation)
            if as_json:
                told = [{"id": name, **usage_to_json(one)} for name, one in found]
                wrong = [{"id": name, "error": error.to_dict()} for name, error in failed]
                report.document({"sandboxes": told, "failed": wrong})
            else:
                table.show(found, failed)
            if not follow:
                if failed:
                    raise failed[0][1]
                return
            await asyncio.sleep(interval)

    reach.ask(socket, key, look)
    return exits.Exit.OK


async def _live(client: "Client") -> list[str]:
    params = {"limit": _PAGE, "status": "ready"}
    told = await client.request("GET", "/v1/sandboxes", params=params)
    return [box["id"] for box in told["items"]]


async def _usages(
    client: "Client", ids: Sequence[str], conversation: str
) -> tuple[list[tuple[str, Usage]], list[tuple[str, SbxError]]]:
    found: list[tuple[str, Usage]] = []
    failed: list[tuple[str, SbxError]] = []
    for name in dict.fromkeys(ids):
        try:
            found.append((name, await client.sandbox(name).conversation(conversation).usage()))
        except SbxError as error:
            if error.code == "service_unreachable":
                raise
            failed.append((name, error))
    return found, failed


class _Table:
    """Shown again in its place where that is a terminal, and below the last one elsewhere."""

    def __init__(self) -> None:
        self._lines = 0
        self._before: dict[str, Usage] = {}
        self._terminal = os.isatty(STDOUT) and os.environ.get("TERM") != "dumb"

    def show(
        self, found: Sequence[tuple[str, Usage]], failed: Sequence[tuple[str, SbxError]]
    ) -> None:
        from sbx.cli.tables import print_table

        if self._terminal and self._lines:
            write(STDOUT, f"\x1b[{self._lines}A\x1b[J")
        print_table(_HEADS, [self._row(name, usage) for name, usage in found])
        self._lines = len(found) + 2
        self._before = dict(found)
        for name, error in failed:
            write(STDERR, f"{one_line(name)}: {one_line(error.message)}\n")

    def _row(self, name: str, usage: Usage) -> tuple[str, ...]:
        mark = "~" if usage.source == "proc" else ""
        return (
            name,
            str(usage.kernels),
            self._share(name, usage),
            "-" if usage.cpu_s is None else f"{mark}{usage.cpu_s:.1f} s",
            f"{mark}{_size(usage.memory)} / {_size(usage.memory_max)}",
            f"{mark}{_size(usage.memory_peak)}",
            f"{'-' if usage.pids is None else usage.pids} / {usage.pids_max}",
            f"{'' if usage.disk_complete else '>'}{_size(usage.disk)} / {_size(usage.disk_max)}",
            f"{_size(usage.network_received)} / {_size(usage.network_sent)}",
        )

    def _share(self, name: str, usage: Usage) -> str:
        """Of one CPU, since the last look."""
        before: Any = self._before.get(name)
        if before is None or before.cpu_s is None or usage.cpu_s is None:
            return "-"
        passed_s = usage.at - before.at
        return f"{max(0.0, usage.cpu_s - before.cpu_s) / passed_s:.0%}" if passed_s > 0 else "-"


def _size(told: int | None) -> str:
    if told is None:
        return "-"
    size, unit = float(told), _UNITS[0]
    for unit in _UNITS:
        if size < 1024 or unit == _UNITS[-1]:
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
