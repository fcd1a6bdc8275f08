"""The examples of every shipped policy, executed: what `then` says is what becomes of `run`."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from sbx import Runtime
from sbx.errors import CannotEnforce
from sbx.policy import Policy, load
from sbx.policy.tables import Expect
from sbx.protocol.runs import Run, Status
from sbx.runtime.sandbox import AsyncSandbox

pytestmark = pytest.mark.core

SHIPPED = ("default", "data-science", "strict", "networked", "notebook")
EXAMPLES = [
    pytest.param((name, number), id=f"{name}-{number}-{example.then}")
    for name in SHIPPED
    for number, example in enumerate(load(name).expect)
]


@pytest_asyncio.fixture(scope="module")
async def boxes() -> AsyncIterator[dict[str, AsyncSandbox | CannotEnforce]]:
    """A sandbox of each policy; where a hard wall is missing here, the refusal that says so."""
    async with Runtime() as runtime:
        made: dict[str, AsyncSandbox | CannotEnforce] = {}
        for name in SHIPPED:
            try:
                made[name] = await runtime.create(name)
            except CannotEnforce as error:
                made[name] = error
        yield made


@pytest.mark.parametrize("which", EXAMPLES)
async def test_an_example_of_a_policy_goes_as_the_policy_says(
    boxes: dict[str, AsyncSandbox | CannotEnforce], which: tuple[str, int]
) -> None:
    name, number = which
    box, policy = boxes[name], load(name)
    if isinstance(box, CannotEnforce):
        if any(wall == "hard" for wall in (policy.walls.memory, policy.walls.tasks)):
            pytest.skip(f"{name} refuses to start on this host: {box}")
        raise box
    for module in policy.preload:
        pytest.importorskip(module)
    example = policy.expect[number]
    assert verdict(await box.run(example.run), policy, example) == example.then, example.why


def verdict(run: Run, policy: Policy, example: Expect) -> str:
    """A run in the words of a policy's examples."""
    if run.status is Status.KILLED:
        return "killed"
    if run.status is Status.OK:
        return "allowed"
    assert run.error is not None
    if run.error.name == "ImportRefused":
        return "refused"
    denied = {"PermissionError", "FileNotFoundError", "OSError", "URLError", "HTTPError"}
    denied.add("ProcessesRefused")
    assert run.error.name in denied, f"{example.run!r} failed, but by no wall: {run.error}"
    return "denied"
