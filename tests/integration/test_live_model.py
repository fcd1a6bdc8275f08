"""scripts/live-model, with a model server in place of a provider."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from agent_calls import calls
from model_server import KEY, Asked, model_server

from sbx.agent.messages import Response
from sbx.agent.models.replay import ReplayModel

ROOT = Path(__file__).resolve().parents[2]
SOLUTIONS = {
    "towns.csv? Write": "open('result.txt', 'w').write('42')",
    "median.py fails": (
        "text = open('median.py').read().replace(' / 2', ' // 2')\n"
        "open('median.py', 'w').write(text)"
    ),
    "bar chart": (
        "import matplotlib.pyplot as plt\nplt.bar('ab', [3, 39])\nplt.savefig('towns.png')"
    ),
    "word TODO": "open('found.txt', 'w').write('notes/7.txt')",
    "config.toml": (
        "text = open('config.toml').read().replace('8000', '9000')\n"
        "open('config.toml', 'w').write(text)"
    ),
}


RECORDINGS = {
    name: ReplayModel.load(ROOT / "examples" / "recordings" / f"{name}.json")._answers
    for name in ("analysis", "suite", "scrape", "files")
}
NAMED_BY = {
    "sales.csv": "analysis",
    "test_cart": "suite",
    "site.txt": "scrape",
    "bookings.csv": "files",
}


def solves(asked: Asked) -> Response:
    """Do the task in one call, and end. Longer tasks have recordings."""
    recording = next((name for text, name in NAMED_BY.items() if text in asked.text), None)
    if recording is not None:
        before = sum(message["role"] == "assistant" for message in asked.messages)
        answer = RECORDINGS[recording][before]
        assert isinstance(answer, Response)
        return answer
    if any(message["role"] == "tool" for message in asked.messages):
        return Response("done")
    code = next(code for text, code in SOLUTIONS.items() if text in asked.text)
    return calls(("run_code", {"code": code}))


def live_model(directory: Path, *words: str, **env: str) -> "subprocess.CompletedProcess[str]":
    clean = {name: value for name, value in os.environ.items() if not name.endswith("API_KEY")}
    return subprocess.run(
        [sys.executable, ROOT / "scripts" / "live_model.py", *words],
        cwd=directory,
        env={**clean, "XDG_CONFIG_HOME": str(directory), **env},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.needs("namespaces")
def test_each_task_is_done_by_a_model_that_solves_it(tmp_path: Path) -> None:
    with model_server(by=solves) as server:
        ended = live_model(tmp_path, BASE_URL=server.openai_url, API_KEY=KEY, MODEL_NAME="scripted")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("ok\n") == 9


@pytest.mark.needs("namespaces")
def test_the_longer_tasks_are_done_in_the_other_dialect(tmp_path: Path) -> None:
    with model_server(by=solves) as server:
        env = {"BASE_URL": server.anthropic_url, "API_KEY": KEY, "MODEL_NAME": "scripted"}
        ended = live_model(tmp_path, *RECORDINGS, MODEL_PROVIDER="anthropic", **env)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("ok\n") == 4


@pytest.mark.needs("namespaces")
def test_a_task_that_was_not_done_is_a_failure(tmp_path: Path) -> None:
    with model_server(by=lambda _: Response("I did it.")) as server:
        env = {"BASE_URL": server.openai_url, "API_KEY": KEY, "MODEL_NAME": "scripted"}
        ended = live_model(tmp_path, "sum", "edit", **env)
    assert ended.returncode == 1
    assert "result.txt" in ended.stdout
    assert "config.toml is" in ended.stdout


def test_without_a_model_it_is_skipped_and_says_so(tmp_path: Path) -> None:
    ended = live_model(tmp_path, MODEL_NAME="")
    assert (ended.returncode, ended.stdout[:42]) == (
        0,
        "SKIPPED: the setting MODEL_NAME is missing",
    )
    assert live_model(tmp_path, "nosuch").returncode == 2
