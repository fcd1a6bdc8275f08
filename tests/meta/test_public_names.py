"""What `import sbx` promises: every name is there and told about, and importing costs nothing."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import sbx
import sbx.agent

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"pydantic", "msgspec", "asyncio", "IPython", "typer", "rich", "psutil", "ctypes"}
MODULES_MOST = 30  # sbx itself, and what `typing` brings: most programs have it already


def modules_after(code: str) -> set[str]:
    """The modules that running this adds to a bare interpreter."""
    script = f"""
import sys
before = set(sys.modules)
sys.path.insert(0, sys.argv[1])
{code}
print(*sorted(set(sys.modules) - before))
"""
    answer = subprocess.run(
        [sys.executable, "-I", "-c", script, ROOT], capture_output=True, text=True, check=True
    )
    return set(answer.stdout.split())


def public(value: object) -> list[tuple[str, object]]:
    return [(name, member) for name, member in inspect.getmembers(value) if name[0] != "_"]


@pytest.mark.parametrize("name", sbx.__all__)
def test_every_public_name_is_there_and_documented(name: str) -> None:
    assert inspect.getdoc(getattr(sbx, name))


@pytest.mark.parametrize("name", sbx.agent.__all__)
def test_every_name_of_the_agent_is_there_and_documented(name: str) -> None:
    assert inspect.getdoc(getattr(sbx.agent, name))


@pytest.mark.parametrize("name", ["AsyncSandbox", "Conversation", "Runtime", "Sandbox"])
def test_every_method_says_what_it_promises(name: str) -> None:
    silent = [
        method
        for method, function in public(getattr(sbx, name))
        if inspect.isfunction(function) and not inspect.getdoc(function)
    ]
    assert not silent


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Sandbocks'"):
        _ = sbx.Sandbocks
    assert not hasattr(sbx, "Sandbocks")


def test_the_sync_and_the_async_sandbox_offer_the_same() -> None:
    def names(kind: type) -> set[str]:
        return {name for name, _ in public(kind)} - {"files", "id", "policy", "prepare", "uploads"}

    starts = {"start_run", "start_shell", "start_script", "start_file"}
    of_runs = starts | {"run_call", "give_up"}  # these take or return a run, for asyncio only
    assert names(sbx.Sandbox) == names(sbx.AsyncSandbox) - of_runs


def test_importing_sbx_costs_next_to_nothing() -> None:
    added = modules_after("import sbx")
    assert not {name.partition(".")[0] for name in added} & HEAVY
    assert len(added) <= MODULES_MOST, added


def test_the_broker_s_process_imports_the_standard_library_only() -> None:
    added = modules_after("import sbx.isolation.broker.server")
    foreign = {name.partition(".")[0] for name in added} - set(sys.stdlib_module_names) - {"sbx"}
    assert not foreign


def test_the_guest_s_first_process_imports_no_ipython_and_nothing_of_the_host_side() -> None:
    added = modules_after("import sbx.guest.supervisor.pid1")
    assert {name for name in added if name.startswith("sbx.")} <= {
        name for name in added if name.startswith(("sbx.guest", "sbx.linux"))
    }
    assert not added & {"IPython", "asyncio", "json.tool"}
