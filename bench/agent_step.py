"""What an agent's loop adds to one step: all but the time of the model and of its tools.

A hundred conversations at once, each with a live kernel and its history in a store, as in a
service. Their models take some seconds to answer, as models do, and each answer calls one cell. So
a step holds: its prompt made fresh, two messages written to the store, the call parsed, allowed,
made and cut to size, its events. The baseline is the cell of the same step, as its tool took it.
"""

import asyncio
import random
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from bench import paths
from bench.samples import Bench, NotMeasured, Progress, Samples
from sbx import Runtime, Settings
from sbx.agent.agent import Agent
from sbx.agent.history import StoredHistory
from sbx.agent.messages import Message, Response, ToolCall
from sbx.agent.models import TextDelta
from sbx.agent.tools.tool import ToolDefinition
from sbx.aio import Clock
from sbx.protocol.agent import AgentRunEnd, StepEnd, ToolEnd
from sbx.store import Store, chats
from sbx.store.chats import ChatRow
from sbx.store.messages import Messages

_AT_ONCE = 100
_THINK_S = 4.0
_CALL = Response("", (ToolCall("x", "run_code", '{"code": "1+1"}'),), stop="tools")


class _Thinking:
    """Calls a cell in each answer; `thought_s` is how long the last answer took."""

    name = "thinking"
    takes_images = False
    thought_s = 0.0

    async def complete(
        self, system: str, messages: Sequence[Message], tools: Sequence[ToolDefinition]
    ) -> Response:
        began = time.perf_counter()
        await asyncio.sleep(_THINK_S * random.uniform(0.5, 1.5))
        self.thought_s = time.perf_counter() - began
        return _CALL

    async def stream(
        self, system: str, messages: Sequence[Message], tools: Sequence[ToolDefinition]
    ) -> AsyncGenerator[TextDelta | Response, None]:
        yield await self.complete(system, messages, tools)

    async def close(self) -> None:
        pass


async def _agent_step(rounds: int, progress: Progress) -> Samples:
    """About `rounds` steps in all, after a first one of each conversation that is not counted."""
    measured: list[float] = []
    cells: list[float] = []

    async def converse(agent: Agent, model: _Thinking) -> None:
        began, cell_ms, steps = time.perf_counter(), 0.0, 0
        async for event in agent.stream("go", max_steps=1 + -(-rounds // _AT_ONCE)):
            match event:
                case ToolEnd(duration_ms=cell_ms, result=result, is_error=failed):
                    if failed or "2" not in result:
                        raise NotMeasured(f"1+1 gave {result}")
                case StepEnd():
                    now = time.perf_counter()
                    if steps:
                        measured.append((now - began - model.thought_s) * 1000 - cell_ms)
                        cells.append(cell_ms)
                        progress(min(len(measured), rounds), rounds)
                    began, steps = now, steps + 1
                case AgentRunEnd(reason=reason) if reason != "max_steps":
                    raise NotMeasured(f"a run ended as {reason}: {event.error}")

    with tempfile.TemporaryDirectory() as directory:
        async with (
            await Store.open(Path(directory, "sbx.db")) as store,
            Runtime(Settings(kernels_max=_AT_ONCE)) as runtime,
            AsyncExitStack() as held,
        ):
            agents = [await _agent(number, runtime, store, held) for number in range(_AT_ONCE)]
            async with asyncio.TaskGroup() as tasks:
                for agent, model in agents:
                    tasks.create_task(converse(agent, model))
    return Samples(measured, cells, "the cell of the same step, 1+1")


async def _agent(
    number: int, runtime: Runtime, store: Store, held: AsyncExitStack
) -> tuple[Agent, _Thinking]:
    """One whose kernel is live."""
    box = await held.enter_async_context(await runtime.create())
    await paths.answers(box)
    chat = await chats.ensure(
        store, ChatRow(f"chat-{number}", "me", f"talk-{number}", "me", "bench", 0.0, 0.0)
    )
    model = _Thinking()
    return Agent(box, model, history=StoredHistory(Messages(store, Clock()), chat.id)), model


BENCHES = (Bench("agent_step", "ms", 5.0, _agent_step, rounds=1000, quick_rounds=200),)
