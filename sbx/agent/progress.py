"""The progress of a run, and the report about runs that have ended. Pure, save for the clock."""

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from msgspec import Struct, field

from sbx.agent.messages import Price, TokenUsage
from sbx.agent.tools.plan import plan_steps
from sbx.protocol.agent import (
    AgentEvent,
    AgentRunEnd,
    AgentRunStart,
    Json,
    StepEnd,
    ToolApproval,
    ToolEnd,
    ToolPending,
    ToolStart,
)

# Models invent names of tools: only so many are counted apart.
_NAMES_MAX = 64
_NAME_MAX = 64
OTHER = "other"


class RunProgress(Struct):
    """`step` is the current one, from 1; `calls` have begun and not ended, by id, and show whether
    they wait for an approval now; `usage` is that of the steps that have ended; `plan` has
    the steps of the last call of the tool `plan`."""

    price: Price | None = None
    model: str = ""
    step: int = 1
    calls: dict[str, ToolStart] = field(default_factory=dict)
    usage: Counter[str] = field(default_factory=Counter)
    plan: list[dict[str, str]] = field(default_factory=list)
    _steps: list[list[float]] = field(default_factory=list)
    _tools: dict[str, Counter[str]] = field(default_factory=dict)
    _failures: Counter[str] = field(default_factory=Counter)
    _step_began: float = field(default_factory=time.monotonic)

    def follow(self, event: AgentEvent) -> None:
        match event:
            case AgentRunStart():
                self.model = event.model
            case ToolStart():
                self.calls[event.tool_call_id] = event
                self.plan = plan_steps(event.tool_name, event.tool_args) or self.plan
            case ToolPending(call_id, expires_at=expires_at) if call_id in self.calls:
                call = self.calls[call_id]
                self.calls[call_id] = replace(call, approval_required=True, expires_at=expires_at)
            case ToolApproval(call_id) if call_id in self.calls:
                call = self.calls[call_id]
                self.calls[call_id] = replace(call, approval_required=False, expires_at=None)
            case ToolEnd():
                self._count(self.calls.pop(event.tool_call_id, None), event)
            case StepEnd():
                self.step = event.step + 1
                self.usage.update(event.usage)
                now = time.monotonic()
                tokens = (event.usage.get(f"{kind}_tokens", 0) for kind in ("input", "output"))
                self._steps.append([round(now - self._step_began, 3), *tokens])
                self._step_began = now
            case AgentRunEnd():
                self.calls.clear()

    @property
    def waiting(self) -> list[str]:
        """Return the ids of the calls that wait for an approval."""
        return [call_id for call_id, call in self.calls.items() if call.approval_required]

    @property
    def cost(self) -> float | None:
        """Return the cost of `usage` in the currency of the prices; None without prices."""
        if self.price is None:
            return None
        return self.price.of(TokenUsage(self.usage["input_tokens"], self.usage["output_tokens"]))

    @property
    def report(self) -> Json:
        """Return the steps as [seconds, input tokens, output tokens]; the calls, failures and
        milliseconds of each tool; the failures by their code; the cost and the last plan."""
        return {
            "steps": self._steps,
            "tools": {name: dict(counts) for name, counts in self._tools.items()},
            "failures": dict(self._failures),
            "cost": self.cost,
            "plan": self.plan,
        }

    def _count(self, start: ToolStart | None, end: ToolEnd) -> None:
        name = OTHER if start is None else start.tool_name[:_NAME_MAX]
        if name not in self._tools and len(self._tools) >= _NAMES_MAX:
            name = OTHER
        counts = self._tools.setdefault(name, Counter())
        counts.update(calls=1, failed=int(end.is_error), ms=round(end.duration_ms))
        if end.is_error:
            code = str((end.error or {}).get("code", OTHER))[:_NAME_MAX]
            is_new = code not in self._failures and len(self._failures) >= _NAMES_MAX
            self._failures[OTHER if is_new else code] += 1


class EndedRun(Struct, frozen=True):
    """The facts of one run for a report. `report` is its progress; None for an older run."""

    reason: str
    seconds: float
    usage: Mapping[str, int]
    report: Mapping[str, Any] | None


def combined_report(runs: Iterable[EndedRun]) -> Json:
    """Return the report about several runs: runs by their ends, tools, failures, and the means of
    each step by its number."""
    reasons: Counter[str] = Counter()
    usage: Counter[str] = Counter()
    tools: dict[str, Counter[str]] = {}
    failures: Counter[str] = Counter()
    steps: list[list[float]] = []
    seconds, cost = 0.0, 0.0
    for run in runs:
        reasons[run.reason] += 1
        seconds += run.seconds
        usage.update(run.usage)
        report = run.report or {}
        cost += report.get("cost") or 0.0
        failures.update(report.get("failures", {}))
        for name, counts in report.get("tools", {}).items():
            tools.setdefault(name, Counter()).update(counts)
        for number, values in enumerate(report.get("steps", ())):
            if number == len(steps):
                steps.append([0, 0.0, 0, 0])
            steps[number] = [a + b for a, b in zip(steps[number], (1, *values), strict=True)]
    return {
        "runs": sum(reasons.values()),
        "seconds": round(seconds, 3),
        "usage": {kind: usage[kind] for kind in ("input_tokens", "output_tokens")},
        "cost": cost,
        "reasons": dict(reasons.most_common()),
        "tools": [
            {
                "name": name,
                "calls": counts["calls"],
                "failed": counts["failed"],
                "seconds": counts["ms"] / 1000,
            }
            for name, counts in sorted(tools.items(), key=lambda item: -item[1]["calls"])
        ],
        "failures": dict(failures.most_common()),
        "steps": [
            {
                "step": number,
                "runs": int(count),
                "seconds": round(took / count, 3),
                "input_tokens": round(read / count),
                "output_tokens": round(written / count),
            }
            for number, (count, took, read, written) in enumerate(steps, 1)
        ],
    }
