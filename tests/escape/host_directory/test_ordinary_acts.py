"""Ordinary acts of projects in a directory of the host: which names go to the quarantine, and why.

An act that puts another name there, or no longer puts one there, fails: the name is freed in
`host_executables.DATA`, or gets its reason here.
"""

from pathlib import Path
from typing import NamedTuple

import pytest
from planting import Place, make_place, sandbox

from sbx import Runtime
from tests.tiers import rows

GIT = "git -c user.name=x -c user.email=x@y"
SETUP = 'from setuptools import setup; setup(name="demo", py_modules=["demo"])'
BACKEND = """
def build_wheel(directory, config_settings=None, metadata_directory=None):
    import zipfile
    name = "demo-1-py3-none-any.whl"
    with zipfile.ZipFile(f"{directory}/{name}", "w") as wheel:
        wheel.writestr("demo.pth", __file__)
        about = "Metadata-Version: 2.1\\nName: demo\\nVersion: 1\\n"
        wheel.writestr("demo-1.dist-info/METADATA", about)
        wheel.writestr("demo-1.dist-info/WHEEL", "Wheel-Version: 1.0\\nTag: py3-none-any\\n")
        wheel.writestr("demo-1.dist-info/RECORD", "")
    return name
build_editable = build_wheel
"""
PIP = "python3 -m pip --quiet --disable-pip-version-check"
HEAD_REASON = "git takes a directory with a HEAD for a repository"


class Act(NamedTuple):
    """`script` runs in a new directory. `kept`: the names that go to the quarantine, with their
    reasons. `needs`: a program without which the act is left out. `arrives`: files that the host
    has afterwards."""

    script: str
    kept: dict[str, str] = {}  # noqa: RUF012  # nothing changes it
    arrives: tuple[str, ...] = ()
    needs: str = "sh"
    is_slow: bool = False


ACTS = {
    "git init and a commit": Act(
        f"git init -q; echo 1 > a; git add a; {GIT} commit -qm one",
        {".git": "its configuration names commands"},
        ("a",),
    ),
    "a clone into a subdirectory": Act(
        f"git init -q /tmp/r; {GIT} -C /tmp/r commit -q --allow-empty -m x; git clone -q /tmp/r c",
        {"c/.git": "its configuration names commands"},
    ),
    "git status and a refused commit in an existing repository": Act(
        f"echo 2 > a; git status --short; ! {GIT} commit -qam two 2>/dev/null", {}, ("a",)
    ),
    "an environment": Act(
        "python3 -m venv --without-pip .venv && .venv/bin/python -c 1",
        {".venv": "editors choose its interpreter by its name"},
    ),
    "an environment with another name": Act(
        "python3 -m venv --without-pip tools && tools/bin/python -c 1",
        {"tools/pyvenv.cfg": "editors look for it, and run the interpreter next to it"},
    ),
    "a build of setuptools": Act(
        f"echo '{SETUP}' > setup.py; echo 1 > demo.py; python3 setup.py -q egg_info build sdist",
        {},
        ("demo.egg-info/PKG-INFO", "build/lib/demo.py"),
    ),
    "an editable install and a wheel": Act(
        f"echo '{BACKEND}' > backend.py; printf '[build-system]\\nrequires = []\\nbuild-backend ="
        ' "backend"\\nbackend-path = ["."]\\n\' > pyproject.toml;'
        f" {PIP} install --no-index --no-deps --target /tmp/site -e .; test -e /tmp/site/demo.pth;"
        f" {PIP} wheel --no-index --no-deps -w dist .",
        {},
        ("dist/demo-1-py3-none-any.whl",),
        "pip",
        is_slow=True,
    ),
    "npm init": Act("npm init -y >/dev/null", {}, ("package.json",), "npm", is_slow=True),
    "npm install of a local package": Act(
        "mkdir left; echo '{\"name\": \"left\", \"version\": \"1.0.0\"}' > left/package.json;"
        " npm pack --silent ./left >/dev/null; npm install --silent --offline ./left-1.0.0.tgz;"
        " test -e node_modules/.package-lock.json",
        {},
        ("package-lock.json", "node_modules/.package-lock.json", "node_modules/left/package.json"),
        "npm",
        is_slow=True,
    ),
    "ruff": Act("echo x = 1 > a.py; ruff check -q a.py", {}, (".ruff_cache",), "ruff"),
    "mypy": Act("echo 'x: int = 1' > a.py; mypy a.py", {}, (".mypy_cache",), "mypy", is_slow=True),
    "pytest": Act(
        "echo 'def test(): pass' > test_a.py; python3 -m pytest -q test_a.py",
        {},
        (".pytest_cache/.gitignore", ".pytest_cache/v/cache/nodeids"),
        "pytest",
        is_slow=True,
    ),
    "coverage": Act("echo 1 > a.py; python3 -m coverage run a.py; touch .coverage.host.1"),
    "a workflow": Act(
        "mkdir -p .github/workflows; echo 'on: push' > .github/workflows/ci.yml",
        {},
        (".github/workflows/ci.yml",),
    ),
    "a hook of Copilot": Act(
        "mkdir -p .github/hooks; echo {} > .github/hooks/a.json",
        {".github/hooks": "the coding agent of the user runs them"},
    ),
    "settings of Streamlit": Act(
        "mkdir .streamlit; echo '[theme]' > .streamlit/config.toml",
        {},
        (".streamlit/config.toml",),
    ),
    "settings of VS Code": Act(
        "mkdir .vscode; echo {} > .vscode/settings.json", {".vscode": "tasks run at opening"}
    ),
    "sed -i": Act("echo 1 > a; sed -i s/1/2/ a; grep -q 2 a", {}, ("a",)),
    "vim": Act(
        "echo 1 > a; echo set backup > /tmp/v; vim.tiny -u /tmp/v -es -c 'normal ox' -c wq a;"
        " grep -q x a; touch .a.swp .a.un~",
        {},
        ("a", ".a.swp"),
        "vim.tiny",
    ),
    "the lock of emacs": Act("touch '.#a' '.~lock.a.odt#'", {}, (".#a",)),
    "an atomic save by a hidden name": Act(
        "echo 1 > a; chmod 600 a; cp -p a .a.Xy12Ab; echo 2 >> .a.Xy12Ab; mv .a.Xy12Ab a;"
        " grep -q 2 a; echo 3 > .b.new; ln .b.new b; rm .b.new; grep -q 3 b",
        {},
        ("a", "b"),
    ),
    "hidden files that come and go": Act(
        "python3 -c 'import os; [(os.close(os.open(f\".a{i}\", os.O_CREAT)), os.unlink(f\".a{i}\"))"
        " for i in range(1100)]'"
    ),
    "sqlite": Act(
        "python3 -c 'import sqlite3; c = sqlite3.connect(\"a.db\");"
        ' c.execute("pragma journal_mode = wal"); c.execute("create table t (x)"); c.commit()\'',
        {},
        ("a.db",),
    ),
    "a notebook": Act(
        "echo '{}' > .~a.ipynb; mv .~a.ipynb a.ipynb; mkdir .ipynb_checkpoints .virtual_documents;"
        " cp a.ipynb .ipynb_checkpoints/a-checkpoint.ipynb",
        {},
        ("a.ipynb", ".ipynb_checkpoints/a-checkpoint.ipynb"),
    ),
    "cargo build": Act(
        "mkdir -p target/debug/.fingerprint; echo {} > target/.rustc_info.json;"
        " touch target/debug/.cargo-lock Cargo.lock",
        {},
        ("target/debug/.cargo-lock", "target/.rustc_info.json"),
    ),
    "cmake and ninja": Act(
        "mkdir -p cmake-build-debug/.cmake build .deps; touch cmake-build-debug/.cmake/a"
        " build/.ninja_log .deps/a.Po",
        {},
        ("build/.ninja_log", ".deps/a.Po"),
    ),
    "make": Act("printf 'a:\\n\\techo 1 > a\\n' > Makefile; make -s", {}, ("a",), "make"),
    "an archive of a project": Act(
        "mkdir -p /tmp/p; cd /tmp/p; touch a .gitignore .gitattributes .editorconfig .dockerignore"
        " .npmignore .env.example .nojekyll ._a .DS_Store .readthedocs.yaml .prettierrc .npmrc;"
        " tar cf ../p.tar .; cd -; tar xf /tmp/p.tar",
        {
            ".prettierrc": "plugins of prettier, which editors start",
            ".npmrc": "options of node for npm",
        },
        ("a", ".gitignore", ".env.example", ".DS_Store", "._a", ".readthedocs.yaml"),
    ),
    "unzip": Act(
        "cd /tmp/p; python3 -m zipfile -c ../p.zip a .gitignore .npmrc; cd -;"
        " python3 -m zipfile -e /tmp/p.zip .",
        {".npmrc": "options of node for npm"},
        ("a", ".gitignore"),
    ),
    "an archive with a name that is an option": Act(
        "mkdir -p /tmp/o; cd /tmp/o; touch -- --checkpoint=1; cd -; tar cf /tmp/o.tar -C /tmp/o .;"
        " tar xf /tmp/o.tar",
        {"--checkpoint=1": "`tar cf x.tar *` of the user takes it for an option"},
    ),
    "tsc and next build": Act(
        "echo {} > .tsbuildinfo; mkdir -p .next/cache/.rscinfo; touch .next/-chunk.js", {},
        (".tsbuildinfo", ".next/cache/.rscinfo", ".next/-chunk.js"),
    ),
    "sphinx": Act(
        "mkdir -p docs/_build/.doctrees docs/html; touch docs/html/.buildinfo", {},
        ("docs/_build/.doctrees",),
    ),
    "a download of a data set": Act(
        "mkdir -p .cache/huggingface/download; echo x > .cache/huggingface/download/a.incomplete;"
        " mv .cache/huggingface/download/a.incomplete data.bin; touch .cache/huggingface/.gitignore"
        " .cache/huggingface/.locks; echo 1 > .data.csv.part; mv .data.csv.part data.csv",
        {},
        ("data.bin", "data.csv", ".cache/huggingface/.locks"),
    ),
    "hypothesis and black": Act(
        "mkdir -p .hypothesis/examples/.x .black-cache; touch .black-cache/a .eslintcache", {},
        (".hypothesis/examples/.x", ".eslintcache"),
    ),
    "settings of the project's own code": Act(
        "echo A=1 > .env; echo A= > .env.example; touch .env.local",
        {
            ".env": "editors start interpreters with its PYTHONPATH",
            ".env.local": "programs that read .env read it, too",
        },
        (".env.example",),
    ),
    "tox, nox and gradle": Act(
        "mkdir .tox .nox .gradle",
        {
            ".tox": "environments with interpreters, which editors find",
            ".nox": "environments with interpreters, which editors find",
            ".gradle": "config.properties names a Java",
        },
    ),
    "pre-commit and husky": Act(
        "touch .pre-commit-config.yaml; mkdir .husky",
        {".pre-commit-config.yaml": "hooks of git", ".husky": "hooks of git"},
    ),
    "an analysis in R and a site": Act("touch .Rhistory .RData .babelrc", {
        ".Rhistory": "R reads it at its start", ".RData": "R loads it at its start",
        ".babelrc": "plugins are code",
    }),
    "a bare repository under the name of git": Act(
        "git init -q --bare b.git", {"b.git": HEAD_REASON}
    ),
}  # fmt: skip


@pytest.fixture
def place(own_temporary_directory: Path, request: pytest.FixtureRequest) -> Place:
    return make_place(own_temporary_directory / f"acts-{abs(hash(request.node.name))}")


@pytest.mark.parametrize("is_slow", rows([False, True], [False]))
async def test_ordinary_acts_send_only_these_names_to_the_quarantine(
    runtime: Runtime, place: Place, is_slow: bool
) -> None:
    """One sandbox for all acts: each in its directory, one after the other."""
    acts = {name: act for name, act in ACTS.items() if act.is_slow == is_slow}
    directories = {name: f"act{number}" for number, name in enumerate(acts)}
    for name, directory in directories.items():
        place.write(f"{directory}/.keep", "")
        if "existing repository" in name:
            place.user("git", "init", "-q", directory)
    strange = {}
    async with sandbox(runtime, place) as box:
        for name, act in acts.items():
            top = place.directory / directories[name]
            run = await box.shell(
                f"command -v {act.needs} >/dev/null || exit 77; cd {top.name}; set -e; {act.script}"
            )
            kept = {item.path.partition("/")[2] for item in run.quarantined}
            missing = [path for path in act.arrives if not (top / path).exists()]
            if run.exit_code != 77 and (run.exit_code or kept != {*act.kept} or missing):
                strange[name] = (run.exit_code, kept ^ {*act.kept}, missing, run.text[-300:])
    assert strange == {}
