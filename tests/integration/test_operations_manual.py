"""docs/operations.md: its examples are executed, and its tables name only what there is."""

import fnmatch
import re
import shlex
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from command import sbx
from serving import Service, open_directory, service

from sbx.api import errors

ROOT = Path(__file__).resolve().parents[2]
MANUAL = (ROOT / "docs" / "operations.md").read_text()
DATA, BACKUPS = "/var/lib/sbx", "/var/backups/sbx"


@dataclass(frozen=True)
class Step:
    """A command of an example, and the output below it."""

    command: str
    output: str


@dataclass
class Host:
    """The host of the examples: a service, and the directories that they name."""

    top: Path
    held: ExitStack
    served: Service | None = None

    def run(self, command: str) -> str:
        """Execute a command. Return its output, with the paths of the examples."""
        match shlex.split(command):
            case ["systemctl", "start", "sbx"]:
                self.served = self.held.enter_context(service(top=self.top))
                return ""
            case ["systemctl", "stop", "sbx"]:
                self.held.close()
                return ""
            case ["sbx", *words]:
                return self._sbx(words)
        raise AssertionError(f"the examples have no program for {command}")

    def _sbx(self, words: list[str]) -> str:
        data, backups = str(self.top / "data"), str(self.top / "backups")
        env = {"SBX_DATA_DIR": data, "SBX_SOCKET": str(self.top / "run" / "sbx.sock")}
        ended = sbx(*(word.replace(BACKUPS, backups) for word in words), env=env)
        assert ended.returncode == 0, f"{words}: {ended.stderr}"
        return ended.stdout.replace(data, DATA).replace(backups, BACKUPS)


def steps() -> Iterator[Step]:
    for block in re.findall(r"```console\n(.*?)```", MANUAL, re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            yield Step(command, output)


def statuses() -> set[int]:
    """Those that the first column of the last table names."""
    table = MANUAL.partition("## The promise of each answer")[2]
    cells = re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE)
    return {int(number) for cell in cells for number in re.findall(r"\b[2-5]\d\d\b", cell)}


@pytest.mark.needs("namespaces")
def test_examples_print_what_the_manual_shows() -> None:
    """Each example works on what the ones before it left. One with ID is left out."""
    with open_directory() as top, ExitStack() as held:
        (top / "backups").mkdir()
        host = Host(top, held)
        host.run("systemctl start sbx")
        for step in steps():
            if "ID" in step.command.split():
                continue
            output = host.run(step.command)
            expected = step.output.replace("[", "[[]").replace("…\n", "*").replace("…", "*")
            if step.output:
                assert fnmatch.fnmatchcase(output, expected), f"{step.command}: {output}"


def test_every_status_of_the_service_has_a_promise() -> None:
    answered = {*errors._STATUS_OF_CODE.values(), *errors._STATUS_OF_CLASS.values()}
    assert answered | {200, 201, 202, 204} <= statuses()


@pytest.mark.full_tier
def test_every_code_of_the_manual_is_one_of_sbx() -> None:
    source = "\n".join(path.read_text() for path in (ROOT / "sbx").rglob("*.py"))
    codes = set(re.findall(r"`([a-z]+(?:_[a-z]+)+)`", MANUAL))
    assert [code for code in sorted(codes) if not re.search(rf"\b{code}\b", source)] == []
