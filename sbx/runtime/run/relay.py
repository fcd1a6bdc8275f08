"""A run whose output goes on to somebody as it comes, and is not kept.

It is counted as that of any run, and what comes beyond `output_max` ends it: a stream is cut there,
and nothing follows.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from sbx.kernels import frames
from sbx.protocol.runs import Run, RunError
from sbx.runtime.run.active_run import ActiveRun

_log = logging.getLogger(__name__)

Told = (
    frames.Stream
    | frames.DisplayData
    | frames.ExecuteResult
    | frames.ErrorFrame
    | frames.ClearOutput
    | frames.InputRequestFrame
    | frames.CommOpenFrame
    | frames.CommMsgFrame
)
Tell = Callable[[Told], Awaitable[None]]


class ForwardedRun(ActiveRun):
    """`reply` is the kernel's own last word; None where it had none. Of a cell's it holds `payload`
    and `expressions` decoded."""

    def __init__(self, run_id: str, output_max: int, tell: Tell) -> None:
        super().__init__(run_id, output_max)
        self.reply: frames.ReplyFrame | None = None
        self.payload: Sequence[Mapping[str, Any]] = ()
        self.expressions: Mapping[str, Mapping[str, Any]] = {}
        self.pass_on = self._pass_on
        self._tell_on = tell
        self._due: Told | None = None

    def add(self, frame: frames.Frame) -> None:
        if self.over:
            return
        self._room -= frame.cost
        self.over = self._room < 0 or isinstance(frame.content, frames.OutputLimit)
        said = frame.content
        if isinstance(said, frames.ErrorFrame):
            self._error = RunError(said.ename, said.evalue, "\n".join(said.traceback))
        if self.over and isinstance(said, frames.Stream):
            said = frames.Stream(said.name, self._in_room(said.text))
        elif self.over and not isinstance(said, frames.ErrorFrame):
            return
        if isinstance(said, Told):
            self._due = said

    def replied(self, reply: frames.ReplyFrame) -> None:
        super().replied(reply)
        match reply:
            case frames.ExecuteReply():
                payload, expressions = map(frames.loose, (reply.payload, reply.user_expressions))
                if not isinstance(payload, list) or not isinstance(expressions, dict):
                    raise frames.MalformedFrame("a reply whose payload or expressions are none")
                self.payload = [frames.as_object(one) for one in payload]
                self.expressions = {n: frames.as_object(one) for n, one in expressions.items()}
            case frames.CompleteReply(metadata=metadata):
                frames.as_object(frames.loose(metadata))
            case frames.InspectReply(data=data, metadata=metadata):
                frames.bundle(data)
                frames.as_object(frames.loose(metadata))
        self.reply = reply

    @property
    def fatal(self) -> RunError | None:
        """Why the kernel ended, where it did so in this run."""
        run = self._outcome
        return run.error if isinstance(run, Run) and run.state_lost else None

    async def _pass_on(self) -> None:
        due, self._due = self._due, None
        if due is not None and self.halted is None:
            await told(self._tell_on, due)


async def told(tell: Tell, content: Told) -> None:
    """Tell it to who listens, and wait as long as they take. Raises frames.Malformed, as they may
    for what is inside."""
    try:
        await tell(content)
    except frames.MalformedFrame:
        raise
    except Exception:  # noqa: BLE001  # the border to who listens: their bug ends no kernel
        _log.exception("what a kernel showed could not be passed on")
