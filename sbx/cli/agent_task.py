"""One task of an agent in a new sandbox, for `sbx agent run` and `sbx task run`."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from sbx.agent.agent import Agent
from sbx.agent.delegation import OpenSandbox
from sbx.agent.models import Model
from sbx.agent.profile import AgentProfile
from sbx.agent.sandbox import ToolSandbox
from sbx.agent.settings import AgentSettings
from sbx.agent.task import no_output
from sbx.agent.tools.approval_rules import Permissions
from sbx.agent.tools.registry import Tools
from sbx.agent.tools.tool import Tool
from sbx.cli import agent_options
from sbx.cli.save_files import Saved, is_saved, save_files
from sbx.cli.task_results import FILES_MAX
from sbx.errors import NotFound
from sbx.protocol.agent import AgentEvent, AgentRunEnd

# Gets the function that aborts the agent, and None once there is nothing to abort.
OnAgent = Callable[[Callable[[], None] | None], None]


@dataclass(frozen=True, slots=True)
class AgentTask:
    """A task, its files, and the directory for the files that the agent writes. `inputs`: files
    of other steps, by their paths below /workspace. `outputs`: files that the `step` must write.
    With `keeps`, the end comes with all files."""

    text: str
    files: tuple[Path, ...]
    out: Path | None
    max_steps: int
    max_tokens: int | None = None
    max_seconds: float | None = None
    completion_check: str | None = None
    inputs: Mapping[str, bytes] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    step: str = ""
    keeps: bool = False


class Performed(NamedTuple):
    """The end of a task, and the files that were saved. `files` has its outputs, and with `keeps`
    all files; `complete` is whether it has all."""

    end: AgentRunEnd
    saved: Saved | None
    files: Mapping[str, bytes]
    complete: bool


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
) -> Performed:
    """Do a task in a new sandbox. `show` is awaited with each event. Raise the errors of creating a
    sandbox and of uploads, and Conflict `step_output_missing`."""
    profile = host.profile
    # No person decides here: what a profile asks about is denied.
    permissions = Permissions(overrides=profile.overrides(in_project=False))
    async with host.open_sandbox() as sandbox:
        for path in task.files:
            await sandbox.uploads.put(path)
        for name, content in task.inputs.items():
            await sandbox.files.write(name, content)
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
                    saved = None if task.out is None else await save_files(sandbox, task.out)
                    files: dict[str, bytes] = {}
                    complete = False
                    if event.reason == "done":
                        files, complete = await _files(sandbox, task)
                    return Performed(event, saved, files, complete)
    raise AssertionError  # a run ends with its end event


async def _files(sandbox: ToolSandbox, task: AgentTask) -> tuple[dict[str, bytes], bool]:
    """Return the outputs of a task, and within the limit all files. Raise Conflict
    `step_output_missing`, TooLarge."""
    files: dict[str, bytes] = {}
    for path in task.outputs:
        try:
            files[path] = await sandbox.files.read_bytes(path)
        except NotFound:
            raise no_output(task.step, path) from None
    size = sum(map(len, files.values()))
    if not task.keeps:
        return files, False
    listing = await sandbox.files.list("/workspace", max_depth=100)
    for entry in filter(is_saved, listing):
        path = entry.path.removeprefix("/workspace/")
        if path not in files:
            size += entry.size or 0
            if size > FILES_MAX:
                return files, False
            files[path] = await sandbox.files.read_bytes(entry.path)
    return files, listing.complete and size <= FILES_MAX
