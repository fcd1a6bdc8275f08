"""The shared part of both SDKs: one request, complete or streamed, with its deadline and its
end."""

import asyncio
import importlib
import ssl
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from sbx.agent.messages import Message, Response
from sbx.agent.models import TextDelta
from sbx.agent.models.failures import STREAM_BROKEN, Failures, bad_answer, stream_broken
from sbx.agent.tools.tool import ToolDefinition
from sbx.errors import BadRequest, Unavailable, needs_extra
from sbx.protocol.bundles import ValueCounter
from sbx.protocol.trace_context import trace_headers

if TYPE_CHECKING:
    import httpx2

T = TypeVar("T")
ANSWER_MAX = 64 * 1024 * 1024  # bytes on the wire; a stream needs about 300 for each token
_CONNECT_S = 10.0
_WAIT_MAX_S = 120.0  # the limit for Retry-After; the openai SDK has it too, the anthropic SDK not


# Retries of streams that break off.
#
# The SDKs retry refused or lost requests themselves: 408, 409, 429 and 5xx, after the time in
# Retry-After or after a growing pause. They leave broken streams to their callers.
_PAUSE_MAX_S = 8.0  # the same as in the SDKs

Answer = AsyncGenerator[TextDelta | Response, None]


async def unbroken(attempt: Callable[[], Answer], retries: int, pause_s: float) -> Answer:
    """Yield the items of an attempt. If it breaks off before its first item, make another attempt.
    The first pause is `pause_s`, and each further pause is twice as long."""
    while True:
        has_items = False
        try:
            async with aclosing(attempt()) as answer:
                async for item in answer:
                    has_items = True
                    yield item
            return
        except Unavailable as failure:
            if has_items or not retries or failure.code != STREAM_BROKEN:
                raise
        await asyncio.sleep(min(pause_s, _PAUSE_MAX_S))
        retries, pause_s = retries - 1, pause_s * 2


class ResponseBuilder(ABC):
    """Builds an answer from one object or from the pieces of a stream. The objects of the SDK are
    not validated before."""

    @abstractmethod
    def whole(self, answer: object) -> None: ...

    @abstractmethod
    def add(self, piece: object) -> Sequence[str]:
        """Return the texts in this piece of a stream."""
        ...

    @property
    @abstractmethod
    def is_complete(self) -> bool:
        """Return whether the stream was complete if it ends here."""
        ...

    @abstractmethod
    def response(self) -> Response: ...


class SdkModel(ABC):
    """A Model of one server, reached with an SDK.

    A `base_url` of None means the URL of the provider. `timeout_s` is the maximum time of one
    answer, including all retries. `pause_s` is the first pause before a broken stream is requested
    again. `options` are added to each request unchanged: `temperature`, `max_tokens` and others.
    Raise Unavailable `extra_missing`, BadRequest `invalid_settings`.
    """

    sdk: ClassVar[str]
    client: ClassVar[str]
    error: ClassVar[str]  # the base class of its errors

    def __init__(
        self,
        name: str,
        *,
        api_key: str,
        base_url: str | None = None,
        max_retries: int = 4,
        timeout_s: float = 600.0,
        pause_s: float = 0.5,
        takes_images: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        with needs_extra(f"a model of {self.sdk}", "agent"):
            module = importlib.import_module(self.sdk)
        key = _checked_key(api_key)
        self._name = name
        self._takes_images = takes_images
        root: type[Exception] = getattr(module, self.error)
        self._failures = Failures(module, root, key)
        self._retries, self._timeout_s, self._pause_s = max_retries, timeout_s, pause_s
        self._options = dict(options or {})
        self._client: Any = getattr(module, self.client)(
            api_key=key,
            base_url=_checked_url(base_url),
            max_retries=max_retries,
            http_client=bounded_client(timeout_s, root),
        )

    @property
    def name(self) -> str:
        return self._name

    @property
    def takes_images(self) -> bool:
        return self._takes_images

    async def complete(
        self, system: str, messages: Sequence[Message], tools: Sequence[ToolDefinition]
    ) -> Response:
        building = self._building()
        building.whole(await self._send(_Question(system, messages, tools, False), self._end()))
        return building.response()

    def stream(
        self, system: str, messages: Sequence[Message], tools: Sequence[ToolDefinition]
    ) -> Answer:
        question, deadline = _Question(system, messages, tools, True), self._end()
        return unbroken(lambda: self._attempt(question, deadline), self._retries, self._pause_s)

    async def close(self) -> None:
        await self._client.close()

    @abstractmethod
    def _request(
        self,
        system: str,
        messages: Sequence[Message],
        tools: Sequence[ToolDefinition],
        takes_images: bool,
    ) -> dict[str, Any]: ...

    @abstractmethod
    def _create(self, request: dict[str, Any]) -> Awaitable[Any]: ...

    @abstractmethod
    def _building(self) -> ResponseBuilder: ...

    async def _send(self, question: "_Question", deadline: float) -> Any:
        """Send a request. No setting states whether a model accepts images. If the model seems to
        refuse the images, send the request again without them. Every request tries the images
        again, because only one image may have been invalid."""
        try:
            return await self._failures.await_reply(
                self._put(question, self._takes_images), deadline
            )
        except BadRequest as refusal:
            if not (self._takes_images and question.has_images and _is_of_images(refusal)):
                raise
        return await self._failures.await_reply(self._put(question, False), deadline)

    def _put(self, question: "_Question", takes_images: bool) -> Awaitable[Any]:
        request = self._request(question.system, question.messages, question.tools, takes_images)
        request["stream"] = question.is_streamed
        if continued := trace_headers():
            request["extra_headers"] = {**continued, **request.get("extra_headers", {})}
        return self._create(request)

    async def _attempt(self, question: "_Question", deadline: float) -> Answer:
        building = self._building()
        pieces = await self._send(question, deadline)
        try:
            while (piece := await self._failures.await_piece(_next(pieces), deadline)) is not _END:
                for text in building.add(piece):
                    yield TextDelta(text)
        finally:
            await pieces.close()
        if not building.is_complete:
            raise stream_broken("the stream has no end")
        yield building.response()

    def _end(self) -> float:
        return asyncio.get_running_loop().time() + self._timeout_s


class _Question(Struct, frozen=True):
    system: str
    messages: Sequence[Message]
    tools: Sequence[ToolDefinition]
    is_streamed: bool

    @property
    def has_images(self) -> bool:
        return any(message.images for message in self.messages)


_END = object()
_OF_IMAGES = ("image", "multimodal", "vision")


def _is_of_images(refusal: BadRequest) -> bool:
    return any(word in refusal.message.lower() for word in _OF_IMAGES)


async def _next(pieces: AsyncIterator[object]) -> object:
    return await anext(pieces, _END)


def read(data: object, shape: type[T]) -> T:
    """Convert data of a server to a type. Raise Unavailable `model_bad_answer`."""
    with suppress(msgspec.ValidationError, RecursionError):
        return msgspec.convert(data, shape, from_attributes=True)
    raise bad_answer("it has an unknown form")


def _checked_key(key: str) -> str:
    key = key.strip()
    if not key or not key.isascii() or not key.isprintable():
        raise BadRequest("API_KEY must be printable ASCII", code="invalid_settings")
    return key


def _checked_url(url: str | None) -> str | None:
    """Refuse a URL with a password: logs and errors contain the URL."""
    with suppress(ValueError):
        if url is None:
            return None
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and "@" not in parts.netloc:
            return url
    raise BadRequest(
        "BASE_URL must be an http or https URL, without a user or password",
        code="invalid_settings",
    )


# -- the HTTP client of the SDKs -------------------------------------------------------------------


def bounded_client(
    timeout_s: float,
    failure: type[Exception],
    answer_max: int | None = None,
    values_max: int | None = None,
) -> "httpx2.AsyncClient":
    """Return a client that raises `failure` for an answer beyond the limits. `failure` is the base
    class of the SDK's errors: the SDK neither retries nor wraps an error of exactly this class.
    `answer_max` in bytes; None for that of a model. `values_max`: the values and keys of JSON in an
    answer.

    A redirect is an error, because the conversation would go to a server that no setting names.
    Compression is refused, because a small answer could expand to a large one.
    """
    import httpx2

    limit = answer_max or ANSWER_MAX

    class Counted(httpx2.AsyncByteStream):
        def __init__(self, stream: httpx2.AsyncByteStream) -> None:
            self._stream = stream

        async def __aiter__(self) -> AsyncIterator[bytes]:
            remaining, values = limit, ValueCounter()
            async for chunk in self._stream:
                if (remaining := remaining - len(chunk)) < 0:
                    raise failure(f"it is longer than {limit} bytes")
                if values_max is not None:
                    values.feed(chunk)
                    if values.count > values_max:
                        raise failure(f"it has more than {values_max} values")
                yield chunk

        async def aclose(self) -> None:
            await self._stream.aclose()

    async def bound(response: httpx2.Response) -> None:
        if response.headers.get("content-encoding", "identity") != "identity":
            raise failure("it is compressed, although the request did not allow that")
        if _wait_s(response.headers.get("retry-after", "")) > _WAIT_MAX_S:
            response.headers["x-should-retry"] = "false"  # both SDKs obey this header
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = Counted(response.stream)

    return httpx2.AsyncClient(
        verify=_trusted(),
        timeout=httpx2.Timeout(timeout_s, connect=_CONNECT_S),
        headers={"Accept-Encoding": "identity"},
        event_hooks={"response": [bound]},
        follow_redirects=False,
    )


def _wait_s(retry_after: str) -> float:
    try:
        return float(retry_after)
    except ValueError:  # a date, or an empty value
        return 0.0


@cache
def _trusted() -> ssl.SSLContext:
    """Read the certificates only once, not for each model: it takes 30 ms."""
    import httpx2

    return httpx2.create_ssl_context()
