"""`sbx doctor` on this host, and on hosts that lack something."""

import json
import re
from pathlib import Path

import pytest
from command import in_process

PATHS = ("cold", "pool", "fork")


def test_every_layer_and_policy_is_told_and_a_sandbox_truly_started() -> None:
    ended = in_process("doctor", "--json")
    answer = json.loads(ended.stdout)
    names = {layer["name"] for layer in answer["layers"]}
    assert names >= {"bwrap", "namespaces", "landlock", "seccomp", "memory", "tasks", "cpu"}
    assert {one["policy"] for one in answer["policies"]} >= {"default", "strict", "data-science"}
    assert answer["live"]["receipt"]["host_uid"] != 0
    assert {one["path"]: one["ok"] for one in answer["paths"]} == dict.fromkeys(PATHS, True)
    assert (ended.returncode, answer["ok"], answer["live"]["ok"]) == (0, True, True)


def test_the_same_as_tables_is_understood_without_colour() -> None:
    ended = in_process("doctor")
    assert "\x1b" not in ended.stdout
    rows = {line.split()[0]: line for line in ended.stdout.splitlines() if line}
    assert "found" in rows["bwrap"]
    assert "yes" in rows["default"]
    assert "1 + 1 = 2" in rows["live"]
    assert all("yes" in rows[path] for path in PATHS)


def test_without_bwrap_it_names_cause_and_remedy_and_ends_with_3() -> None:
    ended = in_process("doctor", SBX_BWRAP="/no/such/bwrap")
    assert ended.returncode == 3
    assert "missing: bwrap: " in ended.stdout
    assert "hint: correct SBX_BWRAP, or unset it" in ended.stdout
    assert "install it: apt-get install bubblewrap" in ended.stdout
    assert "live check: failed" in ended.stdout


def test_without_cgroups_default_still_runs_with_weaker_walls_named_and_strict_does_not() -> None:
    ended = in_process("doctor", "--json", SBX_CGROUPS="false")
    answer = json.loads(ended.stdout)
    runs = {one["policy"]: one["runs"] for one in answer["policies"]}
    weaker = {one["policy"]: [w["wall"] for w in one["weaker"]] for one in answer["policies"]}
    assert ended.returncode == 0
    assert (runs["default"], runs["strict"]) == (True, False)
    assert [name for name in weaker["default"] if name != "disk"] == ["memory", "tasks", "cpu"]


def test_paths_that_a_setting_takes_away_are_told_with_the_setting() -> None:
    ended = in_process("doctor", SBX_FAST_PATH="false")
    rows = {line.split()[0]: line for line in ended.stdout.splitlines() if line}
    assert ended.returncode == 0
    assert [("yes" in rows[path]) for path in PATHS] == [True, False, False]
    for path in ("pool", "fork"):
        assert re.search(f"slow: no {path}: .*SBX_FAST_PATH", ended.stdout)


@pytest.mark.parametrize("setting", ["SBX_AGENTS_DIR", "SBX_TOOLS_DIR", "SBX_TASKS_DIR"])
def test_directory_that_the_service_cannot_read_is_reported(tmp_path: Path, setting: str) -> None:
    """The service refuses to start with it, and doctor reported nothing (holes 2.3)."""
    (tmp_path / "file").touch()
    variables = {setting: str(tmp_path / "file")}
    layers = {layer["name"]: layer for layer in _layers(**variables)}
    assert not layers["operator files"]["found"]
    assert f"{tmp_path}/file cannot be read: Not a directory" in layers["operator files"]["cause"]
    assert "agents_dir, tools_dir, tasks_dir" in layers["operator files"]["remedy"]


def test_directory_of_the_operator_that_does_not_exist_is_no_problem(tmp_path: Path) -> None:
    layers = {layer["name"]: layer for layer in _layers(SBX_AGENTS_DIR=str(tmp_path / "none"))}
    assert layers["operator files"]["found"]


def _layers(**variables: str) -> list[dict[str, str]]:
    layers: list[dict[str, str]] = json.loads(
        in_process("doctor", "--json", stdin=b"", **variables).stdout
    )["layers"]
    return layers
