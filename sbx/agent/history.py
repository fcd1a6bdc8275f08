"""Where the messages of conversations are kept, and when a history is complete.

An answer is appended when it arrives. The results of all its calls are appended together when the
last one is available. So the worst effect of a crash is an answer without results:
`repair_history` reports that to the model, and no call is repeated silently.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from sbx.agent.messages import Message, ToolCall, from_json, to_json
from sbx.agent.tools.tool import ToolResult
from sbx.aio import run_to_completion
from sbx.errors import Broken, SbxError

if TYPE_CHECKING:
    from sbx.store.messages import MessageRow, Messages

_log = logging.getLogger(__name__)
_PAGE = 1000

INTERRUPTED = (
    "This call was interrupted, and it is not known how far it came. It was not made again: look "
    "at what is there before you repeat it."
)
ENDED = "The run ended before this call did. It is not known how far it came."
ENDED_BEFORE = "The run ended before this call began: it has changed nothing."
ENDED_ON_COPY = "The run ended before this call did."  # a sentence about its changes follows
ENDED_AFTER = "The run ended after the changes of files by this call were applied."


class Kept(Struct, frozen=True):
    """A stored message with its position. `seq` starts at 1 and increases by one. `created_at` is
    in seconds since the epoch. A summary replaces all messages up to and including `covers`."""

    seq: int
    message: Message
    created_at: float
    covers: int | None = None


class MemoryHistory:
    """A history in the memory of this object. A store in memory would cost 2.5 ms and 330 KiB for
    each agent."""

    def __init__(self, messages: Sequence[Message] = ()) -> None:
        self._kept: list[Kept] = []
        self._add(messages, None)

    async def append(self, messages: Sequence[Message], *, covers: int | None = None) -> None:
        self._add(messages, covers)

    async def fill(self, messages: Sequence[tuple[Message, int | None]]) -> bool:
        if self._kept:
            return False
        for message, covers in messages:
            self._add([message], covers)
        return True

    async def messages(self, after: int = 0, limit: int | None = None) -> Sequence[Kept]:
        end = None if limit is None else after + limit
        return tuple(self._kept[after:end])

    def _add(self, messages: Sequence[Message], covers: int | None) -> None:
        for message in messages:
            self._kept.append(Kept(len(self._kept) + 1, message, time.time(), covers))


class StoredHistory:
    """A history in the store. `append` raises the errors of the store: TooLarge, and NotFound for a
    deleted conversation."""

    def __init__(self, messages: "Messages", chat_id: str) -> None:
        self._messages = messages
        self._chat_id = chat_id

    async def append(self, messages: Sequence[Message], *, covers: int | None = None) -> None:
        rows = [to_json(message) for message in messages]
        await self._messages.append(self._chat_id, rows, covers=covers)

    async def fill(self, messages: Sequence[tuple[Message, int | None]]) -> bool:
        rows = [(to_json(message), covers) for message, covers in messages]
        return await self._messages.fill(self._chat_id, rows)

    async def messages(self, after: int = 0, limit: int | None = None) -> Sequence[Kept]:
        kept: list[Kept] = []
        more = limit != 0
        while more:
            page_size = _PAGE if limit is None else min(_PAGE, limit - len(kept))
            rows, more = await self._messages.page(self._chat_id, after=after, limit=page_size)
            kept += [self._kept(row) for row in rows]
            after = rows[-1].seq if rows else after
            more = more and len(kept) != limit
        return kept

    def _kept(self, row: "MessageRow") -> Kept:
        try:
            return Kept(row.seq, from_json(row.message), row.created_at, row.covers)
        except ValueError as error:
            raise Broken(f"message {row.seq} of {self._chat_id} cannot be read: {error}") from error


# The messages of one conversation, in order. One call of `append` stores all of its messages or
# none; when it has returned, they are stored permanently. So does `fill`, which returns
# False for a history that is not empty.
MessageHistory = MemoryHistory | StoredHistory


async def repair_history(
    history: MessageHistory, results: Mapping[str, ToolResult] | None = None
) -> Sequence[Kept]:
    """Append an error as the result of each call of the last answer that has no result. It is in
    `results` under the id of the call; by default it states that the call was interrupted. Return
    all stored messages."""
    kept = await history.messages()
    if not (open_calls := unanswered([entry.message for entry in kept])):
        return kept
    reasons, default = results or {}, ToolResult(INTERRUPTED, is_error=True)
    await history.append(
        [result_message(call, reasons.get(call.id, default)) for call in open_calls]
    )
    return await history.messages()


class Thread:
    """A history during one run, between `open` and `close`. No other code appends to it meanwhile.
    `append` stores the messages even if its caller is cancelled."""

    def __init__(self, history: MessageHistory) -> None:
        self._history = history
        self.kept: list[Kept] = []

    async def open(self) -> None:
        self.kept = [*await repair_history(self._history)]

    async def append(self, messages: Sequence[Message], *, covers: int | None = None) -> None:
        await run_to_completion(self._append(messages, covers))

    async def close(self) -> None:
        """Append a result for each call that has none, however the run ended. If that fails, the
        next `open` does it."""
        if calls := unanswered([entry.message for entry in self.kept]):
            try:
                ended = ToolResult(ENDED, is_error=True)
                await self.append([result_message(call, ended) for call in calls])
            except SbxError as error:
                _log.warning("the end of %s calls could not be kept: %s", len(calls), error)

    @property
    def unfinished(self) -> bool:
        """Return whether there is a message for the model to answer."""
        roles = [entry.message.role for entry in self.kept if entry.message.role != "summary"]
        return bool(roles) and roles[-1] != "assistant"

    async def _append(self, messages: Sequence[Message], covers: int | None) -> None:
        await self._history.append(messages, covers=covers)
        for message in messages:
            self.kept.append(Kept(len(self.kept) + 1, message, time.time(), covers))


def result_message(call: ToolCall, result: ToolResult) -> Message:
    return Message(
        "tool",
        result.text,
        tool_call_id=call.id,
        name=call.name,
        is_error=result.is_error,
        images=result.images,
        outputs=result.outputs,
        error=result.error,
    )


def unanswered(messages: Sequence[Message]) -> tuple[ToolCall, ...]:
    """Return the calls of the last answer that have no result."""
    answered = set()
    for message in reversed(messages):
        if message.role == "tool":
            answered.add(message.tool_call_id)
        elif message.role == "assistant":
            return tuple(call for call in message.tool_calls if call.id not in answered)
        elif message.role == "user":
            break
    return ()
