"""Convert failures of the server of a model to errors of sbx.

An error of an SDK contains the request, and the request contains the key. So the errors raised here
have no link to it, neither as cause nor as context, and their traceback begins here. The message of
the server is quoted without the key and shortened.
"""

import asyncio
from collections.abc import Awaitable
from types import ModuleType
from typing import TypeVar

from sbx.errors import BadRequest, Denied, SbxError, Unavailable

STREAM_BROKEN = "model_stream_broken"
_QUOTED_MAX = 500
_DENIALS = frozenset((401, 402, 403))
_TEMPORARY = frozenset((408, 409))  # temporary: the SDKs retry after these

T = TypeVar("T")


class Failures:
    """Waits for calls of one SDK until a deadline on the clock of the event loop, and converts
    their errors. `root` is the base class of these errors. bounded.py raises exactly this class for
    failures that a retry would repeat."""

    def __init__(self, sdk: ModuleType, root: type[Exception], key: str) -> None:
        self._sdk = sdk
        self._root = root
        self._key = key

    async def await_reply(self, call: Awaitable[T], deadline: float) -> T:
        """Return the result of a request. The SDK has already made all sensible retries."""
        try:
            async with asyncio.timeout_at(deadline):
                return await call
        except Exception as error:  # noqa: BLE001  # an SDK may raise any error for bad data of a server
            failure = self._of(error)
        raise failure

    async def await_piece(self, call: Awaitable[T], deadline: float) -> T:
        """Return the next piece of a stream. Errors are Unavailable `model_stream_broken`, except
        for the deadline and an answer beyond the limits."""
        try:
            async with asyncio.timeout_at(deadline):
                return await call
        except Exception as error:  # noqa: BLE001  # as above
            failure = (
                self._of(error) if self._is_final(error) else stream_broken(self._message(error))
            )
        raise failure

    def _of(self, error: Exception) -> SbxError:
        if isinstance(error, self._sdk.APIStatusError):
            return self._of_status(error.status_code, self._message(error))
        if isinstance(error, TimeoutError | self._sdk.APITimeoutError):
            return Unavailable(
                "the server of the model did not answer in time", code="model_unavailable"
            )
        if isinstance(error, self._sdk.APIConnectionError):
            return Unavailable(
                f"the server of the model cannot be reached: {self._message(error)}",
                code="model_unavailable",
                hint="check BASE_URL and the network",
            )
        return bad_answer(self._message(error))

    def _of_status(self, status: int, text: str) -> SbxError:
        message = f"the server of the model answered HTTP {status}: {text}"
        details = {"status": status}
        if status in _DENIALS:  # not quoted: servers repeat a part of the key in it
            return Denied(
                f"the server of the model refuses this key (HTTP {status})",
                code="model_unauthorized",
                hint="check API_KEY, and that it may use this model",
                details=details,
            )
        if status == 429:
            return Unavailable(message, code="model_rate_limited", details=details)
        if status in _TEMPORARY or status >= 500:
            return Unavailable(message, code="model_unavailable", details=details)
        hint = "check MODEL_NAME and BASE_URL" if status < 400 or status == 404 else None
        return BadRequest(message, code="model_bad_request", hint=hint, details=details)

    def _is_final(self, error: Exception) -> bool:
        return isinstance(error, TimeoutError) or type(error) is self._root

    def _message(self, error: Exception) -> str:
        """Return the message of an error as one line without the key."""
        body = getattr(error, "body", None)
        if isinstance(body, dict) and isinstance(body.get("error"), dict):
            body = body["error"]
        if isinstance(body, dict):
            body = body.get("message")
        root = error.__cause__ if isinstance(error, self._sdk.APIConnectionError) else None
        text = body if isinstance(body, str) else str(root or error) or type(root or error).__name__
        line = " ".join(text.replace(self._key, "[key]").split())
        return line if len(line) <= _QUOTED_MAX else f"{line[:_QUOTED_MAX]} …"


def stream_broken(reason: str) -> Unavailable:
    return Unavailable(f"the answer of the model broke off: {reason}", code=STREAM_BROKEN)


def bad_answer(reason: str) -> Unavailable:
    return Unavailable(
        f"the server of the model sent an invalid answer: {reason}",
        code="model_bad_answer",
        hint="check BASE_URL: the server must have the API of this provider",
    )
