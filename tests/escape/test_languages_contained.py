"""A bomb, a loop and a flood in each language: ended from outside, and the kernel beside it lives.

The controls are the limits themselves: under a wider one the same program goes on.
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from attacking import Fresh, one_path, outcome, tell

from sbx import Runtime
from sbx.policy import load
from sbx.protocol.languages import Language
from sbx.protocol.runs import Status
from sbx.runtime.sandbox import AsyncSandbox
from tests.tiers import rows

sys.path.append(str(Path(__file__).parents[1] / "integration"))
from speaking import is_spoken, needs_language  # of the other suite

pytestmark = pytest.mark.core

LIMITS: dict[str, Any] = {"limits": {"tasks_max": 60, "output_max": "1MiB", "memory_max": "400MiB"}}

BOMBS: dict[Language, str] = {
    "bash": "bomb() { bomb | bomb & }; bomb; sleep 60",
    "javascript": """
        import { spawn } from 'node:child_process';
        setInterval(() => {
            for (let n = 0; n < 20; n++)
                spawn('sleep', ['60'], { detached: true }).on('error', () => {});
        }, 1);
    """,
    "java": """
        public class Bomb { public static void main(String[] args) throws Exception {
            while (true) {
                try { new Thread(() -> {
                    try { Thread.sleep(60_000); } catch (InterruptedException ended) {}
                }).start(); } catch (Throwable refused) { Thread.sleep(1); }
            }
        } }
    """,
    "go": """
        package main
        import ("os/exec"; "time")
        func main() {
            for { if exec.Command("sleep", "60").Start() != nil { time.Sleep(time.Millisecond) } }
        }
    """,
}
LOOPS: dict[Language, str] = {
    "bash": "trap '' INT; while :; do :; done",
    "javascript": "process.on('SIGINT', () => {}); for (;;) {}",
    "java": "class Loop { public static void main(String[] args) { while (true) {} } }",
    "go": """
        package main
        import ("os"; "os/signal")
        func main() { signal.Ignore(os.Interrupt); for {} }
    """,
}
FLOODS: dict[Language, str] = {
    "bash": "while :; do echo xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx; done",
    "javascript": "for (;;) console.log('x'.repeat(1000))",
    "java": """
        class Flood { public static void main(String[] args) {
            while (true) System.out.println("x".repeat(1000));
        } }
    """,
    "go": """
        package main
        import ("fmt"; "strings")
        func main() { for { fmt.Println(strings.Repeat("x", 1000)) } }
    """,
}
HOARDS: dict[Language, str] = {
    "javascript": "const all = []; for (;;) all.push(Buffer.alloc(16 << 20, 1));",
    "java": """
        class Hoard { public static void main(String[] args) {
            var all = new java.util.ArrayList<byte[]>();
            while (true) all.add(new byte[16 << 20]);
        } }
    """,
    "go": """
        package main
        var all [][]byte
        func main() {
            for { b := make([]byte, 16<<20); for i := range b { b[i] = 1 }; all = append(all, b) }
        }
    """,
}


@pytest_asyncio.fixture
async def beside(fresh: Fresh) -> AsyncIterator[AsyncSandbox]:
    """A sandbox of small limits with a kernel that has a variable, which it must keep."""
    box = await fresh(load("default"), narrower=LIMITS)
    assert (await box.run("import os, time; x = 41")).ok
    receipt = box.receipt
    yield box
    assert await tell(box, "x + 1") == 42
    assert box.receipt == receipt


async def run_beside(
    box: AsyncSandbox, language: Language, code: str, timeout: float
) -> tuple[str, Any]:
    """Run it while cells go on; its outcome and its run."""
    script = asyncio.create_task(box.run_script(code, language, timeout=timeout))
    cells = 0
    while not script.done():
        assert (await box.run("x = x")).ok
        cells += 1
        await asyncio.sleep(0.05)
    assert cells > 1
    run = await script
    return outcome(run), run


def tasks(box: AsyncSandbox) -> int:
    """Threads of all processes inside, as linux counts them for tasks_max."""
    found = 0
    for pid in box.conversation("default").processes:
        with contextlib.suppress(OSError):
            found += len(os.listdir(f"/proc/{pid}/task"))
    return found


@one_path()  # what happens beside the kernel, whoever forked it
@pytest.mark.parametrize("language", rows(BOMBS, ci_tier=["javascript"]))
async def test_a_bomb_ends_at_tasks_max_and_the_kernel_beside_it_lives(
    beside: AsyncSandbox, fresh: Fresh, language: Language
) -> None:
    needs_language(language)
    neighbour = await fresh()
    await neighbour.start()
    for seconds in (3, 12, 48):  # a busy machine takes its time to start a JVM under a quota
        bombing = asyncio.create_task(run_beside(beside, language, BOMBS[language], seconds))
        most = 0
        while not bombing.done():
            most = max(most, tasks(beside))
            await asyncio.sleep(0.05)
        how, run = await bombing
        assert run.status in (Status.TIMEOUT, Status.KILLED, Status.ERROR), run
        assert most <= 70, how  # counted one after the other, while they come and go
        if most >= 40:
            break
    assert most >= 40, how
    assert (await neighbour.shell("ls / | wc -l")).ok


@one_path()
async def test_loops_that_mind_no_interrupt_end_at_their_time_out(beside: AsyncSandbox) -> None:
    """All at once: each has one of its own, beside the others and the kernel."""
    spoken = [language for language in LOOPS if is_spoken(language)]
    assert "bash" in spoken
    ran = await asyncio.gather(*(run_beside(beside, one, LOOPS[one], 2.5) for one in spoken))
    for how, run in ran:
        assert (how, run.state_lost) == ("timeout", False), run


@one_path()
@pytest.mark.parametrize("language", FLOODS)
async def test_a_flood_ends_at_output_max(beside: AsyncSandbox, language: Language) -> None:
    needs_language(language)
    how, run = await run_beside(beside, language, FLOODS[language], 30)
    assert how == "killed:output", run.status
    assert run.truncated
    assert len(run.stdout) <= 1 << 20


@one_path()
@pytest.mark.needs("memory")
@pytest.mark.parametrize("language", HOARDS)
async def test_memory_ends_the_script_with_its_jail_and_the_next_run_goes_on(
    fresh: Fresh, language: Language
) -> None:
    needs_language(language)
    box = await fresh(load("default"), narrower=LIMITS)
    assert (await box.run("import os, time; x = 41")).ok
    run = await box.run_script(HOARDS[language], language, timeout=40)
    if language == "java":  # which was told its share, and has an error of its own for it
        assert "OutOfMemoryError" in run.stderr
        assert await tell(box, "x + 1") == 42
        return
    assert outcome(run) == "killed:memory", run
    async with asyncio.timeout(60):
        while (after := await box.run("x + 1")).ok:  # noqa: ASYNC110  # until linux has ended all
            await asyncio.sleep(0.05)
        while not (after := await box.run("6 * 7")).ok:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert after.result == "42"


@one_path()
async def test_the_same_output_under_a_wider_limit_goes_on(runtime: Runtime) -> None:
    """The control of the flood."""
    async with await runtime.create(narrower={"limits": {"output_max": "4MiB"}}) as box:
        run = await box.run_script("head -c 2000000 /dev/zero | tr '\\0' x", "bash")
        assert run.ok
        assert len(run.stdout) == 2_000_000
