"""A grant opens one wall for one conversation, and for nothing and nobody else."""

import ast
import asyncio
import secrets
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from chain import until
from web import ADDRESS, Web, networked, web
from wheelhouse import use_only, wheel

from sbx import Runtime
from sbx.errors import BadRequest, Denied, SbxError, Unavailable
from sbx.isolation.broker.client import BrokerClient
from sbx.policy import Policy
from sbx.protocol.grants import Access
from sbx.protocol.runs import Cause
from sbx.runtime.conversation import Conversation
from sbx.runtime.live_mounts import LiveMounts
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
    await there.grants._undone()
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


# -- memory ----------------------------------------------------------------------------------------

HOLD = "held = bytearray(b'x') * ({} << 20); len(held) >> 20"


async def small_in(runtime: Runtime) -> AsyncSandbox:
    table = {"limits": {"memory_max": "160MiB"}, "grant": [{"memory": "512MiB"}]}
    return await runtime.create(Policy.model_validate({"name": "small", **table}))


@pytest_asyncio.fixture
async def small(runtime: Runtime) -> Any:
    async with await small_in(runtime) as box:
        yield box


@pytest.mark.needs("memory")
async def test_memory_is_granted_and_at_the_end_what_uses_it_is_killed(small: AsyncSandbox) -> None:
    here = small.conversation("here")
    killed = await here.run(HOLD.format(240))
    assert killed.cause is Cause.MEMORY
    assert here.grants.take_refused() == (Access("memory", "320"),)
    grant = await here.grants.add("memory", "320", "conversation", by="ann")
    assert await value(here, HOLD.format(240)) == 240
    assert (await here.usage()).memory_max == 320 << 20
    beyond = await here.run(HOLD.format(400))
    assert beyond.cause is Cause.MEMORY
    assert beyond.error is not None
    assert str(320 << 20) in beyond.error.value
    assert await value(here, HOLD.format(240)) == 240
    await here.grants.revoke(grant.id)
    assert (await here.usage()).memory_max == 160 << 20
    after = await here.run("held")
    assert (after.state_lost, after.error and after.error.name) == (True, "NameError")
    assert (await here.run(HOLD.format(240))).cause is Cause.MEMORY


@pytest.mark.needs("memory")
async def test_memory_for_one_run_stays_with_kernels_that_need_no_more(small: AsyncSandbox) -> None:
    here = small.conversation("here")
    await here.grants.add("memory", "400", by="ann")
    assert await value(here, "kept = 7; len(bytearray(b'x') * (240 << 20)) >> 20") == 240
    await until(lambda: not here.grants.active)
    await here.grants._undone()
    assert (await here.usage()).memory_max == 160 << 20
    assert await value(here, "kept") == 7
    assert (await here.run(HOLD.format(240))).cause is Cause.MEMORY


@pytest.mark.needs("memory")
async def test_a_grant_whose_request_was_cancelled_changes_nothing(
    small: AsyncSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = small.conversation("here")
    raised = asyncio.Event()
    limit_memory = BrokerClient.limit_memory

    async def slow(broker: BrokerClient, name: str, memory_max: int) -> None:
        await limit_memory(broker, name, memory_max)
        if not raised.is_set():
            raised.set()
            await asyncio.Event().wait()

    monkeypatch.setattr(BrokerClient, "limit_memory", slow)
    granting = asyncio.create_task(here.grants.add("memory", "400", "hour", by="ann"))
    await raised.wait()
    granting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await granting
    assert here.grants.active == ()
    assert (await here.usage()).memory_max == 160 << 20
    assert (await here.run(HOLD.format(240))).cause is Cause.MEMORY


async def test_a_directory_whose_request_was_cancelled_is_not_shown(
    reader: AsyncSandbox, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = reader.conversation("here")
    assert await value(here, LOOK) == []
    mounting, goes_on = asyncio.Event(), asyncio.Event()
    show_to = LiveMounts.show_to

    async def slow(*words: Any) -> str:
        inside = await show_to(*words)
        mounting.set()
        await goes_on.wait()
        return inside

    monkeypatch.setattr(LiveMounts, "show_to", slow)
    granting = asyncio.create_task(here.grants.add("directory", str(data), "hour", by="ann"))
    await mounting.wait()
    granting.cancel()
    await asyncio.sleep(0)
    goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await granting
    assert await value(here, LOOK) == []
    monkeypatch.undo()
    await here.grants.add("directory", str(data), "hour", by="ann")
    assert await value(here, LOOK) == [["a.txt", "inner"]]


@pytest.mark.needs("memory")
async def test_the_largest_grant_of_a_sandbox_limits_its_memory(small: AsyncSandbox) -> None:
    here, there = small.conversation("here"), small.conversation("there")
    for size in ("513", "0", "-1", "9" * 40):
        with pytest.raises(Denied):
            await here.grants.add("memory", size, by="ann")
    more = await here.grants.add("memory", "500", "conversation", by="ann")
    await there.grants.add("memory", "200", "conversation", by="ann")
    assert (await here.usage()).memory_max == (await there.usage()).memory_max == 500 << 20
    await here.grants.revoke(more.id)
    assert (await here.usage()).memory_max == 200 << 20


async def test_without_a_cgroup_no_memory_is_granted(bare_runtime: Runtime) -> None:
    async with await small_in(bare_runtime) as box:
        with pytest.raises(Unavailable) as refused:
            await box.grants.add("memory", "320", by="ann")
        assert refused.value.code == "memory_not_limited"
        assert box.grants.active == ()


# -- packages --------------------------------------------------------------------------------------

SHADOW = "VALUE = 'hidden'"


@pytest.fixture
def index(own_temporary_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of wheels, as the only source of pip."""
    index = own_temporary_directory / secrets.token_hex(8)
    index.mkdir()
    files = {"sbx_tiny.py": "import sbx_other\nVALUE = sbx_other.VALUE * 2", "json.py": SHADOW}
    files["on_the_host.pth"] = f"import os; os.mkdir({str(index / 'ran')!r})\n"
    wheel(index, "sbx-tiny", "1.0", files, needs="sbx-other")
    wheel(index, "sbx-other", "1.0", {"sbx_other.py": "VALUE = 21"}, needs="traitlets")
    setup = index / "setup.py"
    setup.write_text(f"import os; os.mkdir({str(index / 'ran')!r})")
    with tarfile.open(index / "sbx_source-1.0.tar.gz", "w:gz") as archive:
        archive.add(setup, "sbx_source-1.0/setup.py")
    use_only(index, monkeypatch)
    return index


@pytest_asyncio.fixture
async def installing(runtime: Runtime) -> Any:
    packages = ["sbx-tiny", "sbx-source", "sbx-absent", "traitlets"]
    grant = {"package": packages}
    policy = Policy.model_validate({"name": "installing", "grant": [grant]})
    async with await runtime.create(policy) as box:
        yield box
    await until(lambda: not list(runtime.data.path.glob("sandboxes/*/packages")))


@pytest.mark.unprivileged
async def test_a_granted_package_is_imported_by_one_conversation_until_the_end(
    installing: AsyncSandbox, index: Path
) -> None:
    here, there = installing.conversation("here"), installing.conversation("there")
    missing = await here.run("import sbx_tiny")
    assert missing.error is not None
    assert here.grants.take_refused() == (Access("package", "sbx-tiny"),)
    grant = await here.grants.add("package", "sbx-tiny", "conversation", by="ann")
    assert grant.inside is not None
    assert await value(here, "import sbx_tiny; sbx_tiny.VALUE") == 42
    version = "import importlib.metadata; importlib.metadata.version('sbx-tiny')"
    assert await value(here, version) == "1.0"
    assert await value(here, "import json; hasattr(json, 'VALUE')") is False
    ran = await here.shell("python3 -c 'import sbx_tiny; print(sbx_tiny.VALUE)'")
    assert ran.stdout == "42\n"
    written = await here.shell(f"touch {grant.inside}/x || rm {grant.inside}/sbx_tiny.py")
    assert "Read-only" in written.stderr
    assert not (index / "ran").exists()
    assert (await there.run("import sbx_tiny")).error is not None
    assert await value(there, "import os; os.path.exists('/mnt/.package-sbx-tiny')") is False
    late = await here.contexts.create("late")
    assert (await late.run("import sbx_other; sbx_other.VALUE")).result == "21"
    await here.grants.revoke(grant.id)
    assert await value(here, "import os; os.listdir('/mnt')") == []
    assert (await late.run("import sbx_tiny")).error is not None


@pytest.mark.parametrize(
    ("package", "code"),
    [
        ("sbx-other", "not_grantable"),  # a dependency of a package that may be granted
        ("sbx-tiny==1.0", "not_grantable"),
        ("sbx-source", "environment_unresolved"),  # its setup.py would run on the host
        ("sbx-absent", "environment_unresolved"),
        ("traitlets", "already_installed"),
    ],
)
async def test_another_package_is_not_installed(
    installing: AsyncSandbox, index: Path, package: str, code: str
) -> None:
    with pytest.raises(SbxError) as refused:
        await installing.grants.add("package", package, by="ann")
    assert refused.value.code == code
    assert refused.value.hint is not None
    assert (code == "environment_unresolved") == ("the last line of pip:" in refused.value.hint)
    assert installing.grants.active == ()
    assert not (index / "ran").exists()
    assert not list(installing._resources.data.path.glob("sandboxes/*/packages"))
