"""The alert rules and the dashboard, in a real Prometheus that scrapes a real service."""

import asyncio
import json
import re
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from command import in_process
from live_app import Served, live
from places import short_directory

from sbx.telemetry import metrics
from sbx.telemetry.starts import StartCounts
from tests.debian_tools import debian_tool

_QUIET = Path(__file__).parent / "alert_rules_test.yml"
_DEADLINE_S = 60.0
# The series of each alert, at one value per minute, and the minute at which it fires.
FIRING: dict[str, tuple[dict[str, str], int]] = {
    "SbxDown": ({'up{job="sbx"}': "1 0x9"}, 3),
    "SbxHoneytokenUsed": ({'sbx_kills_total{cause="honeytoken"}': "0x4 1x9"}, 6),
    "SbxRecordsLost": ({"sbx_records_lost_total": "0x4 2x9"}, 6),
    "SbxRecordsWaiting": ({"sbx_unrecorded": "0 4x20"}, 9),
    "SbxDiskFull": ({"sbx_disk_reserve_bytes": "16777216x3 8388608x20"}, 9),
    "SbxStartsFail": ({'sbx_kernel_start_failures_total{path="pool"}': "0+6x40"}, 30),
    "SbxStartsSlow": (
        {
            'sbx_acquire_seconds_bucket{le="2"}': "0+8x40",
            'sbx_acquire_seconds_bucket{le="5"}': "0+10x40",
            'sbx_acquire_seconds_bucket{le="+Inf"}': "0+10x40",
        },
        30,
    ),
    "SbxQueueFull": ({"sbx_queue_refused_total": "0+1x40"}, 30),
    "SbxMemoryPressure": ({'sbx_kernel_stops_total{cause="memory_pressure"}': "0x4 1x9"}, 6),
    "SbxErrors": (
        {
            'sbx_http_request_seconds_count{status="200"}': "0+90x40",
            'sbx_http_request_seconds_count{status="503"}': "0+10x40",
        },
        30,
    ),
    "SbxLoopStalls": (
        {
            'sbx_loop_lag_seconds_bucket{le="0.25"}': "0+599x20",
            "sbx_loop_lag_seconds_count": "0+600x20",
        },
        9,
    ),
}


def rules() -> str:
    ended = in_process("metrics", "rules")
    assert ended.returncode == 0
    return ended.stdout


def queries() -> dict[str, list[str]]:
    """The queries of the dashboard, by the title of their panel."""
    board = json.loads(in_process("metrics", "dashboard").stdout)
    return {
        panel["title"]: [target["expr"] for target in panel["targets"]] for panel in board["panels"]
    }


def promtool(*words: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    program = debian_tool("promtool")
    assert program is not None
    return subprocess.run(
        [program, *words], cwd=cwd, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.needs("promtool")
def test_promtool_accepts_the_rules(tmp_path: Path) -> None:
    (tmp_path / "rules.yml").write_text(rules())
    ended = promtool("check", "rules", "rules.yml", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert f"{len(FIRING)} rules found" in ended.stdout


@pytest.mark.needs("promtool")
def test_no_alert_fires_in_a_quiet_service(tmp_path: Path) -> None:
    (tmp_path / "rules.yml").write_text(rules())
    (tmp_path / "test.yml").write_text(_QUIET.read_text())
    ended = promtool("test", "rules", "test.yml", cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (test,) = yaml.safe_load(_QUIET.read_text())["tests"]
    assert {case["alertname"] for case in test["alert_rule_test"]} == FIRING.keys()


@pytest.mark.needs("promtool")
@pytest.mark.parametrize("name", FIRING)
def test_each_alert_fires_on_its_series(name: str, tmp_path: Path) -> None:
    text = rules()
    (tmp_path / "rules.yml").write_text(text)
    series, minute = FIRING[name]
    rule = next(
        each for each in yaml.safe_load(text)["groups"][0]["rules"] if each["alert"] == name
    )
    expected = {
        "eval_time": f"{minute}m",
        "alertname": name,
        "exp_alerts": [{"exp_labels": labels_of(name, rule), "exp_annotations": texts_of(rule)}],
    }
    test = {
        "interval": "1m",
        "input_series": [
            {"series": with_instance(one), "values": values} for one, values in series.items()
        ],
        "alert_rule_test": [expected],
    }
    document = {"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": [test]}
    (tmp_path / "test.yml").write_text(yaml.safe_dump(document))
    ended = promtool("test", "rules", "test.yml", cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def with_instance(series: str) -> str:
    name, _, labels = series.partition("{")
    return f'{name}{{instance="one"{"," if labels else ""}{labels or "}"}'


def labels_of(name: str, rule: dict[str, Any]) -> dict[str, str]:
    """The labels of an alert: those of its rule, and those that its expression keeps."""
    kept = {
        "SbxDown": {"job": "sbx"},
        "SbxHoneytokenUsed": {"cause": "honeytoken"},
        "SbxStartsFail": {"path": "pool"},
        "SbxMemoryPressure": {"cause": "memory_pressure"},
    }
    return {"instance": "one", **rule["labels"], **kept.get(name, {})}


def texts_of(rule: dict[str, Any]) -> dict[str, str]:
    def shown(text: str) -> str:
        return text.replace("{{ $labels.instance }}", "one").replace("{{ $labels.path }}", "pool")

    return {name: shown(text) for name, text in rule["annotations"].items()}


@pytest.fixture
def counting() -> Iterator[None]:
    """Count before the service starts, which then sets its gauges."""
    metrics.enable()
    yield
    metrics.disable()


@pytest.mark.usefixtures("counting")
async def test_rules_and_queries_name_only_metrics_that_the_service_has() -> None:
    with short_directory() as directory:
        async with live(directory) as service, service.client() as client:
            await client.post("/v1/sandboxes", json={})
            everything_happens()
            text = (await client.get("/metrics")).text
    exposed = set(re.findall(r"(?m)^(\w+)(?:\{| )", text))
    used = {
        name
        for text in [rules(), *(query for each in queries().values() for query in each)]
        for name in re.findall(r"\b((?:sbx|process)_\w+)", text)
    }
    assert len(used) > 25
    assert used <= exposed


@pytest.mark.needs("prometheus")
@pytest.mark.usefixtures("counting")
async def test_each_query_of_the_dashboard_has_a_result_in_prometheus(tmp_path: Path) -> None:
    with short_directory() as directory:
        async with live(directory) as service, service.client() as client:
            reply = await client.post("/v1/sandboxes", json={})
            run = {"code": "print(6*7)"}
            url = f"/v1/sandboxes/{reply.json()['id']}/python/exec"
            assert (await client.post(url, json=run)).json()["success"]
            everything_happens()
            async with scraped(service) as target:
                with prometheus(tmp_path, target) as address:
                    await every_query_answers(address)


async def every_query_answers(address: str) -> None:
    """A rate needs two scrapes, so each query is asked until it has a result."""
    open_queries = {query for each in queries().values() for query in each}
    async with httpx.AsyncClient(base_url=address) as client, asyncio.timeout(_DEADLINE_S):
        while open_queries:
            everything_happens()
            for query in sorted(open_queries):
                filled = query.replace("$__rate_interval", "1m").replace("$instance", ".*")
                try:
                    reply = await client.get("/api/v1/query", params={"query": filled})
                except httpx.TransportError:  # it has not begun to listen
                    break
                if reply.status_code == 503:  # it is not ready
                    break
                answer = reply.json()
                assert answer["status"] == "success", (query, answer)
                if answer["data"]["result"]:
                    open_queries.discard(query)
            await asyncio.sleep(0.2)


def everything_happens() -> None:
    """Count one of each kind, as the parts of a service do."""
    metrics.ran("python", "killed", "default", 0.2, cause="memory", path="pool")
    metrics.acquired("pool", 0.001)
    metrics.kernel_stopped("idle")
    metrics.queue_refused()
    metrics.agent_ran("done")
    metrics.agent_stepped()
    metrics.approval_decided("approved")
    with metrics.uploading() as upload:
        upload.size = 10
    metrics.record_lost(0)
    metrics.requested("GET", "/v1/sandboxes", 200, 0.01)
    starts = StartCounts().with_served("pool").with_failed("pool", "why")
    metrics.watch(starts=lambda: starts)


@asynccontextmanager
async def scraped(service: Served) -> AsyncIterator[str]:
    """The metrics of a service on TCP: Prometheus does not speak to Unix sockets."""

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"GET /metrics ")
        request = b"GET /metrics HTTP/1.1\r\nhost: sbx\r\nconnection: close\r\n\r\n"
        writer.write(await service.raw(request))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(forward, "127.0.0.1", 0)
    async with server:
        yield "{}:{}".format(*server.sockets[0].getsockname())


@contextmanager
def prometheus(directory: Path, target: str) -> Iterator[str]:
    """Run one that scrapes `target` each second and has our rules. Yield its address."""
    (directory / "rules.yml").write_text(rules())
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yml"],
        "scrape_configs": [{"job_name": "sbx", "static_configs": [{"targets": [target]}]}],
    }
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = "{}:{}".format(*free.getsockname())
    program = debian_tool("prometheus")
    assert program is not None
    options = (
        *("--config.file", "prometheus.yml", "--storage.tsdb.path", "data"),
        *("--web.listen-address", address, "--log.level", "error"),
    )
    process = subprocess.Popen([program, *options], cwd=directory)
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(30)
