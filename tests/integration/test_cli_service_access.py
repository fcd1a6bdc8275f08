"""The commands of an operator: keys, tokens, collection, and the log of who did what."""

import json
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from command import in_process
from serving import Service


def json_of(ended: "subprocess.CompletedProcess[str]", code: int = 0) -> dict[str, Any]:
    assert (ended.returncode, ended.stderr) == (code, ""), ended
    value = json.loads(ended.stdout)
    assert isinstance(value, dict)
    return value


def code_of(ended: "subprocess.CompletedProcess[str]", code: int) -> str:
    return str(json_of(ended, code)["error"]["code"])


def test_a_key_reaches_its_owners_sandboxes_until_it_is_revoked(service: Service) -> None:
    made = service.quick("key", "create", "--owner", "alice", "--name", "for the tests")
    key = made.stdout.strip()
    assert re.fullmatch(r"sk-sbx-[0-9a-f]{64}", key)
    key_id = made.stderr.split("its id is ")[1].split(";")[0]
    assert key not in made.stderr

    box = service.quick("create", SBX_KEY=key).stdout.strip()
    assert service.quick("ps", "-q", SBX_KEY=key).stdout.strip() == box
    assert service.quick("ps", "-q").stdout == ""  # the user of the socket is another owner
    assert code_of(service.quick("inspect", "--json", box), 2) == "not_found"
    everybody = json_of(service.quick("ps", "--all-owners", "--json"))["sandboxes"]
    assert (box, "alice") in [(one["id"], one["owner"]) for one in everybody]
    shown = service.quick("ps", "--all-owners").stdout
    assert next(line for line in shown.splitlines() if box in line).endswith("alice")
    assert code_of(service.quick("ps", "--all-owners", "--json", SBX_KEY=key), 3) == "forbidden"
    assert code_of(service.quick("key", "list", "--json", SBX_KEY=key), 3) == "forbidden"

    listed = service.quick("key", "list")
    row = next(line for line in listed.stdout.splitlines() if key_id in line)
    assert "alice" in row
    assert "for the tests" in row
    assert key not in listed.stdout
    assert key not in json.dumps(json_of(service.quick("key", "list", "--json")))
    service.quick("rm", box, SBX_KEY=key)
    assert service.quick("key", "revoke", key_id).stdout.strip() == key_id
    assert code_of(service.quick("ps", "--json", SBX_KEY=key), 3) == "unauthorized"
    assert "revoked" in service.quick("key", "list").stdout


def test_a_key_of_the_operator_may_do_what_the_operator_may(service: Service) -> None:
    made = json_of(service.quick("key", "create", "--operator", "--json"))
    assert made["operator"] is True
    assert json_of(service.quick("key", "list", "--json", SBX_KEY=made["key"]))["keys"]
    assert json_of(service.quick("key", "revoke", "--json", made["id"])) == {"revoked": made["id"]}
    assert code_of(service.quick("key", "revoke", "--json", "key-000000000000"), 2) == "not_found"


def test_a_token_reaches_one_users_session_and_no_more(service: Service) -> None:
    with service.http() as http:
        for user in ("ada", "bob"):
            made = http.post("/api/v1/sessions", json={"user_id": user, "agent_id": "coder"})
            assert made.status_code == 201, made.text
    words = ["--user", "ada", "--agent", "coder", "--scope", "files:read", "--ttl", "10min"]
    created = service.quick("token", "create", *words)
    token = created.stdout.strip()
    token_id = created.stderr.split("its id is ")[1].split(";")[0]
    with service.http(token) as http:
        assert http.get("/api/v1/sessions/sb-session-ada-coder").status_code == 200
        assert http.get("/api/v1/sessions/sb-session-bob-coder").status_code == 404
    row = next(
        line for line in service.quick("token", "list").stdout.splitlines() if token_id in line
    )
    assert "files:read" in row
    (one,) = [
        one
        for one in json_of(service.quick("token", "list", "--json"))["tokens"]
        if one["id"] == token_id
    ]
    assert (one["user_id"], one["agent_id"], one["scopes"]) == ("ada", "coder", ["files:read"])
    assert service.quick("token", "revoke", token_id).stdout.strip() == token_id
    with service.http(token) as http:
        assert http.get("/api/v1/sessions/sb-session-ada-coder").status_code == 401


@pytest.mark.parametrize(
    "words",
    [
        ["token", "create"],
        ["token", "create", "--user", "ada", "--scope", "everything"],
        ["token", "create", "--user", "ada", "--ttl", "soon"],
        ["token", "revoke", "token-000000000000"],
        ["gc", "--task", "everything"],
    ],
    ids=" ".join,
)
def test_what_is_wrong_is_said(service: Service, words: list[str]) -> None:
    ended = service.quick(*words)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("error: ")
    assert json_of(service.quick(*words, "--json"), 2)["error"]["message"]


def test_gc_collects_what_expired(service: Service) -> None:
    box = service.quick("create", "--ttl", "1").stdout.strip()
    deadline = time.monotonic() + 60
    while service.quick("ps", "--status", "expired", "-q").stdout.strip() != box:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    report = json_of(service.quick("gc", "--json"))
    tasks = {one["task_name"]: one for one in report["results"]}
    assert set(tasks) == {"idle_session", "expired_sandbox", "orphan_cargo", "orphan_container"}
    assert report["total_errors"] == 0
    shown = service.quick("gc", "--task", "expired_sandbox")
    assert shown.returncode == 0
    assert "orphan" not in shown.stdout
    shown = service.quick("gc", "--task", "orphan_workspace")
    assert shown.stdout.splitlines()[-1].split()[0] == "orphan_workspace"
    service.quick("rm", box)


def test_audit_verify_finds_a_line_that_was_changed(service: Service, tmp_path: Path) -> None:
    made = json_of(service.quick("key", "create", "--json"))
    service.quick("key", "revoke", made["id"])
    log = service.data / "audit.jsonl"
    good = json_of(in_process("audit", "verify", "--data-dir", service.data, "--json"))
    assert good["ok"] is True
    assert good["count"] > 0
    assert in_process("audit", "verify", log).stdout.startswith(f"{log}: ok, ")
    assert json_of(in_process("audit", "verify", "--json", SBX_DATA_DIR=str(service.data)))["ok"]

    lines = log.read_bytes().splitlines(keepends=True)
    copy = tmp_path / "audit.jsonl"
    copy.write_bytes(b"".join([lines[0].replace(b'"who":"', b'"who":"x'), *lines[1:]]))
    broken = in_process("audit", "verify", copy)
    assert (broken.returncode, broken.stdout) == (1, "")
    assert "broken at line 1" in broken.stderr
    assert json_of(in_process("audit", "verify", "--json", copy), 1)["broken_at"] == 1
    missing = in_process("audit", "verify", tmp_path / "none.jsonl")
    assert missing.returncode in (2, 3)
    assert missing.stderr.startswith("error: ")


def test_forget_deletes_the_data_of_one_user(service: Service) -> None:
    assert code_of(service.quick("forget", "ann", "--json"), 2) == "not_confirmed"
    service.quick("token", "create", "--user", "ann")
    removed = json_of(service.quick("forget", "ann", "--yes", "--json"))
    assert (removed["user_id"], removed["removed"]["tokens"]) == ("ann", 1)
    assert "no data of ann" in service.quick("forget", "ann", "--yes").stderr
    key = json_of(service.quick("key", "create", "--owner", "zoe", "--json"))
    denied = service.quick("forget", "ann", "--owner", "yan", "--yes", "--json", SBX_KEY=key["key"])
    assert code_of(denied, 3) == "forbidden"
    service.quick("token", "create", "--user", "bob", "--owner", "zoe")
    shown = service.quick("forget", "bob", "--owner", "zoe", "--yes").stdout
    assert shown.splitlines()[-1].split() == ["tokens", "1"]
