"""Run code in an alternative that is a Python library, for the bench. Runs in its environment.

    {"open": "smolagents"}   {"run": "print(1)"}   {"close": true}   → {"output": "1\n"}

Requests and replies are lines of JSON. No module of sbx is imported here.
"""

import json
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module

Run = Callable[[str], str]


def _smolagents(_: ExitStack) -> Run:
    executor = import_module("smolagents.local_python_executor").LocalPythonExecutor(["pandas"])
    executor.send_tools({})
    return lambda code: str(executor(code).logs)


def _llm_sandbox(stack: ExitStack) -> Run:
    library = import_module("llm_sandbox")
    local = import_module("llm_sandbox.local.config")
    real = os.path.dirname(os.path.dirname(os.path.realpath(sys.executable)))
    prefixes = [path for path in (sys.prefix, real) if not path.startswith("/usr")]
    config = local.LocalSandboxConfig(
        python_executable=sys.executable,
        read_only_paths=(*local.DEFAULT_READ_ONLY_PATHS, *prefixes),
    )
    created = library.SandboxSession(
        backend=library.SandboxBackend.BUBBLEWRAP,
        lang="python",
        sandbox_config=config,
        skip_environment_setup=True,  # which would create a virtual environment, for 4 s
    )
    session = stack.enter_context(created)

    def run(code: str) -> str:
        result = session.run(code)
        if result.exit_code != 0:
            raise RuntimeError(result.stderr)
        return str(result.stdout)

    return run


_OPEN = {"smolagents": _smolagents, "llm-sandbox": _llm_sandbox}


def main() -> None:
    run: Run | None = None
    stack = ExitStack()
    replies, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        request = json.loads(line)
        output = ""
        if "open" in request:
            run = _OPEN[request["open"]](stack)
        elif "run" in request and run is not None:
            output = run(request["run"])
        else:
            stack.close()
            run, stack = None, ExitStack()
        print(json.dumps({"output": output}), file=replies, flush=True)


if __name__ == "__main__":
    main()
