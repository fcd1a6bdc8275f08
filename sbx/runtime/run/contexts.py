"""The kernels of one conversation by name: `default`, and others over the same files.

Each has its own jail, variables and queue of runs. `create` makes and starts the others, and they
exist until they are deleted. If a kernel ends without a request, the next run starts another one
and reports `state_lost`.
"""

import builtins
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

from msgspec import Struct

from sbx.aio import run_to_completion
from sbx.errors import Conflict, NotFound
from sbx.protocol.contexts import CONTEXTS_MAX, DEFAULT_CONTEXT, check_context
from sbx.protocol.runs import RunError
from sbx.runtime.run.checks import require_capability
from sbx.runtime.run.context import Context
from sbx.runtime.run.context_kernel import ClosedReason

_NOT_MADE = RunError("ContextNotMade", "the kernel of this context could not be started", "")


async def _nothing(_name: str) -> None:
    pass


class ContextStore(Struct, frozen=True):
    """Records the contexts while their conversation is closed with its files kept. `names` are the
    earlier ones. `add` is called after each start, and may refuse it; `drop` after each end."""

    names: tuple[str, ...] = ()
    add: Callable[[str], Awaitable[None]] = _nothing
    drop: Callable[[str], Awaitable[None]] = _nothing


class Contexts:
    """See the module. Its methods may be called concurrently on one event loop."""

    def __init__(self, make: Callable[[str, bool], Context], memory: ContextStore) -> None:
        """`make` gets the name, and whether the context is new and so has not lost its state."""
        self._make = make
        self._memory = memory
        self._leaving: set[Context] = set()
        self.default = make(DEFAULT_CONTEXT, False)
        self._others = {name: make(name, False) for name in memory.names}

    async def create(self, name: str) -> Context:
        """Create a context and start its kernel. If this fails, the context does not exist.

        Raise BadRequest for the name, Conflict `context_exists` and `too_many_contexts`, Denied,
        Closed, and the errors of the start of a kernel.
        """
        self._check_new(name)
        context = self._make(name, True)
        require_capability(context.policy, "python")
        self._others[name] = context
        try:
            await context.start()
            self._check_kept(context)  # or the store would add the name after it dropped it
            await self._memory.add(name)
            self._check_kept(context)
        except BaseException:
            await run_to_completion(self._forget(context, _NOT_MADE))
            raise
        return context

    async def get(self, name: str) -> Context:
        """Return the context of this name. Raise NotFound, BadRequest for the name, Closed."""
        return self.find(name)

    async def list(self) -> list[Context]:
        """Return all contexts: `default`, then the others by name. Raise Closed."""
        self.default.check_open()
        return self.every

    async def delete(self, name: str) -> None:
        """Delete the context with its kernel and its runs; the files stay. A cancelled call still
        completes. Raise NotFound, BadRequest, Conflict `default_context`, Closed."""
        context = self.find(name)
        if context is self.default:
            raise Conflict(
                "the context default lives as long as its conversation",
                code="default_context",
                hint="restart it for a clean namespace",
            )
        reason = RunError("ContextDeleted", f"the context {name!r} was deleted meanwhile", "")
        await run_to_completion(self._forget(context, reason))

    def find(self, name: str) -> Context:
        """Do the same as `get`, synchronously."""
        context = self.default if name == DEFAULT_CONTEXT else self._others.get(name)
        if context is None:
            check_context(name)
        self.default.check_open()
        if context is None:
            raise NotFound(f"context {name!r} does not exist", hint="create it first")
        return context

    @property
    def every(self) -> "builtins.list[Context]":
        """All contexts, also after a close."""
        return [self.default, *(context for _, context in sorted(self._others.items()))]

    @property
    def ending(self) -> "builtins.list[Context]":
        """The contexts that may have a kernel: all, and those that are being deleted."""
        return [*self.every, *self._leaving.difference(self._others.values())]

    def _check_new(self, name: str) -> None:
        check_context(name)
        self.default.check_open()
        if name == DEFAULT_CONTEXT or name in self._others:
            raise Conflict(
                f"there is a context {name!r} already",
                code="context_exists",
                hint="run in it, restart it for a clean namespace, or choose another name",
            )
        if len(self.ending) >= CONTEXTS_MAX:
            raise Conflict(
                f"a conversation has at most {CONTEXTS_MAX} contexts",
                code="too_many_contexts",
                hint="delete one that is no longer needed",
                details={"limit": CONTEXTS_MAX},
            )

    def _check_kept(self, context: Context) -> None:
        """Raise Closed if its conversation was closed, and Conflict if it was deleted."""
        context.check_open()
        if self._others.get(context.name) is not context or context in self._leaving:
            raise Conflict(f"the context {context.name!r} was deleted meanwhile", code="stopped")

    async def _forget(self, context: Context, reason: RunError) -> None:
        """Free the name after the store has dropped it, and end the kernel even if that fails. A
        second call leaves the name, which may be a later context's by then."""
        gone = ClosedReason(f"the context {context.name!r}", "its variables are gone")
        async with AsyncExitStack() as steps:  # the last one first, also after an error
            first = self._others.get(context.name) is context and context not in self._leaving
            if first:
                self._leaving.add(context)
                steps.callback(self._leaving.discard, context)
            steps.push_async_callback(context.close, gone)
            steps.push_async_callback(context.halt, reason)
            if first:
                steps.callback(self._others.pop, context.name)
                await self._memory.drop(context.name)
