"""The HTTP client of the SDKs. It limits the size of answers and does not follow redirects."""

import ssl
from collections.abc import AsyncIterator
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import httpx2

ANSWER_MAX = 64 * 1024 * 1024  # bytes on the wire; a stream needs about 300 for each token
_CONNECT_S = 10.0
_WAIT_MAX_S = (
    120.0  # the limit for Retry-After; the openai SDK has it too, the anthropic SDK has no limit
)


def bounded_client(timeout_s: float, failure: type[Exception]) -> "httpx2.AsyncClient":
    """Return a client that raises `failure` for an answer beyond the limits. `failure` is the base
    class of the SDK's errors: the SDK neither retries nor wraps an error of exactly this class.

    A redirect is an error, because the conversation would go to a server that no setting names.
    Compression is refused, because a small answer could expand to a large one.
    """
    import httpx2

    class Counted(httpx2.AsyncByteStream):
        def __init__(self, stream: httpx2.AsyncByteStream) -> None:
            self._stream = stream

        async def __aiter__(self) -> AsyncIterator[bytes]:
            remaining = ANSWER_MAX
            async for chunk in self._stream:
                if (remaining := remaining - len(chunk)) < 0:
                    raise failure(f"it is longer than {ANSWER_MAX} bytes")
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
