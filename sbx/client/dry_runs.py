"""Dry runs and checkpoints of a conversation over there, as the embedded ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sbx import errors
from sbx.client import checks
from sbx.client.conversation_calls import ConversationCalls, encoded
from sbx.client.http import target
from sbx.protocol.dry_runs import FileChange, from_json
from sbx.protocol.events import run_from_json
from sbx.protocol.runs import Run


@dataclass(slots=True, eq=False)
class RemoteDryRun:
    """A command that was run on a frozen copy, in a service; see `sbx.runtime.DryRun`."""

    id: str
    run: Run
    changes: Sequence[FileChange]
    truncated: bool
    left_out: Sequence[str]
    expires_at: float
    _talk: ConversationCalls = field(repr=False)

    async def commit(self) -> None:
        """Make the very same changes, all or none. Raises Conflict `workspace_changed` when what it
        touches is not as it was, NotFound `dry_run_not_found`."""
        await self._talk.call_until_done(f"{self._path}/commit", b"")

    async def discard(self) -> None:
        """Nothing of it remains. A second time does nothing."""
        await _delete(self._talk, self._path)

    @property
    def _path(self) -> str:
        return f"{self._talk.path}/dry_runs{target(self.id)}"


@dataclass(slots=True, eq=False)
class RemoteCheckpoint:
    """Files as they were at a moment, in a service."""

    id: str
    _talk: ConversationCalls = field(repr=False)

    async def restore(self) -> Sequence[FileChange]:
        """Make the files so again, all or none, and tell what that changed. Raises Conflict
        `workspace_changed` when somebody writes meanwhile, NotFound `checkpoint_not_found`."""
        return _changes(await self._talk.call_until_done(f"{self._path}/restore", b""))

    async def discard(self) -> None:
        """Nothing of it remains. A second time does nothing."""
        await _delete(self._talk, self._path)

    @property
    def _path(self) -> str:
        return f"{self._talk.path}/checkpoints{target(self.id)}"


async def dry_run(
    talk: ConversationCalls, command: str, timeout: float | None, cwd: str | None
) -> RemoteDryRun:
    """When the caller goes the connection is cut, and the service leaves nothing of it."""
    ask: dict[str, Any] = {"command": checks.text(command, "command")}
    if (seconds := checks.timeout(timeout)) is not None:
        ask["timeout"] = seconds
    if cwd is not None:
        ask["cwd"] = checks.path(cwd)
    told = await talk.call_until_done(f"{talk.path}/dry_runs", encoded(ask))
    try:
        return RemoteDryRun(
            str(told["id"]),
            run_from_json(told["run"]),
            _changes(told),
            bool(told["truncated"]),
            tuple(map(str, told["left_out"])),
            float(told["expires_at"]),
            talk,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _foreign(error) from error


async def checkpoint(talk: ConversationCalls) -> RemoteCheckpoint:
    """The files as they are now."""
    told = await talk.call_until_done(f"{talk.path}/checkpoints", b"")
    try:
        return RemoteCheckpoint(str(told["id"]), talk)
    except (KeyError, TypeError) as error:
        raise _foreign(error) from error


async def _delete(talk: ConversationCalls, path: str) -> None:
    try:
        await talk.call("DELETE", path, again=True)
    except errors.NotFound as error:
        if error.code not in ("dry_run_not_found", "checkpoint_not_found"):
            raise


def _changes(told: Mapping[str, Any]) -> tuple[FileChange, ...]:
    try:
        return tuple(map(from_json, told["changes"]))
    except (KeyError, TypeError, ValueError) as error:
        raise _foreign(error) from error


def _foreign(error: Exception) -> errors.Broken:
    return errors.Broken(
        f"the service told of changes that are none: {error}", code="foreign_reply"
    )
