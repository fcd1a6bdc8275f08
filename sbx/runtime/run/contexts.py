"""The kernels of one conversation by name: `default`, and others side by side over the same files.

Each has a jail, variables and an order of runs of its own. What is beyond `default` is made by
`create`, which starts it, and stays by its name until it is deleted: when its kernel is ended
unasked the next run in it starts another, and says `state_lost`.
"""

import builtins
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from sbx.aio import run_to_completion
from sbx.errors import Conflict, NotFound
from sbx.protocol.contexts import CONTEXTS_MAX, DEFAULT_CONTEXT, check_context
from sbx.protocol.runs import RunError
from sbx.runtime.run.context import Context
from sbx.runtime.run.context_kernel import ClosedReason

_NOT_MADE = RunError("ContextNotMade", "the kernel of this context could not be started", "")


async def _nothing(_name: str) -> None:
    pass


@dataclass(frozen=True, slots=True)
class ContextStore:
    """Who remembers contexts while their conversation is closed with its files kept. `names`: those
    there were; `add` is told of each that has started, and may refuse it; `drop` of each that is to
    be gone, also of one it never knew."""

    names: tuple[str, ...] = ()
    add: Callable[[str], Awaitable[None]] = _nothing
    drop: Callable[[str], Awaitable[None]] = _nothing


class Contexts:
    """See the module. Its methods may be called concurrently from one event loop."""

    def __init__(self, make: Callable[[str, bool], Context], memory: ContextStore) -> None:
        """`make` is told the name, and whether it is that of a new one, which has lost nothing."""
        self._make = make
        self._memory = memory
        self._leaving: set[Context] = set()
        self.default = make(DEFAULT_CONTEXT, False)
        self._beside = {name: make(name, False) for name in memory.names}

    async def create(self, name: str) -> Context:
        """Another context, with its kernel started; where that fails there is none.

        Raises BadRequest for the name, Conflict `context_exists` and `too_many_contexts`, Denied,
        Closed, and what starting a kernel raises.
        """
        self._check_new(name)
        one = self._make(name, True)
        one.require_capability()
        self._beside[name] = one
        try:
            await one.start()
            await self._memory.add(name)
            one.check_open()  # its conversation may have been closed meanwhile
        except BaseException:
            await run_to_completion(self._forget(one, _NOT_MADE))
            raise
        return one

    async def get(self, name: str) -> Context:
        """The context of this name. Raises NotFound, BadRequest for the name, Closed."""
        return self.find(name)

    async def list(self) -> list[Context]:
        """All of them, `default` first, the others by name. Raises Closed."""
        self.default.check_open()
        return self.every

    async def delete(self, name: str) -> None:
        """End its kernel and what runs or waits in it, for good; files stay. Once begun it is done
        to its end. Raises NotFound, BadRequest, Conflict `default_context`, Closed."""
        one = self.find(name)
        if one is self.default:
            raise Conflict(
                "the context default lives as long as its conversation",
                code="default_context",
                hint="restart it for a clean namespace",
            )
        told = RunError("ContextDeleted", f"the context {name!r} was deleted meanwhile", "")
        await run_to_completion(self._forget(one, told))

    def find(self, name: str) -> Context:
        """As `get`, at once."""
        check_context(name)
        self.default.check_open()
        one = self.default if name == DEFAULT_CONTEXT else self._beside.get(name)
        if one is None:
            raise NotFound(f"there is no context {name!r}", hint="create it first")
        return one

    @property
    def every(self) -> "builtins.list[Context]":
        """As `list`, also once they are closed."""
        if not self._beside:
            return [self.default]
        return [self.default, *(one for _, one in sorted(self._beside.items()))]

    @property
    def ending(self) -> "builtins.list[Context]":
        """Whatever may still have a kernel: `every`, and those that are being deleted."""
        return [*self.every, *self._leaving]

    def _check_new(self, name: str) -> None:
        check_context(name)
        self.default.check_open()
        if name == DEFAULT_CONTEXT or name in self._beside:
            raise Conflict(
                f"there is a context {name!r} already",
                code="context_exists",
                hint="run in it, restart it for a clean namespace, or choose another name",
            )
        if len(self.ending) >= CONTEXTS_MAX:
            raise Conflict(
                f"a conversation has at most {CONTEXTS_MAX} contexts",
                code="too_many_contexts",
                hint="delete one that is not needed any more",
                details={"limit": CONTEXTS_MAX},
            )

    async def _forget(self, one: Context, told: RunError) -> None:
        """The name stays taken until nobody remembers it; whatever comes of that, the kernel
        ends."""
        try:
            await self._memory.drop(one.name)
        finally:
            if self._beside.get(one.name) is one:
                del self._beside[one.name]
            self._leaving.add(one)
            try:
                await _end(one, told)
            finally:
                self._leaving.discard(one)


async def _end(one: Context, told: RunError) -> None:
    try:
        await one.halt(told)
    finally:
        await one.close(ClosedReason(f"the context {one.name!r}", "its variables are gone"))
