"""The tools of one agent, by name."""

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from typing import TYPE_CHECKING

from msgspec.structs import replace

from sbx.agent.messages import ToolCall, carried
from sbx.agent.tools.access import NAME as REQUEST_ACCESS
from sbx.agent.tools.access import access_tool, grants_of
from sbx.agent.tools.arguments import nearest, parse_arguments
from sbx.agent.tools.execution import EXECUTE_COMMAND, RUN_CODE, describe_run, unheard
from sbx.agent.tools.files import EDIT_FILE, LIST_FILES, READ_FILE, WRITE_FILE
from sbx.agent.tools.plan import PLAN
from sbx.agent.tools.results import RESULT_MAX, capped, cut, failed
from sbx.agent.tools.tool import Arguments, Emit, Tool, ToolCallRequest, ToolDefinition, ToolResult
from sbx.errors import Conflict, NotFound, SbxError, Unavailable
from sbx.protocol.approvals import ApprovalDecision
from sbx.protocol.runs import Run
from sbx.protocol.surroundings import Surroundings

if TYPE_CHECKING:
    from sbx.agent.sandbox import ToolSandbox

_log = logging.getLogger(__name__)
_CALL_MAX_S = 3600.0
_RETRY_S, _RETRY_MAX_S = 0.2, 5.0  # the first pause, which doubles, and the longest
_SHARED = 4  # the limit for one answer, in results of the maximum size
_ERROR_TEXT_MAX = 2000  # characters of an exception that is not an SbxError


def builtin() -> tuple[Tool, ...]:
    """Return the six tools that act on a sandbox: code, commands, files."""
    return RUN_CODE, EXECUTE_COMMAND, READ_FILE, WRITE_FILE, EDIT_FILE, LIST_FILES


def optional() -> tuple[Tool, ...]:
    """Return the tools that only a profile adds."""
    return (PLAN,)


class Tools:
    """The tools of an agent. It accepts calls exactly as a model wrote them. An invalid call, and a
    call that fails, returns a result for the model."""

    def __init__(
        self,
        tools: Iterable[Tool] | None = None,
        *,
        result_max: int = RESULT_MAX,
        call_max_s: float = _CALL_MAX_S,
        retries: Mapping[str, int] | None = None,
    ) -> None:
        """`tools` None means the built-in tools. A result of more than `result_max` characters is
        shortened, and the full text is stored in a file. A call may take at most `call_max_s`
        seconds. `retries`: how often a failed call of an idempotent tool is repeated, by the name
        of the tool or of its source."""
        self._tools: dict[str, Tool] = {}
        self._result_max = result_max
        self._call_max_s = call_max_s
        self._retries = dict(retries or {})
        for tool in builtin() if tools is None else tools:
            self.add(tool)

    def add(self, tool: Tool) -> None:
        """Add a tool. Raise Conflict `tool_exists`."""
        if tool.name in self._tools:
            raise Conflict(f"the tool {tool.name} already exists", code="tool_exists")
        self._tools[tool.name] = tool

    def with_access(self, sandbox: "ToolSandbox") -> "Tools":
        """Return these tools, with `request_access` if the policy of the sandbox permits grants."""
        if (grants := grants_of(sandbox)) is None:
            return self
        more = copy(self)
        more._tools = {**self._tools, REQUEST_ACCESS: access_tool(grants)}
        return more

    def __iter__(self) -> Iterator[Tool]:
        return iter(self._tools.values())

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tools)

    def definitions(self, around: Surroundings | None = None) -> tuple[ToolDefinition, ...]:
        """Return the definitions for a model: only of tools that exist in these surroundings."""
        if around is None:
            return tuple(tool.definition for tool in self)
        defined = (tool.define(around) if tool.define else tool.definition for tool in self)
        return tuple(definition for definition in defined if definition is not None)

    def get(self, name: str) -> Tool:
        """Return a tool. Raise NotFound `tool_not_found`, which lists the tools, the nearest name
        first."""
        if (tool := self._tools.get(name)) is not None:
            return tool
        order = nearest(name, self.names)
        raise NotFound(
            f"tool {name!r:.80} does not exist",
            code="tool_not_found",
            hint=f"there are: {', '.join(order)}" if order else "there are no tools here",
            details={"available": order},
        )

    def parse(self, call: ToolCall) -> Arguments | ToolResult:
        """Return the arguments of a call, checked against the schema of its tool. Or return the
        error for the model: an unknown tool, invalid JSON, a wrong field."""
        try:
            return parse_arguments(self.get(call.name).definition, call.arguments)
        except SbxError as error:
            return failed(error)

    async def call(self, call: ToolCall, sandbox: "ToolSandbox", emit: Emit) -> ToolResult:
        """Call `parse` and `make`. Raise nothing but CancelledError."""
        arguments = self.parse(call)
        if isinstance(arguments, ToolResult):
            return arguments
        return await self.make(call, arguments, sandbox, emit)

    async def make(
        self,
        call: ToolCall,
        arguments: Arguments,
        sandbox: "ToolSandbox",
        emit: Emit,
        *,
        of: int = 1,
        decision: ApprovalDecision | None = None,
    ) -> ToolResult:
        """Make a call with the arguments that `parse` returned. Raise nothing but CancelledError.
        The caller has already checked that the call is allowed. `of` is the number of calls in the
        answer: they share the maximum size of results."""
        active_call = ToolCallRequest(call.id, sandbox, emit, decision)
        result = await self._acted(self._tools[call.name], active_call, arguments)
        text = await capped(active_call, call.name, carried(result.text), self._limit(of))
        return replace(result, text=text)

    async def describe(
        self, call: ToolCall, run: Run, sandbox: "ToolSandbox", *, of: int = 1
    ) -> ToolResult:
        """Return the result of a command that ran elsewhere, in the form of execute_command."""
        active_call = ToolCallRequest(call.id, sandbox, unheard)
        text = await capped(active_call, call.name, carried(describe_run(run)), self._limit(of))
        return ToolResult(text, is_error=not run.ok)

    def _limit(self, of: int) -> int:
        return min(self._result_max, self._result_max * _SHARED // of)

    async def _repeated(
        self, tool: Tool, call: ToolCallRequest, arguments: Arguments
    ) -> ToolResult | str:
        retries = self._retries.get(tool.name) or self._retries.get(tool.source or "", 0)
        if not (tool.idempotent and retries):
            return await tool.act(call, arguments)
        from tenacity import (  # rarely needed
            AsyncRetrying,
            retry_if_exception,
            stop_after_attempt,
            wait_exponential,
        )

        repeat = AsyncRetrying(
            stop=stop_after_attempt(1 + retries),
            wait=wait_exponential(multiplier=_RETRY_S, max=_RETRY_MAX_S),
            retry=retry_if_exception(_may_pass),
            reraise=True,
        )
        return await repeat(tool.act, call, arguments)

    async def _acted(self, tool: Tool, call: ToolCallRequest, arguments: Arguments) -> ToolResult:
        grants = grants_of(call.sandbox)  # a person may have granted a longer run
        call_max_s = self._call_max_s if grants is None else max(self._call_max_s, grants.wall_time)
        try:
            async with asyncio.timeout(call_max_s) as limit:
                output = await self._repeated(tool, call, arguments)
        except SbxError as error:
            return failed(error)
        except Exception as error:  # noqa: BLE001  # the boundary of a tool call: the loop continues
            if isinstance(error, TimeoutError) and limit.expired():
                return ToolResult(f"Error: {tool.name} took longer than {call_max_s:g} s", True)
            _log.exception("the tool %s failed", tool.name)
            output = cut(str(error), _ERROR_TEXT_MAX)
            return ToolResult(f"Error: {tool.name} failed: {type(error).__name__}: {output}", True)
        return ToolResult(output) if isinstance(output, str) else output


def _may_pass(error: BaseException) -> bool:
    """Return whether a call that failed like this may succeed later."""
    if isinstance(error, SbxError):
        return isinstance(error, Unavailable)
    return isinstance(error, Exception)
