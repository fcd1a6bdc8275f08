"""A smolagents CodeAgent whose code runs in a sandbox."""

import os
from collections.abc import Iterator
from datetime import date
from typing import Any

import pytest
from smolagents import CodeAgent, Model, tool
from smolagents.models import ChatMessage, MessageRole
from smolagents.monitoring import LogLevel
from smolagents.utils import AgentError

import sbx
from sbx import Sandbox
from sbx.adapters.smolagents import SbxExecutor
from sbx.errors import BadRequest

pytestmark = pytest.mark.full_tier


class Scripted(Model):  # type: ignore[misc]  # smolagents ships no types
    """Answers with these pieces of code in turn, and keeps what it was told."""

    def __init__(self, *codes: str) -> None:
        super().__init__()
        self._codes = iter(codes)
        self.received = ""

    def generate(self, messages: Any, **options: Any) -> ChatMessage:
        self.received = str(messages)
        return ChatMessage(MessageRole.ASSISTANT, f"<code>\n{next(self._codes)}\n</code>")


@tool  # type: ignore[untyped-decorator]
def shout(text: str) -> str:
    """Say it in capitals.

    Args:
        text: What to say.
    """
    return text.upper() + "!"


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    with Sandbox() as box:
        yield box
    sbx.close()


@pytest.fixture
def executor(box: Sandbox) -> SbxExecutor:
    return SbxExecutor(box)


def agent(executor: SbxExecutor, *codes: str, tools: Any = ()) -> CodeAgent:
    return CodeAgent(
        tools=list(tools), model=Scripted(*codes), executor=executor, verbosity_level=LogLevel.OFF
    )


@pytest.mark.ci_tier
def test_an_agent_works_in_the_sandbox_and_state_stays(executor: SbxExecutor) -> None:
    codes = ("import os\npid = os.getpid()\nprint('hello')", "final_answer([pid, os.getpid()])")
    first, second = agent(executor, *codes).run("go")
    assert first == second != os.getpid()


def test_a_model_sees_logs_and_errors_and_goes_on(executor: SbxExecutor) -> None:
    at_work = agent(executor, "print('before')\n1/0", "1 + 1", "final_answer('mended')")
    assert at_work.run("go") == "mended"
    assert "before" in at_work.model.received
    assert "ZeroDivisionError" in at_work.model.received
    assert "Last output from code snippet:\\n2" in at_work.model.received


def test_tools_and_variables_are_sent_inside(executor: SbxExecutor) -> None:
    at_work = agent(executor, "final_answer(shout(word))", tools=[shout])
    assert at_work.run("go", additional_args={"word": "hi"}) == "HI!"


def test_answers_are_values_as_far_as_json_can_carry_them(executor: SbxExecutor) -> None:
    code = "import datetime\nfinal_answer((1, {'a': datetime.date(2026, 1, 2)}, 'ä' * 200_000))"
    answer = agent(executor, code).run("go")
    assert answer == (1, {"a": date(2026, 1, 2)}, "ä" * 200_000)


@pytest.mark.ci_tier
def test_an_answer_is_never_unpickled(executor: SbxExecutor) -> None:
    forged = (
        "class FinalAnswerException(BaseException):\n"
        "    value = 'pickle:gASVHwAAAAAAAACMBXBvc2l4lIwGc3lzdGVtlJOUjARleGl0lIWUUpQu'\n"
        "raise FinalAnswerException()"
    )
    with pytest.raises(AgentError, match="cannot be read"):
        executor(forged)


def test_a_step_that_takes_too_long_is_an_error_and_the_next_one_works(box: Sandbox) -> None:
    executor = SbxExecutor(box, timeout=0.5)
    with pytest.raises(AgentError, match="time-out"):
        executor("while True: pass")
    assert executor("1 + 1").output == "2"


def test_an_agent_goes_on_in_a_second_run_and_after_its_kernel_ended(executor: SbxExecutor) -> None:
    codes = ("x = 1\nfinal_answer(x)", "import os\nos._exit(1)", "final_answer(shout('back'))")
    at_work = agent(executor, *codes, tools=[shout])
    assert at_work.run("go") == 1
    assert at_work.run("go on", reset=False) == "BACK!"
    assert "variables and imports of earlier runs are lost" in at_work.model.received


def test_a_managed_agent_cannot_be_sent(executor: SbxExecutor) -> None:
    with pytest.raises(BadRequest, match="helper"):
        executor.send_tools({"helper": object()})
