"""A run from its start to its end: its events for all followers, and its result.

A run does not depend on its followers. They read the recorded events, from the first one on. The
policy's `output_max` limits the recorded output.
"""

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from sys import getsizeof
from typing import Any

from msgspec import Struct, field

from sbx.event_log import EventLog
from sbx.kernels import frames
from sbx.protocol.bundles import text_of
from sbx.protocol.runs import (
    Cause,
    Clear,
    Display,
    Error,
    Event,
    InputRequest,
    MimeBundle,
    Quarantined,
    Result,
    Run,
    RunEnd,
    RunError,
    RunStart,
    Status,
    Stderr,
    Stdout,
)
from sbx.runtime.run.stdin import Stdin, write_stdin

_LONG = 256 << 10  # bytes of output
_PIECE, _TAIL = 64 << 10, 8 << 10  # characters
_OVERWRITTEN = re.compile(r"^.*\r(?=[^\r\n])", re.MULTILINE)
_EVENT_SIZE, _PART_SIZE = 200, 200  # bytes, about, without text; a part is that of a bundle
_NO_ROOM = RunError(
    "OutputLimit",
    "the runs of this service hold too much output together, and this one most",
    "",
)


class _Shown(Struct):
    """Text of a stream, or a bundle, on the screen. `is_final`: the text is as a terminal shows
    it."""

    texts: list[str] = field(default_factory=list)
    is_final: bool = False
    bundle: MimeBundle | None = None
    display_id: str | None = None
    at: int = 0


class SharedRoom(Struct):
    """The limit in bytes for the events of all active runs of a service, because the memory is not
    enough for all of them at `output_max`. Beyond it, each run may still use `share` bytes."""

    limit: int
    share: int
    used: int = 0


class ActiveRun:
    """Collects the frames of one run.

    `over`: the output exceeds `output_max` bytes, or the `shared` room. `begun`: the run no longer
    waits; `on_begun` is called then. `questions` counts the requests for input. `halted` is the
    reason of a caller that ends the run.
    """

    def __init__(self, run_id: str, output_max: int) -> None:
        self.run_id = run_id
        self.over = False
        self.begun = False
        self.questions = 0
        self.halted: RunError | None = None
        self.on_begun: Callable[[], None] | None = None
        self.stdin: Stdin | None = None
        self.shared: SharedRoom | None = None
        self.pass_on: Callable[[], Awaitable[None]] | None = None  # awaited after each `add`
        self.quarantined: Callable[[], tuple[Quarantined, ...]] = tuple
        self._taken = 0
        self._crowded = False
        self._cut = False
        self._room = output_max
        self._received = 0
        self.log: EventLog[Event] = EventLog()
        self.log.append(RunStart(run_id))
        self._screen: list[_Shown] = []
        self._updates: dict[str, tuple[int, MimeBundle]] = {}  # the last of each, and when
        self._clear_pending = False
        self._printed: dict[str, list[str]] = {"stdout": [], "stderr": []}
        self._result: str | None = None
        self._error: RunError | None = None
        self._execution_count: int | None = None
        self._started = time.monotonic()
        self._outcome: Run | BaseException | None = None

    async def result(self) -> Run:
        """Wait for the end of the run. Raise the reason if it could not be started."""
        if self._outcome is None:
            await self.log.wait_closed()
        return self._result_or_error()

    async def ended(self) -> None:
        """Wait for the end of the run, without its result."""
        await self.log.wait_closed()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run began, without its wait for a kernel."""
        return time.monotonic() - self._started

    @property
    def done(self) -> bool:
        return self._outcome is not None

    async def events(self) -> AsyncGenerator[Event, None]:
        """Yield all events up to the RunEnd."""
        number = 0
        while (entry := await self.log.next(number)) is not None:
            number, event = entry
            yield event

    def add(self, frame: frames.Frame) -> None:
        """Record a frame. Raise frames.MalformedFrame for an invalid bundle."""
        if self.over:
            return
        self._room -= frame.cost  # the whole frame, so that empty ones count too
        event = self._event(frame.content)
        parts = 0
        if event is not None:
            self.log.append(event)
            if isinstance(event, Display | Result):
                parts = len(event.data) + len(event.metadata)
        size = frame.size + _PART_SIZE * parts
        self._received += size
        self._take(size + _EVENT_SIZE)
        self.over = self._room < 0 or isinstance(frame.content, frames.OutputLimit) or self._crowded

    async def write(self, text: str | None) -> None:
        """Write to the standard input of a command that was started with it open; None closes it.
        Raise Conflict `stdin_closed` and `stdin_full`, BadRequest, TooLarge."""
        await write_stdin(None if self.done else self.stdin, self.run_id, text)

    def note(self, text: str, applies: Callable[[str], bool]) -> None:
        """Add a note of sbx to the standard error if it applies to the end of the output."""
        ends = ["".join(texts[-32:])[-_TAIL:] for texts in self._printed.values()]
        if applies("\n".join([*ends, self._error.value[-_TAIL:] if self._error else ""])):
            self.log.append(self._printed_text("stderr", text))

    @property
    def is_long(self) -> bool:
        """Whether `render` should precede `finish`."""
        return self._received > _LONG

    async def render(self) -> None:
        """Join long output in a thread, before `finish` needs it: carriage returns in 15 MiB took
        2.5 s of the event loop."""
        if self.is_long and not self.done:
            await asyncio.to_thread(self._render, list(self._screen), list(self._printed.values()))

    def _render(self, screen: list[_Shown], printed: list[list[str]]) -> None:
        for texts in printed:
            texts[:] = ["".join(texts)]
        for shown in screen:
            shown.texts = [apply_carriage_returns("".join(shown.texts))]
            shown.is_final = True

    def give_room_back(self) -> None:
        """Release its part of the shared room."""
        if self.shared is not None:
            self.shared.used -= self._taken
            self.shared = None

    def finish(
        self,
        status: Status,
        *,
        cause: Cause | None = None,
        exit_code: int | None = None,
        state_lost: bool = False,
        error: RunError | None = None,
    ) -> Run:
        """Make the result, and append it as the last event.

        `error` is the reason if sbx ended the run; it keeps the traceback of the code. A run has
        one end: if it has ended already, return or raise its first outcome.
        """
        if self._outcome is not None:
            return self._result_or_error()
        if self._crowded and cause is Cause.OUTPUT:
            error = _NO_ROOM
        if error is not None and self._error is not None:
            error = replace(error, traceback_ansi=self._error.traceback_ansi)
        if self._updates:
            self._apply_updates()
        shown = [part.bundle for part in self._screen if part.bundle is not None]
        run = Run(
            run_id=self.run_id,
            status=status,
            cause=cause,
            stdout="".join(self._printed["stdout"]),
            stderr="".join(self._printed["stderr"]),
            text=_as_text(self._screen),
            result=self._result,
            outputs=tuple(shown),
            error=error or self._error,
            exit_code=exit_code,
            execution_count=self._execution_count,
            duration_s=self.elapsed_s,
            state_lost=state_lost,
            truncated=self.over or self._cut,
            quarantined=self.quarantined(),
        )
        self._screen.clear()  # the run may be kept for a while
        self._updates.clear()
        self._printed.clear()
        self.log.append(RunEnd(run))
        self._end(run)
        return run

    def _result_or_error(self) -> Run:
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        assert self._outcome is not None
        return self._outcome

    def fail(self, error: BaseException) -> None:
        """End a run that could not be started. Waiting callers get the error."""
        if not self.done:
            self._end(error)

    def replied(self, reply: frames.ReplyFrame) -> None:
        """Record the last frame. Raise frames.MalformedFrame for invalid content."""
        if isinstance(reply, frames.ExecuteReply):
            self._execution_count = reply.execution_count
        elif not isinstance(reply, frames.ProgramReply):
            return
        if reply.status == "error" and self._error is None and reply.ename:
            self._error = _error(reply)

    def restart_clock(self) -> None:
        """Count the time from now: the run waited in its queue, or for a kernel."""
        self._started = time.monotonic()
        self.begun = True
        on_begun, self.on_begun = self.on_begun, None
        if on_begun is not None:
            on_begun()

    @property
    def size(self) -> int:
        """Return about how many bytes the events and the result of an ended run take up."""
        run = self._outcome
        size = _EVENT_SIZE * self.log.last + 2 * self._received  # once as read, once as shown
        if isinstance(run, Run):
            size += getsizeof(run.stdout) + getsizeof(run.stderr) + getsizeof(run.text)
        return size

    def _take(self, size: int) -> None:
        if self.shared is not None:
            self._taken += size
            self.shared.used += size
            too_much = self.shared.used > self.shared.limit
            self._crowded = too_much and self._taken > self.shared.share

    def _end(self, outcome: Run | BaseException) -> None:
        self._outcome = outcome
        self.quarantined = tuple  # a service keeps this longer than the sandbox
        self.on_begun = None  # no cycle: it would keep the output until a full garbage collection
        self.log.close(outcome if isinstance(outcome, BaseException) else None)

    def _event(self, content: Any) -> Event | None:
        match content:
            case frames.Stream(name, text) | frames.OutputFrame(name, text):
                return self._printed_text(name, text)
            case frames.UpdateDisplayData():
                return self._updated(content)
            case frames.DisplayData():
                return self._displayed(content)
            case frames.ExecuteResult():
                data = frames.kept(content.data)
                self._cut |= content.cut
                self._show(_Shown(bundle=data))
                self._result = text_of(data, "text/plain")
                return Result(data, frames.kept_object(content.metadata), content.execution_count)
            case frames.ErrorFrame():
                self._error = _error(content)
                return Error(self._error)
            case frames.ClearOutput(wait):
                self._clear_pending = True
                if not wait:
                    self._clear()
                return Clear(wait)
            case frames.InputRequestFrame(prompt, password):
                self.questions += 1
                return InputRequest(prompt, password)
        return None

    def _printed_text(self, name: str, text: str) -> Event:
        text = self._in_room(text)
        self._printed[name].append(text)
        self._show(_Shown([text]))
        return Stdout(text) if name == "stdout" else Stderr(text)

    def _in_room(self, text: str) -> str:
        """Return the part of the text within the limit, which already counts its frame."""
        if self._room >= 0:
            return text
        encoded = text.encode(errors="replace")
        return encoded[: max(0, len(encoded) + self._room)].decode(errors="ignore")

    def _displayed(self, content: frames.DisplayData) -> Event:
        data = frames.kept(content.data)
        self._cut |= content.cut
        display_id = content.transient.get("display_id")
        self._show(_Shown(bundle=data, display_id=display_id, at=self.log.last))
        return Display(data, frames.kept_object(content.metadata), display_id)

    def _updated(self, content: frames.UpdateDisplayData) -> Event:
        data = frames.kept(content.data)
        self._cut |= content.cut
        display_id = content.transient.get("display_id")
        if display_id is not None:
            self._updates[display_id] = (self.log.last, data)
        return Display(data, frames.kept_object(content.metadata), display_id, update=True)

    def _apply_updates(self) -> None:
        """Apply all updates at the end: thousands of displays times thousands of updates would take
        minutes."""
        for shown in self._screen:
            at, bundle = self._updates.get(shown.display_id or "", (-1, {}))
            if at > shown.at:
                shown.bundle = bundle

    def _show(self, shown: _Shown) -> None:
        if self._clear_pending:
            self._clear()
        last = self._screen[-1] if self._screen else None
        if shown.bundle is None and last is not None and last.bundle is None:
            last.texts += shown.texts
        else:
            self._screen.append(shown)

    def _clear(self) -> None:
        self._clear_pending = False
        self._screen.clear()


def _error(content: frames.ErrorFrame | frames.ExecuteReply | frames.ProgramReply) -> RunError:
    traceback = "\n".join(content.traceback)
    return RunError(content.ename, content.evalue, traceback, content.exit_text)


def apply_carriage_returns(text: str) -> str:
    """Return the text as a terminal shows it: `\r` goes back to the start of the line.

    Work on pieces of whole lines, because a thread that calls this keeps the interpreter lock
    during each of them.
    """
    if "\r" not in text:
        return text
    pieces, start = list[str](), 0
    while start < len(text):
        end = text.rfind("\n", start, start + _PIECE) + 1 or text.find("\n", start + _PIECE) + 1
        piece = text[start : end or len(text)]
        start += len(piece)
        if len(piece) <= _PIECE:
            pieces.append(_OVERWRITTEN.sub("", piece))
        else:  # one line
            line = piece.removesuffix("\n")
            pieces += [_last_of(line), piece[len(line) :]]
    return "".join(pieces)


def _last_of(line: str) -> str:
    written = line.rstrip("\r")
    return written.rpartition("\r")[2] + line[len(written) :]


def _as_text(screen: list[_Shown]) -> str:
    """Return the screen as text, with each bundle on separate lines."""
    parts: list[str] = []
    for shown in screen:
        if shown.bundle is None:
            text = "".join(shown.texts)
            parts.append(text if shown.is_final else apply_carriage_returns(text))
            continue
        if parts and parts[-1] and not parts[-1].endswith("\n"):
            parts.append("\n")
        parts.append((text_of(shown.bundle, "text/plain") or "") + "\n")
    return "".join(parts)
