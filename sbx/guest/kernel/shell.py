"""IPython that publishes frames instead of printing, and stays inside limits.

The classes replace those of ipykernel (shell, display hook, display publisher), so that a cell
behaves as in Jupyter. Importing ipykernel's classes would cost a quarter of a second and ZeroMQ.
Nothing here needs a socket: until `attach` is called, a shell runs cells and publishes nothing. A
zygote warms one up in this way before it forks. Building a shell writes no file and starts no
thread.

Some steps that IPython takes for every cell have no effect for most cells, and are skipped then.
Each place gives its condition. `1+1` takes 0.2 ms of IPython with this, instead of 0.33.
"""

# IPython is typed only in part; only our side of it is checked here.
# mypy: disable-error-code="misc,call-arg,no-untyped-call,union-attr,no-any-return,arg-type"
# mypy: disable-error-code="var-annotated,index"

import ast
import asyncio
import contextlib
import os
import re
import sys
import traceback
import types
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from IPython.core import page
from IPython.core.autocall import IPyAutocall, ZMQExitAutocall
from IPython.core.compilerop import CachingCompiler
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.error import InputRejected, UsageError
from IPython.core.formatters import DisplayFormatter, PlainTextFormatter
from IPython.core.history import HistoryManager
from IPython.core.inputtransformer2 import TransformerManager
from IPython.core.interactiveshell import InteractiveShell, InteractiveShellABC
from IPython.core.macro import Macro
from IPython.core.magic import Magics, line_magic, magics_class
from IPython.core.profiledir import ProfileDir
from IPython.paths import get_ipython_dir
from traitlets import Any as AnyTrait
from traitlets import Bool, Instance, Type, default
from traitlets.config import Config

from sbx.guest import frames, import_rules
from sbx.guest.import_rules import ImportRules, Violation
from sbx.guest.kernel import error_hints, system_commands

MIME_MAX = 8 * 1024 * 1024
"""Bytes of one rich output, unless the boot frame sets another limit."""

_TEXT_KEPT = 256 * 1024  # characters that remain of a text that was too large
_MESSAGE_MAX = 64 * 1024
_TRACEBACK_MAX = 512 * 1024
_LINES_MAX = 10_000
# A reply is accepted as a whole or not at all. Its payload and expressions are JSON: see frames.
_REPLY_JSON_MAX = frames.MAX_JSON - 64 * 1024
_PAGE_MAX = 1024 * 1024
# Files of the frames above user code in a traceback.
_AROUND = ("/IPython/", "/sbx/guest/", "/comm/base_comm.py")
_HANDLER_FILE = os.path.join(os.path.dirname(__file__), "loop.py")

# IPython's advice after SystemExit does not apply here: a cell has no prompt to leave.
warnings.filterwarnings("ignore", "To exit: use", UserWarning)


class Publish(Protocol):
    """The function that sends frames; see `sbx.guest.kernel.output.Output.publish`."""

    def __call__(self, kind: str, content: Mapping[str, Any], *, hold: bool) -> None: ...


class ImportRefused(InputRejected):
    """The policy's import rules do not let this cell run."""

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


def bounded(data: Mapping[str, Any], limit: int) -> dict[str, Any]:
    """Return `data`, a bundle by MIME type, within `limit` bytes.

    A note in text/plain replaces the largest parts, and JSON that is larger than the host accepts.
    text/plain itself is cut instead of dropped. Raise FrameError for data that cannot be sent.
    """
    if len(data) > frames.MAX_PARTS:
        raise frames.FrameError(f"{len(data)} formats at once: the limit is {frames.MAX_PARTS}")
    measured = {mime: _measure(value) for mime, value in data.items()}
    sizes = {mime: size for mime, (size, _) in measured.items()}
    kept = dict(data)
    notes = []
    for mime in sorted(sizes, key=sizes.__getitem__, reverse=True):
        values = sum(measured[name][1] for name in kept)
        too_much_json = not isinstance(data[mime], (str, bytes)) and (
            sizes[mime] > frames.MAX_JSON or values > frames.MAX_VALUES
        )
        if sum(sizes[name] for name in kept) <= limit and not too_much_json:
            continue
        if mime == "text/plain":
            kept[mime], sizes[mime] = cut(str(kept[mime]), min(_TEXT_KEPT, limit)), 0
        else:
            del kept[mime]
            notes.append(f"[{mime} of {sizes[mime]} bytes is not shown: too large]")
    if notes:
        kept["text/plain"] = "\n".join([*notes, str(kept.get("text/plain", ""))]).rstrip()
    return kept


def _cut_note(data: Mapping[str, Any], shown: Mapping[str, Any]) -> dict[str, bool]:
    """Return the marker of a frame whose `data` is not complete, or nothing."""
    is_complete = all(shown.get(mime) is part for mime, part in data.items())
    return {} if is_complete else {"cut": True}


def cut(text: str, length: int) -> str:
    """Return `text`, or its first `length` characters and a note with the full length."""
    if len(text) <= length:
        return text
    return f"{text[:length]}\n… [cut: {len(text)} characters in all]"


def _measure(value: Any) -> tuple[int, int]:
    """Return the size in bytes, and the number of values in JSON that is not a string."""
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode(errors="surrogatepass")), 0
    if isinstance(value, bytes):
        return len(value) * 4 // 3, 0
    if frames.too_deep(value):
        raise frames.FrameError(f"nested deeper than {frames.MAX_DEPTH} levels")
    encoded = frames.encode("", {"": value})
    return len(encoded), frames.values_in(encoded)


def _checked(metadata: dict[str, Any] | None) -> dict[str, Any]:
    if metadata:
        frames.check_json(metadata)
    return metadata or {}


class FrameDisplayHook(DisplayHook):
    """sys.displayhook: sends the value of a cell's last expression as `execute_result`."""

    exec_result = None  # not a trait, as below in the shell

    def quiet(self) -> bool:
        # Without a semicolon in the cell, it cannot end with one: do not tokenize the cell.
        history = self.shell.history_manager.input_hist_parsed
        return bool(history) and ";" in history[-1] and bool(super().quiet())

    def write_output_prompt(self) -> None:
        """Do nothing: the number is part of the frame."""

    def write_format_data(self, format_dict: dict[str, Any], md_dict: Any = None) -> None:
        self._shown = bounded(format_dict, self.shell.mime_max)
        content = {
            "execution_count": self.prompt_count,
            "data": self._shown,
            "metadata": _checked(md_dict),
            **_cut_note(format_dict, self._shown),
        }
        # After a cell's last expression only its reply follows, so hold this frame for it. (No
        # other code calls this from there, unless it names sys.displayhook: then the frame waits a
        # moment, see `Output`.)
        caller = sys._getframe(1).f_back
        is_last = caller is not None and caller.f_code is self.shell.compile.last_expression
        self.shell.publish("execute_result", content, hold=is_last)

    def log_output(self, format_dict: dict[str, Any]) -> None:
        super().log_output(self._shown)  # without the cut part: history keeps it indefinitely

    def finish_displayhook(self) -> None:
        self._is_active = False


class FrameDisplayPublisher(DisplayPublisher):
    """display(), update_display() and clear_output()."""

    def publish(
        self,
        data: dict[str, Any],
        metadata: dict[str, Any] | None = None,
        *_ignored: Any,
        transient: dict[str, Any] | None = None,
        update: bool = False,
        **_more: Any,
    ) -> None:
        self._validate_data(data, metadata)
        shown = bounded(data, self.shell.mime_max)
        content = {
            "data": shown,
            "metadata": _checked(metadata),
            "transient": {str(key): str(value) for key, value in (transient or {}).items()},
            **_cut_note(data, shown),
        }
        self.shell.publish("update_display_data" if update else "display_data", content)

    def clear_output(self, wait: bool = False) -> None:
        self.shell.publish("clear_output", {"wait": bool(wait)})


class LeanFormatter(DisplayFormatter):
    """Asks twelve formatters about an object only if one of them could have an answer."""

    # These exact types have no _repr_*_ methods, and their instances cannot get one.
    _PLAIN = frozenset({int, float, complex, bool, str, bytes, list, tuple, dict, set, frozenset})

    def format(self, obj: Any, include: Any = None, exclude: Any = None) -> Any:
        kind = type(obj)
        if kind not in self._PLAIN or include or exclude or self._registered(kind, obj):
            return super().format(obj, include, exclude)
        pretty = self.formatters["text/plain"]
        if pretty.pprint and pretty.type_printers.get(kind) is _PRINTER_BY_REPR:
            with contextlib.suppress(ValueError):  # an int with too many digits: shown as an error
                return {"text/plain": repr(obj)}, {}
        text = pretty(obj)
        return ({} if text is None else {"text/plain": text}), {}

    def _registered(self, kind: type, obj: Any) -> bool:
        """Return whether a rich format is registered for `kind`, its bases, or this very object."""
        if self._registries_of != len(self.formatters):
            self._registries_of = len(self.formatters)
            rich = [f for mime, f in self.formatters.items() if mime != "text/plain"]
            self._registries = [
                (formatter.type_printers, formatter.deferred_printers, formatter.singleton_printers)
                for formatter in (self.ipython_display_formatter, self.mimebundle_formatter, *rich)
            ]
        path = (kind.__module__, kind.__name__)
        for types_, deferred, singletons in self._registries:
            if types_ and any(base in types_ for base in kind.__mro__):
                return True
            if (deferred and path in deferred) or (singletons and id(obj) in singletons):
                return True
        return False

    _registries: Sequence[tuple[dict[Any, Any], dict[Any, Any], dict[Any, Any]]] = ()
    _registries_of = 0


class CellCompiler(CachingCompiler):
    """Names cells as if they were files, as ipykernel does.

    For a file that it cannot open, IPython shows an error with the lines from its cache. This
    matches Jupyter's tracebacks, and saves the import of stack_data for a cell's error.
    """

    last_node: ast.stmt | None = None
    """The last statement of a request's cell: only its reply follows …"""
    last_expression: types.CodeType | None = None
    """… and its code after compilation, if it is an expression whose value is shown."""

    def __call__(self, source: Any, filename: str, symbol: str, **options: Any) -> types.CodeType:
        code: types.CodeType = super().__call__(source, filename, symbol, **options)
        if isinstance(source, ast.Interactive) and self.last_node in source.body:
            self.last_expression = code
        return code

    def get_code_name(self, raw_code: str, transformed_code: str, number: int) -> str:
        digest = zlib.crc32(transformed_code.encode(errors="surrogatepass"))
        return f"/tmp/cells/{number}-{digest:08x}.py"  # noqa: S108  # never written


_PRINTER_BY_REPR = PlainTextFormatter().type_printers[int]


class LeanTransformerManager(TransformerManager):
    """Looks for IPython's own syntax only in cells that contain one of its characters."""

    def do_token_transforms(self, lines: list[str]) -> list[str]:
        if self.token_transformers == _TOKEN_TRANSFORMERS and not any(map(_special, lines)):
            return lines
        return super().do_token_transforms(lines)

    @property
    def untouched(self) -> bool:
        """Whether no transformer was added or removed."""
        return self.cleanup_transforms == _CLEANUP_TRANSFORMS and (
            self.line_transforms == _LINE_TRANSFORMS
        )


_TOKEN_TRANSFORMERS = list(TransformerManager().token_transformers)
_CLEANUP_TRANSFORMS = list(TransformerManager().cleanup_transforms)
_LINE_TRANSFORMS = list(TransformerManager().line_transforms)
_FIRST_NAME = re.compile(r"[\w.*]*")  # the name that prefilter looks up before it changes a line


_NOT_PYTHON = frozenset(("", " ", ">"))  # nothing, an indent, a prompt


def _special(line: str) -> bool:
    # `%magic`, `!cmd` and `help?` anywhere; the autocall escapes only at the start of a line.
    return "%" in line or "!" in line or "?" in line or line.lstrip()[:1] in {",", ";", "/"}


class LeanHistory(HistoryManager):
    """Keeps the last inputs in plain attributes: setting a trait is 4 µs, and has no observer."""

    _i00 = _i = _ii = _iii = ""


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
        self._ip.ask_exit()
        raise SystemExit(code)


class SandboxShell(InteractiveShell):
    """The IPython of one kernel."""

    compiler_class = Type(CellCompiler)
    displayhook_class = Type(FrameDisplayHook)
    display_pub_class = Type(FrameDisplayPublisher)
    autoindent = Bool(False)
    exiter = Instance(_Exiter)
    exit_now = Bool(False)
    keepkernel_on_exit = AnyTrait(None)
    kernel = AnyTrait(None)
    """Libraries look for `comm_manager` here; its presence shows them that this is a kernel."""

    # IPython sets these for every cell. A trait would take 4 µs each, to notify its observers.
    execution_count = 1
    last_execution_succeeded = True
    last_execution_result = None

    compile: CellCompiler
    processes = True
    walls = True
    mime_max = MIME_MAX
    interrupted = False
    """An interrupt cancelled the cell's task: report its CancelledError as KeyboardInterrupt."""
    last_error: dict[str, Any] | None = None
    """The content of the last `error` frame of this cell."""
    error_in_display = False

    _publish: Publish | None = None
    _cell_begins = False

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
        if not processes:
            self._refuse_script_magics()
        if rules is not None:
            self.ast_transformers.append(RuleKeeper(rules, self.user_ns))

    def publish_by(self, publish: Publish | None) -> None:
        """Send frames by `publish` from now on; None drops them."""
        self._publish = publish

    def publish(self, kind: str, content: Mapping[str, Any], *, hold: bool = False) -> None:
        """Publish a frame. `hold`: the next frame follows at once, and can be sent with it."""
        if self._publish is not None:
            self._publish(kind, content, hold=hold)

    def begin_cell(self) -> None:
        self.interrupted = False
        self.last_error = None
        self.error_in_display = False
        self.displayhook._is_active = False
        self._cell_begins = True

    # --- Building: no file, no thread, no search for a virtual environment.

    @default("exiter")
    def _default_exiter(self) -> _Exiter:
        return _Exiter(self)

    @default("ipython_dir")
    def _default_ipython_dir(self) -> str:
        return str(get_ipython_dir())

    @default("profile_dir")
    def _default_profile_dir(self) -> ProfileDir:
        return ProfileDir.create_profile_dir_by_name(self.ipython_dir, "default")

    def init_ipython_dir(self, ipython_dir: Any) -> None:
        """Create it at its first use; most cells never use it."""

    def init_profile_dir(self, profile_dir: Any) -> None:
        """Create it at its first use: %store and similar magics do."""

    def init_virtualenv(self) -> None:
        """Do nothing: the policy chooses the interpreter."""

    def init_environment(self) -> None:
        # As in ipykernel, except that programs without a terminal are not forced to use colour:
        # models and programs read their output.
        os.environ.setdefault("TERM", "xterm-color")
        os.environ.setdefault("CLICOLOR", "1")
        os.environ.update(PAGER="cat", GIT_PAGER="cat")

    def init_display_formatter(self) -> None:
        self.display_formatter = LeanFormatter(parent=self)
        self.configurables.append(self.display_formatter)

    def init_hooks(self) -> None:
        super().init_hooks()
        self.set_hook("show_in_pager", page.as_hook(self._page), 99)

    def init_magics(self) -> None:
        super().init_magics()
        self.register_magics(PagerMagics)

    def init_history(self) -> None:
        self.history_manager = LeanHistory(shell=self, parent=self)
        self.configurables.append(self.history_manager)

    def init_prefilter(self) -> None:
        super().init_prefilter()
        self._checkers = list(self.prefilter_manager.checkers)
        self._transformers = list(self.prefilter_manager.transformers)

    @default("input_transformer_manager")
    def _default_transformers(self) -> TransformerManager:
        return LeanTransformerManager()

    # --- Cells.

    def transform_cell(self, raw_cell: str) -> str:
        line = raw_cell.removesuffix("\n")
        return f"{line}\n" if self._is_python(line) else super().transform_cell(raw_cell)

    def _is_python(self, line: str) -> bool:
        """Return whether IPython would leave this cell unchanged: one line of plain Python that
        does not begin with a magic's name. IPython needs 40 µs to find that out."""
        if not line.isprintable() or line[:1] in _NOT_PYTHON or _special(line):
            return False
        if line.startswith(("In [", "...")) or self.autocall or self.input_transformers_post:
            return False
        name = _FIRST_NAME.match(line)[0]
        if isinstance(self.user_ns.get(name), (Macro, IPyAutocall)) or self._is_magic(name):
            return False
        prefilter = self.prefilter_manager
        return (
            self.input_transformer_manager.untouched
            and prefilter.checkers == self._checkers
            and prefilter.transformers == self._transformers
        )

    async def run_ast_nodes(
        self,
        nodelist: list[ast.stmt],
        cell_name: str,
        interactivity: Any = "last_expr",
        compiler: Any = compile,
        result: Any = None,
    ) -> Any:
        """Record the statement that ends a request's cell.

        A cell that user code runs inside that one has no such end. With "all" or "last", a value
        may be shown long before it.
        """
        if self._cell_begins:
            self._cell_begins = False
            ends = nodelist and interactivity == "last_expr"
            self.compile.last_node = nodelist[-1] if ends else None
        return await super().run_ast_nodes(nodelist, cell_name, interactivity, compiler, result)

    def _is_magic(self, name: str) -> bool:
        manager = self.magics_manager
        magics = manager.magics
        return name in magics["line"] or name in magics["cell"] or name in manager.lazy_magics

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

    def showtraceback(self, exc_tuple: Any = None, *args: Any, **kwargs: Any) -> None:
        error = sys.exc_info()[1] if exc_tuple is None else exc_tuple[1]
        if self.interrupted and isinstance(error, asyncio.CancelledError):
            exc_tuple = (KeyboardInterrupt, KeyboardInterrupt(), error.__traceback__)
        elif isinstance(error, KeyboardInterrupt):
            exc_tuple = (type(error), error, _without_handler(error.__traceback__))
        super().showtraceback(exc_tuple, *args, **kwargs)

    def _showtraceback(self, etype: type, evalue: Any, stb: list[str]) -> None:
        if self.displayhook.is_active:
            self.error_in_display = True
        self.last_error = error_content(etype, evalue, stb)
        if isinstance(evalue, Exception) and (why := self._why_refused(evalue)):
            self.last_error["evalue"] += f". {why}"
            self.last_error["traceback"].append(why)
        self.publish("error", self.last_error)

    def _why_refused(self, error: Exception) -> str | None:
        if not self.walls:
            return None
        try:
            return error_hints.reason(error, processes=self.processes)
        except Exception:  # noqa: BLE001 - user code: an error's own attributes
            return None


def _without_handler(below: types.TracebackType | None) -> types.TracebackType | None:
    """Return a traceback without our signal handler at its end. Jupyter's handler is in C and shows
    no frame."""
    frames = []
    while below is not None:
        frames.append(below)
        below = below.tb_next
    while len(frames) > 1 and frames[-1].tb_frame.f_code.co_filename == _HANDLER_FILE:
        frames.pop()
    result = None
    for frame in reversed(frames):
        result = types.TracebackType(result, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return result


# Libraries use this name to detect a notebook.
SandboxShell.__name__ = "ZMQInteractiveShell"
InteractiveShellABC.register(SandboxShell)

_LAZY_TRAITS = (
    *("ast_node_interactivity", "ast_transformers", "autocall", "input_transformer_manager"),
    *("input_transformers_post", "logger"),
)
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
    # Create the objects now that IPython creates on first use by a cell. Otherwise each fork of a
    # zygote creates them again, because a rehearsal leaves nothing behind.
    for name in _LAZY_TRAITS:
        getattr(shell, name)
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


def error_content(etype: type, evalue: Any, lines: list[str] | None = None) -> dict[str, Any]:
    """Return the content of an `error` frame, also for errors whose own str() fails."""
    try:
        message = str(evalue)
    except Exception:  # noqa: BLE001 - user code
        message = "<the error's own __str__ failed>"
    if lines is None:
        lines = [f"{etype.__name__}: {message}"]
    return {
        "ename": etype.__name__,
        "evalue": cut(message, _MESSAGE_MAX),
        "traceback": _bounded_lines([str(line) for line in lines]),
    }


def describe(error: BaseException) -> dict[str, Any]:
    """Return `error_content` with a plain traceback, for an error that IPython did not show."""
    if isinstance(error, UsageError):
        return error_content(type(error), error)
    below = error.__traceback__
    while below and any(part in below.tb_frame.f_code.co_filename for part in _AROUND):
        below = below.tb_next
    try:
        lines = traceback.format_exception(type(error), error, _without_handler(below))
    except Exception:  # noqa: BLE001 - user code
        return error_content(type(error), error)
    return error_content(type(error), error, [line.rstrip("\n") for line in lines])


def _bounded_lines(lines: list[str]) -> list[str]:
    if sum(map(len, lines)) <= _TRACEBACK_MAX and len(lines) <= _LINES_MAX:
        return lines
    # The end has the error, the beginning the place in the cell.
    part = _TRACEBACK_MAX // 8
    return [cut(line, part) for line in (*lines[:3], "…", *lines[-4:])]
