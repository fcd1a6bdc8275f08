"""What a tool is: told to models as a definition, called with checked arguments."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from sbx.agent.messages import Image

if TYPE_CHECKING:
    from sbx.agent.sandbox import Sandbox

Permission = Literal["allow", "ask", "deny"]
# What is decided of a call; "changes": its file changes are decided when they are known.
Ruling = Literal["allow", "ask", "deny", "changes"]
# What a call would do: look, change files, run code that can start no process, start processes.
Effect = Literal["read", "write", "code", "command"]
Arguments = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolDefinition:
    """What a model is told. `parameters` is a JSON Schema of an object."""

    name: str
    description: str
    parameters: Mapping[str, Any]


class Emit(Protocol):
    """Tells live output of a call: `stream` is "stdout" or "stderr"."""

    def __call__(self, stream: str, text: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Call:
    """One call that is being made. `sandbox` is the conversation's."""

    id: str
    sandbox: "Sandbox"
    emit: Emit


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a model gets back. An error is a result too."""

    text: str
    is_error: bool = False
    images: tuple[Image, ...] = ()


@dataclass(frozen=True, slots=True)
class Tool:
    """`act` gets the call and the arguments, which fit the schema by then; it may return text.

    What it raises of SbxError goes to the model as an error. `effect` says what a call with these
    arguments would do; `permission` None leaves it to the rules for that effect.
    """

    definition: ToolDefinition
    act: Callable[[Call, Arguments], Awaitable[ToolResult | str]]
    effect: Callable[[Arguments], Effect]
    permission: Permission | None = None
    confined: bool = False

    @property
    def name(self) -> str:
        return self.definition.name
