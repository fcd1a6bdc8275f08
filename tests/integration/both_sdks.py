"""One way to call the asynchronous and the synchronous classes of an SDK.

box = Both(sandbox)
await box.commands.run("ls")        # awaits, or runs in a thread
"""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

_PLAIN = (str, int, float, bool, bytes, list, dict, tuple, type(None))


class Both:
    """An object of an SDK. Its methods are coroutines here; its attributes are wrapped as well."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.inner, name)
        if callable(value):
            return _called(value)
        return value if isinstance(value, _PLAIN) else Both(value)


def _called(method: Callable[..., Any]) -> Callable[..., Any]:
    async def call(*args: Any, **kwargs: Any) -> Any:
        if inspect.iscoroutinefunction(method):
            return await method(*args, **kwargs)
        value = await asyncio.to_thread(method, *args, **kwargs)
        return await value if inspect.isawaitable(value) else value

    return call
