"""The decisions of the proxy of a sandbox, for later readers: in the audit log and in its events.

The audit log gets every decision, and the events of the sandbox, which its owner reads, get the
refusals. Code inside can send requests as fast as it likes, and must not fill the disk of the host:
beyond a number per minute they are only counted, and the count is logged.
"""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sbx.telemetry.audit import Audit

if TYPE_CHECKING:
    from sbx.egress import EgressDecision

_log = logging.getLogger(__name__)
_MINUTE_S = 60.0
_ALLOWED_MAX = 3000  # in a minute: allowed requests cost the remote server something too
_REFUSED_MAX = 600
_EVENTS_MAX = 20
_TEXT_MAX = 500  # characters of a path or host that the code inside wrote


class EgressLog:
    """The log of one sandbox. `tell` records an event of it: its type, its cause, and details."""

    def __init__(
        self,
        sandbox: str,
        owner: str,
        audit: Audit | None,
        tell: Callable[..., None],
        now: Callable[[], float],
    ) -> None:
        self._sandbox = sandbox
        self._owner = owner
        self._audit = audit
        self._tell = tell
        self._now = now
        self._minute = -1
        self._counts = {"allowed": 0, "refused": 0, "events": 0}
        self._left_out = {"allowed": 0, "refused": 0, "events": 0}

    def add(self, decision: "EgressDecision") -> None:
        """Note a decision. Do not await: the proxy continues meanwhile."""
        if (minute := int(self._now() // _MINUTE_S)) != self._minute:
            self.report_dropped()
            self._minute = minute
            self._counts = dict.fromkeys(self._counts, 0)
        details = _details(decision)
        kind, most = ("allowed", _ALLOWED_MAX) if decision.allowed else ("refused", _REFUSED_MAX)
        if self._has_room(kind, most):
            what = "network.ended" if decision.ended and decision.allowed else f"network.{kind}"
            _log.debug("%s %s %s", what, self._sandbox, details)
            if self._audit is not None:
                self._audit.note("sbx", what, self._sandbox, owner=self._owner, **details)
        if not decision.allowed and self._has_room("events", _EVENTS_MAX):
            self._tell("network_refused", decision.rule, **details)

    def report_dropped(self) -> None:
        """Log the number of decisions that were only counted since the last report."""
        if not any(self._left_out.values()):
            return
        left_out, self._left_out = self._left_out, dict.fromkeys(self._left_out, 0)
        if self._audit is not None:
            self._audit.note(
                "sbx", "network.left_out", self._sandbox, owner=self._owner, **left_out
            )
        if left_out["events"]:
            self._tell("network_refused", "too_many", left_out=left_out["events"])

    def _has_room(self, kind: str, most: int) -> bool:
        if self._counts[kind] >= most:
            self._left_out[kind] += 1
            return False
        self._counts[kind] += 1
        return True


def _details(decision: "EgressDecision") -> dict[str, Any]:
    """Return its fields without empty ones, and without the query of the path, which often has
    keys."""
    path = decision.path and decision.path.partition("?")[0]
    details = {
        "host": decision.host[:_TEXT_MAX],
        "port": decision.port,
        "method": decision.method[:_TEXT_MAX],
        "path": path and path[:_TEXT_MAX],
        "address": decision.address,
        "rule": decision.rule,
        "reason": decision.reason[:_TEXT_MAX],
        "bytes_in": decision.bytes_in,
        "bytes_out": decision.bytes_out,
    }
    return {name: value for name, value in details.items() if value not in (None, "", 0)}
