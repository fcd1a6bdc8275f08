"""As root: what the process that parses HTTP can still do, and what it cannot."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from places import short_directory

from sbx.api.server import privileges
from sbx.api.server.settings import ServiceSettings
from sbx.errors import BadRequest, Unavailable
from sbx.linux import landlock

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
