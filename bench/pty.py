"""A key at a terminal inside: typed through the embedded terminal, until its echo is here.

The baseline is a plain pty of this host with the same command on it, read and written by this
process: what linux itself takes.
"""

import asyncio
import os
import pty
import select
import time

from bench import paths
from bench.samples import Bench, NotMeasured, Progress, Samples, in_turn
from sbx import Runtime

_WAIT_S = 5.0


class _PlainPty:
    """`cat` on a pty of the host."""

    def __init__(self) -> None:
        child, self._master = pty.fork()
        if not child:
            os.execvp("cat", ["cat"])
        self._child = child

    def echo_ms(self) -> float:
        began = time.perf_counter()
        os.write(self._master, b"x")
        if not select.select([self._master], [], [], _WAIT_S)[0]:
            raise NotMeasured("a plain pty echoes nothing")
        os.read(self._master, 1024)
        return (time.perf_counter() - began) * 1000

    def close(self) -> None:
        os.close(self._master)
        os.waitpid(self._child, 0)


async def _pty_echo(rounds: int, progress: Progress) -> Samples:
    plain = _PlainPty()
    try:
        async with Runtime() as runtime, await runtime.create(paths.DATA_SCIENCE) as box:
            await paths.answers(box)
            terminal = await box.terminals.open(command="cat")
            async with terminal.attach() as attached:

                async def echo_ms() -> float:
                    began = time.perf_counter()
                    await attached.write(b"x")
                    async with asyncio.timeout(_WAIT_S):
                        if await attached.read() != b"x":
                            raise NotMeasured("something else than the key came back")
                    return (time.perf_counter() - began) * 1000

                async def baseline_ms() -> float:
                    return plain.echo_ms()

                await attached.write(b"x")
                await attached.read()
                measured, compared = await in_turn(rounds, echo_ms, baseline_ms, progress)
    finally:
        plain.close()
    return Samples(measured, compared, "a plain pty on the host")


BENCHES = (Bench("pty_echo", "ms", 2.0, _pty_echo, rounds=1000, quick_rounds=200),)
