"""All attacks. Their names tell them apart, in reports and in the names of tests."""

from sbx.runtime.attacks.attack import Attack
from sbx.runtime.attacks.calls import CALLS
from sbx.runtime.attacks.files import FILES
from sbx.runtime.attacks.host_executables import HOST_EXECUTABLES
from sbx.runtime.attacks.host_side import HOST_SIDE
from sbx.runtime.attacks.network import NETWORK
from sbx.runtime.attacks.processes import PROCESSES
from sbx.runtime.attacks.resources import RESOURCES, RUNS
from sbx.runtime.attacks.seal import SEAL

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
