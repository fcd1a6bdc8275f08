"""What a process inside does to itself so that no code it runs later can undo it.

Every process of a jail seals itself: a filter or a Landlock domain covers the one process that asks
for it and what it forks from then on, never its siblings.
"""

import os
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from sbx.linux import landlock, prctl, seccomp


class SealError(Exception):
    """A wall that could not be put up, with its name and the reason; fatal to the jail."""

    def __init__(self, layer: str, error: OSError) -> None:
        super().__init__(f"{layer}: {error}")
        self.layer = layer
        self.errno = error.errno


class _ForbidImports:
    """A finder that finds nothing and says so loudly: see `forbid_imports`."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> NoReturn:
        raise ImportError(f"{name} would be imported before the seal")


@contextmanager
def forbid_imports() -> Iterator[None]:
    """Until this block ends an import of anything not yet loaded raises.

    The workspace is mounted and the walls are not all up: a module found by accident in a place
    that user code can write would run outside them.
    """
    ban = _ForbidImports()
    sys.meta_path.insert(0, ban)
    try:
        yield
    finally:
        sys.meta_path.remove(ban)


def limit(rlimits: Mapping[str, int]) -> None:
    """setrlimit(2), soft and hard alike. NPROC counts in the jail's own user namespace by now."""
    for name, value in rlimits.items():
        try:
            which = getattr(resource, f"RLIMIT_{name}")
            _, hard = resource.getrlimit(which)
            lower = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(which, (lower, lower))
        except (OSError, ValueError) as error:
            reason = error if isinstance(error, OSError) else OSError(22, str(error))
            raise SealError(f"rlimit {name}", reason) from error


def enter_domain(walls: Mapping[str, Any]) -> int:
    """Restrict the calling process, which must have one thread, by Landlock; returns the ABI.

    A process that is in a domain already enters one nested in it: that is how the kernel and each
    command come to be out of each other's reach while PID 1 keeps its power over both.
    """
    if not walls["landlock"]:
        return 0
    rules: list[tuple[str | int, landlock.Files]] = [
        *_rules(walls["read"], landlock.Files.READ),
        *_rules(walls["write"], landlock.Files.EDIT),
        *_rules(walls["devices"], landlock.Files.DEVICE),
    ]
    try:
        return landlock.restrict(rules, scope_signals=True, scope_abstract_sockets=True).abi
    except OSError as error:
        raise SealError("landlock", error) from error


def add_filter(program_hex: str | None) -> None:
    """Stack the policy's second filter on the one that bubblewrap loaded."""
    if program_hex is None:
        return
    try:
        seccomp.install(bytes.fromhex(program_hex))
    except OSError as error:
        raise SealError("seccomp", error) from error


def close_all_but(fds: Sequence[int]) -> None:
    """Close every inherited descriptor except 0, 1, 2 and these."""
    kept = sorted({0, 1, 2, *fds})
    for low, high in zip(
        kept, [*kept[1:], resource.getrlimit(resource.RLIMIT_NOFILE)[0]], strict=True
    ):
        os.closerange(low + 1, high)


def check_unprivileged() -> None:
    """bubblewrap promised no capability and no_new_privs: see for ourselves, once."""
    with open("/proc/self/status", encoding="utf-8", errors="replace") as lines:
        status = dict(line.rstrip("\n").split(":\t", 1) for line in lines if ":\t" in line)
    if int(status["CapEff"], 16) or int(status["CapPrm"], 16) or int(status["CapBnd"], 16):
        raise SealError("capabilities", OSError(1, "bubblewrap left some"))
    if status["NoNewPrivs"] != "1":
        raise SealError("no_new_privs", OSError(1, "bubblewrap did not set it"))
    prctl.set_dumpable(True)


def _rules(paths: Sequence[str], rights: landlock.Files) -> list[tuple[str, landlock.Files]]:
    return [(path, rights) for path in paths if os.path.exists(path)]
