"""The records of a run. Times are seconds since its begin; a record never changes."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

SURVEY = -1  # the client number of the survey at the end
NEVER_SENT = "refused"  # no connection, so the service has not seen the request
CUT = "cut"  # the connection ended before the reply
LATE = "late"  # no reply before the deadline of the client

Outcome = Literal["done", "not_done", "unknown"]
_UNKNOWN_STATUSES = (500, 504)


@dataclass(frozen=True, slots=True)
class Act:
    """One request and its reply.

    `kind` and `target` name the act and its object, `status` is None without a reply, and `code`
    is the code of an error, or NEVER_SENT, CUT or LATE. `key` is the name of the counter that the
    code of a run increments. `seen` is the content: the digest of a file, the result of a run, the
    answer to a question.
    """

    kind: str
    target: str
    client: int
    began: float
    ended: float
    status: int | None = None
    code: str = ""
    key: str = ""
    seen: Any = None

    @property
    def outcome(self) -> Outcome:
        """Return the promise of this reply about the act."""
        if self.status is None:
            return "not_done" if self.code == NEVER_SENT else "unknown"
        if 200 <= self.status < 300:
            return "done"
        if self.status in _UNKNOWN_STATUSES or self.code == "outcome_unknown":
            return "unknown"
        return "not_done"


@dataclass(frozen=True, slots=True)
class Life:
    """One process of the service, until it ended.

    `cause` is the fault that ended it, "" where none did. `ready` is None if it never answered.
    `excuse` names a fault that explains a failed start. `forced`: the bench had to kill it.
    """

    pid: int
    began: float
    ready: float | None
    ended: float
    exit_code: int
    cause: str = ""
    excuse: str = ""
    forced: bool = False


@dataclass(frozen=True, slots=True)
class Struck:
    """One fault. `note` is the reason why it could not be made, "" where it was made."""

    kind: str
    began: float
    ended: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class Sample:
    """The memory and the descriptors of one process of the service."""

    pid: int
    at: float
    rss_kib: int
    fds: int


@dataclass(slots=True)
class Ledger:
    """The records so far."""

    acts: list[Act] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)
    faults: list[Struck] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """Write a JSON line for each record, with its type as `record`."""
        records: Iterable[Any] = (*self.acts, *self.lives, *self.faults, *self.samples)
        with path.open("w") as file:
            for entry in records:
                line = {"record": type(entry).__name__.lower(), **asdict(entry)}
                file.write(f"{json.dumps(line)}\n")
            for left in self.left:
                file.write(f"{json.dumps({'record': 'left', 'what': left})}\n")
