"""A program: a file of Python, or the code of `-c`, run as `python3` runs it.

It has its own `__main__`, no running loop, CPython's tracebacks and CPython's exit code. `display`,
the formatters and the inline backend of matplotlib stay registered. See `ending` for the end of its
process.
"""

import ast
import asyncio
import builtins
import contextlib
import getpass
import importlib.machinery
import io
import os
import runpy
import signal
import sys
import types
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from sbx.guest.kernel import errors

CODE, STDIN = "-c", "-"  # in place of a path, as on python3's command line
_STDIN_DIRECTORY = "/tmp"  # noqa: S108  # for a file without a name
_INTERRUPTED = 128 + signal.SIGINT
_IPYTHON = ".ipy"
_NO_FILE = 2  # python3's exit code for a file that it cannot open


@dataclass(frozen=True, slots=True)
class PythonProgram:
    """`path`: a file, or CODE or STDIN. `code` None: the file is read inside. `stdin` None: the
    input is empty. `shows_value`: the value of the last expression is shown."""

    path: str
    code: bytes | None = None
    args: Sequence[str] = ()
    stdin: bytes | None = None
    cwd: str | None = None
    env: Mapping[str, str] | None = None
    shows_value: bool = False

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "PythonProgram":
        code, stdin = (content.get(name) for name in ("code", "stdin"))
        return cls(
            path=str(content["path"]),
            code=None if code is None else b64decode(code),
            args=[str(argument) for argument in content.get("args", ())],
            stdin=None if stdin is None else b64decode(stdin),
            cwd=content.get("cwd"),
            env=content.get("env"),
            shows_value=bool(content.get("shows_value")),
        )

    @property
    def has_file(self) -> bool:
        return self.path not in (CODE, STDIN)

    @property
    def absolute_path(self) -> str:
        """As CPython makes it: with the dots of the path."""
        return os.path.join(os.getcwd(), self.path)


class ProgramOutcome:
    """The end of a program: its exit code, and the content of an `error` frame for an error that it
    did not catch."""

    def __init__(self) -> None:
        self.code = 0
        self.error: dict[str, Any] = {}

    @property
    def reply(self) -> dict[str, Any]:
        return {"status": "error" if self.code else "ok", "exit_code": self.code, **self.error}


@dataclass(frozen=True, slots=True)
class InitialState:
    """The state of the process before any user code, which a program finds again."""

    path: tuple[str, ...]
    environment: Mapping[str, str]
    cwd: str

    @classmethod
    def now(cls) -> "InitialState":
        return cls(tuple(sys.path[1:]), dict(os.environ), os.getcwd())

    def restore(self, program: PythonProgram) -> None:
        """Set the directory, the environment, `sys.argv` and `sys.path` as for python3."""
        os.chdir(program.cwd or self.cwd)
        environment = {**self.environment, **(program.env or {})}
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        sys.argv[:] = [program.path, *program.args]
        sys.orig_argv[:] = [sys.executable, program.path, *program.args]
        first = ""
        if program.has_file:
            first = os.path.dirname(os.path.abspath(os.path.realpath(program.path)))
        sys.path[:] = [first, *self.path]
        importlib.invalidate_caches()


def take_input(stdin: bytes | None) -> None:
    """Let descriptor 0 be a file without a name that has these bytes, or /dev/null."""
    if stdin is None:
        fd = os.open(os.devnull, os.O_RDONLY)
    else:
        try:
            fd = os.memfd_create("stdin")
        except OSError:  # a policy without processes
            fd = os.open(_STDIN_DIRECTORY, os.O_TMPFILE | os.O_RDWR, 0o600)
        with open(fd, "wb", closefd=False) as file:
            file.write(stdin)
        os.lseek(fd, 0, os.SEEK_SET)
    os.dup2(fd, 0)
    os.close(fd)
    sys.stdin = sys.__stdin__ = _stream(0, "<stdin>", "r")  # type: ignore[misc,assignment]


def take_output() -> None:
    """Let the standard streams of output be those of python3 over the descriptors 1 and 2. A line
    leaves at its end, as at a terminal."""
    out, err = _stream(1, "<stdout>", "w"), _stream(2, "<stderr>", "w", "backslashreplace")
    sys.stdout = sys.__stdout__ = out  # type: ignore[misc,assignment]
    sys.stderr = sys.__stderr__ = err  # type: ignore[misc,assignment]


def _stream(fd: int, name: str, mode: str, error_handler: str = "surrogateescape") -> TextIO:
    raw = io.FileIO(fd, mode, closefd=False)
    raw.name = name
    buffer = io.BufferedReader(raw) if mode == "r" else io.BufferedWriter(raw)
    text = io.TextIOWrapper(
        buffer, "utf-8", error_handler, newline="\n", line_buffering=mode == "w"
    )
    text.mode = mode  # type: ignore[misc]
    return text


def reset_interpreter(ask: Callable[..., str] | None, ask_secret: Callable[..., str]) -> None:
    """Take back what a kernel changes. `ask` answers the questions of `input`; without it, they
    read the standard input."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    builtins.input = ask or _INPUT
    getpass.getpass = ask_secret if ask is not None else _GETPASS
    asyncio.set_event_loop_policy(None)
    sys.excepthook, sys.displayhook = sys.__excepthook__, sys.__displayhook__
    for name in ("ps1", "ps2", "ps3"):  # IPython's prompts: libraries take them for a console
        vars(sys).pop(name, None)


def run(
    program: PythonProgram,
    check: Callable[[ast.AST], object],
    show: Callable[[object], None],
    run_cell: Callable[[types.ModuleType, str], BaseException | None],
    explain: Callable[[BaseException], str | None],
    at_end: Callable[[], None],
) -> ProgramOutcome:
    """Run a program in this process, up to its last line.

    `check` raises for imports that the policy refuses. `show` displays the value of the last
    expression. `run_cell` runs code with the syntax of IPython, shows its error, and returns it.
    `explain` returns a hint for an error. `at_end` is called after code that did not
    fail.
    """
    outcome = ProgramOutcome()
    error: BaseException | None = None
    try:
        if program.path.endswith(_IPYTHON):
            _execute_ipython(program, run_cell, outcome)
        elif not _execute(program, check, show):
            outcome.code = _NO_FILE
        at_end()
    except BaseException as raised:  # noqa: BLE001  # as CPython does
        error = raised
        error.__traceback__ = errors.without_callers(error.__traceback__)  # others print it, too
    try:  # outside of the handler: no error of a hook has this one as its context
        if isinstance(error, SystemExit):
            outcome.code = leave_with(error)
        elif error is not None:
            outcome.error = errors.describe(error)
            outcome.code = _report(error, explain)
    except KeyboardInterrupt:
        outcome.code = _INTERRUPTED
    return outcome


def leave_with(error: SystemExit) -> int:
    """Return the exit code of SystemExit, and print a value that is not a number."""
    if error.code is not None and not isinstance(error.code, int):
        text = ""
        with contextlib.suppress(Exception):  # its __str__ raised it
            text = str(error.code)
        _print_error(f"{text}\n")
    return errors.exit_code(error)


def _execute(
    program: PythonProgram, check: Callable[[ast.AST], object], show: Callable[[object], None]
) -> bool:
    """Return False if the file cannot be opened."""
    main = _new_main(program)
    source = program.code
    if source is not None and program.has_file:
        _save(program.path, source)
    if source is None:
        if _has_main(program.path):
            sys.path[0] = program.path
            runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
            return True
        try:
            with open(program.path, "rb") as file:
                source = file.read()
        except OSError as error:
            where = f"[Errno {error.errno}] {error.strerror}"
            path = program.absolute_path
            _print_error(f"{sys.executable}: can't open file {path!r}: {where}\n")
            return False
    name = {CODE: "<string>", STDIN: "<stdin>"}.get(program.path, program.absolute_path)
    tree: ast.Module = compile(  # type: ignore[assignment]  # of PyCF_ONLY_AST
        source, name, "exec", ast.PyCF_ONLY_AST, dont_inherit=True
    )
    check(tree)
    last = tree.body[-1] if program.shows_value and tree.body else None
    shown = last if isinstance(last, ast.Expr) else None
    if shown is not None:
        tree.body.pop()
    code = compile(tree, name, "exec", dont_inherit=True)
    exec(code, vars(main))  # noqa: S102
    if shown is not None:
        code = compile(ast.Expression(shown.value), name, "eval", dont_inherit=True)
        value = eval(code, vars(main))  # noqa: S307
        if value is not None:
            show(value)
    return True


def _save(path: str, source: bytes) -> None:
    """Let the file have this content: tracebacks, `inspect` and children that import `__main__`
    read it."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        if file.read() == source:
            return
    with contextlib.suppress(OSError), open(path, "wb") as file:  # else it runs without its file
        file.write(source)


def _execute_ipython(
    program: PythonProgram,
    run_cell: Callable[[types.ModuleType, str], BaseException | None],
    outcome: ProgramOutcome,
) -> None:
    source = program.code
    if source is None:
        with open(program.path, "rb") as file:
            source = file.read()
    error = run_cell(_new_main(program), source.decode())
    if isinstance(error, SystemExit):
        outcome.code = leave_with(error)
    elif error is not None:
        outcome.code = _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def _new_main(program: PythonProgram) -> types.ModuleType:
    """Put a new module in place of `__main__`, with the names that python3 gives it."""
    main = types.ModuleType("__main__")
    names = vars(main)
    names["__annotations__"] = {}
    names["__builtins__"] = builtins
    names["__loader__"] = importlib.machinery.BuiltinImporter
    if program.has_file:
        path = program.absolute_path
        names["__loader__"] = importlib.machinery.SourceFileLoader("__main__", path)
        names["__file__"] = path
        names["__cached__"] = None
    sys.modules["__main__"] = main
    return main


def _has_main(path: str) -> bool:
    """Return whether the path is a directory or an archive, which has a module `__main__`."""
    if os.path.isdir(path):
        return True
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return file.read(4) == b"PK\x03\x04"
    return False


def _report(error: BaseException, explain: Callable[[BaseException], str | None]) -> int:
    """Call the hook for errors that are not caught, as CPython does. Return the exit code."""
    kind, below = type(error), error.__traceback__
    sys.last_type, sys.last_value, sys.last_traceback = kind, error, below
    failed: BaseException | None = None
    try:
        if not hasattr(sys, "excepthook"):
            _print_error("sys.excepthook is missing\n")
            sys.excepthook = sys.__excepthook__
        sys.excepthook(kind, error, below)
    except (Exception, SystemExit) as raised:  # noqa: BLE001  # user code
        failed = raised
    if isinstance(failed, SystemExit):
        return leave_with(failed)
    if failed is not None:
        _print_error("Error in sys.excepthook:\n")
        failed.__traceback__ = failed.__traceback__ and failed.__traceback__.tb_next
        sys.__excepthook__(type(failed), failed, failed.__traceback__)
        _print_error("\nOriginal exception was:\n")
        sys.__excepthook__(kind, error, below)
    if (hint := explain(error)) is not None:
        _print_error(f"hint: {hint}\n")
    return _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def _print_error(text: str) -> None:
    with contextlib.suppress(Exception):  # user code may have closed or replaced the stream
        sys.stdout.flush()
    with contextlib.suppress(Exception):
        sys.stderr.write(text)
        sys.stderr.flush()


_INPUT, _GETPASS = builtins.input, getpass.getpass
