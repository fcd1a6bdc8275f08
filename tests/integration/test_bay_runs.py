"""/v1: python/exec, shell/exec, streams, interrupts and history, over the socket."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from bay_calls import events, made, refused
from live_app import Served

SSE = {"accept": "text/event-stream"}
PYTHON_FIELDS = {
    "success", "output", "error", "data", "execution_id", "execution_time_ms", "code"
}  # fmt: skip
SHELL_FIELDS = {
    "success", "output", "error", "exit_code", "execution_id", "execution_time_ms", "command"
}  # fmt: skip


@pytest_asyncio.fixture(scope="module")
async def box(client: httpx.AsyncClient) -> str:
    """The URL of one sandbox for all tests that leave its kernel usable."""
    return f"/v1/sandboxes/{(await made(client))['id']}"


@pytest_asyncio.fixture
async def own(client: httpx.AsyncClient) -> AsyncIterator[str]:
    """A sandbox of the test's own."""
    url = f"/v1/sandboxes/{(await made(client))['id']}"
    yield url
    await client.delete(url)


async def python(client: httpx.AsyncClient, box: str, code: str, **more: Any) -> dict[str, Any]:
    reply = await client.post(f"{box}/python/exec", json={"code": code, **more})
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    assert set(answer) == PYTHON_FIELDS
    return answer


async def shell(client: httpx.AsyncClient, box: str, command: str, **more: Any) -> dict[str, Any]:
    reply = await client.post(f"{box}/shell/exec", json={"command": command, **more})
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    assert set(answer) == SHELL_FIELDS
    return answer


# -- python/exec -----------------------------------------------------------------------------------


async def test_a_cell_answers_every_field(client: httpx.AsyncClient, box: str) -> None:
    answer = await python(client, box, "print('hi')\n40 + 2", include_code=True)
    assert answer["success"] is True
    assert answer["output"] == "hi\n42\n"
    assert answer["error"] is None
    assert answer["code"] == "print('hi')\n40 + 2"
    assert answer["execution_id"].startswith("exec-")
    assert answer["execution_time_ms"] >= 0
    assert answer["data"]["execution_count"] >= 1
    assert answer["data"]["output"] == {"text": "hi\n42\n", "images": []}
    assert answer["data"]["outputs"] == [{"text/plain": "42"}]
    assert (await python(client, box, "1"))["code"] is None


async def test_a_failing_cell_is_a_success_of_the_call(client: httpx.AsyncClient, box: str) -> None:
    answer = await python(client, box, "print('before'); 1/0")
    assert (answer["success"], answer["output"]) == (False, "before\n")
    assert "ZeroDivisionError" in answer["error"]
    assert "Traceback" in answer["error"]


async def test_an_image_is_told_without_its_text(client: httpx.AsyncClient, box: str) -> None:
    code = (
        "from IPython.display import display\n"
        "display({'image/png': 'aGk=', 'text/plain': '<Figure>'}, raw=True)\n"
        "display({'text/html': '<b>x</b>', 'text/plain': 'x'}, raw=True)"
    )
    answer = await python(client, box, code)
    assert answer["data"]["output"] == {"text": "x\n", "images": [{"image/png": "aGk="}]}
    assert [set(bundle) for bundle in answer["data"]["outputs"]] == [
        {"image/png", "text/plain"},
        {"text/html", "text/plain"},
    ]


async def test_a_time_out_says_what_became_of_the_state(
    client: httpx.AsyncClient, own: str
) -> None:
    await python(client, own, "kept = 1")
    answer = await python(client, own, "import time; time.sleep(30)", timeout=1)
    assert answer["success"] is False
    assert "timed out" in answer["error"]
    assert "kept" in answer["error"]
    assert (await python(client, own, "kept"))["output"] == "1\n"


async def test_a_longer_time_out_than_the_policys_is_refused_and_the_default_is_not(
    client: httpx.AsyncClient,
) -> None:
    narrower = {"limits": {"wall_time": "2s"}}
    box = f"/v1/sandboxes/{(await made(client, narrower=narrower))['id']}"
    for route, text in (("python/exec", {"code": "1"}), ("shell/exec", {"command": "true"})):
        reply = await client.post(f"{box}/{route}", json={**text, "timeout": 3})
        refused(reply, 400, "limit_widened")
    assert (await python(client, box, "1", timeout=2))["success"] is True
    answer = await python(client, box, "import time; time.sleep(30)")
    assert "timed out" in answer["error"]
    assert (await shell(client, box, "sleep 30"))["success"] is False


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"code": 1},
        {"code": None},
        {"code": "1", "timeout": 0},
        {"code": "1", "timeout": 301},
        {"code": "1", "timeout": "x"},
        {"code": "1", "tags": 5},
        [],
        None,
    ],
)
async def test_a_wrong_body_is_422(client: httpx.AsyncClient, box: str, body: Any) -> None:
    reply = await client.post(f"{box}/python/exec", json=body)
    refused(reply, 422, "validation_error")
    assert reply.json()["detail"][0]["loc"][0] == "body"


async def test_output_that_is_no_utf8_is_told(client: httpx.AsyncClient, box: str) -> None:
    answer = await python(client, box, "print('\\ud800 ok'); float('nan')")
    assert "ok" in answer["output"]


async def test_a_policy_without_shell_says_so(client: httpx.AsyncClient) -> None:
    answer = await made(client, profile="strict")
    reply = await client.post(f"/v1/sandboxes/{answer['id']}/shell/exec", json={"command": "true"})
    details = refused(reply, 400, "capability_not_supported")
    assert details == {"capability": "shell", "available": answer["capabilities"]}


async def test_the_browser_is_not_offered(client: httpx.AsyncClient, box: str) -> None:
    reply = await client.post(f"{box}/browser/exec", json={"cmd": "open x"})
    details = refused(reply, 400, "capability_not_supported")
    assert details["capability"] == "browser"
    assert "python" in details["available"]


async def test_the_same_key_runs_once(client: httpx.AsyncClient, box: str) -> None:
    await python(client, box, "count = 0")
    body = {"code": "count += 1; count"}
    replies = await asyncio.gather(
        *(
            client.post(f"{box}/python/exec", json=body, headers={"idempotency-key": "run-1"})
            for _ in range(3)
        )
    )
    assert len({reply.content for reply in replies}) == 1
    assert (await python(client, box, "count"))["output"] == "1\n"
    other = await client.post(
        f"{box}/python/exec", json={"code": "2"}, headers={"idempotency-key": "run-1"}
    )
    refused(other, 409, "conflict")


async def test_two_first_calls_at_once_both_answer(client: httpx.AsyncClient, own: str) -> None:
    answer = await asyncio.gather(*(python(client, own, str(number)) for number in range(4)))
    assert sorted(one["output"] for one in answer) == ["0\n", "1\n", "2\n", "3\n"]


async def test_a_full_queue_is_429(client: httpx.AsyncClient, own: str, served: Served) -> None:
    most = served.service.settings.queue_max
    await python(client, own, "import time")
    calls = [
        asyncio.create_task(
            client.post(f"{own}/python/exec", json={"code": "time.sleep(50)", "timeout": 60})
        )
        for _ in range(most + 3)
    ]
    done, waiting = await asyncio.wait(calls, timeout=60, return_when=asyncio.FIRST_COMPLETED)
    reply = done.pop().result()
    details = refused(reply, 429, "queue_full")
    assert details["limit"] == most
    assert int(reply.headers["retry-after"]) >= 1
    await client.delete(own)
    await asyncio.gather(*waiting)


# -- shell/exec ------------------------------------------------------------------------------------


async def test_a_command_answers_every_field(client: httpx.AsyncClient, box: str) -> None:
    answer = await shell(client, box, "echo hi; id -un; pwd; echo $HOME", include_code=True)
    assert answer["success"] is True
    assert answer["output"] == "hi\nsandbox\n/workspace\n/workspace\n"
    assert (answer["error"], answer["exit_code"]) == (None, 0)
    assert answer["command"].startswith("echo hi")


async def test_stderr_is_an_error_also_of_a_success(client: httpx.AsyncClient, box: str) -> None:
    answer = await shell(client, box, "echo oops >&2")
    assert (answer["success"], answer["error"], answer["exit_code"]) == (True, "oops\n", 0)


async def test_a_failing_command_has_its_exit_code(client: httpx.AsyncClient, box: str) -> None:
    answer = await shell(client, box, "exit 3")
    assert (answer["success"], answer["exit_code"]) == (False, 3)


async def test_a_command_that_takes_too_long_is_ended(client: httpx.AsyncClient, own: str) -> None:
    answer = await shell(client, own, "sleep 30", timeout=1)
    assert answer["success"] is False
    assert "timed out" in answer["error"]


@pytest.mark.parametrize(
    ("cwd", "reason"),
    [("/etc", "absolute_path"), ("../..", "path_traversal"), ("", "empty_path"),
     ("a\u0000b", "null_byte")],
)  # fmt: skip
async def test_cwd_is_a_path_of_the_workspace(
    client: httpx.AsyncClient, box: str, cwd: str, reason: str
) -> None:
    reply = await client.post(f"{box}/shell/exec", json={"command": "pwd", "cwd": cwd})
    assert refused(reply, 400, "invalid_path") == {"field": "cwd", "reason": reason}


async def test_the_system_is_named_inside_and_its_usual_accounts_exist(
    client: httpx.AsyncClient, box: str
) -> None:
    assert (await shell(client, box, ". /etc/os-release && echo $ID"))["output"].strip()
    named = await shell(client, box, "getent passwd root nobody; getent group root nobody; id -un")
    assert [line.partition(":")[0] for line in named["output"].splitlines()] == [
        *("root", "nobody", "root", "nobody"), "sandbox",
    ]  # fmt: skip


async def test_cwd_is_where_it_runs(client: httpx.AsyncClient, box: str) -> None:
    await shell(client, box, "mkdir -p sub")
    assert (await shell(client, box, "pwd", cwd="sub"))["output"] == "/workspace/sub\n"


# -- streams ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", ["accept", "stream"])
async def test_a_stream_ends_with_the_usual_body(
    client: httpx.AsyncClient, box: str, asked: str
) -> None:
    body = {"code": "print('a'); 5", "include_code": True, "stream": asked == "stream"}
    headers = SSE if asked == "accept" else {}
    async with client.stream("POST", f"{box}/python/exec", json=body, headers=headers) as reply:
        answer = [event async for event in events(reply)]
    assert [event.id for event in answer] == list(range(1, len(answer) + 1))
    assert answer[0].type == "run_start"
    assert "".join(event.data["text"] for event in answer if event.type == "stdout") == "a\n"
    assert answer[-1].type == "run_end"
    assert set(answer[-1].data) >= PYTHON_FIELDS
    assert answer[-1].data["output"] == "a\n5\n"
    assert answer[-1].data["code"] == body["code"]


async def test_a_shell_stream_ends_with_its_body(client: httpx.AsyncClient, box: str) -> None:
    body = {"command": "echo a; exit 2"}
    async with client.stream("POST", f"{box}/shell/exec", json=body, headers=SSE) as reply:
        answer = [event async for event in events(reply)]
    assert set(answer[-1].data) >= SHELL_FIELDS
    assert answer[-1].data["exit_code"] == 2


async def test_a_malformed_event_id_is_refused_by_every_route(
    client: httpx.AsyncClient, box: str
) -> None:
    """It was taken for 0: the client got every event a second time."""
    ran = await python(client, box, "1")
    commands = f"{box}/conversations/default/commands"
    begun = await client.post(commands, json={"command": "true"})
    for path in (
        f"{box}/events",
        f"{box}/runs/{ran['execution_id']}/events",
        f"/api/v1/runs/{ran['execution_id'].replace('exec', 'run')}/events",
        f"{commands}/{begun.json()['id']}/follow",
    ):
        reply = await client.get(path, headers={"last-event-id": "abc"})
        refused(reply, 400, "invalid_event_id")


async def test_a_client_that_went_away_gets_the_rest(client: httpx.AsyncClient, box: str) -> None:
    code = "import time\nfor n in range(4):\n    print(n, flush=True); time.sleep(0.2)"
    async with client.stream(
        "POST", f"{box}/python/exec", json={"code": code}, headers=SSE
    ) as reply:
        seen = []
        async for event in events(reply):
            seen.append(event)
            if event.type == "stdout":
                break
    run_id = seen[0].data["run_id"]
    headers = {"last-event-id": str(seen[-1].id)}
    async with client.stream("GET", f"{box}/runs/{run_id}/events", headers=headers) as reply:
        rest = [event async for event in events(reply)]
    assert rest[0].id == seen[-1].id + 1
    assert rest[-1].data["success"] is True
    assert rest[-1].data["output"] == "0\n1\n2\n3\n"
    async with client.stream("GET", f"{box}/runs/{run_id}/events") as reply:
        assert (await anext(events(reply))).id == 1


async def test_a_stream_under_a_key_runs_once(client: httpx.AsyncClient, box: str) -> None:
    await python(client, box, "streams = 0")
    body = {"code": "streams += 1; streams", "stream": True}
    ends = []
    for _ in range(2):
        async with client.stream(
            "POST", f"{box}/python/exec", json=body, headers={"idempotency-key": "stream-1"}
        ) as reply:
            ends.append([event async for event in events(reply)][-1])
    assert [end.data["output"] for end in ends] == ["1\n", "1\n"]
    assert (await python(client, box, "streams"))["output"] == "1\n"


async def test_an_error_before_the_stream_is_an_ordinary_reply(client: httpx.AsyncClient) -> None:
    reply = await client.post(
        "/v1/sandboxes/sandbox-000000000000/python/exec", json={"code": "1"}, headers=SSE
    )
    refused(reply, 404, "not_found")


async def test_interrupt_ends_the_run_and_keeps_the_state(
    client: httpx.AsyncClient, own: str
) -> None:
    assert (await client.post(f"{own}/interrupt")).json() == {
        "status": "ok",
        "interrupted": False,
    }
    await python(client, own, "kept = 3; import time")
    running = asyncio.create_task(python(client, own, "time.sleep(30)"))
    async with asyncio.timeout(60):
        while not (await client.post(f"{own}/interrupt")).json()["interrupted"]:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        answer = await running
    assert answer["success"] is False
    assert "KeyboardInterrupt" in answer["error"]
    assert (await python(client, own, "kept"))["output"] == "3\n"


# -- history ---------------------------------------------------------------------------------------

ENTRY_FIELDS = {
    "id", "session_id", "exec_type", "code", "success", "execution_time_ms", "output", "error",
    "payload_ref", "description", "tags", "notes", "learn_enabled", "learn_status", "learn_error",
    "learn_processed_at", "created_at",
}  # fmt: skip


async def test_history_tells_what_was_run(client: httpx.AsyncClient, own: str) -> None:
    first = await python(client, own, "1", tags="Alpha,beta", description="one")
    second = await shell(client, own, "exit 1", tags="gamma")
    answer = (await client.get(f"{own}/history")).json()
    assert answer["total"] == 2
    assert [entry["id"] for entry in answer["entries"]] == [
        second["execution_id"],
        first["execution_id"],
    ]
    entry = answer["entries"][1]
    assert set(entry) == ENTRY_FIELDS
    assert (entry["code"], entry["success"], entry["output"]) == ("1", True, "1\n")
    assert (entry["exec_type"], entry["tags"]) == ("python", "Alpha,beta")
    assert entry["description"] == "one"
    assert entry["learn_enabled"] is False
    assert entry["created_at"].endswith("Z")


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ({"exec_type": "python"}, ["b", "a"]),
        ({"exec_type": "browser"}, []),
        ({"success_only": True}, ["b", "a"]),
        ({"tags": "ALPH"}, ["a"]),
        ({"tags": "alpha,gamma"}, ["c", "a"]),
        ({"has_description": True}, ["a"]),
        ({"has_notes": False}, ["c", "b", "a"]),
        ({"limit": 1}, ["c"]),
        ({"limit": 1, "offset": 2}, ["a"]),
    ],
)
async def test_history_is_searched(
    client: httpx.AsyncClient, searched: str, query: dict[str, Any], found: list[str]
) -> None:
    answer = (await client.get(f"{searched}/history", params=query)).json()
    assert [entry["code"][-1] for entry in answer["entries"]] == found


@pytest_asyncio.fixture(scope="module")
async def searched(client: httpx.AsyncClient) -> str:
    url = f"/v1/sandboxes/{(await made(client))['id']}"
    await python(client, url, "1 # a", tags="Alpha", description="one")
    await python(client, url, "2 # b")
    await shell(client, url, "exit 4 # c", tags="gamma")
    return url


@pytest.mark.parametrize(
    "query", [{"limit": 0}, {"limit": 501}, {"offset": -1}, {"exec_type": "x"}]
)
async def test_a_wrong_search_is_422(
    client: httpx.AsyncClient, searched: str, query: dict[str, Any]
) -> None:
    refused(await client.get(f"{searched}/history", params=query), 422, "validation_error")


async def test_the_last_run_and_one_run(client: httpx.AsyncClient, searched: str) -> None:
    last = (await client.get(f"{searched}/history/last")).json()
    assert last["exec_type"] == "shell"
    python_ = await client.get(f"{searched}/history/last", params={"exec_type": "python"})
    assert python_.json()["code"] == "2 # b"
    nothing = await client.get(f"{searched}/history/last", params={"exec_type": "browser"})
    refused(nothing, 404, "not_found")
    assert (await client.get(f"{searched}/history/{last['id']}")).json() == last
    refused(await client.get(f"{searched}/history/exec-0"), 404, "not_found")


async def test_notes_change_only_what_is_given(client: httpx.AsyncClient, own: str) -> None:
    answer = await python(client, own, "1", description="one")
    url = f"{own}/history/{answer['execution_id']}"
    entry = (await client.patch(url, json={"notes": "good", "tags": None})).json()
    assert (entry["notes"], entry["description"], entry["tags"]) == ("good", "one", None)
    assert (await client.get(url)).json() == entry
    found = (await client.get(f"{own}/history", params={"has_notes": True})).json()
    assert found["total"] == 1
    refused(await client.patch(url, json={"notes": 5}), 422, "validation_error")
