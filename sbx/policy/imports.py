"""Find the imports of a cell that the rules of a policy refuse, from the text of the cell alone.

The check of the examples of a policy uses this module when the policy is loaded. In a live kernel,
`sbx.guest.import_rules` decides. That module also knows the names that earlier cells bound, and it
may not import this package. Tests verify that both give the same result.

The rules give the author of a cell one clear sentence instead of a PermissionError from deep inside
a library. They are easily evaded (`getattr(os, "sys" + "tem")`): the walls provide the protection.
Imports inside the libraries that a cell uses are not checked.
"""

import ast
from collections.abc import Iterator, Sequence

from msgspec import Struct

from sbx.policy.tables import Imports

_LONGEST_CHAIN = 16
_IMPORTERS = ("__import__", "import_module", "importlib.import_module")


class ImportDenied(Struct, frozen=True):
    """One refused import. `name` is the module or member at `line` of the cell.

    `forbidden` is True if `imports.forbid` names it, and False if it is only missing from
    `imports.allow`.
    """

    name: str
    line: int
    forbidden: bool

    def __str__(self) -> str:
        if self.forbidden:
            return f"line {self.line}: the policy forbids {self.name}"
        return f"line {self.line}: {self.name} is not among the modules that the policy allows"


def permits(rules: Imports, module: str) -> bool:
    """Return whether a cell may import `module`, a dotted name."""
    return not _covers(rules.forbid, module) and (
        rules.allow == "any" or _covers(rules.allow, module)
    )


def refusals(code: str, rules: Imports) -> list[ImportDenied]:
    """Return the refused imports of `code`, ordered by line. Top-level await is valid here.

    Raise SyntaxError if the code is not Python. IPython magics must be translated first.
    """
    if rules.allow == "any" and not rules.forbid:
        return []
    nodes = list(ast.walk(_parse(code)))
    refused = {_refusal(rules, name, line) for name, line in _imported(nodes, rules)}
    refused |= {
        ImportDenied(name, line, forbidden=True)
        for name, line in _members(nodes)
        if name in rules.forbid and "." in name
    }
    return sorted(
        (refusal for refusal in refused if refusal),
        key=lambda refusal: (refusal.line, refusal.name),
    )


def _parse(code: str) -> ast.AST:
    flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    try:
        # This only parses: with PyCF_ONLY_AST, no code object is created.
        tree = compile(code, "<cell>", "exec", flags=flags, dont_inherit=True)
    except (RecursionError, MemoryError, ValueError) as error:
        raise SyntaxError(f"cannot be parsed: {error}") from error
    assert isinstance(tree, ast.AST)
    return tree


def _covers(names: Sequence[str], module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in names)


def _refusal(rules: Imports, name: str, line: int) -> ImportDenied | None:
    """Name the refused module as briefly as the rules allow: subprocess.run is reported as
    subprocess."""
    if permits(rules, name):
        return None
    if covering := [entry for entry in rules.forbid if _covers([entry], name)]:
        return ImportDenied(covering[0], line, forbidden=True)
    package = name.partition(".")[0]
    partly_allowed = any(entry.startswith(f"{package}.") for entry in rules.allow)
    return ImportDenied(name if partly_allowed else package, line, forbidden=False)


def _imported(nodes: Sequence[ast.AST], rules: Imports) -> Iterator[tuple[str, int]]:
    """Yield every module that the cell imports, and each member that it imports from one, with its
    line."""
    for node in nodes:
        match node:
            case ast.Import(names=names):
                yield from ((alias.name, node.lineno) for alias in names)
            case ast.ImportFrom(module=str(module), names=names, level=0):
                for alias in names:
                    # `from os import *` imports os.system, so it counts as each forbidden member.
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
    """Yield every dotted name of the cell, with aliases resolved.

    After `import os as o`, o.system is os.system.
    """
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
    """Return `a.b.c` as text; None for anything but plain names, or for a very long chain.

    The front of a chain is a separate node in the tree, so a long chain cannot hide a name. The
    limit prevents quadratic time for a cell that is one enormous chain.
    """
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        if len(parts) == _LONGEST_CHAIN:
            return None
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None
