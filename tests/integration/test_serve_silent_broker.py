"""A service whose broker is stopped (SIGSTOP): it ends with all that it started, and serves again.

As root the service has dropped its rights and may not signal its broker: the watchdog kills it.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from chain import broker, descendants
from places import short_directory
from service_process import END_S, Service, service

pytestmark = [pytest.mark.core, pytest.mark.needs("namespaces")]
_QUICK = """
import runpy, sys
from sbx.isolation.broker import pulse, watchdog
pulse.EVERY_S, pulse.ANSWER_S, watchdog.GRACE_S = 0.2, 1.0, 0.5
sys.argv = ["sbx", *sys.argv[4:]]
runpy.run_module("sbx", run_name="__main__")
"""


@pytest.fixture
def top() -> Iterator[Path]:
    with short_directory() as directory:
        yield directory


@pytest.fixture
def served(top: Path) -> Iterator[Service]:
    with service(top, launcher=[sys.executable, "-c", _QUICK]) as served:
        yield served


def stopped_broker(served: Service) -> list[psutil.Process]:
    """Stop the broker; return every process of the service."""
    service = psutil.Process(served.pid)
    itself = broker(service)
    itself.suspend()
    return [itself, *(one for one in descendants(service) if one != itself)]


def run(client: httpx.Client, sandbox_id: str, code: str) -> str:
    done = client.post(f"/v1/sandboxes/{sandbox_id}/python/exec", json={"code": code})
    assert done.status_code == 200, done.text
    return str(done.json()["output"])


@pytest.mark.full_tier
def test_it_ends_with_all_it_started_and_serves_again(served: Service, top: Path) -> None:
    with served.client() as client:
        sandbox_id = client.post("/v1/sandboxes", json={}).json()["id"]
        run(client, sandbox_id, "open('kept', 'w').close()")
        family = stopped_broker(served)
        assert served.process.wait(END_S) == 70
    _, alive = psutil.wait_procs(family, timeout=END_S)
    assert not alive
    assert "the broker did not answer" in served.log
    assert "its state: stopped" in served.log
    assert "Traceback" not in served.log
    with service(top) as again, again.client() as client:
        assert "kept" in run(client, sandbox_id, "import os; print(os.listdir())")


@pytest.mark.full_tier
@pytest.mark.needs("root")
def test_the_watchdog_kills_it_when_the_service_is_killed(served: Service, top: Path) -> None:
    family = stopped_broker(served)
    served.process.kill()
    served.process.wait(END_S)
    _, alive = psutil.wait_procs(family, timeout=END_S)
    assert not alive
    with service(top):
        pass  # which sweeps what was left
