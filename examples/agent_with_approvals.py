"""An agent whose commands need an approval. The program approves one command and denies another.

The answers of the model are scripted, so the example needs no key.
`make_model(read_agent_settings())` returns a real model.
"""

import asyncio
import json

from sbx import Runtime
from sbx.agent import Agent, Approvals, Permissions, ReplayModel
from sbx.agent.approvals import AgentContext
from sbx.agent.messages import Response, ToolCall
from sbx.protocol.agent import question_of
from sbx.protocol.approvals import ApprovalScope

USER = "ann"


def command(number: int, text: str) -> Response:
    call = ToolCall(f"call-{number}", "execute_command", json.dumps({"command": text}))
    return Response("", (call,), stop="tools")


async def main() -> None:
    model = ReplayModel(
        [
            command(1, "echo hello > note.txt"),
            command(2, "rm note.txt"),
            Response("The note stays."),
        ]
    )
    approvals = Approvals()
    async with Runtime() as runtime, await runtime.create() as box:
        agent = Agent(
            box,
            model,
            approvals=approvals,
            permissions=Permissions(overrides={"execute_command": "ask"}),
            place=AgentContext(USER, "notes"),
        )
        async for event in agent.stream("Write a note, then remove it."):
            if (question := question_of(event)) is not None:
                text = question.tool_args["command"]
                approve = not text.startswith("rm")
                print("approved" if approve else "denied", text)
                await approvals.decide(ApprovalScope(USER), question.tool_call_id, approve)
        print((await box.files.read("note.txt")).strip())


if __name__ == "__main__":
    asyncio.run(main())
