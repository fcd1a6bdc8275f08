"""What a person approves is what the page shows: each argument of each call, before the buttons."""

import httpx
from agent_calls import body, calls, project
from playwright.async_api import Locator, Page, expect
from sessions_calls import API

from sbx.agent.messages import Response
from sbx.agent.tools.tool import Tool, ToolDefinition
from sbx.api.agent_v1 import agents_of
from tests.browser.conftest import Desk
from tests.browser.test_main_path import send

ARGUMENTS = {
    "note": "begin\n" + "x\n" * 400 + "the end",
    "command": "reboot",
    "cwd": "/srv\u202egnp",
    "amount": "10000 EUR",
    "to": "MALLORY",
    "hosts": ["one", "two"],
    "account": 12345678901234567891,
    "parts": [-9007199254740993, 9007199254740991, 0.5],
    "__proto__": {"admin": "YES"},
    "code": "rm -rf x\rls \x1b[8mhidden\u200b",
}
SHOWN = (
    "begin", "the end", "reboot", "/srv⟨202e⟩gnp", "10000 EUR", "MALLORY", '"two"',
    "12345678901234567891", "-9007199254740993", "9007199254740991", '"YES"',
    "rm -rf x⟨000d⟩ls ⟨001b⟩[8mhidden⟨200b⟩",
)  # fmt: skip


async def test_a_question_shows_each_argument_above_its_buttons(desk: Desk, page: Page) -> None:
    """The inbox had the name of a tool and Allow; an argument `command` hid all others."""

    async def act(*_: object) -> str:
        return "paid"

    schema = {"type": "object", "properties": {name: {} for name in ARGUMENTS}}
    tool = Tool(ToolDefinition("pay", "Pay.", schema), act, lambda _: "write", permission="ask")
    agents_of(desk.console.served.app).tools.add(tool)
    desk.model.add(calls(("pay", ARGUMENTS)), Response("done"))
    await send(page, "pay")
    await shows_all(page.get_by_role("group", name="pay: Waiting for approval"))
    await page.get_by_role("link", name="Approvals").click()
    question = page.get_by_role("list", name="Waiting approvals").get_by_role("listitem")
    await shows_all(question)
    await question.get_by_role("button", name="Deny").click()
    await expect(page.get_by_text("Nothing is waiting")).to_be_visible()


async def shows_all(question: Locator) -> None:
    allow = question.get_by_role("button", name="Allow", exact=True)
    await expect(allow).to_be_visible()
    text = await question.inner_text()
    for box in await question.locator("section").first.locator("pre").all():
        assert await box.evaluate("box => box.scrollHeight <= box.clientHeight + 1")
    for part in (*ARGUMENTS, *SHOWN):
        assert part in text[: text.rindex("Allow")], part


async def test_a_check_of_a_task_is_asked_about_once_and_not_for_always(
    desk: Desk, page: Page
) -> None:
    """The button for always was there, and the service refused what it does."""
    directory = desk.directory("checked")
    async with desk.console.served.client() as client:
        project_id = await project(client, directory)
        desk.model.add(Response("done"))
        check = "curl -s http://127.0.0.1:1/; true"
        asked = body("checked", project_id=project_id, completion_check=check, detach=True)
        (await client.post(f"{API}/chat", json=asked)).raise_for_status()
    await page.get_by_role("link", name="Approvals").click()
    question = page.get_by_role("list", name="Waiting approvals").get_by_role("listitem")
    await expect(question).to_contain_text("127.0.0.1:1/; true")
    await expect(question.get_by_role("button", name="Always")).to_have_count(0)
    await question.get_by_role("button", name="Deny").click()
    await expect(page.get_by_text("Nothing is waiting")).to_be_visible()


async def test_a_call_of_a_project_is_shown_while_it_is_tried(
    desk: Desk, page: Page, client: httpx.AsyncClient
) -> None:
    """Nothing was shown until the trial had ended: a test suite looked like a hang."""
    await desk.project("shown", file="old\n")
    await page.get_by_label("Project").select_option(label="shown")
    commands = ("echo new > file.txt", "echo begun; sleep 600")
    desk.model.add(calls(*[("execute_command", {"command": text}) for text in commands]))
    await send(page, "change")
    running = page.get_by_role("group", name="execute_command: running").filter(has_text="sleep")
    await expect(running.locator('[data-icon="loader"]')).to_be_visible()
    await expect(running.get_by_role("region", name="Output")).to_contain_text("begun")
    waiting = page.get_by_role("group", name="execute_command: waiting for approval")
    await expect(waiting.get_by_role("group", name="Changed /workspace/file.txt")).to_be_visible()

    # The page after a reload has the same blocks.
    await page.reload()
    await expect(running.get_by_role("region", name="Output")).to_contain_text("begun")
    await waiting.get_by_role("button", name="Deny").click()
    await expect(page.get_by_role("group", name="execute_command: denied")).to_be_visible()
    await page.get_by_role("button", name="Stop", exact=True).click()
    await expect(running).to_have_count(0)


async def test_a_denied_call_is_denied_after_a_reload(desk: Desk, page: Page) -> None:
    """It was an error then, and its text was shown twice."""
    await desk.project("denied", file="old\n")
    await page.get_by_label("Project").select_option(label="denied")
    command = ("execute_command", {"command": "echo new > file.txt"})
    desk.model.add(calls(command), Response("as it was"))
    await send(page, "change")
    await page.get_by_role("button", name="Deny").click()
    await expect(page.get_by_text("as it was")).to_be_visible()
    for language, name in (("en-US", "denied"), ("zh-CN", "已拒绝"), ("ja-JP", "拒否済み")):
        await page.evaluate(
            "language => localStorage.setItem('sbx.language', language)", language[:2]
        )
        await page.reload()
        block = page.get_by_role("group", name="execute_command")
        await expect(block).to_have_count(1)
        label = await block.get_attribute("aria-label")
        assert label is not None
        assert name in label, language
        text = await block.inner_text()
        assert text.count("changes of files were dropped") == 1
