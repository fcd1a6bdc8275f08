"""Every code block of the README and docs/ is executed, or at least parsed.

    python    executed; a block with prompts prints what it shows
    console   each command is executed in bash, in one directory and with one service, and prints
              what the block shows. NOT_RUN lists the commands that are only parsed.
    toml      a valid policy; in agents.md a valid profile, in tools.md a source of tools, in
              tasks.md a template of a task
    json      valid JSON

Numbers, ids and lengths of lines may differ. `…` stands for any text. A block without a language is
a diagram or an output. docs/operations.md has its own test.
"""

import ast
import asyncio
import contextlib
import doctest
import fnmatch
import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import serving
from command import environment

import sbx.agent
from sbx import Sandbox
from sbx.agent import ReplayModel
from sbx.agent.external.source import read_source
from sbx.agent.profile import NO_PROFILE, read_profile
from sbx.agent.task import read_task
from sbx.cli.app import _parser
from sbx.policy import check

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
END = "end of the output"
NOT_RUN = (
    r"sbx (serve|config|logs --follow)",  # until Ctrl-C; the service of this test is another one
    r"sbx (agent|chat|shell)",  # needs a model, or a terminal
    r"sbx runs",  # needs an agent at work: test_active_runs.py
    r"sbx tool",  # needs a server of others: test_cli_tool.py
    r"sbx task",  # needs a model: test_cli_task.py
    r"sbx policy learn",  # needs a server of others: test_cli_policy_learn.py
    r"sbx env create|sbx env show",  # needs a package index
    r"sbx kernelspec|jupyter|cat look.py",  # writes to the user's directory of Jupyter
    r"sbx doctor",  # tests/escape runs the attacks; test_cli_doctor.py the check
    r"sbx audit",  # test_audit.py; the log of the service of this test is elsewhere
    r"sbx run sum.ts",  # depends on the version of Node.js
    r"sbx cp -r \$BOX:out",  # tests/integration/test_cli_service_sandboxes.py has such a directory
)

pytestmark = pytest.mark.needs("namespaces", "memory")


class Block(NamedTuple):
    page: str
    number: int
    language: str
    text: str

    @property
    def id(self) -> str:
        return f"{self.page}-{self.number}"


class Command(NamedTuple):
    line: str
    output: str


def blocks() -> Iterator[Block]:
    for page in PAGES:
        if page.stem == "operations":
            continue
        for number, match in enumerate(
            re.finditer(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
        ):
            yield Block(page.stem, number, match[1], match[2])


def of(*languages: str) -> "pytest.MarkDecorator":
    chosen = [pytest.param(block, id=block.id) for block in blocks() if block.language in languages]
    return pytest.mark.parametrize("block", chosen)


def commands(text: str) -> Iterator[Command]:
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        line, _, output = part.partition("\n")
        yield Command(line, output)


def test_every_language_of_a_block_has_a_test() -> None:
    assert {block.language for block in blocks()} == {"", "python", "console", "toml", "json"}


@of("toml")
def test_policy_is_valid(block: Block, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(block.text)
    if block.page == "agents":
        assert read_profile(file) != NO_PROFILE
    elif block.page == "tools":
        assert read_source(file).kind
    elif block.page == "tasks":
        task = read_task(file)
        assert task.prompt or task.step
    else:
        assert check(file) == []


@of("json")
def test_json_is_valid(block: Block) -> None:
    json.loads(block.text)


# -- Python ----------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def closed_after() -> Iterator[None]:
    yield
    sbx.close()


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory of a block, with the files that the blocks name."""
    data = pytest.importorskip("palmerpenguins", reason="needs the extra: sbx[demo]")
    monkeypatch.chdir(tmp_path)
    shutil.copy(Path(data.__file__).parent / "data" / "penguins.csv", tmp_path)
    for name, text in {
        "analysis.py": "print('analysed')\n",
        "report.py": "import sys; print(sys.argv[1:])\n",
        "data.csv": "1,2\n",
        "in.csv": "3,4\n",
        "hello.mjs": "console.log(process.version, process.argv[2])\n",
        "mine.toml": 'schema = 1\nextends = "default"\n[limits]\nmemory_mx = "1GiB"\n',
    }.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.usefixtures("directory")
@of("python")
def test_python_is_executed(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    with Sandbox() as box:
        box.files.write("src/app.py", "import os\n# TODO: one\nx = 1234\n")
        names = {"Sandbox": Sandbox, "box": box}
        if ">>>" not in block.text:
            answers = ["The Gentoo.", "On Biscoe."]
            monkeypatch.setattr(sbx.agent, "make_model", lambda _: ReplayModel(answers), False)
            flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            result = eval(compile(block.text, block.id, "exec", flags), names)
            if inspect.iscoroutine(result):
                asyncio.run(result)
            return
        if "javascript" in block.text and shutil.which("node") is None:
            pytest.skip("needs node")
        test = doctest.DocTestParser().get_doctest(block.text, names, block.id, None, None)
        flags = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
        failures: list[str] = []
        doctest.DocTestRunner(optionflags=flags).run(test, out=failures.append)
        assert not failures, "\n".join(failures)


# -- the console -----------------------------------------------------------------------------------


@of("console")
def test_commands_of_sbx_exist(block: Block) -> None:
    for command in commands(block.text):
        for words in calls(command.line):
            parser: Any = _parser(words[1])
            for word in words[1:]:  # a group has commands
                if getattr(parser, "commands", None) is None:
                    break
                parser = parser.commands.get(word) or parser.commands.get(default_of(parser))
                assert parser is not None, f"{word} in {command.line}"


def default_of(group: Any) -> str:
    """Return the command of a group that needs no name, as in `sbx agent TASK`."""
    return str(getattr(group, "default", ""))


def calls(line: str) -> Iterator[list[str]]:
    """Yield the words of each call of sbx in a line of bash."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.commenters = "#"
    words: list[str] = []
    for word in [*lexer, ";"]:
        if word not in (";", "|", "&&"):
            words.append(word)
            continue
        if words[0] == "sbx":
            yield words
        words = []


class Console:
    """A bash that executes the commands of a block, in which the ids of the docs are real ones."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self._ids: dict[str, str] = {}

    def run(self, command: Command) -> str:
        line = command.line
        for shown, real in self._ids.items():
            line = line.replace(shown, real)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{line}\necho; echo {END}\n")
        self._process.stdin.flush()
        lines: list[str] = []
        while (text := self._process.stdout.readline()) != f"{END}\n":
            assert text, f"bash has ended after {line}"
            lines.append(text)
        output = "".join(lines).removesuffix("\n")
        kind = r"\b(?:sandbox|cmd)-[0-9a-f]{12}\b"
        self._ids |= dict(
            zip(re.findall(kind, command.output), re.findall(kind, output), strict=False)
        )
        return output


def shape(text: str) -> str:
    """Return a text without what differs from one run to the next: numbers, ids, white space."""
    text = re.sub(r"\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", "", text)
    text = re.sub(r"\b(?:[0-9a-f]{12}|[0-9a-f]{16})\b", "", text)
    text = re.sub(r"\d{4}-\d\d-\d\dT[\d:.]+Z", "", text)
    return re.sub(r"\s+|─+", "", re.sub(r"\d+(?:\.\d+)?", "0", text))


@pytest.fixture
def console(directory: Path, service: serving.Service) -> Iterator[Console]:
    service.empty()
    (directory / "lab").mkdir()
    if os.geteuid() == 0:
        os.chown(directory / "lab", 4242, 4242)
    (directory / "bin").mkdir()
    (directory / "bin" / "sbx").write_text(f'#!/bin/sh\nexec {sys.executable} -m sbx "$@"\n')
    (directory / "bin" / "sbx").chmod(0o755)
    (directory / "run" / "sbx").mkdir(parents=True)
    (directory / "run" / "sbx" / "sbx.sock").symlink_to(service.socket)
    env = environment(
        PATH=f"{directory}/bin:{os.environ['PATH']}",
        SBX_SOCKET=str(service.socket),
        HOME=str(directory),
        S=str(service.socket),  # as on the page about the service
        XDG_RUNTIME_DIR=str(directory / "run"),
        COLUMNS="160",
    )
    with subprocess.Popen(
        ["bash", "--norc"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=directory,
        env=env,
    ) as process:
        yield Console(process)
        with contextlib.suppress(BrokenPipeError):
            process.communicate("exit\n")


@pytest.mark.parametrize("page", sorted({b.page for b in blocks() if b.language == "console"}))
def test_commands_print_what_the_page_shows(
    page: str, console: Console, service: serving.Service
) -> None:
    for block in blocks():
        if (block.page, block.language) != (page, "console"):
            continue
        for command in commands(block.text):
            if any(re.match(pattern, command.line) for pattern in NOT_RUN):
                continue
            output = console.run(command)
            expected = shape(command.output).replace("[", "[[]").replace("…", "*")
            if command.output:
                assert fnmatch.fnmatchcase(shape(output), expected), f"{command.line}\n{output}"
