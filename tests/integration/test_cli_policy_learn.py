"""`sbx policy learn`: a task runs until none of its requests is refused, and then with less."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command import sbx
from web import ADDRESS, Web, web

pytestmark = pytest.mark.needs("namespaces")


@pytest.fixture(scope="module")
def site() -> Iterator[Web]:
    with web({"/menu": b"pears"}) as site:
        yield site


def learned(*words: str | Path, cwd: Path) -> dict[str, Any]:
    ended = sbx("policy", "learn", *words, "--json", cwd=cwd)
    assert ended.returncode == 0, ended.stderr
    policy: dict[str, Any] = json.loads(ended.stdout)["policy"]
    return policy


def test_a_task_without_network_and_processes_gets_neither(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("ANSWER = 42\n")
    (tmp_path / "task.py").write_text(
        "import helper\nopen('x', 'w').write(str(helper.ANSWER) + open('/workspace/uploads/temparea"
        "/data.csv').read())\n"
    )
    (tmp_path / "data.csv").write_text("1,2\n")
    policy = learned("task.py", "--upload", "data.csv", cwd=tmp_path)
    assert (policy["extends"], policy["processes"], policy["filter"]) == (
        "default",
        False,
        "strict",
    )
    assert policy["limits"]["wall_time"] == "10s"
    assert "network" not in policy


def test_a_task_gets_the_hosts_that_it_reached_and_the_printed_policy_is_enough(
    tmp_path: Path, site: Web
) -> None:
    task = tmp_path / "task.py"
    task.write_text(
        "import subprocess, urllib.request\n"
        f"print(urllib.request.urlopen('{site.url}/menu').read())\n"
        "print(subprocess.run(['true']).returncode)\n"
    )
    file = tmp_path / "learned.toml"
    ended = sbx("policy", "learn", task, "--allow-private", "--out", file, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert f"run 1: the task needs {site.host}" in ended.stderr
    assert "with the filter allowlist: ok" in ended.stderr
    text = file.read_text()
    assert f'allow = ["{site.host}"]' in text
    assert f'allow_private = ["{ADDRESS}"]' in text
    assert 'filter = "allowlist"' in text
    assert sbx("run", "--policy", file, task, cwd=tmp_path).stdout == "b'pears'\n0\n"
    again = sbx("policy", "learn", task, "--out", file, cwd=tmp_path)
    assert again.returncode != 0
    assert "exists" in again.stderr
    assert file.read_text() == text


def test_a_private_server_needs_a_word_of_the_user(tmp_path: Path, site: Web) -> None:
    before = len(site.asked)
    code = f"import urllib.request\nurllib.request.urlopen('{site.url}/menu')"
    ended = sbx("policy", "learn", "-c", code, cwd=tmp_path)
    assert ended.returncode == 1
    assert "--allow-private" in ended.stderr
    assert ended.stdout == ""
    assert len(site.asked) == before


def test_a_task_that_fails_has_no_policy(tmp_path: Path) -> None:
    ended = sbx("policy", "learn", "-c", "1 / 0", cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "ZeroDivisionError" in ended.stderr


def test_a_shell_script_keeps_its_processes(tmp_path: Path) -> None:
    (tmp_path / "task.sh").write_text("echo one | wc -l > count\n")
    policy = learned("task.sh", cwd=tmp_path)
    assert policy["filter"] == "allowlist"
    assert "processes" not in policy


def test_a_strict_base_stays_as_strict(tmp_path: Path) -> None:
    policy = learned("-c", "import json; json.dumps([1])", "--policy", "strict", cwd=tmp_path)
    assert set(policy) == {"schema", "extends", "description", "limits"}
