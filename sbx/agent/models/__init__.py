"""Models behind one small contract.

__init__.py    the contract
made.py        the model that settings name
openai.py      anything that speaks chat completions, by the openai SDK
anthropic.py   the messages API, by the anthropic SDK
asking.py      what both have in common: one request, its deadline, its end
wording.py     what both have to mind when they tell a history
retries.py     what is asked again, and when
failures.py    the errors of the SDKs in ours, without the key
bounded.py     the HTTP client beneath the SDKs
replay.py      answers written down before: tests, demos
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from sbx.agent.messages import Message, Response
from sbx.agent.tools.tool import ToolDefinition


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of the answer's text, as it comes."""

    text: str


class Model(Protocol):
    """What answers. Both methods raise Unavailable `model_unavailable` (asked again as often as is
    right, and it would not), `model_rate_limited`, `model_stream_broken`, `model_bad_answer` (of no
    shape that an answer has); Denied `model_unauthorized`; BadRequest `model_bad_request`. No error
    carries the key. Cancelling a call ends its request.
    """

    @property
    def name(self) -> str: ...

    @property
    def takes_images(self) -> bool: ...

    async def complete(
        self, system: str, messages: Sequence[Message], tools: Sequence[ToolDefinition]
    ) -> Response:
        """The whole answer at once."""
        ...

    def stream(
        self, system: str, messages: Sequence[Message], tools: Sequence[ToolDefinition]
    ) -> AsyncGenerator[TextDelta | Response, None]:
        """Its text as it comes; the last item, and only that, is the whole Response. An answer that
        breaks off before its end is asked for again only while nothing of it was told."""
        ...

    async def close(self) -> None: ...
