"""What a run may spend."""

from dataclasses import dataclass

from sbx.agent.messages import Usage
from sbx.errors import BadRequest


@dataclass(frozen=True, slots=True)
class Budget:
    """None is no bound. `tokens` of input and output together, counted after each answer, so that
    the last answer may go beyond; `seconds` of the clock on the wall, whatever is waited for, and
    what runs when they are over is ended."""

    tokens: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        for name in ("tokens", "seconds"):
            if (most := getattr(self, name)) is not None and not most > 0:
                raise BadRequest(f"the {name} of a budget are above 0", code="invalid_budget")

    def spent(self, usage: Usage) -> bool:
        return self.tokens is not None and usage.total >= self.tokens


UNBOUNDED = Budget()
