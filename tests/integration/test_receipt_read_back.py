"""What is in force is read back from the live jail, on every path, and goes into the audit log."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from persistent_sandboxes import ME

from sbx import AsyncSandbox, Runtime, Settings
from sbx.policy import load
from sbx.service.service import Service
from sbx.telemetry.audit_chain import verify

pytestmark = pytest.mark.core
EVERY = {"user", "mnt", "pid", "net", "ipc", "uts", "cgroup"}


@pytest.mark.parametrize("path", ["pool", "fork", "cold"])
@pytest.mark.unprivileged
async def test_a_receipt_read_back_says_what_stands(tmp_path: Path, path: str) -> None:
    pool = {"start": "cold"} if path == "cold" else {"max_idle": 1 if path == "pool" else 0}
    settings = Settings(data_dir=tmp_path / "data")
    async with Runtime(settings) as runtime:
        if path == "pool":
            await runtime.warm("default", count=1)
        narrower = {"pool": {"min_idle": 0, **pool}} if path == "fork" else {}
        policy: Any = "default"
        if path == "cold":
            default = load("default")
            policy = default.model_copy(
                update={"pool": default.pool.model_copy(update={"start": "cold"})}
            )
        async with await runtime.create(policy, narrower=narrower) as box:
            assert await box.read_receipt() is None
            standing = await box.start()
            found = await box.read_receipt()
            assert found is not None
            assert (found.path, found.changed) == (path, {})
            assert found.read_at >= standing.read_at > 0
            assert set(found.namespaces) == EVERY
            assert {name for name in EVERY if found.namespaces[name] == _own(name)} == set()
            assert found.host_namespaces == {name: _own(name) for name in EVERY}
            assert (found.seccomp_mode, found.no_new_privs, found.capabilities) == (2, True, 0)
            assert found.filters >= len(found.seccomp) >= 1
            assert found.limits == standing.limits
            await box.stop()
            assert await box.read_receipt() is None


async def test_what_became_otherwise_since_the_start_is_named(box: AsyncSandbox) -> None:
    """A process may add a filter of its own: nothing is lost by it, and it shows."""
    await box.start()
    run = await box.run(FILTER)
    assert run.ok, run
    found = await box.read_receipt()
    assert found is not None
    assert set(found.changed) == {"filters"}
    assert found.changed["filters"]["now"] == found.changed["filters"]["was"] + 1


FILTER = """
import ctypes
class F(ctypes.Structure):
    _fields_ = [("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte),
                ("k", ctypes.c_uint)]
class P(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.POINTER(F))]
program = P(1, ctypes.pointer(F(6, 0, 0, 0x7fff0000)))
assert ctypes.CDLL(None).prctl(22, 2, ctypes.byref(program), 0, 0) == 0
"""


@pytest.mark.needs("memory")
async def test_a_limit_is_read_from_its_group_and_not_from_memory(box: AsyncSandbox) -> None:
    receipt = await box.start()
    assert receipt.limits["memory_max"] is not None
    for file in _limit_files(box):
        file.write_text(str(receipt.limits["memory_max"] // 2))
    found = await box.read_receipt()
    assert found is not None
    assert found.changed["limits"]["now"]["memory_max"] == receipt.limits["memory_max"] // 2


def _limit_files(box: AsyncSandbox) -> list[Path]:
    """The limit of the sandbox's group, whatever kind it is."""
    pid = box.conversation("default").processes[0]
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        top = Path("/sys/fs/cgroup", controllers)
        if controllers == "memory":
            return [(top / group.lstrip("/")).parent / "memory.limit_in_bytes"]
        if controllers == "":
            return [(top / group.lstrip("/")).parent / "memory.max"]
    raise AssertionError("it is in no group")


async def test_each_start_goes_into_the_signed_audit_log(tmp_path: Path) -> None:
    async with Service(Settings(data_dir=tmp_path)) as service:
        made = await service.sandboxes.create(ME)
        async with service.sandboxes.using(ME, made.id, scope="execute") as use:
            receipt = await use.active.conversation("one").start()
            await use.active.conversation("one").stop()
            again = await use.active.conversation("one").start()
    log = tmp_path / "audit.jsonl"
    state_events = [json.loads(line) for line in log.read_text().splitlines()]
    starts = [one for one in state_events if one["what"] == "kernel.start"]
    assert [(one["object"], one["details"]["conversation"]) for one in starts] == [
        (made.id, "one"),
        (made.id, "one"),
    ]
    assert [one["details"]["sha256"] for one in starts] == [receipt.digest, again.digest]
    assert starts[0]["details"]["receipt"]["namespaces"] == receipt.namespaces
    key = (tmp_path / "audit_key").read_bytes().strip()
    assert (tmp_path / "audit_key").stat().st_mode & 0o777 == 0o600
    assert verify(log, key).ok
    log.write_text(log.read_text().replace('"capabilities":0', '"capabilities":1', 1))
    assert not verify(log, key).ok


async def test_the_log_does_not_delay_a_start(tmp_path: Path) -> None:
    """Its writer hangs, and kernels start all the same."""
    async with Service(Settings(data_dir=tmp_path)) as service:
        release = asyncio.Event()
        loop = asyncio.get_running_loop()
        service.audit._writing.submit(
            lambda: asyncio.run_coroutine_threadsafe(release.wait(), loop).result(100)
        )
        made = await service.sandboxes.create(ME)
        async with (
            asyncio.timeout(60),
            service.sandboxes.using(ME, made.id, scope="execute") as use,
        ):
            await use.active.conversation("one").start()
        release.set()
    starts = (tmp_path / "audit.jsonl").read_text().count('"kernel.start"')
    assert starts == 1


def _own(name: str) -> int:
    return os.stat(f"/proc/self/ns/{name}").st_ino
