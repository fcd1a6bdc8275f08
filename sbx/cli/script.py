"""A file of `sbx run`: its language, the modules of its directory that it imports, and notebooks.

A Python file runs as a program. It is copied to /workspace together with the modules and packages
that it imports. With a directory of the host as the workspace, only a file in this directory has a
path.
"""

import ast
import json
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sbx.cli import output
from sbx.errors import BadRequest, Denied
from sbx.protocol.languages import Language, check_language, language_of

if TYPE_CHECKING:
    from sbx.protocol.runs import Run, RunError
    from sbx.runtime.sandbox import AsyncSandbox

WORKSPACE = "/workspace"
_MODULES_MAX, _MODULES_SIZE_MAX = 500, 16 << 20  # files, bytes
_PYTHON_SUFFIXES = (".py", ".pyw", ".ipy")
NOTEBOOK = ".ipynb"
_NOT_COPIED = ("__pycache__", ".git")


def language_for(
    language: str | None, file: str | None, code: bytes, *, shell: bool
) -> Language | None:
    """Return the language of a script, or None for Python and for a command: the option decides,
    then the first line `#!…`, then the ending of the file's name. Raise BadRequest."""
    if shell and language is not None:
        raise BadRequest(
            "--shell and --language exclude each other",
            hint="use --language bash for a script, --shell for a command",
        )
    if shell:
        return None
    if language is not None:
        return None if language == "python" else check_language(language)
    interpreter = _interpreter(code)
    if interpreter is not None:
        return None if interpreter.startswith("python") else check_language(interpreter)
    suffix = Path(file or "").suffix.lower()
    script = language_of(file or "")
    if script is None and suffix not in ("", NOTEBOOK, *_PYTHON_SUFFIXES):
        raise BadRequest(
            f"the ending {suffix} of {file} is not that of a language that sbx runs",
            code="unknown_file_type",
            hint="name the language with --language; pass data with --upload",
        )
    return script


def is_program(file: str | None) -> bool:
    """Return whether a FILE of Python runs as with python3: not stdin, and not a notebook."""
    return file not in (None, "-") and Path(str(file)).suffix.lower() != NOTEBOOK


def _interpreter(code: bytes) -> str | None:
    """Return the name of the program in the first line `#!…`; None without one."""
    line = code.removeprefix(BOM_UTF8).partition(b"\n")[0].decode(errors="replace")
    if not line.startswith("#!"):
        return None
    words = line.removeprefix("#!").split()
    names = [Path(word).name for word in words if not word.startswith("-")]
    return next((name for name in names if name != "env"), None)


# -- notebooks -------------------------------------------------------------------------------------


class NotebookCell(NamedTuple):
    """`may_raise`: an error is expected, and the next cell runs after it."""

    code: str
    may_raise: bool = False

    def expects(self, run: "Run") -> bool:
        """Return whether the run failed as the notebook expects."""
        return self.may_raise and run.status == "error"


def cells_of(notebook: str, name: str) -> list[NotebookCell]:
    """Return the code cells of a notebook to run. As in nbclient, the tag `skip-execution` leaves
    one out, and `raises-exception` expects an error. Raise BadRequest `invalid_notebook` and
    `notebook_language`."""
    try:
        book = json.loads(notebook)
        cells = list(_cells(book["cells"]))
        language = _language_of(book.get("metadata", {}))
        if not cells:
            raise ValueError("it has no code to run")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadRequest(
            f"{name} is not a notebook of the format 4: {error}",
            code="invalid_notebook",
            hint="save it with Jupyter, or give Python code another ending",
        ) from None
    if not language.lower().startswith("python"):
        raise BadRequest(
            f"{name} is a notebook in {language}, and sbx runs notebooks in Python",
            code="notebook_language",
            hint="run a script in another language with --language",
        )
    return cells


def _cells(cells: list[dict[str, Any]]) -> Iterator[NotebookCell]:
    for cell in cells:
        code = "".join(cell["source"])
        tags = cell.get("metadata", {}).get("tags", [])
        if cell["cell_type"] == "code" and code.strip() and "skip-execution" not in tags:
            yield NotebookCell(code, "raises-exception" in tags)


def _language_of(metadata: dict[str, Any]) -> str:
    language = metadata.get("language_info", {}).get("name")
    return str(language or metadata.get("kernelspec", {}).get("language") or "python")


# -- scripts in Python -----------------------------------------------------------------------------


def modules_of(script: Path, code: bytes) -> dict[Path, bytes]:
    """Return the files in the directory of the script that it imports, directly or by one of them:
    modules, and whole packages with their data. Raise BadRequest `too_many_modules`."""
    top, modules, pending = script.parent, dict[Path, bytes](), [code]
    while pending:
        for name in _imported(pending.pop()):
            for path in _files_of(top, name):
                if path in modules:
                    continue
                modules[path] = path.read_bytes()
                size = sum(map(len, modules.values()))
                if len(modules) > _MODULES_MAX or size > _MODULES_SIZE_MAX:
                    raise BadRequest(
                        f"{script} imports more than {_MODULES_MAX} files or "
                        f"{_MODULES_SIZE_MAX >> 20} MiB of modules of its directory",
                        code="too_many_modules",
                        hint="mount its directory with --workspace",
                    )
                if path.suffix == ".py":
                    pending.append(modules[path])
    return modules


def _imported(code: bytes) -> Iterator[str]:
    """Yield the top-level names that the code imports."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError):
        return  # the run reports it
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def _files_of(top: Path, name: str) -> list[Path]:
    module = top / f"{name}.py"
    if module.is_file():
        return [module]
    package = top / name
    return sorted(
        path
        for path in package.rglob("*")
        if path.is_file() and not any(part in _NOT_COPIED for part in path.parts)
    )


@dataclass(frozen=True, slots=True)
class PythonScript:
    """A Python script: its `path` as code inside sees it, and the `files` of its `directory` to
    copy to /workspace."""

    path: str
    files: Mapping[str, bytes]
    directory: Path = Path()

    @classmethod
    def of(cls, file: Path, code: bytes, workspace: Path | None) -> "PythonScript":
        """`workspace`: the directory of the host that is /workspace; nothing is copied there."""
        if workspace is not None:
            inside, top = file.resolve(), workspace.resolve()
            relative = inside.relative_to(top) if inside.is_relative_to(top) else file.name
            return cls(f"{WORKSPACE}/{relative}", {})
        files = {file.name: code}
        for module, content in modules_of(file, code).items():
            files[str(module.relative_to(file.parent))] = content
        return cls(f"{WORKSPACE}/{file.name}", files, file.parent)

    async def copy(self, box: "AsyncSandbox") -> None:
        """Copy the files to /workspace."""
        with suppress(Denied):  # the policy offers no files: the script runs alone
            for name, content in self.files.items():
                await box.files.write(name, content)

    def hint_for(self, error: "RunError | None") -> None:
        """Print a hint if the error may be a file next to the script, which was not copied."""
        if self.files and error is not None and error.name == FileNotFoundError.__name__:
            directory = str(self.directory) or "."
            output.advice(
                "only the file and the modules that it imports were copied: "
                f"--workspace {directory} mounts their directory"
            )

    @property
    def copied(self) -> frozenset[str]:
        return frozenset(f"{WORKSPACE}/{name}" for name in self.files)
