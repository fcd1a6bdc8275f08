"""The definition of a tool, which models receive, and its implementation, which gets checked
arguments."""

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct

from sbx.agent.messages import Image, TokenUsage
from sbx.protocol.agent import Json
from sbx.protocol.approvals import ApprovalDecision
from sbx.protocol.surroundings import Surroundings

if TYPE_CHECKING:
    from sbx.agent.sandbox import ToolSandbox

Permission = Literal["allow", "ask", "deny"]
# The decision about a call; "changes": decide about its file changes after a trial; "ask_first":
# ask before it runs, and apply its changes without another question.
Ruling = Literal["allow", "ask", "deny", "changes", "ask_first"]
# The effect of a call: read, change files, run code that cannot start processes, start processes.
Effect = Literal["read", "write", "code", "command"]
Arguments = Mapping[str, Any]
# Emits live output of a call: the first argument is "stdout" or "stderr", the second the text.
Emit = Callable[[str, str], None]


class ToolDefinition(Struct, frozen=True):
    """The definition that a model receives. `parameters` is a JSON Schema of an object."""

    name: str
    description: str
    parameters: Mapping[str, Any]


class ToolCallRequest(Struct, frozen=True):
    """One call in progress. `sandbox` is the one of the conversation. `decision` is that of a
    person, if the call needed one. `is_dropped`: it works on a copy of the files that is dropped,
    with its quarantine."""

    id: str
    sandbox: "ToolSandbox"
    emit: Emit
    decision: ApprovalDecision | None = None
    is_dropped: bool = False


class ToolResult(Struct, frozen=True):
    """The result that a model receives. An error is also a result. A person sees `outputs` and
    `error` as well: bundles of a run, see `figures.shown_outputs`, and the report of an error.
    `cached`: it is the result of an earlier call. `usage`: the tokens that the call has used."""

    text: str
    is_error: bool = False
    images: tuple[Image, ...] = ()
    outputs: tuple[Json, ...] = ()
    error: Json | None = None
    cached: bool = False
    usage: TokenUsage | None = None


class Tool(Struct, frozen=True):
    """`act` gets the call and its arguments, which have been checked against the schema. It may
    return text.

    If it raises an SbxError, the model receives the error. A repeated call of an `idempotent` tool
    has the effect of one call. Calls of an `independent` tool need no changes of each other, so
    that they may be tried at the same time. `effect` returns the effect of a call with these
    arguments. If `permission` is None, the rules for that effect apply. `scope`: the scope that a
    token needs; None: that of the effect. `source`: the source of an external tool. `define`
    returns the definition that fits to a sandbox; None without such a tool there.
    """

    definition: ToolDefinition
    act: Callable[[ToolCallRequest, Arguments], Awaitable[ToolResult | str]]
    effect: Callable[[Arguments], Effect]
    permission: Permission | None = None
    confined: bool = False
    idempotent: bool = False
    independent: bool = False
    scope: str | None = None
    source: str | None = None
    define: Callable[[Surroundings], ToolDefinition | None] | None = None

    @property
    def name(self) -> str:
        return self.definition.name


def define_builtin(
    define: Callable[[Surroundings], ToolDefinition | None],
    act: Callable[[ToolCallRequest, Arguments], Awaitable[ToolResult | str]],
    effect: Callable[[Arguments], Effect],
    *,
    idempotent: bool = False,
) -> Tool:
    """Return a tool that acts on a sandbox and whose definition depends on it."""
    definition = define(Surroundings())
    assert definition is not None  # a whole sandbox has all of them
    return Tool(definition, act, effect, confined=True, idempotent=idempotent, define=define)
