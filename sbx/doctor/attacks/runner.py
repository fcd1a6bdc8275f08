"""Sandboxes of a policy, attacked: what held and what did not."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from sbx import errors
from sbx.doctor.attacks import probe_program
from sbx.doctor.attacks.attack import Attack, Outcome
from sbx.doctor.attacks.calls import CALLS
from sbx.doctor.attacks.decoys import MOUNTED, UPLOAD, Decoys
from sbx.doctor.attacks.files import FILES
from sbx.doctor.attacks.host_executables import HOST_EXECUTABLES, plant
from sbx.doctor.attacks.host_side import HOST_SIDE, act_on
from sbx.doctor.attacks.network import NETWORK
from sbx.doctor.attacks.processes import PROCESSES
from sbx.doctor.attacks.resources import RESOURCES, RUNS
from sbx.doctor.attacks.seal import SEAL
from sbx.policy import Policy
from sbx.protocol.runs import Run, Status
from sbx.runtime.runtime import Runtime
from sbx.runtime.sandbox import AsyncSandbox

# All attacks. Their names tell them apart, in reports and in the names of tests.
# What is tried by one program in one sandbox; those of the host side plant there what comes after.
TOGETHER: tuple[Attack, ...] = (
    *SEAL,
    *FILES,
    *PROCESSES,
    *NETWORK,
    *CALLS,
    *RESOURCES,
    *HOST_SIDE,
)
ALL = (*TOGETHER, *RUNS, *HOST_EXECUTABLES)
assert len({one.name for one in ALL}) == len(ALL)


# How a sandbox is asked for, so that its kernel starts by this path.
PATHS: Mapping[str, Mapping[str, Any]] = {
    "cold": {"pool": {"start": "cold"}},
    "pool": {},
    "fork": {"pool": {"max_idle": 0}},
}
# What bounds the sandbox that is attacked: with so few tasks linux is not kept busy by making them.
FEW: Mapping[str, Any] = {"limits": {"tasks_max": 40}}
_PRELUDE = "import sys, time\n"
_RUN_S = 25.0  # of all attacks that are tried together; some 300 of them take two


@dataclass(frozen=True, slots=True)
class AttackResult:
    """What became of one attack. `outcome` is None where nothing was heard of it."""

    attack: Attack
    outcome: str | None

    @property
    def end(self) -> Outcome:
        return Outcome.UNCLEAR if self.outcome is None else self.attack.judge(self.outcome)


@dataclass(frozen=True, slots=True)
class AttackRunner:
    """All attacks on one policy by one path; or why there were none, or not all. Seconds."""

    policy: str
    path: str
    duration_s: float
    results: tuple[AttackResult, ...] = ()
    error: errors.SbxError | None = field(default=None)

    def ended(self, end: Outcome) -> list[AttackResult]:
        return [one for one in self.results if one.end is end]


async def try_policy(
    runtime: Runtime, policy: Policy, path: str, baits: Decoys, *, runs: bool
) -> AttackRunner:
    """Attack one sandbox with all that can be tried together, and with `runs` one more for each
    attack that takes a run of its own, and those of a directory of the host. What fails is told."""
    began = time.monotonic()
    results: tuple[AttackResult, ...] = ()
    try:
        if path == "pool":
            await runtime.warm(policy)
        async with await runtime.create(policy, narrower={**FEW, **PATHS[path]}) as box:
            receipt = await box.start()
            if receipt.path != path:
                why = receipt.fallback or "the setting fast_path (SBX_FAST_PATH) is off"
                raise errors.Unavailable(f"the path {receipt.path} served instead: {why}")
            found = await attack(box, TOGETHER, baits)
            results = tuple(AttackResult(one, found.get(one.name)) for one in TOGETHER)
        if runs:
            results += tuple(
                await asyncio.gather(*(_alone(runtime, policy, path, one) for one in RUNS))
            )
            planted = await plant(runtime, policy)
            results += tuple(AttackResult(one, planted.get(one.name)) for one in HOST_EXECUTABLES)
    except errors.SbxError as error:
        return AttackRunner(policy.name, path, time.monotonic() - began, results, error)
    return AttackRunner(policy.name, path, time.monotonic() - began, results)


async def attack(box: AsyncSandbox, attacks: Sequence[Attack], baits: Decoys) -> dict[str, str]:
    """The outcomes by the names of the attacks; those are missing that nothing was heard of."""
    await box.uploads.put_bytes(UPLOAD, b"as it was uploaded\n")
    with suppress(errors.Unavailable):  # this host cannot mount into a live jail
        await box.mount(baits.shown, MOUNTED)
    code = probe_program.program(attacks, baits.known, limits(box.policy))
    run = await box.run(code, timeout=min(_RUN_S, box.policy.limits.wall_time))
    found = probe_program.outcomes(attacks, run.stdout)
    for one in attacks:
        if one.act and found.get(one.name) == "ok":
            found[one.name] = await act_on(box, one, baits)
    return found


def limits(policy: Policy) -> dict[str, int]:
    """What the attacks on resources go beyond."""
    return {
        "tasks": policy.limits.tasks_max,
        "open_files": policy.limits.open_files,
        "file_size": policy.limits.file_size_max,
        "tmp_size": policy.limits.tmp_size,
        "shm_size": policy.limits.shm_size,
    }


async def _alone(runtime: Runtime, policy: Policy, path: str, one: Attack) -> AttackResult:
    narrower = {**PATHS[path], **(one.narrower or {})}
    async with await runtime.create(policy, narrower=narrower) as box:
        return AttackResult(one, outcome_of(await box.run(_PRELUDE + one.code)))


def outcome_of(run: Run) -> str:
    """Of a whole run, in one word, as in attack.py."""
    if run.cause is not None:
        return f"killed:{run.cause}"
    if run.status is Status.ERROR and run.error is not None:
        return run.error.name
    return str(run.status)
