"""Errors as tenants and models read them: which paths go, and which stay."""

import logging
from pathlib import Path

import pytest

from sbx.agent.tools.results import failed
from sbx.errors import Broken, CannotEnforce, Denied, NotFound, PolicyError, SbxError, Unavailable
from sbx.telemetry import host_paths
from sbx.telemetry.host_paths import hide_below, hide_in, without_host_paths

DATA = "/var/lib/sbx/data"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (f"the store {DATA}/store.sqlite is damaged: x", "the store <host path> is damaged: x"),
        (f"see {DATA}/a, {DATA}/b.", "see <host path>, <host path>"),
        (f"'{DATA} of ann/x y' is gone", "'<host path>' is gone"),
        (f"[Errno 2] No such file: '{DATA}'", "[Errno 2] No such file: '<host path>'"),
        (f"({DATA}/a:4) cwd={DATA}/a", "(<host path>:4) cwd=<host path>"),
        ("no space to write '/workspace/a b/c'", "no space to write '/workspace/a b/c'"),
        ("nothing at /mnt/data/x, /uploads/a.csv", "nothing at /mnt/data/x, /uploads/a.csv"),
        ("GET /v1/sandboxes or https://host/a/b", "GET /v1/sandboxes or https://host/a/b"),
        ("1/2 of a/b/c; ./d/e; </a/b>", "1/2 of a/b/c; ./d/e; </a/b>"),
    ],
)
def test_paths_of_the_host_go_and_those_inside_stay(text: str, answer: str) -> None:
    assert without_host_paths(Unavailable(text))["message"] == answer


@pytest.mark.parametrize("kind", [Unavailable, CannotEnforce, Broken, PolicyError])
def test_hints_and_details_lose_them_as_well(
    kind: type[SbxError], caplog: pytest.LogCaptureFixture
) -> None:
    error = kind(
        "it failed",
        code="some_code",
        hint=f"chmod 600 {DATA}/secret",
        details={"limit": 1, "problems": [{"file": f"{DATA}/x.toml", "line": 4}]},
    )
    with caplog.at_level(logging.WARNING):
        answer = without_host_paths(error)
    assert answer == {
        "code": "some_code",
        "message": "it failed",
        "hint": "chmod 600 <host path>",
        "details": {"limit": 1, "problems": [{"file": "<host path>", "line": 4}]},
    }
    assert f"{DATA}/secret" in caplog.text  # the operator still finds it


def test_a_refusal_names_the_path_that_the_request_named() -> None:
    for error in (NotFound(f"no {DATA}/x"), Denied(f"{DATA}/x is not granted")):
        assert without_host_paths(error) == error.to_dict()
    hidden = Denied(f"{DATA}/x is not private", code="environment_not_private")
    assert without_host_paths(hidden)["message"] == "<host path> is not private"


def test_a_model_gets_no_path_of_the_host() -> None:
    """The result of a failed tool call once named the store and the audit log."""
    error = Unavailable(f"the audit log {DATA}/audit.jsonl is full", hint=f"free {DATA}/disk")
    assert DATA not in failed(error).text
    assert "<host path>" in failed(error).text


@pytest.mark.parametrize("data", ["/mnt/disk/sbx", "/srv/my data/sbx", "/data"])
def test_the_directories_of_the_service_are_hidden_wherever_they_lie(
    data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A data directory below /mnt, or with a space in its path, was shown to tenants."""
    monkeypatch.setattr(host_paths, "_own", {})
    hide_below(Path(data))
    answer = without_host_paths(
        Unavailable(f"{data}/store.sqlite is full: '{data}/x', see {data}.")
    )
    assert answer["message"] == "<host path> is full: '<host path>', see <host path>."
    other = Unavailable("nothing at /mnt/disk/sbx-more/x and /mnt/disk/sbxes")
    assert without_host_paths(other)["message"] == other.message


def test_an_error_about_no_path_of_the_request_loses_all_of_them() -> None:
    """A refusal by the broker named sources of mounts to the tenant."""
    error = Denied(
        f"no policy shows {DATA}/x at /opt/x", code="not_granted", details={"path": DATA}
    )
    hide_in(error)
    assert str(error) == "no policy shows <host path> at <host path>"
    assert without_host_paths(error) == {
        "code": "not_granted",
        "message": "no policy shows <host path> at <host path>",
        "details": {"path": "<host path>"},
    }
