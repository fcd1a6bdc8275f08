"""Load a Policy from its files: find, read, follow `extends`, merge, validate.

`extends = "default"` puts a file on top of another policy. Tables merge key by key. A list or a
single value replaces the one below, so that a list can shrink. `description` and `[[expect]]`
describe their own file and are not inherited.
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

from msgspec import Struct
from pydantic import ValidationError

from sbx.errors import NotFound, out_of_files
from sbx.policy.find import (
    ALIASES,
    SEARCH_VARIABLE,
    ProblemsError,
    cannot_be_read,
    directories,
    find,
    locate,
    named_files,
    refuse_shipped_name,
)
from sbx.policy.imports import refusals
from sbx.policy.model import SCHEMA, Policy
from sbx.policy.problems import Problem, explain, policy_error, shown

_LARGEST_FILE = 256 * 1024
_LONGEST_CHAIN = 16
_REMEMBERED = 64  # texts and chains: validating one takes 1 to 3 ms, for each new sandbox
_RACY_NS = 2_000_000_000  # two changes of a file within one clock tick may have the same stamp
_FILE_KEYS = ("schema", "extends", *(key for key in Policy.model_fields if key != "name"))
_NOT_INHERITED = ("description", "expect")


class PolicyInfo(Struct, frozen=True):
    """One line of `sbx policy list`. `problem` is the reason why the policy cannot be used, or
    None."""

    name: str
    path: Path
    description: str
    extends: str | None
    aliases: tuple[str, ...] = ()
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class _Layer:
    """One file of a chain of `extends`.

    Layers are compared by path and text, so that the same chain is validated once.
    """

    path: Path
    text: str
    table: dict[str, Any] = field(compare=False)

    @property
    def extends(self) -> Any:
        return self.table.get("extends")


_Stamp = tuple[int, int, int, int, int, int]


class _Known(Struct, frozen=True):
    """A policy, with the stamps of every file and directory that its name led to."""

    policy: Policy
    seen: dict[Path, _Stamp | None]


_cache: dict[tuple[str, tuple[Path, ...], str], _Known] = {}


P = ParamSpec("P")
T = TypeVar("T")


def _with_files(read: Callable[P, T]) -> Callable[P, T]:
    """Raise `too_many_open_files` if this process cannot open files; the policy is not at fault."""

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
    """Return the policy with this name, or in this file.

    A `str` is always a name, so that a name in a request cannot reach a file. Pass text that a user
    typed through `reference` first. `search` are additional directories of policies.

    Raise NotFound `policy_not_found`. Raise PolicyError `invalid_policy`, with all problems in its
    details, and `policy_shadows` for a file with the name of a shipped policy. Raise Unavailable
    `too_many_open_files`.
    """
    try:
        chain = _chain(locate(policy, search), search)
        loaded = _validate(chain)
    except ProblemsError as faulty:
        raise policy_error(faulty.problems, code=faulty.code) from None
    if isinstance(policy, str):
        _remember(policy, tuple(search), [layer.path for layer in chain], loaded)
    return loaded


def unchanged(policy: str, *, search: Sequence[Path] = ()) -> Policy | None:
    """Return the last result of `load`, if another call would return the same; None otherwise.

    This takes a few calls of stat(2) and reads no file. Return None if a file or a directory of the
    search has changed. Also return None if one changed so recently that a second change might not
    alter its time stamp.
    """
    entry = _cache.get((policy, tuple(search), os.environ.get(SEARCH_VARIABLE, "")))
    if entry is None or any(_stamp(path) != stamp for path, stamp in entry.seen.items()):
        return None
    return entry.policy


def _remember(name: str, search: tuple[Path, ...], files: Sequence[Path], policy: Policy) -> None:
    places = set(directories(search))
    places |= {file.parent for file in files}
    names = {name, *(file.stem for file in files)}
    candidates = {place / f"{stem}.toml" for place in places for stem in names}
    seen = {path: _stamp(path) for path in (*places, *candidates, *files)}
    newest = max((stamp[-1] for stamp in seen.values() if stamp), default=0)
    if time.time_ns() - newest < _RACY_NS:
        return
    while len(_cache) >= _REMEMBERED:
        _cache.pop(next(iter(_cache)))
    _cache[name, search, os.environ.get(SEARCH_VARIABLE, "")] = _Known(policy, seen)


def _stamp(path: Path) -> _Stamp | None:
    try:
        info = os.stat(path)
    except OSError:
        return None
    return info.st_dev, info.st_ino, info.st_mode, info.st_size, info.st_mtime_ns, info.st_ctime_ns


@_with_files
def check(path: Path, *, search: Sequence[Path] = ()) -> list[Problem]:
    """Return all problems of the policy in that file; an empty list if it has none.

    Raise NotFound if the file does not exist.
    """
    try:
        _validate(_chain(locate(path, search), search))
    except ProblemsError as faulty:
        return faulty.problems
    return []


@_with_files
def available(search: Sequence[Path] = ()) -> list[PolicyInfo]:
    """Return every policy that `load` finds by name, shipped ones first, including invalid ones.

    Raise PolicyError for a directory of policies that cannot be read.
    """
    try:
        return [_info(path, search) for path in named_files(search)]
    except ProblemsError as faulty:
        raise policy_error(faulty.problems) from None


def _info(path: Path, search: Sequence[Path]) -> PolicyInfo:
    aliases = tuple(alias for alias, name in ALIASES.items() if name == path.stem)
    description, extends, problem = "", None, None
    try:
        refuse_shipped_name(path, path.stem)
        chain = _chain(path, search)
        extends = chain[0].extends
        description = _validate(chain).description
    except ProblemsError as faulty:
        problem = str(faulty.problems[0])
    except NotFound as error:  # a dangling symlink
        problem = error.message
    return PolicyInfo(path.stem, path, description, extends, aliases, problem)


# --- reading ----------------------------------------------------------------------------------


def _chain(path: Path, search: Sequence[Path]) -> tuple[_Layer, ...]:
    """Return the file and all files that it extends, itself first. Also search its directory."""
    search = [*search, path.parent]
    chain = [_read(path)]
    while (name := chain[-1].extends) is not None:
        here = chain[-1].path
        if not isinstance(name, str):
            raise _wrong_extends(here, f"must be a name, not {shown(name)}")
        try:
            # Files next to this one may be anything, so a hint does not list them.
            below = find(name, search, is_request=False, listed=search[:-1])
        except NotFound as error:
            raise _wrong_extends(here, error.message, error.hint) from None
        if any(layer.path.samefile(below) for layer in chain):
            circle = " → ".join([*(layer.path.stem for layer in chain), below.stem])
            raise _wrong_extends(here, f"forms a circle: {circle}")
        if len(chain) == _LONGEST_CHAIN:
            raise _wrong_extends(here, f"is more than {_LONGEST_CHAIN} files deep")
        chain.append(_read(below))
    return tuple(chain)


def _wrong_extends(path: Path, why: str, hint: str | None = None) -> ProblemsError:
    return ProblemsError(Problem(f"extends: {why}", path, "extends", hint=hint))


def _read(path: Path) -> _Layer:
    return _parse(path, _text(path))


@functools.lru_cache(_REMEMBERED)
def _parse(path: Path, text: str) -> _Layer:
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        sentence, _, place = str(error).rpartition(" (at ")
        at_line = re.match(r"line (\d+)", place)
        line = int(at_line[1]) if at_line else text.count("\n") + 1  # "at end of document"
        raise ProblemsError(Problem(f"not TOML: {sentence}", path, line=line)) from None
    except (RecursionError, ValueError):  # endless brackets, or a number of 5000 digits
        raise cannot_be_read(
            path, "it is nested too deeply, or contains a number that is too large"
        ) from None
    schema = table.get("schema")
    if type(schema) is not int or schema != SCHEMA:
        raise ProblemsError(_wrong_schema(path, schema))
    if "name" in table:
        raise ProblemsError(
            Problem("name: the file name is the name of the policy; remove the line", path, "name")
        )
    return _Layer(path, text, table)


def _wrong_schema(path: Path, schema: object) -> Problem:
    if schema is None:
        return Problem(f"schema is missing: begin the file with schema = {SCHEMA}", path, "schema")
    if type(schema) is int and schema > SCHEMA:
        return Problem(
            f"schema: {shown(schema)} is newer than {SCHEMA}, which this sbx reads",
            path,
            "schema",
            hint="use a newer sbx",
        )
    return Problem(f"schema: must be {SCHEMA}, not {shown(schema)}", path, "schema")


def _text(path: Path) -> str:
    """Return the text of a regular file of bounded size. A FIFO or a device could block
    indefinitely."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise NotFound(
            f"policy file {path} does not exist",
            code="policy_not_found",
            details={"file": str(path)},
        ) from None
    except (OSError, ValueError) as error:
        if out_of_files(error) is not None:
            raise
        raise cannot_be_read(path, getattr(error, "strerror", str(error))) from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise cannot_be_read(path, "it is not a regular file")
        data = os.read(fd, _LARGEST_FILE + 1)
    finally:
        os.close(fd)
    if len(data) > _LARGEST_FILE:
        raise cannot_be_read(path, f"it is larger than {_LARGEST_FILE // 1024}KiB")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ProblemsError(Problem("is not UTF-8 text", path, line=line)) from None


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
        raise ProblemsError(*_attributed(error, chain)) from None
    if problems := list(_untrue_examples(policy, top.path)):
        raise ProblemsError(*problems)
    return policy


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    both = {
        key: {**below[key], **value}
        for key, value in above.items()
        if isinstance(value, dict) and isinstance(below.get(key), dict)
    }
    return {**below, **above, **both}


def _attributed(error: ValidationError, chain: Sequence[_Layer]) -> Iterator[Problem]:
    """Yield each problem with its file: the topmost layer that has the key."""
    for loc, problem in explain(error, Policy, _FILE_KEYS):
        keys = [part for part in loc if isinstance(part, str)]
        layer = next((layer for layer in chain if _contains(layer.table, keys)), chain[0])
        yield Problem(problem.message, layer.path, problem.key, hint=problem.hint)


def _contains(table: object, keys: list[str]) -> bool:
    for key in keys:
        if isinstance(table, dict) and key in table:
            table = table[key]
        else:
            return isinstance(table, list)  # an entry of a list, which always comes from one layer
    return True


def _untrue_examples(policy: Policy, path: Path) -> Iterator[Problem]:
    """Yield the examples that are provably wrong without running them.

    Only the import rules refuse a cell before it runs.
    """
    for index, example in enumerate(policy.expect):
        key = f"expect[{index}].run"
        try:
            refused = refusals(example.run, policy.imports)
        except SyntaxError as error:
            yield Problem(f"{key}: is not Python: {error.msg}", path, key)
            continue
        if example.then == "refused" and not refused:
            yield Problem(
                f"{key}: is not refused: no rule of [imports] applies to it",
                path,
                key,
                hint='use then = "denied" for a cell that a wall stops',
            )
        elif example.then != "refused" and refused:
            yield Problem(f"{key}: is refused and not {example.then}: {refused[0]}", path, key)
