"""The requirements of the platform for its front end, U1 to U25, each by its number."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx
from agent_calls import calls, messages, runs
from playwright.async_api import BrowserContext, Page, expect

from sbx.agent.messages import Response
from sbx.protocol import agent as protocol
from tests.browser.conftest import Desk
from tests.browser.test_main_path import drop, send

SOURCE = Path(__file__).resolve().parents[2] / "sbx" / "console" / "source"
UPLOAD = re.compile(r"/api/v1/sessions/sb-session-[^/]+-console/files/upload$")


async def begun(desk: Desk, page: Page, answer: str = "hello") -> str:
    """Begin a conversation; its id."""
    desk.model.add(Response(answer))
    await send(page, "hi")
    await expect(status(page)).to_have_text("Done")
    return page.url.rpartition("/")[2]


def status(page: Page) -> Any:
    return page.get_by_role("status", name="Run", exact=True)


def uploads(page: Page) -> Any:
    return page.get_by_role("table", name="Uploaded files")


async def test_u01_an_upload_names_its_session_conversation_and_subdir(page: Page) -> None:
    await page.evaluate(
        """() => { const send = XMLHttpRequest.prototype.send; window.fields = [];
            XMLHttpRequest.prototype.send = function (body) {
                for (const [name, value] of body.entries())
                    window.fields.push([name, value instanceof File ? value.name : value]);
                return send.call(this, body); }; }"""
    )
    async with page.expect_request(UPLOAD) as sent:
        await drop(page, "one.csv", "a\n1\n")
    assert (await sent.value).method == "POST"
    fields = dict(await page.evaluate("window.fields"))
    assert fields.keys() == {"conversation_id", "subdir", "file"}
    assert (fields["subdir"], fields["file"]) == ("temparea", "one.csv")
    assert fields["conversation_id"].startswith("conversation-")


async def test_u02_the_file_appears_in_the_list(page: Page) -> None:
    await drop(page, "two.csv", "a\n1\n")
    await expect(uploads(page)).to_contain_text("two.csv")


async def test_u03_the_list_shows_name_size_and_time(page: Page) -> None:
    await drop(page, "three.txt", "x" * 2048)
    row = uploads(page).get_by_role("row").filter(has_text="three.txt")
    await expect(row).to_contain_text("2 KiB")
    await expect(row).to_contain_text(re.compile(r"20\d\d"))
    for column in ("Name", "Size", "Uploaded"):
        await expect(page.get_by_role("columnheader", name=column, exact=True)).to_be_visible()


async def test_u04_files_of_the_code_are_in_another_list(desk: Desk, page: Page) -> None:
    await drop(page, "mine.csv", "a\n1\n")
    await expect(uploads(page)).to_contain_text("mine.csv")
    desk.model.add(
        calls(("run_code", {"code": "open('made.csv', 'w').write('x')"})), Response("made")
    )
    await send(page, "make a file")
    await expect(status(page)).to_have_text("Done")
    await expect(uploads(page)).not_to_contain_text("made.csv")
    await page.get_by_role("tab", name="Workspace").click()
    await expect(page.get_by_role("link", name="Download made.csv")).to_be_visible()


async def test_u05_a_download_has_its_name_and_equal_bytes(page: Page) -> None:
    await drop(page, "数据 5.csv", "ü,日本\n")
    async with page.expect_download() as download:
        await page.get_by_role("link", name="Download 数据 5.csv").click()
    value = await download.value
    assert value.suggested_filename == "数据 5.csv"
    assert (await asyncio.to_thread(Path(await value.path()).read_text)) == "ü,日本\n"


async def test_u06_errors_are_shown_in_these_words(page: Page, context: BrowserContext) -> None:
    await drop(page, "there.csv", "a\n")
    await expect(uploads(page)).to_contain_text("there.csv")
    body = json.dumps({"error": {"code": "no_space", "message": "the disk is full"}})

    async def refuse(route: Any) -> None:
        await route.fulfill(status=507, body=body, content_type="application/json")

    await context.route(UPLOAD, refuse)
    await drop(page, "six.csv", "a\n")
    await expect(page.get_by_role("alert").filter(has_text="Upload failed: ")).to_be_visible()
    await context.unroute(UPLOAD)
    await page.get_by_role("button", name="Retry six.csv").click()
    await expect(uploads(page)).to_contain_text("six.csv")
    files = re.compile(r"/files/there\.csv")
    await context.route(files, refuse)
    await page.get_by_role("link", name="Download there.csv").click()
    await expect(page.get_by_role("alert").filter(has_text="Download failed: ")).to_be_visible()
    await context.unroute(files)
    listed = re.compile(r"/files\?conversation_id=")
    await context.route(listed, refuse)
    await page.reload()
    await expect(page.get_by_role("textbox", name="Message")).to_be_visible()
    await expect(page.get_by_role("alert").filter(has_text="List files failed: ")).to_be_visible()


async def test_u07_the_limits_are_shown_before_a_file_is_chosen(page: Page) -> None:
    await expect(page.get_by_text("Up to 50 files of 100 MB")).to_be_visible()
    await expect(page.get_by_text("csv, xlsx, json, txt, pkl, png, jpg, pdf")).to_be_visible()
    await drop(page, "program.exe", "MZ")
    await expect(page.get_by_role("alert").filter(has_text="only these types")).to_be_visible()


async def test_u08_the_page_waits_for_the_session(desk: Desk, page: Page) -> None:
    texts = json.loads(await asyncio.to_thread((SOURCE / "i18n" / "en.json").read_text))
    assert texts["error"]["session_create_failed"] == "Failed to create sandbox session"
    assert texts["error"]["session_not_ready"] == "Sandbox session initialization timeout"
    await begun(desk, page)
    await expect(status(page)).to_have_text("Done")


async def test_u09_the_end_of_a_conversation_asks_and_removes_its_files(
    desk: Desk, page: Page, client: httpx.AsyncClient
) -> None:
    name = await begun(desk, page)
    await drop(page, "nine.csv", "a\n")
    await expect(uploads(page)).to_contain_text("nine.csv")
    await page.get_by_role("button", name="Delete conversation").click()
    dialog = page.get_by_role("alertdialog", name="Delete conversation?")
    await expect(dialog).to_contain_text("Its files go at once and cannot be recovered.")
    await dialog.get_by_role("button", name="Cancel").click()
    await expect(uploads(page)).to_contain_text("nine.csv")
    await page.get_by_role("button", name="Delete conversation").click()
    await dialog.get_by_role("button", name="Delete", exact=True).click()
    await expect(page.get_by_role("heading", level=1)).to_have_text("New conversation")
    reply = await client.get(f"/api/v1/conversations/{name}")
    assert reply.status_code == 404


async def test_u10_another_user_sees_nothing_of_it(desk: Desk, page: Page, browser: Any) -> None:
    await begun(desk, page)
    served = desk.console.served
    other = await browser.new_context(locale="en-US")
    async with served.client(await served.key_of("u10")) as client:
        cookie = await desk.console.login(client)
    await other.add_cookies([{"name": "sbx_console", "value": cookie, "url": desk.console.origin}])
    theirs = await other.new_page()
    desk.watch(theirs)
    await theirs.goto(page.url)
    await expect(theirs.get_by_text("There are no conversations.")).to_be_visible()
    await expect(theirs.get_by_role("article")).to_have_count(0)
    await other.close()


async def test_u11_the_steps_of_the_agent_are_visible(desk: Desk, page: Page) -> None:
    desk.model.add(
        calls(("run_code", {"code": "print('step')"}), text="First I look."), Response("Then done.")
    )
    await send(page, "go")
    log = page.get_by_role("log", name="Messages")
    await expect(log.get_by_role("article", name="Agent").first).to_have_text("First I look.")
    await expect(log.get_by_role("group", name="run_code: done")).to_be_visible()
    await expect(log.get_by_role("article", name="Agent").last).to_have_text("Then done.")


async def test_u12_the_history_is_stored_and_resumed(
    desk: Desk, page: Page, client: httpx.AsyncClient
) -> None:
    name = await begun(desk, page, "remembered")
    await page.get_by_role("link", name="Settings").click()
    await page.get_by_role("link", name="Conversations").click()
    await page.get_by_role("link", name="hi").first.click()
    await expect(page.get_by_role("article", name="Agent")).to_have_text("remembered")
    desk.model.add(Response("again"))
    await send(page, "and again")
    await expect(page.get_by_role("article", name="Agent").last).to_have_text("again")
    assert [each["role"] for each in await messages(client, name)] == ["user", "assistant"] * 2


async def test_u13_the_state_of_sandboxes_is_live(page: Page, client: httpx.AsyncClient) -> None:
    await page.get_by_role("link", name="Sandboxes").click()
    box = (await client.post("/v1/sandboxes", json={})).json()["id"]
    row = page.get_by_role("table", name="Sandboxes").get_by_role("row").filter(has_text=box)
    await expect(row).to_contain_text("idle")
    await client.post(f"/v1/sandboxes/{box}/conversations/default/runs", json={"code": "1"})
    await expect(row).to_contain_text("ready")
    await expect(row.get_by_role("meter", name="Memory")).to_be_visible()
    await client.delete(f"/v1/sandboxes/{box}")
    await expect(row).to_have_count(0)


async def test_u14_code_and_commands_run_in_the_live_sandbox_of_an_agent(
    desk: Desk, page: Page
) -> None:
    desk.model.add(calls(("run_code", {"code": "kept = 41"})), Response("kept"))
    await send(page, "keep")
    await expect(status(page)).to_have_text("Done")
    await page.get_by_role("link", name="Sandboxes").click()
    table = page.get_by_role("table", name="Sandboxes")
    await table.get_by_role("row").filter(has_text="sb-session").get_by_role("link").click()
    await page.get_by_role("tab", name="History").click()
    await expect(page.get_by_role("tabpanel")).to_contain_text("kept = 41")


async def test_u15_a_template_starts_a_task_in_one_step(desk: Desk, page: Page) -> None:
    await page.get_by_role("button", name=re.compile("Summarise a table")).click()
    dialog = page.get_by_role("dialog", name="Summarise a table")
    await dialog.get_by_role("textbox", name="File").fill("sales.csv")
    await dialog.get_by_role("button", name="Use").click()
    await expect(page.get_by_role("textbox", name="Message")).to_have_value(
        re.compile(r"uploaded file sales\.csv")
    )


async def test_u16_the_steps_are_counted_and_the_reason_of_the_end_is_shown(
    desk: Desk, page: Page
) -> None:
    await page.get_by_text("Options").click()
    await page.get_by_role("spinbutton", name="Steps at most").fill("1")
    desk.model.add(calls(("run_code", {"code": "import time; time.sleep(2)"})))
    await send(page, "go")
    await expect(page.get_by_text("Step 1 of 1")).to_be_visible()
    await expect(status(page)).to_have_text("Failed")
    await expect(page.get_by_text("The agent has reached its limit of steps.")).to_be_visible()
    desk.model.add(Response("continued"))
    await page.get_by_role("button", name="Continue").click()
    await expect(page.get_by_role("article", name="Agent").last).to_have_text("continued")


async def test_u17_a_logout_can_stop_the_sandboxes_of_the_user(desk: Desk) -> None:
    """Its route; the page does not offer it."""
    served = desk.console.served
    async with served.client(await served.key_of("u17")) as client:
        box = (await client.post("/v1/sandboxes", json={})).json()["id"]
        await client.post(f"/v1/sandboxes/{box}/conversations/default/runs", json={"code": "1"})
        cookie = await desk.console.login(client)
        await desk.console.call("POST", "/api/v1/console/logout", cookie, {"clean": True})
        assert (await client.get(f"/v1/sandboxes/{box}")).json()["status"] == "idle"


async def test_u18_both_project_dialogs_have_the_switch_on_by_default(
    desk: Desk, page: Page
) -> None:
    await desk.project("switch")
    await page.get_by_role("link", name="Projects").click()
    for button, dialog in (("New project", "New project"), ("Edit switch", "Edit project")):
        await page.get_by_role("button", name=button).click()
        opened = page.get_by_role("dialog", name=dialog)
        await expect(opened.get_by_role("switch", name="Sandbox mode")).to_be_checked()
        await page.keyboard.press("Escape")
        await expect(page.get_by_role("button", name=button)).to_be_focused()


async def test_u19_an_approval_is_never_lost(desk: Desk, page: Page) -> None:
    await desk.project("u19", file="old\n")
    await page.get_by_label("Project").select_option(label="u19")
    desk.model.add(runs("echo new > file.txt"), Response("ok"))
    await send(page, "change")
    asked = page.get_by_role("group", name="execute_command: waiting for approval")
    await expect(asked).to_be_visible()
    await page.reload()
    await expect(asked).to_be_visible()
    await expect(asked.get_by_role("region", name="Proposed changes")).to_contain_text("+new")
    await asked.get_by_role("button", name="Allow", exact=True).click()
    await expect(status(page)).to_have_text("Done")


async def test_u20_and_u21_the_four_looks_of_a_call(desk: Desk, page: Page) -> None:
    await desk.project("looks", file="old\n")
    await page.get_by_label("Project").select_option(label="looks")
    desk.model.add(
        calls(("read_file", {"path": "file.txt"}), ("read_file", {"path": "none.txt"})),
        runs("echo new > file.txt"),
        calls(("run_code", {"code": "import time\nprint('on')\ntime.sleep(3)"})),
        Response("ok"),
    )
    await send(page, "look")
    log = page.get_by_role("log")
    done = log.get_by_role("group", name="read_file: done")
    await expect(done).to_have_attribute("data-status", "done")
    await expect(done.locator("[data-icon]")).to_have_attribute("data-icon", "check")
    failed = log.get_by_role("group", name="read_file: error")
    await expect(failed).to_have_attribute("data-status", "error")
    await expect(failed.locator("[data-icon]")).to_have_attribute("data-icon", "x")
    await expect(failed).to_contain_text("The file does not exist.")
    asked = log.get_by_role("group", name="execute_command: waiting for approval")
    await expect(asked).to_have_attribute("data-status", "pending_approval")
    await expect(asked.locator("[data-icon]")).to_have_attribute("data-icon", "shield-check")
    await expect(asked).to_contain_text("echo new > file.txt")
    await expect(asked.get_by_role("button", name="Deny")).to_be_visible()
    colours = [
        await block.locator("[data-icon]").evaluate("(icon) => getComputedStyle(icon).color")
        for block in (done, failed, asked)
    ]
    assert len(set(colours)) == 3
    await asked.get_by_role("button", name="Allow", exact=True).click()
    await expect(status(page)).to_have_text("Done")


async def test_u22_a_temporary_conversation_has_no_switch(page: Page) -> None:
    first = page.get_by_label("Project").locator("option").first
    await expect(first).to_have_text("None (temporary)")
    await expect(page.get_by_role("switch")).to_have_count(0)


async def test_u23_an_abort_denies_what_waits(
    desk: Desk, page: Page, client: httpx.AsyncClient
) -> None:
    await desk.project("u23", file="old\n")
    await page.get_by_label("Project").select_option(label="u23")
    desk.model.add(runs("echo new > file.txt"))
    await send(page, "change")
    await expect(status(page)).to_have_text("Waiting for approval")
    await page.get_by_role("button", name="Stop", exact=True).click()
    await expect(page.get_by_role("group", name="execute_command: denied")).to_be_visible()
    assert (await client.get("/api/v1/approvals")).json()["items"] == []


async def test_u24_the_types_of_the_page_are_those_of_the_events() -> None:
    source = await asyncio.to_thread((SOURCE / "types" / "agent.ts").read_text)
    assert '"running" | "done" | "error" | "pending_approval"' in source
    for kind in protocol._KINDS:
        (line,) = re.findall(rf'\| \{{ type: "{kind}";(.*?)\}}', source)
        told = set(re.findall(r"(\w+)\??:", line))
        fields = {name for name in protocol._KINDS[kind].__dataclass_fields__ if name != "type"}  # type: ignore[attr-defined]
        assert fields - {"model"} <= told | {"model"}, kind


async def test_u25_the_texts_are_in_three_languages() -> None:
    for name, text in (
        ("zh", "沙箱模式：禁止访问工作区外的路径"),  # noqa: RUF001
        ("ja", "サンドボックスモード：ワークスペース外のパスにはアクセスできません"),  # noqa: RUF001
        ("en", "Sandbox mode: no access to paths outside the workspace"),
    ):
        texts = json.loads(await asyncio.to_thread((SOURCE / "i18n" / f"{name}.json").read_text))
        assert texts["error"]["outside_workspace"] == text
