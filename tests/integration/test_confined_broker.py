"""As root: a broker that was told what jails may be made of gives a taken-over service no more.

Every attack is a real order that was obeyed, with one thing changed.
"""

import copy
import json
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from places import short_directory
from service_process import service

from sbx import Runtime, errors
from sbx.api.server import privileges
from sbx.api.server.settings import ServiceSettings
from sbx.errors import Denied
from sbx.isolation.broker.allowlist import BrokerAllowlist
from sbx.isolation.broker.client import BrokerClient
from sbx.isolation.broker.jail import Jail
from sbx.isolation.broker.process import start_broker
from sbx.policy import Policy

pytestmark = pytest.mark.needs("root", "landlock", "seccomp")
Order = dict[str, Any]


class Taken:
    """A service's broker in the hands of somebody else: what was ordered, to be ordered again."""

    def __init__(self, runtime: Runtime, broker: BrokerClient, data: Path) -> None:
        self.broker = broker
        self.data = data
        self.runtime = runtime
        self.seen: dict[str, Order] = {}
        self.sandbox = ""

    async def again(self, do: str, change: Callable[[Order], object] = lambda order: None) -> Any:
        order = copy.deepcopy(self.seen[do])
        order.pop("do")
        name = {"launch": "jail", "fork": "jail", "start_zygote": "zygote"}.get(do)
        if name is not None:
            old, new = order[name], secrets.token_hex(8)
            order[name] = new
            if "args" in order:
                order["args"] = [word.replace(old, new) for word in order["args"]]
        if "sandbox" in order:
            order["sandbox"] = self.sandbox
        change(order)
        pairs = [socket.socketpair() for _ in range(2)]
        try:
            fds = [one.fileno() for one, _ in pairs] if do in ("launch", "fork") else []
            answer = await self.broker.order(do, fds=fds, **order)
            return order, answer
        finally:
            for one in (one for pair in pairs for one in pair):
                one.close()

    async def refused(self, do: str, change: Callable[[Order], object]) -> str:
        with pytest.raises(errors.Denied) as raised:
            await self.again(do, change)
        assert raised.value.code == "not_granted"
        return raised.value.message


def cold(policy: Policy) -> Policy:
    pool = policy.pool.model_copy(update={"start": "cold", "min_idle": 0, "max_idle": 0})
    return policy.model_copy(update={"pool": pool})


@pytest.fixture(scope="module")
def top() -> Iterator[Path]:
    with short_directory() as directory:
        yield directory


@pytest_asyncio.fixture(scope="module")
async def taken(top: Path) -> AsyncIterator[Taken]:
    """After one start by the cold path and one by a fork, both of which went well."""
    data = top / "data"
    settings = ServiceSettings(data_dir=data, socket=top / "run" / "sbx.sock")
    data.mkdir(mode=0o711)
    broker = start_broker(uids=settings.uid_range)
    privileges.confine(broker, settings, privileges.account_of(settings), writable=[data])
    async with Runtime(settings, broker=broker) as runtime:
        own = runtime._broker
        assert own is not None
        found = Taken(runtime, own, data)
        real = own.order

        async def recorded(do: str, **words: Any) -> Any:
            said = {name: one for name, one in words.items() if name not in ("fds", "deadline_s")}
            found.seen.setdefault(do, json.loads(json.dumps({"do": do, **said})))
            return await real(do, **words)

        own.order = recorded  # type: ignore[method-assign]
        policy, _ = await runtime.decide("default")
        narrower = {"filesystem": {"read": ["/usr", "/lib", "/lib64", "/bin"]}}
        async with (
            await runtime.create(cold(policy)) as first,
            await runtime.create(policy) as second,
            await runtime.create(policy, narrower=narrower, env={"MINE": "1"}) as third,
        ):
            paths = []
            for box in (first, second, third):
                assert (await box.run("6 * 7")).text.strip() == "42"
                assert box.receipt is not None
                paths.append(box.receipt.path)
            assert paths[0] == "cold"
            assert {*paths[1:]} <= {"fork", "pool"}
            assert (await third.run("import os; os.environ['MINE']")).text.strip() == "'1'"
            own.order = real  # type: ignore[method-assign]
            found.sandbox = second.id
            yield found


async def test_the_orders_themselves_are_obeyed_again(taken: Taken) -> None:
    order, answer = await taken.again("launch")
    assert answer["pid"] > 0
    await taken.broker.order("kill", jail=order["jail"])
    order, _ = await taken.again("start_zygote")
    await taken.broker.order("retire_zygote", zygote=order["zygote"])
    order, _ = await taken.again("fork")
    _, answer = await taken.again("enter", setting("jail", order["jail"]))
    assert answer["limits"]
    await taken.broker.order("kill", jail=order["jail"])


def binds(*words: str) -> Callable[[Order], None]:
    def change(order: Order) -> None:
        at = order["args"].index("--ro-bind-try")
        order["args"][at:at] = words

    return change


def setting(name: str, value: Any) -> Callable[[Order], None]:
    return lambda order: order.update({name: value})


def dropping(*words: str) -> Callable[[Order], None]:
    def change(order: Order) -> None:
        at = order["args"].index(words[0])
        assert order["args"][at : at + len(words)] == list(words)
        del order["args"][at : at + len(words)]

    return change


def staging(source: str) -> Callable[[Order], None]:
    def change(order: Order) -> None:
        index, _, _, mapped = order["stage"][0]
        order["stage"][0] = [index, source, None, mapped]

    return change


def unstaged(order: Order) -> None:
    source = next(one[1] for one in order["stage"] if one[1].endswith("/files"))
    binds("--bind", source, "/workspace")(order)


def more_staged(order: Order) -> None:
    order["stage"].append([190, "/root", None, False])


def smuggled(order: Order) -> None:
    at = order["args"].index("HOME")
    order["args"][at + 1] = "/workspace\0--bind\0/\0/mnt"


def word_after(word: str, behind: int, value: str) -> Callable[[Order], None]:
    def change(order: Order) -> None:
        order["args"][order["args"].index(word) + behind] = value

    return change


ATTACKS: dict[str, Callable[[Order], object]] = {
    "the host": binds("--bind", "/", "/mnt"),
    "the host, read-only": binds("--ro-bind", "/", "/mnt"),
    "devices": binds("--dev-bind", "/dev", "/dev"),
    "something more of the host": binds("--ro-bind-try", "/root", "/root"),
    "a system directory to write": binds("--bind", "/usr", "/usr"),
    "a directory outside of the view": binds("--perms", "0755", "--dir", "/../x"),
    "a relative source": binds("--bind", "files", "/workspace"),
    "files of a sandbox, not staged": unstaged,
    "a tmpfs without a limit": word_after("--size", 1, "0"),
    "a file of another number": word_after("--file", 1, "11"),
    "a variable that is two": word_after("HOME", 0, "HOME=/ LD_PRELOAD"),
    "more power": binds("--cap-add", "ALL"),
    "swallowing a word": binds("--hostname"),
    "words in a variable": smuggled,
    "no namespaces": dropping("--unshare-net"),
    "another uid": dropping("--uid", "1000"),
    "no filter by an option": dropping("--seccomp", "7"),
    "a program": setting("command", ["/bin/sh"]),
    "python for itself": setting("command", ["/usr/bin/python3", "-c", "1"]),
    "no filter": setting("filter", ""),
    "a filter that allows all": setting("filter", "060000000000ff7f"),
    "a foreign stage source": staging("/root"),
    "the host's passwords": staging("/etc/shadow"),
    "something staged that is not shown": more_staged,
    "a name that is a path": setting("jail", "../../etc"),
}


@pytest.mark.parametrize("attack", ATTACKS)
async def test_a_launch_of_anything_else_is_refused(taken: Taken, attack: str) -> None:
    await taken.refused("launch", ATTACKS[attack])


def prepared(name: str, value: Any) -> Callable[[Order], None]:
    return lambda order: order["prepare"].update({name: value})


def walled(name: str, value: Any) -> Callable[[Order], None]:
    return lambda order: order["prepare"]["walls"].update({name: value})


ZYGOTE_ATTACKS: dict[str, Callable[[Order], object]] = {
    "the host": binds("--ro-bind", "/", "/mnt"),
    "a program": setting("command", ["/bin/sh"]),
    "a library of its own": binds("--setenv", "LD_PRELOAD", "/tmp/x.so"),
    "a module": prepared("preload", ["antigravity"]),
    "a foreign stage source": staging("/root"),
    "a tmpfs over anything": prepared("tmpfs", [["/opt/sbx", 4096, "1777"]]),
    "a tree of anything": prepared("kept", ["/proc/1/root"]),
    "no filter": walled("filter", None),
    "no landlock": walled("landlock", False),
    "all to be written": walled("write", ["/"]),
    "a name that is a path": setting("zygote", "../../etc"),
}


@pytest.mark.parametrize("attack", ZYGOTE_ATTACKS)
async def test_a_zygote_of_anything_else_is_refused(taken: Taken, attack: str) -> None:
    await taken.refused("start_zygote", ZYGOTE_ATTACKS[attack])


def mounting(**words: Any) -> Callable[[Order], None]:
    return lambda order: order["mounts"][0].update(words)


ENTER_ATTACKS: dict[str, Callable[[Order], object]] = {
    "the host": mounting(source="/"),
    "root's home": mounting(source="/root", writable=False),
    "the data directory": mounting(source="DATA"),
    "upwards": mounting(source="DATA/sandboxes/../store.sqlite"),
    "another place": mounting(target="/opt/sbx"),
    "uploads to write": lambda order: order["mounts"][2].update(writable=True),
    "a tmpfs": lambda order: order["tmpfs"].append(["/etc", 4096, "1777"]),
    "a tmpfs without a limit": lambda order: order["tmpfs"][0].__setitem__(1, 0),
    "a variable that is two": setting("environment", {"A=B C": "1"}),
    "a variable with an end": setting("environment", {"A": "1\0B=2"}),
    "a variable that is no text": setting("environment", {"A": 1}),
}


@pytest.mark.parametrize("attack", ENTER_ATTACKS)
async def test_nothing_else_enters_a_sandbox(taken: Taken, attack: str) -> None:
    def change(order: Order) -> None:
        ENTER_ATTACKS[attack](order)
        for mount in order["mounts"]:
            mount["source"] = mount["source"].replace("DATA", str(taken.data))

    await taken.refused("enter", change)


async def test_the_socket_of_a_proxy_is_shown_at_its_place_and_nothing_in_its_stead(
    taken: Taken,
) -> None:
    """That it is shown there: see test_network_service."""
    name, link = secrets.token_hex(16), secrets.token_hex(16)
    egress = taken.data / "egress"
    (egress / name).mkdir()
    (egress / link).symlink_to("/run")

    def also(source: str, target: str = "/run/sbx", *, writable: bool = False) -> Any:
        mount = {"source": source, "target": target, "writable": writable, "mapped": False}
        mount["expected"] = None
        return lambda order: order["mounts"].append(mount)

    for change, why in (
        (also(f"{egress}/{name}", writable=True), "no policy shows"),
        (also(f"{egress}/{name}", "/workspace"), "no policy shows"),
        (also(f"{egress}/{name}", "/opt/sbx"), "no policy shows"),
        (also(str(egress)), "is nothing of a sandbox"),
        (also(f"{egress}/{name}/.."), "is nothing of a sandbox"),
        (also("/run"), "is nothing of a sandbox"),
        (also("/run/docker.sock"), "is nothing of a sandbox"),
        (also(f"{egress}/{link}"), "cannot be shown"),
    ):
        assert why in await taken.refused("enter", change)


async def test_no_symlink_below_the_data_directory_is_followed(taken: Taken) -> None:
    """Neither in place of a conversation's files, nor on the way to them, nor swapped while the
    broker looks: what is mounted is what it has opened."""
    sandbox, conversation = secrets.token_hex(16), secrets.token_hex(16)
    place = taken.data / "sandboxes" / sandbox
    source = f"{place}/{conversation}/files"

    def staged(order: Order) -> None:
        for one in order["stage"]:
            if one[1].startswith(str(taken.data)) and one[1].endswith("/files"):
                one[1:3] = [source, None]

    files = Path(source)
    place.mkdir()
    (place / conversation).symlink_to("/root")
    assert "cannot be shown" in await taken.refused("launch", staged)
    (place / conversation).unlink()
    (place / conversation).mkdir()
    files.symlink_to("/root")  # noqa: ASYNC240  # of a test
    assert "cannot be shown" in await taken.refused("launch", staged)
    assert "cannot be shown" in await taken.refused("enter", mounting(source=source))


def test_a_quota_is_set_for_a_conversation_and_for_nothing_else(tmp_path: Path) -> None:
    sandbox = tmp_path / "sandboxes" / ("a" * 32)
    (sandbox / ("b" * 32) / "files").mkdir(parents=True)
    (sandbox / "shared").mkdir()
    (sandbox / ("c" * 32)).symlink_to("/root")
    (sandbox / ("d" * 32)).symlink_to("b" * 32)  # beneath: only the rule about symlinks refuses it
    names = ("skeletons", "binds", "created", "tmpfs", "files", "variables", "commands")
    nothing: dict[str, list[Any]] = {name: [] for name in names}
    reported = {"jail": nothing, "zygote": nothing, "preload": [], "walls": [], "writable": []}
    confinement = BrokerAllowlist({**reported, "data": str(tmp_path)})
    limits = {"bytes_max": 1, "inodes_max": 1}
    try:
        for path in (sandbox / ("b" * 32), sandbox / "shared"):
            with confinement.checked({"do": "charge", "path": str(path), **limits}) as allowed:
                assert os.path.samefile(allowed["path"], path)
        links = [sandbox / ("c" * 32), sandbox / ("d" * 32)]
        for path in (sandbox, sandbox / ("b" * 32) / "files", *links, Path("/etc")):
            with pytest.raises(Denied), confinement.checked({"do": "charge", "path": str(path)}):
                pass
        with confinement.checked({"do": "look_at_disk", "path": "/root"}) as allowed:
            assert allowed["path"] == str(tmp_path)
    finally:
        os.close(confinement._data_fd)


def test_what_is_swapped_after_the_look_is_not_shown(tmp_path: Path) -> None:
    source = tmp_path / "sandboxes" / ("a" * 32) / ("b" * 32) / "files"
    source.mkdir(parents=True)
    (source / "mine").touch()
    names = ("skeletons", "binds", "created", "tmpfs", "files", "variables", "commands")
    nothing: dict[str, list[Any]] = {name: [] for name in names}
    reported = {"jail": nothing, "zygote": nothing, "preload": [], "walls": [], "writable": []}
    confinement = BrokerAllowlist({**reported, "data": str(tmp_path)})
    try:
        with ExitStack() as held:
            _, opened = confinement._open(str(source), held)
            source.rename(f"{source}-aside")
            source.symlink_to("/root")
            assert os.listdir(opened) == ["mine"]
    finally:
        os.close(confinement._data_fd)


def test_a_source_behind_a_symlink_to_a_writable_directory_is_not_granted(tmp_path: Path) -> None:
    """The service could exchange what a policy shows of there."""
    (tmp_path / "mine").mkdir()
    link = tmp_path / "link"
    link.symlink_to("mine")
    names = ("skeletons", "binds", "created", "tmpfs", "files", "variables", "commands")
    nothing: dict[str, list[Any]] = {name: [] for name in names}
    binds = [("--ro-bind", "/usr", "/usr"), ("--ro-bind", str(link), "/srv")]
    reported = {"jail": {**nothing, "binds": binds}, "zygote": nothing, "preload": [], "walls": []}
    reported |= {"writable": [str(tmp_path / "mine")], "data": str(tmp_path)}
    confinement = BrokerAllowlist(reported)
    try:
        assert confinement._jails.binds == {binds[0]}
    finally:
        os.close(confinement._data_fd)


async def test_no_sandbox_and_no_zygote_gets_a_uid_outside_of_the_range(taken: Taken) -> None:
    first, count = ServiceSettings().uid_range
    for uid, why in (
        (0, "uid 0 of the host"),
        (first - 1, "outside the range"),
        (first + count, "outside the range"),
    ):
        with pytest.raises(errors.Broken, match=why):
            await taken.broker.order("make_sandbox", sandbox="x", limits={}, uid=uid)
    for uid in (first - 1, first + count):
        with pytest.raises(errors.Broken, match="outside the range"):
            await taken.again("start_zygote", setting("uid", uid))


async def test_it_is_told_once(taken: Taken) -> None:
    with pytest.raises(errors.Broken, match="has the grants of the runtime already"):
        await taken.broker.order("confine")


async def test_before_that_it_does_nothing(top: Path) -> None:
    started = start_broker(uids=(1_900_000_000, 1000), groups=False)
    broker = BrokerClient.adopt(started)
    try:
        with pytest.raises(errors.Denied):
            await broker.order("make_sandbox", sandbox="x", limits={}, uid=None)
    finally:
        await broker.close()


@pytest.mark.parametrize("change", [{"filter": None}, {"landlock": False}])
async def test_a_forked_jail_with_fewer_walls_ends(
    taken: Taken, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    """Its walls come from the service, over a socket that the broker does not read."""
    walls = Jail.walls

    def fewer(jail: Jail) -> dict[str, Any]:
        return walls(jail) | (change if jail.zygote is not None else {})

    monkeypatch.setattr(Jail, "walls", fewer)
    async with await taken.runtime.create(env={"WHO": "me"}) as box:  # no kernel of before
        assert (await box.run("6 * 7")).text.strip() == "42"
        assert box.receipt is not None
        assert box.receipt.path == "cold"
        assert "not the walls of the zygote" in str(box.receipt)


def test_a_service_starts_kernels_by_every_path_with_what_its_policies_show() -> None:
    with short_directory() as top:
        policies, given = top / "policies", top / "given"
        for directory in (policies, given):
            directory.mkdir()
        (given / "data.txt").write_text("42")
        (policies / "slow.toml").write_text(
            'schema = 1\nextends = "default"\n[pool]\nstart = "cold"\n'
            f'[[filesystem.mount]]\nsource = "{given}"\ntarget = "/srv/given"\n'
        )
        (policies / "missing.toml").write_text(
            'schema = 1\nextends = "default"\n'
            f'[[filesystem.mount]]\nsource = "{top}/nowhere"\ntarget = "/srv/nowhere"\n'
        )
        with (
            service(top, env={"SBX_POLICY_DIRS": str(policies)}) as started,
            started.client() as client,
        ):
            assert _path(client, "default", "print(6 * 7)") in ("fork", "pool")
            assert _path(client, "slow", "print(open('/srv/given/data.txt').read())") == "cold"
            (policies / "late.toml").write_text(
                'schema = 1\nextends = "default"\n'
                '[[filesystem.mount]]\nsource = "/etc"\ntarget = "/srv/late"\n'
            )
            made = client.post("/v1/sandboxes", json={"profile": "late"}).json()["id"]
            done = client.post(f"/v1/sandboxes/{made}/python/exec", json={"code": "1"})
            assert done.status_code == 403
            assert "start the service again" in done.text


def _path(client: httpx.Client, policy: str, code: str) -> str:
    made = client.post("/v1/sandboxes", json={"profile": policy}).json()["id"]
    done = client.post(f"/v1/sandboxes/{made}/python/exec", json={"code": code})
    assert done.json()["output"].strip() == "42", done.text
    path: str = client.get(f"/v1/sandboxes/{made}/inspect").json()["kernels"][0]["receipt"]["path"]
    return path
