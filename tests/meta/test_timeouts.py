"""No async generator yields inside of a time-out.

asyncio.timeout cancels the task that entered it. Another task may read the rest of a generator:
then a stream never ended at its deadline.
"""

import ast

from tests.meta.structure import SBX

# A context manager with a time-out in which the caller of `async with` works: one task only.
EXCEPTIONS = {"kernels/pool/pools.py: start_deadline"}


def test_no_generator_yields_inside_of_a_timeout() -> None:
    matches = set()
    for path in SBX.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.AsyncFunctionDef):
                continue
            blocks = (node for node in ast.walk(function) if isinstance(node, ast.AsyncWith))
            for block in blocks:
                has_timeout = "asyncio.timeout" in "".join(map(ast.unparse, block.items))
                nodes = (node for statement in block.body for node in ast.walk(statement))
                if has_timeout and any(isinstance(node, ast.Yield) for node in nodes):
                    matches.add(f"{path.relative_to(SBX)}: {function.name}")
    assert matches == EXCEPTIONS
