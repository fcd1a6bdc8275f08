"""The calls that turn a sealed process into a kernel.

Importing this module imports neither IPython nor asyncio. On the cold path the supervisor's process
loads it before the seal, and both are imported only after it, in `serve`.
"""

import gc
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from sbx.guest import machine
from sbx.guest.granted_packages import GrantedPackages
from sbx.guest.kernel.config import KernelConfig as KernelConfig

if TYPE_CHECKING:
    from sbx.guest.kernel.loop import KernelLoop
    from sbx.guest.kernel.shell import SandboxShell


class ImportedKernel(NamedTuple):
    """A shell in a process after the imports; `missing` has the failed ones, with the reason."""

    shell: "SandboxShell"
    missing: dict[str, str]


class WaitingKernel(NamedTuple):
    """A kernel that has its socket, and no owner yet."""

    kernel: "KernelLoop"
    missing: dict[str, str]


def prepare(
    preload: Sequence[str] = (), imported: Callable[[str], None] = lambda _: None
) -> ImportedKernel:
    """Import IPython and `preload`, and build the shell. Start no thread and write no file.
    `imported` is called after each module.

    `serve` does this itself; a zygote does it once, before it forks.
    """
    from sbx.guest.kernel import ending, shell

    # Set before the first import of pyplot, here or in a cell: figures are drawn into the output.
    os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    built = shell.build()
    missing = {}
    with _out_of_the_workspace():
        for name in preload:
            try:
                __import__(name)
            except Exception as error:  # noqa: BLE001 - foreign code; the kernel works without it
                missing[name] = f"{type(error).__name__}: {error}"
            imported(name)
    ending.keep_modules()
    return ImportedKernel(built, missing)


@contextmanager
def _out_of_the_workspace() -> Iterator[None]:
    """Import from `/` and with it as home.

    Libraries read configuration in the working directory and at home at import (matplotlibrc,
    ~/.fonts.conf). An earlier kernel may have left a FIFO there, on which every start would hang.
    """
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


def wait_for_sandbox(
    sock: socket.socket, prepared: ImportedKernel, *, ahead: bool
) -> WaitingKernel:
    """Build the kernel in a fork of the zygote that is not sealed yet. Read nothing from `sock`.

    With `ahead`, warm its shell: the pages that a first cell would write are then already copied.
    A collection would copy pages that no cell needs, so it is disabled until `start`.
    """
    from sbx.guest.kernel.loop import KernelLoop
    from sbx.guest.start.warmup import warm

    gc.disable()
    kernel = KernelLoop(sock, prepared.shell)
    if ahead:
        warm(prepared.shell)
    gc.freeze()
    return WaitingKernel(kernel, prepared.missing)


def start(idle: WaitingKernel, config: KernelConfig) -> NoReturn:
    """Be the kernel until its end in order, which raises Leave (see `ending`), or until the other
    side closes its socket; then the process ends at once with code 0.

    Call this once, in a sealed process with one thread. It takes over descriptors 0, 1 and 2, the
    standard streams, SIGINT, `input` and `getpass`.
    """
    for name, value in (("HOME", config.home), ("USER", config.user), ("LOGNAME", config.user)):
        os.environ[name] = value
    for path, text in (config.planted or {}).items():
        _plant(path, text)
    os.chdir(config.cwd)
    sys.argv = [""]
    sys.dont_write_bytecode = True  # -I ignores PYTHONDONTWRITEBYTECODE, which the others obey
    # The last step: from here on, and not before, a file in the workspace may shadow a module.
    sys.path.insert(0, "")
    if config.packages:
        sys.meta_path.append(GrantedPackages)
    machine.limit_answers()
    gc.enable()
    idle.kernel.run(config, idle.missing)


def _plant(path: str, text: str) -> None:
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(fd, "w", encoding="utf-8") as file:
        file.write(text)


def serve(sock: socket.socket, config: KernelConfig) -> NoReturn:
    """Do the whole start of the cold path: `prepare` and `start`, in a sealed process."""
    from sbx.guest.kernel.loop import KernelLoop

    if sock.fileno() <= 2:
        raise ValueError("the kernel's socket must not be on a standard descriptor")
    gc.disable()  # until `start`: collections would take 5 ms of the imports
    prepared = prepare(config.preload)
    gc.freeze()  # the modules of the start are not torn down: see `ending`
    start(WaitingKernel(KernelLoop(sock, prepared.shell), prepared.missing), config)
