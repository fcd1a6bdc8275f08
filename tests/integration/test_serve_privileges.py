"""As root: what the process that parses HTTP can still do, and what it cannot."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command import COMMAND, environment
from places import short_directory
from service_process import service

from sbx.api.server import privileges
from sbx.api.server.settings import ServiceSettings
from sbx.errors import BadRequest, Unavailable
from sbx.linux import landlock
from tests.tiers import rows

pytestmark = pytest.mark.needs("root", "landlock", "seccomp")

ROOT = Path(__file__).parents[2]
_KEPT = 0b1011  # CHOWN, DAC_OVERRIDE, FOWNER
_ABSENT, _DENIED, _READ_ONLY, _REFUSED = (
    "No such file or directory",
    "Permission denied",
    "Read-only file system",
    "Operation not permitted",
)


@pytest.fixture(scope="module")
def serve_facts() -> Iterator[dict[str, Any]]:
    """What a process told that had root, and gave it up as `sbx serve` does."""
    with short_directory() as top:
        done = subprocess.run(
            [sys.executable, str(ROOT / "tests" / "integration" / "dropped.py"), str(top)],
            cwd=ROOT,
            env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        yield json.loads(done.stdout)


@pytest.mark.full_tier
def test_it_has_another_uid_and_no_groups(serve_facts: dict[str, Any]) -> None:
    assert serve_facts["ids"] == [1_899_999_999] * 6


def test_it_has_three_capabilities_and_can_get_no_other(serve_facts: dict[str, Any]) -> None:
    assert serve_facts["capabilities"] == [_KEPT, _KEPT, 0, 0, 0]
    assert serve_facts["of a thread"] == serve_facts["capabilities"]
    assert int(serve_facts["child"], 16) == 0


@pytest.mark.parametrize(
    ("attempt", "outcome"),
    [
        ("read shadow", _DENIED),
        ("read root's home", _DENIED),
        ("write /etc", _READ_ONLY),
        ("write /usr", _READ_ONLY),
        ("write /tmp", _READ_ONLY),
        ("chmod shadow", _READ_ONLY),
        ("chown a program", _READ_ONLY),
        ("see /run", _DENIED),
        ("set-id", _REFUSED),
        ("device", _REFUSED),
        ("become root", _REFUSED),
        ("kill the broker", _REFUSED),
        ("read the broker", _DENIED),
        ("write the data", "ok"),
        ("give it to a jail", "ok"),
        ("read it still", "ok"),
        ("remove it", "ok"),
        ("connect to another's socket", _ABSENT),
        ("see what else is there", _ABSENT),
        ("see /var", _ABSENT),
        ("see /sys", _ABSENT),
        ("see terminals", _ABSENT),
        ("temporary", "ok"),
    ],
)
def test_it_can_do_what_it_needs_and_no_more(
    serve_facts: dict[str, Any], attempt: str, outcome: str
) -> None:
    assert serve_facts["attempts"][attempt] == outcome


def test_sandboxes_run_and_their_files_are_listed_read_and_deleted(
    serve_facts: dict[str, Any],
) -> None:
    seen = serve_facts["sandbox"]
    assert seen["run"] == "2"
    assert seen["read"] == "made inside"
    assert seen["shell"].strip() == "made outside"
    assert seen["upload"].strip() == "1,2"
    assert seen["left"] == ["b", "uploads"]
    assert seen["directories"] == []
    assert 1_900_000_000 <= seen["host uid"] < 2_000_000_000


def test_the_broker_gives_it_back_nothing(serve_facts: dict[str, Any]) -> None:
    assert serve_facts["sandbox"]["a stranger's uid"] == "refused"
    assert serve_facts["sandbox"]["root's uid"] == "refused"
    assert "not the bwrap" in serve_facts["sandbox"]["another program"]
    assert "greeted already" in serve_facts["sandbox"]["a second greeting"]


@pytest.mark.parametrize("user", ["root", "0", "1000:0", "nobody-here", "1900000001"])
def test_a_user_that_is_none_to_become_is_refused(tmp_path: Path, user: str) -> None:
    with pytest.raises(BadRequest, match="the setting user is wrong"):
        privileges.account_of(ServiceSettings(data_dir=tmp_path, user=user))


def test_the_user_can_be_named_or_numbered(tmp_path: Path) -> None:
    def account(user: str) -> tuple[int, int]:
        return privileges.account_of(ServiceSettings(data_dir=tmp_path, user=user))

    assert account("123:45") == (123, 45)
    assert account("daemon") == (1, 1)


def test_without_landlock_nothing_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(landlock, "supported", lambda: False)
    settings = ServiceSettings(data_dir=tmp_path, user="123")
    with pytest.raises(Unavailable) as raised:
        privileges.drop(settings, privileges.account_of(settings), writable=[tmp_path])
    assert raised.value.code == "cannot_drop"


def test_no_symlink_of_the_data_directory_is_followed_as_root(tmp_path: Path) -> None:
    """A service that was taken over could else have root give it /etc at the next start."""
    data, theirs = tmp_path / "data", tmp_path / "theirs"
    data.mkdir()
    theirs.mkdir()
    (data / "tmp").symlink_to(theirs)
    for path in (data, tmp_path / "link"):
        if path != data:
            path.symlink_to(theirs)
        with pytest.raises(BadRequest, match="cannot be used"):
            privileges.prepare_data(path, privileges.Account(123, 123))
    assert theirs.stat().st_uid == 0


def test_a_data_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    os.chown(data, 77, 77)
    with pytest.raises(BadRequest, match="belongs to another user"):
        privileges.prepare_data(data, privileges.Account(123, 123))


# -- the directories of the operator ---------------------------------------------------------------

WEATHER = {
    "openapi": "3.0.0",
    "servers": [{"url": "http://127.0.0.1:9"}],
    "paths": {"/now": {"get": {"operationId": "now"}}},
}
FILES = {
    "agents/locked.toml": 'tools = ["read_file"]',
    "agents/broken.toml": "tools = [",
    "tools/weather.toml": """
secrets = { key = "file:{top}/elsewhere/key" }
[openapi]
document = "{top}/elsewhere/weather.json"
headers = { authorization = "${key}" }
""",
    "tasks/summary.toml": 'prompt = "Summarise it"',
    "policies/mine.toml": 'schema = 1\nextends = "default"\ndescription = "mine"',
    "elsewhere/weather.json": json.dumps(WEATHER),
    "elsewhere/key": "a-secret-value",
}
# What shows that a service reads the directory of a setting: a route, and a text of its reply.
SHOWN = {
    "agents_dir": [("/api/v1/agents", '"locked"'), ("/api/v1/agents", "invalid_profile")],
    "tools_dir": [("/api/v1/tools", '"weather_now"'), ("/api/v1/tools/sources", '"ready"')],
    "tasks_dir": [("/api/v1/tasks/templates", '"summary"')],
    "policy_dirs": [("/v1/profiles", '"mine"')],
}
TESTED_ELSEWHERE = {
    "environments": "test_environments.py",
    "mount_dirs": "test_live_mounts_confined.py",
    "project_dirs": "test_project_server.py",
    "data_dir": "each test of a service",
    "bwrap": "a program",
    "socket": "each test of a service",
}


def test_service_of_root_reads_each_directory_of_its_operator() -> None:
    """The profiles, tools and tasks were invisible, so each agent ran without its limits."""
    with short_directory() as top:
        for name, text in FILES.items():
            path = top / name
            path.parent.mkdir(mode=0o700, exist_ok=True)
            path.write_text(text.replace("{top}", str(top)))
            path.chmod(0o600)
        places = {name: top / name.removesuffix("_dir") for name in SHOWN if name[-4:] == "_dir"}
        places["policy_dirs"] = top / "policies"
        env = {f"SBX_{name.upper()}": str(path) for name, path in places.items()}
        with service(top, env=env) as running, running.client() as client:
            shown = {
                (path, text): text in client.get(path).text
                for each in SHOWN.values()
                for path, text in each
            }
            message = {"user_id": "ann", "agent_id": "broken", "message": "hi"}
            refused = client.post("/api/v1/chat", json=message).json()["error"]["code"]
            (top / "agents" / "later.toml").write_text("max_steps = 1")
            assert '"later"' in client.get("/api/v1/agents").text
    assert shown == dict.fromkeys(shown, True)
    assert refused in ("invalid_profile", "model_not_configured")


def test_each_setting_with_a_path_is_tested_as_root() -> None:
    paths = {
        name
        for name, field in ServiceSettings.model_fields.items()
        if "pathlib" in str(field.annotation)
    }
    assert paths == SHOWN.keys() | TESTED_ELSEWHERE.keys()


def test_directory_that_comes_later_is_created_at_the_start() -> None:
    with short_directory() as top:
        agents = top / "new" / "agents"
        with service(top, env={"SBX_AGENTS_DIR": str(agents)}) as running:
            (agents / "late.toml").write_text("max_steps = 1")
            with running.client() as client:
                assert '"late"' in client.get("/api/v1/agents").text


@pytest.mark.parametrize(
    "setting",
    rows(["SBX_AGENTS_DIR", "SBX_TOOLS_DIR", "SBX_TASKS_DIR"], ci_tier=["SBX_AGENTS_DIR"]),
)
def test_service_refuses_to_start_if_it_cannot_read_a_directory(setting: str) -> None:
    with short_directory() as top:
        (top / "file").touch()
        words = ("--socket", str(top / "s" / "x.sock"), "--data-dir", str(top / "data"))
        done = subprocess.run(
            [*COMMAND, "serve", *words],
            env=environment(**{setting: str(top / "file")}),
            cwd=top,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 3
    assert f"{top}/file could then not be read" in done.stderr
