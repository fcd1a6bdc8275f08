"""Terminals by their own methods, embedded and connected."""

import asyncio

import pytest

from both_faces.faces import Box, Make
from sbx import errors
from sbx.protocol.terminals import TERMINALS_MAX

pytestmark = pytest.mark.core
WAIT_S = 60.0


async def until(attached: object, text: bytes, seen: bytes = b"") -> bytes:
    """Read until this is there; all that was read."""
    pieces = [seen]
    tail = seen
    async with asyncio.timeout(WAIT_S):
        while text not in tail:
            piece = await attached.read()  # type: ignore[attr-defined]
            assert piece, f"it ended: {tail!r}"
            pieces.append(piece)
            tail = (tail + piece)[-4096:]
    return b"".join(pieces)


async def test_typed_bytes_go_in_and_written_ones_come_out(box: Box) -> None:
    terminal = await box.terminals.open(rows=30, columns=90, env={"GIVEN": "x y"}, cwd="/tmp")
    async with terminal.attach() as attached:
        await attached.write(b'stty size; pwd; echo "[$GIVEN]"; tty\n')
        said = await until(attached, b"/dev/pts/")
        assert b"30 90" in said
        assert b"/tmp" in said
        assert b"[x y]" in said
        await attached.write("echo 'ä€🙂' | od -An -tx1; exit 3\n".encode())
        await until(attached, b"f0 9f 99 82")
        async with asyncio.timeout(WAIT_S):
            while await attached.read():
                pass
        assert attached.ended == (3, "")
    status = await terminal.status()
    assert (status.running, status.exit_code, status.attached) == (False, 3, 0)


async def test_every_byte_goes_both_ways(box: Box) -> None:
    terminal = await box.terminals.open(
        command="stty raw -echo; echo go; head -c 256 | od -An -v -tu1"
    )
    async with terminal.attach() as attached:
        await until(attached, b"go")
        await attached.write(bytes(range(256)))
        said = b""
        while piece := await attached.read():
            said += piece
    assert [int(one) for one in said.split()] == list(range(256))
    terminal = await box.terminals.open(
        command="stty raw; echo go; read -r; head -c 300000 /dev/zero | tr '\\0' '\\377'"
    )
    async with terminal.attach() as attached:
        await until(attached, b"go")
        await attached.write(b"\n")
        size = 0
        while piece := await attached.read():
            size += piece.count(b"\xff")
    assert size == 300_000


async def test_the_screen_is_told_to_who_comes_later(box: Box) -> None:
    terminal = await box.terminals.open(
        command="for n in $(seq 3000); do echo line $n; done; printf '\\033[31mred'; sleep 60"
    )
    async with terminal.attach() as attached:
        await until(attached, b"red")
    screen = await terminal.screen()
    assert screen.lines[-2:] == ("line 3000", "red")
    assert screen.cursor == (23, 3)
    async with terminal.attach() as again:
        async with asyncio.timeout(WAIT_S):
            first = await again.read()
    assert b"line 2990" in first
    assert b"line 100\r" not in first
    await terminal.close()


async def test_several_clients_see_the_same_and_one_size(box: Box) -> None:
    terminal = await box.terminals.open()
    async with terminal.attach() as one, terminal.attach() as two:
        await one.resize(10, 40)
        async with asyncio.timeout(WAIT_S):  # each client has its own connection to the service
            while (await terminal.status()).rows != 10:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await two.write(b"stty size; echo by'' both\n")
        assert b"10 40" in await until(one, b"by both")
        assert b"10 40" in await until(two, b"by both")
        assert (await terminal.status()).attached == 2
    async with asyncio.timeout(WAIT_S):
        while (await terminal.status()).attached:  # noqa: ASYNC110  # a service tells it no other way
            await asyncio.sleep(0.02)
    await terminal.close()


async def test_a_client_that_does_not_read_stalls_nobody(box: Box) -> None:
    terminal = await box.terminals.open()
    async with terminal.attach() as idle, terminal.attach() as busy:
        await until(idle, b"$ ")
        await busy.write(b"seq 1 600000; echo all of'' it\n")
        size = len(await until(busy, b"all of it"))
        assert size > 4_000_000
        await busy.write(b"clear; echo now'' here\n")
        await until(busy, b"now here")
        said = await until(idle, b"now here")
        if hasattr(terminal, "shows"):  # connected, the sockets on the way hold more of it
            assert len(said) < 3_000_000
    await terminal.close()


async def test_a_client_alone_gets_everything_at_its_own_pace(box: Box) -> None:
    terminal = await box.terminals.open()
    async with terminal.attach() as slow:
        await until(slow, b"$ ")
        await slow.write(b"seq 1 300000; echo all of'' it\n")
        await asyncio.sleep(1)
        said = await until(slow, b"all of it")
    numbers = [line for line in said.split(b"\r\n") if line.isdigit()]
    assert len(numbers) >= 299_999  # the first may follow a sequence
    await terminal.close()


async def test_close_hangs_up_and_kills_what_ignores_it(box: Box) -> None:
    terminal = await box.terminals.open()
    async with terminal.attach() as attached:
        await attached.write(b"(trap '' HUP; exec sleep 4321) & echo start''ed\n")
        await until(attached, b"started")
        await attached.write(b"trap '' HUP; echo trap''ped\n")
        await until(attached, b"trapped")
        await terminal.close()
        async with asyncio.timeout(WAIT_S):
            while await attached.read():
                pass
    await terminal.close()  # a second time does nothing
    async with asyncio.timeout(WAIT_S):  # a killed process is there until Linux runs it once more
        while (await box.shell("pgrep -f 'sleep 432[1]'")).exit_code != 1:
            pass


async def test_stopping_the_kernel_ends_its_terminals_and_says_why(box: Box) -> None:
    terminal = await box.terminals.open()
    async with terminal.attach() as attached:
        await attached.write(b"echo re''ady\n")
        await until(attached, b"ready")
        await box.stop()
        async with asyncio.timeout(WAIT_S):
            while await attached.read():
                pass
        assert attached.ended == (None, "its kernel ended")
    again = await box.terminals.open(command="echo again")
    assert again.id != terminal.id


async def test_a_command_that_is_not_there_ends_with_127(box: Box) -> None:
    terminal = await box.terminals.open(command="nothing-like-this")
    async with terminal.attach() as attached:
        said = b""
        async with asyncio.timeout(WAIT_S):
            while piece := await attached.read():
                said += piece
        assert attached.ended == (127, "")
    assert b"not found" in said


async def test_terminals_are_counted_and_those_that_ended_make_room(box: Box) -> None:
    made = [await box.terminals.open(command="sleep 100") for _ in range(TERMINALS_MAX)]
    with pytest.raises(errors.Conflict) as refused:
        await box.terminals.open()
    assert refused.value.code == "too_many_terminals"
    await (await box.terminals.get(made[3].id)).close()
    await box.terminals.open(command="sleep 100")
    assert len(await box.terminals.list()) == TERMINALS_MAX


async def test_what_cannot_be_is_refused(box: Box) -> None:
    with pytest.raises(errors.NotFound):
        await box.terminals.get("term-nothing")
    for rows, columns in ((0, 80), (24, 501), (201, 80)):
        with pytest.raises(errors.BadRequest) as refused:
            await box.terminals.open(rows=rows, columns=columns)
        assert refused.value.code == "invalid_size"


@pytest.mark.needs("memory")  # which strict has as a hard wall
def test_a_policy_without_a_shell_or_processes_has_none(make: Make) -> None:
    with make("strict") as box, pytest.raises(errors.Denied):
        box.terminals.open()


def test_the_synchronous_face(make: Make) -> None:
    with make() as box:
        terminal = box.terminals.open(command="read line; echo [$line]; exit 4")
        with terminal.attach() as attached:
            attached.write(b"typed\n")
            said = b"".join(attached)
        assert b"[typed]" in said
        assert terminal.status().exit_code == 4
        assert [one.id for one in box.terminals.list()] == [terminal.id]
        assert any("[typed]" in line for line in terminal.screen().lines)
        terminal.close()
