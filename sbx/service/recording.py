"""Whether new work can be recorded: it is refused before it begins, not after it was done.

Work that frees space, stops something or takes a right away is never refused for this. Its record
is kept in memory where it cannot be written yet.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sbx.errors import Unavailable
from sbx.service.reserve import Reserve
from sbx.store.pending import PendingWrites
from sbx.telemetry.audit import Audit

_RETRY_AFTER_S = 1.0


def problems(*, full: bool, audit_waits: bool, store_waits: bool) -> Sequence[str]:
    """Return the codes of what is wrong, the first one to solve first."""
    codes = []
    if full:
        codes.append("no_space")
    if audit_waits or store_waits:
        codes.append("not_recording")
    return codes


def refusal(code: str) -> Unavailable:
    """Return the error for new work while there is this problem."""
    if code == "no_space":
        return Unavailable(
            "the disk of the service is full, so it takes no new work",
            code=code,
            hint="delete files or sandboxes that are not needed",
            details={"retry_after_s": _RETRY_AFTER_S},
        )
    return Unavailable(
        "the service cannot record new work now",
        code=code,
        hint="try again in a moment; the service's log has the reason",
        details={"retry_after_s": _RETRY_AFTER_S},
    )


@dataclass(frozen=True, slots=True)
class Recording:
    """The parts of a service that have to record its work."""

    reserve: Reserve
    audit: Audit
    pending: PendingWrites

    @property
    def problems(self) -> Sequence[str]:
        """Return the codes of what is wrong now."""
        return problems(
            full=self.reserve.full,
            audit_waits=self.audit.refused,
            store_waits=self.pending.refused,
        )

    def check(self, *, runs: bool) -> None:
        """Raise Unavailable `no_space` or `not_recording` where new work must not begin.

        `runs`: it runs code. Other work leaves no record in the store.
        """
        codes = problems(
            full=self.reserve.full,
            audit_waits=self.audit.refused,
            store_waits=runs and self.pending.refused,
        )
        if codes:
            raise refusal(codes[0])
