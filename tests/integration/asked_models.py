"""Models of both SDKs, each with a scripted server of its own."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from model_dialects import Dialect
from model_server import KEY, Answer, Asked, ModelServer, Script, model_server

from sbx.agent.messages import Message, Response
from sbx.agent.models import Model, TextDelta
from sbx.agent.models.anthropic import AnthropicModel
from sbx.agent.models.openai import OpenAIModel

HELLO = [Message("user", "hello")]
DIALECTS: tuple[Dialect, ...] = ("openai", "anthropic")


@asynccontextmanager
async def asked_model(
    dialect: Dialect,
    *answers: Script,
    by: Callable[[Asked], Answer] | None = None,
    **options: Any,
) -> AsyncIterator[tuple[Model, ModelServer]]:
    with model_server(*answers, by=by) as server:
        model = made_model(dialect, server, **options)
        try:
            yield model, server
        finally:
            await model.close()


def made_model(dialect: Dialect, server: ModelServer, **options: Any) -> Model:
    given = {"api_key": KEY, "pause_s": 0.001, **options}
    if dialect == "openai":
        return OpenAIModel("scripted", **{"base_url": server.openai_url, **given})
    return AnthropicModel("scripted", **{"base_url": server.anthropic_url, **given})


async def streamed(model: Model, *messages: Message) -> tuple[list[str], Response]:
    """The texts of a stream, and the answer that ends it."""
    items = [item async for item in model.stream("", messages or HELLO, ())]
    *pieces, last = items
    assert isinstance(last, Response)
    texts = [piece.text for piece in pieces if isinstance(piece, TextDelta)]
    assert len(texts) == len(pieces)
    return texts, last
