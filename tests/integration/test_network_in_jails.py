"""The way out, from a program inside to a server outside: on every path, and over a stop.

What the proxy itself decides is told in the tests of sbx.egress; here it is that programs
find it, that nothing else leads out, and that what it did is told.
"""

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from attacking import PATHS, by
from certificate import outside_trusting, server_context
from web import ADDRESS, Web, networked, web
from wheelhouse import wheel

from sbx import Runtime, Settings
from sbx.egress import certificates
from sbx.errors import Unavailable
from sbx.protocol.runs import Run
from sbx.runtime.sandbox import AsyncSandbox

pytestmark = pytest.mark.core
GET = "import urllib.request\nurllib.request.urlopen({url!r}, timeout=50).read().decode()"
SECRET = "s3cr3t-of-the-tests"


@pytest_asyncio.fixture(scope="module")
async def runtime() -> AsyncIterator[Runtime]:
    async with Runtime() as runtime:
        yield runtime


@pytest_asyncio.fixture(scope="module")
async def box(runtime: Runtime, site: Web) -> AsyncIterator[AsyncSandbox]:
    async with await runtime.create(networked(site.host)) as box:
        yield box


async def got(box: Any, url: str) -> str:
    """What a cell reads there."""
    run = await box.run(GET.format(url=url))
    assert run.ok, run.error
    assert run.result is not None
    return str(eval(run.result, {}))


async def said_no(box: Any, url: str) -> str:
    """The reason that a cell is given instead."""
    run: Run = await box.run(GET.format(url=url))
    assert run.error is not None, run.result
    assert run.error.name == "HTTPError", run.error
    return run.error.value


# -- programs find it ------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.unprivileged
async def test_an_allowed_host_is_reached_and_another_is_not(
    runtime: Runtime, site: Web, path: str
) -> None:
    with by(path):
        async with await runtime.create(networked(site.host)) as box:
            receipt = await box.start()
            assert (receipt.path, receipt.network) == (path, "proxy: 1 host")
            assert await got(box, f"{site.url}/cell") == "hello from /cell"
            assert "network.allow: example.org is not in" in await said_no(
                box, "http://example.org/"
            )
            shell = await box.shell(f"curl -sS {site.url}/shell")
            assert shell.stdout == "hello from /shell"


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "host.sbx"])
async def test_a_listed_loopback_of_the_host_is_reached(runtime: Runtime, name: str) -> None:
    """NO_PROXY sent each client to the loopback of the jail, where nothing listens."""
    with web(address="127.0.0.1") as here, web(address="127.0.0.1") as other:
        policy = networked(f"{name}:{here.port}", allow_private=(name,))
        async with await runtime.create(policy) as box:
            assert await got(box, f"http://{name}:{here.port}/a") == "hello from /a"
            curl = await box.shell(f"curl -sS http://{name}:{here.port}/b")
            assert curl.stdout == "hello from /b"
            assert "network.allow" in await said_no(box, f"http://{name}:{other.port}/")
        assert other.asked == []


@pytest.mark.parametrize(
    "code",
    [
        "import requests; requests.get({url!r}, timeout=50).text",
        "import httpx; httpx.get({url!r}, timeout=50).text",
        "!curl -sS {url}",
        "!wget -qO- {url}",
        "!git ls-remote {url} 2>&1 | head -1",
    ],
    ids=["requests", "httpx", "curl", "wget", "git"],
)
async def test_programs_that_know_the_usual_variables_find_the_proxy(
    box: AsyncSandbox, site: Web, code: str
) -> None:
    program = code.lstrip("!").split()[0]
    where = f"{site.url}/by-{program}"
    run = await box.run(code.format(url=where))
    if "not found" in run.text or (run.error and run.error.name == "ModuleNotFoundError"):
        pytest.skip(f"no {program} inside")
    assert any(path.startswith(f"/by-{program}") for path, _ in site.asked), (run.text, run.error)


@pytest.mark.parametrize("path", ["fork", "cold"])
async def test_the_proxy_is_reached_without_unix_sockets(
    runtime: Runtime, site: Web, path: str
) -> None:
    """The relay connects to the proxy's socket: only the kernel and commands have no such right."""
    policy = networked(site.host)
    with by(path):
        async with await runtime.create(policy, narrower={"unix_sockets": "none"}) as box:
            assert await got(box, f"{site.url}/cell") == "hello from /cell"
            run = await box.run("import socket; socket.socket(socket.AF_UNIX)")
            assert run.error is not None
            assert run.error.name == "PermissionError"


async def test_servers_inside_are_reached_without_the_proxy(box: AsyncSandbox) -> None:
    serve = (
        "import http.server, threading\n"
        "server = http.server.HTTPServer(('127.0.0.1', 0), http.server.SimpleHTTPRequestHandler)\n"
        "threading.Thread(target=server.serve_forever, daemon=True).start()\n"
        "server.server_port"
    )
    port = (await box.run(serve)).result
    for host in ("localhost", "127.0.0.1"):
        assert "Directory listing" in await got(box, f"http://{host}:{port}/")
    await box.run("server.shutdown(); server.server_close()")


async def test_pip_installs_from_an_allowed_index_and_from_no_other(
    runtime: Runtime, tmp_path: Path
) -> None:
    made = wheel(tmp_path, "answers", "1.0", {"answers.py": "ANSWER = 42\n"})
    pages = {
        "/simple/answers/": f'<a href="/files/{made.name}">{made.name}</a>'.encode(),
        f"/files/{made.name}": made.read_bytes(),
    }
    with web(pages) as index, web(pages) as other:
        async with await runtime.create(networked(index.host)) as box:
            words = "install --no-deps --retries 0 --timeout 20 --target /tmp/p"
            pip = f"{sys.executable} -m pip {words}"
            trusted = f"--trusted-host {ADDRESS}"
            command = f"{pip} {trusted} --index-url {index.url}/simple/ answers"
            done = await box.shell(command, timeout=60)
            assert done.exit_code == 0, done.stdout + done.stderr
            found = await box.run("import sys; sys.path.append('/tmp/p'); import answers")
            assert found.ok, found.error
            assert (await box.run("answers.ANSWER")).result == "42"
            refused = await box.shell(
                f"{pip} {trusted} --index-url {other.url}/simple/ answers", timeout=60
            )
            assert refused.exit_code != 0
            by_default = await box.shell(f"{pip} answers", timeout=60)
            assert by_default.exit_code != 0
            assert other.asked == []
            hosts = {one.host for one in box.network_log if not one.allowed}
            assert ADDRESS in hosts  # at the other's port
            assert len(hosts) == 2  # and wherever pip looks by itself


# -- for as long as the sandbox lives --------------------------------------------------------------


async def test_conversations_and_contexts_share_it(box: AsyncSandbox, site: Web) -> None:
    other = box.conversation("other")
    assert await got(other, f"{site.url}/other") == "hello from /other"
    context = await box.contexts.create("second")
    try:
        assert await got(context, f"{site.url}/context") == "hello from /context"
    finally:
        await box.contexts.delete("second")


async def test_it_is_there_again_after_a_stop(runtime: Runtime, site: Web) -> None:
    async with await runtime.create(networked(site.host)) as box:
        assert await got(box, f"{site.url}/1") == "hello from /1"
        before = directories(runtime)
        assert len(before) >= 1
        await box.stop()
        assert len(directories(runtime)) == len(before) - 1
        assert await got(box, f"{site.url}/2") == "hello from /2"
    assert len(directories(runtime)) == len(before) - 1


def directories(runtime: Runtime) -> list[str]:
    return directories_in(runtime.data.path)


def directories_in(data: Path) -> list[str]:
    return os.listdir(data / "egress")


async def test_a_relay_that_is_killed_ends_its_connections_and_the_next_one_works(
    box: AsyncSandbox, site: Web
) -> None:
    begin = (
        "import socket\n"
        "one = socket.create_connection(('127.0.0.1', 3128))\n"
        f"one.sendall(b'CONNECT {site.host} HTTP/1.1\\r\\nHost: {site.host}\\r\\n\\r\\n')\n"
        "one.recv(12)"
    )
    assert (await box.run(begin)).result == "b'HTTP/1.1 200'"
    for number in range(3):
        await asyncio.sleep(0.1)  # one that has just started is taken for one that cannot
        relay_of(box).kill()
        run = await box.run("one.settimeout(20)\nwhile one.recv(4096): pass" if not number else "1")
        assert run.ok or (run.error is not None and run.error.name == "ConnectionResetError")
        assert await got(box, f"{site.url}/again") == "hello from /again"
    await box.run("one.close()")


def relay_of(box: AsyncSandbox) -> psutil.Process:
    """The child of PID 1 that copies. The kernel of a forked jail is the zygote's child."""
    kernel = box._default.contexts.default._kernel
    assert kernel is not None
    children = psutil.Process(kernel.jail.pid).children()
    cold = kernel.jail.kernel_pid is None
    relays = children[1:] if cold else children
    assert len(relays) == 1, relays
    return relays[0]


async def test_without_a_connection_there_is_no_relay(runtime: Runtime, site: Web) -> None:
    """What costs nothing until it is used: neither a process nor its memory."""
    async with await runtime.create(networked(site.host)) as box:
        await box.start()
        with pytest.raises(AssertionError):
            relay_of(box)
        await got(box, f"{site.url}/")
        assert relay_of(box).is_running()


async def test_a_program_that_asks_while_no_task_is_left_is_hung_up_on(
    runtime: Runtime, site: Web
) -> None:
    async with await runtime.create(
        networked(site.host), narrower={"limits": {"tasks_max": 16}}
    ) as box:
        await box.start()
        fill = (
            "import threading, time\n"
            "over = threading.Event(); threads = []\n"
            "try:\n"
            "    while True:\n"
            "        threads.append(threading.Thread(target=over.wait)); threads[-1].start()\n"
            "except RuntimeError: threads.pop()\n"
        )
        await box.run(fill)
        run = await box.run(GET.format(url=f"{site.url}/"))
        assert run.error is not None
        assert run.error.name in ("URLError", "RemoteDisconnected", "ConnectionResetError")
        await box.run("over.set(); [one.join() for one in threads]")
        assert await got(box, f"{site.url}/then") == "hello from /then"


async def test_what_a_killed_runtime_left_is_removed_by_the_next(tmp_path: Path) -> None:
    left = tmp_path / "data" / "egress" / ("a" * 32)
    settings = Settings(data_dir=tmp_path / "data")
    async with Runtime(settings):
        left.mkdir()
        with socket.socket(socket.AF_UNIX) as stale:
            fd = os.open(left, os.O_PATH)
            stale.bind(f"/proc/self/fd/{fd}/egress.sock")
            os.close(fd)
    async with Runtime(settings):
        assert directories_in(tmp_path / "data") == []


# -- what a request may ask for --------------------------------------------------------------------


async def test_a_request_for_no_network_gets_none_of_it(runtime: Runtime, site: Web) -> None:
    policy = networked(site.host)
    async with await runtime.create(policy, narrower={"network": {"mode": "none"}}) as box:
        assert (await box.start()).network == "none"
        look = "import os; [os.path.exists('/run/sbx'), 'HTTP_PROXY' in os.environ]"
        assert (await box.run(look)).result == "[False, False]"


async def test_a_request_for_fewer_hosts_reaches_fewer(runtime: Runtime, site: Web) -> None:
    with web() as other:
        policy = networked(site.host, other.host)
        narrower = {"network": {"allow": [other.host]}}
        async with await runtime.create(policy, narrower=narrower) as box:
            assert await got(box, f"{other.url}/") == "hello from /"
            assert "network.allow" in await said_no(box, f"{site.url}/")


# -- secrets ---------------------------------------------------------------------------------------


def secret(source: str, *hosts: str) -> dict[str, Any]:
    return {"env": "CRM_TOKEN", "hosts": list(hosts), "from": source, "allow_plain": True}


@pytest.mark.parametrize("kind", ["env", "file"])
async def test_a_secret_is_used_outside_and_not_seen_inside(
    runtime: Runtime, site: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("REAL_TOKEN", SECRET)
    (tmp_path / "token").write_text(f"{SECRET}\n")
    source = "env:REAL_TOKEN" if kind == "env" else f"file:{tmp_path}/token"
    policy = networked(site.host, secrets={"CRM": secret(source, ADDRESS)})
    ask = (
        "import os, urllib.request\n"
        "headers = {'Authorization': 'Bearer ' + os.environ['CRM_TOKEN']}\n"
        f"asked = urllib.request.Request({site.url + '/' + kind!r}, headers=headers)\n"
        "urllib.request.urlopen(asked, timeout=50).read()\n"
        "os.environ['CRM_TOKEN']"
    )
    async with await runtime.create(policy) as box:
        run = await box.run(ask)
        assert run.ok, run.error
        assert SECRET not in (run.result or "")
        first = run.result
        await box.stop()
        assert (await box.run(ask)).result != first  # another one with each proxy
    found = [headers for path, headers in site.asked if path == f"/{kind}"]
    assert [one["authorization"] for one in found] == [f"Bearer {SECRET}"] * 2


async def test_a_secret_that_cannot_be_had_is_named_and_nothing_starts(
    runtime: Runtime, site: Web
) -> None:
    for source in ("env:NO_SUCH_VARIABLE", "file:/no/such/file", "file:/dev/zero", "file:/etc"):
        policy = networked(site.host, secrets={"CRM": secret(source, ADDRESS)})
        async with await runtime.create(policy) as box:
            with pytest.raises(Unavailable) as raised:
                await box.run("1")
            assert raised.value.code == "secret_unusable"
            assert "the secret CRM" in raised.value.message
    assert len(directories(runtime)) <= 1  # that of the box which the module shares


async def test_tls_that_ends_at_the_proxy_is_trusted_by_every_program(
    runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls, trusting = server_context(tmp_path), outside_trusting(tmp_path)
    monkeypatch.setattr(certificates, "trusted", lambda: trusting)
    with web(tls=tls) as site:
        policy = networked(site.host, rule=[{"host": ADDRESS, "methods": ["GET"]}])
        async with await runtime.create(policy) as box:
            assert await got(box, f"{site.url}/urllib") == "hello from /urllib"
            ask = f"import requests; print(requests.get('{site.url}/requests').text)"
            for command in (f"curl -sS {site.url}/curl", f'{sys.executable} -c "{ask}"'):
                done = await box.shell(command)
                assert "hello from" in done.stdout, done.stderr
            posted = await box.shell(f"curl -sS -i -d x {site.url}/posted")
            assert "sbx refused by network.rule" in posted.stdout
    assert "/posted" not in [path for path, _ in site.asked]


# -- what it did is told ---------------------------------------------------------------------------


async def test_the_log_of_a_sandbox_tells_what_was_asked(runtime: Runtime, site: Web) -> None:
    async with await runtime.create(networked(site.host)) as box:
        assert [one.host for one in box.network_log] == []
        await got(box, f"{site.url}/told")
        await said_no(box, "http://example.org/secret?key=1")
        answer = [(one.allowed, one.host, one.port) for one in box.network_log if not one.ended]
        assert answer == [(True, ADDRESS, site.port), (False, "example.org", 80)]
        assert json.dumps(answer)
    async with await runtime.create() as plain:
        assert plain.network_log == ()


async def test_a_stop_beside_a_start_leaves_no_kernel_with_a_dead_proxy(
    runtime: Runtime, site: Web
) -> None:
    async with await runtime.create(networked(site.host)) as box:
        for number in range(4):
            begun = asyncio.create_task(got(box.conversation(f"c{number}"), f"{site.url}/beside"))
            await asyncio.sleep(0.005 * number)
            stopping = asyncio.create_task(box.stop())
            await asyncio.wait([begun, stopping])
            assert stopping.exception() is None
            # Stopped before it began, or after: whichever, the next one is served.
            assert await got(box.conversation(f"c{number}"), f"{site.url}/next") == (
                "hello from /next"
            )
            begun.exception()
