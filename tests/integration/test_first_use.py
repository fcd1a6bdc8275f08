"""The first sandbox of a process: its broker and its zygote start while the rest is imported."""

import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from chain import broker, nests, until

from sbx import Runtime
from sbx.isolation.broker.spawned import spawn_broker

pytestmark = pytest.mark.needs("namespaces")

_COUNT = """
import psutil
def count(word):
    found = 0
    for process in psutil.Process().children(recursive=True):
        try:
            found += word in " ".join(process.cmdline())
        except psutil.Error:  # it has just ended
            pass
    return found
"""
_USE = f"""
from sbx import Sandbox
{_COUNT}
with Sandbox() as box:
    print(count("broker.server"), box.run("1+1").result, box.receipt.path)
with Sandbox() as box:
    print(count("broker.server"), box.run("2+2").result)
"""
_INVALID = f"""
from sbx import Sandbox, SbxError
{_COUNT}
try:
    Sandbox()
except SbxError as error:
    print(error.code, count("broker.server"))
"""
_COLD = f"""
import time
from sbx import Sandbox
{_COUNT}
with Sandbox() as box:
    print(box.run("1+1").result, box.receipt.path)
    until = time.monotonic() + 30
    while count("zygote.py") and time.monotonic() < until:
        time.sleep(0.01)
    print(count("zygote.py"))
"""


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the early orders, which does not exist yet."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return tmp_path / "sbx" / "early_orders.json"


def printed(code: str, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        check=True,
        text=True,
        timeout=60,
    )
    return done.stdout.splitlines()


def test_the_broker_that_was_spawned_ahead_is_the_only_one() -> None:
    assert printed(_USE) == ["1 2 fork", "1 4"]


def test_a_broker_that_no_runtime_takes_over_is_ended() -> None:
    assert printed(_INVALID, SBX_ZYGOTES_MAX="many") == ["invalid_settings 0"]


async def test_a_new_sandbox_starts_the_zygote_of_its_policy_before_its_first_run() -> None:
    async with Runtime() as runtime, await runtime.create() as box:
        await until(lambda: nests(broker()))
        assert box.receipt is None
        assert (await box.run("1+1")).result == "2"
        receipt = await box.read_receipt()
        assert receipt is not None
        assert receipt.path == "fork"


# -- the orders of the process before --------------------------------------------------------------


@pytest.mark.unprivileged
def test_the_next_process_starts_its_zygote_before_it_imports_the_runtime(kept: Path) -> None:
    assert printed(_USE) == ["1 2 fork", "1 4"]
    with closing(spawn_broker("default")) as spawned:
        spawned.sock.settimeout(30)
        replies = [json.loads(spawned.sock.recv(1 << 18)) for _ in range(2)]
        assert [reply["seq"] for reply in replies] == [1, 2]
        assert "python" in replies[1]["ok"]
    assert spawned.process.returncode == 0
    before = kept.read_bytes()
    assert printed(_USE) == ["1 2 fork", "1 4"]
    assert kept.read_bytes() == before


def _changed(kept: Path, part: str, **words: Any) -> None:
    content = json.loads(kept.read_text())
    (content["zygotes"]["default"] if part == "zygote" else content["hello"]).update(words)
    kept.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("zygote", {"prepare": {"preload": ["json"], "tmpfs": [], "kept": [], "walls": {}}}),
        ("zygote", {"bwrap": "/nothing"}),
        ("zygote", {"args": 5}),
        ("hello", {"uids": [1_900_000_000, 77]}),
        ("hello", {"bwrap": "/nothing"}),
        ("hello", {"uids": "many"}),
    ],
)
def test_orders_that_are_out_of_date_are_replaced(
    kept: Path, part: str, words: dict[str, Any]
) -> None:
    assert printed(_USE) == ["1 2 fork", "1 4"]
    right = kept.read_text()
    _changed(kept, part, **words)
    assert printed(_USE) == ["1 2 fork", "1 4"]
    assert _without_names(kept.read_text()) == _without_names(right)


def _without_names(text: str) -> Any:
    """Each new order has a new name of its zygote, also in the paths of its mounts."""
    content = json.loads(text)
    name = content["zygotes"]["default"]["zygote"]
    return json.loads(text.replace(name, "name"))


def test_a_zygote_that_the_settings_do_not_want_is_ended_and_forgotten(kept: Path) -> None:
    assert printed(_USE) == ["1 2 fork", "1 4"]
    assert printed(_COLD, SBX_FAST_PATH="false") == ["2 cold", "0"]
    assert json.loads(kept.read_text())["zygotes"] == {}


@pytest.mark.unprivileged
@pytest.mark.parametrize("has_workspace", [False, True])
def test_a_command_starts_its_zygote_early_too(
    kept: Path, tmp_path: Path, has_workspace: bool
) -> None:
    place = tmp_path / "work"
    place.mkdir()
    words = ["--workspace", str(place)] if has_workspace else []
    command = [sys.executable, "-m", "sbx", "run", "-c", "print(1)", *words]
    contents = []
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, check=True, text=True, timeout=60)
        assert (done.stdout, done.stderr) == ("1\n", "")
        contents.append(kept.read_text())
    assert contents[0] == contents[1]  # the orders were the right ones
    (label,) = json.loads(contents[0])["zygotes"]
    assert label == (f"default {place}" if has_workspace else "default")
