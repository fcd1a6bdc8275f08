"""A sandbox whose files outlive it: closed, and opened again with the same id, files and host uid.

Who keeps it (sandboxes.py) gives it its place, is asked before each start of a kernel, and told
what became of it.
"""

import os
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from sbx.aio import in_thread
from sbx.isolation.plan import Interpreter
from sbx.kernels.budget import FrameBudget
from sbx.kernels.kernel import Kernel
from sbx.policy import Policy
from sbx.protocol.receipt import Receipt
from sbx.protocol.runs import RunError
from sbx.runtime.conversation import Conversation
from sbx.runtime.files.files import OpenFiles
from sbx.runtime.files.open_files import OpenFilesLimit
from sbx.runtime.honeytokens import TokenTriggered
from sbx.runtime.live_mounts import LiveMounts
from sbx.runtime.prewarm import PrewarmedSandbox
from sbx.runtime.resources import RuntimeResources
from sbx.runtime.run.context import Context
from sbx.runtime.run.context_kernel import StartKernel
from sbx.runtime.run.contexts import ContextStore
from sbx.runtime.runtime import Runtime
from sbx.runtime.sandbox import DEFAULT_CONVERSATION, AsyncSandbox
from sbx.service.ids import check_id

if TYPE_CHECKING:
    from sbx.egress import EgressDecision

_ENTRIES = 20_000
_MEASURE_S = 0.2


@dataclass(frozen=True, slots=True)
class SandboxHooks:
    """Where a sandbox lies that is kept, and what its keeper does for it.

    `directory` is an opaque name, `uid` the host uid of its files (None: that of the runtime).
    `directory_of` gives a conversation's opaque name, and whether it is new, unless who asks is
    not wanted any more by then; `starting` is entered around the start of a kernel in a context of
    it, and may refuse it; `started` is told of the walls around each that did; `lost` says whether
    the context had a kernel that was ended unasked; `contexts` remembers which there are; `decided`
    hears what its proxy let through, or did not, and `sprung` which honeytoken. `exists` says
    whether there is a conversation of this name, and `limit` how many hold their files open.
    `mounts` are there longer than this sandbox is open. All sandboxes of the owner share
    `frame_budget`.
    """

    id: str
    directory: str
    uid: int | None
    directory_of: Callable[[str, Callable[[], bool]], Awaitable[tuple[str, bool]]]
    starting: Callable[[str, str], AbstractAsyncContextManager[None]]
    started: Callable[[str, str, Receipt], None]
    lost: Callable[[str, str], bool]
    contexts: Callable[[str], ContextStore]
    exists: Callable[[str], Awaitable[bool]]
    limit: OpenFilesLimit
    decided: "Callable[[EgressDecision], None]"
    sprung: Callable[[TokenTriggered], None]
    mounts: LiveMounts
    frame_budget: FrameBudget


class KeptSandbox(AsyncSandbox):
    """`close` ends everything, and leaves the files where they are."""

    def __init__(
        self,
        means: RuntimeResources,
        policy: Policy,
        loaded: Policy,
        interpreter: Interpreter,
        place: SandboxHooks,
        *,
        uids: tuple[int, int],
        on_close: Callable[[AsyncSandbox], None],
        home: PrewarmedSandbox | None = None,
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
            home=home,
        )
        self._place = place
        self._frame_budget = place.frame_budget
        self._mounts = place.mounts
        self._uids = uids

    async def prepare(self) -> None:
        """As of any sandbox; no conversation is opened for it."""
        await self._make_group(self._place.uid)
        paths = self._means.paths_of_any(self._interpreter, self.policy)
        first, count = self._uids
        self._decide_key(paths, foreign_uid=not first <= self._host.uid < first + count)

    @property
    def live(self) -> list[Context]:
        """The contexts of all conversations that have a live kernel."""
        return [
            context
            for one in self._conversations.values()
            for context in one.ending
            if context.alive
        ]

    @property
    def busy(self) -> bool:
        """Whether anything runs, waits to run, or starts."""
        return any(one.busy for one in self._conversations.values())

    @property
    def has_unused(self) -> bool:
        """Whether a kernel that was made ahead for it waits here, and nothing goes on."""
        home = self._home
        return home is not None and home.kernel is not None and not self.busy

    async def end_unused(self) -> None:
        """End that kernel, where nobody has used it yet."""
        if self._home is not None:
            await self._home.end_kernel()

    @property
    def stateful(self) -> set[tuple[str, str]]:
        """The contexts that have, or had, a kernel whose end nobody was told of yet, each by its
        conversation and its name."""
        return {
            (name, context.name)
            for name, one in self._conversations.items()
            for context in one.contexts.every
            if context.state_is_kept
        }

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
        await self.end_unused()

    def forget(self, name: str) -> Conversation | None:
        """One of the same name is another one from now on; whoever forgets it ends it, by
        `end_forgotten`."""
        return self._conversations.pop(name, None)

    def _check_name(self, name: str) -> None:
        """Any text that is an id: it is a key of the store, never a path."""
        check_id("conversation_id", name)

    # -- what a sandbox does otherwise when its files are kept ----------------------------------

    def _make_conversation(self, name: str) -> Conversation:
        def wanted() -> bool:
            return self._conversations.get(name) is made

        made = Conversation(
            name,
            self.policy,
            partial(self._open_kept, name, wanted),
            self._starter_of(name),
            self._means.grace_s,
            languages=self._languages,
            lost=partial(self._place.lost, name),
            contexts=self._place.contexts(name),
            limit=self._place.limit,
            whole=self._whole,
        )
        return made

    async def _open_kept(self, name: str, wanted: Callable[[], bool]) -> OpenFiles:
        directory, new = await self._place.directory_of(name, wanted)
        home = self._home
        if home is not None and directory == home.conversation and (held := home.take_files()):
            return held
        return await self._open_files_in(directory, new=new)

    def _starter_of(self, conversation: str) -> StartKernel:
        return partial(self._start_counted, conversation)

    async def _start_counted(self, name: str, context: str, opened: OpenFiles) -> Kernel:
        try:
            async with self._place.starting(name, context):
                kernel = await self._start_kernel(opened, context)
        except BaseException:
            await self.end_unused()  # no more of them than there may be
            raise
        self._place.started(name, context, kernel.receipt)
        return kernel

    def _decided(self, decision: "EgressDecision") -> None:
        self._place.decided(decision)

    def _on_sprung(self, sprung: TokenTriggered) -> None:
        self._place.sprung(sprung)
        super()._on_sprung(sprung)

    async def _leave_files(self) -> None:
        pass


async def end_forgotten(one: Conversation, told: RunError) -> None:
    """End its kernels and runs for good; `told` says why."""
    try:
        await one.halt(told)
    finally:
        await one.close()


async def open_kept(
    runtime: Runtime,
    loaded: Policy,
    decided: Policy,
    place: SandboxHooks,
    home: PrewarmedSandbox | None = None,
) -> KeptSandbox:
    """Return a sandbox whose files outlive it, new or opened again.

    `home` is a prewarmed sandbox over the directory of `place`. It ends with the sandbox, also if
    this raises. Raises CannotEnforce.
    """
    uids = runtime.settings.uid_range
    make = partial(KeptSandbox, place=place, uids=uids, home=home)
    return await runtime.open(loaded, decided, make)
