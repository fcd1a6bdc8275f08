"""./scripts/bench timeline: the steps of a cell and of the start of a kernel, in microseconds.

The functions at the borders of the steps note the time when they begin (`>`) and when they end
(`<`). Inside the walls the code of a cell puts the same notes into its own kernel. Both sides read
CLOCK_MONOTONIC, which is the same in every process of the host. A step is the time between two
notes; the table has the median of each step, so the sum differs a little from the whole.
"""

import ast
import asyncio
import functools
import inspect
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Annotated, Any

import typer
from rich import box as boxes
from rich.console import Console
from rich.table import Table

from bench import paths
from bench.samples import NotMeasured, percentile
from sbx import Policy, Runtime
from sbx.isolation.broker.client import BrokerClient
from sbx.isolation.broker.jail import Jail, ZygoteHandle
from sbx.kernels.channel import Channel
from sbx.kernels.kernel import Kernel
from sbx.runtime.sandbox_kernels import SandboxKernels

_WARM_UP = 20
_NARROWER = {"limits": {"tasks_max": 127}}  # so that no kernel is made ahead for the sandbox
_WIDTH = 140
Note = tuple[str, int]  # the name of a border, and nanoseconds

# Inside: note when the kernel reads, begins a cell and sends; `_notes` is read by the next cell.
_INSIDE = """
import functools, time
_notes, _kernel = [], get_ipython().kernel
def _noted(name, function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        _notes.append((name + ">", time.monotonic_ns()))
        try:
            return function(*args, **kwargs)
        finally:
            _notes.append((name + "<", time.monotonic_ns()))
    return call
_kernel._loop.add_reader(_kernel._sock.fileno(), _noted("read", _kernel._inbox.read))
_kernel._handlers["execute_request"] = _noted("execute", _kernel._handlers["execute_request"])
_kernel._writer.send = _noted("send", _kernel._writer.send)
"""
_CELL = '_notes.append(("code", time.monotonic_ns())); 1+1'
_READ = "_taken, _notes[:] = list(_notes), []; _taken"


@dataclass(frozen=True, slots=True)
class Step:
    """What happens until the border `until`. `side`: host, jail, or both."""

    until: str
    side: str
    text: str


CELL = (
    Step("post>", "host", "check the code, create the run, lock the context"),
    Step("read>", "both", "encode the frame, send(2); Linux wakes the kernel of the sandbox"),
    Step("read<", "jail", "recv(2), decode the frame"),
    Step("execute>", "jail", "switch to the task that answers requests"),
    Step("code", "jail", "IPython: transform, parse and compile the cell; hooks before it"),
    Step("send>", "jail", "run the code; display hook: the frame of the result"),
    Step("buffer_updated>", "both", "send(2) of both frames; Linux wakes the host; recv_into(2)"),
    Step("buffer_updated<", "host", "decode the frames, which are hostile"),
    Step("end", "host", "switch to the task of the caller; the events and the Run"),
)
_ORDER = (Step("_start_kernel>", "host", "check the policy, open the files of the conversation"),)
_REST = (
    Step("enter<", "both", "broker: cgroup, host uid, mounts of the workspace, in the jail"),
    Step("ready>", "host", "boot frames to PID 1 and to the kernel"),
    Step("inspect>", "jail", "PID 1 and the kernel: environment, Landlock, seccomp; `ready`"),
    Step("inspect<", "both", "broker: the facts of Linux for the receipt"),
    Step("ready<", "host", "the receipt, compared with the plan"),
    Step("end", "host", "mounts, watcher, the kernel of the conversation"),
)
POOL = (*_ORDER, Step("enter>", "host", "paths, plan of the walls; take an idle kernel"), *_REST)
FORK = (
    *_ORDER,
    Step("fork>", "host", "paths, plan of the walls; no kernel is idle"),
    Step("fork<", "both", "broker and zygote: new namespaces, PID 1, the kernel"),
    Step("enter>", "host", "take over the sockets; the plan as an order"),
    *_REST,
)


class _Notes:
    def __init__(self) -> None:
        self.taken = list[Note]()

    def note(self, name: str) -> None:
        self.taken.append((name, time.monotonic_ns()))

    @contextmanager
    def wrapped(self, *methods: tuple[type, str]) -> Iterator[None]:
        """Note the begin and the end of these methods."""
        originals = [(owner, name, inspect.getattr_static(owner, name)) for owner, name in methods]
        for owner, name, original in originals:
            setattr(owner, name, self._noted(name, original))
        try:
            yield
        finally:
            for owner, name, original in originals:
                setattr(owner, name, original)

    def _noted(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(method):

            @functools.wraps(method)
            async def waiting(*args: Any, **kwargs: Any) -> Any:
                self.note(f"{name}>")
                try:
                    return await method(*args, **kwargs)
                finally:
                    self.note(f"{name}<")

            return waiting

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.note(f"{name}>")
            try:
                return method(*args, **kwargs)
            finally:
                self.note(f"{name}<")

        return call


def durations(notes: Sequence[Note], steps: Sequence[Step]) -> list[float]:
    """Return the microseconds of each step. The first note is the start; each step ends at the
    first note of its name after the step before. Raise NotMeasured if one is missing."""
    ordered = sorted(notes, key=lambda note: note[1])
    at = ordered[0][1]
    found, rest = list[float](), iter(ordered)
    for step in steps:
        ended = next((when for name, when in rest if name == step.until), None)
        if ended is None:
            raise NotMeasured(f"{step.until} is not in {[name for name, _ in ordered]}")
        found.append((ended - at) / 1000)
        at = ended
    return found


@dataclass(frozen=True, slots=True)
class Timeline:
    """`samples` has a list of microseconds for each round, in the order of `steps`."""

    name: str
    steps: Sequence[Step]
    samples: Sequence[Sequence[float]]

    def rows(self) -> list[dict[str, Any]]:
        columns = zip(*self.samples, strict=True)
        return [
            {
                "name": self.name,
                "side": step.side,
                "step": step.text,
                "p50_us": round(median(values), 1),
                "p90_us": round(percentile(values, 90), 1),
            }
            for step, values in zip(self.steps, columns, strict=True)
        ]

    def whole_us(self) -> float:
        return round(median(sum(sample) for sample in self.samples), 1)


async def _cells(rounds: int, pause_s: float) -> Timeline:
    notes = _Notes()
    samples = []
    async with Runtime() as runtime, await runtime.create(paths.DATA_SCIENCE) as box:
        await box.run(_INSIDE)
        with notes.wrapped((Channel, "post"), (Channel, "buffer_updated")):
            for number in range(_WARM_UP + rounds):
                await box.run(_READ)  # drops the notes so far
                await paths.answers(box)
                await asyncio.sleep(pause_s)
                notes.taken = []
                notes.note("begin")
                run = await box.run(_CELL)
                notes.note("end")
                if run.result != "2":
                    raise NotMeasured(f"1+1 gave {run}")
                outside = list(notes.taken)
                inside = ast.literal_eval((await box.run(_READ)).result or "[]")
                if number >= _WARM_UP:
                    samples.append(durations([*outside, *_of_cell(inside)], CELL))
    return Timeline("cell", CELL, samples)


def _of_cell(inside: list[Note]) -> list[Note]:
    """Return the notes from the cell's read on: the end of the cell before is among them."""
    code = next(number for number, (name, _) in enumerate(inside) if name == "code")
    begin = max(number for number, (name, _) in enumerate(inside[:code]) if name == "read>")
    return inside[begin:]


async def _starts(name: str, policy: Policy, steps: Sequence[Step], rounds: int) -> Timeline:
    notes = _Notes()
    samples = []
    methods = (
        (SandboxKernels, "_start_kernel"),
        (ZygoteHandle, "fork"),
        (BrokerClient, "enter"),
        (Kernel, "ready"),
        (Jail, "inspect"),
    )
    async with Runtime() as runtime:
        await paths.zygote_started(runtime, policy)
        for number in range(3 + rounds):
            async with await runtime.create(policy, narrower=_NARROWER) as box:
                if name == "pool":
                    await runtime.warm(policy)
                with notes.wrapped(*methods):
                    notes.taken = []
                    notes.note("begin")
                    receipt = await box.start()
                    notes.note("end")
                paths.came_by(receipt, name)
                if number >= 3:
                    samples.append(durations(notes.taken, steps))
    return Timeline(f"start by {name}", steps, samples)


async def measure(rounds: int, pause_s: float) -> list[Timeline]:
    return [
        await _cells(rounds * 10, pause_s),
        await _starts("pool", paths.DATA_SCIENCE, POOL, rounds),
        await _starts("fork", paths.WITHOUT_POOL, FORK, rounds),
    ]


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Starts of kernels; ten cells each.")] = 40,
    pause: Annotated[float, typer.Option(help="Milliseconds between two cells.")] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
    markdown: Annotated[bool, typer.Option(help="Tables in Markdown.")] = False,
) -> None:
    """Show the steps of a cell, and of the start of a kernel by the pool and by a fork."""
    output = Console(width=_WIDTH)
    for timeline in asyncio.run(measure(rounds, pause / 1000)):
        if as_json:
            for row in timeline.rows():
                print(json.dumps(row), flush=True)
            continue
        table = Table("side", timeline.name, "µs, p50", "p90",
                      box=boxes.MARKDOWN if markdown else boxes.HEAVY_HEAD)  # fmt: skip
        for row in timeline.rows():
            table.add_row(row["side"], row["step"], f"{row['p50_us']:g}", f"{row['p90_us']:g}")
        table.add_row("", "the whole", f"{timeline.whole_us():g}", "")
        output.print(table)


if __name__ == "__main__":
    typer.run(main)
