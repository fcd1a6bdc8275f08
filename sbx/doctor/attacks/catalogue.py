"""All attacks. Their names tell them apart, in reports and in the names of tests."""

from sbx.doctor.attacks.attack import Attack
from sbx.doctor.attacks.calls import CALLS
from sbx.doctor.attacks.files import FILES
from sbx.doctor.attacks.host_executables import HOST_EXECUTABLES
from sbx.doctor.attacks.host_side import HOST_SIDE
from sbx.doctor.attacks.network import NETWORK
from sbx.doctor.attacks.processes import PROCESSES
from sbx.doctor.attacks.resources import RESOURCES, RUNS
from sbx.doctor.attacks.seal import SEAL

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
