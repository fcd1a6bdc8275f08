"""The HTTP client beneath the SDKs: answers have a largest size, and redirects are not followed."""

import ssl
from collections.abc import AsyncIterator
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import httpx2

ANSWER_MAX = 64 * 1024 * 1024  # bytes on the wire; a stream frames each token with about 300
_CONNECT_S = 10.0
_WAIT_MAX_S = 120.0  # for what Retry-After names; the openai SDK has this bound, the other has none


def bounded_client(timeout_s: float, failure: type[Exception]) -> "httpx2.AsyncClient":
    """`failure` is raised for an answer beyond the bounds: the root of the SDK's errors, which is
    the one thing that it neither asks again for nor wraps.

    A redirect is an error: the conversation would go to a server that no setting names. Compression
    is refused, or a small answer could become a large one.
    """
    import httpx2

    class Counted(httpx2.AsyncByteStream):
        def __init__(self, stream: httpx2.AsyncByteStream) -> None:
            self._stream = stream

        async def __aiter__(self) -> AsyncIterator[bytes]:
            left = ANSWER_MAX
            async for chunk in self._stream:
                if (left := left - len(chunk)) < 0:
                    raise failure(f"it is longer than {ANSWER_MAX} bytes")
                yield chunk

        async def aclose(self) -> None:
            await self._stream.aclose()

    async def bound(response: httpx2.Response) -> None:
        if response.headers.get("content-encoding", "identity") != "identity":
            raise failure("it is compressed, which was not asked for")
        if _wait_s(response.headers.get("retry-after", "")) > _WAIT_MAX_S:
            response.headers["x-should-retry"] = "false"  # which both SDKs obey
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
    except ValueError:  # a date, or nothing
        return 0.0


@cache
def _trusted() -> ssl.SSLContext:
    """The certificates are read once, not for each model: it takes 30 ms."""
    import httpx2

    return httpx2.create_ssl_context()
