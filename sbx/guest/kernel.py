"""What a kernel is told at its start, and the call that turns a sealed process into one.

Importing this module imports neither IPython nor asyncio: in the cold path the supervisor's
process loads it before the seal, and both are imported only after it, in `serve`.
"""

import gc
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

if TYPE_CHECKING:
    from sbx.guest.dispatch import Kernel
    from sbx.guest.shell import SandboxShell


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """The `kernel` part of the boot frame: `KernelConfig(**frame["kernel"])`."""

    preload: Sequence[str] = ()
    """Modules to import before the first cell; one that fails is named in `ready`."""
    import_rules: Mapping[str, Any] | None = None
    """`{"allow": [names] or None, "forbid": [names]}`; see `sbx.guest.import_rules`."""
    processes: bool = True
    user: str = "sandbox"
    home: str = "/workspace"
    cwd: str = "/workspace"
    output_max: int | None = None
    """Bytes a run may output, when its request does not say; None is without end."""
    mime_max: int = 8 * 1024 * 1024
    """Bytes of one rich output; what is larger makes way for a note."""
    planted: Mapping[str, str] | None = None
    """Files to be made below /tmp before the first cell: their paths, and what is in them."""


class Prepared(NamedTuple):
    """A shell, in a process that imported what it was to; `missing` says what failed, and why."""

    shell: "SandboxShell"
    missing: dict[str, str]


class Parked(NamedTuple):
    """A kernel that knows its socket, and nothing yet of whom it is for."""

    kernel: "Kernel"
    missing: dict[str, str]


def prepare(preload: Sequence[str] = ()) -> Prepared:
    """Import IPython and `preload`, and build the shell; starts no thread and writes no file.

    `serve` does this itself; a zygote does it once, before it forks.
    """
    from sbx.guest import shell

    # Before pyplot is imported, by us or by a cell: figures are drawn into the output.
    os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    built = shell.build()
    missing = {}
    with _out_of_the_workspace():
        for name in preload:
            try:
                __import__(name)
            except Exception as error:  # noqa: BLE001 - foreign code; the kernel works without it
                missing[name] = f"{type(error).__name__}: {error}"
    return Prepared(built, missing)


@contextmanager
def _out_of_the_workspace() -> Iterator[None]:
    """Libraries read configuration in the working directory and at home as they are imported
    (matplotlibrc, ~/.fonts.conf): an earlier kernel may have left a FIFO there, on which every
    start would hang."""
    home, cwd = os.environ.get("HOME"), os.getcwd()
    os.environ["HOME"] = "/"
    os.chdir("/")
    try:
        yield
    finally:
        os.chdir(cwd)
        del os.environ["HOME"]
        if home is not None:
            os.environ["HOME"] = home


def park(sock: socket.socket, prepared: Prepared, *, ahead: bool) -> Parked:
    """Build the kernel, in a fork of the zygote that is not sealed yet; reads nothing from `sock`.

    `ahead` of need its shell is run warm: whatever a first cell would touch is this process's own
    then. A collection would copy pages that no cell needs, so there is none until `start`.
    """
    from sbx.guest.dispatch import Kernel
    from sbx.guest.warming import warm

    gc.disable()
    kernel = Kernel(sock, prepared.shell)
    if ahead:
        warm(prepared.shell)
    gc.freeze()
    return Parked(kernel, prepared.missing)


def start(parked: Parked, config: KernelConfig) -> NoReturn:
    """Be the kernel until the other side closes its socket; then the process ends with code 0.

    Called once, in a process that is sealed and has one thread. Takes over descriptors 0, 1 and 2,
    the standard streams, SIGINT, and what `input` and `getpass` mean.
    """
    for name, value in (("HOME", config.home), ("USER", config.user), ("LOGNAME", config.user)):
        os.environ[name] = value
    for path, text in (config.planted or {}).items():
        _plant(path, text)
    os.chdir(config.cwd)
    sys.argv = [""]
    sys.dont_write_bytecode = True  # as PYTHONDONTWRITEBYTECODE says to all others: -I reads none
    # Last of all: a file in the workspace may shadow a module from here on, not before.
    sys.path.insert(0, "")
    gc.enable()
    parked.kernel.run(config, parked.missing)


def _plant(path: str, text: str) -> None:
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(fd, "w", encoding="utf-8") as file:
        file.write(text)


def serve(sock: socket.socket, config: KernelConfig) -> NoReturn:
    """All of it, in the cold path: `prepare` and `start`, in a process that is sealed."""
    from sbx.guest.dispatch import Kernel

    if sock.fileno() <= 2:
        raise ValueError("the kernel's socket must not be on a standard descriptor")
    prepared = prepare(config.preload)
    start(Parked(Kernel(sock, prepared.shell), prepared.missing), config)
