"""A sandbox with a proxy has that one way out, which leads where its policy says and nowhere else.

The host listens, in this test process; controls take the one thing away that is tested.
"""

import os
import secrets
import socket
import stat
import tempfile
from pathlib import Path

import pytest
import pytest_asyncio
from attacking import (
    Fresh,
    alter_binds,
    altered,
    attack,
    attack_by_shell,
    by,
    one_path,
    tell,
)
from msgspec.structs import replace
from web import ADDRESS, Web, networked, web

from sbx import Runtime
from sbx.isolation.launch_plan import LaunchPlan
from sbx.runtime.sandbox import AsyncSandbox

pytestmark = pytest.mark.core
SEEN = """
import urllib.error, urllib.request
def asked(url):
    try:
        return urllib.request.urlopen(url, timeout=50).read().decode()
    except urllib.error.HTTPError as error:
        return f"{error.code} {error.reason}"
"""
CONNECT = "sock = socket.create_connection({address!r}, timeout=5); sock.close()"


@pytest_asyncio.fixture(scope="module")
async def box(runtime: Runtime, site: Web) -> AsyncSandbox:
    """Closed with its runtime."""
    return await runtime.create(networked(site.host))


async def asked(box: AsyncSandbox, url: str) -> str:
    return str(await tell(box, f"{SEEN}\nasked({url!r})"))


# -- no other way out ------------------------------------------------------------------------------


@pytest.mark.unprivileged
async def test_the_loopback_of_the_host_is_reached_by_the_proxy_only(
    box: AsyncSandbox, site: Web, fresh: Fresh
) -> None:
    """Also that of the very host which the proxy lets through."""
    connect = CONNECT.format(address=(ADDRESS, site.port))
    assert await attack(box, connect) == "ECONNREFUSED"
    assert await attack_by_shell(box, connect) == "ECONNREFUSED"
    control = await fresh(networked(site.host))
    # On the network of the host PID 1 is not to listen.
    with altered("net", change=lambda plan: replace(plan, way_out=False)), by("cold"):
        assert await attack(control, connect) == "ok"


@pytest.mark.parametrize("address", ["1.1.1.1", "169.254.169.254", "10.0.0.1"])
@pytest.mark.unprivileged
async def test_no_address_has_a_route_beside_the_proxy(box: AsyncSandbox, address: str) -> None:
    for kind in ("STREAM", "DGRAM"):
        connect = f"socket.socket(socket.AF_INET, socket.SOCK_{kind}).connect(({address!r}, 80))"
        assert await attack(box, connect) in ("ENETUNREACH", "EACCES")


async def test_no_name_is_resolved_inside(box: AsyncSandbox) -> None:
    assert await attack(box, "socket.getaddrinfo('example.org', 80)") == "gaierror"


async def test_the_only_interface_is_a_loopback(box: AsyncSandbox) -> None:
    assert await tell(box, "sorted(name for _, name in socket.if_nameindex())") == ["lo"]


# -- the socket ------------------------------------------------------------------------------------


async def test_the_one_socket_in_the_view_is_that_of_its_own_proxy(
    box: AsyncSandbox, fresh: Fresh, own_temporary_directory: Path
) -> None:
    find = """
found = []
for top in ('/run', '/var', '/tmp', '/opt', '/mnt', '/srv', '/home', '/workspace'):
    for path, _, names in os.walk(top):
        for name in names:
            if stat.S_ISSOCK(os.lstat(f'{path}/{name}').st_mode):
                found.append(f'{path}/{name}')
found
"""
    assert await tell(box, find) == ["/run/sbx/egress.sock"]
    assert await tell(box, "sorted(os.listdir('/run'))") == ["sbx"]
    folder = Path(tempfile.mkdtemp(dir=own_temporary_directory))
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(folder / "docker.sock"))
        os.chmod(folder, 0o755)

        def also(plan: LaunchPlan) -> LaunchPlan:
            more = replace(plan.own_mounts[-1], source=str(folder), target="/opt/mounted")
            return replace(plan, own_mounts=(*plan.own_mounts, more))

        control = await fresh(networked())
        with altered(change=also), by("cold"):
            found = await tell(control, find)
        assert found == ["/run/sbx/egress.sock", "/opt/mounted/docker.sock"]


async def test_its_directory_cannot_be_changed(
    box: AsyncSandbox, fresh: Fresh, started_by: str
) -> None:
    """Though it belongs to the sandbox's own uid: it is mounted read-only."""
    for change in (
        "os.unlink('/run/sbx/egress.sock')",
        "os.rename('/run/sbx/egress.sock', '/run/sbx/x')",
        "socket.socket(socket.AF_UNIX).bind('/run/sbx/mine')",
        "open('/run/sbx/certificates.pem', 'w')",
        "os.chmod('/run/sbx/egress.sock', 0)",
    ):
        assert await attack(box, change) in ("EROFS", "EACCES", "EPERM"), change

    def writable(plan: LaunchPlan) -> LaunchPlan:
        return alter_binds(
            plan,
            lambda bind: replace(bind, writable=True) if bind.target == "/run/sbx" else bind,
        )

    control = await fresh(networked())
    with altered("landlock", change=writable), by(started_by):
        assert await attack(control, "os.unlink('/run/sbx/egress.sock')") == "ok"


async def test_to_speak_to_the_socket_itself_gains_nothing(box: AsyncSandbox, site: Web) -> None:
    """The relay is no wall: whatever comes by the socket is judged alike."""
    ask = """
sock = socket.socket(socket.AF_UNIX)
sock.settimeout(50)
sock.connect('/run/sbx/egress.sock')
sock.sendall(b'GET {url} HTTP/1.1\\r\\nHost: {host}\\r\\nConnection: close\\r\\n\\r\\n')
sock.makefile('rb').read().split(b'\\r\\n')[0]
"""
    ours = ask.replace("{url}", f"{site.url}/").replace("{host}", site.host)
    other = ask.replace("{url}", "http://example.org/").replace("{host}", "example.org")
    assert (await tell(box, ours)).startswith(b"HTTP/1.1 200")
    assert (await tell(box, other)).startswith(b"HTTP/1.1 403")


async def test_descriptors_that_are_sent_along_are_nobody_s(box: AsyncSandbox, site: Web) -> None:
    """A proxy that took them would run out of numbers, or hand them on."""
    before = len(os.listdir("/proc/self/fd"))
    send = f"""
for _ in range(20):
    sock = socket.socket(socket.AF_UNIX)
    sock.connect('/run/sbx/egress.sock')
    words = b'GET {site.url}/ HTTP/1.1\\r\\nHost: {site.host}\\r\\nConnection: close\\r\\n\\r\\n'
    socket.send_fds(sock, [words], [0] * 200)
    assert sock.recv(12) == b'HTTP/1.1 200'
    sock.close()
"""
    assert await attack(box, send) == "ok"
    assert len(os.listdir("/proc/self/fd")) < before + 20


@pytest.mark.unprivileged
async def test_the_proxy_of_another_sandbox_is_out_of_reach(
    box: AsyncSandbox, runtime: Runtime, fresh: Fresh, site: Web
) -> None:
    """By its path on the host, by the number of its process, and by the loopback."""
    other = await fresh(networked("*.example.org"))
    await other.start()
    outlet = other._outlet
    assert outlet is not None
    path = f"{outlet._ways_out[''].way_out.directory}/egress.sock"
    assert stat.S_ISSOCK(os.stat(path).st_mode)
    assert await attack(box, f"os.stat({path!r})") == "ENOENT"
    assert "is not in the policy's network.allow" in await asked(box, "http://a.example.org/")
    assert "is not in the policy's network.allow" in await asked(other, f"{site.url}/")


# -- the relay -------------------------------------------------------------------------------------

RELAY = """
import urllib.request
urllib.request.urlopen({url!r}, timeout=50).read()
def relays():
    found = []
    for name in os.listdir('/proc'):
        if name.isdigit() and int(name) not in (1, os.getpid()):
            try:
                if open(f'/proc/{name}/stat').read().split()[3] == '1':
                    found.append(int(name))
            except OSError:
                pass
    return found
"""


@pytest.mark.needs("landlock-scopes")
@pytest.mark.unprivileged
async def test_the_relay_is_out_of_reach_of_a_cell(
    box: AsyncSandbox, site: Web, fresh: Fresh, started_by: str
) -> None:
    """And where Landlock is missing, whoever kills it loses a connection of their own."""
    find = RELAY.replace("{url!r}", repr(f"{site.url}/relay"))
    # Until a killed relay has ended it may still accept, and its connection is lost.
    kill = f"{find}\nfor pid in relays(): os.kill(pid, signal.SIGKILL)"
    kill += "\nwhile relays(): time.sleep(0.01)"
    assert await attack(box, f"{find}\nassert len(relays()) == 1") == "ok"
    assert await attack(box, kill) == "EPERM"
    trace = f"{find}\nfor pid in relays(): open(f'/proc/{{pid}}/mem', 'rb+')"
    assert await attack(box, trace) == "EACCES"
    control = await fresh(networked(site.host))
    with altered("landlock"), by(started_by):
        assert await attack(control, kill) == "ok"
        assert await asked(control, f"{site.url}/after") == "hello from /after"


async def test_nobody_else_can_listen_in_its_place(
    box: AsyncSandbox, site: Web, fresh: Fresh, started_by: str
) -> None:
    listen = "socket.create_server(('127.0.0.1', 3128))"
    assert await attack(box, listen) == "EADDRINUSE"
    control = await fresh(networked(site.host))
    with altered(change=lambda plan: replace(plan, way_out=False)), by(started_by):
        assert await attack(control, listen) == "ok"


async def test_a_flood_of_connections_leaves_the_host_and_the_sandbox_usable(
    box: AsyncSandbox, site: Web
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    flood = """
socks = []
for _ in range(400):
    sock = socket.socket()
    sock.setblocking(False)
    sock.connect_ex(('127.0.0.1', 3128))
    socks.append(sock)
time.sleep(1)
"""
    assert await attack(box, flood) == "ok"
    assert len(os.listdir("/proc/self/fd")) < before + 100
    assert await attack(box, "for sock in socks: sock.close()") == "ok"
    again = f"""
{SEEN}
for _ in range(1000):
    try:
        if 'hello' in asked('{site.url}/'):
            break
    except OSError:  # what is left of the flood comes first
        time.sleep(0.05)
else:
    raise TimeoutError
"""
    assert await attack(box, again) == "ok"


# -- where it leads --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/latest/meta-data/",
        "http://[fd00:ec2::254]/",
        "http://127.0.0.3/",
        "http://10.0.0.1/",
        "http://[::1]:80/",
        "http://[::ffff:127.0.0.1]/",
    ],
)
@one_path()  # it is the proxy that says no
async def test_private_and_metadata_addresses_are_refused_though_they_are_listed(
    fresh: Fresh, url: str
) -> None:
    """In `allow`, and not in `allow_private`, which is the control: see below."""
    host = url.split("/")[2]
    if host == "[::ffff:127.0.0.1]":
        box = await fresh(networked("*.example.org"))
        assert (await asked(box, url))[:3] in ("400", "403")
        return
    box = await fresh(networked(host, allow_private=[]))
    assert "403 sbx refused by network.allow_private" in await asked(box, url)


@one_path()
async def test_a_loopback_address_is_reached_where_the_policy_names_it_and_not_else(
    fresh: Fresh, site: Web
) -> None:
    unnamed = await fresh(networked(site.host, allow_private=[]))
    assert "403 sbx refused by network.allow_private" in await asked(unnamed, f"{site.url}/")
    named = await fresh(networked(site.host))
    assert await asked(named, f"{site.url}/") == "hello from /"


@one_path()
async def test_a_redirect_leads_no_further_than_the_list(fresh: Fresh, site: Web) -> None:
    """The client follows it, and asks the proxy again."""
    with web() as other:
        site.pages["/away"] = b"<meta http-equiv=refresh>"
        box = await fresh(networked(site.host))
        assert "403 sbx refused by network.allow" in await asked(box, f"{other.url}/")
        assert other.asked == []


# -- secrets ---------------------------------------------------------------------------------------

SEARCH = """
first, rest = {first!r}.encode(), {rest!r}.encode()

def holds(content):
    'The two parts are apart in the memory of whoever searches, and next to each other in a value.'
    at = content.find(first)
    while at >= 0:
        if content[at + len(first) : at + 64].startswith(rest):
            return True
        at = content.find(first, at + 1)
    return False

def pieces(process):
    try:
        maps, memory = open(process + '/maps').readlines(), open(process + '/mem', 'rb', 0)
    except OSError:
        return
    for line in maps:
        span, rights, *_ = line.split()
        begin, end = (int(word, 16) for word in span.split('-'))
        if rights.startswith('rw') and end - begin < 1 << 28:
            try:
                memory.seek(begin)
                yield memory.read(end - begin)
            except OSError:
                pass

found, packages = set(), (sys.prefix, sys.base_prefix)
for process in glob.glob('/proc/[0-9]*'):
    if any(map(holds, pieces(process))):
        found.add('memory')
    for name in ('environ', 'cmdline'):
        try:
            if holds(open(process + '/' + name, 'rb').read()):
                found.add(name)
        except OSError:
            pass
for top in ('/run', '/etc', '/tmp', '/workspace', '/sandbox', '/dev/shm'):
    for directory, below, names in os.walk(top):
        # The packages of the interpreter are older than the value, and can lie below /tmp.
        below[:] = [name for name in below if os.path.join(directory, name) not in packages]
        for path in (os.path.join(directory, name) for name in names):
            try:
                if os.path.isfile(path) and holds(open(path, 'rb').read(1 << 26)):
                    found.add(path)
            except OSError:
                pass
sorted(found)
"""


async def test_the_value_of_a_secret_is_nowhere_inside(
    fresh: Fresh, site: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in an environment, a file, or any memory that can be read; also after it was used, and
    where the host that got it sends it back. The control gives it as a plain variable."""
    value = f"value-{secrets.token_hex(12)}"
    monkeypatch.setenv("REAL_CRM_TOKEN", value)
    secret = {"env": "CRM", "hosts": [ADDRESS], "from": "env:REAL_CRM_TOKEN", "allow_plain": True}
    site.pages["/echo"] = f'{{"you sent": "Bearer {value}"}}'.encode()
    use = f"""
import urllib.request
headers = {{'Authorization': 'Bearer ' + os.environ['CRM']}}
asked = urllib.request.Request('{site.url}/echo', headers=headers)
answer = urllib.request.urlopen(asked, timeout=50).read().decode()
assert os.environ['CRM'] in answer, answer
open('/workspace/answer', 'w').write(answer)
"""
    search = SEARCH.format(first=value[:15], rest=value[15:])
    box = await fresh(networked(site.host, secrets={"CRM": secret}))
    assert await attack(box, use) == "ok"
    assert site.asked[-1][1]["authorization"] == f"Bearer {value}"
    assert await tell(box, search) == []
    control = await fresh(networked(site.host), env={"CRM": value})
    assert await tell(control, "open('/workspace/copy', 'w').write(os.environ['CRM'])") == 30
    assert {"/workspace/copy", "memory"} <= set(await tell(control, search))


@one_path()
async def test_a_secret_goes_to_no_other_host_and_in_no_other_header(
    fresh: Fresh, site: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = f"value-{secrets.token_hex(12)}"
    monkeypatch.setenv("REAL_CRM_TOKEN", value)
    secret = {
        "env": "CRM", "hosts": ["api.example.org"], "from": "env:REAL_CRM_TOKEN",
        "allow_plain": True,
    }  # fmt: skip
    box = await fresh(networked(site.host, secrets={"CRM": secret}))
    for header in ("Authorization", "X-Other", "Cookie"):
        ask = f"""
import urllib.error, urllib.request
asked = urllib.request.Request('{site.url}/stolen', headers={{'{header}': os.environ['CRM']}})
try:
    urllib.request.urlopen(asked, timeout=50)
    answer = 'let through'
except urllib.error.HTTPError as error:
    answer = str(error.code)
answer
"""
        assert await tell(box, ask) == "403"
    assert "/stolen" not in [path for path, _ in site.asked]
