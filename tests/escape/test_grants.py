"""A grant opens one wall for one conversation, and for nothing and nobody else."""

import ast
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from chain import until
from web import ADDRESS, Web, networked, web

from sbx import Runtime
from sbx.errors import BadRequest, Denied, SbxError
from sbx.protocol.grants import Access
from sbx.runtime.conversation import Conversation
from sbx.runtime.sandbox import AsyncSandbox

pytestmark = pytest.mark.core
GET = """
import urllib.error, urllib.request
def asked(url):
    try:
        return urllib.request.urlopen(url, timeout=50).read().decode()
    except urllib.error.HTTPError as error:
        return error.reason
asked({url!r})
"""
REFUSED = "is not in the policy's network.allow"


@pytest.fixture(scope="module")
def other_site() -> Iterator[Web]:
    with web() as site:
        yield site


@pytest_asyncio.fixture
async def box(runtime: Runtime, site: Web, other_site: Web) -> Any:
    hosts = [site.host, other_site.host]
    policy = networked(grant=[{"network": hosts}, {"run_time": "2h"}])
    async with await runtime.create(policy) as box:
        yield box


def access(site: Web) -> Access:
    return Access("network", site.host)


async def asked(conversation: Conversation, url: str) -> str:
    return str(await value(conversation, GET.format(url=url)))


async def value(conversation: Conversation, code: str) -> Any:
    run = await conversation.run(code)
    assert run.ok, run.error
    assert run.result is not None
    return ast.literal_eval(run.result)


@pytest.mark.unprivileged
async def test_a_granted_host_is_reached_until_the_grant_ends(box: AsyncSandbox, site: Web) -> None:
    here = box.conversation("here")
    assert REFUSED in await asked(here, site.url)
    assert here.grants.take_refused() == (access(site),)
    grant = await here.grants.grant(access(site), "conversation", "ann")
    assert await asked(here, site.url) == "hello from /"
    receipt = await here.read_receipt()
    assert receipt is not None
    assert receipt.grants == (grant.to_json(),)
    here.grants.end(grant.id)
    assert REFUSED in await asked(here, site.url)
    assert (await here.read_receipt()).grants == ()  # type: ignore[union-attr]


@pytest.mark.unprivileged
async def test_another_conversation_of_the_sandbox_does_not_use_it(
    box: AsyncSandbox, site: Web
) -> None:
    """Also not by the socket of the first one: its path is not visible inside."""
    here, there = box.conversation("here"), box.conversation("there")
    await here.grants.grant(access(site), "conversation", "ann")
    assert await asked(here, site.url) == "hello from /"
    assert REFUSED in await asked(there, site.url)
    seen = "import os, stat\n[(top, name) for top, _, names in os.walk('/run') for name in names]"
    assert await value(there, seen) == [("/run/sbx", "egress.sock")]


async def test_another_port_of_the_host_stays_closed(
    box: AsyncSandbox, site: Web, other_site: Web
) -> None:
    here = box.conversation("here")
    await here.grants.grant(access(site), "conversation", "ann")
    assert f"{ADDRESS} is not in" in await asked(here, other_site.url)
    assert await asked(here, site.url) == "hello from /"


async def test_a_grant_for_one_run_ends_with_it(box: AsyncSandbox, site: Web) -> None:
    here = box.conversation("here")
    await here.grants.grant(access(site), "once", "ann")
    assert await asked(here, site.url) == "hello from /"
    assert REFUSED in await asked(here, site.url)


async def test_code_that_outlives_the_run_of_its_grant_is_refused(
    box: AsyncSandbox, site: Web
) -> None:
    here = box.conversation("here")
    await here.grants.grant(access(site), "once", "ann")
    keep = (
        "import http.client, threading\n"
        f"kept = http.client.HTTPConnection('127.0.0.1', 3128, timeout=50)\n"
        f"kept.request('GET', '{site.url}/first'); kept.getresponse().read()"
    )
    assert await value(here, keep) == b"hello from /first"
    again = (
        "try:\n"
        f"    kept.request('GET', '{site.url}/second'); status = kept.getresponse().status\n"
        "except (http.client.RemoteDisconnected, ConnectionError):\n"
        "    status = 'closed'\n"
        "status"
    )
    assert await value(here, again) in (403, "closed")
    assert [path for path, _ in site.asked if path.endswith("/second")] == []


async def test_a_grant_of_the_conversation_ends_with_the_sandbox(
    runtime: Runtime, box: AsyncSandbox, site: Web
) -> None:
    grants = box.conversation("here").grants
    await grants.grant(access(site), "conversation", "ann")
    await box.close()
    assert grants.active == ()


async def test_a_longer_run_needs_a_grant(box: AsyncSandbox) -> None:
    here = box.conversation("here")
    with pytest.raises(BadRequest) as refused:
        await here.run("1", timeout=5000)
    assert refused.value.code == "limit_widened"
    grant = await here.grants.grant(Access("run_time", "5000"), "conversation", "ann")
    assert (await here.run("1 + 1", timeout=5000)).result == "2"
    assert (await here.shell("echo 3", timeout=5000)).stdout == "3\n"
    with pytest.raises(BadRequest):
        await here.run("1", timeout=5001)
    with pytest.raises(BadRequest):
        await box.conversation("there").run("1", timeout=5000)
    here.grants.end(grant.id)
    with pytest.raises(BadRequest):
        await here.run("1", timeout=5000)


async def test_a_policy_without_grants_permits_none(runtime: Runtime, site: Web) -> None:
    async with await runtime.create(networked()) as box:
        with pytest.raises(Denied) as refused:
            await box.conversation("here").grants.grant(access(site), "once", "ann")
        assert refused.value.code == "not_grantable"
        assert REFUSED in await asked(box.conversation("here"), site.url)


# -- directories -----------------------------------------------------------------------------------

LOOK = "import os\n[sorted(os.listdir(f'/mnt/{name}')) for name in os.listdir('/mnt')]"


@pytest.fixture
def data(own_temporary_directory: Path) -> Path:
    data = own_temporary_directory / secrets.token_hex(8) / "data"
    (data / "inner").mkdir(parents=True)
    (data / "a.txt").write_text("of the host")
    for path in (data.parent, data, data / "inner"):
        path.chmod(0o755)
    return data


@pytest_asyncio.fixture
async def reader(runtime: Runtime, data: Path) -> Any:
    policy = networked(grant=[{"directory": [str(data)]}])
    async with await runtime.create(policy) as box:
        yield box


async def test_a_granted_directory_is_seen_by_one_conversation_until_the_end(
    reader: AsyncSandbox, data: Path
) -> None:
    here, there = reader.conversation("here"), reader.conversation("there")
    assert await value(here, LOOK) == await value(there, LOOK) == []
    grant = await here.grants.add("directory", str(data), "conversation", by="ann")
    assert grant.inside == "/mnt/data"
    assert await value(here, LOOK) == [["a.txt", "inner"]]
    assert await value(here, "open('/mnt/data/a.txt').read()") == "of the host"
    assert await value(there, LOOK) == []
    other = await there.contexts.create("later")  # also a kernel that starts after the grant
    assert (await other.run(LOOK)).result == "[]"
    also = await here.contexts.create("later")
    assert (await also.run(LOOK)).result == "[['a.txt', 'inner']]"
    refused = await here.run("open('/mnt/data/b.txt', 'w')")
    assert refused.error is not None
    assert refused.error.name in ("OSError", "PermissionError")
    assert await reader.mounts() == ()
    await here.grants.revoke(grant.id)
    assert await value(here, LOOK) == []
    assert (await also.run(LOOK)).result == "[]"


async def test_two_conversations_see_a_directory_of_one_name_each(
    reader: AsyncSandbox, data: Path
) -> None:
    here, there = reader.conversation("here"), reader.conversation("there")
    await here.grants.add("directory", str(data), "conversation", by="ann")
    await there.grants.add("directory", str(data), "once", by="ann")
    assert await value(there, LOOK) == [["a.txt", "inner"]]
    await until(lambda: not there.grants.active)
    await there.grants._hidden()
    assert await value(there, LOOK) == []
    assert await value(here, LOOK) == [["a.txt", "inner"]]


async def test_a_directory_above_or_by_a_link_is_not_granted(
    reader: AsyncSandbox, data: Path
) -> None:
    grants = reader.conversation("here").grants
    (data / "out").symlink_to("/etc")
    for source in (data.parent, data / ".." / "x", data / "out", data / "out" / "ssl"):
        with pytest.raises(SbxError):
            await grants.add("directory", str(source), by="ann")
    assert grants.active == ()
    assert await value(reader.conversation("here"), LOOK) == []
