"""The policy and the limits of a sandbox that an SDK of another product requests.

Their images and templates are names here: the setting `templates` maps each to a policy. Their
limits are upper bounds of what the sandbox needs, and their SDKs always send some. So a limit above
that of the policy is the policy's.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from sbx.errors import BadRequest
from sbx.policy.checks import env_name
from sbx.policy.units import parse_size
from sbx.service.service import Service

_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,3})?) ?([KMGT]?)(?:i?B?)", re.IGNORECASE)
_CPUS = re.compile(r"(\d{1,6}(?:\.\d{1,6})?)(m?)")


def deny_not_enforced(hosts: Sequence[str]) -> BadRequest:
    """Return the error for hosts that a request denies and its policy would still reach: `allow`
    of a policy lists hosts, and has no exceptions."""
    return BadRequest(
        f"sbx cannot deny single hosts: {', '.join(hosts)[:200]}",
        code="deny_not_supported",
        hint="deny all hosts, and allow those that the sandbox needs",
    )


def split_environment(env: Mapping[str, str] | None) -> tuple[dict[str, str], dict[str, str]]:
    """Return the variables that a sandbox may have, and those that only its commands may have:
    sbx itself sets them for a kernel (PYTHONPATH, HOME, …)."""
    for_all, for_commands = {}, {}
    for name, value in (env or {}).items():
        try:
            env_name(name)
        except ValueError:
            for_commands[name] = value
        else:
            for_all[name] = value
    return for_all, for_commands


async def limits_within(
    service: Service, profile: str, *, cpus: object = None, memory: object = None
) -> dict[str, Any]:
    """Return the `narrower` of a new sandbox: the requested CPUs and bytes of memory, or the limits
    of the policy where they are smaller. Raise BadRequest."""
    loaded, _ = await service.runtime.decide(profile)
    limits: dict[str, Any] = {}
    if cpus is not None and (count := cpu_count(cpus)) < loaded.limits.cpu_quota:
        limits["cpu_quota"] = f"{count * 100:.6g}%"
    if memory is not None and (size := memory_size(memory)) < loaded.limits.memory_max:
        limits["memory_max"] = size
    return {"limits": limits} if limits else {}


def memory_size(value: object) -> int:
    """Return the bytes of `512m`, `1g`, `2Gi` or a number: the units of Docker and Kubernetes, all
    as powers of 1024. Raise BadRequest."""
    match = _SIZE.fullmatch(str(value).strip())
    if match is None:
        raise BadRequest(
            f"{str(value)[:40]!r} is not a size such as 512m or 2Gi", details={"field": "memory"}
        )
    unit = match[2].upper()
    return parse_size(f"{match[1]}{unit}{'iB' if unit else 'B'}")


def cpu_count(value: object) -> float:
    """Return the CPUs of `0.5`, `2` or `500m`. Raise BadRequest."""
    match = _CPUS.fullmatch(str(value).strip())
    count = float(match[1]) / (1000 if match[2] else 1) if match else 0.0
    if count <= 0:
        raise BadRequest(
            f"{str(value)[:40]!r} is not a number of CPUs such as 0.5", details={"field": "cpus"}
        )
    return count
