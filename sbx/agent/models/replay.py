"""Answers written down before: for tests, for demos, and to see a run again without a provider.

An answer is a Response, a text, a list of the pieces that a stream tells, an exception to raise, or
a function of what the model was asked that gives one of these. `Recorder` keeps what another model
answers; `ReplayModel.load` answers so again.
"""

import inspect
import json
import operator
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from sbx.agent.messages import Message, Response, ToolCall, Usage
from sbx.agent.models import Model, TextDelta
from sbx.agent.tools.tool import ToolDefinition
from sbx.errors import BadRequest, NotFound


@dataclass(frozen=True, slots=True)
class Asked:
    """What a model was asked once."""

    system: str
    messages: tuple[Message, ...]
    tools: tuple[ToolDefinition, ...]


Plain: TypeAlias = Response | str | Sequence[str | Response] | BaseException
Answer: TypeAlias = Plain | Callable[[Asked], Plain | Awaitable[Plain]]
_PIECE = re.compile(r"\S+\s*|\s+")


class ReplayModel:
    """Gives its answers in turn, one for each time it is asked; `asked` tells what it was asked.

    Raises BadRequest `replay_exhausted` when it is asked once more than it has answers.
    """

    def __init__(
        self, answers: Iterable[Answer], *, name: str = "replay", takes_images: bool = True
    ) -> None:
        self.asked: list[Asked] = []
        self._answers = list(answers)
        self._name = name
        self._takes_images = takes_images

    @classmethod
    def load(cls, path: str | Path) -> "ReplayModel":
        """What a Recorder wrote. Raises NotFound, BadRequest `invalid_recording`."""
        try:
            told = json.loads(Path(path).read_text())
            return cls([_response(one) for one in told["answers"]], name=told["model"])
        except OSError as error:
            raise NotFound(f"the recording cannot be read: {error}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadRequest(
                f"{path} is no recording of a model: {error!r}", code="invalid_recording"
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
        asked = Asked(system, tuple(messages), tuple(tools))
        self.asked.append(asked)
        if len(self.asked) > len(self._answers):
            raise BadRequest(
                f"the model {self._name} has no answer left: it has {len(self._answers)}, and was "
                f"asked {len(self.asked)} times",
                code="replay_exhausted",
                hint="write down one more answer, or see why it was asked once more",
            )
        answer = self._answers[len(self.asked) - 1]
        if callable(answer):
            made = answer(asked)
            answer = await made if inspect.isawaitable(made) else made
        if isinstance(answer, BaseException):
            raise answer
        return answer


class Recorder:
    """A model that another one answers for, and that writes every answer down."""

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
        return self._kept(await self._model.complete(system, messages, tools))

    async def stream(
        self, system: str, messages: Sequence[Message], tools: Sequence[ToolDefinition]
    ) -> AsyncGenerator[TextDelta | Response, None]:
        async for piece in self._model.stream(system, messages, tools):
            yield self._kept(piece) if isinstance(piece, Response) else piece

    async def close(self) -> None:
        await self._model.close()

    def save(self, path: str | Path) -> None:
        """All answers until now, for `ReplayModel.load`."""
        whole = {"model": self.name, "answers": self._answers}
        Path(path).write_text(json.dumps(whole, ensure_ascii=False, indent=1))

    def _kept(self, response: Response) -> Response:
        self._answers.append(_told(response))
        return response


def _pieces(answer: Plain) -> Sequence[str | Response]:
    """As a stream tells it: text in words, then what is not text."""
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


def _response(told: Any) -> Response:
    calls = tuple(
        ToolCall(f"replayed-{number}", call["name"], call["arguments"])
        for number, call in enumerate(told["tool_calls"])
    )
    if told["stop"] not in ("end", "tools", "length", "refusal"):
        raise ValueError(f"no answer stops by {told['stop']!r}")
    used_input, used_output = map(operator.index, told["usage"])
    return Response(told["content"], calls, Usage(used_input, used_output), told["stop"])
