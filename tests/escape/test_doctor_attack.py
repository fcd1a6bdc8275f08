"""`sbx doctor --attack` can say that an attack escaped: one wall is taken away, and it does.

Of one policy by one path, which is what a test has time for; the whole of it is besieged.PLAN.
"""

import json
from dataclasses import dataclass
from typing import Any

import pytest
from attacking import altered

from sbx.cli.doctor import doctor
from sbx.cli.exits import Exit
from sbx.doctor import report


@dataclass(frozen=True)
class DoctorResult:
    exit_code: int
    printed: str

    @property
    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.printed)
        return found


@pytest.fixture(autouse=True)
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "PLAN", {"default": ("fork",)})


def ask(capfd: pytest.CaptureFixture[str], *, as_json: bool) -> DoctorResult:
    exit_code = doctor(as_json=as_json, attack=True)
    return DoctorResult(exit_code, capfd.readouterr().out)


def test_with_all_walls_everything_is_held_and_it_ends_with_0(
    capfd: pytest.CaptureFixture[str],
) -> None:
    answer = ask(capfd, as_json=True)
    assert (answer.document["escaped"], answer.document["unclear"]) == ([], [])
    assert answer.document["ok"]
    assert answer.document["held"] == answer.document["tried"] >= 60
    assert answer.exit_code == Exit.OK


def test_without_seccomp_it_names_what_escaped_and_ends_with_1(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with altered("seccomp"):
        answer = ask(capfd, as_json=False)
    assert answer.exit_code == Exit.FAILED
    rows = {line.split()[0]: line for line in answer.printed.splitlines() if line.strip()}
    assert "of" in rows["seccomp"]
    assert " of " not in rows["landlock"]
    named = (
        "ESCAPED: open by flags that no filter can see (fs, seccomp): default by fork answered ok"
    )
    assert named in answer.printed


@pytest.mark.full_tier
def test_without_landlock_the_document_has_the_policy_and_the_path(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with altered("landlock"):
        answer = ask(capfd, as_json=True)
    assert answer.exit_code == Exit.FAILED
    assert not answer.document["ok"]
    escaped = {one["name"]: one for one in answer.document["escaped"]}
    assert escaped["open the oom score of the own process"] == {
        "name": "open the oom score of the own process",
        "class": "fs",
        "layer": "landlock",
        "policy": "default",
        "path": "fork",
        "outcome": "ok",
    }


def test_where_a_sandbox_cannot_be_had_it_ends_with_3(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBX_FAST_PATH", "false")
    monkeypatch.setattr(report, "_LAST", "fork")
    answer = ask(capfd, as_json=False)
    assert answer.exit_code == Exit.REFUSED
    assert "not tried: default by fork: " in answer.printed
    assert "SBX_FAST_PATH" in answer.printed
