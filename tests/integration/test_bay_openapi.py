"""schemathesis over /openapi.json against the live socket: no 5xx, no undocumented status."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
import requests
import schemathesis
import urllib3
from agent_calls import desk
from bay_calls import made
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from live_app import Served
from places import short_directory
from requests.adapters import HTTPAdapter
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import Failure, FailureGroup
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from sbx.agent.messages import Response
from tests.tiers import examples

EXAMPLES = min(20, examples(1))  # of each route, of each kind
ANSWERS = 20  # of the model, which is asked at most once in each
TIMEOUT_S = 30.0
# What ends the sandbox that the others use.
OF_ITS_OWN = {("DELETE", "/v1/sandboxes/{sandbox_id}"), ("DELETE", "/api/v1/sessions/{session_id}")}
# A stream that ends with the conversation only; test_native_files.py follows and ends it.
ENDLESS = {"GET /v1/sandboxes/{sandbox_id}/conversations/{conversation}/watch"}
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


class _Connection(urllib3.connection.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("sbx", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(TIMEOUT_S)
        self.sock.connect(self._path)


class _Pool(urllib3.HTTPConnectionPool):
    def __init__(self, path: str) -> None:
        super().__init__("sbx")
        self._path = path

    def _new_conn(self) -> _Connection:
        return _Connection(self._path)


class _OverSocket(HTTPAdapter):
    """requests, which schemathesis calls with, over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._pool = _Pool(path)

    def get_connection_with_tls_context(self, *_: Any, **__: Any) -> _Pool:
        return self._pool

    def close(self) -> None:
        self._pool.close()
        super().close()


@pytest_asyncio.fixture(scope="module")
async def served() -> AsyncIterator[Served]:
    """With a model: a chat without one is refused by 503, which is no surprise there."""
    answers = [Response("hello")] * ANSWERS
    with short_directory() as directory:
        async with desk(directory, *answers) as at:
            yield at.served


@pytest.fixture
def session(served: Served) -> Iterator[requests.Session]:
    with requests.Session() as session:
        session.mount("http://", _OverSocket(str(served.socket)))
        yield session


@pytest.mark.timeout(300)
async def test_no_route_fails_or_surprises(
    served: Served,
    client: httpx.AsyncClient,
    session: requests.Session,
) -> None:
    document = (await client.get("/openapi.json")).json()
    sandbox = (await made(client))["id"]
    await client.post(f"/v1/sandboxes/{sandbox}/python/exec", json={"code": "1"})
    async with asyncio.timeout(280):
        tried, wrong = await asyncio.to_thread(attack, document, session, sandbox)
    assert not wrong, "\n\n".join(wrong)
    assert tried >= 30
    assert (await client.get("/health")).status_code == 200


def attack(
    document: dict[str, Any], session: requests.Session, sandbox: str
) -> tuple[int, list[str]]:
    """Call every route with what it should take, and what it should not: how many routes there
    are, and what went wrong."""
    tried, wrong = 0, []
    for found in schemathesis.openapi.from_dict(document).get_all_operations():
        assert isinstance(found, Ok)
        operation = found.ok()
        if operation.label in ENDLESS:
            continue
        tried += 1
        modes = [GenerationMode.POSITIVE]
        if list(operation.body) or list(operation.query):  # any text is an id, right or wrong
            modes.append(GenerationMode.NEGATIVE)
        for mode in modes:
            try:
                call_often(operation.as_strategy(generation_mode=mode), session, sandbox)
            except (schemathesis.errors.SchemathesisError, Unsatisfiable):
                if mode is GenerationMode.POSITIVE:
                    raise  # only what a route should not take there may be none of
            except (Failure, FailureGroup) as failed:
                wrong.append(f"{operation.label}: {failed}")
    return tried, wrong


def call_often(cases: Any, session: requests.Session, sandbox: str) -> None:
    count = 0

    @given(cases)
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def call(case: Case[Any]) -> None:
        nonlocal count
        count += 1
        route = (case.method, case.operation.full_path)
        parameters = case.path_parameters
        if count % 2 and route not in OF_ITS_OWN and parameters and "sandbox_id" in parameters:
            parameters["sandbox_id"] = sandbox
        response = case.call(base_url="http://sbx", session=session, timeout=TIMEOUT_S)
        case.validate_response(response, checks=CHECKS)

    call()
