"""A broker that is stopped (SIGSTOP) and so answers nothing, as one that hangs."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from chain import all_gone, broker, go_on, gone, stop, until, used_jail
from live_app import live

import sbx
from sbx import AsyncSandbox, Runtime, Sandbox
from sbx.errors import Unavailable
from sbx.isolation.broker import pulse

pytestmark = pytest.mark.needs("namespaces")
EVERY_S, ANSWER_S = 0.2, 1.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "EVERY_S", EVERY_S)
    monkeypatch.setattr(pulse, "ANSWER_S", ANSWER_S)


@pytest.fixture(scope="module", autouse=True)
def swept() -> Iterator[None]:
    """The next runtime sweeps the cgroups of a broker that was killed."""

    async def sweep() -> None:
        async with Runtime():
            pass

    yield
    asyncio.run(sweep())


def run_on(box: Sandbox) -> None:
    """Run cells until one cannot: a kernel lives on until its broker counts as silent."""
    while True:
        box.run("1")


async def test_a_broker_that_stays_silent_is_killed_with_its_jails(
    runtime: Runtime, box: AsyncSandbox
) -> None:
    await box.run("1")
    itself, jail = broker(), used_jail(box)
    await stop(itself)
    await until(lambda: not runtime.alive)
    with pytest.raises(Unavailable) as raised:
        await (await runtime.create()).run("1")
    assert raised.value.code == "broker_silent"
    assert raised.value.details == {"retry_after_s": 10.0}
    await gone(itself)
    await all_gone(jail)


async def test_a_start_that_waits_for_a_silent_broker_fails_with_it(box: AsyncSandbox) -> None:
    itself = broker()
    await stop(itself)
    starting = asyncio.create_task(box.run("1"))
    with pytest.raises(Unavailable) as raised:
        async with asyncio.timeout(60):
            await starting
    assert raised.value.code == "broker_silent"


async def test_a_silence_that_heals_fails_no_start(runtime: Runtime, box: AsyncSandbox) -> None:
    itself, watched = broker(), runtime._resources.broker._pulse  # type: ignore[union-attr]
    await stop(itself)
    starting = asyncio.create_task(box.run("1 + 1"))
    await until(lambda: watched._silence.unanswered == 1)
    go_on(itself)
    assert (await starting).result == "2"
    await until(lambda: watched._silence.unanswered == 0)
    assert runtime.alive


def test_the_shared_runtime_is_made_again() -> None:
    try:
        with Sandbox() as box:
            box.run("1")
            asyncio.run(stop(broker()))
            with pytest.raises(Unavailable):
                run_on(box)
        with Sandbox() as box:
            assert box.run("1").ok
    finally:
        sbx.close()


async def test_health_and_calls_answer_503_with_retry_after(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with live(tmp_path) as served, served.client() as client:
        made = (await client.post("/v1/sandboxes", json={})).json()["id"]
        assert (await client.get("/health")).status_code == 200
        await stop(broker())
        await until(lambda: served.service.failure is not None)
        url = f"/v1/sandboxes/{made}/python/exec"
        for reply in (
            await client.get("/health"),
            await client.post(url, json={"code": "1"}),
        ):
            assert reply.status_code == 503
            assert reply.json()["error"]["code"] == "broker_silent"
            assert reply.headers["retry-after"] == "10"
    assert not [one for one in caplog.records if one.exc_info]
