"""Whether new work can be recorded: it is refused before it begins, not after it was done.

Work that frees space, stops something or takes a right away is never refused for this. Its record
is kept in memory where it cannot be written yet.
"""

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from sbx.errors import Unavailable
from sbx.service.caller import Caller
from sbx.service.models import SandboxView
from sbx.service.reserve import Reserve
from sbx.store.pending import PendingWrites
from sbx.telemetry.audit import Audit

_RETRY_AFTER_S = 1.0
_TEXT_MAX = 1000  # characters of a detail; a line whose details are too long would lose all of them


def problems(
    *, full: bool, audit_waits: bool, store_waits: bool, damaged: bool = False
) -> Sequence[str]:
    """Return the codes of the present problems, the first one to solve first."""
    codes = ["store_corrupt"] if damaged else []
    if full:
        codes.append("no_space")
    if audit_waits or store_waits:
        codes.append("not_recording")
    return codes


def refusal(code: str) -> Unavailable:
    if code == "no_space":
        return Unavailable(
            "the disk of the service is full, so it takes no new work",
            code=code,
            hint="delete files or sandboxes that are not needed",
            details={"retry_after_s": _RETRY_AFTER_S},
        )
    if code == "store_corrupt":
        return Unavailable(
            "the store of the service is damaged, so it takes no new work",
            code=code,
            hint="the operator stops the service and runs `sbx store repair`",
        )
    return Unavailable(
        "the service cannot record new work now",
        code=code,
        hint="try again in a moment; the service's log has the reason",
        details={"retry_after_s": _RETRY_AFTER_S},
    )


class Recording(Struct, frozen=True):
    """The parts of a service that have to record its work."""

    reserve: Reserve
    audit: Audit
    pending: PendingWrites

    @property
    def problems(self) -> Sequence[str]:
        return self._problems(store_waits=self.pending.refused)

    def _problems(self, *, store_waits: bool) -> Sequence[str]:
        return problems(
            full=self.reserve.full,
            audit_waits=self.audit.refused,
            store_waits=store_waits,
            damaged=self.pending.store_damaged,
        )

    def check(self, *, runs: bool) -> None:
        """Raise Unavailable `store_corrupt`, `no_space` or `not_recording` where new work must not
        begin.

        `runs`: it runs code. Other work leaves no record in the store.
        """
        if codes := self._problems(store_waits=runs and self.pending.refused):
            raise refusal(codes[0])

    async def record(self, caller: Caller, action: str, object: str, **details: Any) -> None:
        """Write an audit line about an action that is done. Cut long texts, and omit None.

        Never refuse: the action is done. A line that cannot be written waits in memory. Meanwhile
        `check` refuses new work. Runs have no line: the history of their sandbox has them.
        """
        details = {name: _cut(value) for name, value in details.items() if value is not None}
        await self.audit.record(caller.who, action, object, **details)

    async def record_sandbox(
        self, caller: Caller, action: str, view: SandboxView, **details: Any
    ) -> None:
        await self.record(caller, action, view.id, **details)

    async def record_session(
        self, caller: Caller, action: str, view: SandboxView, **details: Any
    ) -> None:
        """Record an action on a session, with its sandbox. The id of a session may be used again,
        that of its sandbox never."""
        session = view.session_id or view.id
        await self.record(caller, action, session, sandbox=view.id, **details)


def _cut(value: Any) -> Any:
    if isinstance(value, str) and len(value) > _TEXT_MAX:
        return f"{value[: _TEXT_MAX - 1]}…"
    return value
