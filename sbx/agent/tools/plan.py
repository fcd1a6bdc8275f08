"""The tool `plan`: a model writes the steps of its task, and their states, for the people who wait.

The whole plan is in the arguments of each call, so `tool_start` shows it. The tool does nothing
else.
"""

from collections.abc import Mapping
from typing import Any

from sbx.agent.tools.tool import Arguments, Tool, ToolCallRequest, ToolDefinition

NAME = "plan"
_STEPS_MAX = 50
_TEXT_MAX = 300
_STATES = ("pending", "active", "done", "failed")


async def _plan(_: ToolCallRequest, arguments: Arguments) -> str:
    steps = arguments["steps"]
    done = sum(step["state"] == "done" for step in steps)
    return f"{done} of {len(steps)} steps are done"


PLAN = Tool(
    definition=ToolDefinition(
        NAME,
        "Show the user the steps of your task. Call it before you begin a task of several steps,"
        " and after each step with all steps and their new states.",
        {
            "type": "object",
            "properties": {
                "steps": {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": _STEPS_MAX,
                    "items": {
                        "type": "object",
                        "properties": {
                            "text": {"type": "string", "minLength": 1, "maxLength": _TEXT_MAX},
                            "state": {"type": "string", "enum": list(_STATES)},
                        },
                        "required": ["text", "state"],
                        "additionalProperties": False,
                    },
                }
            },
            "required": ["steps"],
            "additionalProperties": False,
        },
    ),
    act=_plan,
    effect=lambda _: "read",
    idempotent=True,
)


def plan_steps(tool_name: str, arguments: Mapping[str, Any]) -> list[dict[str, str]] | None:
    """Return the steps of a call of this tool; None for another tool, and for malformed steps."""
    steps = arguments.get("steps")
    if tool_name != NAME or not isinstance(steps, list):
        return None
    return [
        {"text": str(step["text"]), "state": str(step["state"])}
        for step in steps
        if isinstance(step, Mapping) and {"text", "state"} <= step.keys()
    ]
