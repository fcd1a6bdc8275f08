"""The state of an agent: its current run, or the last one after its end."""

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct, field

from sbx.agent.messages import Price, TokenUsage
from sbx.agent.progress import RunProgress
from sbx.protocol.agent import AgentEvent, AgentRunEnd, AgentRunStart, Reason, ToolEnd, ToolStart


class AgentState(Struct, frozen=True):
    """The fields have the values that `GET …/runs/{run}` of a service has.

    `status`: `idle` before the first run. `current_step`: from 1, and None if no run is active.
    `tool_call_history`: the calls of this run that have begun, and `result_history`: their results,
    each in the order of its event and with its `tool_call_id`. `pending_calls`: begun and not
    ended. `usage`: that of the steps that have ended, and after the end that of the run. `cost`:
    None without a price.
    """

    status: Literal["idle", "running", "ended"] = "idle"
    run_id: str | None = None
    model: str = ""
    max_steps: int = 0
    current_step: int | None = None
    tool_call_history: tuple[ToolStart, ...] = ()
    result_history: tuple[ToolEnd, ...] = ()
    pending_calls: tuple[ToolStart, ...] = ()
    plan: tuple[Mapping[str, str], ...] = ()
    usage: Mapping[str, int] = field(default_factory=dict)
    cost: float | None = None
    reason: Reason | None = None


class RunRecord:
    """The events of one run, of which `state` is made."""

    def __init__(self, run_id: str, max_steps: int, price: Price | None) -> None:
        self._run_id = run_id
        self._max_steps = max_steps
        self._price = price
        self._progress = RunProgress(price)
        self._calls: dict[str, ToolStart] = {}  # by id: a later start of a call replaces it
        self._results: list[ToolEnd] = []
        self._end: AgentRunEnd | None = None

    def follow(self, event: AgentEvent) -> None:
        self._progress.follow(event)
        match event:
            case AgentRunStart():
                self._max_steps = event.max_steps
            case ToolStart():
                self._calls[event.tool_call_id] = event
            case ToolEnd():
                self._results.append(event)
            case AgentRunEnd():
                self._end = event

    def state(self, *, active: bool) -> AgentState:
        progress, end = self._progress, self._end
        usage = dict(progress.usage if end is None else end.usage)
        cost = None
        if self._price is not None:
            tokens = (usage.get(f"{kind}_tokens", 0) for kind in ("input", "output"))
            cost = self._price.of(TokenUsage(*tokens))
        return AgentState(
            status="running" if active and end is None else "ended",
            run_id=self._run_id,
            model=progress.model,
            max_steps=self._max_steps,
            current_step=progress.step if active and end is None else None,
            tool_call_history=tuple(self._calls.values()),
            result_history=tuple(self._results),
            pending_calls=tuple(progress.calls.values()) if active else (),
            plan=tuple(progress.plan),
            usage=usage,
            cost=cost,
            reason=None if end is None else end.reason,
        )
