"""Add a tool to the built-in ones. The tool runs on the host, the code in the sandbox.

The answers of the model are scripted: see agent_with_approvals.py.
"""

import asyncio
import json
from typing import Annotated

from pydantic import Field

from sbx import Runtime
from sbx.agent import Agent, ReplayModel, Tools, builtin, tool
from sbx.agent.messages import Response, ToolCall
from sbx.protocol.agent import ToolEnd

STOCK = {"apples": 3, "pears": 0}


@tool
async def stock(item: Annotated[str, Field(description="its English name, in the plural")]) -> str:
    """Return how many pieces of an item are in the warehouse."""
    return str(STOCK[item])


def call(name: str, **arguments: str) -> Response:
    return Response("", (ToolCall(f"call-{name}", name, json.dumps(arguments)),), stop="tools")


async def main() -> None:
    answers = [
        call("stock", item="apples"),
        call("run_code", code="print(3 * 0.5, 'EUR')"),
        Response("Three apples are left; they cost 1.50 EUR."),
    ]
    async with Runtime() as runtime, await runtime.create() as box:
        agent = Agent(box, ReplayModel(answers), tools=Tools([*builtin(), stock]))
        async for event in agent.stream("How many apples are left, and what do they cost?"):
            if isinstance(event, ToolEnd):
                print("result:", event.result.strip())
            elif event.type == "run_end":
                print(event.content)


if __name__ == "__main__":
    asyncio.run(main())
