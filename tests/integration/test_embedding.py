"""The program that embeds sbx stays as it was: threads, forks, signals, loops, exits, Ctrl-C."""

import asyncio
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

import sbx
from sbx import Runtime, Sandbox, SbxError
from sbx.errors import BadRequest, Broken, Closed

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def closed_after() -> Iterator[None]:
    yield
    sbx.close()


def program(code: str, **options: object) -> "subprocess.Popen[str]":
    """A Python program that embeds sbx; its prologue is said once, here."""
    started: subprocess.Popen[str] = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", f"import os, sys, sbx\n{code}"],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,  # type: ignore[call-overload]
    )
    return started


def outcome(code: str) -> tuple[int, str, str]:
    with program(code) as running:
        out, err = running.communicate(timeout=60)
        return running.returncode, out, err


def lives(process: psutil.Process) -> bool:
    """The tests adopt orphans (see conftest.py), which are reaped at the end of a module."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def here() -> tuple[object, ...]:
    """What embedding must not change, as seen from within."""
    namespaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("user", "mnt", "pid", "net")]
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    descriptors = sorted(os.listdir("/proc/self/fd"), key=int)
    children = [child.pid for child in psutil.Process().children() if lives(child)]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    threads = [thread.name for thread in threading.enumerate()]
    return namespaces, handlers, descriptors, children, mask, threads, os.getcwd(), os.umask(0o022)


# -- threads ---------------------------------------------------------------------------------------


@pytest.mark.full_tier
def test_a_sandbox_outlives_the_thread_that_made_it() -> None:
    made: list[Sandbox] = []
    maker = threading.Thread(target=lambda: made.append(Sandbox()))
    maker.start()
    maker.join()
    with made[0] as box:
        assert box.run("1 + 1").result == "2"


@pytest.mark.full_tier
def test_a_broker_outlives_the_thread_whose_loop_started_it() -> None:
    """A parent-death signal would fire when that thread ends."""
    runtimes: list[Runtime] = []
    loop = asyncio.new_event_loop()
    starter = threading.Thread(
        target=lambda: runtimes.append(loop.run_until_complete(Runtime().start()))
    )
    starter.start()
    starter.join()

    async def use() -> None:
        box = await runtimes[0].create()
        assert (await box.run("1 + 1")).result == "2"
        await runtimes[0].close()
        await loop.shutdown_default_executor()

    loop.run_until_complete(use())
    loop.close()


@pytest.mark.full_tier
def test_a_thread_pool_uses_one_sandbox_and_many() -> None:
    with Sandbox() as shared, ThreadPoolExecutor(4) as pool:

        def own(number: int) -> str | None:
            with Sandbox() as box:
                return box.run(f"{number} * 2").result

        mine = pool.map(own, range(4))
        ours = pool.map(lambda number: shared.run(f"{number} * 3").result, range(8))
        assert list(mine) == ["0", "2", "4", "6"]
        assert list(ours) == [str(number * 3) for number in range(8)]


@pytest.mark.full_tier
def test_closing_from_within_an_event_loop_of_the_program() -> None:
    """Once, it ended in `Cannot run the event loop while another loop is running`."""
    box = Sandbox()

    async def use() -> str | None:
        try:
            return box.run("1 + 1").result
        finally:
            sbx.close()

    assert asyncio.run(use()) == "2"


# -- nothing of the program is changed -------------------------------------------------------------


@pytest.mark.full_tier
def test_the_program_is_unchanged_while_a_sandbox_lives_save_for_one_child() -> None:
    before, children = here(), set(psutil.Process().children())
    with Sandbox() as box:
        box.run("1")
        during = here()
        assert during[0] == before[0], "namespaces"
        assert during[1] == before[1], "signal handlers"
        assert during[4] == before[4], "signal mask"
        assert during[6:] == before[6:], "directory and umask"
        (broker,) = filter(lives, set(psutil.Process().children()) - children)
        assert any("sbx.isolation.broker.server" in word for word in broker.cmdline())


def test_nothing_is_left_after_close() -> None:
    Sandbox().close()
    sbx.close()  # modules imported at the first use may keep a file open
    before = here()
    for _ in range(2):
        box = Sandbox()
        box.run("1")
        box.conversation("other").shell("true")
        sbx.close()
        assert here() == before


def test_closing_twice_and_closing_nothing() -> None:
    sbx.close()
    box = Sandbox()
    sbx.close()
    sbx.close()
    with pytest.raises(Closed):
        box.run("1")
    box.close()
    with Sandbox() as again:
        assert again.run("1").ok


@pytest.mark.full_tier
def test_one_event_loop_after_the_other() -> None:
    async def use() -> str | None:
        async with Runtime() as runtime, await runtime.create() as box:
            return (await box.run("1 + 1")).result

    assert [asyncio.run(use()) for _ in range(2)] == ["2", "2"]


async def test_runtimes_that_start_together_leave_each_other_alone() -> None:
    """Once, one could sweep the data directory of another before that one had locked it."""

    async def use() -> str | None:
        async with Runtime() as runtime, await runtime.create() as box:
            await box.files.write("a", "mine")
            return await box.files.read("a")

    assert await asyncio.gather(*(use() for _ in range(6))) == ["mine"] * 6


# -- forks -----------------------------------------------------------------------------------------


def in_child(act: Callable[[], str]) -> str:
    """What `act` says in a forked child, which ends as multiprocessing's do."""
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.write(writing, act().encode())
        except BaseException as error:  # noqa: BLE001  # told to the parent
            os.write(writing, repr(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    return said


def refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except Broken as error:
        return error.code
    return "none"


def test_a_forked_child_is_refused_and_the_parent_goes_on() -> None:
    with Sandbox() as box:
        other = box.conversation("other")
        box.run("kept = 1")
        calls: list[Callable[[], object]] = [
            lambda: box.run("1"),
            lambda: list(box.stream("1")),
            lambda: box.shell("true"),
            box.files.list,
            box.uploads.list,
            lambda: other.run("1"),
            lambda: box.receipt,
            box.interrupt,
            box.stop,
            box.close,
        ]
        said = in_child(lambda: " ".join(refusal(call) for call in calls))
        assert said.split() == ["used_after_fork"] * len(calls)
        assert in_child(lambda: refusal(sbx.close)) == "none"
        assert box.run("kept").result == "1"


@pytest.mark.full_tier
def test_a_forked_child_makes_its_own() -> None:
    def use() -> str:
        with Sandbox() as box:
            result = box.run("2 * 21").result
        sbx.close()
        return str(result)

    with Sandbox() as box:
        box.run("kept = 1")
        assert in_child(use) == "42"
        assert box.run("kept").result == "1"


async def test_a_fork_within_asyncio_cannot_end_what_is_the_parent_s() -> None:
    """Once, closing the copy in the child told the parent's broker to kill the parent's kernel."""
    async with Runtime() as runtime, await runtime.create() as box:
        await box.run("kept = 1")
        await box.files.write("file", "kept")
        conversation = box.conversation("default")

        def attempts() -> str:
            async def each() -> str:
                said = []
                for call in (
                    box.close,
                    box.stop,
                    box.interrupt,
                    conversation.close,
                    conversation.stop,
                    runtime.create,
                    lambda: box.files.list(),  # noqa: PLW0108  # `files` itself refuses
                ):
                    try:
                        await call()
                    except Broken as error:
                        said.append(error.code)
                await runtime.close()
                return " ".join(said)

            return asyncio.run(each())

        said = in_child(attempts)  # which keeps this loop waiting: the child needs nothing of it
        assert said.split() == ["used_after_fork"] * 7
        run = await box.run("kept")
        assert (run.result, run.state_lost) == ("1", False)
        assert await box.files.read("file") == "kept"


def _double(number: int) -> str | None:
    with Sandbox() as box:
        return box.run(f"{number} * 2").result


@pytest.mark.full_tier
def test_multiprocessing() -> None:
    with Sandbox() as box:
        box.run("kept = 1")
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map(_double, [1, 2]) == ["2", "4"]
            pool.close()
            pool.join()
        assert box.run("kept").result == "1"


# -- the end of the program ------------------------------------------------------------------------


@pytest.mark.full_tier
def test_a_program_that_forgets_to_close_ends_cleanly() -> None:
    code, out, err = outcome("box = sbx.Sandbox(); print(box.run('1 + 1').result)")
    assert (code, out, err) == (0, "2\n", "")


@pytest.mark.full_tier
def test_a_program_that_ends_while_a_cell_runs() -> None:
    code, out, err = outcome(
        "box = sbx.Sandbox()\n"
        "for event in box.stream('import time; print(1, flush=True); time.sleep(600)'):\n"
        "    if event.type == 'stdout': break\n"
        "print('leaving')"
    )
    assert (code, out, err) == (0, "leaving\n", "")


@pytest.mark.full_tier
def test_a_program_that_ends_with_an_error_shows_its_own_only() -> None:
    code, _, err = outcome("box = sbx.Sandbox(); box.run('1'); raise ValueError('mine')")
    assert code == 1
    assert err.splitlines()[-1] == "ValueError: mine"
    assert "sbx/runtime" not in err


@pytest.mark.full_tier
def test_an_answer_that_never_comes_does_not_keep_the_program() -> None:
    code, out, err = outcome(
        "import threading, time\n"
        "asked = threading.Event()\n"
        "def answer(prompt): asked.set(); time.sleep(100)\n"
        "box = sbx.Sandbox()\n"
        "run = lambda: box.run('input()', on_input=answer)\n"
        "threading.Thread(target=run, daemon=True).start()\n"
        "asked.wait(); print('asked')"
    )
    assert (code, out) == (0, "asked\n"), err


def test_ctrl_c_interrupts_the_cell_and_the_sandbox_goes_on() -> None:
    with program(
        "box = sbx.Sandbox(); box.run('kept = 1')\n"
        "try: print('busy', flush=True); box.run('while True: pass')\n"
        "except KeyboardInterrupt: print(box.run('kept').result)",
        start_new_session=True,
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "busy\n"
        time.sleep(0.5)  # by then it waits in `run`, as a rule: either moment must do
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=60)
    assert (running.returncode, out, err) == (0, "1\n", "")


# -- cancellation ----------------------------------------------------------------------------------


async def life(runtime: Runtime) -> None:
    async with await runtime.create() as box:
        await box.files.write("a", "b")
        await asyncio.gather(box.run("1 + 1"), box.shell("echo"))
        await box.conversation("other").run("import time; time.sleep(0.1)")


@pytest.mark.full_tier
@pytest.mark.parametrize("share", [part / 12 for part in range(12)])
async def test_cancellation_at_any_point_leaves_nothing(
    share: float, took: dict[str, float], runtime: Runtime
) -> None:
    """The module's own check finds what is left; here the runtime must go on, too."""
    if "s" not in took:
        began = time.monotonic()
        await life(runtime)
        took["s"] = time.monotonic() - began
    living = asyncio.create_task(life(runtime))
    await asyncio.sleep(took["s"] * share)
    living.cancel()
    with suppress(asyncio.CancelledError):
        await living
    assert not runtime._sandboxes
    async with await runtime.create() as box:
        assert (await box.run("1")).ok


@pytest.fixture(scope="module")
def took() -> dict[str, float]:
    """How long a life takes on this machine, for the moments to be spread over it."""
    return {}


@pytest.mark.full_tier
@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3])
async def test_cancellation_while_a_runtime_starts_or_ends_leaves_nothing(delay_s: float) -> None:
    """The module's own check finds what is left: the broker, its socket, the data directory."""

    async def start_and_end() -> None:
        async with Runtime():
            pass

    living = asyncio.create_task(start_and_end())
    await asyncio.sleep(delay_s)
    living.cancel()
    with suppress(asyncio.CancelledError):
        await living
    async with Runtime() as runtime:
        assert runtime.capabilities.layers


async def test_a_closed_sandbox_is_closed_although_the_call_was_cancelled(
    runtime: Runtime,
) -> None:
    box = await runtime.create()
    await box.run("1")
    closing = asyncio.create_task(box.close())
    await asyncio.sleep(0)
    closing.cancel()
    with suppress(asyncio.CancelledError):
        await closing
    assert not runtime._sandboxes
    with pytest.raises(SbxError):
        await box.run("1")


def test_a_synchronous_call_from_an_async_on_input_is_refused_at_once() -> None:
    """It would wait for the loop that it runs on, and every sandbox of the process with it."""
    codes: list[str] = []
    with Sandbox() as box:

        async def answer(prompt: str) -> str:
            try:
                box.files.list()
            except SbxError as error:
                codes.append(error.code)
            return "went on"

        assert box.run("input()", on_input=answer, timeout=20).result == "'went on'"
    assert codes == ["would_block"]


@pytest.mark.full_tier
def test_a_sandbox_that_is_forgotten_ends_by_itself() -> None:
    kept = Sandbox()
    box = Sandbox()
    assert box.run("1").ok
    inner = weakref.ref(box._inner)
    del box
    gc.collect()
    deadline = time.monotonic() + 60
    while not (inner() is None or inner()._closed) and time.monotonic() < deadline:  # type: ignore[union-attr]
        time.sleep(0.02)
    assert inner() is None or inner()._closed  # type: ignore[union-attr]
    assert kept.run("1").ok
    kept.close()


@pytest.mark.full_tier
def test_a_stream_starts_when_it_is_asked_for_and_says_at_once_what_is_wrong_with_it() -> None:
    with Sandbox() as box:
        with pytest.raises(BadRequest):
            box.stream("1", timeout=-1)
        events = box.stream("open('began', 'w').close()")
        deadline = time.monotonic() + 60
        while "began" not in [entry.name for entry in box.files.list()]:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert [event.type for event in events][-1] == "run_end"


def test_what_is_followed_halfway_ends_without_a_word() -> None:
    """asyncio's own end closes an iterator and the one within it at the same time."""
    code, out, err = outcome("""
box = sbx.Sandbox()
followed = [box.files.watch(), box.stream_usage(60), box.stream("print(1); input()")]
print(*[next(one) is not None for one in followed])
box.close()
""")
    assert (code, out, err) == (0, "True True True\n", "")
