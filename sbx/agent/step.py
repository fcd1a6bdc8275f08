"""One step of a run: the answer of the model and the results of its tool calls."""

import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing

from msgspec import Struct
from msgspec.structs import replace

from sbx.agent.call_events import EmitEvent
from sbx.agent.calls import AgentToolCalls
from sbx.agent.compaction import Compaction, estimated, is_too_long, summarised, to_cover, view
from sbx.agent.history import Thread, result_message
from sbx.agent.messages import (
    Message,
    Response,
    TokenUsage,
    carried,
    carried_call,
    without_images,
)
from sbx.agent.models import Model, TextDelta
from sbx.agent.tools.tool import ToolDefinition, ToolResult
from sbx.errors import BadRequest, Denied, Unavailable
from sbx.protocol import agent as events
from sbx.telemetry import spans

BROKEN_OFF = "\n[broken off here]"
GO_ON = "Your answer was cut off, it was too long. Go on exactly where it stopped."
_EMPTY_MAX = 3  # consecutive answers without text and calls
_log = logging.getLogger(__name__)

SystemPrompt = Callable[[], Awaitable[str]]  # called before each request to the model


class Step(Struct, frozen=True):
    """The argument of `on_step`. `results` are the tool messages, in the order of the calls."""

    number: int
    response: Response
    results: tuple[Message, ...]


class ModelAnswers:
    """The answers of a model within one run. Each answer is appended to the thread.

    `usage` is the cost of all answers. `content` is the text of the last answer, as far as it
    arrived. If earlier answers were cut off, their text comes first. `final` is whether the last
    answer is complete and calls no tool.
    """

    def __init__(
        self,
        model: Model,
        prompt: SystemPrompt,
        tools: Sequence[ToolDefinition],
        thread: Thread,
        emit: EmitEvent,
    ) -> None:
        self.usage = TokenUsage()
        self.content = ""
        self.final = False
        self._model = model
        self._prompt = prompt
        self._tools = tools
        self._thread = thread
        self._emit = emit
        self._cut_off = False
        self._input_tokens = 0

    async def next(self, how: Compaction | None) -> Response:
        """Ask the model until an answer has text or calls, and append it to the thread. The calls
        in the answer get new ids. If the messages have become too long, the model first summarises
        older steps as `how` describes.

        Raise the errors of the model, Denied `model_refused` and Unavailable `model_empty_answer`.
        If an answer breaks off, keep the text that arrived and mark it.
        """
        if how is None:
            return await self._next()
        await self._compact(how)
        try:
            return await self._next()
        except BadRequest as refusal:
            half = max(1, estimated(view(self._thread.kept)) // 2)
            shorter = replace(how, above_tokens=min(how.above_tokens, half))
            if not (is_too_long(refusal) and await self._compact(shorter)):
                raise
        return await self._next()

    async def _next(self) -> Response:
        for _ in range(_EMPTY_MAX):
            response = await self._ask()
            if response.stop == "refusal":
                raise await self._refused(response)
            if response.tool_calls or response.content.strip():
                self._cut_off = response.stop == "length" and not response.tool_calls
                self.final = not response.tool_calls and not self._cut_off
                await self._thread.append([response.message()])
                return response
        raise Unavailable(
            f"the model {self._model.name} gave {_EMPTY_MAX} empty answers in a row",
            code="model_empty_answer",
            hint="rephrase the message, or resume later",
        )

    async def _compact(self, how: Compaction) -> bool:
        """Summarise older steps if necessary. Return whether there is a new summary."""
        covers = to_cover(self._thread.kept, how, self._input_tokens)
        if covers is None:
            return False
        summary = await summarised(self._model, self._thread.kept, covers)
        self.usage += summary.usage
        self._input_tokens = 0
        if summary.stop == "refusal" or not summary.content.strip():
            _log.warning(
                "the model %s gave no summary; the history stays as it is", self._model.name
            )
            return False
        await self._thread.append([Message("summary", carried(summary.content))], covers=covers)
        return True

    async def _ask(self) -> Response:
        system, messages = await self._prompt(), self._messages()
        with spans.span("sbx.model", model=self._model.name):
            response = await self._answer(system, messages)
            spans.annotate(
                input_tokens=response.usage.input_tokens,
                output_tokens=response.usage.output_tokens,
            )
        return response

    async def _answer(self, system: str, messages: Sequence[Message]) -> Response:
        before = self.content = self.content if self._cut_off else ""
        response = None
        try:
            async with aclosing(self._model.stream(system, messages, self._tools)) as pieces:
                async for piece in pieces:
                    if isinstance(piece, TextDelta):
                        text = carried(piece.text)
                        self.content += text
                        self._emit(events.AgentTextDelta(text))
                    else:
                        response = _carried(piece)
        finally:
            if response is None and (received := self.content.removeprefix(before)):
                await self._thread.append([Message("assistant", received + BROKEN_OFF)])
        if response is None:
            raise Unavailable("the answer of the model has no end", code="model_unavailable")
        self.content = before + response.content
        self.usage += response.usage
        self._input_tokens = response.usage.input_tokens
        return response

    def _messages(self) -> list[Message]:
        messages = view(self._thread.kept)
        if self._cut_off:
            messages.append(Message("user", GO_ON))
        if self._model.takes_images:
            return messages
        return [without_images(message) for message in messages]

    async def _refused(self, response: Response) -> Denied:
        if response.content.strip():
            await self._thread.append([Message("assistant", response.content)])
        return Denied(
            f"the model {self._model.name} refused to answer",
            code="model_refused",
            hint="rephrase the message, or start a new conversation",
        )


async def results_of(
    response: Response, calls: AgentToolCalls, thread: Thread
) -> tuple[Message, ...]:
    """Make the calls of an answer and append their results to the thread together. If the run is
    cancelled, append the results that are available at that moment."""
    results: list[ToolResult] = []
    messages: tuple[Message, ...] = ()
    try:
        await calls.make_all(response.tool_calls, results)
    finally:
        messages = tuple(map(result_message, response.tool_calls, results))
        if messages:
            await thread.append(messages)
    return messages


def _carried(response: Response) -> Response:
    """Return the response with text that can be stored and shown, and with new call ids."""
    calls = (replace(carried_call(call), id=new_id()) for call in response.tool_calls)
    return replace(response, content=carried(response.content), tool_calls=tuple(calls))


def new_id() -> str:
    """Return a new id for a tool call: providers repeat their ids, and models invent them."""
    return f"call-{secrets.token_hex(8)}"
