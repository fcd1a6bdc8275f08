"""Terminals from inside: nobody's else is reached, nothing is typed for another, and what is
written to a screen makes this side do nothing."""

import asyncio
import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from attacking import Fresh, attack, attack_by_shell

from sbx.kernels import frames
from sbx.kernels.command import TerminalCommand
from sbx.runtime.processes.terminal import Terminal, TerminalClient
from sbx.runtime.sandbox import AsyncSandbox

pytestmark = pytest.mark.core
WAIT_S = 60.0


async def until(attached: TerminalClient, text: bytes) -> bytes:
    seen = b""
    async with asyncio.timeout(WAIT_S):
        while text not in seen:
            piece = await attached.read()
            assert piece, f"it ended: {seen!r}"
            seen += piece
    return seen


@pytest_asyncio.fixture
async def terminal(box: AsyncSandbox) -> AsyncIterator[Terminal]:
    made = await box.terminals.open(command="echo ready; exec cat")
    async with made.attach() as attached:
        await until(attached, b"ready")
    yield made
    await made.close()


@pytest.mark.unprivileged
async def test_typing_for_another_by_tiocsti_is_refused(
    box: AsyncSandbox, terminal: Terminal
) -> None:
    into = (
        "import fcntl; pty = next(one for one in os.listdir('/dev/pts') if one.isdecimal())\n"
        "fcntl.ioctl(os.open(f'/dev/pts/{pty}', os.O_RDWR), 0x5412, b'x')"
    )
    for outcome in (await attack(box, into), await attack_by_shell(box, into)):
        assert outcome in ("EPERM", "EACCES")
    own = await box.terminals.open(
        command="python3 -c 'import fcntl; fcntl.ioctl(0, 0x5412, b\"x\")' 2>&1 | tail -1; echo end"
    )
    async with own.attach() as attached:
        said = await until(attached, b"end")
    assert b"PermissionError" in said or b"not permitted" in said


async def test_a_terminal_of_another_jail_is_not_there(
    box: AsyncSandbox, terminal: Terminal, fresh: Fresh
) -> None:
    """Each jail has a devpts of its own: the same number is another terminal."""
    other = await fresh()
    await other.start()
    assert await attack(other, "os.open('/dev/pts/0', os.O_RDWR)") == "ENOENT"
    theirs = await other.terminals.open(command="cat")
    async with terminal.attach() as mine, theirs.attach() as seen:
        await theirs.write(b"for the other\n")
        await until(seen, b"for the other")
        run = await other.run("open('/dev/pts/0', 'w').write('from the other jail')")
        assert run.ok, run.error
        await until(seen, b"from the other jail")
        await mine.write(b"mine\n")
        said = await until(mine, b"mine\r\nmine")
        assert b"other" not in said


async def test_no_terminal_of_the_host_is_seen(box: AsyncSandbox, terminal: Terminal) -> None:
    inside = await box.run("import os; sorted(os.listdir('/dev/pts'))")
    assert inside.result is not None
    assert len(eval(inside.result)) == 2, inside.result  # its own, and ptmx
    device = await box.run("os.stat('/dev/pts').st_dev")
    assert device.result is not None
    assert int(device.result) != os.stat("/dev/pts").st_dev


async def test_a_command_cannot_signal_who_is_at_a_terminal(
    box: AsyncSandbox, terminal: Terminal
) -> None:
    """Each command has a Landlock domain of its own, as without a terminal."""
    if box.receipt is None or (box.receipt.landlock_abi or 0) < 6:
        pytest.skip("this linux has no Landlock scopes")
    find = (
        "pid = next(int(one) for one in os.listdir('/proc') if one.isdecimal()"
        " and open(f'/proc/{one}/cmdline').read().startswith('cat'))\n"
    )
    assert await attack_by_shell(box, f"{find}os.kill(pid, 9)") == "EPERM"
    assert await attack(box, f"{find}os.kill(pid, 9)") == "EPERM"
    assert terminal.running


ASKING = (
    b"\x1b[c\x1b[6n\x1b[5n\x1b[21t\x1bP$qm\x1b\\\x1b]52;c;?\x07\x1b]10;?\x07\x05\x1bZ"
    b"\x1b[?1049h\x1b[?25l\x1b[9999;9999H\x1b]0;$(touch /tmp/pwned)\x07"
)


async def test_sequences_on_a_screen_are_answered_by_nobody(box: AsyncSandbox) -> None:
    """An emulator that answers would type into the program that asked; this one draws only."""
    quoted = "".join(f"\\{byte:03o}" for byte in ASKING)
    terminal = await box.terminals.open(
        command=f"stty raw -echo; printf '{quoted}go'; read -t 1 -n 1 x; echo \"[$x]got\"; sleep 60"
    )
    async with asyncio.timeout(WAIT_S):
        while not any(  # noqa: ASYNC110  # nobody is attached, who would be told
            "got" in line for line in (await terminal.screen()).lines
        ):
            await asyncio.sleep(0.1)
    shown = await terminal.screen()
    assert any("[]got" in line for line in shown.lines)
    assert all(letter.isprintable() for line in shown.lines for letter in line)
    async with terminal.attach() as attached:
        drawn = await attached.read()
    for piece in (b"\x1b]", b"\x1bP", b"\x1b[6n", b"\x1b[c", b"\x1b[21t", b"\x05"):
        assert piece not in drawn
    await terminal.close()


async def test_a_flood_takes_bounded_memory_and_others_go_on(box: AsyncSandbox) -> None:
    terminal = await box.terminals.open(command="yes $(printf 'x%.0s' $(seq 200))")
    async with terminal.attach():  # and reads nothing
        for _ in range(20):
            async with asyncio.timeout(60):
                assert (await box.run("1 + 1")).result == "2"
            await asyncio.sleep(0.05)
    assert terminal.shows._held <= 128 << 10
    began = asyncio.get_running_loop().time()
    await terminal.close()
    assert asyncio.get_running_loop().time() - began < 20


async def test_more_than_was_granted_ends_the_kernel(fresh: Fresh) -> None:
    """A PID 1 that is not ours any more, and tells without end."""
    box = await fresh()
    terminal = await box.terminals.open(command="cat")
    command: TerminalCommand = terminal._command
    for _ in range(100):
        command.put(frames.Tty(data=b"x" * 65536))
    assert command.overran


async def test_a_fork_bomb_at_a_terminal_is_contained(fresh: Fresh) -> None:
    box = await fresh(narrower={"limits": {"tasks_max": 32}})
    await box.run("kept = 1")
    terminal = await box.terminals.open(command="bomb() { bomb | bomb & }; bomb; sleep 1")
    await asyncio.sleep(1)
    assert (await box.run("kept")).result == "1"
    await terminal.close()
