"""Runs the unit that `sbx serve --print-unit` prints under a real systemd, and attacks it there.

    python tests/vm/unit.py [NAME ...]      as root: the system's unit; else the user's own

To be run like `attacks.py`, whose attacks are then struck at this service. Checks that systemd is
told when the service is ready, that every group lies below the unit's own, who the process is that
parses HTTP, who may connect, that a killed service comes again with the files of its sandboxes, and
that a stopped one leaves nothing.
"""

import asyncio
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT))

from sbx.client import Client  # noqa: E402
from sbx.errors import SbxError  # noqa: E402
from sbx.linux import procfs  # noqa: E402
from tests.vm import attacks  # noqa: E402

ROOT = os.geteuid() == 0
KIND = "system" if ROOT else "user"
SYSTEMCTL = ["systemctl"] if ROOT else ["systemctl", "--user"]
UNITS = Path("/etc/systemd/system" if ROOT else "~/.config/systemd/user").expanduser()
SETTINGS = Path("/etc/sbx" if ROOT else "~/.config/sbx").expanduser()
SOCKET = Path("/run" if ROOT else f"/run/user/{os.getuid()}") / "sbx" / "sbx.sock"


def command(*words: str) -> str:
    """What it says. Raises CalledProcessError."""
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=300).stdout


def unit_property(name: str) -> str:
    return command(*SYSTEMCTL, "show", "--value", "-p", name, "sbx.service").strip()


def install() -> None:
    UNITS.mkdir(parents=True, exist_ok=True)
    SETTINGS.mkdir(parents=True, exist_ok=True)
    if not (SETTINGS / "policies").exists():
        attacks.write_policy(SETTINGS / "policies")
    start_s = os.environ.get("SBX_START_TIMEOUT", "120")
    words = (f"SBX_POLICY_DIRS={SETTINGS}/policies", f"SBX_START_TIMEOUT={start_s}")
    (SETTINGS / "environment").write_text("\n".join((*words, "")))
    said = command(sys.executable, "-I", "-m", "sbx", "serve", "--print-unit", KIND)
    (UNITS / "sbx.service").write_text(said)
    (UNITS / "sbx.service.d").mkdir(exist_ok=True)
    slow = "[Service]\nTimeoutStartSec=600\n"  # this machine may be an emulated one
    (UNITS / "sbx.service.d" / "slow.conf").write_text(slow)
    command(*SYSTEMCTL, "daemon-reload")


def says(what: str) -> None:
    print(f"ok     {what}", flush=True)


def group() -> Path:
    return attacks.CGROUPS / unit_property("ControlGroup").lstrip("/")


def uid_of(pid: int) -> int:
    return Path(f"/proc/{pid}").stat().st_uid


def processes() -> list[int]:
    """Of the unit, in any group of it."""
    return [
        int(pid)
        for path in group().rglob("cgroup.procs")
        for pid in path.read_text().split()
        if group().exists()
    ]


async def starts() -> None:
    begun = time.monotonic()
    await asyncio.to_thread(command, *SYSTEMCTL, "start", "sbx.service")
    took = time.monotonic() - begun
    assert unit_property("ActiveState") == "active"
    async with Client(SOCKET) as client:  # no waiting: systemd was told that it is ready
        await client.health()
        async with await client.create(attacks.POLICY) as box:
            assert (await box.run("6 * 7")).result == "42"
            receipt = await box.read_receipt()
            assert receipt is not None
            inside = list(group().rglob(f"box-{box.id}"))
            assert len(inside) == 1, list(attacks.CGROUPS.rglob("box-*"))
            assert list(attacks.CGROUPS.rglob(f"box-{box.id}")) == inside
            uids = sorted({uid_of(pid) for pid in processes()})
    below = unit_property("ControlGroup")
    says(
        f"{KIND} unit is ready after {took:.1f} s; its groups lie below {below};"
        f" uids of its processes {uids}; a jail's {receipt.host_uid}"
    )


def parser_of_http() -> int:
    """The process that holds the listening socket: the only one of the service with sockets that
    strangers may write to."""
    held = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    inodes = {words[6] for words in held if words[-1] == str(SOCKET)}
    for pid in processes():
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            try:
                if os.readlink(fd).removeprefix("socket:[").rstrip("]") in inodes:
                    return pid
            except OSError:
                continue
    raise AssertionError(f"nobody listens on {SOCKET}")


def who_may_connect() -> None:
    uid = uid_of(parser_of_http())
    mode = SOCKET.stat().st_mode & 0o777
    if ROOT:
        assert uid != 0
        asking = f"import socket; socket.socket(socket.AF_UNIX).connect({str(SOCKET)!r})"
        stranger = ["setpriv", "--reuid=1000", "--clear-groups", sys.executable, "-c", asking]
        refused = subprocess.run(stranger, capture_output=True, text=True, check=False)
        assert "PermissionError" in refused.stderr, refused
    assert mode == 0o600, oct(mode)
    says(f"HTTP is parsed by uid {uid}; the socket is {mode:04o}, another user may not connect")


async def comes_again() -> None:
    """kill -9 for the main process, with a busy sandbox that has a file."""
    async with Client(SOCKET) as client:
        box = await client.create(attacks.POLICY, ttl_s=3600)
        await box.files.write("kept", "kept")
        busy = asyncio.create_task(box.run("while True: pass"))
        await asyncio.sleep(2)
        before, id = set(processes()), box.id
        command(*SYSTEMCTL, "kill", "--kill-whom=main", "-s", "KILL", "sbx.service")
        with suppress(SbxError):
            await busy
    begun = time.monotonic()
    async with Client(SOCKET) as client:
        await attacks.ready(client)
        took = time.monotonic() - begun
        again = client.sandbox(id)
        assert await again.files.read("kept") == "kept"
        assert (await again.run("6 * 7")).result == "42"
        old = before & set(processes())
        assert not old, [(pid, procfs.children(pid)) for pid in old]
        await again.close()
    assert int(unit_property("NRestarts")) == 1
    says(f"a killed service answers again after {took:.1f} s, with its files and nothing of before")


async def stops() -> None:
    where = group()
    begun = time.monotonic()
    await asyncio.to_thread(command, *SYSTEMCTL, "stop", "sbx.service")
    took = time.monotonic() - begun
    assert unit_property("ActiveState") == "inactive", unit_property("ActiveState")
    assert unit_property("Result") == "success", unit_property("Result")
    assert not where.exists(), list(where.rglob("*"))
    assert not list(attacks.CGROUPS.rglob("sbx-*"))
    says(f"a stopped one has no group and no process after {took:.1f} s")


async def main(names: list[str]) -> int:
    print(f"{command('systemctl', '--version').splitlines()[0]}, unit {KIND}")
    install()
    try:
        await starts()
        who_may_connect()
        failed = await attacks.strike_at(SOCKET, names)
        await comes_again()
        await stops()
    except BaseException:
        print(
            unit_property("StatusText"),
            unit_property("Result"),
            unit_property("ExecMainStatus"),
            file=sys.stderr,
        )
        raise
    return failed


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1:])))
