"""A data directory: whose it is, and whether a service runs on it."""

import asyncio
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from sbx.errors import Conflict, Denied, NotFound
from sbx.linux import capabilities, locks
from sbx.runtime.data_dir import LOCK, locked
from sbx.store import FILE_NAME, marks
from sbx.telemetry.audit import Audit
from sbx.workspace.errors import translated
from sbx.workspace.secret_files import secret_at


def demand(data: Path) -> Path:
    """Return the path without symlinks of a data directory. Raises NotFound."""
    real = Path(os.path.realpath(data))
    if any((real / name).exists() for name in (FILE_NAME, marks.FILE, "sandboxes")):
        return real
    raise NotFound(
        f"{data} is not a data directory of sbx",
        code="no_data_directory",
        hint="name the data directory of the service: --data-dir DIR",
    )


@contextmanager
def as_owner(data: Path) -> Iterator[None]:
    """Act as the account of the service, which owns the directory, if the caller is root: new files
    are its own, and a link that it made leads to nothing that it may not write. Only reading stays
    permitted to root, as the directory may lie in one of root. Raises Denied `not_the_owner`."""
    owner = os.stat(data)
    if os.geteuid() == owner.st_uid:
        yield
        return
    if os.geteuid() != 0:
        raise Denied(
            f"the data directory {data} belongs to another user",
            code="not_the_owner",
            hint="run the command as root, or as the account of the service",
        )
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(owner.st_gid)
    os.seteuid(owner.st_uid)
    capabilities.make_effective(1 << capabilities.CAP_DAC_READ_SEARCH)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(os.getgid())
        os.setgroups(groups)


@contextmanager
def ended(data: Path) -> Iterator[None]:
    """Hold the lock of a data directory, so that no service starts. Raises Conflict
    `service_running`."""
    running = Conflict(
        f"the service of the data directory {data} is running",
        code="service_running",
        hint="end the service first, for instance with systemctl stop sbx",
    )
    with ExitStack() as stack:
        with translated(str(data / LOCK)):
            stack.enter_context(locked(data / LOCK, running))
        yield


def is_running(data: Path) -> bool:
    """Whether a service holds the lock. Changes nothing, also on a read-only file system."""
    try:
        lock = os.open(data / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not locks.try_lock(lock)
    finally:
        os.close(lock)


@contextmanager
def backing_up(data: Path) -> Iterator[None]:
    """Hold a lock of the data directory, for one backup at a time. Raises Conflict
    `backup_running`."""
    running = Conflict(
        f"another backup of {data} is being made",
        code="backup_running",
        hint="try again when it has ended",
    )
    with locked(data, running, directory=True):
        yield


def record(data: Path, what: str, name: str, **details: Any) -> None:
    """Add a line to the audit log of a service that has ended. Raises Unavailable."""

    async def written() -> None:
        key = secret_at(data / "audit_key")
        audit = await Audit.open(data / "audit.jsonl", key=key)
        try:
            await audit.record(f"uid:{os.getuid()}", what, name, **details)
        finally:
            await audit.close()

    asyncio.run(written())
