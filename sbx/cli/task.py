"""One task of an agent: a sandbox, the files, the run, what it wrote; nothing is left behind."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from sbx.agent.agent import Agent
from sbx.agent.budget import Budget
from sbx.agent.models import Model
from sbx.agent.settings import AgentSettings
from sbx.cli import report
from sbx.cli.agent_sandbox import own_sandbox
from sbx.cli.ending import Ending
from sbx.cli.host_executables import report_left_out
from sbx.cli.saving import save_files
from sbx.cli.telling import Face
from sbx.protocol.agent import AgentEvent, Reason, RunEnd

_PACK_THEM = "the agent can pack them into an archive; look into it before you unpack it"


@dataclass(frozen=True, slots=True)
class Task:
    """What `sbx agent` was asked for."""

    text: str
    files: tuple[Path, ...]
    out: Path | None
    settings: AgentSettings
    max_tokens: int | None
    max_seconds: float | None
    as_json: bool = False


async def do(task: Task, model: Model, face: Face) -> Reason:
    """How it ended. Raises what making the sandbox does, Stopped for a signal but Ctrl-C while it
    runs, and ReaderGone."""
    budget = Budget(tokens=task.max_tokens, seconds=task.max_seconds)
    with Ending() as ending:
        try:
            async with own_sandbox(task.settings) as sandbox:
                for path in task.files:
                    await sandbox.uploads.put(path)
                agent = Agent(sandbox, model, budget=budget)
                ending.on_interrupt = agent.abort
                events = agent.stream(task.text, max_steps=task.settings.max_steps)
                end = await shown(events, face)
                ending.on_interrupt = None
                if task.out is not None:
                    saved = await save_files(sandbox, task.out)
                    for path in saved.paths:
                        report.note(f"saved: {path}")
                    if task.as_json:
                        report.document(saved.to_json())
                    report_left_out(saved.left_out, _PACK_THEM)
        finally:
            await model.close()
    return end.reason


async def shown(events: AsyncGenerator[AgentEvent, None], face: Face) -> RunEnd:
    """Show all events of a run; the last one. In a thread, so that a slow reader of our output
    delays no deadline and no Ctrl-C."""
    async with aclosing(events):
        async for event in events:
            await asyncio.to_thread(face.show, event)
            if isinstance(event, RunEnd):
                return event
    raise AssertionError  # a run ends with its RunEnd
