"""An installer of packages that has no network: a note names the setting that permits it."""

import sys
from pathlib import Path

import pytest
from serving import Service

from sbx import Runtime
from sbx.client import Client
from sbx.runtime.run.notes import NO_NETWORK, lacks_network

PIP = "ERROR: No matching distribution found for größe"
PRINTS = f"sleep 0.3; echo '{PIP}' >&2; exit 1"
needs_pip = pytest.mark.skipif(
    not any(Path(path, "pip").is_dir() for path in sys.path), reason="no pip beside this Python"
)


@pytest.mark.parametrize(
    "output",
    [
        PIP,
        "ERROR: Could not find a version that satisfies the requirement a (from versions: none)",
        "WARNING: Retrying (Retry(total=4, connect=None)) after connection broken by 'New…",
        "error: Request failed after 3 retries in 12.5s\n  cause: Failed to fetch: https://a/",
        "npm error code ENOTFOUND",
        "npm ERR! code EAI_AGAIN",
        "reason: getaddrinfo EAI_AGAIN registry.npmjs.org",
        "CondaHTTPError: HTTP 000 CONNECTION FAILED for url",
    ],
)
def test_the_words_of_installers(output: str) -> None:
    assert lacks_network(f"before\n{output}\nafter")


@pytest.mark.parametrize(
    "output", ["", "Successfully installed a-1", "curl: (6) Could not resolve host: a", "ENOTFOUND"]
)
def test_other_words_have_no_note(output: str) -> None:
    assert not lacks_network(output)


@pytest.mark.unprivileged
async def test_a_command_and_a_cell_name_the_setting(runtime: Runtime) -> None:
    async with await runtime.create("default") as box:
        run = await box.shell(PRINTS)
        assert run.stderr == f"{PIP}\n{NO_NETWORK}"
        assert (run.exit_code, 'extends = "networked"' in run.text) == (1, True)
        cell = f"import subprocess, time; time.sleep(0.3); print({PIP!r})"
        ended = await box.run(cell)
        assert (ended.ok, ended.stdout, ended.stderr) == (True, f"{PIP}\n", NO_NETWORK)
        events = [event async for event in box.start_shell(PRINTS).events()]
        assert any(getattr(event, "text", None) == NO_NETWORK for event in events)


async def test_a_sandbox_with_a_network_has_no_note(runtime: Runtime) -> None:
    async with await runtime.create("networked") as box:
        assert (await box.shell(PRINTS)).stderr == f"{PIP}\n"


@needs_pip
async def test_pip_itself(runtime: Runtime) -> None:
    async with await runtime.create("default") as box:
        words = "-m pip install --retries 0 --quiet no-such-package-anywhere"
        run = await box.shell(f"{sys.executable} {words}", timeout=60)
        assert run.stderr.endswith(NO_NETWORK), run.text


async def test_a_service_reports_it_too(service: Service) -> None:
    async with Client(service.socket) as client, await client.create() as box:
        assert (await box.shell(PRINTS)).stderr.endswith(NO_NETWORK)


def test_the_command_line_prints_it(service: Service) -> None:
    sandbox = service.quick("create").stdout.strip()
    printed = service.quick("exec", sandbox, "--shell", "-c", PRINTS)
    assert printed.stderr == f"{PIP}\n{NO_NETWORK}"
    service.quick("rm", sandbox)
