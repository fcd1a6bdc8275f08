"""Each attack of `sbx doctor --attack`, on a cell of the matrix path, policy and user, and each
seen to get through where its wall is missing, or this host has nothing there.

All of them are tried once for the module, in one sandbox, and once for each control; a test is what
became of one. `attacked_cells` in attacking.py has the cells of each tier, and
test_attack_set_as_another.py runs this as another user.
"""

import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from attacking import Fresh
from controls import bare, in_a_jail_without, naively, planted

from sbx import Runtime
from sbx.doctor.attacks.attack import Attack, Class, Outcome
from sbx.doctor.attacks.decoys import Decoys, laid_out
from sbx.doctor.attacks.host_side import HOST_SIDE
from sbx.doctor.attacks.resources import RUNS
from sbx.doctor.attacks.runner import FEW, TOGETHER, attack, outcome_of, results_of, run_of
from sbx.errors import CannotEnforce
from sbx.isolation.plan import decide_walls
from sbx.policy import Policy, load

JAILS = {  # what each control jail lacks
    "no seccomp": ("seccomp",),
    "no Landlock": ("landlock",),
    "neither": ("seccomp", "landlock"),
    "no rlimits": ("rlimits",),
    "no pins": ("pins",),
}
# Where an attack gets through whose first wall is this one: at the first if it is the only one that
# stands in the way, else further on.
CONTROLS = {
    "seccomp": ("no seccomp", "neither", "bare", "own root"),
    "landlock": ("no Landlock", "neither", "bare", "own root"),
    "namespaces": ("bare", "own root"),
    "mounts": ("no pins", "bare"),
    "masks": ("bare",),
    "privileges": ("own root", "bare"),
    "rlimits": ("no rlimits", "bare"),
    "limits": ("bare",),
    "runtime": ("bare",),
}
# What a host may lack, or refuse to its own root: only these may be without a control.
MAY_LACK = frozenset(
    """
    open /proc/sys/kernel/modprobe for writing|open sysrq-trigger for writing
    register a binary format|open the uevent helper|open the memory of the machine|open a disk
    open the memory of Linux|open the log of Linux|open a release agent of cgroups
    open the tunnel device|open the file system device|open the loop devices
    open the virtual machines|open the page fault device
    open a socket of the machine's monitor|open a socket of Linux's ciphers|open an XDP socket
    open a TIPC socket|open a CAN socket|open a Bluetooth socket|open an RDS socket
    open an SMC socket|open a KCM socket|open a router's IPC socket|open a key management socket
    open a phone network socket|open a near field socket|open a multipath socket
    open an SCTP socket|open a DCCP socket|open a UDP-Lite socket
    ask Linux by netlink for ciphers|ask Linux by netlink for iSCSI|ask Linux by netlink for SELinux
    load a module|load a module from a file|remove a module|load another Linux
    load another Linux from a file|reach the ports of the machine|reach one port of the machine
    change the segments of the processor|ask for a kept directory|load a library by the old call
    ask about a file system by the old call|ask for file systems by number
    serve files by the old call|set a value by the old call|hide memory from Linux
    a call that is newer than the filter|a call that is much newer than the filter
    a call of the table for x32|a call by the gate of 32 bits
    raise the limit NOFILE|raise the limit NPROC|raise the limit FSIZE|raise the limit MEMLOCK
    see more processes than a sandbox may have
    raise the limit CORE|raise the limit SIGPENDING|have a larger pipe|take large pages
    """.replace("\n", "|")
    .replace("    ", "")
    .split("|")
)


@dataclass(frozen=True)
class Tried:
    """The outcomes by the names of the attacks: inside, and in each control."""

    inside: dict[str, str]
    controls: dict[str, dict[str, str]]

    def without(self, one: Attack) -> dict[str, str]:
        """What became of it in those controls that it was tried in."""
        return {
            name: self.controls[name][one.name]
            for name in CONTROLS[one.layer]
            if one.name in self.controls.get(name, ())
        }

    def proven(self, one: Attack) -> bool:
        return any(one.judge(outcome) is Outcome.ESCAPED for outcome in self.without(one).values())

    def wanted(self, name: str) -> list[Attack]:
        """Which attacks are for this control, and did not get through in one before."""
        return [one for one in TOGETHER if name in CONTROLS[one.layer] and not self.proven(one)]


@pytest.fixture(scope="module")
def baits() -> Iterator[Decoys]:
    with laid_out() as baits:
        yield baits


@pytest_asyncio.fixture(scope="module")
async def attacked_runtime(baits: Decoys, started_by: str) -> AsyncIterator[Runtime]:
    """Started when the baits are laid out, so that its environment has theirs."""
    async with Runtime() as runtime:
        yield runtime


@pytest_asyncio.fixture(scope="module")
async def tried(
    attacked_runtime: Runtime, attacked_policy: str, baits: Decoys, started_by: str
) -> Tried:
    policy = on_this_host(load(attacked_policy), attacked_runtime)
    create = attacked_runtime.create
    async with await create(policy, narrower=FEW) as box:
        inside = await attack(box, TOGETHER, baits)
    found = Tried(inside, {})
    for name, walls in JAILS.items():
        found.controls[name] = await in_a_jail_without(
            walls, found.wanted(name), baits, fresh=create, policy=policy, path=started_by
        )
    for name, own_root in (("bare", False), ("own root", True)):
        with tempfile.TemporaryDirectory() as place:
            found.controls[name] = bare(
                found.wanted(name), baits, policy, Path(place), own_root=own_root
            )
    with tempfile.TemporaryDirectory() as place:
        planted(HOST_SIDE, baits, policy, Path(place))
        found.controls["bare"] |= {one.name: naively(one, Path(place), baits) for one in HOST_SIDE}
    return found


def on_this_host(policy: Policy, runtime: Runtime) -> Policy:
    """The policy; with limits by lesser means where this host, or user, has no cgroups to give."""
    try:
        decide_walls(policy, runtime.capabilities)
    except CannotEnforce:
        return policy.model_copy(update={"walls": load("default").walls})
    return policy


@pytest.mark.parametrize("one", TOGETHER, ids=lambda one: one.name)
async def test_attack_is_held_and_gets_through_without_its_wall(
    one: Attack, tried: Tried, attacked_policy: str
) -> None:
    (result,) = results_of((one,), tried.inside, load(attacked_policy))
    if result.end is Outcome.NOT_APPLICABLE:
        pytest.skip(result.reason)
    assert result.end is Outcome.HELD, (result.outcome, result.reason)
    if tried.proven(one):
        return
    found = tried.without(one)
    if one.name in MAY_LACK:
        pytest.skip(f"this host has nothing there, or lets nobody: {found}")
    if os.geteuid() != 0:
        pytest.skip(f"only root would get through: {found}")
    pytest.fail(f"held without its wall as well: {found}")


@pytest.mark.parametrize("one", RUNS, ids=lambda one: one.name)
async def test_run_is_ended_by_its_limit_and_by_no_wider_one(
    one: Attack, attacked_runtime: Runtime, attacked_policy: str, fresh: Fresh
) -> None:
    policy = on_this_host(load(attacked_policy), attacked_runtime)
    code = run_of(one)
    box = await fresh(policy, narrower=one.narrower, on=attacked_runtime)
    assert outcome_of(await box.run(run_of(one, is_control=True))) == "ok"
    ended = outcome_of(await box.run(code))
    assert one.judge(ended) is Outcome.HELD, ended
    if not one.narrower:  # a bound of sbx's own, which no policy widens
        return
    wider = await fresh(policy, on=attacked_runtime)
    assert outcome_of(await wider.run(code)) == "ok"


async def test_most_attacks_are_seen_to_get_through_somewhere(tried: Tried) -> None:
    """So that what a host may lack is never most of it."""
    proven = [one for one in TOGETHER if tried.proven(one)]
    assert len(proven) >= 150
    # host_directory/test_attack_class.py proves the class that needs a directory of the host
    assert {one.kind for one in proven} == {*Class} - {Class.HOST_EXECUTABLES}
