"""A request for a kernel, independent of the path by which it starts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sbx.isolation.plan import LaunchPlan
from sbx.kernels.pool.zygotes import Key


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """One requested kernel. `key` None: the cold path. `pooled`: it may be a parked one.

    `identities` are the (device, inode) that host paths of the plan must still have.
    """

    sandbox: str
    plan: LaunchPlan
    identities: Mapping[str, tuple[int, int]]
    config: Mapping[str, Any]
    key: Key | None
    pooled: bool = True
