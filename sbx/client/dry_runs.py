"""Dry runs and checkpoints of a conversation in a service, as the embedded ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sbx import errors
from sbx.client import checks
from sbx.client.conversation_calls import ConversationCalls, encoded
from sbx.client.errors import decode
from sbx.client.http import target
from sbx.protocol.dry_runs import FileChange, from_json
from sbx.protocol.events import run_from_json
from sbx.protocol.runs import Run


@dataclass(slots=True, eq=False)
class RemoteDryRun:
    """A command that ran on a frozen copy, in a service; see `sbx.runtime.DryRun`."""

    id: str
    run: Run
    changes: Sequence[FileChange]
    truncated: bool
    left_out: Sequence[str]
    expires_at: float
    _calls: ConversationCalls = field(repr=False)

    async def commit(self) -> None:
        """Apply the same changes, all or none. Raise Conflict `workspace_changed` if a file that it
        touches has changed since, NotFound `dry_run_not_found`."""
        await self._calls.call_until_done(f"{self._path}/commit", b"")

    async def discard(self) -> None:
        """Delete it. A second call does nothing."""
        await _delete(self._calls, self._path)

    @property
    def _path(self) -> str:
        return f"{self._calls.path}/dry_runs{target(self.id)}"


@dataclass(slots=True, eq=False)
class RemoteCheckpoint:
    """The files at one moment, in a service."""

    id: str
    _calls: ConversationCalls = field(repr=False)

    async def restore(self) -> Sequence[FileChange]:
        """Restore the files, all or none. Return the changes. Raise Conflict `workspace_changed` if
        another program writes meanwhile, NotFound `checkpoint_not_found`."""
        reply = await self._calls.call_until_done(f"{self._path}/restore", b"")
        return decode("list of changes", _changes, reply)

    async def discard(self) -> None:
        """Delete it. A second call does nothing."""
        await _delete(self._calls, self._path)

    @property
    def _path(self) -> str:
        return f"{self._calls.path}/checkpoints{target(self.id)}"


async def dry_run(
    calls: ConversationCalls, command: str, timeout: float | None, cwd: str | None
) -> RemoteDryRun:
    """Start a dry run. If the call is cancelled, the connection is closed, and the service deletes
    the dry run."""
    request: dict[str, Any] = {"command": checks.text(command, "command")}
    if (seconds := checks.timeout(timeout)) is not None:
        request["timeout"] = seconds
    if cwd is not None:
        request["cwd"] = checks.path(cwd)

    def read(data: Mapping[str, Any]) -> RemoteDryRun:
        return RemoteDryRun(
            str(data["id"]),
            run_from_json(data["run"]),
            _changes(data),
            bool(data["truncated"]),
            tuple(map(str, data["left_out"])),
            float(data["expires_at"]),
            calls,
        )

    reply = await calls.call_until_done(f"{calls.path}/dry_runs", encoded(request))
    return decode("dry run", read, reply)


async def checkpoint(calls: ConversationCalls) -> RemoteCheckpoint:
    """Save the current files."""
    reply = await calls.call_until_done(f"{calls.path}/checkpoints", b"")
    return decode("checkpoint", lambda data: RemoteCheckpoint(str(data["id"]), calls), reply)


async def _delete(calls: ConversationCalls, path: str) -> None:
    try:
        await calls.call("DELETE", path, again=True)
    except errors.NotFound as error:
        if error.code not in ("dry_run_not_found", "checkpoint_not_found"):
            raise


def _changes(data: Mapping[str, Any]) -> tuple[FileChange, ...]:
    return tuple(map(from_json, data["changes"]))
