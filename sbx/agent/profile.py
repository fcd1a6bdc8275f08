"""The profile of an agent: its instructions, model, tools, policy, approvals and limits.

A profile narrows: it removes tools, asks about more calls, and lowers limits. It never permits what
the rules for its conversation refuse.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    StringConstraints,
    ValidationInfo,
    field_validator,
    model_validator,
)

from sbx.agent.agent import Budget
from sbx.agent.delegation import Delegation, OpenSandbox, delegate_tool
from sbx.agent.messages import Price
from sbx.agent.models import Model
from sbx.agent.operator_files import OperatorFiles, OperatorTable
from sbx.agent.sandbox import ToolSandbox
from sbx.agent.tools.approval_rules import Permissions
from sbx.agent.tools.arguments import nearest
from sbx.agent.tools.registry import Tools, builtin, optional
from sbx.agent.tools.tool import Permission, Tool

_TOOLS = Tools((*builtin(), *optional()))
Text = Annotated[str, StringConstraints(max_length=2000)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=200)]
_Amount = Annotated[float, Field(ge=0, le=1e6)]


class ProfileModel(OperatorTable):
    """A model of the configured provider. `max_tokens` limits one answer. Without a name it is the
    configured model, and without the other fields the provider's defaults apply."""

    name: Name | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=1_000_000)] | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Return the fields of each request to the provider."""
        return self.model_dump(exclude={"name"}, exclude_none=True)


class ProfileLimits(OperatorTable):
    """The limits of one run: answers of the model, tokens of input and output together, seconds,
    and money in the currency of the prices."""

    max_steps: Annotated[int, Field(ge=1, le=1000)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_seconds: Annotated[float, Field(gt=0, le=7 * 86_400)] | None = None
    max_cost: Annotated[float, Field(gt=0)] | None = None


class ProfilePrice(OperatorTable):
    """The prices of a million tokens."""

    input: _Amount
    output: _Amount


class ProfileDelegation(OperatorTable):
    """Sub-agents: how many at once, and the limits of each."""

    at_once: Annotated[int, Field(ge=1, le=16)] = 4
    max_steps: Annotated[int, Field(ge=1, le=200)] = 20
    max_tokens: Annotated[int, Field(ge=1)] | None = None


class AgentProfile(OperatorTable):
    """`instructions` follow the system prompt of sbx. `tools`: None for all. `policy`: that of new
    sandboxes of this agent. `external`: its external tools, by their names or those of their
    sources; None for all that its users may call. `approvals`: a tool whose calls a person must
    approve outside of projects, or that is denied; a project has other rules. `retries`: how often
    a failed call of a tool that changes nothing is repeated. `delegate`: it may give parts of
    its task to sub-agents. `welcome` and `starters` are for people: a text, and prompts to begin
    with."""

    description: Text = ""
    instructions: Annotated[str, StringConstraints(max_length=100_000)] = ""
    welcome: Text = ""
    starters: Annotated[tuple[Text, ...], Field(max_length=20)] = ()
    tools: Annotated[tuple[Name, ...], Field(max_length=200)] | None = None
    external: Annotated[tuple[Name, ...], Field(max_length=200)] | None = None
    policy: Name | None = None
    model: ProfileModel = ProfileModel()
    approvals: Mapping[Name, Literal["ask", "deny"]] = Field(default_factory=dict)
    retries: Mapping[Name, Annotated[int, Field(ge=1, le=5)]] = Field(default_factory=dict)
    limits: ProfileLimits = ProfileLimits()
    price: ProfilePrice | None = None
    delegate: ProfileDelegation | None = None

    @field_validator("tools", "approvals", "retries")
    @classmethod
    def _are_tools(cls, value: Any, fields: ValidationInfo) -> Any:
        external = fields.data.get("external") or () if fields.field_name != "tools" else ()
        for name in value or ():
            if name not in (*_TOOLS.names, *external):
                near = nearest(name, _TOOLS.names)[0]
                raise ValueError(f"no tool has the name {name}; {near} has")
        return value

    @field_validator("retries")
    @classmethod
    def _can_be_repeated(cls, value: Mapping[str, int]) -> Mapping[str, int]:
        for name in value:  # the source of an external tool decides about it
            if name in _TOOLS.names and not _TOOLS.get(name).idempotent:
                raise ValueError(f"a second call of {name} can have another effect")
        return value

    @model_validator(mode="after")
    def _has_prices(self) -> Self:
        if self.limits.max_cost is not None and self.price is None:
            raise ValueError("limits.max_cost needs the table price")
        return self

    @property
    def budget(self) -> Budget:
        limits, price = self.limits, self.per_token
        return Budget(limits.max_tokens, limits.max_seconds, cost=limits.max_cost, price=price)

    def max_steps(self, requested: int | None, default: int) -> int:
        """Return the steps of a run: a request may lower the limit of the profile."""
        limit = self.limits.max_steps
        return min(requested or limit or default, limit or 1000)

    def select(self, tools: Tools, external: Iterable[Tool] = ()) -> Tools:
        """Return the tools of this agent: all of these, or those that it names, also of the
        optional ones; and its external tools."""
        chosen: Iterable[Tool] = tools
        if self.tools is not None:
            chosen = (tool for tool in (*tools, *optional()) if tool.name in self.tools)
        return Tools((*chosen, *external), retries=self.retries)

    def with_delegation(
        self,
        tools: Tools,
        model: Model,
        open_sandbox: OpenSandbox,
        permissions: Callable[[ToolSandbox], Permissions],
    ) -> Tools:
        """Return the tools, with `delegate` if this agent may have sub-agents. They have the same
        tools and the same model."""
        if self.delegate is not None:
            delegation = Delegation(
                model,
                Tools(tools),
                open_sandbox,
                permissions,
                self.instructions,
                max_cost=self.limits.max_cost,
                price=self.per_token,
                **self.delegate.model_dump(),
            )
            tools.add(delegate_tool(delegation))
        return tools

    def overrides(self, *, in_project: bool) -> dict[str, Permission]:
        """Return the permissions of tools by name. A project asks about the changes of each call,
        which shows a person more: there only denials count."""
        return {
            name: decision
            for name, decision in self.approvals.items()
            if decision == "deny" or not in_project
        }

    @property
    def per_token(self) -> Price | None:
        return None if self.price is None else Price(self.price.input, self.price.output)

    @property
    def for_users(self) -> "AgentProfile":
        """Return the part that the users of an agent may see."""
        return AgentProfile(
            description=self.description, welcome=self.welcome, starters=self.starters
        )


NO_PROFILE = AgentProfile()

_FILES = OperatorFiles(AgentProfile, "profile", "invalid_profile", "docs/agents.md")
parse_profile = _FILES.parse
profile_files = _FILES.list
read_profile = _FILES.read
