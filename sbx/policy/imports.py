"""Which imports of a cell the rules of a policy refuse, told from its text alone.

For the examples of a policy, at load. In a live kernel `sbx.guest.import_rules` decides, which also
knows what earlier cells bound and may not import this package; tests hold the two to one answer.

The rules give the writer of a cell one clear sentence instead of a PermissionError from the depth
of a library. They are easily evaded (`getattr(os, "sys" + "tem")`): the walls are what protects.
What the libraries that a cell uses import is not looked at.
"""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sbx.policy.model import Imports

_LONGEST_CHAIN = 16
_IMPORTERS = ("__import__", "import_module", "importlib.import_module")


@dataclass(frozen=True, slots=True)
class Refusal:
    """`name` is the module or member at `line` of the cell, `forbidden` whether it is named in
    `imports.forbid`, or else only missing from `imports.allow`."""

    name: str
    line: int
    forbidden: bool

    def __str__(self) -> str:
        if self.forbidden:
            return f"line {self.line}: the policy forbids {self.name}"
        return f"line {self.line}: {self.name} is not among the modules that the policy allows"


def permits(rules: Imports, module: str) -> bool:
    """Whether a cell may import `module`, a dotted name."""
    return not _covers(rules.forbid, module) and (
        rules.allow == "any" or _covers(rules.allow, module)
    )


def refusals(code: str, rules: Imports) -> list[Refusal]:
    """What of `code` the rules refuse, by line; empty if nothing. Top-level await is Python here.

    Raises SyntaxError for what is not Python: IPython's magics have to be translated first.
    """
    if rules.allow == "any" and not rules.forbid:
        return []
    nodes = list(ast.walk(_parse(code)))
    found = {_refusal(rules, name, line) for name, line in _imported(nodes, rules)}
    found |= {
        Refusal(name, line, forbidden=True)
        for name, line in _members(nodes)
        if name in rules.forbid and "." in name
    }
    return sorted((one for one in found if one), key=lambda one: (one.line, one.name))


def _parse(code: str) -> ast.AST:
    flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    try:
        # Only ever parsed: PyCF_ONLY_AST makes no code object.
        tree = compile(code, "<cell>", "exec", flags=flags, dont_inherit=True)
    except (RecursionError, MemoryError, ValueError) as error:
        raise SyntaxError(f"cannot be parsed: {error}") from error
    assert isinstance(tree, ast.AST)
    return tree


def _covers(names: Sequence[str], module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in names)


def _refusal(rules: Imports, name: str, line: int) -> Refusal | None:
    """Named as shortly as the rules tell it apart: subprocess.run is forbidden as subprocess."""
    if permits(rules, name):
        return None
    if covering := [known for known in rules.forbid if _covers([known], name)]:
        return Refusal(covering[0], line, forbidden=True)
    package = name.partition(".")[0]
    partly_allowed = any(known.startswith(f"{package}.") for known in rules.allow)
    return Refusal(name if partly_allowed else package, line, forbidden=False)


def _imported(nodes: Sequence[ast.AST], rules: Imports) -> Iterator[tuple[str, int]]:
    """Every module that the cell imports, with the members that it takes from one by name."""
    for node in nodes:
        match node:
            case ast.Import(names=names):
                yield from ((alias.name, node.lineno) for alias in names)
            case ast.ImportFrom(module=str(module), names=names, level=0):
                for alias in names:
                    # `from os import *` brings in os.system, so it counts as what is forbidden.
                    taken = _forbidden_below(rules, module) if alias.name == "*" else [alias.name]
                    yield from ((f"{module}.{name}", node.lineno) for name in taken)
                    if not taken:
                        yield module, node.lineno
            case ast.Call(func=func, args=[ast.Constant(value=str(module)), *_]):
                if _dotted(func) in _IMPORTERS:
                    yield module, node.lineno


def _forbidden_below(rules: Imports, module: str) -> list[str]:
    return [name[len(module) + 1 :] for name in rules.forbid if name.startswith(f"{module}.")]


def _members(nodes: Sequence[ast.AST]) -> Iterator[tuple[str, int]]:
    """Every dotted name in the cell, `import os as o` undone: o.system is os.system."""
    aliases = {
        alias.asname: alias.name if isinstance(node, ast.Import) else f"{node.module}.{alias.name}"
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }
    for node in nodes:
        if isinstance(node, ast.Attribute) and (name := _dotted(node)):
            root, dot, rest = name.partition(".")
            yield aliases.get(root, root) + dot + rest, node.lineno


def _dotted(node: ast.expr) -> str | None:
    """`a.b.c` as text; None for anything that is not plain names, or has very many of them.

    The front of a chain is a node of its own, so nothing hides behind a long one; a limit keeps a
    cell that is one enormous chain from costing its square.
    """
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        if len(parts) == _LONGEST_CHAIN:
            return None
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None
