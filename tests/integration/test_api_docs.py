"""/docs without a network, and the errors that a first request meets."""

import re
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio
from live_app import live
from places import short_directory
from service_process import service


@pytest_asyncio.fixture(scope="module")
async def client() -> AsyncIterator[httpx.AsyncClient]:
    with short_directory() as directory:
        async with live(directory) as served, served.client() as client:
            yield client


async def test_the_page_loads_nothing_from_another_host(client: httpx.AsyncClient) -> None:
    page = await client.get("/docs")
    assert page.status_code == 200
    urls = re.findall(r"""(?:src|href)="([^"]+)"|url: ['"]([^'"]+)""", page.text)
    targets = [one or other for one, other in urls]
    assert len(targets) == 4
    assert not any("//" in target for target in targets), targets
    for target in targets:
        reply = await client.get(f"/{target}")
        assert (reply.status_code, len(reply.content) > 500) == (200, True), target
    assert "persistAuthorization" not in page.text  # a key would stay in the browser


async def test_the_files_are_served_after_the_drop_of_privileges() -> None:
    with short_directory() as directory, service(directory) as served, served.client() as client:
        reply = client.get("/docs/files/swagger-ui-bundle.js")
        assert (reply.status_code, len(reply.content) > 1 << 20) == (200, True)
        assert client.get("/docs/files/../main.py").status_code == 404


@pytest.mark.parametrize(
    ("body", "media_type", "status", "message"),
    [
        (b"", "application/json", 422, "a JSON body is required, for example {}"),
        (b"{}", "text/plain", 422, "the body is not JSON; send Content-Type: application/json"),
        (b'{"ttl": }', "application/json", 422, "the body is not valid JSON, at character 8"),
    ],
)
async def test_a_body_that_is_no_json_gets_a_sentence_about_it(
    client: httpx.AsyncClient, body: bytes, media_type: str, status: int, message: str
) -> None:
    headers = {"content-type": media_type}
    reply = await client.post("/v1/sandboxes", content=body, headers=headers)
    assert (reply.status_code, reply.json()["error"]["message"]) == (status, message)


async def test_an_unknown_path_names_the_list_of_endpoints(client: httpx.AsyncClient) -> None:
    reply = await client.get("/v1/sandbox")
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (404, "not_found")
    assert error["message"] == "unknown endpoint: GET /v1/sandbox"
    assert error["hint"] == "the endpoints are listed at /docs and in /openapi.json"
