"""What is counted, and that nothing is until a service turns it on."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sbx.telemetry import metrics
from sbx.telemetry.starts import StartCounts


@pytest.fixture
def counting() -> Iterator[None]:
    metrics.disable()
    metrics.enable()
    yield
    metrics.disable()


def metric_values() -> dict[str, float]:
    lines = (line.rpartition(" ") for line in metrics.exposition()[0].decode().splitlines())
    return {name: float(value) for name, _, value in lines if not name.startswith("#")}


def test_nothing_is_counted_or_imported_before_it_is_turned_on() -> None:
    script = """
import sys
from sbx.telemetry import metrics
metrics.acquired("pool", 0.1), metrics.ran("python", "ok", "default", 0.1), metrics.queued()
metrics.watch(kernels=lambda: {("default",): 1})
print(metrics.exposition()[0], [m for m in sys.modules if "prometheus" in m])
"""
    said = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert said.stdout.strip() == "b'' []"


@pytest.mark.usefixtures("counting")
def test_everything_the_runtime_tells_is_counted_by_its_labels() -> None:
    metrics.acquired("pool", 0.0015)
    metrics.ran("python", "ok", "default", 0.3, path="pool")
    metrics.ran("shell", "killed", "strict", 2.0, cause="memory")
    metrics.queued()
    metrics.queued()
    metrics.unqueued()
    metrics.queue_refused()
    metrics.kernel_stopped("idle")
    metrics.upload_began()
    metrics.upload_ended(500)
    metrics.upload_began()
    metrics.upload_ended(None)
    metrics.upload_began()
    metrics.agent_stepped()
    metrics.agent_stepped()
    metrics.agent_ran("done")
    metrics.approval_decided("timeout")
    metrics.requested("GET", "/v1/sandboxes/{id}", 200, 0.001)
    found = metric_values()
    assert found['sbx_acquire_seconds_bucket{le="0.002",path="pool"}'] == 1
    assert found['sbx_run_seconds_count{kind="python",path="pool"}'] == 1
    assert found['sbx_runs_total{kind="shell",policy="strict",status="killed"}'] == 1
    assert found['sbx_kills_total{cause="memory"}'] == 1
    assert found["sbx_queue_waiting"] == 1
    assert found["sbx_queue_refused_total"] == 1
    assert found['sbx_kernel_stops_total{cause="idle"}'] == 1
    assert found["sbx_uploads_active"] == 1
    assert found['sbx_uploads_total{outcome="failed"}'] == 1
    assert found["sbx_upload_bytes_total"] == 500
    assert found["sbx_agent_steps_total"] == 2
    assert found['sbx_agent_runs_total{reason="done"}'] == 1
    assert found['sbx_approvals_total{outcome="timeout"}'] == 1
    name = 'sbx_http_request_seconds_count{method="GET",route="/v1/sandboxes/{id}",status="200"}'
    assert found[name] == 1


@pytest.mark.usefixtures("counting")
def test_gauges_are_asked_at_each_look_and_one_that_fails_is_left_out() -> None:
    live: dict[tuple[str, ...], float] = {("default",): 1.0}

    def fails() -> float:
        raise OSError("gone")

    boxes: metrics.Labelled = {("ready", "default"): 7, ("idle", "strict"): 2}
    metrics.watch(kernels=lambda: live, idle=fails, sandboxes=lambda: boxes)
    metrics.watch(starts=lambda: StartCounts().with_served("fork").with_failed("pool", "why"))
    assert metric_values()['sbx_kernels{policy="default"}'] == 1
    live["default",] = 3
    found = metric_values()
    assert found['sbx_kernels{policy="default"}'] == 3
    assert found['sbx_sandboxes{policy="default",status="ready"}'] == 7
    assert found['sbx_sandboxes{policy="strict",status="idle"}'] == 2
    assert "sbx_kernels_idle" not in found
    assert found['sbx_kernel_starts_total{path="fork"}'] == 1
    assert found['sbx_kernel_start_failures_total{path="pool"}'] == 1


@pytest.mark.usefixtures("counting")
def test_a_second_turning_on_forgets_nothing() -> None:
    metrics.queue_refused()
    metrics.enable()
    assert metric_values()["sbx_queue_refused_total"] == 1
