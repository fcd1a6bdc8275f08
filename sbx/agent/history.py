"""Where the messages of conversations are kept, and when a history is whole.

An answer is appended when it came, the results of all its calls together when the last is there. So
what a crash leaves is at worst an answer without its results: `mend` says so to the model, and
nothing is done a second time unknowingly.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from sbx.agent.messages import Message, ToolCall
from sbx.errors import SbxError
from sbx.isolation.patience import to_the_end

_log = logging.getLogger(__name__)

INTERRUPTED = (
    "This call was interrupted, and it is not known how far it came. It was not made again: look "
    "at what is there before you repeat it."
)
ENDED = "The run ended before this call did. It is not known how far it came."


@dataclass(frozen=True, slots=True)
class Kept:
    """A message in its place. `seq` rises by one from 1; `created_at` in seconds of the epoch. A
    summary stands for all up to `covers`."""

    seq: int
    message: Message
    created_at: float
    covers: int | None = None


class History(Protocol):
    """The messages of one conversation, in order. What `append` returned for is kept for good, and
    all messages of one call together or none."""

    async def append(self, messages: Sequence[Message], *, covers: int | None = None) -> None: ...

    async def messages(self, after: int = 0, limit: int | None = None) -> Sequence[Kept]: ...


class MemoryHistory:
    """Kept by this object alone."""

    def __init__(self, messages: Sequence[Message] = ()) -> None:
        self._kept: list[Kept] = []
        self._add(messages, None)

    async def append(self, messages: Sequence[Message], *, covers: int | None = None) -> None:
        self._add(messages, covers)

    async def messages(self, after: int = 0, limit: int | None = None) -> Sequence[Kept]:
        end = None if limit is None else after + limit
        return tuple(self._kept[after:end])

    def _add(self, messages: Sequence[Message], covers: int | None) -> None:
        for message in messages:
            self._kept.append(Kept(len(self._kept) + 1, message, time.time(), covers))


async def mend(history: History, why: Mapping[str, str] | None = None) -> Sequence[Kept]:
    """Give an error as its result to each call of the last answer that has none: `why` by the id of
    the call, else that it was interrupted. Returns all that is kept then."""
    kept = await history.messages()
    if not (open_calls := unanswered([one.message for one in kept])):
        return kept
    told = why or {}
    await history.append([failed(call, told.get(call.id, INTERRUPTED)) for call in open_calls])
    return await history.messages()


class Thread:
    """A history as one run goes along it, between `open` and `close`; nobody else appends to it
    meanwhile. What is appended is kept, even if who appends is cancelled."""

    def __init__(self, history: History) -> None:
        self._history = history
        self.kept: list[Kept] = []

    async def open(self) -> None:
        self.kept = [*await mend(self._history)]

    async def append(self, messages: Sequence[Message], *, covers: int | None = None) -> None:
        await to_the_end(self._append(messages, covers))

    async def close(self) -> None:
        """No call stays without a result, whatever ended the run; where that cannot be kept, the
        next `open` sees to it."""
        if calls := unanswered([one.message for one in self.kept]):
            try:
                await self.append([failed(call, ENDED) for call in calls])
            except SbxError as error:
                _log.warning("the end of %s calls could not be kept: %s", len(calls), error)

    @property
    def unfinished(self) -> bool:
        """Whether there is something for the model to answer."""
        roles = [one.message.role for one in self.kept if one.message.role != "summary"]
        return bool(roles) and roles[-1] != "assistant"

    async def _append(self, messages: Sequence[Message], covers: int | None) -> None:
        await self._history.append(messages, covers=covers)
        for message in messages:
            self.kept.append(Kept(len(self.kept) + 1, message, time.time(), covers))


def failed(call: ToolCall, why: str) -> Message:
    return Message("tool", why, tool_call_id=call.id, name=call.name, is_error=True)


def unanswered(messages: Sequence[Message]) -> tuple[ToolCall, ...]:
    """The calls of the last answer that have no result."""
    answered = set()
    for message in reversed(messages):
        if message.role == "tool":
            answered.add(message.tool_call_id)
        elif message.role == "assistant":
            return tuple(call for call in message.tool_calls if call.id not in answered)
        elif message.role == "user":
            break
    return ()
