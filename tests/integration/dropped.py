"""A program that gives up root as `sbx serve` does, then uses a sandbox and tells what it could.

Run by test_serve_privileges, with a directory as its argument; prints one JSON document.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvloop

from sbx import Runtime, errors
from sbx.api.server import privileges
from sbx.api.server.settings import ServiceSettings
from sbx.isolation.broker.process import BrokerProcess, start_broker
from sbx.isolation.launch_plan import GroupLimits
from sbx.linux import capabilities


def outcome(act: Callable[[], object]) -> str:
    try:
        act()
    except OSError as error:
        return str(error.strerror)
    return "ok"


def attempts(data: Path, broker: int) -> dict[str, str]:
    """What whoever took over this process would try."""
    mine = data / "mine"
    return {
        "read shadow": outcome(lambda: Path("/etc/shadow").read_bytes()),
        "read root's home": outcome(lambda: os.listdir("/root")),
        "write /etc": outcome(lambda: Path("/etc/sbx-was-here").write_text("")),
        "write /usr": outcome(lambda: Path("/usr/sbx-was-here").write_text("")),
        "write /tmp": outcome(lambda: Path("/tmp/sbx-was-here").write_text("")),
        "chmod shadow": outcome(lambda: os.chmod("/etc/shadow", 0o666)),
        "chown a program": outcome(lambda: os.chown("/usr/bin/env", os.getuid(), 0)),
        "see /run": outcome(lambda: os.listdir("/run")),
        "write the data": outcome(lambda: mine.write_text("x")),
        "give it to a jail": outcome(lambda: os.chown(mine, 1_900_000_005, 1_900_000_005)),
        "set-id": outcome(lambda: os.chmod(mine, 0o4755)),
        "device": outcome(lambda: os.mknod(data / "sda", 0o60600, os.makedev(8, 0))),
        "read it still": outcome(mine.read_text),
        "remove it": outcome(mine.unlink),
        "become root": outcome(lambda: os.setresuid(0, 0, 0)),
        "kill the broker": outcome(lambda: os.kill(broker, 9)),
        "read the broker": outcome(lambda: open(f"/proc/{broker}/mem", "rb").close()),
        "connect to another's socket": outcome(lambda: connect(data.parent / "theirs.sock")),
        "see what else is there": outcome(lambda: os.stat(data.parent / "theirs.sock")),
        "see /var": outcome(lambda: os.stat("/var/lib")),
        "see /sys": outcome(lambda: os.stat("/sys/kernel")),
        "see terminals": outcome(lambda: os.stat("/dev/pts")),
        "temporary": outcome(lambda: tempfile.TemporaryFile().close()),
    }


def connect(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(str(path))


def child_capabilities() -> str:
    script = "print(*[l for l in open('/proc/self/status') if l.startswith('CapPrm')])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return done.stdout.split()[-1]


async def sandbox(settings: ServiceSettings, broker: BrokerProcess) -> dict[str, Any]:
    answer: dict[str, Any] = {}
    async with Runtime(settings, broker=broker) as runtime:
        async with await runtime.create() as box:
            made = await box.run(
                "import os, pathlib\n"
                "os.makedirs('deep/er'); pathlib.Path('deep/er/f').write_text('x')\n"
                "os.chmod('deep/er', 0); os.chmod('deep', 0o1700)\n"
                "pathlib.Path('a').write_text('made inside'); os.chmod('a', 0); 1 + 1"
            )
            answer["run"] = made.text.strip()
            assert box.receipt is not None
            answer["host uid"] = box.receipt.host_uid
            answer["path"] = box.receipt.path
            answer["read"] = await box.files.read("a")
            await box.files.write("b/c", b"made outside")
            answer["shell"] = (await box.shell("cat b/c && echo more >> b/c && rm b/c")).text
            (settings.data / "tmp" / "u.csv").write_text("1,2")
            await box.uploads.put(settings.data / "tmp" / "u.csv")
            answer["upload"] = (await box.shell("cat uploads/temparea/u.csv")).text
            await box.files.delete("deep")
            await box.files.delete("a")
            answer["left"] = sorted(entry.name for entry in await box.files.list())
        own = runtime._broker
        assert own is not None
        for name, uid in (("a stranger's uid", 1000), ("root's uid", 0)):
            answer[name] = "given"
            try:
                await own.make_sandbox("x", GroupLimits(None, None, None), uid)
            except errors.Broken:
                answer[name] = "refused"
        orders: dict[str, dict[str, Any]] = {
            "another program": {"do": "start_zygote", "zygote": "z", "bwrap": "/bin/true"},
            "a second greeting": {"do": "hello"},
        }
        for name, order in orders.items():
            try:
                await own.order(**order)
            except errors.Broken as error:
                answer[name] = error.message
    answer["directories"] = os.listdir(settings.data / "sandboxes")
    return answer


def main(top: Path) -> None:
    data, sockets = top / "data", top / "run"
    sockets.mkdir(mode=0o700)
    environments = top / "environments"  # not there, as on a host where nobody has made any
    settings = ServiceSettings(
        data_dir=data, socket=sockets / "sbx.sock", environments=environments
    )
    account = privileges.account_of(settings)
    privileges.prepare_data(data, account)
    theirs = socket.socket(socket.AF_UNIX)
    theirs.bind(str(top / "theirs.sock"))
    theirs.listen()
    connect(top / "theirs.sock")
    broker = start_broker(uids=settings.uid_range)
    shown = privileges.confine(broker, settings, account, writable=[data, sockets])
    privileges.drop(settings, account, writable=[data, sockets], shown=shown)
    answer: dict[str, Any] = {
        "ids": [*os.getresuid(), *os.getresgid(), *os.getgroups()],
        "capabilities": list(capabilities.current()),
        "attempts": attempts(data, broker.process.pid),
        "child": child_capabilities(),
    }
    theirs.close()
    answer["sandbox"] = uvloop.run(sandbox(settings, broker))
    threads = asyncio.run(asyncio.to_thread(lambda: list(capabilities.current())))
    print(json.dumps(answer | {"of a thread": threads}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
