"""Check which modules a cell imports against the policy, on its syntax tree, before it runs.

This is help for the user, not a wall: it reports at once and in words that an import will fail, so
that a model writes something else. It sees only names that are spelled out in the cell.
`exec`, a string put together at run time, or a file that the cell runs pass it. The walls hold for
them as for everything else.
"""

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class ImportRules:
    """Dotted names. An entry covers the names below it: `os` covers `os.path`.

    `allow` None allows every module. `forbid` overrides `allow`. It may also name a part of a
    module, such as `os.system`: then both attribute access and `from os import system` are refused.
    """

    allow: frozenset[str] | None = None
    forbid: frozenset[str] = field(default_factory=frozenset)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        allow = data.get("allow")
        return cls(
            allow=None if allow is None else frozenset(allow),
            forbid=frozenset(data.get("forbid") or ()),
        )


@dataclass(frozen=True, slots=True)
class Violation:
    name: str
    """The module, or the part of one, that the cell named."""
    rule: str | None
    """The entry of `forbid` that covers it; None if `allow` does not cover it."""
    line: int

    def sentence(self, rules: ImportRules) -> str:
        """Return the refusal and the allowed modules, for a person or a model."""
        if self.rule is not None:
            covered = "" if self.rule == self.name else f" (rule {self.rule!r})"
            return f"line {self.line}: this sandbox's policy forbids {self.name!r}{covered}."
        allowed = sorted(rules.allow or ())
        listed = ", ".join(allowed[:60]) + (", …" if len(allowed) > 60 else "")
        return (
            f"line {self.line}: this sandbox's policy does not allow importing {self.name!r}."
            f" Allowed: {listed or 'nothing'}, and your own modules in the working directory."
        )


def check(
    tree: ast.AST,
    rules: ImportRules,
    *,
    modules: Mapping[str, str] | None = None,
    is_local: Callable[[str], bool] = lambda name: False,
) -> Violation | None:
    """Return the first violation of the rules in `tree`, or None.

    `modules` maps names that earlier cells bound to their modules (`{"o": "os"}`). `is_local`
    returns whether a top-level name is the user's own file, which is always allowed.
    """
    bound = {**(modules or {}), **_bindings(tree)}
    for node in ast.walk(tree):
        for module, candidates in _imported(node, bound):
            if violation := _judge(module, candidates, rules, is_local, node):
                return violation
        name = _attribute(node, bound)
        if name and (rule := _covering(name, rules.forbid)):
            return Violation(name, rule, getattr(node, "lineno", 1))
    return None


def _judge(
    module: str,
    candidates: list[str],
    rules: ImportRules,
    is_local: Callable[[str], bool],
    node: ast.AST,
) -> Violation | None:
    line = getattr(node, "lineno", 1)
    for name in [module, *candidates]:
        if rule := _covering(name, rules.forbid):
            return Violation(name, rule, line)
        if name.endswith(".*"):  # also binds the forbidden parts of the module
            inside = sorted(entry for entry in rules.forbid if entry.startswith(name[:-1]))
            if inside:
                return Violation(name, inside[0], line)
    if rules.allow is None or _covering(module, rules.allow) or is_local(module.split(".")[0]):
        return None
    if candidates and all(_covering(name, rules.allow) for name in candidates):
        return None  # `from os import path` where `os.path` alone is allowed
    return Violation(module, None, line)


def _covering(name: str, entries: frozenset[str]) -> str | None:
    """Return the entry that is `name` or a parent of it."""
    while name:
        if name in entries:
            return name
        name = name.rpartition(".")[0]
    return None


def _bindings(tree: ast.AST) -> dict[str, str]:
    """Return the names that the tree's imports bind anywhere, and the modules behind them."""
    bound = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                bound[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            for alias in node.names:
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return bound


def _imported(node: ast.AST, bound: Mapping[str, str]) -> Iterator[tuple[str, list[str]]]:
    """Yield (module, the names imported from it) for each import in `node`."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.name, []
    elif isinstance(node, ast.ImportFrom):
        if not node.level and node.module:
            yield node.module, [f"{node.module}.{alias.name}" for alias in node.names]
    elif isinstance(node, ast.Call):
        function = _dotted(node.func, bound)
        if function in {"__import__", "builtins.__import__", "importlib.import_module"}:
            name = _constant(node.args[0] if node.args else _keyword(node, "name"))
            if name and not name.startswith("."):
                yield name, []


def _attribute(node: ast.AST, bound: Mapping[str, str]) -> str | None:
    """Return `os.system`, or `getattr(os, "system")`, as a dotted name; None for anything else."""
    if isinstance(node, ast.Attribute):
        return _dotted(node, bound, known_only=True)
    if isinstance(node, ast.Name):
        name = bound.get(node.id)
        return name if name and "." in name else None
    if isinstance(node, ast.Call) and _dotted(node.func, {}) == "getattr" and len(node.args) > 1:
        owner = _dotted(node.args[0], bound, known_only=True)
        name = _constant(node.args[1])
        return f"{owner}.{name}" if owner and name else None
    return None


def _dotted(node: ast.AST, bound: Mapping[str, str], *, known_only: bool = False) -> str | None:
    """Return a chain of names as a module path, with the names resolved by `bound`."""
    if isinstance(node, ast.Name):
        return bound.get(node.id, None if known_only else node.id)
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value, bound, known_only=known_only)
        return f"{owner}.{node.attr}" if owner else None
    return None


def _constant(node: ast.AST | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _keyword(call: ast.Call, name: str) -> ast.AST | None:
    return next((keyword.value for keyword in call.keywords if keyword.arg == name), None)
