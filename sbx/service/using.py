"""Around any use of a sandbox: it is opened, kept from its idle time-out, and let go."""

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from sbx import errors
from sbx.runtime.conversation import Conversation
from sbx.runtime.sandbox import DEFAULT_CONVERSATION
from sbx.service.auth import Caller
from sbx.service.ids import check_id
from sbx.service.kept import KeptSandbox
from sbx.service.leases import SandboxIndex, unknown
from sbx.service.lifecycle import Act
from sbx.service.models import SandboxView
from sbx.service.sandbox import ServiceSandbox


@dataclass(frozen=True, slots=True)
class InUse:
    """A sandbox that somebody uses right now. `box` is all of it: whoever hands on a conversation
    by name gets it from `conversation`, which minds the bounds of the caller's token."""

    view: SandboxView
    box: KeptSandbox
    caller: Caller

    def conversation(self, name: str = DEFAULT_CONVERSATION) -> Conversation:
        """The conversation of this name; made when there is none. Raises NotFound, InvalidPath."""
        if not self.caller.sees(self.view.user_id, self.view.agent_id, name):
            raise errors.NotFound(f"there is no conversation {name}")
        return self.box.conversation(name)

    async def existing(self, name: str) -> Conversation:
        """The same for what only looks: a name that nobody used before stays NotFound."""
        if not self.caller.sees(self.view.user_id, self.view.agent_id, name) or (
            self.box.known(name) is None and not await self.box.exists(name)
        ):
            raise errors.NotFound(f"there is no conversation {name[:80]!r}")
        return self.box.conversation(name)


class SandboxLease:
    """What `Sandboxes.using` gives; a class, since a generator would cost each cell 2 µs more."""

    def __init__(
        self,
        registry: SandboxIndex,
        caller: Caller,
        sandbox_id: str,
        scope: str,
        starts: bool,
        conversation: str | None,
        check: Callable[[], None] | None = None,
    ) -> None:
        """`check` raises where the use must not begin now, once the caller may see the sandbox."""
        self._check = check
        self._registry = registry
        self._caller = caller
        self._sandbox_id = sandbox_id
        self._scope = scope
        self._starts = starts
        self._conversation = conversation
        self._one: ServiceSandbox | None = None

    async def __aenter__(self) -> InUse:
        caller = self._caller
        one = self._registry.found(caller, self._sandbox_id, self._scope)
        name = self._conversation
        if name is not None and not caller.sees(one.row.user_id, one.row.agent_id, name):
            raise unknown(self._sandbox_id)
        if self._check is not None:
            self._check()
        one.users += 1
        try:
            to_start = None
            if name is not None and self._starts and self._scope == "execute":
                to_start = check_id("conversation_id", name)
            box = await one.opened(to_start=to_start)
            if self._starts:
                one.begin_use()
            one.touch()
            view = await one.view()
        except BaseException:
            one.users -= 1
            await _end_unused(one)
            raise
        self._one = one
        return InUse(view, box, caller)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        one = self._one
        assert one is not None
        one.users -= 1
        await _end_unused(one)
        if one.row.deleted_at is None:
            one.touch()
        if isinstance(error, errors.Closed):
            try:
                one.check(Act.USE)
            except errors.SbxError as why:
                raise why from error


async def _end_unused(one: ServiceSandbox) -> None:
    """A kernel that was made ahead counts for no limit before it starts to serve: where nothing was
    started after all, it ends with the use that it was taken for."""
    box = one.box
    if box is not None and not one.users and not one.starts and box.has_unused:
        await box.end_unused()
