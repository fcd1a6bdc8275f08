"""The index of all sandboxes, the permission of a caller to see one, and the lease around each
use."""

from bisect import bisect_right
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from sbx import errors
from sbx.runtime.conversation import Conversation
from sbx.runtime.sandbox import DEFAULT_CONVERSATION
from sbx.runtime.settings import Settings
from sbx.service.caller import Caller
from sbx.service.hooks import PersistentSandbox
from sbx.service.lifecycle import Act
from sbx.service.models import SandboxView
from sbx.service.sandbox import ServiceSandbox
from sbx.store import Store
from sbx.store import sandboxes as rows
from sbx.store.sandboxes import SandboxRow

_RETRY_AFTER_S = 30.0


class SandboxIndex:
    """All sandboxes that were not deleted, by id and by session, and the limit of their number."""

    drop_unused: Callable[[ServiceSandbox, str], Awaitable[None]]  # of ContentErasure

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._by_id: dict[str, ServiceSandbox] = {}
        self._by_session: dict[tuple[str, str], ServiceSandbox] = {}
        self._creating: dict[str, str] = {}  # the owners of sandboxes, by id
        self.on_left: Callable[[], None] = lambda: None  # called after each lease

    def every(self) -> list[ServiceSandbox]:
        return list(self._by_id.values())

    def visible(
        self, caller: Caller, after: str | None = None, *, all_owners: bool = False
    ) -> Iterator[ServiceSandbox]:
        """Yield the sandboxes that the caller may see with an id after this one, by id.
        `all_owners` has an effect for operators only."""
        ids = sorted(self._by_id)
        for sandbox_id in ids[bisect_right(ids, after) if after else 0 :]:
            sandbox = self._by_id[sandbox_id]
            row = sandbox.row
            if row.owner != caller.owner and not (all_owners and caller.operator):
                continue
            if caller.sees(row.user_id, row.agent_id):
                yield sandbox

    def by_id(self, sandbox_id: str) -> ServiceSandbox | None:
        return self._by_id.get(sandbox_id)

    def add(self, sandbox: ServiceSandbox) -> None:
        self._by_id[sandbox.id] = sandbox
        self._creating.pop(sandbox.id, None)  # from now on it counts as one that lives
        if sandbox.row.session_id is not None:
            self._by_session[sandbox.row.owner, sandbox.row.session_id] = sandbox

    def remove(self, sandbox: ServiceSandbox) -> None:
        self._by_id.pop(sandbox.id, None)
        if sandbox.row.session_id is not None:
            key = (sandbox.row.owner, sandbox.row.session_id)
            if self._by_session.get(key) is sandbox:
                del self._by_session[key]

    def find(
        self, caller: Caller, sandbox_id: str, conversation: str | None = None
    ) -> ServiceSandbox | None:
        """Return the sandbox with this id or this session id, if the caller may see it, and with
        `conversation` this conversation of it."""
        sandbox = self._by_id.get(sandbox_id)
        if sandbox is None or sandbox.row.owner != caller.owner:
            sandbox = self._by_session.get((caller.owner, sandbox_id))
        if sandbox is None or sandbox.row.deleted_at is not None:
            return None
        row = sandbox.row
        return sandbox if caller.sees(row.user_id, row.agent_id, conversation) else None

    def get(
        self,
        caller: Caller,
        sandbox_id: str,
        scope: str | None = None,
        *,
        conversation: str | None = None,
    ) -> ServiceSandbox:
        """Return the sandbox as `find` does, for a caller with this scope. Raise NotFound."""
        sandbox = self.find(caller, sandbox_id, conversation)
        if sandbox is None or (scope is not None and not caller.may(scope)):
            raise unknown(sandbox_id)
        return sandbox

    def get_whole(self, caller: Caller, sandbox_id: str, scope: str) -> ServiceSandbox:
        """Return the sandbox as `get` does, for a caller that may reach every conversation. Raise
        NotFound."""
        if not caller.whole_sandbox:
            raise unknown(sandbox_id)
        return self.get(caller, sandbox_id, scope)

    def get_as_operator(self, caller: Caller, sandbox_id: str) -> ServiceSandbox:
        """Return a sandbox of any owner to an operator, or his own by its session id.
        Raises NotFound."""
        sandbox = self.find(caller, sandbox_id) or self._by_id.get(sandbox_id)
        if sandbox is None or sandbox.row.deleted_at is not None or not caller.operator:
            raise unknown(sandbox_id)
        return sandbox

    @contextmanager
    def creating(self, row: SandboxRow) -> Iterator[None]:
        """Count a sandbox that is being created. Raises Unavailable `too_many_sandboxes`."""
        self._check_room(row.owner)
        self._creating[row.id] = row.owner
        try:
            yield
        finally:
            self._creating.pop(row.id, None)

    def _check_room(self, owner: str) -> None:
        owners = [sandbox.row.owner for sandbox in self._by_id.values() if not sandbox.over]
        owners += self._creating.values()
        for count, limit in (
            (len(owners), self._settings.sandboxes_max),
            (owners.count(owner), self._settings.sandboxes_per_owner),
        ):
            if count >= limit:
                raise errors.Unavailable(
                    f"there are {limit} sandboxes, which is the limit",
                    code="too_many_sandboxes",
                    hint="delete some that are no longer needed",
                    details={"limit": limit, "retry_after_s": _RETRY_AFTER_S},
                )


async def row_of(index: SandboxIndex, store: Store, caller: Caller, sandbox_id: str) -> SandboxRow:
    """Return the row of a sandbox that the caller may see, or could see before it was deleted.
    Raises NotFound."""
    if (sandbox := index.find(caller, sandbox_id)) is not None:
        return sandbox.row
    row = await rows.get(store, caller.owner, sandbox_id)
    if row is None or not caller.sees(row.user_id, row.agent_id):
        raise unknown(sandbox_id)
    return row


class SandboxLease:
    """The use of a sandbox: it is opened, and kept from its idle time-out until the end.

    `async with` gives the lease. `active` is all of the sandbox; `conversation` respects the
    bounds of the caller's token. A class, because a generator would cost 2 µs more for each cell.
    """

    id: str
    active: PersistentSandbox
    _sandbox: ServiceSandbox

    def __init__(
        self,
        index: SandboxIndex,
        caller: Caller,
        sandbox_id: str,
        scope: str,
        starts: bool,
        conversation: str | None,
        check: Callable[[], None] | None,
        kept: bool,
    ) -> None:
        """`check` raises if the use must not begin now; it is called once the caller is known to
        see the sandbox. `conversation`: the one that the caller is known to see then. `kept`: the
        files of an expired session are enough, and this does not put off its end.

        A conversation that the lease created is dropped if the use ends with an error: a refused
        request leaves nothing behind."""
        self.caller = caller
        self._index = index
        self._name = sandbox_id
        self._scope = scope
        self._starts = starts
        self._conversation = conversation
        self._check = check
        self._act = Act.KEEP if kept else Act.USE
        self._peeks = caller.peeks

    async def view(self) -> SandboxView:
        return await self._sandbox.view()

    def conversation(self, name: str = DEFAULT_CONVERSATION) -> Conversation:
        """Return the conversation of this name, also a new one. Raises NotFound, BadRequest."""
        if name != self._conversation and not self._sees(name):
            raise errors.NotFound(f"conversation {name} does not exist")
        self._conversation = name
        return self.active.conversation(name)

    async def existing(self, name: str) -> Conversation:
        """Return the conversation of this name. Raise NotFound for a new one."""
        if not self._sees(name) or (
            self.active.existing(name) is None and not await self._sandbox.hooks.exists(name)
        ):
            raise errors.NotFound(f"conversation {name[:80]!r} does not exist")
        return self.active.conversation(name)

    def _sees(self, name: str) -> bool:
        row = self._sandbox.row
        return self.caller.sees(row.user_id, row.agent_id, name)

    async def __aenter__(self) -> Self:
        name = self._conversation
        sandbox = self._index.get(self.caller, self._name, self._scope, conversation=name)
        if self._check is not None:
            self._check()
        sandbox.check(self._act)  # before it counts as a use: a session in use never expires
        self._peeks = self.caller.peeks or sandbox.expired
        sandbox.users += 1
        sandbox.observers += self._peeks
        try:
            starts = self._starts and not self._peeks
            to_start = name if starts and self._scope == "execute" else None
            self.active = await sandbox.opened(
                to_start=to_start, touch=not self._peeks, act=self._act
            )
            if starts:
                sandbox.begin_use()
            if not self._peeks:
                sandbox.touch()
        except BaseException as error:
            await self._left(sandbox, error)
            raise
        self._sandbox = sandbox
        self.id = sandbox.id
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        sandbox = self._sandbox
        if sandbox.row.deleted_at is None and not self._peeks:
            sandbox.touch()
        await self._left(sandbox, error)
        if isinstance(error, errors.Closed):
            try:
                sandbox.check(self._act)
            except errors.SbxError as reason:
                raise reason from error

    async def _left(self, sandbox: ServiceSandbox, error: BaseException | None) -> None:
        """Give the lease back. End a prewarmed kernel if no lease ran anything: it does not count
        against limits until it runs something."""
        sandbox.users -= 1
        sandbox.observers -= self._peeks
        active = sandbox.active
        if active is not None and not sandbox.users and not sandbox.starts and active.has_unused:
            await active.end_unused()
        name = self._conversation
        if name is not None and name in sandbox.hooks.created:
            if isinstance(error, Exception):
                await self._index.drop_unused(sandbox, name)
            else:
                sandbox.hooks.created.discard(name)
        self._index.on_left()


def unknown(sandbox_id: str) -> errors.NotFound:
    return errors.NotFound(
        f"sandbox {sandbox_id} does not exist",
        hint="sbx ps, or GET /v1/sandboxes, lists yours",
        details={"sandbox_id": sandbox_id},
    )
