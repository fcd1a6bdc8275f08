"""Undo the file changes of the last steps of an agent."""

from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from sbx.agent.messages import Message, Response, ToolCall
from sbx.agent.models import Model, TextDelta
from sbx.agent.sandbox import FileChange, ToolSandbox
from sbx.agent.tools.registry import Tools
from sbx.agent.tools.tool import ToolDefinition, ToolResult
from sbx.errors import NotFound, SbxError, Unavailable
from sbx.protocol.dry_runs import CHECKPOINTS_MAX

if TYPE_CHECKING:
    from sbx.client.dry_runs import RemoteCheckpoint
    from sbx.runtime.snapshots.checkpoints import Checkpoint


class Undo:
    """Take a checkpoint before each step in which a tool may change files. Keep the last few."""

    def __init__(self, sandbox: ToolSandbox, tools: Tools) -> None:
        self._sandbox = sandbox
        self._tools = tools
        self._checkpoints: deque[Checkpoint | RemoteCheckpoint] = deque()
        self._refusal: SbxError | None = None

    async def before(self, calls: Sequence[ToolCall]) -> None:
        """Take a checkpoint before these calls. If that fails, `back` raises the reason."""
        if not any(self._acts(call) for call in calls):
            return
        if not hasattr(self._sandbox, "checkpoint"):
            self._refusal = Unavailable(
                "changes of files on this host cannot be undone", code="no_undo"
            )
            return
        while len(self._checkpoints) >= CHECKPOINTS_MAX - 1:
            await self._checkpoints.popleft().discard()
        try:
            self._checkpoints.append(await self._sandbox.checkpoint())
            self._refusal = None
        except SbxError as error:
            self._refusal = error
            await self.close()  # the older checkpoints would undo more than one step

    async def back(self) -> Sequence[FileChange]:
        """Undo the last step that changed a file, and return the changes.

        Raise NotFound `nothing_to_undo`, or the reason why the last step has no checkpoint.
        """
        if self._refusal is not None:
            raise self._refusal
        while self._checkpoints:
            checkpoint = self._checkpoints.pop()
            try:
                changes = await checkpoint.restore()
            finally:
                await checkpoint.discard()
            if changes:
                return changes
        raise NotFound("no step changed a file", code="nothing_to_undo")

    async def close(self) -> None:
        while self._checkpoints:
            await self._checkpoints.pop().discard()

    def _acts(self, call: ToolCall) -> bool:
        arguments = self._tools.parse(call)
        if isinstance(arguments, ToolResult):
            return False  # the call is invalid, so it is not executed
        return self._tools.get(call.name).effect(arguments) != "read"


class Watched:
    """A model that reports each answer to `undo` before the agent executes its tool calls."""

    def __init__(self, model: Model, undo: Undo) -> None:
        self._model = model
        self._undo = undo

    @property
    def name(self) -> str:
        return self._model.name

    @property
    def takes_images(self) -> bool:
        return self._model.takes_images

    async def complete(
        self, system: str, messages: Sequence[Message], tools: Sequence[ToolDefinition]
    ) -> Response:
        response = await self._model.complete(system, messages, tools)
        await self._undo.before(response.tool_calls)
        return response

    async def stream(
        self, system: str, messages: Sequence[Message], tools: Sequence[ToolDefinition]
    ) -> AsyncGenerator[TextDelta | Response, None]:
        async with aclosing(self._model.stream(system, messages, tools)) as pieces:
            async for piece in pieces:
                if isinstance(piece, Response):
                    await self._undo.before(piece.tool_calls)
                yield piece

    async def close(self) -> None:
        await self._model.close()
