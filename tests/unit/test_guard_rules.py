"""The rules of the path guard: the host writes them to a file, and the guard reads it."""

import errno
import json
from pathlib import Path

import pytest

from sbx.guest import guarded_names
from sbx.guest.guarded_calls import GuardedCalls
from sbx.guest.path_rules import PathRules
from sbx.linux.seccomp_notify import SyscallNotice
from sbx.workspace.host_executables import path_rules

WALLS = {"root": "/workspace", "link_prefixes": [], "fifos": False}
NO_CALL = SyscallNotice(1, 1, -1, ())  # of a number that the guard does not perform


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(guarded_names, "RULES", str(tmp_path / "rules.json"))
    return tmp_path / "rules.json"


def write(file: Path, rules: PathRules, linked: list[list[int]]) -> None:
    made = file.with_name("made")
    made.write_text(json.dumps({"rules": rules.to_json(), "linked": linked}))
    made.replace(file)


def test_a_guard_without_rules_performs_no_call(file: Path) -> None:
    for content in (None, "", "{"):
        if content is not None:
            file.write_text(content)
        with pytest.raises(PermissionError) as raised:
            GuardedCalls(WALLS).perform(NO_CALL)
        assert raised.value.errno == errno.EPERM


def test_a_guard_follows_new_rules_and_keeps_those_it_has(file: Path) -> None:
    calls, later = GuardedCalls(WALLS), path_rules(aliases=("tools/check",))
    for rules, linked in ((path_rules(), []), (later, [[7, 9]])):
        write(file, rules, linked)
        with pytest.raises(KeyError):
            calls.perform(NO_CALL)
        assert calls._names._rules.to_json() == rules.to_json()
        assert calls._names._linked == {tuple(identity) for identity in linked}
    for remove in (lambda: file.write_text("{"), file.unlink):
        remove()
        with pytest.raises(KeyError):
            calls.perform(NO_CALL)
        assert calls._names._rules.to_json() == later.to_json()
