"""The broker of a service that dropped root's rights maps what the settings name, and no more."""

import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from places import OWNER, project_directories

from sbx import Runtime
from sbx.api.server import privileges
from sbx.api.server.settings import ServiceSettings
from sbx.errors import Denied
from sbx.isolation.broker.client import BrokerClient
from sbx.isolation.broker.process import start_broker
from sbx.service.projects.sandbox import open_project
from sbx.service.projects.session import ProjectSession
from tests.tiers import rows

pytestmark = pytest.mark.needs("root", "landlock", "seccomp")


@pytest.fixture
def top() -> Iterator[Path]:
    with project_directories() as top:
        (top / "data").mkdir()
        yield top


@pytest.fixture
async def runtime(top: Path) -> AsyncIterator[Runtime]:
    """With a confined broker. This process kept its rights, which the test needs to look."""
    settings = ServiceSettings(
        data_dir=top / "data",
        socket=top / "run" / "s",
        project_dirs=(top / "work",),
        project_owners=(0, OWNER),
    )
    broker = start_broker(uids=settings.uid_range)
    account = privileges.account_of(settings)
    privileges.confine(broker, settings, account, writable=[top / "data"])
    async with Runtime(settings, broker=broker) as runtime:
        yield runtime


def broker_of(runtime: Runtime) -> BrokerClient:
    assert runtime._broker is not None
    return runtime._broker


@pytest.mark.parametrize(("name", "uid"), [("root", 0), ("other", OWNER)])
async def test_a_project_of_a_named_owner_is_mapped(
    runtime: Runtime, top: Path, name: str, uid: int
) -> None:
    place = top / "work" / name
    box = ProjectSession(await open_project(runtime, "default", place))
    try:
        await box.allow_commands()  # else a cell runs on a copy
        assert (await box.start_run("open('made', 'w').write('x')").result()).ok
        assert (await box.start_shell("id -u; cp made copy").result()).stdout == "1000\n"
        await box.files.write("by-call", "x")
        if name == "root":
            answer = await box.start_shell("echo x > .git/config").result()
            assert "Read-only file system" in answer.stderr
    finally:
        await box.close()
    owners = {(place / one).stat().st_uid for one in ("made", "copy", "by-call")}
    assert owners == {uid}


async def test_it_is_mapped_by_the_cold_path_as_well(runtime: Runtime, top: Path) -> None:
    policy, _ = await runtime.decide("default")
    pool = policy.pool.model_copy(update={"start": "cold", "min_idle": 0, "max_idle": 0})
    cold = policy.model_copy(update={"pool": pool})
    async with await open_project(runtime, cold, top / "work/root") as box:
        assert (await box.start()).path == "cold"
        assert (await box.run("open('made', 'w').write('x')")).ok
        assert (await box.run("open('.git/config', 'w')")).status == "error"
    assert (top / "work/root/made").stat().st_uid == 0


async def test_what_the_settings_do_not_name_is_not_mapped(runtime: Runtime, top: Path) -> None:
    async with await runtime.create() as box:
        for source in (
            *("/", "/root", "/etc", str(top), f"{top}/elsewhere", f"{top}/data"),
            *(f"{top}/work/strange", f"{top}/work/link", f"{top}/work/../elsewhere"),
            *(f"{top}/work/missing", f"{top}/work/root/.git/config", "work", None),
        ):
            with pytest.raises(Denied) as raised:
                await broker_of(runtime).order(
                    "map_owner", sandbox=box.id, source=source, expected=None
                )
            assert raised.value.code == "not_granted", source
    with pytest.raises(Denied):
        await open_project(runtime, "default", top / "work/strange")


def _first(**words: Any) -> Callable[[list[dict[str, Any]]], None]:
    return lambda found: found[0].update(words)


ATTACKS: dict[str, Callable[[list[dict[str, Any]]], None]] = {
    "another directory": _first(source="/root"),
    "another project": _first(source="WORK/other"),
    "upwards": _first(source="WORK/root/../other", target="/workspace/../other"),
    "what is above": _first(source="WORK/root/..", target="/workspace/.."),
    "another place": _first(target="/opt/sbx"),
    "a place below": _first(target="/workspace/.git"),
    "not mapped": _first(mapped=False),
    "a link": _first(source="WORK/root/out/passwd", target="/workspace/out/passwd"),
}


@pytest.mark.parametrize("attack", rows(ATTACKS, [*ATTACKS][::2]))
async def test_a_mapped_mount_is_what_was_mapped_at_its_own_place(
    runtime: Runtime, top: Path, monkeypatch: pytest.MonkeyPatch, attack: str
) -> None:
    """A service in foreign hands says what is mounted, by the order that brings the mounts."""
    (top / "work/root/out").symlink_to("/etc")
    order = BrokerClient.order

    async def changed(broker: BrokerClient, do: str, **words: Any) -> Any:
        if do == "enter":
            ATTACKS[attack](words["mounts"])
            for mount in words["mounts"]:
                mount["source"] = mount["source"].replace("WORK", str(top / "work"))
                mount["expected"] = None
        return await order(broker, do, **words)

    monkeypatch.setattr(BrokerClient, "order", changed)
    async with await open_project(runtime, "default", top / "work/root") as box:
        with pytest.raises(Denied) as raised:
            await box.start()
    assert raised.value.code == "not_granted"


async def test_a_directory_is_let_go_with_its_sandbox(runtime: Runtime, top: Path) -> None:
    process = broker_of(runtime)._process
    assert process is not None

    def held() -> list[str]:
        fds = Path(f"/proc/{process.pid}/fd")
        return [one for one in map(os.readlink, fds.iterdir()) if one == str(top / "work/root")]

    async with await open_project(runtime, "default", top / "work/root"):
        assert held()
    assert not held()
