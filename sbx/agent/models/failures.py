"""What goes wrong at a model's server, in errors of ours.

An error of an SDK holds the request, and the request the key. So what is raised here has no link to
it, neither as cause nor as context, and a traceback that begins here. What the server said is
quoted without the key and in short.
"""

import asyncio
from collections.abc import Awaitable
from types import ModuleType
from typing import TypeVar

from sbx.errors import BadRequest, Denied, SbxError, Unavailable

STREAM_BROKEN = "model_stream_broken"
_QUOTED_MAX = 500
_DENIALS = frozenset((401, 402, 403))
_PASSING = frozenset((408, 409))  # as the SDKs see it, which ask again after these

T = TypeVar("T")


class Failures:
    """Waits for calls of one SDK until a deadline of the event loop's clock, and tells what they
    raise. `root` is of all its errors; just that is raised by bounded.py, for what would be so
    again."""

    def __init__(self, sdk: ModuleType, root: type[Exception], key: str) -> None:
        self._sdk = sdk
        self._root = root
        self._key = key

    async def asked(self, call: Awaitable[T], deadline: float) -> T:
        """What a request gives; the SDK has asked again by then as often as is right."""
        try:
            async with asyncio.timeout_at(deadline):
                return await call
        except Exception as error:  # noqa: BLE001  # whatever an SDK makes of what a server sent
            failure = self._of(error)
        raise failure

    async def heard(self, call: Awaitable[T], deadline: float) -> T:
        """The next piece of a stream. Whatever stops it is Unavailable `model_stream_broken`, but
        the end of its time and an answer beyond all bounds."""
        try:
            async with asyncio.timeout_at(deadline):
                return await call
        except Exception as error:  # noqa: BLE001  # as above
            failure = self._of(error) if self._is_final(error) else stream_broken(self._said(error))
        raise failure

    def _of(self, error: Exception) -> SbxError:
        if isinstance(error, self._sdk.APIStatusError):
            return self._of_status(error.status_code, self._said(error))
        if isinstance(error, TimeoutError | self._sdk.APITimeoutError):
            return Unavailable(
                "the model's server did not answer in time", code="model_unavailable"
            )
        if isinstance(error, self._sdk.APIConnectionError):
            return Unavailable(
                f"the model's server cannot be reached: {self._said(error)}",
                code="model_unavailable",
                hint="check BASE_URL and the network",
            )
        return bad_answer(self._said(error))

    def _of_status(self, status: int, said: str) -> SbxError:
        message = f"the model's server answered HTTP {status}: {said}"
        details = {"status": status}
        if status in _DENIALS:  # not quoted: servers repeat the key there, in part
            return Denied(
                f"the model's server refuses this key (HTTP {status})",
                code="model_unauthorized",
                hint="check API_KEY, and that it may use this model",
                details=details,
            )
        if status == 429:
            return Unavailable(message, code="model_rate_limited", details=details)
        if status in _PASSING or status >= 500:
            return Unavailable(message, code="model_unavailable", details=details)
        hint = "check MODEL_NAME and BASE_URL" if status < 400 or status == 404 else None
        return BadRequest(message, code="model_bad_request", hint=hint, details=details)

    def _is_final(self, error: Exception) -> bool:
        return isinstance(error, TimeoutError) or type(error) is self._root

    def _said(self, error: Exception) -> str:
        """One line about it, without the key."""
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
    return Unavailable(f"the model's answer broke off: {reason}", code=STREAM_BROKEN)


def bad_answer(reason: str) -> Unavailable:
    return Unavailable(
        f"the model's server sent what is no answer: {reason}",
        code="model_bad_answer",
        hint="check BASE_URL: it must speak this provider's API",
    )
