"""Follow a run to its end, and interrupt it if the caller stops waiting."""

from contextlib import aclosing, suppress
from typing import TYPE_CHECKING

from sbx.agent.sandbox import ToolRun
from sbx.agent.tools.tool import Emit
from sbx.aio import run_to_completion
from sbx.errors import Broken, SbxError
from sbx.protocol.runs import Run, RunEnd, Stderr, Stdout

if TYPE_CHECKING:
    from sbx.agent.sandbox import ToolSandbox


def unheard(stream: str, text: str) -> None:
    """An `emit` that discards the output."""


async def followed(sandbox: "ToolSandbox", live: ToolRun, emit: Emit = unheard) -> Run:
    """Return the result of a run and emit its output meanwhile. If an exception ends this before
    the run, for example a cancellation, interrupt the run."""
    try:
        async with aclosing(live.events()) as events:
            async for event in events:
                match event:
                    case Stdout(text):
                        emit("stdout", text)
                    case Stderr(text):
                        emit("stderr", text)
                    case RunEnd(run):
                        return run
    except BaseException:
        with suppress(SbxError):  # raise the original error, not this one
            await run_to_completion(sandbox.give_up(live))
        raise
    raise Broken("a run ended without its result", code="run_lost", hint="run it again")
