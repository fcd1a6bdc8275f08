"""`sbx doctor --attack` can say that an attack escaped: one wall is taken away, and it does.

Of one policy by one path, which is what a test has time for; the whole of it is besieged.PLAN.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from attacking import altered
from msgspec.structs import replace

from sbx.cli.doctor import doctor
from sbx.cli.exits import Exit
from sbx.doctor import report
from sbx.doctor.attacks import host_executables, runner
from sbx.doctor.attacks.host_executables import HOST_EXECUTABLES, subdirectory
from sbx.errors import BadRequest


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
    few = [one for one in HOST_EXECUTABLES if one.act == ("open",)][::12]
    monkeypatch.setattr(runner, "HOST_EXECUTABLES", few)


def ask(
    capfd: pytest.CaptureFixture[str], *, as_json: bool, directory: Path | None = None
) -> DoctorResult:
    exit_code = doctor(as_json=as_json, attack=True, directory=directory)
    return DoctorResult(exit_code, capfd.readouterr().out)


def test_with_all_walls_everything_is_held_and_it_ends_with_0(
    capfd: pytest.CaptureFixture[str],
    own_temporary_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used = set()

    @contextmanager
    def noting(directory: Path | None) -> Iterator[Path]:
        with subdirectory(directory) as top:
            used.add(top.parent)
            yield top

    monkeypatch.setattr(host_executables, "subdirectory", noting)
    answer = ask(capfd, as_json=True, directory=own_temporary_directory)
    assert (answer.document["escaped"], answer.document["unclear"]) == ([], [])
    assert answer.document["ok"]
    assert answer.document["held"] == answer.document["tried"] >= 60
    assert answer.document["not_tried"] == []
    assert answer.exit_code == Exit.OK
    assert used == {own_temporary_directory}
    assert list(own_temporary_directory.glob("sbx-planted-*")) == []


def test_attacks_whose_control_fails_are_not_tried_and_it_ends_with_3(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    controls = tuple(
        replace(one, code="os.mkdir('/sbx-control')") if "os.mkdir(" in one.name else one
        for one in runner.CONTROLS
    )
    monkeypatch.setattr(runner, "CONTROLS", controls)
    answer = ask(capfd, as_json=True)
    assert answer.exit_code == Exit.REFUSED
    assert answer.document["escaped"] == []
    reasons = {one["reason"] for one in answer.document["not_tried"]}
    assert reasons == {"the control of os.mkdir answered EROFS"}
    assert all(layer["tried"] for layer in answer.document["layers"])


def test_a_directory_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="no subdirectory can be created in /"):
        doctor(as_json=False, attack=True, directory=tmp_path / "absent")


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
