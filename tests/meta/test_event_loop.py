"""No code of the service imports a library, or writes a long JSON text, in its event loop.

One call of C for a large value keeps the interpreter lock, so a thread does not help either.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from sbx.api.server.preload import AHEAD

SBX = Path(__file__).resolve().parents[2] / "sbx"
SERVICE = (
    *("api", "service", "agent", "runtime", "kernels", "egress", "environments", "store"),
    *("isolation", "workspace", "policy", "linux", "protocol", "telemetry"),
)
# Imports in functions that no request calls in the event loop, and why.
ELSEWHERE = {
    "agent/__init__.py": "programs that use agents",
    "isolation/broker/": "another process",
    "isolation/cgroups/__init__.py": "the start of the broker",
    "linux/seccomp.py": "the broker",
    "telemetry/metrics.py": "before the event loop",
    "telemetry/spans.py": "before the event loop",
}
JSON = re.compile(
    r"json\.(dumps?|loads?)|msgspec\.json\.(encode|decode)"
    r"|.*\.(model_dump_json|dump_json|(model_)?validate_json)"
)
# Functions that write or read JSON at once, and why it is short, or is read fast.
SHORT = {
    "api/agent_v1/chat.py:chat": "an id",
    "api/bodies.py:revoked": "one field",
    "api/bodies.py:_of_long": "texts of 16 MiB in 15 ms",
    "api/bodies.py:body_of": "less than _LONG",
    "api/console/observe.py:_decoded": "one value of a page",
    "api/console/stream.py:_receive": "a message of bounded size",
    "api/console/stream.py:_send": "notices and pages",
    "api/e2b/connect.py:parse": "less than _LONG, or an error",
    "api/e2b/connect.py:envelope": "pieces of output",
    "api/e2b/filesystem.py:_follow": "one change",
    "api/encoding.py:list_reply": "numbers",
    "api/errors.py:_json": "one error",
    "api/inner_contents.py:_not_satisfiable": "one error",
    "api/opensandbox/files.py:_metadata": "a part of a form, of bounded size",
    "api/opensandbox/files.py:replace": "a number for each path of a body",
    "api/opensandbox/files.py:_body": "a body of bounded size and number of values",
    "api/server/settings.py:parsed": "settings",
    "api/sse.py:encoded": "events that are not long; encode_if_long has the others",
    "api/v1/bay/idempotency.py:encoded": "one record",
    "api/v1/bay/idempotency.py:fingerprint": "a body of 2 MiB",
    "api/v1/terminals.py:_relay_output": "one message of fixed size",
    "api/v1/terminals.py:_parse": "less than _MESSAGE_MAX",
    "service/agent_profiles.py:_body": "a profile of bounded size",
    "service/agent_profiles.py:_stored": "a profile of bounded size",
    "service/auth.py:first_key": "a key",
    "service/caller.py:space": "names",
    "service/ids.py:_size": "labels of a body of 2 MiB",
    "service/links.py:make": "claims",
    "service/links.py:_decrypted": "claims",
    "agent/export.py:export_history": "with an indent it is written in Python, text by text",
    "agent/external/http.py:_plain": "one value of a parameter",
    "agent/external/http.py:read_document": "a document of the operator, in a thread",
    "agent/external/mcp_server.py:_tool": "a schema of bounded size",
    "agent/external/mcp_server.py:write": "one call",
    "agent/external/mcp_server.py:_message": "a message of bounded size",
    "agent/external/mcp_server.py:_result": "a message of bounded size",
    "agent/external/registry.py:act": "arguments of one call",
    "agent/mcp_calls.py:_text": "one argument of a call that needs an approval",
    "agent/models/anthropic.py:call": "arguments of a model, which its number of tokens bounds",
    "agent/models/openai.py:_call": "arguments of a model, which its number of tokens bounds",
    "agent/models/openai.py:_take_call": "arguments of a model, which its number of tokens bounds",
    "agent/models/replay.py:load": "recordings of tests",
    "agent/models/replay.py:save": "recordings of tests",
    "agent/models/sanitize.py:arguments": "arguments of a model",
    "agent/tools/access.py:request_for": "two names",
    "agent/tools/approval_rules.py:subject": "arguments of a call that needs an approval",
    "agent/tools/arguments.py:_decoded": "texts of 16 MiB in 15 ms",
    "agent/tools/arguments.py:_object": "only with surrogates that are escaped",
    "agent/tools/arguments.py:_sentences": "choices of a schema",
    "agent/tools/paths.py:_inside": "one request",
    "agent/tools/paths.py:_answer": "one line of bounded size",
    "agent/tools/results.py:failed": "one error",
}


def _functions(tree: ast.AST, name: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield each node inside of a function, with the name of the innermost one."""
    for node in ast.iter_child_nodes(tree):
        inner = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else name
        if inner:
            yield inner, node
        yield from _functions(node, inner)


def _nodes(folders: tuple[str, ...]) -> Iterator[tuple[str, str, ast.AST]]:
    for folder in folders:
        for path in sorted((SBX / folder).rglob("*.py")):
            place = str(path.relative_to(SBX))
            for function, node in _functions(ast.parse(path.read_text())):
                yield place, function, node


@cache
def _imported() -> frozenset[str]:
    """Return the modules of a service that has started."""
    code = (
        "import sys; from importlib import import_module\n"
        "import sbx.cli.serve, sbx.api.server.serve\n"
        f"for name in {AHEAD!r}: import_module(name)\n"
        "print(*sys.modules)"
    )
    command = [sys.executable, "-I", "-c", code]
    return frozenset(
        subprocess.run(command, capture_output=True, check=True, text=True).stdout.split()
    )


def _modules(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (each.name for each in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield node.module or ""
        names = {f"{node.module}.{each.name}" for each in node.names}
        yield from (
            name for name in names if (SBX.parent / f"{name.replace('.', '/')}.py").exists()
        )


def test_a_request_imports_no_module_in_the_event_loop() -> None:
    """The first request to sign a token imported `cryptography`, which took 60 ms. Such a module
    belongs into AHEAD, or is imported by `import_in_thread`."""
    late = {
        f"{place}:{function} imports {name}"
        for place, function, node in _nodes(SERVICE)
        for name in _modules(node)
        if name not in _imported() and not place.startswith(tuple(ELSEWHERE))
    }
    assert late == set()


def test_modules_are_imported_by_name_in_a_thread() -> None:
    callers = {
        f"{place}:{function}"
        for place, function, node in _nodes(SERVICE)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module")
    }
    assert callers == {
        "agent/__init__.py:__getattr__",
        "agent/models/sdk_model.py:__init__",  # agent_models imports it before
        "agent/external/functions.py:load_functions",  # in a thread
        "environments/installers.py:_pip",  # a module of 20 lines
    }


def test_a_long_json_text_is_written_in_pieces() -> None:
    """`json.dumps` of 10,000 entries in a thread stopped the event loop for 50 ms. A long value
    takes `encode`, `encoded_form`, `encoded_list` or `decode`; a short one a reason in SHORT."""
    callers = {
        f"{place}:{function}"
        for place, function, node in _nodes(("api", "service", "agent"))
        if isinstance(node, ast.Attribute) and JSON.fullmatch(ast.unparse(node))
    }
    assert callers == SHORT.keys()
