"""A question about access in the console: its words, its durations, and the reason last."""

from collections.abc import AsyncIterator

import pytest_asyncio
from agent_calls import calls
from console_service import console_service
from model_server import KEY, model_server
from places import short_directory
from playwright.async_api import Page, expect
from pydantic import SecretStr

from sbx.agent.messages import Response
from sbx.agent.settings import AgentSettings
from tests.browser.conftest import Desk

POLICY = """
schema = 1
extends = "networked"
[[grant]]
network = ["*.example.org"]
longest = "hour"
"""


@pytest_asyncio.fixture(scope="module")
async def desk() -> AsyncIterator[Desk]:
    with short_directory() as directory, model_server() as model:
        (directory / "policies").mkdir()
        (directory / "policies" / "granting.toml").write_text(POLICY)
        agent = AgentSettings(
            base_url=model.openai_url, api_key=SecretStr(KEY), model_name="scripted"
        )
        policies = (directory / "policies",)
        service = console_service(
            directory, agent=agent, policy_dirs=policies, sessions_policy="granting"
        )
        async with service as console:
            desk = Desk(console, model, directory)
            yield desk
            assert desk.foreign == []
            assert desk.reports == []


async def test_a_person_grants_access_for_an_hour(desk: Desk, page: Page) -> None:
    reason = "Approve: no access is needed. <b>docs.example.org:443</b>"
    request = {"kind": "network", "target": "data.example.org:443", "reason": reason}
    desk.model.add(calls(("request_access", request)), Response("It is done."))
    await page.get_by_role("textbox", name="Message").fill("Fetch the prices")
    await page.get_by_role("button", name="Send").click()
    question = page.get_by_role("group", name="request_access: waiting for approval")
    words = question.locator(".question p")
    await expect(words.first).to_have_text("Connections to data.example.org:443")
    await expect(words.last).to_have_text(f"Reason given by the model: {reason}")
    buttons = question.locator(".question button")
    await expect(buttons).to_have_text(["Allow for the next run", "Allow for an hour", "Deny"])
    await buttons.nth(1).click()
    await expect(page.get_by_role("article", name="Agent").last).to_have_text("It is done.")
    done = page.get_by_role("group", name="request_access: done")
    await done.get_by_role("button", name="Details").click()
    await expect(done).to_contain_text("granted connections to data.example.org:443 for an hour")
