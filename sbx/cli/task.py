"""Run one task of an agent: create a sandbox, upload the files, run, save the output, clean up."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from sbx.agent.agent import Agent, Budget
from sbx.agent.models import Model
from sbx.agent.settings import AgentSettings
from sbx.cli import report
from sbx.cli.agent_output import AgentPrinterMode
from sbx.cli.agent_sandbox import own_sandbox
from sbx.cli.host_executables import report_left_out
from sbx.cli.save_files import save_files
from sbx.cli.signals import Ending
from sbx.protocol.agent import AgentEvent, AgentRunEnd, Reason

_PACK_THEM = "the agent can pack them into an archive; inspect it before you unpack it"


@dataclass(frozen=True, slots=True)
class AgentTask:
    """The options of `sbx agent`."""

    text: str
    files: tuple[Path, ...]
    out: Path | None
    settings: AgentSettings
    max_tokens: int | None
    max_seconds: float | None
    as_json: bool = False


async def do(task: AgentTask, model: Model, face: AgentPrinterMode) -> Reason:
    """Run a task and return the reason of its end.

    Ctrl-C aborts a running agent. Raise the errors of creating a sandbox, Stopped for any other
    signal, and ReaderGone.
    """
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


async def shown(events: AsyncGenerator[AgentEvent, None], face: AgentPrinterMode) -> AgentRunEnd:
    """Show all events of a run and return the last one.

    Print in a thread, so that a slow reader of stdout delays no deadline and no Ctrl-C.
    """
    async with aclosing(events):
        async for event in events:
            await asyncio.to_thread(face.show, event)
            if isinstance(event, AgentRunEnd):
                return event
    raise AssertionError  # a run ends with its RunEnd
