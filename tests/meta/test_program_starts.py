"""Code of the host starts programs, makes files and reads data in known ways only.

Code inside writes into working directories. A Python that is started there imports from it, other
programs obey its files, and a pickle or a fixed name in /tmp gives it the host. Each test here
reads the source of sbx, so that it finds the next such place.
"""

import ast
import gc
import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SBX = ROOT / "sbx"
# These run inside of the walls, by the file or as a text that the guest gets.
INSIDE = ("guest/", "doctor/attacks/probe_program.py")
START = re.compile(
    r"os\.(exec|spawn|posix_spawn|popen|system|startfile)\w*|webbrowser\.open\w*|pty\.spawn"
    r"|subprocess\.(Popen|run|call|check_\w+|get\w*output)|.*\.?\b(create_)?subprocess_(exec|shell)"
    r"|anyio\.(open|run)_process|.*\.?\b(Popen|fork_exec)"
)
# An expression that is a Python of the host, as a word of a command.
PYTHON = re.compile(
    r"sys\.executable|(self\._)?python\.executable"
    r"|str\((self\._)?(python|interpreter|executable)\)"
)
NO_COMMANDS = {"environments/pythons.py": "[sys.executable, *_candidates(environment)]"}
ISOLATED = ("-I", "-P")


@cache
def sources() -> dict[str, ast.Module]:
    """The modules of the host, by their path below sbx."""
    paths = {str(path.relative_to(SBX)): path for path in sorted(SBX.rglob("*.py"))}
    assert len(paths) > 400
    return {
        name: ast.parse(path.read_text())
        for name, path in paths.items()
        if not name.startswith(INSIDE)
    }


@pytest.fixture(scope="module", autouse=True)
def without_collections() -> Iterator[None]:
    """Each collection of garbage would visit the million nodes of these trees, also in the modules
    of tests after this one."""
    gc.disable()
    yield
    sources.cache_clear()
    starts.cache_clear()
    gc.enable()


def is_start(call: ast.Call) -> bool:
    """Whether a call starts a program. The last name decides for most calls, which is faster."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if not re.search("exec|spawn|open|system|startfile|Popen|run|call|check|output|process", name):
        return False
    return START.fullmatch(ast.unparse(call.func)) is not None


def calls(tree: ast.AST, within: str = "") -> Iterator[tuple[str, ast.Call]]:
    """Each call that starts a program, with the innermost function that makes it."""
    for node in ast.iter_child_nodes(tree):
        inner = within
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = node.name
        if isinstance(node, ast.Call) and is_start(node):
            yield within, node
        yield from calls(node, inner)


@cache
def starts() -> dict[str, ast.Call]:
    return {
        f"{name} {within}": call for name, tree in sources().items() for within, call in calls(tree)
    }


def unsafe_pythons(tree: ast.AST) -> list[str]:
    """The commands that start a Python without -I or -P as its first option."""
    found = []
    for node in ast.walk(tree):
        words: list[ast.expr] = []
        if isinstance(node, ast.List | ast.Tuple):
            words = node.elts
        elif isinstance(node, ast.Call):
            is_step = getattr(node.func, "attr", "") == "run"
            words = node.args if is_step or is_start(node) else []
        if not words or isinstance(words[0], ast.Constant):
            continue  # the name of another program, or an option of one
        for word, option in pairwise(words):
            if isinstance(option, ast.Starred) and isinstance(option.value, ast.Tuple):
                option = option.value.elts[0]  # noqa: PLW2901
            if not isinstance(word, ast.Attribute | ast.Call):
                continue
            is_safe = isinstance(option, ast.Constant) and option.value in ISOLATED
            if PYTHON.fullmatch(ast.unparse(word)) and not is_safe:
                found.append(ast.unparse(node))
    return found


def test_each_python_of_the_host_is_isolated() -> None:
    """`python -m sbx` in a workspace imported the modules that code inside had planted there."""
    found = {
        name: unsafe
        for name, tree in sources().items()
        if PYTHON.search((SBX / name).read_text())  # to unparse each word of sbx takes 7 s
        and (unsafe := [each for each in unsafe_pythons(tree) if each != NO_COMMANDS.get(name)])
    }
    assert not found


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("words = [sys.executable, '-m', 'sbx', 'serve']", 1),
        ("words = (sys.executable, *('-m', 'venv'))", 1),
        ("x = Popen([*prefix, sys.executable, *words])", 1),
        ("await self._steps.run(str(python), '-c', code)", 1),
        ("await steps.run(python.executable, *words)", 1),
        ("words = [sys.executable, '-I', '-m', 'sbx']", 0),
        ("words = ('pip', '--python', str(python))", 0),
        ("words = (str(python), *('-P', 'x.py'))", 0),
        ("path = Path(sys.executable)", 0),
    ],
)
def test_a_python_without_its_option_is_found(source: str, count: int) -> None:
    assert len(unsafe_pythons(ast.parse(source))) == count


def test_each_start_names_its_working_directory() -> None:
    """A program without one gets that of sbx, which may be a workspace."""
    elsewhere = {  # with the reason
        "cli/console.py _show": "webbrowser has no such argument: the directory is changed",
        "isolation/broker/spawn.py _become": "a fork of the broker, whose directory is /",
    }
    without = {
        start
        for start, call in starts().items()
        if "cwd" not in {word.arg for word in call.keywords}
    }
    assert without == set(elsewhere)


def table() -> dict[str, list[str]]:
    """The rows of the table of starts in docs/security.md: the cells of each, by the first."""
    lines = (ROOT / "docs/security.md").read_text().splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("| start in `sbx/` |"))
    rows: dict[str, list[str]] = {}
    for line in lines[head + 2 :]:
        if not line.startswith("|"):
            break
        first, *rest = (cell.strip() for cell in line.strip("|").split(" | "))
        rows |= {each.strip("` "): rest for each in first.split(",")}
    return rows


def test_each_start_of_a_program_has_a_row_with_a_test() -> None:
    """docs/security.md names the files that each started program obeys, and the test of that."""
    rows = table()
    assert set(rows) == set(starts())
    for start, cells in rows.items():
        tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", cells[-1])
        assert tests, start
        for path, name in tests:
            assert f"def {name}(" in (ROOT / path).read_text(), (start, path, name)


# -- data ------------------------------------------------------------------------------------------

UNPICKLERS = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}


def unsafe_readers(tree: ast.AST) -> list[str]:
    """The imports and calls that can execute what they read."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names if name.name.split(".")[0] in UNPICKLERS]
        elif isinstance(node, ast.ImportFrom):
            found += [node.module or ""] if (node.module or "").split(".")[0] in UNPICKLERS else []
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            is_pickle = any(word.arg == "allow_pickle" for word in node.keywords)
            if not is_pickle and not re.match("read_pickle|eval|exec|load|unsafe_|full_", name):
                continue
            callee, text = ast.unparse(node.func), ast.unparse(node)
            if (
                (
                    name in ("read_pickle", "eval", "exec")
                    and "." not in callee.removesuffix(name)[:-1]
                )
                or (re.match(r"yaml\.(unsafe_|full_|load)", callee) and "SafeLoader" not in text)
                or any(
                    word.arg == "allow_pickle" and ast.unparse(word.value) != "False"
                    for word in node.keywords
                )
            ):
                found.append(text)
    return found


def test_host_code_executes_nothing_that_it_reads() -> None:
    """An answer, a file or a value of a sandbox is JSON, and is never evaluated on the host: a
    pickle of a remote kernel was CVE-2025-14931 of another project."""
    found = {name: unsafe for name, tree in sources().items() if (unsafe := unsafe_readers(tree))}
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from cloudpickle import loads",
        "import joblib.numpy_pickle",
        "import marshal as m",
        "yaml.load(text)",
        "yaml.load(text, Loader=yaml.Loader)",
        "yaml.unsafe_load(text)",
        "numpy.load(file, allow_pickle=True)",
        "np.load(file, allow_pickle=trusted)",
        "pandas.read_pickle(file)",
        "eval(answer)",
        "exec(compile(text, 'x', 'exec'))",
    ],
)
def test_a_reader_that_executes_is_found(source: str) -> None:
    assert unsafe_readers(ast.parse(source))


# -- temporary files -------------------------------------------------------------------------------

# These pick a random name with the mode 0600 or 0700, and never open an existing file.
RANDOM = {"TemporaryDirectory", "TemporaryFile", "mkdtemp", "mkstemp", "NamedTemporaryFile"}
FIXED = {  # uses of the directory itself, each with the reason why no file is made by a fixed name
    "runtime/data_dir.py": "the parent of mkdtemp",
    "workspace/allowed_paths.py": "a directory that no sandbox may see",
    "runtime/settings.py": "without a home: a quarantine, refused if another user made it",
}
PLACES = re.compile(r"^/(tmp|var/tmp|dev/shm)(/|$)")


def test_temporary_files_have_random_names() -> None:
    """A fixed name in /tmp can be made first by another user, as a link too (CVE-2026-46406)."""
    found = {}
    for name, tree in sources().items():
        for node in ast.walk(tree):
            is_attribute = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
            text = ast.unparse(node) if is_attribute else ""
            allowed = {*RANDOM, "tempdir", *(("gettempdir",) if name in FIXED else ())}
            if text.startswith("tempfile.") and text.removeprefix("tempfile.") not in allowed:
                found[name] = text
    assert not found


def test_no_path_below_tmp_is_a_file_of_the_host() -> None:
    """The only texts with such a path are paths inside a jail, or of places that are refused."""
    inside = {
        *("isolation/plan.py", "policy/checks.py", "forbidden_directories.py"),
        *("runtime/honeytokens.py", "runtime/processes/scripts.py", "agent/tools/paths.py"),
        *("kernels/memory_watcher.py", "api/opensandbox/commands.py"),
        "doctor/attacks/resources.py",
    }
    found = {
        name
        for name, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and PLACES.match(node.value)
        and "\n" not in node.value
    }
    assert found <= inside, found - inside
