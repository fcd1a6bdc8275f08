"""What a kernel is told at its start, and the call that turns a sealed process into one.

Importing this module imports neither IPython nor asyncio: in the cold path the supervisor's
process loads it before the seal, and both are imported only after it, in `serve`.
"""

import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
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


def prepare(preload: Sequence[str] = ()) -> "tuple[SandboxShell, dict[str, str]]":
    """Import IPython and `preload`, and build the shell; starts no thread and writes no file.

    `serve` does this itself; a zygote does it once, before it forks. The second value says which
    modules could not be imported, and why.
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
    return built, missing


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


def serve(sock: socket.socket, config: KernelConfig) -> NoReturn:
    """Be the kernel on `sock` until the other side closes it; then the process ends with code 0.

    Called once, in a process that is sealed and has one thread. Takes over descriptors 0, 1 and 2,
    the standard streams, SIGINT, and what `input` and `getpass` mean.
    """
    if sock.fileno() <= 2:
        raise ValueError("the kernel's socket must not be on a standard descriptor")
    os.environ.update(HOME=config.home, USER=config.user, LOGNAME=config.user)
    os.chdir(config.cwd)
    shell, missing = prepare(config.preload)
    from sbx.guest.dispatch import Kernel

    kernel = Kernel(sock, shell, config)
    sys.argv = [""]
    # Last of all: a file in the workspace may shadow a module from here on, not before.
    sys.path.insert(0, "")
    kernel.run(missing)
