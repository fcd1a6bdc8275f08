"""A service is killed in the middle of a call: the same call with its key is not done again."""

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from places import short_directory
from service_process import Service, service

Ask = Callable[[httpx.Client], httpx.Response]
KEY_OF = "idempotency-key"
PATIENCE_S = 60.0
# Each appends an x, and hangs if that is the first one.
PYTHON = (
    "import os, time; open('{0}', 'a').write('x'); time.sleep(120 * (os.stat('{0}').st_size < 2))"
)
SHELL = "printf x >> '{0}'; test $(stat -c %s '{0}') -gt 1 || sleep 120"


@pytest.fixture
def top() -> Iterator[Path]:
    with short_directory() as directory:
        yield directory


def post(path: str, key: str, **body: Any) -> Ask:
    return lambda client: client.post(path, json=body, headers={KEY_OF: key})


def kill_within(started: Service, asks: list[Ask], until: Callable[[], bool]) -> None:
    """Make the calls, wait until their code has run, and kill the service."""

    def call(ask: Ask) -> None:
        with started.client() as client, pytest.raises(httpx.TransportError):
            ask(client)

    calls = [threading.Thread(target=call, args=(ask,)) for ask in asks]
    for one in calls:
        one.start()
    deadline = time.monotonic() + PATIENCE_S
    while not until():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    started.kill()
    for one in calls:
        one.join(PATIENCE_S)


def rows(top: Path, sql: str) -> list[Any]:
    with closing(sqlite3.connect(top / "data" / "store.sqlite", isolation_level=None)) as on:
        return on.execute(sql).fetchall()


def test_code_that_a_crash_cut_off_is_not_run_again(top: Path) -> None:
    """The same request with its key once ran the code a second time after a restart."""

    def written() -> dict[str, str]:
        found = (top / "data" / "sandboxes").rglob("ran-*")
        return {path.name: path.read_text() for path in found if path.is_file()}

    def all_recorded() -> bool:
        bound = rows(top, "SELECT count(*) FROM idempotency WHERE run_id IS NOT NULL")
        return len(written()) == 3 and bound == [(3,)]

    with service(top) as started:
        with started.client() as client:
            box = client.post("/v1/sandboxes", json={}).json()["id"]
            session = client.post(
                "/api/v1/sessions", json={"user_id": "u", "agent_id": "a"}
            ).json()["session_id"]
        v1 = f"/v1/sandboxes/{box}"
        asks = {
            "ran-python": post(f"{v1}/python/exec", "k1", code=PYTHON.format("ran-python")),
            "ran-shell": post(f"{v1}/shell/exec", "k2", command=SHELL.format("ran-shell")),
            "ran-session": post(
                f"/api/v1/sessions/{session}/execute",
                "k3",
                conversation_id="c",
                language="python",
                code=PYTHON.format("ran-session"),
            ),
        }
        kill_within(started, list(asks.values()), all_recorded)
    ids = dict(rows(top, "SELECT key, run_id FROM idempotency"))
    with service(top) as started:
        with started.client() as client:
            for name, ask in asks.items():
                reply = ask(client)
                error = reply.json()["error"]
                assert (reply.status_code, error["code"]) == (409, "outcome_unknown"), name
                details = error["details"]
                assert details["status"] == "interrupted"
                known = details.get("run_id") or details["execution_id"]
                assert ids[details["key"]].removeprefix("run-") in known
                assert ("run_id" in details) == (name == "ran-session")
            history = client.get(f"{v1}/history/{details_of(asks['ran-python'], client)}").json()
            assert history["success"] is False
            another = post(f"{v1}/python/exec", "k1", code="1")(client)
            assert (another.status_code, another.json()["error"]["code"]) == (409, "conflict")
        assert set(written().values()) == {"x"}
        started.stop()
    rows(top, "UPDATE idempotency SET created_at = created_at - 3601")
    with service(top) as started, started.client() as client:
        assert all(ask(client).status_code == 200 for ask in asks.values())
        assert set(written().values()) == {"xx"}


def details_of(ask: Ask, client: httpx.Client) -> str:
    return str(ask(client).json()["error"]["details"]["execution_id"])
