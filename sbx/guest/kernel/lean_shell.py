"""IPython without the work that has no effect for most cells.

Each place gives the condition under which it skips a step. `1+1` takes 0.2 ms of IPython with this,
instead of 0.33. Building a shell writes no file and starts no thread.
"""

# IPython is typed only in part; only our side of it is checked here.
# mypy: disable-error-code="misc,call-arg,no-untyped-call,union-attr,no-any-return,arg-type"
# mypy: disable-error-code="var-annotated,index"

import ast
import contextlib
import os
import re
import types
import zlib
from collections.abc import Sequence
from typing import Any

from IPython.core.autocall import IPyAutocall
from IPython.core.compilerop import CachingCompiler
from IPython.core.formatters import DisplayFormatter, PlainTextFormatter
from IPython.core.history import HistoryManager
from IPython.core.inputtransformer2 import TransformerManager
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.macro import Macro
from IPython.core.profiledir import ProfileDir
from IPython.paths import get_ipython_dir
from traitlets import Bool, Type, default


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


class LeanTransformer(TransformerManager):
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


class LeanShell(InteractiveShell):
    """An IPython that builds no more than a cell needs."""

    compiler_class = Type(CellCompiler)
    autoindent = Bool(False)

    # IPython sets these for every cell. A trait would take 4 µs each, to notify its observers.
    execution_count = 1
    last_execution_succeeded = True
    last_execution_result = None

    compile: CellCompiler
    _cell_begins = False

    # --- Building: no file, no thread, no search for a virtual environment.

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

    def init_history(self) -> None:
        self.history_manager = LeanHistory(shell=self, parent=self)
        self.configurables.append(self.history_manager)

    def init_prefilter(self) -> None:
        super().init_prefilter()
        self._checkers = list(self.prefilter_manager.checkers)
        self._transformers = list(self.prefilter_manager.transformers)

    @default("input_transformer_manager")
    def _default_transformers(self) -> TransformerManager:
        return LeanTransformer()

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


_LAZY_TRAITS = (
    *("ast_node_interactivity", "ast_transformers", "autocall", "input_transformer_manager"),
    *("input_transformers_post", "logger"),
)


def create_lazy_traits(shell: LeanShell) -> None:
    """Create the objects now that IPython creates on first use by a cell.

    Otherwise each fork of a zygote creates them again, because a warm-up leaves nothing behind.
    """
    for name in _LAZY_TRAITS:
        getattr(shell, name)
