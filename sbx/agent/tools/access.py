"""The tool `request_access`: a model asks a person for access that the policy refuses.

The policy decides which access may be requested ([[grant]]), and a person decides about each
request. The question states the access in the words of the policy; the reason is the model's own
text and may be that of an attacker. An approval is for the next run, unless the person chooses an
hour or the conversation.

The same question follows a call in which the proxy refused such access (sbx/agent/calls.py).
"""

import json
import secrets
from collections.abc import Mapping
from typing import Any

from sbx.agent.messages import ToolCall
from sbx.agent.tools.tool import Arguments, Tool, ToolCallRequest, ToolDefinition, ToolResult
from sbx.errors import Conflict, Denied
from sbx.policy.grants import Grants
from sbx.policy.units import MIB
from sbx.protocol.approvals import AS_GRANT, Remember
from sbx.protocol.grants import ACCESS_KINDS, GRANT_DURATIONS, Access, GrantDuration

NAME = "request_access"
_REASON_MAX = 500
_LASTING: Mapping[str | None, tuple[GrantDuration, str]] = {
    None: ("once", "for the next run"),
    "hour": ("hour", "for an hour"),
    "conversation": ("conversation", "until the conversation ends"),
}


def grants_of(sandbox: object) -> Grants | None:
    """Return the grants of a conversation whose policy permits some; None for other sandboxes."""
    grants = getattr(sandbox, "grants", None)
    return grants if isinstance(grants, Grants) and grants.permitted else None


def question(grants: Grants, arguments: Arguments) -> dict[str, Any]:
    """Return the arguments as a person gets them: the access first, and the reason of the model
    last. Raise Denied `not_grantable`, and Conflict `already_granted` for allowed access."""
    access = _access(arguments)
    if grants.has(access):
        raise Conflict(
            f"the policy or a grant allows {access} already",
            code="already_granted",
            hint="run the code again",
        )
    longest = grants.check(access)
    shown: dict[str, Any] = {"kind": access.kind, "target": access.target, "longest": longest}
    if reason := str(arguments.get("reason", ""))[:_REASON_MAX]:
        shown["reason"] = reason
    return shown


def durations(shown: Arguments) -> tuple[Remember, ...]:
    """Return the durations, beyond the next run, for which a person may grant the access."""
    longest = GRANT_DURATIONS.index(shown["longest"])
    return tuple(each for each in AS_GRANT if GRANT_DURATIONS.index(each) <= longest)


def words(shown: Arguments) -> str:
    """Return a question in words, for the next run. The reason of the model is its last line."""
    text = f"Grant {_access(shown)}, for the next run?"
    reason = shown.get("reason")
    return f"{text}\nThe model gives this reason: {reason}" if reason else text


def request_for(access: Access) -> ToolCall:
    """Return the request that sbx itself makes after a refusal."""
    arguments = json.dumps({"kind": access.kind, "target": access.target})
    return ToolCall(f"access-{secrets.token_hex(8)}", NAME, arguments)


def _access(arguments: Arguments) -> Access:
    return Access(arguments["kind"], arguments["target"])


def access_tool(grants: Grants) -> Tool:
    """Return the tool for a conversation. Its description lists the permitted access."""
    permitted = []
    for entry in grants.permitted:
        lists = {
            kind: getattr(entry, kind) for kind in ("network", "secret", "directory", "package")
        }
        permitted += [f"{kind} {', '.join(targets)}" for kind, targets in lists.items() if targets]
        if entry.run_time is not None:
            permitted.append(f"run_time up to {entry.run_time:g} seconds")
        if entry.memory is not None:
            permitted.append(f"memory up to {entry.memory // MIB} MiB")

    async def act(call: ToolCallRequest, arguments: Arguments) -> ToolResult:
        decision = call.decision
        if decision is None or not decision.approved:
            raise Denied("a person must approve the access", code="not_grantable")
        access = _access(arguments)
        duration, lasting = _LASTING.get(decision.remembered, _LASTING[None])
        grant = await grants.grant(access, duration, decision.by)
        where = f" It is at {grant.inside}." if grant.inside is not None else ""
        text = f"{decision.by} granted {access} {lasting}.{where} Run the code again."
        return ToolResult(text)

    return Tool(
        definition=ToolDefinition(
            NAME,
            "Ask the user for access that the sandbox refuses, and then run the code again. Ask for"
            " the narrowest access that the task needs. The user can be asked about: "
            + "; ".join(permitted)
            + ".",
            {
                "type": "object",
                "properties": {
                    "kind": {"type": "string", "enum": list(ACCESS_KINDS)},
                    "target": {
                        "type": "string",
                        "minLength": 1,
                        "maxLength": 300,
                        "description": "One host with its port, such as example.org:443; the name"
                        " of a secret; an absolute path of the host; the seconds of a run; the MiB"
                        " of memory; or the name of a package.",
                    },
                    "reason": {"type": "string", "maxLength": _REASON_MAX},
                },
                "required": ["kind", "target"],
                "additionalProperties": False,
            },
        ),
        act=act,
        effect=lambda _: "read",
        permission="ask",
        scope="execute",
    )
