"""How the sandboxes of a service differ from others: the service gives them directories that
outlive them, limits the starts of their kernels, and remembers their conversations and contexts.

    SandboxHooks        the conversations of one sandbox in the store, as long as this process lives
    PersistentSandbox   the sandbox while it is open; it asks the hooks before and after each start
"""

import asyncio
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from sbx import errors
from sbx.aio import in_thread
from sbx.isolation.launch_plan import Interpreter
from sbx.kernels.kernel import Kernel
from sbx.policy import Policy
from sbx.policy.grants import GrantChange
from sbx.protocol.contexts import DEFAULT_CONTEXT
from sbx.protocol.grants import Grant
from sbx.protocol.receipt import Receipt
from sbx.protocol.runs import RunError
from sbx.runtime.conversation import Conversation
from sbx.runtime.files.files import OpenFiles
from sbx.runtime.honeytokens import TokenTriggered
from sbx.runtime.live_mounts import LiveMounts
from sbx.runtime.prewarm import PrewarmedSandbox
from sbx.runtime.resources import RuntimeResources
from sbx.runtime.run.context import Context
from sbx.runtime.run.context_kernel import StartKernel
from sbx.runtime.run.contexts import ContextStore
from sbx.runtime.sandbox import DEFAULT_CONVERSATION, AsyncSandbox
from sbx.service.ids import check_id
from sbx.service.lifecycle import Act
from sbx.service.record import SandboxRecord
from sbx.store import conversations as conversations_table
from sbx.store.conversations import ContextRow, ConversationRow
from sbx.telemetry.host_paths import hide_in

if TYPE_CHECKING:
    from sbx.egress import EgressDecision

CONVERSATIONS_MAX = 1000
_ENTRIES = 20_000
_MEASURE_S = 0.2
_NO_FAILURE = {
    "stopped",
    "closed",
    "too_many_kernels",
    "sandbox_expired",
    "not_found",
    "honeytoken",
}
LostContexts = frozenset[tuple[str, str]]  # of (conversation, context)


class SandboxHooks:
    """The open sandbox calls `directory`, `before_start` and `after_start`."""

    def __init__(
        self, record: SandboxRecord, lost: LostContexts = frozenset(), *, new: bool = False
    ) -> None:
        """`lost`: the contexts whose kernel ended without a report. `new`: the store has no
        conversation of this sandbox yet."""
        self.record = record
        self.lost = set(lost)
        self.naming = asyncio.Lock()  # is locked while a conversation is made or deleted
        self.created: set[str] = set()  # conversations that no request has used successfully yet
        self._store = record.dependencies.store
        self._conversations: dict[str, ConversationRow] | None = {} if new else None
        # In addition to `default`, by conversation.
        self._contexts: dict[str, set[str]] | None = {} if new else None

    async def directory(self, name: str, is_current: Callable[[], bool]) -> tuple[str, bool]:
        """Return the opaque directory of a conversation, and whether it is new.

        Raises Closed unless `is_current()`: the conversation that asks was deleted while it waited.
        Raises Conflict `too_many_conversations`.
        """
        async with self.naming:
            if not is_current():
                raise errors.Closed(
                    f"the conversation {name[:80]!r} was deleted meanwhile",
                    hint="use it again: its files and state are gone",
                )
            conversations = await self.conversations()
            if (row := conversations.get(name)) is not None:
                return row.directory, False
            if len(conversations) >= CONVERSATIONS_MAX:
                raise errors.Conflict(
                    f"a sandbox has at most {CONVERSATIONS_MAX} conversations",
                    code="too_many_conversations",
                )
            now, record = self.record.now, self.record
            new_name = record.dependencies.runtime.data.new_name()
            new = ConversationRow(record.id, name, new_name, now, now)
            row = await self._store.write(
                partial(
                    conversations_table.add_conversation, row=new, workspace_id=record.workspace.id
                )
            )
            conversations[name] = row
            if row.directory == new_name:
                self.created.add(name)
            return row.directory, row.directory == new_name

    async def before_start(self, conversation: str, context: str) -> None:
        """Count a kernel that is about to start, and make room for it; `after_start` must follow.

        Raises Conflict `sandbox_expired`, the refusal of a frozen sandbox, and Unavailable
        `too_many_kernels`; then `after_start` must not follow.
        """
        record = self.record
        record.check(Act.START)
        record.check_frozen()
        record.starts += 1
        try:
            await record.dependencies.make_room(record.row.owner)
            record.check(Act.START)
        except BaseException as error:
            self.after_start(conversation, context, error)
            raise

    def after_start(self, conversation: str, context: str, end: Receipt | BaseException) -> None:
        """Record the start of a kernel, by its receipt, or the error that prevented it.

        Raises Unavailable `session_not_ready` for an error after which another try is useful.
        """
        record = self.record
        record.starts -= 1
        if isinstance(end, BaseException):
            if not isinstance(end, errors.SbxError):
                return
            hide_in(end)
            if end.code not in _NO_FAILURE:
                record.set_failed(end)
            if end.code in ("start_timeout", "start_failed"):
                raise _not_ready(record.id, end) from end
            return
        self.lost.discard((conversation, context))
        if record.row.stopped or record.row.failure is not None:
            record.set_stopped(stopped=False, failure=None)
        names = kernel_name(conversation, context)
        record.emit("started", **names)
        if record.dependencies.audit is not None:  # signed, and no caller waits for it
            details = partial(_receipt_details, end, {"owner": record.row.owner, **names})
            record.dependencies.audit.note_by("sbx", "kernel.start", record.id, details)

    async def load(self) -> None:
        """Read the conversations and contexts from the store, once."""
        await self.conversations()
        if self._contexts is None:
            self._contexts = await conversations_table.contexts(self._store, self.record.id)

    async def conversations(self) -> dict[str, ConversationRow]:
        if self._conversations is None:
            stored = await conversations_table.conversations(self._store, self.record.id)
            if self._conversations is None:
                self._conversations = {row.name: row for row in stored}
        return self._conversations

    async def exists(self, name: str) -> bool:
        """Return whether there is this conversation: `default` always, and one that another sandbox
        of the same workspace made."""
        if name == DEFAULT_CONVERSATION or name in await self.conversations():
            return True
        workspace = self.record.workspace
        return workspace.managed_by is None and await conversations_table.conversation_in_workspace(
            self._store, workspace.id, name
        )

    def forget(self, name: str) -> None:
        """Forget a conversation that was deleted; one of the same name begins from nothing."""
        self.lost = {key for key in self.lost if key[0] != name}
        self.created.discard(name)
        if self._contexts is not None:
            self._contexts.pop(name, None)
        if self._conversations is not None:
            self._conversations.pop(name, None)

    def contexts_of(self, conversation: str) -> ContextStore:
        """Return the store of its contexts other than `default`; it is valid until the conversation
        is deleted."""
        assert self._contexts is not None
        names = self._contexts.setdefault(conversation, set())
        return ContextStore(
            tuple(sorted(names)),
            add=partial(self._add_context, conversation, names),
            drop=partial(self._drop_context, conversation, names),
        )

    def _is_current(self, conversation: str, names: set[str]) -> bool:
        return self._contexts is not None and self._contexts.get(conversation) is names

    async def _add_context(self, conversation: str, names: set[str], name: str) -> None:
        stored = (await self.conversations()).get(conversation)
        if stored is not None and self._is_current(conversation, names):
            row = ContextRow(self.record.id, conversation, name, self.record.now)
            add = partial(conversations_table.add_context, row=row, directory=stored.directory)
            names.add(name)  # before the wait: a drop that comes meanwhile removes it again
            if await self._store.write(add):
                return
        raise errors.NotFound(f"conversation {conversation[:80]!r} no longer exists")

    async def _drop_context(self, conversation: str, names: set[str], name: str) -> None:
        names.discard(name)
        if self._is_current(conversation, names):
            self.lost.discard((conversation, name))
            drop = partial(
                conversations_table.drop_context,
                sandbox_id=self.record.id,
                conversation=conversation,
                name=name,
            )
            await self._store.write(drop)
            await self._store.fold()


class PersistentSandbox(AsyncSandbox):
    """A sandbox whose files, id and host uid outlive it: `close` ends everything and leaves the
    files."""

    def __init__(
        self,
        resources: RuntimeResources,
        policy: Policy,
        loaded: Policy,
        interpreter: Interpreter,
        hooks: SandboxHooks,
        mounts: LiveMounts,
        *,
        on_close: Callable[[AsyncSandbox], None],
        prewarmed: PrewarmedSandbox | None = None,
    ) -> None:
        """`mounts` outlive this object. `prewarmed`: a prewarmed sandbox over the directory of the
        workspace; it ends with this one."""
        record = hooks.record
        super().__init__(
            resources,
            policy,
            loaded,
            interpreter,
            workspace=None,
            uploads=None,
            on_close=on_close,
            id=record.id,
            directory=record.workspace.directory,
            prewarmed=prewarmed,
        )
        self._hooks = hooks
        self._frame_budget = record.dependencies.frame_budgets.of(record.row.owner)
        self._mounts = mounts

    async def prepare(self) -> None:
        """Prepare as any sandbox does, but open no conversation."""
        record = self._hooks.record
        await self._make_group(record.workspace.uid)
        paths = self._resources.paths_of_any(self._interpreter, self.policy)
        first, count = record.dependencies.settings.uid_range
        self._decide_key(paths, foreign_uid=not first <= self._host.uid < first + count)

    @property
    def live(self) -> list[Context]:
        """Return the contexts of all conversations that have a live kernel."""
        return [
            context
            for conversation in self._conversations.values()
            for context in conversation.ending
            if context.alive
        ]

    @property
    def busy(self) -> bool:
        return any(conversation.busy for conversation in self._conversations.values())

    @property
    def has_unused(self) -> bool:
        """Return whether a prewarmed kernel waits here, and nothing runs or starts."""
        prewarmed = self._prewarmed
        return prewarmed is not None and prewarmed.kernel is not None and not self.busy

    async def end_unused(self) -> None:
        if self._prewarmed is not None:
            await self._prewarmed.end_kernel()

    @property
    def stateful(self) -> set[tuple[str, str]]:
        """Return the contexts that have a kernel, or had one whose end no run has reported yet:
        (conversation, context)."""
        return {
            (name, context.name)
            for name, conversation in self._conversations.items()
            for context in conversation.contexts.every
            if context.state_is_kept
        }

    def existing(self, name: str) -> Conversation | None:
        """Return the conversation if it was used since this was opened."""
        return self._conversations.get(name)

    async def measured(self, directory: str) -> tuple[int, int]:
        """Return the number and the bytes of a conversation's files and uploads, as far as they can
        be counted in a moment."""
        return await in_thread(self._measured, directory)

    def _measured(self, directory: str) -> tuple[int, int]:
        owner = (self._host.uid, self._host.gid)
        own = owner if owner[0] != os.geteuid() else None
        with self._resources.data.conversation(self._directory, directory, owner=own) as opened:
            usage = opened.files.measure(max_entries=_ENTRIES, deadline_s=_MEASURE_S)
            uploads = opened.uploads.list()
        size = usage.bytes + sum(upload.size for upload in uploads)
        return usage.files + len(uploads), size

    async def halt(self, reason: RunError) -> None:
        """End every kernel, and every run that runs or waits, with this reason."""
        for conversation in list(self._conversations.values()):
            await conversation.halt(reason)
        await self.end_unused()

    def forget(self, name: str) -> Conversation | None:
        """Forget a conversation, which the caller must `halt` and `close`."""
        return self._conversations.pop(name, None)

    # -- differences from a sandbox without hooks -------------------------------------------------

    def _check_name(self, name: str) -> None:
        check_id("conversation_id", name)  # it is a key of the store, never a path

    def _make_conversation(self, name: str) -> Conversation:
        def is_current() -> bool:
            return self._conversations.get(name) is conversation

        hooks = self._hooks
        conversation = Conversation(
            name,
            self.policy,
            partial(self._open_conversation, name, is_current),
            self._starter_of(name),
            self._resources.grace_s,
            languages=self._languages,
            lost=lambda context: (name, context) in hooks.lost,
            contexts=hooks.contexts_of(name),
            limit=hooks.record.dependencies.open_limit,
            grants=self._new_grants(name),
            whole=self._whole,
        )
        return conversation

    async def _open_conversation(self, name: str, is_current: Callable[[], bool]) -> OpenFiles:
        directory, new = await self._hooks.directory(name, is_current)
        prewarmed = self._prewarmed
        if (
            prewarmed is not None
            and directory == prewarmed.conversation
            and (opened := prewarmed.take_files())
        ):
            return opened
        return await self._open_files_in(directory, new=new)

    def _starter_of(self, conversation: str) -> StartKernel:
        return partial(self._start_counted, conversation)

    async def _start_counted(self, conversation: str, context: str, opened: OpenFiles) -> Kernel:
        hooks = self._hooks
        try:
            await hooks.before_start(conversation, context)
            try:
                kernel = await self._start_kernel(opened, conversation, context)
            except BaseException as error:
                hooks.after_start(conversation, context, error)
                raise
        except BaseException:
            await self.end_unused()  # it would count in addition to the limits
            raise
        hooks.after_start(conversation, context, kernel.receipt)
        return kernel

    def _grant_changed(self, conversation: str, change: GrantChange, grant: Grant) -> None:
        super()._grant_changed(conversation, change, grant)
        self._hooks.record.note_grant(conversation, change, grant)

    def _decided(self, decision: "EgressDecision") -> None:
        self._hooks.record.egress_log.add(decision)

    def _on_sprung(self, sprung: TokenTriggered) -> None:
        self._hooks.record.freeze(sprung)
        super()._on_sprung(sprung)

    async def _leave_files(self) -> None:
        pass


def kernel_name(conversation: str, context: str) -> dict[str, str]:
    """Return the details that name the kernel of an event; `default` needs no name."""
    named = {} if context == DEFAULT_CONTEXT else {"context": context}
    return {"conversation": conversation, **named}


def _receipt_details(receipt: Receipt, about: Mapping[str, str]) -> dict[str, Any]:
    details = receipt.to_dict()
    # The guest chose the reasons of `preload_failed`, and their length.
    details["preload_failed"] = sorted(module[:80] for module in details["preload_failed"])[:20]
    return {**about, "sha256": receipt.digest, "receipt": details}


def _not_ready(sandbox_id: str, error: errors.SbxError) -> errors.Unavailable:
    return errors.Unavailable(
        error.message,
        code="session_not_ready",
        hint="try again: the next call starts another kernel",
        details={
            "sandbox_id": sandbox_id,
            "cause": error.code,
            "retry_after_ms": 1000,
            "retry_after_s": 1.0,
        },
    )
