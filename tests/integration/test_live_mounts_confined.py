"""As root: a service that dropped its rights mounts what its settings name, and nothing else."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from places import short_directory

from sbx import Runtime
from sbx.api.server import privileges
from sbx.api.server.settings import ServiceSettings
from sbx.errors import Denied, SbxError
from sbx.isolation.broker.process import start_broker

pytestmark = pytest.mark.needs("root", "landlock", "seccomp")


@pytest.fixture
def top() -> Iterator[Path]:
    with short_directory() as directory:
        directory.chmod(0o755)
        for name in ("granted/below", "granted-not", "data", "data/inside"):
            (directory / name).mkdir(parents=True)
        (directory / "granted/below/a.txt").write_text("hello")
        (directory / "granted/link").symlink_to("/root")
        yield directory


async def test_only_what_the_settings_name_is_mounted(top: Path) -> None:
    data = top / "data"
    granted = (top / "granted", data / "inside", top / "none")
    settings = ServiceSettings(data_dir=data, socket=top / "run" / "s", mount_dirs=granted)
    broker = start_broker(uids=settings.uid_range)
    privileges.confine(broker, settings, privileges.account_of(settings), writable=[data])
    async with Runtime(settings, broker=broker) as runtime, await runtime.create() as box:
        await box.start()
        await box.mount(top / "granted", "/mnt/whole")
        await box.mount(top / "granted/below", "/mnt/part")
        run = await box.run("print(open('/mnt/part/a.txt').read())")
        assert run.stdout == "hello\n"
        kernel = box.conversation("default").contexts.default._kernel
        assert kernel is not None

        async def refused(source: Path | str, **changed: Any) -> SbxError:
            words = {"read_only": True, "expected": None, "jail": kernel.jail.name, **changed}
            with pytest.raises(Denied) as raised:
                await kernel.jail._order("attach", source=str(source), target="/mnt/x", **words)
            return raised.value

        for source in (
            *("/", "/root", top / "granted-not", top / "granted/../granted-not"),
            *(top / "granted/link", top / "granted/link/.ssh", data, data / "inside"),
        ):
            assert (await refused(source)).code == "not_granted", source
        assert (await refused(top / "granted", read_only=False)).code == "not_granted"


@pytest.mark.full_tier
async def test_taken_over_service_cannot_leave_sockets_uncovered(top: Path) -> None:
    data, place = top / "data", top / "granted"
    settings = ServiceSettings(data_dir=data, socket=top / "run" / "s", mount_dirs=(place,))
    broker = start_broker(uids=settings.uid_range)
    privileges.confine(broker, settings, privileges.account_of(settings), writable=[data])
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place / "socket"))
        listener.listen()
        (place / "socket").chmod(0o777)
        async with Runtime(settings, broker=broker) as runtime, await runtime.create() as box:
            await box.start()
            kernel = box.conversation("default").contexts.default._kernel
            assert kernel is not None
            known = place.stat()
            covered = await kernel.jail.attach(
                str(place),
                "/mnt/x",
                read_only=True,
                expected=(known.st_dev, known.st_ino),
                mask=False,
            )
            assert covered == 1
            connect = "import socket; socket.socket(socket.AF_UNIX).connect('/mnt/x/socket')"
            run = await box.run(connect)
            assert run.error is not None
            assert run.error.name == "PermissionError"
