"""`Sandbox(ttl=…, idle_timeout=…)`: an embedded sandbox ends its kernels, and closes, by itself."""

import time

import pytest
from persistent_sandboxes import eventually
from serving import Service

import sbx
from sbx import Runtime, Sandbox
from sbx.errors import BadRequest, Closed


async def test_an_unused_sandbox_closes_and_a_run_is_a_use(runtime: Runtime) -> None:
    async with await runtime.create(ttl=0.4) as box:
        assert (await box.run("import time; time.sleep(1)")).ok  # longer than its ttl
        directory = box._directory
        end = time.monotonic() + 1
        while time.monotonic() < end:
            await box.files.write("a", "x")
        assert (await box.run("open('a').read()")).result == "'x'"
        await eventually(lambda: box._ended and directory not in runtime.data.sandboxes())
        with pytest.raises(Closed, match=r"it was not used for 0\.4 s"):
            await box.run("1")
    assert box not in runtime._sandboxes


async def test_an_idle_kernel_ends_and_the_next_run_reports_it(runtime: Runtime) -> None:
    async with await runtime.create(idle_timeout=0.3) as box:
        assert (await box.run("x = 1; open('kept', 'w').write('y')")).ok
        await eventually(lambda: not box._default.alive)
        again = await box.run("open('kept').read(), 'x' in globals()")
        assert (again.result, again.state_lost) == ("('y', False)", True)


async def test_a_close_ends_the_watch(runtime: Runtime) -> None:
    box = await runtime.create(ttl=60, idle_timeout=60)
    living = box._living
    assert living is not None
    await box.close()
    await eventually(living.done)


def test_the_synchronous_sandbox_takes_both_and_a_service_only_its_ttl(service: Service) -> None:
    try:
        with Sandbox(ttl=60, idle_timeout=30) as box:
            assert box.run("1 + 1").result == "2"
        with pytest.raises(BadRequest) as raised:
            Sandbox(ttl=0)
        assert raised.value.code == "invalid_lifetime"
        with Sandbox(connect=service.socket, ttl=60) as remote:
            assert remote.run("1 + 1").result == "2"
        with pytest.raises(BadRequest) as refused:
            Sandbox(connect=service.socket, idle_timeout=5)
        assert refused.value.code == "not_over_the_wire"
    finally:
        sbx.close()
