"""The tools of one agent, by name."""

import asyncio
import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

from sbx.agent.messages import ToolCall, carried
from sbx.agent.tools.arguments import nearest, parse_arguments
from sbx.agent.tools.files import EDIT_FILE, LIST_FILES, READ_FILE, WRITE_FILE
from sbx.agent.tools.following import unheard
from sbx.agent.tools.results import RESULT_MAX, capped, cut, failed
from sbx.agent.tools.running import EXECUTE_COMMAND, RUN_CODE, told
from sbx.agent.tools.tool import (
    Arguments,
    Call,
    Emit,
    Tool,
    ToolDefinition,
    ToolResult,
)
from sbx.errors import Conflict, NotFound, SbxError
from sbx.protocol.runs import Run

if TYPE_CHECKING:
    from sbx.agent.sandbox import Sandbox

_log = logging.getLogger(__name__)
_CALL_MAX_S = 3600.0
_SHARED = 4  # results of the largest size that one answer may be told
_SAID_MAX = 2000  # characters of an exception that is none of ours


def builtin() -> tuple[Tool, ...]:
    """The six tools on a sandbox: code, commands, files."""
    return RUN_CODE, EXECUTE_COMMAND, READ_FILE, WRITE_FILE, EDIT_FILE, LIST_FILES


class Tools:
    """Whoever has a call of a model gives it here, as it came: what is wrong with it, and what goes
    wrong during it, becomes a result that tells the model."""

    def __init__(
        self,
        tools: Iterable[Tool] | None = None,
        *,
        result_max: int = RESULT_MAX,
        call_max_s: float = _CALL_MAX_S,
    ) -> None:
        """None: the built-in ones. A result of more than `result_max` characters is cut, and kept
        whole in a file. A call takes at most `call_max_s` seconds."""
        self._tools: dict[str, Tool] = {}
        self._result_max = result_max
        self._call_max_s = call_max_s
        for one in builtin() if tools is None else tools:
            self.add(one)

    def add(self, tool: Tool) -> None:
        """Raises Conflict `tool_exists`."""
        if tool.name in self._tools:
            raise Conflict(f"there is a tool {tool.name} already", code="tool_exists")
        self._tools[tool.name] = tool

    def __iter__(self) -> Iterator[Tool]:
        return iter(self._tools.values())

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tools)

    def definitions(self) -> tuple[ToolDefinition, ...]:
        return tuple(tool.definition for tool in self)

    def get(self, name: str) -> Tool:
        """Raises NotFound `tool_not_found`, which names those there are, the nearest first."""
        if (found := self._tools.get(name)) is not None:
            return found
        order = nearest(name, self.names)
        raise NotFound(
            f"there is no tool {name!r:.80}",
            code="tool_not_found",
            hint=f"there are: {', '.join(order)}" if order else "there are no tools here",
            details={"available": order},
        )

    async def ready(self) -> None:
        """Import in a thread what `parse` imports at its first call. The optional parser of
        addresses of JSON Schema takes 3 s of CPU where Jupyter is installed: too long for the start
        of a service, and for its event loop."""
        await asyncio.to_thread(import_module, "jsonschema")

    def parse(self, call: ToolCall) -> Arguments | ToolResult:
        """The arguments of a call, which fit its tool's schema by then, or the error for the model:
        unknown tool, no JSON, a wrong field."""
        try:
            return parse_arguments(self.get(call.name).definition, call.arguments)
        except SbxError as error:
            return failed(error)

    async def call(self, call: ToolCall, sandbox: "Sandbox", emit: Emit) -> ToolResult:
        """`parse` and `make`; raises nothing but CancelledError."""
        await self.ready()
        arguments = self.parse(call)
        if isinstance(arguments, ToolResult):
            return arguments
        return await self.make(call, arguments, sandbox, emit)

    async def make(
        self, call: ToolCall, arguments: Arguments, sandbox: "Sandbox", emit: Emit, *, of: int = 1
    ) -> ToolResult:
        """Make a call, with the arguments that `parse` gave; raises nothing but CancelledError.
        Whether it may be made was decided before. It is one `of` so many, which share what one
        answer may be told."""
        made = Call(call.id, sandbox, emit)
        result = await self._acted(self._tools[call.name], made, arguments)
        text = await capped(made, call.name, carried(result.text), self._most(of))
        return replace(result, text=text)

    async def told(
        self, call: ToolCall, run: Run, sandbox: "Sandbox", *, of: int = 1
    ) -> ToolResult:
        """What a command's run came to, where it was run elsewhere: as execute_command tells it."""
        made = Call(call.id, sandbox, unheard)
        text = await capped(made, call.name, carried(told(run)), self._most(of))
        return ToolResult(text, is_error=not run.ok)

    def _most(self, of: int) -> int:
        return min(self._result_max, self._result_max * _SHARED // of)

    async def _acted(self, tool: Tool, call: Call, arguments: Arguments) -> ToolResult:
        try:
            async with asyncio.timeout(self._call_max_s) as limit:
                said = await tool.act(call, arguments)
        except SbxError as error:
            return failed(error)
        except Exception as error:  # noqa: BLE001  # the border of a tool call: the loop goes on
            if isinstance(error, TimeoutError) and limit.expired():
                return ToolResult(
                    f"Error: {tool.name} took longer than {self._call_max_s:g} s", True
                )
            _log.exception("the tool %s failed", tool.name)
            said = cut(str(error), _SAID_MAX)
            return ToolResult(f"Error: {tool.name} failed: {type(error).__name__}: {said}", True)
        return ToolResult(said) if isinstance(said, str) else said
