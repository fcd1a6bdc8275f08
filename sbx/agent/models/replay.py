"""Recorded answers for tests and demos, and to repeat a run without a provider.

An answer is a Response, a text, a list of the pieces of a stream, an exception to raise, or a
function that takes the request and returns one of these. `Recorder` records the answers of another
model, and `ReplayModel.load` replays them.
"""

import inspect
import json
import operator
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from sbx.agent.messages import Message, Response, TokenUsage, ToolCall
from sbx.agent.models import Model, TextDelta
from sbx.agent.tools.tool import ToolDefinition
from sbx.errors import BadRequest, NotFound


class RecordedRequest(Struct, frozen=True):
    """One request to a model."""

    system: str
    messages: tuple[Message, ...]
    tools: tuple[ToolDefinition, ...]


Plain: TypeAlias = Response | str | Sequence[str | Response] | BaseException
Answer: TypeAlias = Plain | Callable[[RecordedRequest], Plain | Awaitable[Plain]]
_PIECE = re.compile(r"\S+\s*|\s+")


class ReplayModel:
    """Returns its answers in turn, one for each request. `asked` lists the requests.

    Raise BadRequest `replay_exhausted` for a request after the last answer.
    """

    def __init__(
        self, answers: Iterable[Answer], *, name: str = "replay", takes_images: bool = True
    ) -> None:
        self.requests: list[RecordedRequest] = []
        self._answers = list(answers)
        self._name = name
        self._takes_images = takes_images

    @classmethod
    def load(cls, path: str | Path) -> "ReplayModel":
        """Load a recording of a Recorder. Raise NotFound, BadRequest `invalid_recording`."""
        try:
            recording = json.loads(Path(path).read_text())
            return cls(
                [_response(answer) for answer in recording["answers"]], name=recording["model"]
            )
        except OSError as error:
            raise NotFound(f"the recording cannot be read: {error}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadRequest(
                f"{path} is not a recording of a model: {error!r}", code="invalid_recording"
            ) from None

    @property
    def name(self) -> str:
        return self._name

    @property
    def takes_images(self) -> bool:
        return self._takes_images

    async def complete(
        self, system: str, messages: Sequence[Message], tools: Sequence[ToolDefinition]
    ) -> Response:
        return _whole(_pieces(await self._next(system, messages, tools)))

    async def stream(
        self, system: str, messages: Sequence[Message], tools: Sequence[ToolDefinition]
    ) -> AsyncGenerator[TextDelta | Response, None]:
        pieces = _pieces(await self._next(system, messages, tools))
        for piece in pieces:
            if isinstance(piece, str):
                yield TextDelta(piece)
        yield _whole(pieces)

    async def close(self) -> None:
        pass

    async def _next(
        self, system: str, messages: Sequence[Message], tools: Sequence[ToolDefinition]
    ) -> Plain:
        request = RecordedRequest(system, tuple(messages), tuple(tools))
        self.requests.append(request)
        if len(self.requests) > len(self._answers):
            raise BadRequest(
                f"the model {self._name} has no answer left: it has {len(self._answers)}, and got "
                f"{len(self.requests)} requests",
                code="replay_exhausted",
                hint="add an answer, or find the reason for the extra request",
            )
        answer = self._answers[len(self.requests) - 1]
        if callable(answer):
            result = answer(request)
            answer = await result if inspect.isawaitable(result) else result
        if isinstance(answer, BaseException):
            raise answer
        return answer


class Recorder:
    """A model that forwards requests to another model and records all answers."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._answers: list[dict[str, Any]] = []

    @property
    def name(self) -> str:
        return self._model.name

    @property
    def takes_images(self) -> bool:
        return self._model.takes_images

    async def complete(
        self, system: str, messages: Sequence[Message], tools: Sequence[ToolDefinition]
    ) -> Response:
        return self._record(await self._model.complete(system, messages, tools))

    async def stream(
        self, system: str, messages: Sequence[Message], tools: Sequence[ToolDefinition]
    ) -> AsyncGenerator[TextDelta | Response, None]:
        async for piece in self._model.stream(system, messages, tools):
            yield self._record(piece) if isinstance(piece, Response) else piece

    async def close(self) -> None:
        await self._model.close()

    def save(self, path: str | Path) -> None:
        """Write all answers so far, for `ReplayModel.load`."""
        recording = {"model": self.name, "answers": self._answers}
        Path(path).write_text(json.dumps(recording, ensure_ascii=False, indent=1))

    def _record(self, response: Response) -> Response:
        self._answers.append(_told(response))
        return response


def _pieces(answer: Plain) -> Sequence[str | Response]:
    """Return the pieces of a stream: the words of the text, then the rest."""
    if isinstance(answer, str):
        return [answer]
    if isinstance(answer, Response):
        return [*_PIECE.findall(answer.content), replace(answer, content="")]
    assert not isinstance(answer, BaseException)
    return answer


def _whole(pieces: Sequence[str | Response]) -> Response:
    text = "".join(piece for piece in pieces if isinstance(piece, str))
    last = pieces[-1] if pieces and isinstance(pieces[-1], Response) else Response()
    return replace(last, content=text + last.content)


def _told(response: Response) -> dict[str, Any]:
    return {
        "content": response.content,
        "tool_calls": [
            {"name": call.name, "arguments": call.arguments} for call in response.tool_calls
        ],
        "usage": [response.usage.input_tokens, response.usage.output_tokens],
        "stop": response.stop,
    }


def _response(fields: Any) -> Response:
    calls = tuple(
        ToolCall(f"replayed-{number}", call["name"], call["arguments"])
        for number, call in enumerate(fields["tool_calls"])
    )
    if fields["stop"] not in ("end", "tools", "length", "refusal"):
        raise ValueError(f"{fields['stop']!r} is not a valid stop")
    used_input, used_output = map(operator.index, fields["usage"])
    return Response(fields["content"], calls, TokenUsage(used_input, used_output), fields["stop"])
