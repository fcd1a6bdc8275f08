"""IPython that publishes frames instead of printing, and stays inside limits.

`SandboxShell` and the classes of `display` replace those of ipykernel, so that a cell behaves as in
Jupyter. Importing ipykernel's classes would cost a quarter of a second and ZeroMQ. Nothing here
needs a socket: until `attach` is called, a shell runs cells and publishes nothing. A zygote warms
one up in this way before it forks.
"""

# IPython is typed only in part; only our side of it is checked here.
# mypy: disable-error-code="misc,call-arg,no-untyped-call,union-attr,no-any-return,arg-type"
# mypy: disable-error-code="var-annotated,index"

import ast
import asyncio
import atexit
import contextlib
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from IPython.core import page
from IPython.core.autocall import ZMQExitAutocall
from IPython.core.error import InputRejected, UsageError
from IPython.core.interactiveshell import InteractiveShellABC
from IPython.core.magic import Magics, line_magic, magics_class
from traitlets import Any as AnyTrait
from traitlets import Bool, Instance, Type, default
from traitlets.config import Config

from sbx.guest import frames, import_rules
from sbx.guest.import_rules import ImportRules, Violation
from sbx.guest.kernel import errors, spawned_main, system_commands
from sbx.guest.kernel.display import FrameDisplayHook, FrameDisplayPublisher, Payloads, bounded
from sbx.guest.kernel.errors import BoundedTraceback, describe, error_content, without_guest
from sbx.guest.kernel.lean_shell import LeanShell, create_lazy_traits

MIME_MAX = 8 * 1024 * 1024
"""Bytes of one rich output, unless the boot frame sets another limit."""

# A reply is accepted as a whole or not at all. Its payload and expressions are JSON: see frames.
_REPLY_JSON_MAX = frames.MAX_JSON - 64 * 1024
_PAGE_MAX = 1024 * 1024

# IPython's advice after SystemExit does not apply here: a cell has no prompt to leave.
warnings.filterwarnings("ignore", "To exit: use", UserWarning)


# Sends a frame: its kind, its content, and whether the next frame follows at once.
Publish = Callable[[str, Mapping[str, Any], bool], None]


class ImportRefused(InputRejected):
    """The policy's import rules do not let this cell run."""

    __module__ = "builtins"  # a name that users read

    def __init__(self, violation: Violation, rules: ImportRules) -> None:
        super().__init__(violation.sentence(rules))

    def _render_traceback_(self) -> list[str]:
        return [f"ImportRefused: {self}"]


class ProcessesRefused(PermissionError):  # a name that users read in a cell
    """The policy lets a cell start no process."""

    def __init__(self) -> None:
        super().__init__(
            "this sandbox's policy allows no processes, so shell commands (`!ls`, %%bash, %pip)"
            " are refused: use Python instead."
        )

    def _render_traceback_(self) -> list[str]:
        return [f"ProcessesRefused: {self}"]


class RuleKeeper:
    """An AST transformer that changes nothing: it refuses the cell or returns it as it is."""

    def __init__(self, rules: ImportRules, namespace: Mapping[str, Any]) -> None:
        self._rules = rules
        self._namespace = namespace

    def visit(self, tree: ast.AST) -> ast.AST:
        modules = {
            name: value.__name__
            for name, value in list(self._namespace.items())
            if type(value) is types.ModuleType
        }
        violation = import_rules.check(tree, self._rules, modules=modules, is_local=_is_own_file)
        if violation:
            raise ImportRefused(violation, self._rules)
        return tree


def _is_own_file(name: str) -> bool:
    """Return whether `name` would come from the working directory, as one of the user's files."""
    return os.path.isfile(f"{name}.py") or os.path.isdir(name)


@magics_class
class PagerMagics(Magics):
    """The magics of the terminal that a notebook has, too."""

    @line_magic
    def less(self, name: str) -> None:
        """Show a file in the pager: %less FILE."""
        if not name:
            raise UsageError("Missing filename.")
        with open(name, encoding="utf-8", errors="replace") as file:
            text = file.read()
        page.page(self.shell.pycolorize(text) if name.endswith(".py") else text)

    more = line_magic("more")(less)


class _Exiter(ZMQExitAutocall):
    """`exit` and `quit`: they end the cell, like the script that a model had in mind.

    In Jupyter they let the cell run to its end and then stop the kernel; here the kernel lives on.
    """

    def __call__(self, code: object = None) -> None:
        if self._ip.payload_manager.for_front_end:
            self._ip.ask_exit()
        raise SystemExit(code)


class SandboxShell(LeanShell):
    """The IPython of one kernel."""

    displayhook_class = Type(FrameDisplayHook)
    display_pub_class = Type(FrameDisplayPublisher)
    exiter = Instance(_Exiter)
    exit_now = Bool(False)
    keepkernel_on_exit = AnyTrait(None)
    kernel = AnyTrait(None)
    """Libraries look for `comm_manager` here; its presence shows them that this is a kernel."""

    processes = True
    walls = True
    mime_max = MIME_MAX
    interrupted = False
    """An interrupt cancelled the cell's task: report its CancelledError as KeyboardInterrupt."""
    last_error: dict[str, Any] | None = None
    """The content of the last `error` frame of this cell."""
    error_in_display = False
    exit_code: int | None = None
    """The exit code of SystemExit, if that is the cell's error."""

    _publish: Publish | None = None

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._own_hooks = self._hooks()

    @property
    def has_hooks(self) -> bool:
        """Whether code other than IPython has hooks for a cell's end: matplotlib draws there."""
        return self._hooks() != self._own_hooks

    def _hooks(self) -> list[Any]:
        registered = self.events.callbacks
        return registered["post_execute"] + registered["post_run_cell"]

    def attach(
        self,
        publish: Publish,
        *,
        processes: bool = True,
        walls: bool = True,
        mime_max: int = MIME_MAX,
        rules: ImportRules | None = None,
    ) -> None:
        """Publish from now on. With `processes` False, refuse `!cmd` and similar calls in words."""
        self.publish_by(publish)
        self.processes, self.walls = processes, walls
        self.mime_max = min(mime_max, frames.MAX_SENT // 2)
        if processes:
            self.user_module.__spec__ = spawned_main._MainSpec()
        else:
            self._refuse_script_magics()
        if rules is not None:
            self.ast_transformers.append(RuleKeeper(rules, self.user_ns))

    def publish_by(self, publish: Publish | None) -> None:
        """Send frames by `publish` from now on; None drops them."""
        self._publish = publish

    def publish(self, kind: str, content: Mapping[str, Any], *, hold: bool = False) -> None:
        """Publish a frame. `hold`: the next frame follows at once, and can be sent with it."""
        if self._publish is not None:
            self._publish(kind, content, hold)

    # --- Programs: see `program`.

    def check_imports(self, tree: ast.AST) -> None:
        """Raise ImportRefused if the import rules do not let a program run."""
        for transformer in self.ast_transformers:
            if isinstance(transformer, RuleKeeper):
                transformer.visit(tree)

    def show(self, value: object) -> None:
        """Display the value of the last expression of `-c`."""
        data, metadata = self.display_formatter.format(value)
        if data:
            self.displayhook.write_format_data(data, metadata)

    def run_file(self, main: types.ModuleType, source: str) -> BaseException | None:
        """Run a file with the syntax of IPython in this module. Show its error, and return it."""
        self.user_module, self.user_ns = main, vars(main)
        self.init_user_ns()
        self.begin_cell()
        result = self.run_cell(source, store_history=False)
        error: BaseException | None = result.error_before_exec or result.error_in_exec
        return error

    def draw(self) -> None:
        """Let libraries display their open figures, as at the end of a cell."""
        if self.has_hooks:
            self.events.trigger("post_execute")

    def explain(self, error: BaseException) -> str | None:
        """Return a hint for an error that the walls around the kernel cause."""
        if isinstance(error, Exception) and (why := self._why_refused(error)):
            return why
        return errors.NO_PACKAGE if self.walls and errors.lacks_package(error) else None

    def begin_cell(self, *, for_front_end: bool = True) -> None:
        """Reset the state of a cell. `for_front_end`: its caller takes payloads."""
        self.payload_manager.for_front_end = for_front_end
        self.interrupted = False
        self.last_error = self.exit_code = None
        self.error_in_display = False
        self.displayhook._is_active = False
        self._cell_begins = True

    @default("exiter")
    def _default_exiter(self) -> _Exiter:
        return _Exiter(self)

    def init_hooks(self) -> None:
        super().init_hooks()
        self.set_hook("show_in_pager", page.as_hook(self._page), 99)

    def init_payload(self) -> None:
        self.payload_manager = Payloads(parent=self)
        self.configurables.append(self.payload_manager)

    def init_magics(self) -> None:
        super().init_magics()
        self.register_magics(PagerMagics)

    # --- Requests of a cell to the front end.

    def _page(
        self, text: Any, start: int = 0, screen_lines: int = 0, pager_cmd: Any = None
    ) -> None:
        data = text if isinstance(text, dict) else {"text/plain": text}
        data = bounded(data, min(self.mime_max, _PAGE_MAX))
        self.payload_manager.write_payload({"source": "page", "data": data, "start": max(0, start)})

    def set_next_input(self, s: str, replace: bool = False) -> None:
        payload = {"source": "set_next_input", "text": s, "replace": replace}
        self.payload_manager.write_payload(payload)

    def ask_exit(self) -> None:
        """Ask the front end for %exit; the kernel lives until its runtime ends it."""
        payload = {"source": "ask_exit", "keepkernel": bool(self.keepkernel_on_exit)}
        self.payload_manager.write_payload(payload)

    def take_payload(self) -> list[Any]:
        """Return and clear the cell's requests to the front end, up to the limit of the host."""
        payload = self.payload_manager.read_payload()
        if payload:
            self.payload_manager.clear_payload()
        return list(_within(payload, _REPLY_JSON_MAX))

    def enable_gui(self, gui: str | None = None) -> None:
        if gui not in {None, "inline", "agg"}:
            raise UsageError(f"a sandbox has no screen for {gui!r}: use %matplotlib inline")

    # --- Processes.

    def system(self, cmd: str) -> None:
        if not self.processes:
            raise ProcessesRefused
        if cmd.rstrip().endswith("&"):
            raise OSError("Background processes not supported: use subprocess.Popen.")
        code = system_commands.run(self.var_expand(cmd, depth=1), sys.stdout.write)
        # Not returned: a value other than None would be displayed.
        self.user_ns["_exit_code"] = code
        if code and self.walls and errors.installs(cmd):
            sys.stdout.write(f"{errors.NO_PACKAGE}\n")
        if getattr(self, "system_raise_on_error", False) and code:
            import subprocess

            raise subprocess.CalledProcessError(code, cmd)

    system_piped = system

    def getoutput(self, cmd: str, split: bool = True, depth: int = 0) -> Any:
        if not self.processes:
            raise ProcessesRefused
        return super().getoutput(cmd, split=split, depth=depth + 1)

    def _refuse_script_magics(self) -> None:
        """Replace %%bash and similar magics, and os.system.

        The magics start their processes without a call of `system`. If Linux refuses, os.system
        returns a number, 32512 or -1, as for a program that was not found.
        """

        def refuse(line: str = "", cell: str = "") -> None:
            raise ProcessesRefused

        def system(command: object) -> int:
            raise ProcessesRefused

        os.system = system

        for name in _SCRIPT_MAGICS:
            if self.find_cell_magic(name) is not None:  # loads it, so that it is not loaded later
                self.register_magic_function(refuse, magic_kind="cell", magic_name=name)

    # --- Errors.

    def init_traceback_handlers(self, custom_exceptions: Any) -> None:
        super().init_traceback_handlers(custom_exceptions)
        self.InteractiveTB = BoundedTraceback(mode=self.xmode, theme_name=self.colors, tb_offset=1)

    def _format_exception_for_storage(self, exception: BaseException, *_: Any, **__: Any) -> Any:
        return self.last_error or describe(exception)

    def showtraceback(self, exc_tuple: Any = None, *args: Any, **kwargs: Any) -> None:
        kind, error, below = exc_tuple or sys.exc_info()
        if self.interrupted and isinstance(error, asyncio.CancelledError):
            kind, error = KeyboardInterrupt, KeyboardInterrupt()
        if errors.has_group(error):  # IPython prints these to stderr
            self._showtraceback(kind, error, describe(error)["traceback"])
        else:
            super().showtraceback((kind, error, without_guest(below)), *args, **kwargs)

    def show_usage_error(self, exc: BaseException) -> None:
        self._showtraceback(type(exc), exc, describe(exc)["traceback"])

    def _showtraceback(self, etype: type, evalue: Any, stb: list[str]) -> None:
        if self.displayhook.is_active:
            self.error_in_display = True
        self.last_error = error_content(etype, evalue, stb)
        if isinstance(evalue, SystemExit):
            self.exit_code = errors.exit_code(evalue)
        if isinstance(evalue, Exception) and (why := self._why_refused(evalue)):
            self.last_error["evalue"] += f". {why}"
            self.last_error["traceback"].append(why)
        elif self.walls and errors.lacks_package(evalue):
            self.last_error["traceback"].append(errors.NO_PACKAGE)
        self.publish("error", self.last_error)

    def _why_refused(self, error: Exception) -> str | None:
        if not self.walls:
            return None
        try:
            return errors.reason(error, processes=self.processes)
        except Exception:  # noqa: BLE001 - user code: an error's own attributes
            return None


# Libraries use this name to detect a notebook.
SandboxShell.__name__ = "ZMQInteractiveShell"
InteractiveShellABC.register(SandboxShell)

_SCRIPT_MAGICS = frozenset(
    ("script", "bash", "sh", "perl", "pypy", "python", "python2", "python3", "ruby")
)


def build() -> SandboxShell:
    """Return the shell of this process; build it at the first call."""
    config = Config()
    config.HistoryManager.enabled = False
    config.HistoryManager.hist_file = ":memory:"
    # Measured with jedi and without: `json.du` 230 and 18 ms, `json.dumps(x).spl` 2.2 s and 1 ms.
    config.Completer.use_jedi = False
    config.IPCompleter.use_jedi = False
    config.IPKernelApp.parent_appname = "sbx"  # tqdm detects a notebook by a section of this name
    shell = SandboxShell.instance(config=config)
    # It clears the variables and closes a database of the history, which does not exist here.
    atexit.unregister(shell.atexit_operations)
    create_lazy_traits(shell)
    return shell


def _within(values: list[Any], room: int) -> Iterator[Any]:
    for value in values:
        with contextlib.suppress(frames.FrameError):
            room -= frames.check_json([value])
            if room < 0:
                return
            yield value


def evaluated(shell: SandboxShell, expressions: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of `user_expressions` after a cell, or their errors, by their names."""
    values = {}
    room = _REPLY_JSON_MAX
    for name, expression in expressions.items():
        value = shell.user_expressions({name: expression})[name]
        try:
            size = frames.check_json([name, value])
            if size > room:
                raise frames.FrameError(f"{size} bytes: all expressions together may have {room}")
        except frames.FrameError as error:
            value = {"status": "error", **error_content(type(error), error)}
            size = frames.check_json([name, value])
        room -= size
        if room < 0:
            break
        values[name] = value
    return values
