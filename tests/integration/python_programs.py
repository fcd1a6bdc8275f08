"""The table of programs in `programs/*.toml`, and `python3 FILE` as the measure of each.

The name of a table is the name of a program. Its keys are the fields of `PythonProgram`.
"""

import functools
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

TABLES = Path(__file__).parent / "programs"
WORKSPACE = "/workspace"
_END_S = 60.0


@dataclass(frozen=True)
class PythonProgram:
    """`file`: its name. `files`: those next to it. `encoding`: of the code and of `stdin`.
    `mounted`: `sbx run` needs its directory as the workspace. `processes`: it starts
    processes, or needs one of its own. `ignore`: patterns of parts of the
    output that are different in each run. `differs`: the reason for another result, on all surfaces
    or `differs_on` some."""

    name: str
    code: str
    file: str = "main.py"
    args: Sequence[str] = ()
    stdin: str | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    encoding: str = "utf-8"
    mounted: bool = False
    processes: bool = False
    ignore: Sequence[str] = ()
    differs: str = ""
    differs_on: Sequence[str] = ()

    @property
    def all_files(self) -> dict[str, bytes]:
        others = {path: text.encode() for path, text in self.files.items()}
        return {**others, self.file: self.code.encode(self.encoding)}

    @property
    def input(self) -> bytes | None:
        return None if self.stdin is None else self.stdin.encode(self.encoding)

    def outcome(
        self, directory: str, code: int | None, out: str, err: str, files: Mapping[str, bytes]
    ) -> "Outcome":
        """Return an outcome without the path of its directory and without the ignored parts."""

        def plain(text: str) -> str:
            text = text.replace(directory, WORKSPACE)
            for pattern in self.ignore:
                text = re.sub(pattern, "", text)
            return text

        written = {path: data for path, data in files.items() if path not in self.all_files}
        return Outcome(code, plain(out), plain(err), written)


@dataclass(frozen=True)
class Outcome:
    """The result of a program. `files`: those that it wrote, by path."""

    code: int | None
    out: str
    err: str
    files: Mapping[str, bytes]


def load() -> dict[str, PythonProgram]:
    programs: dict[str, PythonProgram] = {}
    for path in sorted(TABLES.glob("*.toml")):
        for name, fields in tomllib.loads(path.read_text()).items():
            assert name not in programs, f"{name} is in two tables"
            programs[name] = PythonProgram(name, **fields)
    return programs


PROGRAMS = load()


@functools.cache
def of_python(name: str, *, absolute: bool) -> Outcome:
    """Run the program with `python3 FILE`, named by an absolute or by a relative path."""
    program = PROGRAMS[name]
    with tempfile.TemporaryDirectory() as top:
        directory = Path(top) / "work"
        write(directory, program)
        path = str(directory / program.file) if absolute else f"./{program.file}"
        python = Path(sys.executable)
        ended = subprocess.run(
            [python, path, *program.args],
            cwd=directory,
            input=program.input or b"",
            capture_output=True,
            env={
                "PATH": f"{python.parent}:{os.environ['PATH']}",
                "HOME": str(directory),
                "LANG": "C.UTF-8",
                "MPLCONFIGDIR": top,
                "PYTHONDONTWRITEBYTECODE": "1",
            },
            start_new_session=True,  # without a terminal
            timeout=_END_S,
            check=False,
        )
        code = ended.returncode if ended.returncode >= 0 else 128 - ended.returncode
        out, err = text(ended.stdout), text(ended.stderr)
        return program.outcome(str(directory), code, out, err, files_in(directory))


def text_of_both_outputs(code: str) -> str:
    """Return the output and the errors of code in one text."""
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True)
    return ended.stdout.decode()


def text(data: bytes) -> str:
    """Decode an output. sbx returns texts: it replaces bytes that are not UTF-8."""
    return data.decode(errors="replace")


def write(directory: Path, program: PythonProgram) -> None:
    for name, data in program.all_files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def files_in(directory: Path) -> dict[str, bytes]:
    """Return the content of all files."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and not path.is_symlink()
    }
