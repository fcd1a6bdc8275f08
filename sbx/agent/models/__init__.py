"""Models behind one small interface.

__init__.py   the interface
factory.py    create the configured model
openai.py     all servers of the chat completions API, with the openai SDK
anthropic.py  the messages API, with the anthropic SDK
sdk_model.py  the shared part of both: one request, its deadline, retries, the HTTP client
sanitize.py   the shared rules for messages that providers accept
failures.py   convert errors of the SDKs to errors of sbx, without the key
replay.py     recorded answers for tests and demos
"""

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from msgspec import Struct

from sbx.agent.messages import Message, Response
from sbx.agent.tools.tool import ToolDefinition


class TextDelta(Struct, frozen=True):
    """A piece of the text of an answer, in the order of arrival."""

    text: str


class Model(Protocol):
    """A language model. Both methods raise Unavailable `model_unavailable` (after all retries),
    `model_rate_limited`, `model_stream_broken`, `model_bad_answer` (the answer has an unknown
    form); Denied `model_unauthorized`; BadRequest `model_bad_request`. No error contains the key.
    Cancelling a call ends its request."""

    @property
    def name(self) -> str: ...

    @property
    def takes_images(self) -> bool: ...

    async def complete(
        self, system: str, messages: Sequence[Message], tools: Sequence[ToolDefinition]
    ) -> Response:
        """Return the whole answer."""
        ...

    def stream(
        self, system: str, messages: Sequence[Message], tools: Sequence[ToolDefinition]
    ) -> AsyncGenerator[TextDelta | Response, None]:
        """Yield the text as it arrives. The last item, and only this one, is the whole Response. An
        answer that breaks off is requested again only if no part of it has been yielded."""
        ...

    async def close(self) -> None: ...
