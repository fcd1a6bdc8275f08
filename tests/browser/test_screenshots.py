"""The screenshots of the documentation. SBX_SCREENSHOTS=docs/images takes them again."""

import os
import re
from pathlib import Path
from typing import Any

from agent_calls import calls, runs
from playwright.async_api import Browser, Page, expect

from sbx.agent.messages import Response
from tests.browser.conftest import Desk
from tests.browser.test_main_path import send

DOCS = Path(__file__).resolve().parents[2] / "docs"
SIZE = {"width": 1180, "height": 900}
CHART = (
    "from IPython.display import SVG, display\n"
    'bars = \'\'.join(f\'<rect x="{20 + 70 * n}" y="{130 - h}" width="50" height="{h}"'
    ' fill="teal"/>\' for n, h in enumerate((110, 70, 95)))\n'
    'display(SVG(f\'<svg xmlns="http://www.w3.org/2000/svg" width="240" height="140">'
    "{bars}</svg>'))"
)


async def test_the_screenshots_of_the_documentation(
    desk: Desk, browser: Browser, client: Any, tmp_path: Path
) -> None:
    into = Path(os.environ.get("SBX_SCREENSHOTS", tmp_path))
    taken = set()
    await desk.project("prices", prices="apple 1\npear 3\n")
    desk.model.add(
        calls(("run_code", {"code": CHART}), text="I draw the prices first."),
        runs("sed -i 's/pear 3/pear 2/' prices.txt"),
        Response("The price of pears is corrected."),
    )
    for theme in ("light", "dark"):
        context = await browser.new_context(viewport=SIZE, locale="en-US")  # type: ignore[arg-type]
        await context.add_init_script(f"localStorage.setItem('sbx.theme', '{theme}')")
        page = await desk.opened(context)
        if theme == "light":
            await page.get_by_label("Project").select_option(label="prices")
            await send(page, "Correct the price of pears")
        else:
            await page.get_by_role("link", name="Correct the price of pears").click()
        asked = page.get_by_role("group", name="execute_command: waiting for approval")
        await expect(asked.get_by_role("region", name="Proposed changes")).to_be_visible()
        await expect(page.get_by_role("img", name="Figure 1")).to_be_visible()
        taken.add(await shot(page, into / f"conversation-{theme}.png"))
        if theme == "light":
            box = (await client.post("/v1/sandboxes", json={})).json()["id"]
            await client.post(f"/v1/sandboxes/{box}/conversations/default/runs", json={"code": "1"})
        await page.goto(f"{desk.console.origin}/console/sandboxes/{box}")
        await page.get_by_role("tab", name="Walls").click()
        await expect(page.get_by_role("table", name="Walls")).to_be_visible()
        taken.add(await shot(page, into / f"walls-{theme}.png"))
        await context.close()
    shown = set(re.findall(r"\(images/([\w-]+\.png)\)", (DOCS / "console.md").read_text()))
    assert shown <= taken
    assert all((DOCS / "images" / name).exists() for name in shown)


async def shot(page: Page, path: Path) -> str:
    await page.screenshot(path=path)
    return path.name
