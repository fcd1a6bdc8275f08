"""The order of the steps of a task: those whose needs are done run at the same time."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from graphlib import TopologicalSorter

from sbx.agent.task import FilledStep


async def run_steps(
    steps: Sequence[FilledStep],
    do: Callable[[FilledStep], Awaitable[bool]],
    done: Collection[str] = (),
) -> None:
    """Do each step once the steps that it needs are done. `do` returns whether the step is done.
    The steps that need a step that failed never begin, and the others continue. `done`: the steps
    that were done before. Cancelling this cancels the steps that run. Raise the errors of `do`."""
    by_name = {step.name: step for step in steps}
    order = TopologicalSorter({step.name: step.needs for step in steps})
    order.prepare()
    async with asyncio.TaskGroup() as group:

        async def act(step: FilledStep) -> None:
            if await do(step):
                order.done(step.name)
                begin()

        def begin() -> None:
            while ready := order.get_ready():
                for name in ready:
                    if name in done:
                        order.done(name)
                    else:
                        group.create_task(act(by_name[name]))

        begin()
