"""From files to one Policy: find, read, follow `extends`, merge, validate.

A policy is named by its file: `lab.toml` is the policy lab. The shipped ones are found first, then
the user's own: in the directories passed as `search`, then in those of the environment variable
SBX_POLICIES (separated as in PATH, where the earlier one wins). No file may take a shipped name:
`default` always is what this project says it is.

`extends = "default"` puts a file over another policy. Tables merge key by key; a list or a
single value replaces the one below, so a list can shrink. `description` and `[[expect]]` speak
of their own file and are not inherited.
"""

import functools
import os
import re
import stat
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from pydantic import ValidationError

from sbx.errors import Broken, NotFound, out_of_files
from sbx.policy.checks import policy_name
from sbx.policy.imports import refusals
from sbx.policy.model import SCHEMA, Policy
from sbx.policy.problems import Problem, explain, nearest, policy_error, shown

ALIASES = {"python-default": "default"}
_LARGEST_FILE = 256 * 1024
_LONGEST_CHAIN = 16
_REMEMBERED = 64  # texts and chains: to judge one takes 1 to 3 ms, at each new sandbox
_RACY_NS = 2_000_000_000  # a file that changes twice within one tick of a clock shows it once
_FILE_KEYS = ("schema", "extends", *(key for key in Policy.model_fields if key != "name"))
_NOT_INHERITED = ("description", "expect")
_ENVIRONMENT = "SBX_POLICIES"


@dataclass(frozen=True, slots=True)
class PolicyInfo:
    """One line of `sbx policy list`. `problem` says why it cannot be used, if it cannot."""

    name: str
    path: Path
    description: str
    extends: str | None
    aliases: tuple[str, ...] = ()
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class _Layer:
    """One file of a chain of `extends`; known by what it says, so that it is judged once."""

    path: Path
    text: str
    table: dict[str, Any] = field(compare=False)

    @property
    def extends(self) -> Any:
        return self.table.get("extends")


_Stamp = tuple[int, int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class _Known:
    """A policy, and what every file and directory was like that its name led to."""

    policy: Policy
    seen: dict[Path, _Stamp | None]


_known: dict[tuple[str, tuple[Path, ...], str], _Known] = {}


class _ProblemsError(Exception):
    """Carries problems up to `load`, which raises them, or `check`, which returns them."""

    def __init__(self, *problems: Problem, code: str | None = None) -> None:
        self.problems = list(problems)
        self.code = code


P = ParamSpec("P")
T = TypeVar("T")


def _with_files(read: Callable[P, T]) -> Callable[P, T]:
    """Tell of a process that can open no file any more as what it is: no policy is to blame."""

    @functools.wraps(read)
    def reading(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return read(*args, **kwargs)
        except OSError as error:
            if (refusal := out_of_files(error)) is None:
                raise
            raise refusal from error

    return reading


@_with_files
def load(policy: str | Path, *, search: Sequence[Path] = ()) -> Policy:
    """The policy of that name, or in that file.

    A `str` is only ever a name, so that one which came with a request cannot reach a file; what a
    person typed goes through `reference` first. `search` are further directories of policies.

    Raises NotFound `policy_not_found`; PolicyError `invalid_policy`, with all problems in its
    details, and `policy_shadows`, a file that takes the name of a shipped policy; Unavailable
    `too_many_open_files`.
    """
    try:
        chain = _chain(_locate(policy, search), search)
        found = _validate(chain)
    except _ProblemsError as faulty:
        raise policy_error(faulty.problems, code=faulty.code) from None
    if isinstance(policy, str):
        _remember(policy, tuple(search), [layer.path for layer in chain], found)
    return found


def unchanged(policy: str, *, search: Sequence[Path] = ()) -> Policy | None:
    """What `load` gave last time, if it would again: a few calls of stat(2), and nothing is read.

    None where a file or a directory that was looked into has changed, or so lately that its times
    need not show a second change.
    """
    known = _known.get((policy, tuple(search), os.environ.get(_ENVIRONMENT, "")))
    if known is None or any(_stamp(path) != stamp for path, stamp in known.seen.items()):
        return None
    return known.policy


def _remember(name: str, search: tuple[Path, ...], files: Sequence[Path], found: Policy) -> None:
    places = set(directories(search))
    places |= {file.parent for file in files}
    names = {name, *(file.stem for file in files)}
    candidates = {place / f"{one}.toml" for place in places for one in names}
    seen = {path: _stamp(path) for path in (*places, *candidates, *files)}
    newest = max((stamp[-1] for stamp in seen.values() if stamp), default=0)
    if time.time_ns() - newest < _RACY_NS:
        return
    while len(_known) >= _REMEMBERED:
        _known.pop(next(iter(_known)))
    _known[name, search, os.environ.get(_ENVIRONMENT, "")] = _Known(found, seen)


def _stamp(path: Path) -> _Stamp | None:
    try:
        its = os.stat(path)
    except OSError:
        return None
    return its.st_dev, its.st_ino, its.st_mode, its.st_size, its.st_mtime_ns, its.st_ctime_ns


@_with_files
def check(path: Path, *, search: Sequence[Path] = ()) -> list[Problem]:
    """Everything that is wrong with the policy in that file; empty if nothing is.

    Raises NotFound for no such file.
    """
    try:
        _validate(_chain(_locate(path, search), search))
    except _ProblemsError as faulty:
        return faulty.problems
    return []


@_with_files
def available(search: Sequence[Path] = ()) -> list[PolicyInfo]:
    """Every policy that `load` finds by name, also those it would refuse: shipped ones first.

    Raises PolicyError for a directory of policies that cannot be read.
    """
    try:
        return [_info(path, search) for path in _named(search)]
    except _ProblemsError as faulty:
        raise policy_error(faulty.problems) from None


def reference(text: str) -> str | Path:
    """What a person typed: a file if it has a slash or ends in .toml, else a name."""
    return Path(text) if "/" in text or text.endswith(".toml") else text


def directories(search: Sequence[Path] = ()) -> tuple[Path, ...]:
    """Where policies are looked for, whether or not they are there; the shipped ones' first."""
    return (shipped_directory(), *search, *map(Path, _named_directories()))


def shipped_directory() -> Path:
    """Where the shipped policies lie: in the package if it was installed, else in the checkout."""
    package = Path(__file__).parent.parent
    for directory in (package / "policies", package.parent / "policies"):
        if (directory / "default.toml").is_file():
            return directory
    raise Broken("the policies that come with sbx are missing", hint="install sbx again")


# --- finding ----------------------------------------------------------------------------------


def _named_directories() -> list[str]:
    return [part for part in os.environ.get(_ENVIRONMENT, "").split(os.pathsep) if part]


def _own_directories(search: Sequence[Path]) -> list[Path]:
    """The user's directories, in order. One that does not exist is passed over, one that cannot be
    read is not: what it holds might take a name."""
    # An empty entry means the working directory in PATH; here it would be a trap in a cloned tree.
    named = [directory for directory in directories(search)[1:] if os.path.lexists(directory)]
    for directory in named:
        if not directory.is_dir():
            raise _ProblemsError(Problem("is not a directory of policies", directory))
        if not os.access(directory, os.R_OK | os.X_OK, effective_ids=True):
            raise _cannot_be_read(directory, "permission denied")
    return named


def _named(search: Sequence[Path]) -> list[Path]:
    """The file of every name, shipped ones first; of the user's own with one name the earlier.
    One that takes a shipped name is among them: it is in the way, and a list should show that."""
    own: dict[str, Path] = {}
    for directory in _own_directories(search):
        for path in _files_of(directory):
            own.setdefault(path.stem, path)
    shipped = _files_of(shipped_directory())
    return [*shipped, *(path for path in own.values() if not any(_same(path, s) for s in shipped))]


def _files_of(directory: Path) -> list[Path]:
    """Return the policy files of a directory. Path.glob of Python 3.12 and later returns none of
    them where the directory cannot be opened."""
    return sorted(directory / name for name in os.listdir(directory) if name.endswith(".toml"))


def _same(path: Path, other: Path) -> bool:
    return os.path.exists(path) and path.samefile(other)  # a link may lead nowhere


def _locate(policy: str | Path, search: Sequence[Path]) -> Path:
    if isinstance(policy, Path):
        _refuse_shipped_name(policy, policy.stem)
        return policy
    return _find(policy, search)


def _find(name: str, search: Sequence[Path], *, asked: bool = True) -> Path:
    """The file of a name. A shipped name is never taken by another file: whoever asked for it is
    told of that file; a policy that merely extends it gets the shipped one."""
    try:
        policy_name(name)
    except ValueError:
        raise _not_found(name, search) from None
    candidates = [directory / f"{name}.toml" for directory in _own_directories(search)]
    own = [path for path in candidates if os.path.exists(path)]
    if (shipped := _shipped(name)).exists():
        for path in own if asked else ():
            _refuse_shipped_name(path, name)
        return shipped
    if own:
        return own[0]
    raise _not_found(name, search)


def _shipped(name: str) -> Path:
    return shipped_directory() / f"{ALIASES.get(name, name)}.toml"


def _refuse_shipped_name(path: Path, name: str) -> None:
    shipped = _shipped(name)
    if shipped.exists() and os.path.exists(path) and not _same(path, shipped):
        raise _ProblemsError(
            Problem(
                f"{name} is the name of a policy that comes with sbx",
                path,
                hint=f'give the file another name; it may say extends = "{name}"',
            ),
            code="policy_shadows",
        )


def _not_found(name: str, search: Sequence[Path]) -> NotFound:
    names = [*dict.fromkeys(path.stem for path in _named(search)), *ALIASES]
    near = nearest(name, names)
    if reference(name) != name:
        hint = "a text is a policy's name; pass a pathlib.Path for a file"
    else:
        hint = f"there are {', '.join(names)}; {_ENVIRONMENT} names directories of further ones"
    return NotFound(
        f"there is no policy {shown(name)}" + (f"; did you mean {near}?" if near else ""),
        code="policy_not_found",
        hint=hint,
        details={"policy": name, "available": names, "nearest": near},
    )


def _info(path: Path, search: Sequence[Path]) -> PolicyInfo:
    aliases = tuple(alias for alias, name in ALIASES.items() if name == path.stem)
    description, extends, problem = "", None, None
    try:
        _refuse_shipped_name(path, path.stem)
        chain = _chain(path, search)
        extends = chain[0].extends
        description = _validate(chain).description
    except _ProblemsError as faulty:
        problem = str(faulty.problems[0])
    except NotFound as error:  # a link that leads nowhere
        problem = error.message
    return PolicyInfo(path.stem, path, description, extends, aliases, problem)


# --- reading ----------------------------------------------------------------------------------


def _chain(path: Path, search: Sequence[Path]) -> tuple[_Layer, ...]:
    """The file and all that it extends, itself first. Siblings of the file are found, too."""
    search = [*search, path.parent]
    chain = [_read(path)]
    while (name := chain[-1].extends) is not None:
        here = chain[-1].path
        if not isinstance(name, str):
            raise _wrong_extends(here, f"must be a name, not {shown(name)}")
        try:
            below = _find(name, search, asked=False)
        except NotFound as error:
            raise _wrong_extends(here, error.message, error.hint) from None
        if any(layer.path.samefile(below) for layer in chain):
            circle = " → ".join([*(layer.path.stem for layer in chain), below.stem])
            raise _wrong_extends(here, f"goes round in a circle: {circle}")
        if len(chain) == _LONGEST_CHAIN:
            raise _wrong_extends(here, f"is more than {_LONGEST_CHAIN} files deep")
        chain.append(_read(below))
    return tuple(chain)


def _wrong_extends(path: Path, why: str, hint: str | None = None) -> _ProblemsError:
    return _ProblemsError(Problem(f"extends: {why}", path, "extends", hint=hint))


def _read(path: Path) -> _Layer:
    return _parse(path, _text(path))


@functools.lru_cache(_REMEMBERED)
def _parse(path: Path, text: str) -> _Layer:
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        said, _, place = str(error).rpartition(" (at ")
        at_line = re.match(r"line (\d+)", place)
        line = int(at_line[1]) if at_line else text.count("\n") + 1  # "at end of document"
        raise _ProblemsError(Problem(f"not TOML: {said}", path, line=line)) from None
    except (RecursionError, ValueError):  # brackets without end, or a number of 5000 digits
        raise _cannot_be_read(path, "it is too deep, or holds too large a number") from None
    schema = table.get("schema")
    if type(schema) is not int or schema != SCHEMA:
        raise _ProblemsError(_wrong_schema(path, schema))
    if "name" in table:
        raise _ProblemsError(
            Problem("name: a policy is named by its file; take the line out", path, "name")
        )
    return _Layer(path, text, table)


def _wrong_schema(path: Path, schema: object) -> Problem:
    if schema is None:
        return Problem(f"schema is missing: begin the file with schema = {SCHEMA}", path, "schema")
    if type(schema) is int and schema > SCHEMA:
        return Problem(
            f"schema: {shown(schema)} is newer than what this sbx reads, {SCHEMA}",
            path,
            "schema",
            hint="use a newer sbx",
        )
    return Problem(f"schema: must be {SCHEMA}, not {shown(schema)}", path, "schema")


def _text(path: Path) -> str:
    """The text of a regular file of bounded size; a FIFO or a device could hold us forever."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise NotFound(
            f"there is no policy file {path}", code="policy_not_found", details={"file": str(path)}
        ) from None
    except (OSError, ValueError) as error:
        if out_of_files(error) is not None:
            raise
        raise _cannot_be_read(path, getattr(error, "strerror", str(error))) from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise _cannot_be_read(path, "it is not a regular file")
        data = os.read(fd, _LARGEST_FILE + 1)
    finally:
        os.close(fd)
    if len(data) > _LARGEST_FILE:
        raise _cannot_be_read(path, f"it is larger than {_LARGEST_FILE // 1024}KiB")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _ProblemsError(Problem("is not UTF-8 text", path, line=line)) from None


def _cannot_be_read(path: Path, why: str) -> _ProblemsError:
    return _ProblemsError(Problem(f"cannot be read: {why}", path))


# --- merging and validating -------------------------------------------------------------------


@functools.lru_cache(_REMEMBERED)
def _validate(chain: tuple[_Layer, ...]) -> Policy:
    top = chain[0]
    table: dict[str, Any] = {}
    for layer in reversed(chain):
        own = {k: v for k, v in layer.table.items() if layer is top or k not in _NOT_INHERITED}
        table = _merge(table, own)
    table["name"] = top.path.stem
    table = {key: value for key, value in table.items() if key not in ("schema", "extends")}
    try:
        policy = Policy.model_validate(table)
    except ValidationError as error:
        raise _ProblemsError(*_attributed(error, chain)) from None
    if problems := list(_untrue_examples(policy, top.path)):
        raise _ProblemsError(*problems)
    return policy


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """No table of a policy holds another table, so one level is all there is."""
    both = {
        key: {**below[key], **value}
        for key, value in above.items()
        if isinstance(value, dict) and isinstance(below.get(key), dict)
    }
    return {**below, **above, **both}


def _attributed(error: ValidationError, chain: Sequence[_Layer]) -> Iterator[Problem]:
    """Each problem with the file that said it: the topmost one that has the key."""
    for loc, problem in explain(error, Policy, _FILE_KEYS):
        keys = [part for part in loc if isinstance(part, str)]
        layer = next((layer for layer in chain if _says(layer.table, keys)), chain[0])
        yield Problem(problem.message, layer.path, problem.key, hint=problem.hint)


def _says(table: object, keys: list[str]) -> bool:
    for key in keys:
        if isinstance(table, dict) and key in table:
            table = table[key]
        else:
            return isinstance(table, list)  # an entry of a list, which one layer says whole
    return True


def _untrue_examples(policy: Policy, path: Path) -> Iterator[Problem]:
    """What can be known of an example without running it: only import rules refuse a cell."""
    for index, example in enumerate(policy.expect):
        key = f"expect[{index}].run"
        try:
            refused = refusals(example.run, policy.imports)
        except SyntaxError as error:
            yield Problem(f"{key}: is not Python: {error.msg}", path, key)
            continue
        if example.then == "refused" and not refused:
            yield Problem(
                f"{key}: is not refused: no rule of [imports] speaks of it",
                path,
                key,
                hint='then = "denied" is what a wall answers',
            )
        elif example.then != "refused" and refused:
            yield Problem(f"{key}: is refused and not {example.then}: {refused[0]}", path, key)
