"""Languages, keyboard, accessibility, hostile output, restarts: what holds on every page."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from agent_calls import calls, runs
from console_service import console_service
from playwright.async_api import Browser, BrowserContext, Page, expect

from sbx.agent.messages import Response
from tests.browser.conftest import WIDE, Desk
from tests.browser.names import SOURCE
from tests.browser.test_main_path import send
from tests.tiers import rows

AXE = SOURCE / "node_modules" / "axe-core" / "axe.min.js"
PAGES = ("conversations", "approvals", "sandboxes", "projects", "templates", "policies", "settings")


# -- languages -------------------------------------------------------------------------------------


async def test_the_language_and_the_theme_stay(page: Page) -> None:
    await page.get_by_role("link", name="Settings").click()
    await page.get_by_role("combobox", name="Language").select_option(label="中文")
    await expect(page.get_by_role("heading", level=1)).to_have_text("设置")
    await page.get_by_role("combobox", name="主题").select_option(label="深色")
    await page.reload()
    await expect(page.get_by_role("heading", level=1)).to_have_text("设置")
    assert await page.evaluate("getComputedStyle(document.documentElement).colorScheme") == "dark"


# -- accessibility -----------------------------------------------------------------------------


_CHECK = """
async () => {
  const tags = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"];
  const light = await axe.run(document, {runOnly: tags, resultTypes: ["violations"]});
  document.documentElement.dataset.theme = "dark";
  const dark = await axe.run(document, {runOnly: {type: "rule", values: ["color-contrast"]}});
  document.documentElement.dataset.theme = "light";
  return [...light.violations, ...dark.violations];
}
"""


async def violations(page: Page) -> list[str]:
    """Violations of a page in the light theme, and those that the colours of the dark one add."""
    return [
        f"{each['id']}: {node['target']} {node['failureSummary']}"
        for each in await page.evaluate(_CHECK)
        for node in each["nodes"]
    ]


def need_axe() -> None:
    if not AXE.exists():
        if os.environ.get("CI") == "true":
            pytest.fail("axe-core is missing: scripts/console installs it")
        pytest.skip("axe-core is missing: scripts/console installs it, with Node")


async def test_axe_has_no_complaint_on_any_page(desk: Desk, browser: Browser, client: Any) -> None:
    need_axe()
    context = await browser.new_context(viewport=WIDE, locale="en-US")  # type: ignore[arg-type]
    await context.add_init_script("localStorage.setItem('sbx.theme', 'light')")
    await context.add_init_script(path=AXE)
    page = await desk.opened(context)
    await desk.project("axe", file="old\n")
    await page.get_by_label("Project").select_option(label="axe")
    desk.model.add(
        calls(("run_code", {"code": "print('x')\n1/0"}), ("read_file", {"path": "file.txt"})),
        runs("echo new > file.txt; rm -f nothing; touch added.txt"),
        Response("ok"),
    )
    await send(page, "hello")
    asked = page.get_by_role("group", name="execute_command: waiting for approval")
    await expect(asked).to_be_visible()
    assert await violations(page) == []
    await page.goto(f"{desk.console.origin}/console/approvals")
    await expect(page.get_by_role("list", name="Waiting approvals")).to_be_visible()
    assert await violations(page) == []
    await page.get_by_role("button", name="Allow", exact=True).click()
    for name in PAGES[2:]:
        await page.goto(f"{desk.console.origin}/console/{name}")
        await expect(page.get_by_role("heading", level=1)).to_be_visible()
        await expect(page.locator("[aria-busy=true]")).to_have_count(0)
        assert await violations(page) == [], name
    box = (await client.post("/v1/sandboxes", json={})).json()["id"]
    await client.post(f"/v1/sandboxes/{box}/conversations/default/runs", json={"code": "1"})
    await page.goto(f"{desk.console.origin}/console/sandboxes/{box}")
    for tab in ("Overview", "Cells", "Files", "History", "Events", "Network", "Walls"):
        await page.get_by_role("tab", name=tab).click()
        await expect(page.locator("[aria-busy=true]")).to_have_count(0)
        assert await violations(page) == [], tab
    await page.get_by_role("button", name="Delete", exact=True).click()
    assert await violations(page) == [], "dialog"
    await context.close()


async def test_a_keyboard_is_enough(desk: Desk, page: Page) -> None:
    await desk.project("keys", file="old\n")
    desk.model.add(runs("echo new > file.txt"), Response("typed"))
    await page.keyboard.press("Tab")
    await expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
    await page.keyboard.press("Enter")
    projects = page.get_by_label("Project")
    await expect(projects.locator("option", has_text="keys")).to_have_count(1)
    await projects.focus()
    await page.keyboard.type("keys")
    await page.get_by_role("textbox", name="Message").focus()
    await page.keyboard.type("change it")
    await page.keyboard.press("Enter")
    asked = page.get_by_role("group", name="execute_command: waiting for approval")
    await expect(asked).to_be_visible()
    allow = asked.get_by_role("button", name="Allow", exact=True)
    for _ in range(60):
        if await allow.evaluate("(button) => button === document.activeElement"):
            break
        await page.keyboard.press("Tab")
    await expect(allow).to_be_focused()
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("article", name="Agent")).to_have_text("typed")
    tabs = page.get_by_role("tablist", name="Files")
    await tabs.get_by_role("tab", name="Uploads").focus()
    await page.keyboard.press("ArrowRight")
    await expect(tabs.get_by_role("tab", name="Workspace")).to_be_focused()
    await page.get_by_role("button", name="Delete conversation").focus()
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("alertdialog")).to_be_visible()
    await page.keyboard.press("Escape")
    await expect(page.get_by_role("alertdialog")).to_have_count(0)
    await expect(page.get_by_role("button", name="Delete conversation")).to_be_focused()
    await page.locator("main").focus()
    await page.keyboard.type("gs")
    await expect(page.get_by_role("heading", level=1)).to_have_text("Sandboxes")


async def test_enter_of_an_input_method_does_not_send(page: Page) -> None:
    box = page.get_by_role("textbox", name="Message")
    await box.fill("にほん")
    await box.evaluate(
        """(area) => area.dispatchEvent(new KeyboardEvent("keydown",
            {key: "Enter", isComposing: true, keyCode: 229, bubbles: true, cancelable: true}))"""
    )
    await expect(box).to_have_value("にほん")
    await expect(page.get_by_role("article")).to_have_count(0)
    await box.press("Shift+Enter")
    await expect(box).to_have_value("にほん\n")


@pytest.mark.parametrize("width", rows([320, 700], [320]))
async def test_a_narrow_window_needs_no_scrolling_to_the_side(
    desk: Desk, browser: Browser, width: int
) -> None:
    context = await browser.new_context(viewport={"width": width, "height": 700}, locale="en-US")
    page = await desk.opened(context)
    for name in PAGES:
        await page.goto(f"{desk.console.origin}/console/{name}")
        await expect(page.get_by_role("heading", level=1)).to_be_visible()
        wide = await page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width, name
    await context.close()


async def test_a_narrow_window_has_tabs_of_its_parts(desk: Desk, page: Page) -> None:
    parts = page.get_by_role("tablist", name="Parts of the page")
    message = page.get_by_role("textbox", name="Message")
    search = page.get_by_role("searchbox", name="Search conversations")
    await expect(parts).to_be_hidden()
    await desk.project("narrow")
    desk.model.add(Response("done"))
    await page.get_by_label("Project").select_option(label="narrow")
    await send(page, "in a narrow window")
    await expect(page.get_by_role("article", name="Agent")).to_have_text("done")
    one = page.get_by_role("region", name="Conversation list").get_by_role("listitem")
    await expect(one.filter(has_text="in a narrow window")).to_contain_text("narrow")
    await expect(page.get_by_role("button", name="Menu")).to_be_hidden()
    await page.set_viewport_size({"width": 500, "height": 800})
    await expect(page.get_by_role("navigation", name="Main")).to_be_hidden()
    await page.get_by_role("button", name="Menu").click()
    await page.get_by_role("link", name="Projects").click()
    await expect(page.get_by_role("heading", level=1)).to_have_text("Projects")
    await expect(page.get_by_role("navigation", name="Main")).to_be_hidden()
    await page.go_back()
    await expect(message).to_be_visible()
    await expect(search).to_be_hidden()
    await parts.get_by_role("tab", name="Conversations").click()
    await expect(search).to_be_visible()
    await expect(message).to_be_hidden()
    await page.keyboard.press("ArrowLeft")
    await expect(parts.get_by_role("tab", name="Files")).to_be_focused()
    await expect(page.get_by_role("button", name="Choose files")).to_be_visible()
    await parts.get_by_role("tab", name="Conversations").click()
    await page.get_by_role("button", name="New conversation").click()
    await expect(message).to_be_visible()


# -- hostile output ------------------------------------------------------------------------------

HOSTILE = (
    "<script>window.ran = 1</script>",
    "<img src=x onerror='window.ran = 1'>",
    "<svg onload='window.ran = 1'><script>window.ran = 1</script></svg>",
    "<iframe srcdoc='<script>parent.ran = 1</script>'></iframe>",
    "<a href='javascript:window.ran = 1'>link</a>",
    "<form action='http://evil.example/'><input name=x></form>",
    "<math><mtext><table><mglyph><style><img src=x onerror=window.ran=1>",
    "<svg></p><style><a id='</style><img src=1 onerror=window.ran=1>'>",
    "<noscript><p title='</noscript><img src=x onerror=window.ran=1>'>",
    "<link rel=stylesheet href='http://evil.example/x.css'>",
    "<meta http-equiv=refresh content='0;url=http://evil.example/'>",
    "<base href='http://evil.example/'><img src='x.png'>",
    "<table><tr><td><img src='http://evil.example/t.png'></td></tr></table>",
    "<style>@import 'http://evil.example/y.css';</style>",
    "<video src='http://evil.example/v'></video><object data='http://evil.example/o'></object>",
    # Markup that means something else when it is parsed a second time.
    "<form><math><mtext></form><form><mglyph><style></math><img src=x onerror=window.ran=1>",
    "<math><mtext><table><mglyph><style><!--</style><img title='--&gt;&lt;img src=x"
    " onerror=window.ran=1&gt;'>",
    "<svg><annotation-xml encoding='text/html'><img src=x onerror=window.ran=1></svg>",
    "<svg><foreignObject><iframe srcdoc='<script>parent.ran=1</script>'></foreignObject></svg>",
    "<svg><style>&lt;img src=x onerror=window.ran=1&gt;</style></svg>",
    "<svg><title><style><img src=x onerror=window.ran=1></style></title></svg>",
    "<template><script>window.ran = 1</script><img src=x onerror=window.ran=1></template>",
    "<select><template><img src=x onerror=window.ran=1></template></select>",
    "<!--><img src=x onerror=window.ran=1>-->",
    "<xmp><img src='</xmp><img src=x onerror=window.ran=1>'></xmp>",
    "<noembed><img src='</noembed><img src=x onerror=window.ran=1>'></noembed>",
    "<textarea><img src='</textarea><img src=x onerror=window.ran=1>'></textarea>",
    "<div><table><caption><svg><p><style><a id='</style><img src=x onerror=window.ran=1>'>",
    "<details open ontoggle='window.ran = 1'><summary>x</summary></details>",
    "<input autofocus onfocus='window.ran = 1'><button formaction='javascript:window.ran=1'>b",
    "<div id=app><img name=body><form id=document><input name=cookie></form></div>",
    "<a href='java\tscript:window.ran=1' style='position:fixed;inset:0'>x</a>",
    "<embed src='data:text/html,<script>parent.ran=1</script>'><portal src='http://evil.example'>",
    "<div>" * 600 + "<img src=x onerror=window.ran=1>" + "</div>" * 600,
)
MARKDOWN = (
    "![x](http://evil.example/i.png) [click](javascript:window.ran=1) <img src=x onerror=ran=1>\n\n"
    "[data](data:text/html,<script>1</script>) <http://evil.example/auto>\n\n"
    "<script>window.ran = 1</script>\n\n| a |\n|---|\n| <svg onload=ran=1> |\n\n`\u202eevil`"
)


async def test_hostile_output_runs_loads_and_navigates_nothing(desk: Desk, page: Page) -> None:
    code = (
        "from IPython.display import HTML, Markdown, display, SVG\n"
        f"for html in {HOSTILE!r}: display(HTML(html))\n"
        f"display(Markdown({MARKDOWN!r}))\n"
        'display(SVG(\'<svg xmlns="http://www.w3.org/2000/svg" onload="parent.ran=1">'
        '<script>parent.ran=1</script><image href="http://evil.example/s.png"/></svg>\'))\n'
        "print('\\x1b]0;title\\x07\\x1b]52;c;aGk=\\x07\\u202eabc\\x1b[31mred')\n"
    )
    desk.model.add(calls(("run_code", {"code": code})), Response(MARKDOWN))
    await send(page, "<img src=x onerror='window.ran = 1'>")
    await expect(page.get_by_role("status", name="Run", exact=True)).to_have_text(
        "Done",
        timeout=60_000,  # it has more than thirty frames
    )
    block = page.get_by_role("group", name="run_code: done")
    await expect(block.get_by_role("img", name="Figure 1")).to_be_visible()
    await expect(page.get_by_role("link", name="click")).to_have_count(0)
    link = page.get_by_role("article", name="Agent").get_by_role("link")
    assert await link.get_attribute("rel") == "noopener noreferrer"
    assert await page.get_by_role("log").locator("article img").count() == 0
    address = page.url
    await page.wait_for_function("document.querySelectorAll('iframe').length > 5")
    for frame in page.frames:
        assert await frame.evaluate("window.ran === undefined")
    assert page.url == address
    assert desk.foreign == []
    block_text = await page.get_by_role("log").inner_text()
    assert "\u202e" not in block_text
    assert "⟨202e⟩" in block_text


async def test_hostile_names_are_text_on_every_page(desk: Desk, page: Page, client: Any) -> None:
    """Titles, names of files, templates and agents; and what the pages of a sandbox list."""
    hostile = "<img src=x onerror='window.ran=1'>\u202e\u0007&lt;b&gt;"
    shown = "<img src=x onerror='window.ran=1'>⟨202e⟩⟨0007⟩&lt;b&gt;"
    desk.model.add(Response("ok"))
    await send(page, "begin")
    await expect(page.get_by_role("article", name="Agent")).to_have_text("ok")
    name = page.url.rpartition("/")[2]
    reply = await client.patch(f"/api/v1/conversations/{name}", json={"title": hostile})
    assert reply.status_code == 200, reply.text
    await expect(page.get_by_role("heading", level=1)).to_have_text(shown)
    template = {"name": hostile, "prompt": "{{x}}", "variables": [{"name": "x", "label": hostile}]}
    made = (await client.post("/api/v1/templates", json=template)).json()
    box = (await client.post("/v1/sandboxes", json={})).json()["id"]
    code = f"name = {hostile!r}\nopen(name.replace('/', ''), 'w').close()\nraise ValueError(name)"
    await client.post(f"/v1/sandboxes/{box}/conversations/default/runs", json={"code": code})
    await page.goto(f"{desk.console.origin}/console/templates")
    await expect(page.get_by_text(shown).first).to_be_visible()
    await page.goto(f"{desk.console.origin}/console/sandboxes/{box}")
    for tab in ("Files", "History", "Events", "Cells"):
        await page.get_by_role("tab", name=tab).click()
        await expect(page.locator("[aria-busy=true]")).to_have_count(0)
        panel = page.get_by_role("tabpanel")
        if tab != "Events":
            await expect(panel).to_contain_text("onerror='window.ran=1'")
        assert "\u202e" not in await panel.inner_text()
        assert await panel.locator("img").count() == 0
    assert await page.evaluate("window.ran === undefined")
    await client.delete(f"/api/v1/templates/{made['id']}")
    await client.delete(f"/v1/sandboxes/{box}")


async def test_scripts_run_only_after_a_click_and_load_nothing(desk: Desk, page: Page) -> None:
    html = (
        "<style>p { color: rgb(1, 2, 3) }</style><p id=p style='font-weight: 900'>before</p>"
        "<script>document.getElementById('p').textContent = 'ran ' + origin;"
        "fetch('http://evil.example/').catch(() => 0); new Image().src = 'http://evil.example/i'"
        "</script>"
    )
    code = f"from IPython.display import HTML, display\ndisplay(HTML({html!r}))"
    desk.model.add(calls(("run_code", {"code": code})), Response("ok"))
    await send(page, "go")
    frame = page.frame_locator("iframe[title='HTML output 1']")
    await expect(frame.locator("p")).to_have_text("before")
    await expect(frame.locator("p")).to_have_css("color", "rgb(1, 2, 3)")  # styles are kept
    await expect(frame.locator("p")).to_have_css("font-weight", "900")
    await page.get_by_role("button", name="Run scripts in this output").click()
    await expect(frame.locator("#p")).to_have_text("ran null")
    desk.reports.clear()  # the policy of the frame refused these two requests, as it must
    desk.foreign.clear()


async def test_of_a_long_output_a_part_is_in_the_page(desk: Desk, page: Page) -> None:
    """The page stays fast because it holds little. To see more takes a click."""
    desk.model.add(
        calls(("run_code", {"code": "print('line of output\\n' * 60_000)"})), Response("ok")
    )
    await send(page, "print much")
    await expect(page.get_by_role("status", name="Run", exact=True)).to_have_text("Done")
    await page.get_by_role("button", name="Details").click()
    block = page.get_by_role("group", name="run_code: done")
    await expect(block).to_contain_text("line of output")
    assert await block.evaluate("(block) => block.textContent.length") <= 450_000
    assert await block.locator("span").count() < 40


# -- the service goes and comes ----------------------------------------------------------------


async def test_the_page_survives_a_restart_of_the_service(
    context: BrowserContext, place: Path
) -> None:
    async with console_service(place) as console:
        port = console.port
        page = await context.new_page()
        await page.goto(f"{console.origin}/console/sandboxes#login={await console.code()}")
        connection = page.get_by_role("status", name="Connection")
        await expect(connection).to_have_text("Connected")
    await expect(connection).to_have_text("Reconnecting…")
    await expect(page.get_by_role("button", name="New sandbox")).to_be_visible()
    async with console_service(place, port=port) as console:
        async with console.served.client() as client:
            box = (await client.post("/v1/sandboxes", json={})).json()["id"]
        await expect(connection).to_have_text("Connected")
        await expect(page.get_by_role("link", name=box)).to_be_visible()
        async with console.served.client() as client:
            await client.delete(f"/v1/sandboxes/{box}")
        await expect(page.get_by_role("link", name=box)).to_have_count(0)


async def test_a_page_that_was_offline_shows_what_happened_meanwhile(
    desk: Desk, page: Page, context: BrowserContext, client: Any
) -> None:
    desk.model.add(Response("one"), Response("two"))
    await send(page, "first")
    await expect(page.get_by_role("article", name="Agent")).to_have_text("one")
    name = page.url.rpartition("/")[2]
    await context.set_offline(True)
    await page.evaluate("window.dispatchEvent(new Event('offline'))")
    body = {
        "user_id": f"uid:{os.geteuid()}",
        "agent_id": "console",
        "conversation_id": name,
        "message": "second",
    }
    reply = await client.post("/api/v1/chat", json=body)  # to its end
    assert "run_end" in reply.text
    await context.set_offline(False)
    await expect(page.get_by_role("article", name="Agent").last).to_have_text("two")
    await expect(page.get_by_role("article")).to_have_count(4)


async def test_eight_tabs_work_at_once(desk: Desk, context: BrowserContext) -> None:
    pages = [await desk.opened(context, f"/console/{PAGES[n % len(PAGES)]}") for n in range(8)]
    for page in pages:
        await expect(page.get_by_role("status", name="Connection")).to_have_text("Connected")
    async with desk.console.served.client() as client:
        box = (await client.post("/v1/sandboxes", json={})).json()["id"]
        await expect(pages[2].get_by_role("link", name=box)).to_be_visible()
        await client.delete(f"/v1/sandboxes/{box}")
    await asyncio.gather(*(page.close() for page in pages))


async def test_an_open_page_keeps_no_sandbox_alive(desk: Desk, page: Page, client: Any) -> None:
    box = (await client.post("/v1/sandboxes", json={})).json()["id"]
    await client.post(f"/v1/sandboxes/{box}/conversations/default/runs", json={"code": "1"})
    before = (await client.get(f"/v1/sandboxes/{box}")).json()["idle_expires_at"]
    await page.goto(f"{desk.console.origin}/console/sandboxes/{box}")
    for tab in ("Cells", "Terminals", "Files", "History", "Events", "Network", "Walls", "Overview"):
        await page.get_by_role("tab", name=tab).click()
        await expect(page.locator("[aria-busy=true]")).to_have_count(0)
    await expect(page.get_by_role("meter", name="Memory")).to_be_visible()
    now = (await client.get(f"/v1/sandboxes/{box}")).json()["idle_expires_at"]
    assert now == before
    sandbox = desk.console.served.service.sandboxes.index.by_id(box)
    assert sandbox is not None
    assert sandbox.users == 0
    await client.delete(f"/v1/sandboxes/{box}")
