"""Following a run to its end, and giving it up when nobody wants it any more."""

from contextlib import aclosing, suppress
from typing import TYPE_CHECKING

from sbx.agent.sandbox import LiveRun
from sbx.agent.tools.tool import Emit
from sbx.errors import Broken, SbxError
from sbx.isolation.patience import to_the_end
from sbx.protocol.runs import Run, RunEnd, Stderr, Stdout

if TYPE_CHECKING:
    from sbx.agent.sandbox import Sandbox


def unheard(stream: str, text: str) -> None:
    """An `emit` for what nobody listens to."""


async def followed(sandbox: "Sandbox", live: LiveRun, emit: Emit = unheard) -> Run:
    """Its result; what it prints is told meanwhile. Whatever ends this before the run ends, a
    cancellation say, interrupts the run."""
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
        with suppress(SbxError):  # what ended the following is what is told
            await to_the_end(sandbox.give_up(live))
        raise
    raise Broken("a run ended without its result", code="run_lost", hint="run it again")
