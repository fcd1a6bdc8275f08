"""The core alone: a fresh environment that has the packages of `pip install sbx`, and no extra."""

import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from shutil import copy2

import pytest
from command import environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from serving import Service

from tests.tiers import rows

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
README = (ROOT / "README.md").read_text()
EXAMPLE = README.partition("```python\n")[2].partition("```")[0]
POLICIES = sorted(path.stem for path in (ROOT / "policies").glob("*.toml"))

pytestmark = pytest.mark.needs("namespaces", "memory")


def packages_of_the_core() -> Iterator[metadata.Distribution]:
    """Yield each package that pip would install, as it is installed here."""
    seen = set()
    waiting = [(Requirement(line), "") for line in PROJECT["dependencies"]]
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        for name in ("", *requirement.extras):
            if (key := (canonicalize_name(requirement.name), name)) not in seen:
                seen.add(key)
                package = metadata.distribution(requirement.name)
                waiting += [(Requirement(line), name) for line in package.requires or ()]
                if not name:
                    yield package


def link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source.resolve(), target)
    except OSError:  # another file system
        copy2(source, target)


@pytest.fixture(scope="module")
def python(own_temporary_directory: Path) -> Path:
    """Install the core in a fresh environment, without pip and without a package index."""
    top = own_temporary_directory / "core"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", top], check=True)
    (site,) = top.glob("lib/python*/site-packages")
    for package in (metadata.distribution("sbx-runtime"), *packages_of_the_core()):
        for file in package.files or ():
            path = Path(str(file.locate()))
            if file.suffix != ".pth" and ".." not in file.parts and path.is_file():
                link(path, site / file)
    for directory, target in (("sbx", "sbx"), ("policies", "sbx/policies")):
        for path in (ROOT / directory).rglob("*"):
            if path.is_file():
                link(path, site / target / path.relative_to(ROOT / directory))
    return top / "bin" / "python"


def run(
    python: Path, *words: str, cwd: Path, env: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    variables = environment(**(env or {}))
    del variables["PYTHONPATH"]
    return subprocess.run(
        [python, *words],
        cwd=cwd,
        env=variables,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_first_example_of_the_readme_runs_in_an_empty_directory(
    python: Path, tmp_path: Path
) -> None:
    """The example read a file that only this repository has."""
    results = [line.removeprefix("# ") for line in EXAMPLE.splitlines() if line.startswith("# ")]
    assert len(results) == EXAMPLE.count("print(") == 3
    done = run(python, "-c", EXAMPLE, cwd=tmp_path)
    assert (done.returncode, done.stdout.splitlines(), done.stderr) == (0, results, "")


def test_first_screen_of_the_readme_names_both_commands() -> None:
    screen = README.splitlines()[:40]
    for command in ("./scripts/run", "./scripts/test"):
        assert any(line.strip().startswith(command) for line in screen)


@pytest.mark.full_tier
def test_each_shipped_policy_runs_code(python: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from sbx import Sandbox\n"
        "for name in sys.argv[1:]: print(name, Sandbox(policy=name).run('6 * 7').result)"
    )
    done = run(python, "-c", code, *POLICIES, cwd=tmp_path)
    assert done.stdout.splitlines() == [f"{name} 42" for name in POLICIES], done.stderr


def test_sbx_run(python: Path, tmp_path: Path) -> None:
    done = run(python, "-m", "sbx", "run", "-c", "6 * 7", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "42\n", "")


def test_sandbox_in_a_service(python: Path, service: Service, tmp_path: Path) -> None:
    code = (
        "import sys; from sbx import Sandbox\n"
        "print(Sandbox(connect=sys.argv[1]).run('6 * 7').result)"
    )
    done = run(python, "-c", code, str(service.socket), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "42\n"), done.stderr


def test_sbx_config_shows_the_settings(python: Path, tmp_path: Path) -> None:
    done = run(python, "-m", "sbx", "config", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "drain_timeout" in done.stdout


@pytest.mark.parametrize(
    ("words", "extra"),
    rows(
        [
            (("serve",), "serve"),
            (("agent", "hello"), "agent"),
            (("chat",), "agent"),
            (("mcp",), "mcp"),
        ],
        ci_tier=[(("serve",), "serve"), (("chat",), "agent")],
    ),
)
def test_missing_extra_is_one_sentence(
    words: tuple[str, ...], extra: str, python: Path, tmp_path: Path
) -> None:
    model = {"SBX_AGENT_MODEL_NAME": "m", "SBX_AGENT_API_KEY": "k"}
    done = run(python, "-m", "sbx", *words, cwd=tmp_path, env=model)
    feature = "a model of openai" if extra == "agent" else f"sbx {words[0]}"
    sentence = f"{feature} needs packages that are not installed"
    assert done.stderr == f"error: {sentence}; run: pip install 'sbx-runtime[{extra}]'\n"
    assert (done.returncode, done.stdout) == (3, "")
