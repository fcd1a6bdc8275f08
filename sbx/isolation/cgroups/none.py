"""No cgroups here: the same contract, which limits nothing, counts nothing and kills nobody.

It exists so that the caller has one path. What holds the jail then is rlimits and a watcher, and
what ends it is SIGKILL for PID 1 of its PID namespace.
"""

from typing import NamedTuple

from sbx.isolation.cgroups.contract import CgroupEvents, CgroupLimits, CgroupUsage
from sbx.isolation.cgroups.probe import CgroupCapabilities


class NoHierarchy(NamedTuple):
    capabilities: CgroupCapabilities

    @property
    def version(self) -> int:
        return 0

    def make_sandbox(self, name: str, limits: CgroupLimits) -> "NoSandbox":
        return NoSandbox()

    def sweep(self) -> list[str]:
        return []

    def close(self, deadline_s: float = 2.0) -> None:
        pass


class NoSandbox:
    path = ""

    def make_jail(self, name: str) -> "NoJail":
        return NoJail()

    def usage(self) -> CgroupUsage:
        return CgroupUsage()

    def watch_memory(self) -> int | None:
        return None

    def throttle(self, on: bool) -> None:
        pass

    def remove(self, deadline_s: float = 2.0) -> None:
        pass


class NoJail:
    path = ""

    def enter(self) -> None:
        pass

    def entries(self) -> list[int]:
        return []

    def pids(self) -> list[int]:
        return []

    def populated(self) -> bool:
        return False

    def kill(self) -> None:
        pass

    def events(self) -> CgroupEvents:
        return CgroupEvents()

    def usage(self) -> CgroupUsage:
        return CgroupUsage()

    def limits(self) -> CgroupLimits:
        return CgroupLimits()

    def remove(self, deadline_s: float) -> None:
        pass
