"""Which installer is taken, so that packages come from where whoever runs sbx configured it."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from sbx.environments.installers import Choice, choose
from sbx.environments.pythons import Python
from sbx.environments.requirements import locked
from sbx.environments.step_runner import StepOutput, StepRunner
from sbx.errors import Unavailable

_PYTHON = Python((3, 12, 1), "/opt/python/bin/python3", "cpython", False, True, "24.0")


class Scripted(StepRunner):
    """Answers as uv and pip would, and starts nothing."""

    pip_config: str = ""

    async def run(self, *words: str, keep: bool = False) -> StepOutput:
        if "--version" in words:
            return StepOutput(0, (), b"uv 0.9.1 (x86_64)\n")
        assert words[-2:] == ("config", "list")
        return StepOutput(0, (), self.pip_config.encode())


def _steps(pip_config: str = "") -> Scripted:
    return Scripted(lambda line: None, 0.0, pip_config=pip_config)


@pytest.fixture(autouse=True)
def no_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("UV_", "PIP_")):
            monkeypatch.delenv(name)


@pytest.fixture
def uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "uv").write_text("#!/bin/sh\n")
    (tmp_path / "uv").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.usefixtures("uv")
@pytest.mark.parametrize(
    ("choice", "pip_config", "found"),
    [
        ("auto", "", "uv 0.9.1"),
        ("auto", "global.timeout='60'\n", "uv 0.9.1"),
        ("auto", "global.index-url='https://inside.example/simple'\n", "pip 24.0"),
        ("auto", ":env:.find-links='/wheels'\n", "pip 24.0"),
        ("uv", "global.index-url='https://inside.example/simple'\n", "uv 0.9.1"),
        ("pip", "", "pip 24.0"),
    ],
)
async def test_uv_is_taken_where_it_would_not_pass_over_what_pip_is_configured_to_use(
    choice: Choice, pip_config: str, found: str
) -> None:
    assert (await choose(choice, _PYTHON, _steps(pip_config), build=False)).text == found


@pytest.mark.usefixtures("uv")
async def test_uv_s_own_index_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://inside.example/simple")
    config = "global.index-url='https://other.example/simple'\n"
    assert (await choose("auto", _PYTHON, _steps(config), build=False)).text == "uv 0.9.1"


async def test_without_uv_or_a_new_pip_there_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    old = Python((3, 12, 1), "/opt/python/bin/python3", "cpython", False, True, "20.1")
    with pytest.raises(Unavailable) as raised:
        await choose("auto", old, _steps(), build=False)
    assert raised.value.code == "installer_unavailable"


async def test_a_uv_of_the_working_directory_is_none(
    monkeypatch: pytest.MonkeyPatch, uv: None, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", ".")
    monkeypatch.setitem(sys.modules, "uv", None)  # the package of the extra `env`
    assert (await choose("auto", _PYTHON, _steps(), build=False)).text == "pip 24.0"


def test_the_lock_of_uv_is_read() -> None:
    text = f"""\
six==1.17.0 \\
    --hash=sha256:{"ab" * 32} \\
    --hash=sha256:{"cd" * 32}
tiny @ file:///wheels/tiny-1.0-py3-none-any.whl \\
    --hash=sha256:{"ef" * 32}
"""
    assert [(one.name, len(one.hashes)) for one in locked(text)] == [("six", 2), ("tiny", 1)]
