"""The client without asyncio: the same names, over an event loop in a thread of its own."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from sbx import errors
from sbx.aio import Loop
from sbx.client.client import Client, Json
from sbx.client.conversation import RemoteConversation
from sbx.client.files import OnProgress, RemoteFiles, RemoteUploads
from sbx.client.http import Params
from sbx.client.records import SandboxInfo, Session
from sbx.client.sandbox import DEFAULT_CONVERSATION, RemoteSandbox
from sbx.protocol.files import Upload
from sbx.protocol.mounts import Mount
from sbx.protocol.pages import Page
from sbx.protocol.runs import Event
from sbx.sync.blocking import BlockingConversation, BlockingFiles, BlockingUploads
from sbx.sync.client_agents import BlockingAgentCalls

T = TypeVar("T")


class ConnectedFiles(BlockingFiles):
    """The files of a sandbox in a service, and their way to and from this host."""

    def __init__(self, loop: Loop, inner: RemoteFiles) -> None:
        super().__init__(loop, inner)
        self._remote = inner

    def upload(
        self, source: str | Path, path: str, *, on_progress: OnProgress | None = None
    ) -> int:
        """Copy a file of this host to `path`; its size in bytes."""
        return self._call(self._remote.upload(source, path, on_progress=on_progress))

    def download(self, path: str, to: str | Path, *, on_progress: OnProgress | None = None) -> int:
        """Copy a file to this host, whole or not at all; its size in bytes."""
        return self._call(self._remote.download(path, to, on_progress=on_progress))


class ConnectedUploads(BlockingUploads):
    """The uploads of a sandbox in a service."""

    def __init__(self, loop: Loop, inner: RemoteUploads) -> None:
        super().__init__(loop, inner)
        self._remote = inner

    def put(
        self,
        path: str | Path,
        name: str | None = None,
        *,
        on_progress: OnProgress | None = None,
    ) -> Upload:
        """Copy a file of this host in, under its own name or another; the same name replaces."""
        return self._call(self._remote.put(path, name, on_progress=on_progress))

    def download(self, name: str, to: str | Path, *, on_progress: OnProgress | None = None) -> int:
        """Copy an upload to this host, whole or not at all; its size in bytes."""
        return self._call(self._remote.download(name, to, on_progress=on_progress))


class ConnectedConversation(BlockingConversation):
    """One conversation of a sandbox in a service."""

    files: ConnectedFiles
    uploads: ConnectedUploads

    def __init__(self, loop: Loop, inner: RemoteConversation) -> None:
        super().__init__(
            loop,
            inner,
            ConnectedFiles(loop, inner.files),
            ConnectedUploads(loop, inner.uploads),
        )


class ConnectedSandbox(ConnectedConversation):
    """A sandbox of a service; as `with` it is closed, and so deleted, at the end."""

    def __init__(self, loop: Loop, box: RemoteSandbox) -> None:
        super().__init__(loop, loop.call(_named(box, DEFAULT_CONVERSATION)))
        self._box = box

    @property
    def id(self) -> str:
        return self._box.id

    @property
    def policy(self) -> str | None:
        """Its name, where this client made the sandbox."""
        return self._box.policy

    def info(self) -> SandboxInfo:
        """How it is now."""
        return self._loop.call(self._box.info())

    def conversation(self, name: str) -> ConnectedConversation:
        """A conversation by name; made at its first use when there is none."""
        return ConnectedConversation(self._loop, self._loop.call(_named(self._box, name)))

    def mount(
        self, source: str | Path, target: str | None = None, *, read_only: bool = True
    ) -> str:
        """Show one more directory of the service's host inside; the path there. See
        `RemoteSandbox.mount`."""
        return self._loop.call(self._box.mount(source, target, read_only=read_only))

    def unmount(self, target: str) -> None:
        """Show it no more."""
        self._loop.call(self._box.unmount(target))

    def mounts(self) -> tuple[Mount, ...]:
        """What is mounted now, by the path inside."""
        return self._loop.call(self._box.mounts())

    def unfreeze(self) -> bool:
        """Let kernels start again after a honeytoken was sprung; False where none was."""
        return self._loop.call(self._box.unfreeze())

    def stop(self) -> None:
        """End every kernel; files stay, and the next run starts another one."""
        self._loop.call(self._box.stop())

    def close(self) -> None:
        """End everything and remove every file; a second call does nothing."""
        self._loop.call(self._box.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class BlockingClient(BlockingAgentCalls):
    """A service: `with BlockingClient() as client`. See `Client` for arguments and errors. Calls
    may come from any thread."""

    def __init__(
        self,
        connect: str | os.PathLike[str] | None = None,
        *,
        key: str | None = None,
        timeout: float = 30.0,
        retries: int = 3,
    ) -> None:
        self._client = Client(connect, key=key, timeout=timeout, retries=retries)
        self._made: set[RemoteSandbox] = set()
        self.loop = Loop("sbx-client")

    @property
    def address(self) -> str:
        """The socket's path, or the URL."""
        return self._client.address

    def close(self) -> None:
        """Cut every connection, and end the thread; a second call does nothing."""
        self.loop.end(self._end())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # -- sandboxes --------------------------------------------------------------------------------

    def create(
        self,
        policy: str = "default",
        *,
        narrower: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        ttl_s: float | None = None,
        workspace_id: str | None = None,
        idempotency_key: str | None = None,
    ) -> ConnectedSandbox:
        """A new sandbox; nothing starts before its first use."""
        made = self.loop.call(
            self._client.create(
                policy,
                narrower=narrower,
                env=env,
                ttl_s=ttl_s,
                workspace_id=workspace_id,
                idempotency_key=idempotency_key,
            )
        )
        return ConnectedSandbox(self.loop, made)

    def made(
        self,
        policy: Any,
        *,
        narrower: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> RemoteSandbox:
        """A sandbox that lives no longer than this client: its `close` deletes it."""
        box = self.loop.call(self._client.create(policy, narrower=narrower, env=env))
        self._made.add(box)
        return box

    def sandbox(self, sandbox_id: str) -> ConnectedSandbox:
        """A sandbox that is there, by its id or a session's."""
        return ConnectedSandbox(self.loop, self._client.sandbox(sandbox_id))

    def get(self, sandbox_id: str) -> SandboxInfo:
        """How a sandbox is now. Raises NotFound."""
        return self.loop.call(self._client.get(sandbox_id))

    def sandboxes(
        self,
        *,
        limit: int = 50,
        cursor: str | None = None,
        status: str | None = None,
        all_owners: bool = False,
    ) -> Page[SandboxInfo]:
        """Your sandboxes, by id; of everybody, for an operator, with `all_owners`."""
        return self.loop.call(
            self._client.sandboxes(limit=limit, cursor=cursor, status=status, all_owners=all_owners)
        )

    def inspect(self, sandbox_id: str) -> Json:
        """All that the service knows of a sandbox."""
        return self.loop.call(self._client.inspect(sandbox_id))

    def extend(
        self, sandbox_id: str, by_s: float, *, idempotency_key: str | None = None
    ) -> SandboxInfo:
        """Let it live longer by so many seconds."""
        return self.loop.call(
            self._client.extend(sandbox_id, by_s, idempotency_key=idempotency_key)
        )

    def keepalive(self, sandbox_id: str) -> None:
        """Move its idle time-out; nothing starts."""
        self.loop.call(self._client.keepalive(sandbox_id))

    def stop(self, sandbox_id: str) -> None:
        """End its kernels; files stay."""
        self.loop.call(self._client.stop(sandbox_id))

    def resume(self, sandbox_id: str) -> Json:
        """Start it now instead of with its next use."""
        return self.loop.call(self._client.resume(sandbox_id))

    def delete(self, sandbox_id: str) -> None:
        """End it and remove its files."""
        self.loop.call(self._client.delete(sandbox_id))

    # -- what happened ----------------------------------------------------------------------------

    def history(
        self,
        sandbox_id: str,
        *,
        kind: str | None = None,
        success_only: bool = False,
        limit: int = 100,
        offset: int = 0,
        tags: str | None = None,
    ) -> tuple[list[Json], int]:
        """Runs of a sandbox, the newest first, and how many there are in all."""
        return self.loop.call(
            self._client.history(
                sandbox_id,
                kind=kind,
                success_only=success_only,
                limit=limit,
                offset=offset,
                tags=tags,
            )
        )

    def events(self, sandbox_id: str, *, cursor: str | None = None, limit: int = 100) -> Page[Json]:
        """What became of a sandbox, and why."""
        return self.loop.call(self._client.events(sandbox_id, cursor=cursor, limit=limit))

    def follow_events(self, sandbox_id: str, *, after: int = 0) -> Iterator[tuple[int, Json]]:
        """The same, and what comes."""
        return self.loop.each(self._client.follow_events(sandbox_id, after=after))

    def run_events(
        self, sandbox_id: str, run_id: str, *, after: int = 0
    ) -> Iterator[tuple[int, Event]]:
        """The events of a run, while it lives and for a minute after its end."""
        return self.loop.each(self._client.run_events(sandbox_id, run_id, after=after))

    def interrupt_run(self, sandbox_id: str, run_id: str) -> bool:
        """End this run and no other, also while it waits for its turn."""
        return self.loop.call(self._client.interrupt_run(sandbox_id, run_id))

    # -- workspaces and sessions ------------------------------------------------------------------

    def workspaces(self, *, limit: int = 50, cursor: str | None = None) -> Page[Json]:
        """Workspaces that outlive a sandbox."""
        return self.loop.call(self._client.workspaces(limit=limit, cursor=cursor))

    def create_workspace(
        self, size_limit_mb: int = 1024, *, idempotency_key: str | None = None
    ) -> Json:
        """A workspace of its own, for `create(workspace_id=…)`."""
        return self.loop.call(
            self._client.create_workspace(size_limit_mb, idempotency_key=idempotency_key)
        )

    def delete_workspace(self, workspace_id: str) -> None:
        """Raises Conflict while a sandbox uses it."""
        self.loop.call(self._client.delete_workspace(workspace_id))

    def ensure_session(
        self,
        user_id: str,
        agent_id: str,
        *,
        business_domain_id: str | None = None,
        config: Mapping[str, Any] | None = None,
        max_retries: int = 30,
        retry_interval: float = 0.5,
    ) -> Session:
        """The one session of this user with this agent; see `Client.ensure_session`."""
        return self.loop.call(
            self._client.ensure_session(
                user_id,
                agent_id,
                business_domain_id=business_domain_id,
                config=config,
                max_retries=max_retries,
                retry_interval=retry_interval,
            )
        )

    # -- the operator's ---------------------------------------------------------------------------

    def keys(self) -> list[Json]:
        """Every key, without its text."""
        return self.loop.call(self._client.keys())

    def make_key(self, owner: str, name: str | None = None, *, operator: bool = False) -> Json:
        """A new key; its `key` is the clear text, told this once."""
        return self.loop.call(self._client.make_key(owner, name, operator=operator))

    def revoke_key(self, key_id: str) -> None:
        """It opens nothing any more."""
        self.loop.call(self._client.revoke_key(key_id))

    def tokens(self) -> list[Json]:
        """Every token, without its text."""
        return self.loop.call(self._client.tokens())

    def make_token(
        self,
        *,
        user_id: str,
        agent_id: str | None = None,
        conversation_id: str | None = None,
        scopes: Sequence[str] | None = None,
        ttl_s: float = 3600,
        owner: str | None = None,
    ) -> Json:
        """A new token; its `token` is the clear text, told this once."""
        return self.loop.call(
            self._client.make_token(
                user_id=user_id,
                agent_id=agent_id,
                conversation_id=conversation_id,
                scopes=scopes,
                ttl_s=ttl_s,
                owner=owner,
            )
        )

    def revoke_token(self, token_id: str) -> None:
        """It opens nothing any more."""
        self.loop.call(self._client.revoke_token(token_id))

    def unfreeze(self, sandbox_id: str) -> bool:
        """Let a sandbox run again whose honeytoken was sprung; False where none was."""
        return self.loop.call(self._client.unfreeze(sandbox_id))

    def collect(self, tasks: Sequence[str] | None = None) -> Json:
        """Collect now what is idle, expired or left over."""
        return self.loop.call(self._client.collect(tasks))

    def profiles(self, *, detail: bool = False) -> list[Json]:
        """The policies that a sandbox can be made with."""
        return self.loop.call(self._client.profiles(detail=detail))

    def health(self) -> Json:
        """Whether the service answers, and its version."""
        return self.loop.call(self._client.health())

    def request(
        self,
        method: str,
        path: str,
        *,
        params: Params | None = None,
        json: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """One request as it stands; see `Client.request`."""
        return self.loop.call(
            self._client.request(method, path, params=params, json=json, headers=headers)
        )

    async def _end(self) -> None:
        for box in self._made:
            with suppress(errors.SbxError):  # the service may be gone, and the box with it
                await box.close()
        await self._client.close()


async def _named(box: RemoteSandbox, name: str) -> RemoteConversation:
    return box.conversation(name)
