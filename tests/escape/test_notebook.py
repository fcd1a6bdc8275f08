"""The core of the escape tests from a notebook's cell, by Jupyter's own client: what is inside of a
kernel that a notebook started is no more than of any other, and of the notebook's own channels
there is nothing inside: no key, no port, no path.
"""

# ruff: noqa: ASYNC240  # a look at a file blocks nothing that matters to a test

import asyncio
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from ast import literal_eval
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from attacking import prelude
from jupyter_client.manager import AsyncKernelManager
from jupyter_specs import DEFAULT, HERE, STANDALONE_HERE, jupyter_kernels, person_s
from notebooks import CellMessages, execute
from test_siblings import SCAN, masked

from sbx.doctor.attacks import probe_program
from sbx.doctor.attacks.attack import Attack, Outcome
from sbx.doctor.attacks.decoys import Decoys, laid_out
from sbx.doctor.attacks.runner import TOGETHER, limits
from sbx.policy import load

__all__ = ["jupyter_kernels"]
# Others end in the host's file calls, or are on uploads or directories of the host that the policy
# mounts: a notebook has none.
ATTACKS = [
    one
    for one in TOGETHER
    if not one.act and "upload" not in one.code and "mounted directory" not in one.name
]


class Notebook:
    """A kernel that jupyter_client started, and a client of it."""

    def __init__(self, manager: AsyncKernelManager, client: Any) -> None:
        self.manager = manager
        self.client = client

    @property
    def info(self) -> dict[str, Any]:
        return dict(self.manager.get_connection_info())

    @property
    def ports(self) -> list[int]:
        return [value for name, value in self.info.items() if name.endswith("_port")]

    async def run(self, code: str) -> CellMessages:
        return await execute(self.client, prelude() + code)

    async def tell(self, code: str) -> Any:
        """The value of the last expression."""
        answer = await self.run(code)
        assert answer.reply["content"]["status"] == "ok", answer.reply["content"]
        (result,) = answer.contents("execute_result")
        return literal_eval(result["data"]["text/plain"])


@asynccontextmanager
async def notebook(
    kernel: str = DEFAULT, *, transport: str = "tcp", **how: Any
) -> AsyncIterator[Notebook]:
    manager = AsyncKernelManager(kernel_name=kernel, transport=transport)
    await manager.start_kernel(**how)
    client = manager.client()
    client.start_channels(hb=False)
    try:
        await client.wait_for_ready(timeout=60)
        yield Notebook(manager, client)
    finally:
        client.stop_channels()
        await manager.shutdown_kernel(now=kernel != STANDALONE_HERE)  # a process leaves its traces
        client.context.destroy(linger=0)


@pytest.fixture(scope="module")
def baits(jupyter_kernels: Path) -> Iterator[Decoys]:  # a fixture, by its name
    with laid_out() as baits:
        yield baits


@pytest_asyncio.fixture(scope="module")
async def one(baits: Decoys) -> AsyncIterator[Notebook]:
    """The kernels' runtime starts when the baits lie, so that its environment has theirs."""
    async with notebook() as one:
        yield one


@pytest_asyncio.fixture(scope="module")
async def other(one: Notebook) -> AsyncIterator[Notebook]:
    """By another transport, in a process that has `one` already."""
    async with notebook(transport="ipc") as other:
        yield other


@pytest_asyncio.fixture(scope="module")
async def tried(one: Notebook, baits: Decoys) -> dict[str, str]:
    code = probe_program.program(ATTACKS, baits.parameters, limits(load("default")))
    return probe_program.outcomes(ATTACKS, (await execute(one.client, code)).stdout)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
async def test_attack_is_held(attack: Attack, tried: dict[str, str]) -> None:
    """That each gets through without its wall is seen in test_attack_set.py."""
    outcome = tried.get(attack.name)
    assert outcome is not None, "nothing was heard of it"
    assert attack.judge(outcome) is Outcome.HELD, outcome


# -- its own channels, and those of others ---------------------------------------------------------


async def test_no_port_of_any_kernel_is_reached_from_inside(one: Notebook, other: Notebook) -> None:
    """Of all ports that there are. The control: they are open here, and one is found inside."""
    for port in one.ports:
        socket.create_connection((one.info["ip"], port)).close()
    held = "held = socket.socket(); held.bind(('127.0.0.1', 0)); held.listen()\n"
    scan = """
def is_open(address, port):
    with socket.socket() as one:  # which linux may give the very port that it looks for
        return one.connect_ex((address, port)) == 0 and one.getsockname() != one.getpeername()
[port for port in range(1, 65536) if is_open('127.0.0.1', port)] == [held.getsockname()[1]]
"""
    assert await one.tell(held + scan) is True
    reach = f"[names_of(socket.create_connection, ('127.0.0.1', port)) for port in {one.ports}]"
    assert await other.tell(reach) == ["ECONNREFUSED"] * 5


async def test_no_path_of_any_kernel_is_reached_from_inside(one: Notebook, other: Notebook) -> None:
    paths = [f"{other.info['ip']}-{port}" for port in other.ports]
    for path in paths:
        assert Path(path).is_socket()
        assert Path(path).stat().st_mode & 0o077 == 0
    paths += [one.manager.connection_file, other.manager.connection_file]
    paths += [os.path.dirname(path) for path in paths]
    look = f"[names_of(os.stat, path) for path in {paths!r}]"
    for notebook in (one, other):
        assert set(await notebook.tell(look)) == {"ENOENT"}


async def test_no_abstract_socket_of_the_host_is_reached_from_inside(one: Notebook) -> None:
    name = secrets.token_hex(8)
    with socket.socket(socket.AF_UNIX) as held:
        held.bind(f"\0{name}")
        held.listen()
        reach = f"names_of(socket.socket(socket.AF_UNIX).connect, '\\x00{name}')"
        assert await one.tell(reach) == "ECONNREFUSED"
        assert name not in await one.tell("open('/proc/net/unix').read()")


async def test_the_key_is_nowhere_inside(baits: Decoys) -> None:
    """Not in memory, where the kernel came from a process that the runtime started; not in a
    variable, and not in a file. The control is a word of its own, found in memory."""
    own = secrets.token_hex(12)
    async with notebook() as one, notebook(transport="ipc") as other:
        needles = {"own": masked(own), "path": masked(other.info["ip"])}
        for number, each in enumerate((one, other)):
            needles[f"key {number}"] = masked(each.info["key"].decode())
            needles[f"file {number}"] = masked(os.path.basename(each.manager.connection_file))
        for each in (one, other):
            await each.run(f"kept = {own[:12]!r} + {own[12:]!r}")
            assert await each.tell(f"{SCAN}\nscan({needles!r})") == ["own"]
            names = await each.tell("sorted(os.environ)")
            assert not [name for name in names if name.startswith(("JPY_", "JUPYTER"))]


async def test_the_key_is_of_no_use_to_who_has_it(one: Notebook, other: Notebook) -> None:
    """Told all there is to know, the code inside reaches nobody to tell it to. The control: outside
    the same places are reached."""
    tcp = [(one.info["ip"], port) for port in one.ports]
    ipc = [f"{other.info['ip']}-{port}" for port in other.ports]
    use = f"""
[names_of(socket.create_connection, address, 1) for address in {tcp!r}] + [
 names_of(socket.socket(socket.AF_UNIX).connect, path) for path in {ipc!r}]
"""
    for notebook in (one, other):
        found = await notebook.tell(f"key = {notebook.info['key']!r}\n{use}")
        assert found == ["ECONNREFUSED"] * 5 + ["ENOENT"] * 5
    for address in tcp:
        socket.create_connection(address).close()
    for path in ipc:
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(path)


async def test_what_the_client_has_in_its_environment_is_not_inside(baits: Decoys) -> None:
    """jupyter_client hands all of it on, the server's token among it."""
    token = secrets.token_hex(12)
    env = {**os.environ, "JUPYTER_TOKEN": token, "JPY_SESSION_NAME": f"/x/../{token}.ipynb"}
    async with notebook(env=env) as one:
        code = f"{SCAN}\n(scan({{'token': {masked(token)!r}}}), sorted(os.environ))"
        found, names = await one.tell(code)
        assert found == []
        assert not [name for name in names if name.startswith(("JPY_", "JUPYTER"))]


async def test_kernels_that_one_process_started_do_not_find_each_other(
    one: Notebook, other: Notebook
) -> None:
    await one.run("open('/workspace/made', 'w').close(); open('/tmp/made', 'w').close()")
    missing = "[names_of(os.stat, path) for path in ('/workspace/made', '/tmp/made')]"
    assert await one.tell(missing) == ["ok", "ok"]
    assert await other.tell(missing) == ["ENOENT", "ENOENT"]
    numbers = await other.tell("sorted(int(pid) for pid in os.listdir('/proc') if pid.isdigit())")
    assert len(numbers) <= 3


# -- in the notebook's own directory ---------------------------------------------------------------


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as made:
        (place := Path(made) / "project").mkdir()
        Path(made).chmod(0o755)
        yield person_s(place)


async def test_of_the_host_only_the_directory_is_seen(baits: Decoys, directory: Path) -> None:
    (directory.parent / "beside").write_text("secret")
    (directory / "table").write_text("1")
    (directory / "out").symlink_to(directory.parent / "beside")
    (directory / ".envrc").write_text("")
    async with notebook(HERE, cwd=str(directory)) as one:
        assert await one.tell("open('table').read(), os.getcwd()") == ("1", "/workspace")
        look = """
[names_of(os.stat, path) for path in ('out', '../beside', '/workspace/../beside')] + [
 names_of(open, '.envrc', 'w'), names_of(os.rename, '.envrc', 'x')]
"""
        assert await one.tell(look) == ["ENOENT"] * 3 + ["EROFS", "EROFS"]
        assert not [name for name in os.listdir(directory) if "kernel" in name]


async def refusal(directory: Path, **how: Any) -> str:
    """What jupyter_client raises for a start that must not be."""
    manager = AsyncKernelManager(kernel_name=HERE, **how)
    with pytest.raises(Exception) as raised:  # noqa: PT011  # of any type: it is shown to a person
        await manager.start_kernel(cwd=str(directory))
    with suppress(Exception):
        await manager.shutdown_kernel(now=True)
    return str(raised.value)


@pytest.mark.parametrize("where", ["/", "~", "above home", "a link to home", "jupyter"])
async def test_a_directory_that_is_too_much_is_refused(
    baits: Decoys,
    jupyter_kernels: Path,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
) -> None:
    home = directory / "home/me"
    home.mkdir(parents=True)
    for made in (home, home.parent):
        person_s(made)
    monkeypatch.setenv("HOME", str(home))
    (directory / "link").symlink_to(home)
    place = {
        "~": home,
        "above home": home.parent,
        "a link to home": directory / "link",
        "jupyter": jupyter_kernels,
    }
    assert "cannot be shown to a sandbox" in await refusal(place.get(where, Path(where)))


@pytest.mark.parametrize("how", ["file", "link", "below"])
async def test_a_connection_file_in_the_directory_is_refused(
    baits: Decoys, directory: Path, how: str
) -> None:
    """The code inside would read the key, and find the sockets of ipc beside it."""
    file = directory / "kernel.json"
    if how == "below":
        (directory / "deep").mkdir()
        file = directory / "deep/kernel.json"
    if how == "link":
        (directory.parent / "link").symlink_to(directory)
        file = directory.parent / "link/kernel.json"
    said = await refusal(directory, connection_file=str(file))
    assert "connection" in said.lower(), said
    assert not file.exists()


async def test_sockets_without_a_place_do_not_come_to_lie_in_the_directory(
    baits: Decoys, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """jupyter_client's own name for those of ipc is a relative one."""
    monkeypatch.chdir(directory)
    async with notebook(HERE, cwd=str(directory), transport="ipc") as one:
        assert await one.tell("[name for name in os.listdir() if 'ipc' in name]") == []


PLANT = """
for name in ('json', 'zmq', 'sbx', 'sitecustomize', 'usercustomize', 'asyncio', 'signal'):
    open(f'{name}.py', 'w').write(f'open({MARK!r}, "a").close(); raise SystemExit')
"""


async def test_what_is_planted_in_the_directory_is_not_imported_outside(
    baits: Decoys, directory: Path
) -> None:
    """By a kernel of a process of its own, whose current directory it is, at the next start. The
    control: a module that is asked for by `-m` there is the planted one."""
    mark = directory.parent / "imported"
    directory.parent.chmod(0o777)
    async with notebook(STANDALONE_HERE, cwd=str(directory)) as one:
        planted = await one.run(f"MARK = {str(mark)!r}\n{PLANT}")
        assert planted.reply["content"]["status"] == "ok"
        assert (directory / "zmq.py").exists()
        assert not (directory / "json.py").exists()  # in the quarantine: python3 -m X imports it
        await one.manager.restart_kernel()
        await one.client.wait_for_ready(timeout=60)
        assert (await execute(one.client, "1")).reply["content"]["status"] == "ok"
        assert not mark.exists()
    words = [sys.executable, "-m", "zmq"]
    await asyncio.to_thread(subprocess.run, words, cwd=directory, check=False)
    assert mark.exists()
