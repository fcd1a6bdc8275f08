"""JSON that a cell shows goes through the service as bytes: no surface and no store decodes it."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from bay_calls import made
from live_app import Served

from sbx.api import encoding
from sbx.protocol.bundles import BundlePart

SSE = {"accept": "text/event-stream"}
PLAIN = {"é\u2028": [{}, 1.5, None, True, '\U0001f600\\"'], "$schema": [1 << 70, -1e300]}
MARKED = {"\ufdd0": 1, "a": {"$float": "nan"}}  # which go over the wire in another form
FORM = {"\ufdd0\ufdd0": 1, "a": {"$$float": "nan"}}


def cell(value: Any) -> str:
    return f"display({{'application/json': {value!r}, 'text/plain': 'x'}}, raw=True)"


@pytest.fixture
def undecoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever decodes a part that has no other form fails."""

    def value(self: BundlePart) -> Any:
        assert self.marked, "a part was decoded"
        return json.loads(self.encoded)

    monkeypatch.setattr(BundlePart, "value", value)


@pytest.mark.full_tier
@pytest.mark.parametrize(("value", "form"), [(PLAIN, PLAIN), (MARKED, FORM)])
@pytest.mark.usefixtures("undecoded")
async def test_every_surface_tells_the_json_that_was_shown(
    client: httpx.AsyncClient, value: Any, form: Any
) -> None:
    code, like = cell(value), {"application/json": form, "text/plain": "x"}
    box = (await made(client))["id"]
    native = f"/v1/sandboxes/{box}/conversations/default/runs"
    bay = f"/v1/sandboxes/{box}/python/exec"
    run = (await client.post(native, json={"code": code})).json()
    assert run["outputs"] == [like]
    assert (await client.post(bay, json={"code": code})).json()["data"]["outputs"] == [like]
    for url in (native, bay):
        reply = await client.post(url, json={"code": code}, headers=SSE)
        assert reply.text.isascii()
        answer = [json.loads(line[6:]) for line in reply.text.split("\n") if line[:6] == "data: "]
        assert [one["data"] for one in answer if one["type"] == "display"] == [like]
        assert answer[-1]["run"]["outputs"] == [like]
    await client.delete(f"/v1/sandboxes/{box}")


@pytest.mark.full_tier
@pytest.mark.usefixtures("undecoded")
async def test_the_store_keeps_small_json_as_it_was_shown(
    served: Served, client: httpx.AsyncClient
) -> None:
    box = (await made(client))["id"]
    native = f"/v1/sandboxes/{box}/conversations/default/runs"
    large = "display({'application/json': [{}] * 50_000, 'text/plain': 'x'}, raw=True)"
    run = (await client.post(native, json={"code": f"{cell(PLAIN)}\n{large}"})).json()
    assert len(run["outputs"][1]["application/json"]) == 50_000
    row = await served.service.store.row("SELECT result FROM runs WHERE id = ?", run["run_id"])
    assert row is not None
    kept = json.loads(row["result"])
    assert kept["outputs"] == [run["outputs"][0], {"text/plain": "x"}]
    assert kept["truncated"]
    await client.delete(f"/v1/sandboxes/{box}")


async def test_a_run_of_very_many_outputs_is_written_by_another_thread(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its forms are walked in Python, and there are ten thousands of them."""
    on_the_loop = []
    encoded = encoding._encoded

    def watched(form: Any, source: Any) -> bytes:
        with_loop = True
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            with_loop = False
        on_the_loop.append(with_loop)
        return encoded(form, source)

    monkeypatch.setattr(encoding, "_encoded", watched)
    box = (await made(client))["id"]
    native = f"/v1/sandboxes/{box}/conversations/default/runs"
    few = (await client.post(native, json={"code": "display(1)"})).json()
    assert len(few["outputs"]) == 1
    many = (await client.post(native, json={"code": "for _ in range(11_000): display(1)"})).json()
    assert len(many["outputs"]) == 11_000
    assert on_the_loop == [True, False]
    await client.delete(f"/v1/sandboxes/{box}")
