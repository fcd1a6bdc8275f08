"""A sandbox whose files outlive it: closed, and opened again with the same id, files and host uid.

Who keeps it (sandboxes.py) gives it its place, is asked before each start of a kernel, and told
what became of it.
"""

import os
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial

from sbx.isolation.patience import in_thread, to_the_end
from sbx.isolation.plan import Interpreter, Paths
from sbx.kernels.kernel import Kernel
from sbx.policy import Policy
from sbx.protocol.runs import RunError
from sbx.runtime.conversation import Conversation
from sbx.runtime.files import OpenFiles
from sbx.runtime.open_limit import OpenLimit
from sbx.runtime.sandbox import DEFAULT_CONVERSATION, AsyncSandbox, Means
from sbx.runtime.sessions import check_id

_ENTRIES = 20_000
_MEASURE_S = 0.2


@dataclass(frozen=True, slots=True)
class Place:
    """Where a sandbox lies that is kept, and what its keeper does for it.

    `directory` is an opaque name, `uid` the host uid of its files (None: that of the runtime).
    `directory_of` gives a conversation's opaque name, and whether it is new; `starting` is entered
    around the start of its kernel, and may refuse it; `lost` says whether the conversation had a
    kernel that was ended unasked. `exists` says whether there is a conversation of this name, and
    `limit` how many hold their files open.
    """

    id: str
    directory: str
    uid: int | None
    directory_of: Callable[[str], Awaitable[tuple[str, bool]]]
    starting: Callable[[str], AbstractAsyncContextManager[None]]
    lost: Callable[[str], bool]
    exists: Callable[[str], Awaitable[bool]]
    limit: OpenLimit


class KeptSandbox(AsyncSandbox):
    """`close` ends everything, and leaves the files where they are."""

    def __init__(
        self,
        means: Means,
        policy: Policy,
        loaded: Policy,
        interpreter: Interpreter,
        place: Place,
        *,
        uids: tuple[int, int],
        on_close: Callable[[AsyncSandbox], None],
    ) -> None:
        super().__init__(
            means,
            policy,
            loaded,
            interpreter,
            workspace=None,
            uploads=None,
            on_close=on_close,
            id=place.id,
            directory=place.directory,
        )
        self._place = place
        self._uids = uids

    async def prepare(self) -> None:
        """As of any sandbox; no conversation is opened for it."""
        await self._make_group(self._place.uid)
        shared = "" if self.policy.shared else None
        paths = Paths("", "", self._interpreter, str(self._means.guest), shared)
        first, count = self._uids
        self._decide_key(paths, foreign_uid=not first <= self._host.uid < first + count)

    @property
    def live(self) -> list[Conversation]:
        """The conversations that have a live kernel."""
        return [one for one in self._conversations.values() if one.alive]

    @property
    def busy(self) -> bool:
        """Whether anything runs, waits to run, or starts."""
        return any(one.busy for one in self._conversations.values())

    @property
    def stateful(self) -> set[str]:
        """The conversations that have, or had, a kernel whose end nobody was told of yet."""
        return {name for name, one in self._conversations.items() if one.state_is_kept}

    def known(self, name: str) -> Conversation | None:
        """The conversation, where it was used since this was opened."""
        return self._conversations.get(name)

    async def exists(self, name: str) -> bool:
        """Whether there is this conversation; `default` is there from the beginning."""
        return name == DEFAULT_CONVERSATION or await self._place.exists(name)

    async def measured(self, directory: str) -> tuple[int, int]:
        """How many files a conversation holds, uploads too, and their bytes; of what can be counted
        in a moment."""
        return await in_thread(self._measured, directory)

    def _measured(self, directory: str) -> tuple[int, int]:
        owner = (self._host.uid, self._host.gid)
        own = owner if owner[0] != os.geteuid() else None
        with self._means.data.conversation(self._directory, directory, owner=own) as held:
            usage = held.files.measure(max_entries=_ENTRIES, deadline_s=_MEASURE_S)
            uploads = held.uploads.list()
        return usage.files + len(uploads), usage.bytes + sum(one.size for one in uploads)

    async def halt(self, told: RunError) -> None:
        """End every kernel and every run, those that wait included; `told` says why."""
        for one in list(self._conversations.values()):
            await one.halt(told)

    async def forget(self, name: str, told: RunError) -> None:
        """End this conversation for good; one of the same name is another one from now on."""
        if (one := self._conversations.pop(name, None)) is not None:
            await to_the_end(self._end_conversation(one, told))

    async def _end_conversation(self, one: Conversation, told: RunError) -> None:
        try:
            await one.halt(told)
        finally:
            await one.close()

    def _check_name(self, name: str) -> None:
        """Any text that is an id: it is a key of the store, never a path."""
        check_id("conversation_id", name)

    # -- what a sandbox does otherwise when its files are kept ----------------------------------

    def _make_conversation(self, name: str) -> Conversation:
        return Conversation(
            name,
            self.policy,
            partial(self._open_kept, name),
            partial(self._start_counted, name),
            self._means.grace_s,
            had_kernel=self._place.lost(name),
            limit=self._place.limit,
        )

    async def _open_kept(self, name: str) -> OpenFiles:
        directory, new = await self._place.directory_of(name)
        return await self._open_files_in(directory, new=new)

    async def _start_counted(self, name: str, opened: OpenFiles) -> Kernel:
        async with self._place.starting(name):
            return await self._start_kernel(opened)

    async def _leave_files(self) -> None:
        pass
