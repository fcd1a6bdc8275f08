"""What a person does in the console, from its link to the end of a conversation."""

import asyncio
import json
import os
import re
from pathlib import Path

import httpx
from agent_calls import calls, runs
from model_server import Asked
from playwright.async_api import BrowserContext, Page, Route, WebSocketRoute, expect

from sbx.agent.messages import Response
from tests.browser.conftest import Desk

SVG = (
    "from IPython.display import SVG, display\n"
    'display(SVG(\'<svg xmlns="http://www.w3.org/2000/svg" width="80" height="40">'
    '<rect width="80" height="40" fill="teal"/></svg>\'))\n'
    "print('drawn')"
)


async def send(page: Page, message: str) -> None:
    await page.get_by_role("textbox", name="Message").fill(message)
    await page.get_by_role("button", name="Send").click()


async def drop(page: Page, name: str, content: str) -> None:
    """Drop a file on the conversation, as a person drags it there."""
    await page.evaluate(
        """([name, content]) => {
            const data = new DataTransfer();
            data.items.add(new File([content], name));
            const target = document.querySelector(".chat");
            for (const type of ["dragover", "drop"]) {
                target.dispatchEvent(new DragEvent(type, {dataTransfer: data, bubbles: true,
                                                          cancelable: true}));
            }
        }""",
        [name, content],
    )


async def test_from_a_link_to_a_changed_file_and_the_end(desk: Desk, page: Page) -> None:
    directory = await desk.project("shop", prices="old\n")
    assert "#" not in page.url  # the code is not left in the address
    await page.get_by_label("Project").select_option(label="shop")
    await drop(page, "data.csv", "a,b\n1,2\n")
    files = page.get_by_role("table", name="Uploaded files")
    await expect(files.get_by_role("link", name="Download data.csv")).to_be_visible()
    stored = page.get_by_role("status").filter(has_text="data.csv is uploaded")
    await expect(stored).to_have_count(1)  # screen readers speak it
    await expect(page.get_by_role("main", name="Conversations")).to_be_visible()

    desk.model.add(
        calls(("run_code", {"code": SVG}), text="I look at it."),
        runs("echo new > prices.txt"),
        Response("It is **done**."),
    )
    await send(page, "Fix the prices")
    await expect(page.get_by_role("log").get_by_role("article", name="You")).to_have_text(
        "Fix the prices"
    )
    block = page.get_by_role("group", name="run_code: done")
    await expect(block).to_be_visible()
    await expect(block.get_by_role("img", name="Figure 1")).to_be_visible()
    asked = page.get_by_role("group", name="execute_command: waiting for approval")
    await expect(asked.get_by_role("region", name="Proposed changes")).to_contain_text("-old")
    await expect(asked.get_by_role("group", name="Changed /workspace/prices.txt")).to_contain_text(
        "+new"
    )
    await expect(page.get_by_role("status", name="Run", exact=True)).to_have_text(
        "Waiting for approval"
    )
    assert (directory / "prices.txt").read_text() == "old\n"
    await asked.get_by_role("button", name="Allow", exact=True).click()
    await expect(page.get_by_role("status", name="Run", exact=True)).to_have_text("Done")
    assert (directory / "prices.txt").read_text() == "new\n"
    await expect(page.get_by_role("article", name="Agent").last).to_have_text("It is done.")
    await expect(page.get_by_role("heading", level=1)).to_have_text("Fix the prices")

    await page.reload()
    await expect(page.get_by_role("group", name="execute_command: done")).to_be_visible()
    await expect(page.get_by_role("article", name="You")).to_have_count(1)
    async with page.expect_download() as download:
        await page.get_by_role("link", name="Download data.csv").click()
    saved = await (await download.value).path()
    assert Path(saved).read_text() == "a,b\n1,2\n"  # noqa: ASYNC240
    assert (await download.value).suggested_filename == "data.csv"

    await page.get_by_role("button", name="Delete conversation").click()
    dialog = page.get_by_role("alertdialog", name="Delete conversation?")
    await expect(dialog).to_contain_text("cannot be recovered")
    await dialog.get_by_role("button", name="Delete", exact=True).click()
    await expect(page.get_by_role("heading", level=1)).to_have_text("New conversation")
    await expect(page.get_by_role("link", name="Fix the prices")).to_have_count(0)


async def test_a_used_link_shows_the_login(desk: Desk, context: BrowserContext) -> None:
    page = await context.new_page()
    desk.watch(page)
    code = await desk.console.code()
    other = await context.browser.new_context()  # type: ignore[union-attr]
    first = await other.new_page()
    await first.goto(f"{desk.console.origin}/console/#login={code}")
    await expect(first.get_by_role("navigation", name="Main")).to_be_visible()
    await other.close()
    await page.goto(f"{desk.console.origin}/console/#login={code}")
    await expect(page.get_by_role("heading", name="Log in")).to_be_visible()
    await expect(page.get_by_role("alert")).to_have_text(
        "This login link was used already or has expired."
    )
    await expect(page.get_by_text("sbx console")).to_be_visible()


async def test_logout_ends_the_login(page: Page) -> None:
    await page.get_by_role("button", name="Log out").click()
    await expect(page.get_by_role("heading", name="Log in")).to_be_visible()
    await page.reload()
    await expect(page.get_by_role("heading", name="Log in")).to_be_visible()


async def test_stop_aborts_the_run_and_its_approval(desk: Desk, page: Page) -> None:
    await desk.project("stopped", file="old\n")
    await page.get_by_label("Project").select_option(label="stopped")
    desk.model.add(runs("echo new > file.txt"))
    await send(page, "Change it")
    await expect(
        page.get_by_role("group", name="execute_command: waiting for approval")
    ).to_be_visible()
    await page.get_by_role("button", name="Stop", exact=True).click()
    await expect(page.get_by_role("status", name="Run", exact=True)).to_have_text("Stopped")
    await expect(page.get_by_role("group", name="execute_command: denied")).to_be_visible()
    await expect(page.get_by_role("link", name="Approvals", exact=True)).to_be_visible()


async def test_an_approval_is_decided_in_the_inbox_and_shown_everywhere(
    desk: Desk, page: Page, context: BrowserContext
) -> None:
    await desk.project("inbox", file="old\n")
    await page.get_by_label("Project").select_option(label="inbox")
    desk.model.add(runs("echo new > file.txt"), Response("denied then"))
    await send(page, "Change it")
    inbox = await context.new_page()
    desk.watch(inbox)
    await inbox.goto(f"{desk.console.origin}/console/approvals")
    await expect(inbox).to_have_title("(1) Approvals · sbx")
    await expect(inbox.get_by_role("link", name="Approvals, 1 waiting")).to_be_visible()
    waiting = inbox.get_by_role("list", name="Waiting approvals")
    await expect(waiting.get_by_role("timer", name="Time left")).to_contain_text("9:")
    await waiting.get_by_role("button", name="Deny").click()
    await expect(inbox.get_by_text("Nothing is waiting")).to_be_visible()
    await expect(page.get_by_role("group", name="execute_command: denied")).to_be_visible()


async def test_a_late_list_removes_no_approval(
    desk: Desk, page: Page, context: BrowserContext
) -> None:
    await desk.project("late", file="old\n")
    await page.get_by_label("Project").select_option(label="late")
    lists: list[Route] = []
    inbox = await context.new_page()
    desk.watch(inbox)

    async def on_list(route: Route) -> None:
        lists.append(route)
        if len(lists) > 1:
            await route.continue_()

    await inbox.route("**/api/v1/approvals?*", on_list)
    await inbox.goto(f"{desk.console.origin}/console/approvals")
    await expect(inbox).to_have_title("Approvals · sbx")
    desk.model.add(runs("echo new > file.txt"), Response("denied then"))
    await send(page, "Change it")
    await expect(inbox).to_have_title("(1) Approvals · sbx")  # by the notice
    again = lambda sent: "/api/v1/approvals?" in sent.url and sent != lists[0].request  # noqa: E731
    async with inbox.expect_request_finished(again):
        await lists[0].fulfill(json={"items": [], "next_cursor": None})
    assert len(lists) == 2
    await expect(inbox.get_by_role("link", name="Approvals, 1 waiting")).to_be_visible()
    await inbox.get_by_role("button", name="Deny").click()
    await expect(inbox.get_by_text("Nothing is waiting")).to_be_visible()


async def test_a_rule_is_remembered_and_revoked(desk: Desk, page: Page) -> None:
    await desk.project("ruled", file="old\n")
    await page.get_by_label("Project").select_option(label="ruled")
    desk.model.add(runs("touch one.txt"), runs("touch two.txt"), Response("both"))
    await send(page, "Change it twice")
    await page.get_by_role("button", name="Always allow…").click()
    dialog = page.get_by_role("dialog", name="Always allow")
    await dialog.get_by_role("radio", name="Commands that begin with").check()
    await dialog.get_by_role("textbox", name="Prefix").fill("touch one; rm")
    await dialog.get_by_role("button", name="Allow always").click()
    await expect(dialog.get_by_role("alert")).to_be_visible()  # more than one command
    await dialog.get_by_role("textbox", name="Prefix").fill("touch")
    await dialog.get_by_role("button", name="Allow always").click()
    await expect(page.get_by_role("status", name="Run", exact=True)).to_have_text("Done")
    await page.get_by_role("link", name="Approvals").click()
    rules = page.get_by_role("table", name="Remembered rules")
    await expect(rules).to_contain_text("touch")
    await rules.get_by_role("button", name="Revoke touch").click()
    await expect(rules).to_have_count(0)


async def test_all_commands_of_a_conversation_are_allowed_and_asked_about_again(
    desk: Desk, page: Page
) -> None:
    directory = await desk.project("trusted", file="old\n")
    await page.get_by_label("Project").select_option(label="trusted")
    desk.model.add(Response("hello"))
    await send(page, "hello")
    await expect(page.get_by_role("article", name="Agent")).to_have_text("hello")
    await page.get_by_role("button", name="Allow all commands here").click()
    ask = page.get_by_role("alertdialog", name="Allow all commands here")
    await expect(ask).to_contain_text("without an approval")
    await ask.get_by_role("button", name="Allow", exact=True).click()
    again = page.get_by_role("button", name="Ask about commands again")
    await expect(again).to_be_visible()
    desk.model.add(runs("echo new > file.txt"), Response("changed"))
    await send(page, "change it")
    await expect(page.get_by_role("group", name="execute_command: done")).to_be_visible()
    await expect(page.get_by_role("article", name="Agent").last).to_have_text("changed")
    assert (directory / "file.txt").read_text() == "new\n"
    await again.click()
    desk.model.add(runs("echo newer > file.txt"), Response("changed"))
    await send(page, "change it again")
    asked = page.get_by_role("group", name="execute_command: waiting for approval")
    await expect(asked).to_be_visible()
    await asked.get_by_role("button", name="Deny").click()
    await expect(page.get_by_role("status", name="Run", exact=True)).to_have_text("Done")
    assert (directory / "file.txt").read_text() == "new\n"


async def test_a_sandbox_is_made_used_and_deleted(page: Page) -> None:
    await page.get_by_role("link", name="Sandboxes").click()
    await page.get_by_role("button", name="New sandbox").click()
    dialog = page.get_by_role("dialog", name="New sandbox")
    await expect(dialog.get_by_role("combobox", name="Policy")).to_contain_text("strict")
    await dialog.get_by_role("button", name="Create").click()
    await expect(page).to_have_url(re.compile("/console/sandboxes/sandbox-"))
    tabs = page.get_by_role("tablist", name="Sandbox")
    await tabs.get_by_role("tab", name="Cells").click()
    cell = page.get_by_role("group", name="Cell 1")
    await cell.get_by_role("textbox", name="Code").fill("name = input('Who? ')\nprint('hi', name)")
    await cell.get_by_role("textbox", name="Code").press("Shift+Enter")
    await cell.get_by_role("textbox", name="Input: Who?").fill("Ann")
    await cell.get_by_role("button", name="Send input").click()
    await expect(cell.get_by_role("region", name="Output")).to_contain_text("hi Ann")
    await page.get_by_role("button", name="Add cell").click()
    second = page.get_by_role("group", name="Cell 2")
    await expect(second.locator(".cm-content")).to_be_visible()  # the editor is loaded
    await second.get_by_role("textbox", name="Code").fill("nam")
    await second.get_by_role("textbox", name="Code").press("Control+Space")
    await expect(page.get_by_role("option", name="name", exact=True)).to_be_visible()
    await page.keyboard.press("Enter")
    await expect(second.get_by_role("textbox", name="Code")).to_have_text("name")
    await second.get_by_role("button", name="Run", exact=True).click()
    await expect(second.get_by_role("region", name="Output")).to_contain_text("'Ann'")
    await page.reload()
    await page.get_by_role("tab", name="Cells").click()
    again = page.get_by_role("group", name="Cell 2")  # from the history
    await expect(again.get_by_role("textbox", name="Code")).to_have_text("name")
    await expect(again.get_by_role("region", name="Output")).to_contain_text("'Ann'")

    await page.get_by_role("tab", name="Terminals").click()
    await page.get_by_role("button", name="New terminal").click()
    terminal = page.get_by_role("group", name="Terminal")
    await expect(terminal).to_contain_text("$")
    await page.keyboard.type("echo from-$((6*7))\n")
    await expect(terminal).to_contain_text("from-42")

    await page.get_by_role("tab", name="Files").click()
    await expect(page.get_by_role("tabpanel").get_by_text("uploads/")).to_be_visible()
    await page.get_by_role("tab", name="History").click()
    await expect(page.get_by_role("tabpanel")).to_contain_text("name = input")
    await page.get_by_role("tab", name="Events").click()
    await expect(page.get_by_role("table", name="Events")).to_contain_text("started")
    await page.get_by_role("tab", name="Network").click()
    await expect(page.get_by_text("No request was allowed or refused.")).to_be_visible()
    await page.get_by_role("tab", name="Walls").click()
    await expect(page.get_by_role("table", name="Walls")).to_contain_text("landlock")
    await page.get_by_role("tab", name="Overview").click()
    await expect(page.get_by_role("meter", name="Memory")).to_be_visible()

    await page.get_by_role("button", name="Extend").click()
    dialog = page.get_by_role("dialog", name="Extend")
    await dialog.get_by_role("combobox", name="By").select_option("86400")
    await dialog.get_by_role("button", name="Extend").click()
    await expect(page.get_by_text("expires in 24:")).to_be_visible()
    await page.get_by_role("button", name="Stop").click()
    await expect(page.get_by_text("idle ·")).to_be_visible()
    await page.get_by_role("button", name="Delete", exact=True).click()
    await page.get_by_role("alertdialog").get_by_role("button", name="Delete", exact=True).click()
    await expect(page.get_by_role("heading", level=1)).to_have_text("Sandboxes")


async def test_projects_templates_and_policies(desk: Desk, page: Page) -> None:
    directory = desk.directory("made-here")
    (directory / "inner").mkdir()
    await page.get_by_role("link", name="Projects").click()
    await page.get_by_role("button", name="New project").click()
    dialog = page.get_by_role("dialog", name="New project")
    await expect(dialog.get_by_role("switch", name="Sandbox mode")).to_be_checked()
    await expect(dialog.get_by_role("switch", name="Sandbox mode")).to_be_disabled()
    await dialog.get_by_role("textbox", name="Name").fill("here")
    await dialog.get_by_role("textbox", name="Working directory").fill("/etc")
    await dialog.get_by_role("button", name="Create").click()
    await expect(dialog.get_by_role("alert")).to_be_visible()
    place = dialog.get_by_role("textbox", name="Working directory")
    await place.fill(f"{directory}/in")
    await dialog.get_by_role("button", name=f"{directory}/inner", exact=True).click()
    await expect(place).to_have_value(f"{directory}/inner")
    await place.fill(str(directory))
    await dialog.get_by_role("button", name="Create").click()
    table = page.get_by_role("table", name="Projects")
    await expect(table).to_contain_text("made-here")
    await page.get_by_role("button", name="Edit here").click()
    dialog = page.get_by_role("dialog", name="Edit project")
    await dialog.get_by_role("textbox", name="Name").fill("there")
    await dialog.get_by_role("button", name="Save").click()
    await expect(table).to_contain_text("there")
    await page.get_by_role("button", name="Delete there").click()
    await page.get_by_role("alertdialog").get_by_role("button", name="Delete", exact=True).click()
    await expect(page.get_by_role("button", name="Edit there")).to_have_count(0)

    await page.get_by_role("link", name="Templates").click()
    await page.get_by_role("button", name="New template").click()
    dialog = page.get_by_role("dialog", name="New template")
    await dialog.get_by_role("textbox", name="Name", exact=True).fill("Count lines")
    await dialog.get_by_role("textbox", name="Prompt").fill("Count the lines of {{file}}")
    await dialog.get_by_role("button", name="Save").click()
    card = page.get_by_role("listitem").filter(has_text="Count lines")
    await card.get_by_role("button", name="Use").click()
    dialog = page.get_by_role("dialog", name="Count lines")
    await dialog.get_by_role("textbox", name="file").fill("a.txt")
    await dialog.get_by_role("button", name="Use").click()
    await expect(page.get_by_role("textbox", name="Message")).to_have_value(
        "Count the lines of a.txt"
    )
    await page.get_by_role("link", name="Policies").click()
    await page.locator("summary", has=page.get_by_text("strict", exact=True)).click()
    await expect(page.get_by_role("heading", name="Limits")).to_be_visible()


async def begin_elsewhere(
    client: httpx.AsyncClient, page: Page, agent: str = "console", name: str | None = None
) -> None:
    """Another client sends a message to the conversation of the page, or to this one."""
    name = name or page.url.rpartition("/")[2]
    reply = await client.post(
        "/api/v1/chat",
        json={
            "user_id": f"uid:{os.geteuid()}",
            "agent_id": agent,
            "conversation_id": name,
            "message": "from elsewhere",
            "detach": True,
        },
    )
    assert reply.status_code == 202, reply.text


async def test_a_conversation_begun_elsewhere_is_followed(
    desk: Desk, page: Page, client: httpx.AsyncClient
) -> None:
    """Two clients of one conversation: each sees the messages of the other."""
    desk.model.add(Response("first"), Response("second"))
    await send(page, "from the page")
    await expect(page.get_by_role("article", name="Agent")).to_have_text("first")
    await begin_elsewhere(client, page)
    await expect(page.get_by_role("article", name="You").last).to_have_text("from elsewhere")
    await expect(page.get_by_role("article", name="Agent").last).to_have_text("second")
    await expect(page.get_by_role("article")).to_have_count(4)


async def test_a_run_that_ends_at_once_is_shown_once(
    desk: Desk, context: BrowserContext, client: httpx.AsyncClient
) -> None:
    """All messages of the run arrive between its first event and the rest."""
    held: list[str | bytes] = []
    sockets: list[WebSocketRoute] = []
    holding = asyncio.Event()
    late = asyncio.Event()

    def on_socket(socket: WebSocketRoute) -> None:
        server = socket.connect_to_server()
        sockets.append(socket)

        def on_message(message: str | bytes) -> None:
            kind = str(json.loads(message).get("event", {}).get("type"))
            is_held = holding.is_set() and kind.startswith(("run_", "step_", "text_", "tool_"))
            (held.append if is_held else socket.send)(message)

        server.on_message(on_message)

    async def on_messages(route: Route) -> None:
        if holding.is_set() and held:  # the run has ended, and the page does not know its events
            sockets[-1].send(held.pop(0))
            page.once("requestfinished", lambda _: late.set())
        await route.continue_()

    await context.route_web_socket("**/api/v1/events", on_socket)
    page = await desk.opened(context)
    desk.model.add(Response("first"))
    await send(page, "from the page")
    await expect(page.get_by_role("article", name="Agent")).to_have_text("first")
    await page.route("**/messages?*", on_messages)
    wait = {"code": "import time; time.sleep(1)"}
    desk.model.add(calls(("run_code", wait)), Response("second"))
    holding.set()
    await begin_elsewhere(client, page)
    async with asyncio.timeout(20):
        await late.wait()
    await page.evaluate("new Promise((done) => setTimeout(done, 100))")
    holding.clear()
    for message in held:
        sockets[-1].send(message)
    await expect(page.get_by_role("article", name="Agent").last).to_have_text("second")
    await expect(page.get_by_role("article")).to_have_count(4)
    await expect(page.get_by_role("group", name="run_code: done")).to_have_count(1)


async def test_a_profile_of_an_agent_greets_and_offers_beginnings(
    desk: Desk, page: Page, client: httpx.AsyncClient
) -> None:
    profile = {
        "welcome": "Upload <b>a table</b>.",
        "starters": ["Describe data.csv"],
        "instructions": "Answer briefly.",
        "limits": {"max_steps": 42},
        "tools": ["plan"],
    }
    await client.post("/api/v1/agents", json={"agent_id": "tables", "profile": profile})
    await page.reload()
    await page.get_by_role("group", name="Agents with a profile").get_by_text("tables").click()
    await expect(page.get_by_role("textbox", name="Agent")).to_have_value("tables")
    await expect(page.get_by_text("Upload <b>a table</b>.")).to_be_visible()
    await page.get_by_role("button", name="Describe data.csv").click()
    message = page.get_by_role("textbox", name="Message")
    await expect(message).to_have_value("Describe data.csv")
    asked: list[str] = []

    def answer(request: Asked) -> Response:
        asked.append(request.text)
        return Response("described")

    steps = [{"text": "read it", "state": "done"}, {"text": "<b>draw</b>", "state": "active"}]
    desk.model.add(calls(("plan", {"steps": steps})), answer)
    await page.get_by_role("button", name="Send").click()
    await expect(page.get_by_role("article", name="Agent")).to_have_text("described")
    assert "Answer briefly." in asked[0]
    plan = page.get_by_role("group", name="plan: done")
    await expect(plan).to_contain_text("1 of 2 steps are done")
    await expect(plan.get_by_role("listitem")).to_have_text(
        ["read it done", "<b>draw</b> in progress"]
    )
    name = page.url.rpartition("/")[2]
    (run,) = (await client.get(f"/api/v1/conversations/{name}/runs")).json()["items"]
    assert run["max_steps"] == 42
    await client.delete("/api/v1/agents/tables")


async def test_a_run_of_another_agent_is_followed(
    desk: Desk, page: Page, client: httpx.AsyncClient
) -> None:
    """The page opens before it knows whose conversation this is."""
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()

    def answer(_: Asked) -> Response:
        loop.call_soon_threadsafe(begun.set)
        return calls(("run_code", {"code": "import time; time.sleep(60)"}))

    desk.model.add(answer)
    await begin_elsewhere(client, page, "other", "of-another")
    async with asyncio.timeout(20):
        await begun.wait()
    await page.goto(f"{desk.console.origin}/console/conversations/of-another")
    await expect(page.get_by_role("group", name="run_code: running")).to_be_visible()
    await page.get_by_role("button", name="Stop", exact=True).click()
    await expect(page.get_by_role("status", name="Run")).to_contain_text("Stopped")
