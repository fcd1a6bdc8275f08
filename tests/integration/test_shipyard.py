"""/shipyard: the published package `shipyard-python-sdk` against the service."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from live_app import live
from sdk_service import SdkService
from shipyard import SessionShip, ShipyardClient, Spec, create_session_ship

from tests.fake_clock import FakeClock

TTL = 600


@pytest_asyncio.fixture(scope="module")
async def key(sdk: SdkService) -> str:
    return await sdk.key("shipper")


@pytest_asyncio.fixture
async def yard(sdk: SdkService, key: str) -> AsyncIterator[ShipyardClient]:
    async with ShipyardClient(f"{sdk.url}/shipyard", key) as client:
        yield client


@pytest_asyncio.fixture
async def ship(yard: ShipyardClient, sdk: SdkService, key: str) -> AsyncIterator[SessionShip]:
    """A ship of one session for a test."""
    created = await yard.create_ship(TTL)
    yield created
    await _deleted(sdk, key, created.id)


async def _deleted(sdk: SdkService, key: str, ship_id: str) -> int:
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(
        base_url=f"{sdk.url}/shipyard", headers=headers, timeout=60
    ) as http:
        return (await http.delete(f"/ship/{ship_id}")).status_code


def data(answer: dict[str, Any]) -> dict[str, Any]:
    assert set(answer) == {"success", "data", "error"}
    assert answer["success"] is True
    content: dict[str, Any] = answer["data"]
    return content


async def _names(ship: SessionShip) -> list[str]:
    """The names in the workspace, without the directory of uploads that each one has."""
    files = data(await ship.fs.list_dir())["files"]
    return [each["name"] for each in files if each["name"] != "uploads"]


# -- ships -----------------------------------------------------------------------------------------


async def test_a_new_ship_has_the_fields_of_the_sdk(ship: SessionShip) -> None:
    assert ship.status == 1
    assert ship.ttl == TTL
    assert (ship.max_session_num, ship.current_session_num) == (1, 1)
    assert abs((datetime.now(UTC) - ship.created_at).total_seconds()) < 60
    assert ship.container_id is None
    assert ship.ip_address is None


async def test_get_ship_and_a_ship_that_does_not_exist(
    yard: ShipyardClient, ship: SessionShip
) -> None:
    shown = await yard.get_ship(ship.id)
    assert shown is not None
    assert (shown["id"], shown["status"]) == (ship.id, 1)
    assert await yard.get_ship("sandbox-000000000000") is None


async def test_one_session_gets_the_same_ship_with_its_variables(yard: ShipyardClient) -> None:
    first = await yard.create_ship(TTL, session_id="same")
    await first.python.exec("kept = 41")
    again = await yard.create_ship(TTL, session_id="same")
    assert again.id == first.id
    assert data(await again.python.exec("kept + 1"))["output"]["text"] == "42"


async def test_two_requests_of_one_session_at_once_get_one_ship(yard: ShipyardClient) -> None:
    ships = await asyncio.gather(*(yard.create_ship(TTL, session_id="at once") for _ in range(8)))
    assert len({each.id for each in ships}) == 1


async def test_other_sessions_join_a_ship_with_free_places_and_share_nothing(
    yard: ShipyardClient, sdk: SdkService, key: str
) -> None:
    first = await yard.create_ship(TTL, max_session_num=2, session_id="place 1")
    second = await yard.create_ship(TTL, max_session_num=2, session_id="place 2")
    third = await yard.create_ship(TTL, session_id="place 3")
    assert second.id == first.id
    assert third.id != first.id
    assert second.current_session_num == 2
    await first.fs.create_file("secret.txt", "of the first")
    await first.python.exec("secret = 1")
    assert await _names(second) == []
    assert "NameError" in data(await second.python.exec("secret"))["error"]
    found = data(await second.shell.exec("find / -name secret.txt 2>/dev/null"))
    assert found["stdout"] == ""


async def test_the_sessions_of_a_ship_are_kept_when_the_service_restarts(tmp_path: Path) -> None:
    headers = {"X-SESSION-ID": "kept"}
    body = {"ttl": TTL, "max_session_num": 3}
    async with live(tmp_path) as served, served.client() as http:
        first = (await http.post("/shipyard/ship", json=body, headers=headers)).json()
        exec_ = {"type": "fs/create_file", "payload": {"path": "a", "content": "1", "mode": 420}}
        await http.post(f"/shipyard/ship/{first['id']}/exec", json=exec_, headers=headers)
    async with live(tmp_path) as served, served.client() as http:
        again = (await http.post("/shipyard/ship", json=body, headers=headers)).json()
        exec_ = {"type": "fs/read_file", "payload": {"path": "a"}}
        read = await http.post(f"/shipyard/ship/{first['id']}/exec", json=exec_, headers=headers)
    assert (again["id"], again["current_session_num"]) == (first["id"], 1)
    assert read.json()["data"]["content"] == "1"


async def test_the_limits_of_a_ship_are_within_the_policy(
    yard: ShipyardClient, sdk: SdkService, key: str
) -> None:
    small = await yard.create_ship(TTL, Spec(cpus=0.5, memory="256m"), session_id="small")
    large = await yard.create_ship(TTL, Spec(cpus=64, memory="512g"), session_id="large")
    every = {each.id: each for each in sdk.served.service.sandboxes.every()}
    assert every[small.id].row.request["narrower"] == {
        "limits": {"cpu_quota": "50%", "memory_max": 256 << 20}
    }
    assert every[large.id].row.request == {}
    assert data(await small.python.exec("1"))["success"] is True


async def test_extend_ttl_sets_the_remaining_time(yard: ShipyardClient, ship: SessionShip) -> None:
    shown = await ship.extend_ttl(7200)
    end = datetime.fromisoformat(shown["expires_at"].replace("Z", "+00:00"))
    assert shown["ttl"] == 7200
    assert abs((end - datetime.now(UTC)).total_seconds() - 7200) < 60
    assert (await ship.extend_ttl(60))["ttl"] == 60
    with pytest.raises(Exception, match="Failed to extend TTL: 404"):
        await yard.extend_ship_ttl("sandbox-000000000000", 60)


async def test_an_expired_ship_ends_its_kernel_and_its_session_gets_the_files_again(
    tmp_path: Path,
) -> None:
    clock = FakeClock()
    headers = {"X-SESSION-ID": "x"}
    async with live(tmp_path, clock=clock) as served, served.client() as http:
        body = {"ttl": 60, "max_session_num": 1}
        ship = (await http.post("/shipyard/ship", json=body, headers=headers)).json()
        url = f"/shipyard/ship/{ship['id']}"
        cell = {"type": "ipython/exec", "payload": {"code": "open('a', 'w').write('1')"}}
        assert (await http.post(f"{url}/exec", json=cell, headers=headers)).status_code == 200
        assert sum(each.kernels for each in served.service.sandboxes.every()) == 1
        clock.advance(61)
        await served.service.reaper.round()
        assert sum(each.kernels for each in served.service.sandboxes.every()) == 0
        assert (await http.get(url)).json()["status"] == 0
        refused = await http.post(f"{url}/exec", json=cell, headers=headers)
        assert (refused.status_code, "not running" in refused.text) == (400, True)
        late = await http.post(f"{url}/extend-ttl", json={"ttl": 60})
        assert late.status_code == 404
        assert (await http.get("/shipyard/ships")).json() == []
        again = (await http.post("/shipyard/ship", json=body, headers=headers)).json()
        assert (again["id"], again["status"]) == (ship["id"], 1)
        cell["payload"]["code"] = "open('a').read()"  # type: ignore[index]
        read = await http.post(f"{url}/exec", json=cell, headers=headers)
        assert read.json()["data"]["output"]["text"] == "'1'"


async def test_each_use_moves_the_expiry_of_a_ship(tmp_path: Path) -> None:
    clock = FakeClock()
    headers = {"X-SESSION-ID": "x"}
    async with live(tmp_path, clock=clock) as served, served.client() as http:
        body = {"ttl": 60, "max_session_num": 1}
        ship = (await http.post("/shipyard/ship", json=body, headers=headers)).json()
        url = f"/shipyard/ship/{ship['id']}"
        for _ in range(3):
            clock.advance(50)
            command = {"type": "fs/list_dir", "payload": {}}
            answer = await http.post(f"{url}/exec", json=command, headers=headers)
            assert answer.status_code == 200, answer.text


async def test_logs_are_events_and_empty_for_an_unknown_ship(
    yard: ShipyardClient, ship: SessionShip
) -> None:
    await ship.python.exec("1")
    assert (await ship.get_logs()).splitlines()[0] == "created"
    assert await yard.get_ship_logs("sandbox-000000000000") == ""


async def test_delete_and_list_which_the_sdk_has_not(
    yard: ShipyardClient, sdk: SdkService, key: str
) -> None:
    created = await yard.create_ship(TTL)
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(
        base_url=f"{sdk.url}/shipyard", headers=headers, timeout=60
    ) as http:
        assert created.id in [each["id"] for each in (await http.get("/ships")).json()]
        assert (await http.delete(f"/ship/{created.id}")).status_code == 204
        assert (await http.delete(f"/ship/{created.id}")).status_code == 404
        assert created.id not in [each["id"] for each in (await http.get("/ships")).json()]
    assert await yard.get_ship(created.id) is None


@pytest.mark.parametrize(
    ("ttl", "sessions"), [(0, 1), (-5, 1), (60, 0)], ids=["zero", "negative", "no places"]
)
async def test_a_ship_without_a_life_is_refused(
    yard: ShipyardClient, ttl: int, sessions: int
) -> None:
    with pytest.raises(Exception, match="Failed to create ship: 422"):
        await yard.create_ship(ttl, max_session_num=sessions)


async def test_the_convenience_function_reads_the_environment(
    sdk: SdkService, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHIPYARD_ENDPOINT", f"{sdk.url}/shipyard/")
    monkeypatch.setenv("SHIPYARD_TOKEN", key)
    created = await create_session_ship(TTL)
    try:
        assert data(await created.python.exec("1 + 1"))["output"]["text"] == "2"
    finally:
        await created._client.close()


# -- Python ----------------------------------------------------------------------------------------


async def test_python_has_text_images_and_the_count(ship: SessionShip) -> None:
    code = (
        "import sys\nfrom IPython.display import display\n"
        "print('out'); print('err', file=sys.stderr)\n"
        "display({'image/png': 'aGk=', 'text/plain': '<Figure>'}, raw=True)\n40 + 2"
    )
    answer = data(await ship.python.exec(code))
    assert answer["success"] is True
    assert sorted(answer["output"]["text"].split()) == ["42", "err", "out"]
    assert answer["output"]["images"] == [{"image/png": "aGk="}]
    assert base64.b64decode(answer["output"]["images"][0]["image/png"]) == b"hi"
    assert answer["execution_count"] == 1
    assert answer["error"] is None
    assert data(await ship.python.exec("1"))["execution_count"] == 2


async def test_python_that_fails_keeps_the_text_before_it(ship: SessionShip) -> None:
    answer = data(await ship.python.exec("print('before')\n1 / 0"))
    assert answer["success"] is False
    assert answer["output"]["text"] == "before"
    assert "ZeroDivisionError" in answer["error"]


async def test_python_times_out_and_the_next_cell_works(ship: SessionShip) -> None:
    await ship.python.exec("kept = 1")
    answer = data(await ship.python.exec("import time; time.sleep(60)", timeout=1))
    assert answer["error"] == "Code execution timed out after 1 seconds"
    assert answer["success"] is False
    assert data(await ship.python.exec("kept"))["output"]["text"] == "1"


async def test_silent_python_has_no_count_and_no_result(ship: SessionShip) -> None:
    answer = data(await ship.python.exec("print('x'); 5", silent=True))
    assert (answer["execution_count"], answer["output"]["text"]) == (None, "x")


async def test_python_and_files_and_shell_share_the_workspace(ship: SessionShip) -> None:
    created = data(await ship.fs.create_file("notes/one.txt", "1"))
    code = f"open({created['path']!r}).read() + open('notes/one.txt').read()"
    assert data(await ship.python.exec(code))["output"]["text"] == "'11'"
    assert data(await ship.shell.exec("cat notes/one.txt; pwd"))["stdout"] == "1/workspace"


# -- shell -----------------------------------------------------------------------------------------


async def test_shell_has_streams_and_a_code(ship: SessionShip) -> None:
    answer = data(await ship.shell.exec("echo out; echo err >&2; exit 3"))
    assert answer == {
        "success": False,
        "return_code": 3,
        "stdout": "out",
        "stderr": "err",
        "pid": None,
        "error": None,
    }


async def test_shell_takes_a_directory_and_variables(ship: SessionShip) -> None:
    await ship.shell.exec("mkdir -p deep/er")
    answer = data(await ship.shell.exec("pwd; echo $NAME", cwd="deep/er", env={"NAME": "a b"}))
    assert answer["stdout"] == "/workspace/deep/er\na b"


async def test_shell_in_a_missing_directory_fails(ship: SessionShip) -> None:
    answer = data(await ship.shell.exec("pwd", cwd="nowhere"))
    assert answer["success"] is False
    assert answer["return_code"] != 0


async def test_shell_times_out_with_all_of_its_processes(ship: SessionShip) -> None:
    answer = data(await ship.shell.exec("sleep 61 & sleep 60", timeout=1))
    assert answer == {
        "success": False,
        "return_code": -1,
        "stdout": "",
        "stderr": "",
        "pid": None,
        "error": "Command timed out",
    }


async def test_without_a_shell_nothing_is_expanded(ship: SessionShip) -> None:
    answer = data(await ship.shell.exec("echo '$HOME' ; ls", shell=False))
    assert answer["stdout"] == "$HOME ; ls"
    broken = data(await ship.shell.exec("echo 'open", shell=False))
    assert (broken["success"], "split" in broken["error"]) == (False, True)


async def test_a_background_command_has_its_pid_at_once_and_runs_on(ship: SessionShip) -> None:
    started = data(
        await ship.shell.exec(
            "echo $NAME > ran; exec sleep 600", env={"NAME": "x"}, background=True
        )
    )
    assert (started["success"], started["stdout"]) == (True, "")
    code = f"cat /proc/{started['pid']}/comm; kill {started['pid']}; cat ran"
    until = "until [ -s ran ] && grep -q sleep /proc/{0}/comm; do sleep 0.02; done; "
    answer = data(await ship.shell.exec(until.format(started["pid"]) + code))
    assert answer["stdout"].split() == ["sleep", "x"]


# -- files -----------------------------------------------------------------------------------------


async def test_a_new_file_has_its_mode(ship: SessionShip) -> None:
    created = data(await ship.fs.create_file("run.sh", "echo ran", mode=0o755))
    assert created["path"] == "/workspace/run.sh"
    assert data(await ship.shell.exec("stat -c %a run.sh; ./run.sh"))["stdout"] == "755\nran"
    await ship.fs.create_file("plain", "")
    assert data(await ship.shell.exec("stat -c %a plain"))["stdout"] == "644"


async def test_read_has_lines_and_the_size_of_the_whole_file(ship: SessionShip) -> None:
    await ship.fs.write_file("lines", "one\ntwo\r\nthree")
    assert data(await ship.fs.read_file("lines")) == {
        "content": "one\ntwo\r\nthree",
        "path": "/workspace/lines",
        "size": 14,
    }
    assert data(await ship.fs.read_file("lines", offset=2, limit=1))["content"] == "two\r\n"
    assert data(await ship.fs.read_file("lines", limit=1))["content"] == "one\n"
    assert data(await ship.fs.read_file("lines", offset=9))["content"] == ""


async def test_write_replaces_and_appends_also_at_once(ship: SessionShip) -> None:
    await ship.fs.write_file("log", "start\n")
    await asyncio.gather(*(ship.fs.write_file("log", f"{n}\n", mode="a") for n in range(10)))
    lines = data(await ship.fs.read_file("log"))["content"].splitlines()
    assert lines[0] == "start"
    assert sorted(lines[1:]) == [str(n) for n in range(10)]
    assert data(await ship.fs.write_file("log", "new"))["size"] == 3
    assert data(await ship.fs.write_file("made", "x", mode="a"))["size"] == 1


async def test_encodings_of_files(ship: SessionShip) -> None:
    await ship.fs.write_file("latin", "caf\u00e9", encoding="latin-1")
    assert data(await ship.fs.read_file("latin", encoding="latin-1"))["content"] == "caf\u00e9"
    for encoding, status in (("utf-8", 500), ("no-such", 400), ("zip", 400)):
        with pytest.raises(Exception, match=f"Ship returned {status}"):
            await ship.fs.read_file("latin", encoding=encoding)
    with pytest.raises(Exception, match="Ship returned 400"):
        await ship.fs.write_file("latin", "\u20ac", encoding="latin-1")


async def test_edit_replaces_one_or_all(ship: SessionShip) -> None:
    await ship.fs.write_file("e", "a b a")
    with pytest.raises(Exception, match="2 times"):
        await ship.fs.edit_file("e", "a", "c")
    answer = data(await ship.fs.edit_file("e", "a", "c", replace_all=True))
    assert (answer["replacements"], answer["size"]) == (2, 5)
    assert data(await ship.fs.read_file("e"))["content"] == "c b c"
    for old, new, reason in (("zzz", "y", "is not in"), ("b", "b", "the same"), ("", "x", "empty")):
        with pytest.raises(Exception, match=reason):
            await ship.fs.edit_file("e", old, new)
    with pytest.raises(Exception, match="Ship returned 404"):
        await ship.fs.edit_file("missing", "a", "b")


async def test_delete_takes_files_and_directories(ship: SessionShip) -> None:
    await ship.fs.create_file("d/a/b", "1")
    await ship.fs.delete_file("d")
    assert await _names(ship) == []
    with pytest.raises(Exception, match="Ship returned 404"):
        await ship.fs.delete_file("d")


async def test_list_has_directories_first_and_hides_names_with_a_dot(ship: SessionShip) -> None:
    for path in ("b.txt", "A.txt", ".hidden", "z/inner"):
        await ship.fs.create_file(path, "1")
    answer = data(await ship.fs.list_dir())
    assert answer["current_path"] == "/workspace"
    names = [each["name"] for each in answer["files"]]
    assert names == ["uploads", "z", "A.txt", "b.txt"]
    assert answer["files"][1]["size"] is None
    assert answer["files"][2]["path"] == "/workspace/A.txt"
    assert answer["files"][2]["is_file"] is True
    shown = data(await ship.fs.list_dir("/workspace", show_hidden=True))["files"]
    assert ".hidden" in [each["name"] for each in shown]
    with pytest.raises(Exception, match="Ship returned 404"):
        await ship.fs.list_dir("missing")


async def test_reading_what_is_no_file(ship: SessionShip) -> None:
    await ship.fs.create_file("d/a", "1")
    with pytest.raises(Exception, match="Ship returned 404"):
        await ship.fs.read_file("missing")
    with pytest.raises(Exception, match="Ship returned 400"):
        await ship.fs.read_file("d")


async def test_upload_and_download_of_any_name_and_bytes(ship: SessionShip, tmp_path: Path) -> None:
    source, target = tmp_path / "in.bin", tmp_path / "out.bin"
    content = bytes(range(256)) * 5000
    source.write_bytes(content)
    answer = await ship.upload_file(str(source), "deep/\u00fc \u4e2d.bin")
    assert answer == {
        "success": True,
        "message": "File uploaded successfully",
        "file_path": "/workspace/deep/\u00fc \u4e2d.bin",
        "error": None,
    }
    await ship.download_file("deep/\u00fc \u4e2d.bin", str(target))
    assert target.read_bytes() == content
    assert (await ship.upload_file(str(source)))["file_path"] == "/workspace/in.bin"
    with pytest.raises(Exception, match="Failed to download file: 404"):
        await ship.download_file("missing", str(target))


# -- attacks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/etc/passwd", "../../etc/passwd", "a/../../b", "link"])
async def test_a_path_outside_is_403(ship: SessionShip, path: str, tmp_path: Path) -> None:
    await ship.shell.exec("ln -s /etc/passwd link")
    with pytest.raises(Exception, match="Ship returned 403"):
        await ship.fs.read_file(path)
    source = tmp_path / "x"
    source.write_text("x")
    with pytest.raises(Exception, match="Failed to download file: 403"):
        await ship.download_file(path, str(tmp_path / "y"))
    if path != "link":  # a write replaces the link itself
        with pytest.raises(Exception, match="Failed to upload file: 403"):
            await ship.upload_file(str(source), path)


async def test_host_files_and_networks_are_out_of_reach(ship: SessionShip) -> None:
    code = "import os; print(os.path.exists('/etc/shadow'))"
    assert data(await ship.python.exec(code))["output"]["text"] == "False"
    code = "import socket; socket.create_connection(('1.1.1.1', 53), timeout=5)"
    assert data(await ship.python.exec(code))["success"] is False


async def test_a_session_that_did_not_join_has_no_access(
    yard: ShipyardClient, ship: SessionShip
) -> None:
    other = SessionShip(yard, ship._data, "another session")
    with pytest.raises(Exception, match=r"400.*does not have access"):
        await other.python.exec("1")
    with pytest.raises(Exception, match=r"400.*does not have access"):
        await other.fs.read_file("x")
    with pytest.raises(Exception, match="Failed to download file: 403"):
        await other.download_file("x", "/dev/null")


@pytest.mark.parametrize("session", ["../../etc", "a/b", "\u00e4" * 50, "x" * 4000, "default"])
async def test_a_session_id_is_any_text_and_never_a_path(
    yard: ShipyardClient, sdk: SdkService, key: str, session: str
) -> None:
    ship = await yard.create_ship(TTL, session_id=session)
    assert data(await ship.shell.exec("pwd"))["stdout"] == "/workspace"
    again = await yard.create_ship(TTL, session_id=session)
    assert again.id == ship.id
    await _deleted(sdk, key, ship.id)


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("sk-sbx-" + "0" * 64, "is not valid"),
        ("short", "does not have the form"),
        ("with space and more of it", "does not have the form"),
    ],
)
async def test_wrong_keys_are_401_on_every_route(sdk: SdkService, key: str, reason: str) -> None:
    headers = {"authorization": f"Bearer {key}", "x-session-id": "x"}
    async with httpx.AsyncClient(
        base_url=f"{sdk.url}/shipyard", headers=headers, timeout=60
    ) as http:
        for method, route in (
            ("POST", "/ship"),
            ("GET", "/ship/x"),
            ("DELETE", "/ship/x"),
            ("GET", "/ships"),
            ("POST", "/ship/x/extend-ttl"),
            ("POST", "/ship/x/exec"),
            ("POST", "/ship/x/upload"),
            ("GET", "/ship/x/download?file_path=x"),
            ("GET", "/ship/logs/x"),
        ):
            reply = await http.request(method, route, json={} if method == "POST" else None)
            assert reply.status_code == 401, route
            assert reason in reply.json()["detail"]
            assert "error" not in reply.json()


async def test_no_request_is_anonymous(sdk: SdkService) -> None:
    async with httpx.AsyncClient(base_url=f"{sdk.url}/shipyard", timeout=60) as http:
        assert (await http.get("/ships")).status_code == 401


async def test_another_owner_sees_no_ship(sdk: SdkService, ship: SessionShip) -> None:
    async with ShipyardClient(f"{sdk.url}/shipyard", await sdk.key("stranger")) as stranger:
        assert await stranger.get_ship(ship.id) is None
        theirs = SessionShip(stranger, ship._data, ship._session_id)
        with pytest.raises(Exception, match=r"400.*Ship.*does not exist"):
            await theirs.python.exec("1")
        mine = await stranger.create_ship(TTL, session_id=ship._session_id)
        assert mine.id != ship.id
        assert await stranger.get_ship_logs(ship.id) == ""


async def test_a_sandbox_of_another_surface_is_no_ship(
    yard: ShipyardClient, sdk: SdkService, key: str
) -> None:
    async with httpx.AsyncClient(
        base_url=sdk.url, headers={"authorization": f"Bearer {key}"}
    ) as http:
        box = (await http.post("/v1/sandboxes", json={})).json()
    assert await yard.get_ship(box["id"]) is None


@pytest.mark.parametrize(
    ("operation", "payload"),
    [
        ("fs/format_disk", {}),
        ("ipython/exec", {}),
        ("shell/exec", {"command": 5}),
        ("fs/create_file", {"path": "x", "mode": 0o4755}),
        ("fs/write_file", {"path": "x", "content": "x", "mode": "rb"}),
        ("shell/exec", {"command": "true", "timeout": 1e9}),
    ],
)
async def test_a_wrong_operation_is_400_with_a_reason(
    yard: ShipyardClient, ship: SessionShip, operation: str, payload: dict[str, Any]
) -> None:
    with pytest.raises(Exception, match="Failed to execute operation: 400") as raised:
        await yard._exec_operation(ship.id, operation, payload, ship._session_id)
    assert json.loads(str(raised.value).partition("400 ")[2])["detail"]


async def test_fifty_clients_at_once(sdk: SdkService) -> None:
    key = await sdk.key("fleet")

    async def work(number: int) -> str:
        async with ShipyardClient(f"{sdk.url}/shipyard", key) as client:
            ship = await client.create_ship(TTL, session_id=str(number))
            await ship.fs.write_file("own", str(number))
            answer = data(await ship.python.exec("print(open('own').read())"))
            assert await _deleted(sdk, key, ship.id) == 204
        text: str = answer["output"]["text"]
        return text

    assert await asyncio.gather(*map(work, range(50))) == [str(n) for n in range(50)]
