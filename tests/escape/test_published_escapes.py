"""Public escapes of agent sandboxes, tried on a sandbox of sbx. docs/security.md has the table."""

import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from attacking import Fresh, attack, one_path, run, tell

from sbx.errors import SbxError
from sbx.protocol.runs import Run
from sbx.runtime.sandbox import AsyncSandbox

# A kernel of each path has the same walls: test_attack_set.py compares them.
pytestmark = [pytest.mark.unprivileged, one_path()]

WALLS = (
    "grep -E '^(Uid|NoNewPrivs|Seccomp|Seccomp_filters|Cap...):' /proc/self/status;"
    " for n in user mnt net ipc uts cgroup; do readlink /proc/self/ns/$n; done;"
    " touch /usr/x /etc/x 2>&1 | wc -l"
)


async def test_every_way_to_start_a_process_has_the_same_walls(box: AsyncSandbox) -> None:
    """CVE-2026-32048: OpenClaw started a child outside of the sandbox of its agent."""
    shell = (await box.shell(WALLS)).stdout
    assert "Seccomp:\t2" in shell
    assert "NoNewPrivs:\t1" in shell
    assert "CapEff:\t0000000000000000" in shell
    assert shell.endswith("\n2\n")
    found = {"script": (await box.run_script(WALLS, "bash")).stdout}
    words = f"['bash', '-c', {WALLS!r}]"
    cell = await run(box, f"print(subprocess.run({words}, capture_output=True, text=True).stdout)")
    found["cell"] = cell.stdout.rstrip("\n") + "\n"
    command = await box.commands.start(WALLS)
    await command.wait()
    found["background command"] = (await command.logs()).text
    terminal = await box.terminals.open()
    try:
        await terminal.write(f"({WALLS}) > made; mv made ready\n".encode())
        await run(box, "while not os.path.exists('ready'): time.sleep(0.02)")
    finally:
        await terminal.close()
    found["terminal"] = (await box.files.read_bytes("ready")).decode()
    assert found == dict.fromkeys(found, shell)


Start = Callable[..., Awaitable[Any]]
DIRECTORIES = ("/", "/root", "/proc/1/root", "/proc/self/root/etc", "..", "../../..", "out", "x\0y")


async def test_a_working_directory_opens_nothing_of_the_host(
    fresh: Fresh, own_temporary_directory: Path
) -> None:
    """CVE-2025-59532: Codex took a working directory of the model as a directory to write to. Here
    a caller names it per command, and it moves no wall."""
    top = own_temporary_directory / "project"
    outside = own_temporary_directory / "outside"
    for made in (top, outside):
        made.mkdir()
        os.chown(made, 1000 if os.geteuid() == 0 else -1, -1)
    (top / "out").symlink_to(outside)
    (outside / "secret").write_text("secret of the host")
    box = await fresh(workspace=top)
    look = "cat secret; touch planted /usr/planted /etc/planted; echo tried"
    script: Start = partial(box.run_script, language="bash")
    starts: tuple[Start, ...] = (box.shell, script, box.commands.start)
    pairs: list[tuple[str, Start]] = [(cwd, start) for cwd in DIRECTORIES for start in starts]
    for cwd, start in pairs:
        try:
            started = await start(look, cwd=cwd)
        except SbxError:
            continue
        if isinstance(started, Run):
            assert "secret of the host" not in started.stdout
            assert "tried" not in started.stdout or started.stderr.count("cannot touch") >= 2
        else:
            await started.wait()
    for cwd in DIRECTORIES:
        with suppress(SbxError):
            terminal = await box.terminals.open(cwd=cwd)
            await terminal.close()
    assert [path.name for path in outside.iterdir()] == ["secret"]
    assert "planted" not in os.listdir(own_temporary_directory)


POISON = {
    "export": "export PATH=/workspace/evil LD_PRELOAD=/workspace/evil.so GIT_DIR=/workspace/evil",
    "typeset": "typeset -gx PATH=/workspace/evil; declare -x PAGER=/workspace/evil",
    "alias": "shopt -s expand_aliases; alias git='echo evil' ls='echo evil'",
    "function": "git() { echo evil; }; export -f git; function ls { echo evil; }",
    "BASH_ENV": "export BASH_ENV=/workspace/evil.sh ENV=/workspace/evil.sh",
    "PROMPT_COMMAND": "export PROMPT_COMMAND='echo evil' PS4='$(echo evil)'; set -x",
    "hash": "hash -p /workspace/evil git; enable -n test; trap 'echo evil' EXIT DEBUG; trap - EXIT",
    "startup files": "echo 'echo evil' | tee ~/.bashrc ~/.profile ~/.bash_profile ~/.bash_login",
    "kernel": "",
}


@pytest.mark.parametrize("how", POISON)
async def test_a_command_leaves_nothing_that_changes_the_next_one(
    box: AsyncSandbox, how: str
) -> None:
    """CVE-2026-22708: `export` passed the list of Cursor, and changed an allowed command later."""
    before = await box.shell("env | sort | grep -v ^_=; type git; echo | cat")
    if how == "kernel":
        await run(
            box,
            "os.environ.update(PATH='/workspace/evil', BASH_ENV='/workspace/evil.sh', PAGER='x')",
        )
    else:
        await box.shell(POISON[how])
    await box.shell("printf '#!/bin/sh\necho evil\n' > evil.sh; chmod +x evil.sh")
    after = await box.shell("env | sort | grep -v ^_=; type git; echo | cat")
    assert (after.stdout, after.stderr) == (before.stdout, before.stderr)


RESOLVERS = (
    "/run/nscd/socket /var/run/nscd/socket /run/systemd/resolve/io.systemd.Resolve"
    " /run/systemd/userdb/io.systemd.Multiplexer /run/dbus/system_bus_socket"
    " /run/avahi-daemon/socket /run/unscd/socket /var/lib/sss/pipes/nss"
)


async def test_no_service_of_the_host_resolves_a_name_for_the_code(box: AsyncSandbox) -> None:
    """CVE-2025-55284: names of DNS carried data out. A service of the host would ask for them, too,
    by the socket of a cache."""
    look = f"[p for p in {RESOLVERS.split()!r} if os.path.exists(p)]"
    assert await tell(box, look) == []
    search = """
found = []
for top in ('/run', '/var', '/etc', '/dev', '/home', '/mnt', '/root', '/srv', '/tmp'):
    for below, _, names in os.walk(top):
        found += [p for n in names if stat.S_ISSOCK(os.lstat(p := f"{below}/{n}").st_mode)]
found
"""
    assert await tell(box, search) == []
    for server in ("127.0.0.53", "8.8.8.8", "169.254.169.253"):
        send = (
            f"s = socket.socket(type=socket.SOCK_DGRAM); s.connect(({server!r}, 53)); s.send(b'x')"
        )
        receive = "; s.settimeout(0.5); s.recv(1)"
        assert await attack(box, send + receive) in ("ENETUNREACH", "ECONNREFUSED"), server


METADATA = ("169.254.169.254", "169.254.170.2", "fd00:ec2::254", "100.100.100.200")


async def test_no_metadata_service_is_reached_by_address_or_name(box: AsyncSandbox) -> None:
    """AgentCore: code read the credentials of its machine. test_network_by_proxy.py has the same
    with an egress proxy."""
    for address in METADATA:
        assert await attack(box, f"socket.create_connection(({address!r}, 80), 2)") in (
            "ENETUNREACH", "EHOSTUNREACH", "EADDRNOTAVAIL", "EAFNOSUPPORT",
        ), address  # fmt: skip
    for name in ("metadata.google.internal", "metadata", "instance-data.ec2.internal"):
        assert await attack(box, f"socket.create_connection(({name!r}, 80), 2)") == "gaierror", name
