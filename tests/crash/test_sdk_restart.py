"""SDKs of other products meet a service that is killed and started again."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2b import SandboxUnreachableException
from e2b_code_interpreter import Sandbox as E2bSandbox
from e2b_face import e2b_key
from opensandbox import SandboxSync
from opensandbox.config import ConnectionConfigSync
from opensandbox.exceptions import SandboxException
from places import short_directory
from service_process import Service, service

KEY = "sk-sbx-" + "5" * 64


@pytest.fixture
def place() -> Iterator[tuple[Path, str]]:
    """A directory for the data, and a free port."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        host = f"127.0.0.1:{taken.getsockname()[1]}"
    with short_directory() as directory:
        yield directory, host


@contextlib.contextmanager
def served(place: tuple[Path, str]) -> Iterator[Service]:
    directory, host = place
    with service(directory, "--listen", host, env={"SBX_API_KEY": KEY}) as running:
        yield running


def test_opensandbox_gets_a_clear_error_and_then_works_on(place: tuple[Path, str]) -> None:
    where: dict[str, Any] = {"domain": f"{place[1]}/opensandbox", "api_key": KEY}
    transport = ConnectionConfigSync(**where).new_owned_transport()
    config = ConnectionConfigSync(**where, transport=transport)
    with contextlib.closing(transport):
        with served(place) as running:
            box = SandboxSync.create("ubuntu", connection_config=config)
            box.files.write_file("/workspace/kept", "1")
            running.kill()
            with pytest.raises(SandboxException):
                box.commands.run("echo lost")
        with served(place):
            assert box.commands.run("cat kept").text == "1"
            assert box.get_info().status.state == "Running"
            box.kill()


def test_e2b_gets_a_clear_error_and_then_works_on(place: tuple[Path, str]) -> None:
    url = f"http://{place[1]}"
    options: Any = {"api_key": e2b_key(KEY), "api_url": url, "sandbox_url": url}
    with served(place) as running:
        box = E2bSandbox.create(**options)
        box.run_code("kept = 1")
        box.files.write("kept", "1")
        running.kill()
        with pytest.raises(SandboxUnreachableException):
            box.commands.run("echo lost")
    with served(place):
        assert box.commands.run("cat kept").stdout == "1"
        assert box.run_code("1 + 1").text == "2"
        assert box.get_info().state.value == "running"
        assert box.kill()
