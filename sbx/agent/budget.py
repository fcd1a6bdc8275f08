"""The limits of a run."""

from dataclasses import dataclass

from sbx.agent.messages import TokenUsage
from sbx.errors import BadRequest


@dataclass(frozen=True, slots=True)
class Budget:
    """None means no limit. `tokens` limits input and output together. It is checked after each
    answer, so the last answer may exceed it. `seconds` limits the wall-clock time, including all
    waits; running calls are interrupted when it is over."""

    tokens: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        for name in ("tokens", "seconds"):
            if (limit := getattr(self, name)) is not None and not limit > 0:
                raise BadRequest(f"the {name} of a budget must be above 0", code="invalid_budget")

    def spent(self, usage: TokenUsage) -> bool:
        return self.tokens is not None and usage.total >= self.tokens


UNBOUNDED = Budget()
