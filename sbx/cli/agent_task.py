"""One task of an agent in a new sandbox, for `sbx agent run` and `sbx task run`."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from sbx.agent.agent import Agent
from sbx.agent.delegation import OpenSandbox
from sbx.agent.models import Model
from sbx.agent.profile import AgentProfile
from sbx.agent.settings import AgentSettings
from sbx.agent.tools.approval_rules import Permissions
from sbx.agent.tools.registry import Tools
from sbx.agent.tools.tool import Tool
from sbx.cli import agent_options
from sbx.cli.save_files import Saved, save_files
from sbx.protocol.agent import AgentEvent, AgentRunEnd

# Gets the function that aborts the agent, and None once there is nothing to abort.
OnAgent = Callable[[Callable[[], None] | None], None]


@dataclass(frozen=True, slots=True)
class AgentTask:
    """A task, its files, and the directory for the files that the agent writes."""

    text: str
    files: tuple[Path, ...]
    out: Path | None
    max_steps: int
    max_tokens: int | None = None
    max_seconds: float | None = None
    completion_check: str | None = None


@dataclass(frozen=True, slots=True)
class AgentHost:
    """The parts that the tasks of one command share."""

    model: Model
    profile: AgentProfile
    open_sandbox: OpenSandbox
    external: Sequence[Tool]


@asynccontextmanager
async def agent_host(
    settings: AgentSettings,
    model: Model,
    profile: AgentProfile,
    agent_id: str | None,
    sandbox: Mapping[str, Any],
) -> AsyncIterator[AgentHost]:
    """Yield the host of tasks, and close the model on exit. `sandbox`: the options of sandboxes."""
    place = settings.sandbox_domain, agent_options.key_of(settings)
    try:
        async with (
            agent_options.sandboxes(settings.sandbox_image, sandbox, *place) as open_sandbox,
            agent_options.external_tools(agent_id, profile) as external,
        ):
            yield AgentHost(model, profile, open_sandbox, external)
    finally:
        await model.close()


async def perform(
    task: AgentTask,
    host: AgentHost,
    show: Callable[[AgentEvent], Any],
    on_agent: OnAgent = lambda _: None,
) -> tuple[AgentRunEnd, Saved | None]:
    """Do a task in a new sandbox. `show` is awaited with each event. Return the end, and the files
    that were saved. Raise the errors of creating a sandbox and of uploads."""
    profile = host.profile
    # No person decides here: what a profile asks about is denied.
    permissions = Permissions(overrides=profile.overrides(in_project=False))
    async with host.open_sandbox() as sandbox:
        for path in task.files:
            await sandbox.uploads.put(path)
        tools = profile.with_delegation(
            profile.select(Tools(), host.external),
            host.model,
            host.open_sandbox,
            lambda _: permissions,
        )
        agent = Agent(
            sandbox,
            host.model,
            tools=tools,
            permissions=permissions,
            instructions=profile.instructions,
            budget=replace(profile.budget, tokens=task.max_tokens, seconds=task.max_seconds),
        )
        on_agent(agent.abort)
        events = agent.stream(
            task.text, max_steps=task.max_steps, check_command=task.completion_check
        )
        async with aclosing(events):
            async for event in events:
                await show(event)
                if isinstance(event, AgentRunEnd):
                    on_agent(None)
                    return event, None if task.out is None else await save_files(sandbox, task.out)
    raise AssertionError  # a run ends with its end event
