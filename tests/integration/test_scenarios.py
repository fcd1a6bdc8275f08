"""The six ways in which the service is used from end to end, by plain HTTP over its socket."""

import base64
import io
import json
import textwrap
import threading
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import Service, open_directory, service

Json = dict[str, Any]
WHEELS = "/opt/wheels-of-the-team"


@pytest.fixture(scope="module")
def served() -> Iterator[Service]:
    """One service for all of them, with a policy that mounts wheels for pip."""
    with open_directory() as policies:
        write_policy(policies)
        with service("--policies", policies) as running:
            yield running


def write_policy(policies: Path) -> None:
    wheels = policies / "wheels"
    wheels.mkdir()
    (wheels / "greeter-1.2.0-py3-none-any.whl").write_bytes(wheel())
    (policies / "team.toml").write_text(
        textwrap.dedent(f"""\
            schema = 1
            extends = "default"
            [env]
            PIP_NO_INDEX = "1"
            PIP_FIND_LINKS = "{WHEELS}"
            PIP_DISABLE_PIP_VERSION_CHECK = "1"
            [[filesystem.mount]]
            source = "{wheels}"
            target = "{WHEELS}"
            """)
    )


@pytest.fixture
def http(served: Service) -> Iterator[httpx.Client]:
    with served.http() as client:
        yield client


def wheel() -> bytes:
    """A wheel of one module, as small as pip takes them."""
    said = io.BytesIO()
    name = "greeter-1.2.0"
    with zipfile.ZipFile(said, "w") as file:
        file.writestr("greeter.py", "VERSION = '1.2.0'\ndef greet(who): return f'hello {who}'\n")
        file.writestr(
            f"{name}.dist-info/METADATA", "Metadata-Version: 2.1\nName: greeter\nVersion: 1.2.0\n"
        )
        file.writestr(
            f"{name}.dist-info/WHEEL",
            "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        file.writestr(f"{name}.dist-info/RECORD", f"greeter.py,,\n{name}.dist-info/RECORD,,\n")
    return said.getvalue()


def ok(reply: httpx.Response, status: int = 200) -> Any:
    assert reply.status_code == status, reply.text
    return reply.json() if reply.content else None


def refused(reply: httpx.Response, status: int) -> str:
    """Its code; in the one shape that errors have."""
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert error["message"]
    assert error["request_id"] == reply.headers["x-request-id"]
    return str(error["code"])


def create(http: httpx.Client, **asked: Any) -> str:
    return str(ok(http.post("/v1/sandboxes", json=asked), 201)["id"])


def python(http: httpx.Client, box: str, code: str, **more: Any) -> Json:
    code = textwrap.dedent(code)
    answer = ok(http.post(f"/v1/sandboxes/{box}/python/exec", json={"code": code, **more}))
    assert isinstance(answer, dict)
    return answer


def shell(http: httpx.Client, box: str, command: str, **more: Any) -> Json:
    answer = ok(http.post(f"/v1/sandboxes/{box}/shell/exec", json={"command": command, **more}))
    assert isinstance(answer, dict)
    return answer


def put(http: httpx.Client, box: str, path: str, content: str) -> None:
    body = {"path": path, "content": textwrap.dedent(content)}
    ok(http.put(f"/v1/sandboxes/{box}/filesystem/files", json=body))


def events_of(reply: httpx.Response) -> Iterator[tuple[int, str, Json]]:
    """(id, event, data) of each event of an open stream."""
    assert reply.status_code == 200
    fields: dict[str, str] = {}
    for line in reply.iter_lines():
        if line:
            name, _, value = line.partition(":")
            fields[name] = value.removeprefix(" ")
        elif "data" in fields:
            yield int(fields["id"]), fields["event"], json.loads(fields["data"])
            fields = {}


def test_interactive_analysis_with_stop_and_resume(http: httpx.Client) -> None:
    """A person looks at a table, goes to lunch, and goes on with the files that are there."""
    box = create(http, profile="data-science")
    assert ok(http.get(f"/v1/sandboxes/{box}"))["status"] == "idle"
    table = "kind,mass\n" + "".join(f"{'ab'[n % 2]},{n}\n" for n in range(100))
    sent = http.post(
        f"/v1/sandboxes/{box}/filesystem/upload",
        files={"file": ("table.csv", table)},
        data={"path": "data/table.csv"},
    )
    assert ok(sent)["size"] == len(table)

    read = "import pandas as pd\ntable = pd.read_csv('data/table.csv')\ntable.shape"
    first = python(http, box, read)
    assert (first["success"], first["output"]) == (True, "(100, 2)\n")
    # a variable of one call is there in the next one
    means = python(http, box, "means = table.groupby('kind').mass.mean(); print(means['b'])")
    assert means["output"] == "50.0\n"
    drawn = python(http, box, "%matplotlib inline\nmeans.plot.bar();")
    (image,) = drawn["data"]["output"]["images"]
    assert base64.b64decode(image["image/png"]).startswith(b"\x89PNG")
    python(http, box, "means.to_csv('means.csv')")
    assert ok(http.get(f"/v1/sandboxes/{box}"))["status"] == "ready"

    assert ok(http.post(f"/v1/sandboxes/{box}/stop")) == {"status": "stopped"}
    assert ok(http.post(f"/v1/sandboxes/{box}/stop")) == {"status": "stopped"}  # it is already
    stopped = ok(http.get(f"/v1/sandboxes/{box}"))
    assert (stopped["status"], stopped["idle_expires_at"]) == ("idle", None)

    resumed = python(http, box, "means")  # resumes by itself
    assert not resumed["success"]
    assert "NameError" in resumed["error"]
    assert python(http, box, f"{read}; print(len(table))")["output"] == "100\n"
    got = http.get(f"/v1/sandboxes/{box}/filesystem/download", params={"path": "means.csv"})
    assert (got.status_code, got.text) == (200, "kind,mass\na,49.0\nb,50.0\n")
    kinds = [event["type"] for event in ok(http.get(f"/v1/sandboxes/{box}/events"))["items"]]
    assert "stopped" in kinds
    ok(http.delete(f"/v1/sandboxes/{box}"), 204)


@pytest.mark.full_tier
def test_script_development_with_a_failing_and_a_mended_script(http: httpx.Client) -> None:
    box = create(http)
    script = """\
        import sys

        def mean(numbers):
            return sum(numbers) / len(numbers)

        print(mean([float(word) for word in sys.argv[1:]]))
        """
    put(http, box, "tool/mean.py", script)
    good = shell(http, box, "python mean.py 1 2 6", cwd="tool")
    assert (good["success"], good["exit_code"], good["output"]) == (True, 0, "3.0\n")
    bad = shell(http, box, "python tool/mean.py", include_code=True, tags="no-args")
    assert (bad["success"], bad["exit_code"]) == (False, 1)
    assert 'tool/mean.py", line 4, in mean' in bad["error"]
    assert "ZeroDivisionError" in bad["error"]
    assert bad["command"] == "python tool/mean.py"

    put(http, box, "tool/mean.py", script.replace("len(numbers)", "len(numbers) if numbers else 0"))
    mended = shell(http, box, "python tool/mean.py", description="the mended one")
    assert (mended["exit_code"], mended["output"]) == (0, "0\n")

    listed = ok(http.get(f"/v1/sandboxes/{box}/filesystem/directories", params={"path": "tool"}))
    assert [(one["name"], one["path"]) for one in listed["entries"]] == [
        ("mean.py", "/workspace/tool/mean.py")
    ]
    history = ok(http.get(f"/v1/sandboxes/{box}/history", params={"exec_type": "shell"}))
    assert [run["success"] for run in history["entries"]] == [True, False, True]  # newest first
    failed = history["entries"][1]["id"]
    assert failed == bad["execution_id"]
    noted = http.patch(f"/v1/sandboxes/{box}/history/{failed}", json={"notes": "no arguments"})
    assert ok(noted)["notes"] == "no arguments"
    tagged = ok(http.get(f"/v1/sandboxes/{box}/history", params={"tags": "no-args,other"}))
    assert [run["id"] for run in tagged["entries"]] == [failed]
    last = ok(http.get(f"/v1/sandboxes/{box}/history/last"))
    assert last["description"] == "the mended one"
    ok(http.delete(f"/v1/sandboxes/{box}"), 204)


@pytest.mark.full_tier
def test_project_set_up_from_a_folder_of_wheels_is_kept_over_a_stop(http: httpx.Client) -> None:
    box = create(http, profile="team")
    put(http, box, "requirements.txt", "greeter==1.2.0\n")
    use = "import sys; sys.path.insert(0, '/workspace/.libs'); import greeter; greeter.greet('Ada')"
    assert "ModuleNotFoundError" in python(http, box, "import greeter")["error"]

    install = "pip install -r requirements.txt --target /workspace/.libs"
    done = shell(http, box, install, timeout=60)
    assert done["exit_code"] == 0, done["error"]
    assert "Successfully installed greeter-1.2.0" in done["output"]
    assert python(http, box, use)["output"] == "'hello Ada'\n"
    planted = shell(http, box, f"touch {WHEELS}/planted.whl")
    assert planted["exit_code"] != 0
    assert "Read-only file system" in planted["error"] or "denied" in planted["error"]

    ok(http.post(f"/v1/sandboxes/{box}/stop"))
    assert python(http, box, use)["output"] == "'hello Ada'\n"
    missing = shell(http, box, "pip install nothing-of-this-name", timeout=60)
    assert missing["exit_code"] != 0  # at once, and not after minutes of retries
    assert missing["execution_time_ms"] < 30_000
    ok(http.delete(f"/v1/sandboxes/{box}"), 204)


def test_create_run_delete_leaves_nothing(http: httpx.Client, served: Service) -> None:
    def kept() -> list[Path]:
        return list((served.data / "sandboxes").rglob("until-the-end.txt"))

    box = create(http, profile="python-default", ttl=600)
    answer = ok(http.get(f"/v1/sandboxes/{box}"))
    assert (answer["status"], answer["profile"]) == ("idle", "python-default")
    assert answer["expires_at"].endswith("Z")
    assert python(http, box, "print('once')\n6 * 7")["output"] == "once\n42\n"
    (container,) = ok(http.get(f"/v1/sandboxes/{box}"))["containers"]
    assert (container["name"], container["healthy"]) == ("kernel", True)
    put(http, box, "until-the-end.txt", "until it is deleted")
    (file,) = kept()
    workspace = file.parents[2]

    ok(http.delete(f"/v1/sandboxes/{box}"), 204)
    ok(http.delete(f"/v1/sandboxes/{box}"), 204)  # it is gone, as was asked
    assert refused(http.get(f"/v1/sandboxes/{box}"), 404) == "not_found"
    exec_ = http.post(f"/v1/sandboxes/{box}/python/exec", json={"code": "1"})
    assert refused(exec_, 404) == "not_found"
    assert box not in [one["id"] for one in ok(http.get("/v1/sandboxes"))["items"]]
    assert refused(http.delete("/v1/sandboxes/sandbox-000000000000"), 404) == "not_found"
    deadline = time.monotonic() + 60  # files are removed after the answer
    while workspace.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not workspace.exists()
    assert not kept()


@pytest.mark.full_tier
def test_long_task_with_extensions_replays_and_refusal_after_expiry(http: httpx.Client) -> None:
    box = create(http, ttl=600)
    ends = [ok(http.get(f"/v1/sandboxes/{box}"))["expires_at"]]
    python(http, box, "1")  # the start of its kernel is not the task
    tick = "print(f'tick {n}', flush=True); time.sleep(0.25)"
    code = f"import time\nfor n in range(8): {tick}"
    path = f"/v1/sandboxes/{box}"
    seen: list[tuple[int, str, Json]] = []
    body = {"code": code, "stream": True}
    with http.stream("POST", f"{path}/python/exec", json=body) as reply:
        for event in events_of(reply):
            seen.append(event)
            if "tick 2" in event[2].get("text", ""):
                break  # the client is cut off, and the run goes on
    assert seen[-1][1] == "stdout"
    run_id = seen[0][2]["run_id"]

    more = {"extend_by": 2}
    key = {"Idempotency-Key": "longer-1"}
    extended = http.post(f"{path}/extend_ttl", json=more, headers=key)
    again = http.post(f"{path}/extend_ttl", json=more, headers=key)
    assert (ok(again), again.content) == (ok(extended), extended.content)
    ends += [ok(extended)["expires_at"], ok(http.get(path))["expires_at"]]
    assert ends[0] < ends[1] == ends[2]  # once longer, not twice
    other = http.post(f"{path}/extend_ttl", json={"extend_by": 3}, headers=key)
    assert refused(other, 409) == "conflict"
    assert other.json()["error"]["details"]["key"] == "longer-1"
    assert refused(http.post(f"{path}/extend_ttl", json={"extend_by": 0}), 400)

    last_seen = {"Last-Event-ID": str(seen[-1][0])}
    with http.stream("GET", f"{path}/runs/{run_id}/events", headers=last_seen) as reply:
        rest = list(events_of(reply))
    numbers = [number for number, _, _ in seen + rest]
    assert numbers == list(range(1, len(numbers) + 1))  # none missing, none twice
    text = "".join(data["text"] for _, kind, data in seen + rest if kind == "stdout")
    assert text == "".join(f"tick {n}\n" for n in range(8))
    assert (rest[-1][1], rest[-1][2]["success"]) == ("run_end", True)

    ok(http.delete(path), 204)
    path = f"/v1/sandboxes/{create(http, ttl=1)}"
    deadline = time.monotonic() + 60
    while ok(http.get(path))["status"] != "expired":
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert refused(http.post(f"{path}/python/exec", json={"code": "1"}), 409) == "sandbox_expired"
    late = http.post(f"{path}/extend_ttl", json={"extend_by": 60})
    assert refused(late, 409) == "sandbox_expired"
    assert set(late.json()["error"]["details"]) >= {"sandbox_id", "expires_at"}
    ok(http.delete(path), 204)


@pytest.mark.full_tier
def test_an_agents_write_run_fix_loop_with_idempotency_keys(http: httpx.Client) -> None:
    """Each step may be sent twice, as by an agent whose answer was lost, and is done once."""

    def sent_twice(path: str, body: Json, key: str) -> Json:
        headers = {"Idempotency-Key": key}
        with ThreadPoolExecutor(2) as both:
            gate = threading.Barrier(2)

            def send(_: int) -> httpx.Response:
                gate.wait()
                return http.post(path, json=body, headers=headers)

            one, two = both.map(send, range(2))
        assert one.status_code == two.status_code
        assert one.status_code in (200, 201), one.text
        assert one.json() == two.json()
        answer = one.json()
        assert isinstance(answer, dict)
        return answer

    made = sent_twice("/v1/sandboxes", {"profile": "default", "ttl": 600}, "task-7-create")
    box = made["id"]
    attempts = [
        ("def add(a, b):\n    return a - b\n", False),
        ("def add(a, b):\n    return a +\n", False),
        ("def add(a, b):\n    return a + b  # mended\n", True),
    ]
    check = "runs = globals().get('runs', 0) + 1\n" + textwrap.dedent("""\
        import importlib, adder
        importlib.invalidate_caches()
        importlib.reload(adder)
        assert adder.add(2, 3) == 5, f'2 + 3 gave {adder.add(2, 3)}'
        print('passed')
        """)
    said = []
    for number, (program, good) in enumerate(attempts):
        put(http, box, "adder.py", program)
        ran = sent_twice(
            f"/v1/sandboxes/{box}/python/exec", {"code": check}, f"task-7-run-{number}"
        )
        assert ran["success"] is good
        said.append(ran["error"] or ran["output"])
    assert "2 + 3 gave -1" in said[0]
    assert "SyntaxError" in said[1]
    assert said[2] == "passed\n"
    assert python(http, box, "print(runs)")["output"] == "3\n"  # and not six
    total = ok(http.get(f"/v1/sandboxes/{box}/history"))["total"]
    assert total == len(attempts) + 1
    other = http.post(
        "/v1/sandboxes", json={"profile": "strict"}, headers={"Idempotency-Key": "task-7-create"}
    )
    assert refused(other, 409) == "conflict"
    bad = http.post("/v1/sandboxes", json={}, headers={"Idempotency-Key": "no spaces, please"})
    assert refused(bad, 409) == "conflict"
    ok(http.delete(f"/v1/sandboxes/{box}"), 204)
