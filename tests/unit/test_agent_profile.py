"""Profiles of agents: their fields, what they derive, and the example of the documentation."""

import re
from pathlib import Path
from typing import Any, cast

import pytest

from sbx.agent.agent import Budget
from sbx.agent.messages import Price, TokenUsage, ToolCall
from sbx.agent.profile import NO_PROFILE, AgentProfile, parse_profile, profile_files, read_profile
from sbx.agent.tools.function_tool import tool
from sbx.agent.tools.registry import Tools
from sbx.errors import BadRequest, NotFound, Unavailable

ROOT = Path(__file__).resolve().parents[2]


def test_without_fields_a_profile_changes_nothing() -> None:
    assert NO_PROFILE.budget == Budget()
    assert NO_PROFILE.select(Tools()).names == Tools().names
    assert NO_PROFILE.max_steps(None, 10) == 10
    assert NO_PROFILE.max_steps(900, 10) == 900
    assert parse_profile("", "empty.toml") == NO_PROFILE


@pytest.mark.parametrize(
    ("limit", "requested", "steps"),
    [(None, None, 10), (None, 50, 50), (5, None, 5), (5, 3, 3), (5, 50, 5), (20, None, 20)],
)
def test_a_request_may_lower_the_steps(
    limit: int | None, requested: int | None, steps: int
) -> None:
    profile = AgentProfile.model_validate({"limits": {"max_steps": limit}})
    assert profile.max_steps(requested, 10) == steps


def test_tools_are_those_that_are_named() -> None:
    profile = AgentProfile(tools=("read_file", "run_code"))
    assert profile.select(Tools()).names == ("run_code", "read_file")
    assert AgentProfile(tools=()).select(Tools()).names == ()


def test_users_see_no_instructions() -> None:
    profile = AgentProfile(description="d", welcome="w", starters=("s",), instructions="secret")
    assert profile.for_users == AgentProfile(description="d", welcome="w", starters=("s",))


@pytest.mark.parametrize(
    ("usage", "spent"),
    [
        (TokenUsage(0, 0), False),
        (TokenUsage(500_000, 24_999), False),
        (TokenUsage(0, 50_000), True),
    ],
)
def test_a_cost_is_spent(usage: TokenUsage, spent: bool) -> None:
    budget = Budget(cost=0.5, price=Price(0.5, 10.0))
    assert budget.spent(usage) is spent


@pytest.mark.parametrize("wrong", [{"cost": 1.0}, {"cost": 0.0, "price": Price(1, 1)}])
def test_a_budget_with_a_wrong_cost_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        Budget(**wrong)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("tools = [", "Invalid value (at end of document)"),
        ("steps = 1", "steps: a profile has no such field"),
        ('approvals = {run_code = "allow"}', "approvals.run_code: Input should be 'ask' or 'deny'"),
        ("[limits]\nmax_cost = 1", "limits.max_cost needs the table price"),
        ("retries = {run_code = 1}", "retries: a second call of run_code can have another effect"),
        ("retries = {read_file = 9}", "retries.read_file: Input should be less than or equal to 5"),
        ('approvals = {bash = "deny"}', "approvals: no tool has the name bash; plan has"),
        ('tools = ["bash"]', "tools: no tool has the name bash; plan has"),
    ],
)
def test_a_problem_names_its_field(text: str, problem: str) -> None:
    with pytest.raises(BadRequest) as refused:
        parse_profile(text, "helper.toml")
    assert refused.value.code == "invalid_profile"
    assert (refused.value.details or {})["problems"] == [problem]


def test_files_are_read_up_to_a_limit(tmp_path: Path) -> None:
    (tmp_path / "large.toml").write_text(f'description = "{"x" * (256 << 10)}"')
    (tmp_path / "latin.toml").write_bytes(b'description = "\xff"')
    (tmp_path / "notes.md").write_text("")
    (tmp_path / "directory.toml").mkdir()
    assert set(profile_files(tmp_path)) == {"large", "latin", "directory"}
    assert profile_files(tmp_path / "missing") == {}
    for name in ("large", "latin", "directory", "missing"):
        with pytest.raises(BadRequest, match="cannot be read"):
            read_profile(tmp_path / f"{name}.toml")


def test_the_example_of_the_documentation_is_valid() -> None:
    section = (ROOT / "docs" / "agents.md").read_text().partition("## Profiles")[2]
    (example, *_) = re.findall(r"```toml\n(.*?)```", section, re.DOTALL)
    profile = parse_profile(example, "the example")
    assert set(profile.model_dump(exclude_unset=True)) == set(AgentProfile.model_fields)


class _Box:
    """A sandbox of which no tool in these tests needs anything."""


@pytest.mark.parametrize(
    ("error", "retries", "idempotent", "made"),
    [
        (Unavailable("busy"), 2, True, 3),
        (OSError("reset"), 2, True, 3),
        (Unavailable("busy"), 1, True, 2),
        (NotFound("missing"), 2, True, 1),
        (Unavailable("busy"), 2, False, 1),
        (Unavailable("busy"), 0, True, 1),
    ],
)
async def test_a_failed_call_is_repeated_if_that_changes_nothing(
    error: Exception, retries: int, idempotent: bool, made: int
) -> None:
    calls = 0

    @tool(effect="read", idempotent=idempotent)
    async def look() -> str:
        """Look."""
        nonlocal calls
        calls += 1
        raise error

    tools = Tools([look], retries={"look": retries})
    result = await tools.call(ToolCall("1", "look", "{}"), cast("Any", _Box()), lambda *_: None)
    assert result.is_error
    assert calls == made


async def test_a_call_that_succeeds_at_the_second_time_is_a_success() -> None:
    answers: list[str | None] = [None, "seen"]

    @tool(effect="read", idempotent=True)
    async def look() -> str:
        """Look."""
        if (answer := answers.pop(0)) is None:
            raise Unavailable("busy")
        return answer

    tools = Tools([look], retries={"look": 1})
    result = await tools.call(ToolCall("1", "look", "{}"), cast("Any", _Box()), lambda *_: None)
    assert (result.text, result.is_error, answers) == ("seen", False, [])
