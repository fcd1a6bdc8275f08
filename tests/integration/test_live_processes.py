"""Live processes: their clients, input, output, time and end."""

import asyncio
import signal
from typing import Any

import pytest

from sbx import AsyncSandbox, errors
from sbx.runtime.processes import live_processes
from sbx.runtime.processes.live_processes import LiveProcess, LiveProcesses, ProcessEnd

pytestmark = pytest.mark.core


@pytest.fixture
def processes(box: AsyncSandbox) -> LiveProcesses:
    return box._default.live_processes


async def output(process: LiveProcess) -> dict[str, bytes]:
    streams: dict[str, bytes] = {}
    async with asyncio.timeout(60), process.attach() as client:
        async for stream, data in client:
            streams[stream] = streams.get(stream, b"") + data
    return streams


def shell(text: str) -> list[str]:
    return ["/bin/bash", "-c", text]


async def test_streams_are_apart_and_the_pid_is_that_inside(processes: LiveProcesses) -> None:
    process = await processes.start(shell("echo $$; echo e >&2; exit 3"), env={"X": "1"})
    assert await output(process) == {"stdout": b"%d\n" % process.pid, "stderr": b"e\n"}
    assert process.end == ProcessEnd(exit_code=3)
    assert not processes.running()


async def test_the_first_client_misses_nothing(processes: LiveProcesses) -> None:
    process = await processes.start(shell("echo early"))
    await process.ended()
    assert await output(process) == {"stdout": b"early\n"}
    assert await output(process) == {}


async def test_a_signal_is_the_end(processes: LiveProcesses) -> None:
    process = await processes.start(shell("sleep 1000"))
    await process.signal(signal.SIGTERM)
    await process.ended()
    assert process.end == ProcessEnd(signal=signal.SIGTERM)


async def test_the_time_of_a_process_ends_it_and_its_clients(processes: LiveProcesses) -> None:
    process = await processes.start(shell("echo up; sleep 1000"), timeout_s=0.5)
    assert await output(process) == {"stdout": b"up\n"}
    assert process.end is not None
    assert process.end.timed_out
    async with asyncio.timeout(30):
        await process.ended()


async def test_a_missing_program_is_an_exit_code(processes: LiveProcesses) -> None:
    process = await processes.start(["/no/such/program"])
    assert b"/no/such/program" in (await output(process))["stderr"]
    assert process.end == ProcessEnd(exit_code=126)


async def test_input_waits_for_its_reader(processes: LiveProcesses) -> None:
    process = await processes.start(shell("sleep 0.2; wc -c"), stdin_open=True)
    for _ in range(20):
        await process.write(b"\xff" * 50_000)
    await process.close_stdin()
    assert await output(process) == {"stdout": b"1000000\n"}
    with pytest.raises(errors.Conflict) as raised:
        await process.write(b"x")
    assert raised.value.code == "stdin_closed"


async def test_a_terminal_has_a_size(processes: LiveProcesses) -> None:
    process = await processes.start(shell("read; stty size"), terminal=(30, 100))
    await process.resize(31, 101)
    await process.write(b"\n")
    assert b"31 101" in (await output(process))["pty"]
    with pytest.raises(errors.Conflict):
        await process.close_stdin()
    plain = await processes.start(shell("exit"))
    with pytest.raises(errors.Conflict) as raised:
        await plain.resize(1, 1)
    assert raised.value.code == "no_terminal"
    await plain.ended()


async def test_processes_are_found_by_pid_and_by_tag(processes: LiveProcesses) -> None:
    process = await processes.start(shell("sleep 1000"), tag="mine")
    assert processes.find(pid=process.pid) is processes.find(tag="mine") is process
    assert processes.running() == [process]
    for wrong in ({"pid": 4_000_000}, {"tag": "other"}, {}):
        with pytest.raises(errors.NotFound):
            processes.find(**wrong)
    await process.signal(signal.SIGKILL)
    await process.ended()


async def test_a_client_that_does_not_read_loses_output_and_is_notified(
    processes: LiveProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_processes, "_STALLED_S", 0.2)
    monkeypatch.setattr(live_processes, "_QUEUE_MAX", 100_000)
    process = await processes.start(shell("head -c 2000000 /dev/zero; echo end >&2"))
    async with process.attach() as idle:
        async with process.attach() as reading:
            seen = 0
            async for _, data in reading:
                seen += len(data)
        await process.ended()
        pieces = [piece async for piece in idle]
    assert seen == 2_000_004
    assert sum(len(data) for _, data in pieces) < 2_000_000
    assert pieces[-1][0] == "stderr"
    assert b"output was dropped" in pieces[-1][1]


async def test_too_many_clients_and_processes(
    processes: LiveProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_processes, "CLIENTS_MAX", 1)
    monkeypatch.setattr(live_processes, "RUNNING_MAX", 1)
    process = await processes.start(shell("sleep 1000"))
    async with process.attach():
        with pytest.raises(errors.Conflict) as raised:
            async with process.attach():
                pass
    assert raised.value.code == "too_many_clients"
    with pytest.raises(errors.Conflict) as raised:
        await processes.start(shell("true"))
    assert raised.value.code == "too_many_processes"
    await process.signal(signal.SIGKILL)
    await process.ended()


async def test_a_stop_of_the_sandbox_ends_them(box: AsyncSandbox) -> None:
    processes: Any = box._default.live_processes
    process = await processes.start(shell("sleep 1000"), terminal=(24, 80))
    await box._default.stop()
    async with asyncio.timeout(30):
        await process.ended()
    assert process.end is not None
    assert process.end.reason == "its kernel ended"
