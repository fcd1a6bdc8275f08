"""What an owner and an operator manage: the quarantine, keys and tokens, policies, previews."""

from contextlib import aclosing

import httpx
from agent_calls import asked_for, body, decide, following, runs, the_rest
from playwright.async_api import Page, expect

from sbx.agent.messages import Response
from tests.browser.conftest import Desk

_SERVER = """
import http.server, threading
page = "<title>Inside</title><script>document.title += '!'</script>"
open("index.html", "w").write(page)
handler = http.server.SimpleHTTPRequestHandler
server = http.server.ThreadingHTTPServer(("127.0.0.1", 8000), handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
"""


async def test_a_quarantined_file_is_read_restored_and_deleted(
    desk: Desk, page: Page, client: httpx.AsyncClient
) -> None:
    directory = await desk.project("guarded")
    projects = (await client.get("/api/v1/projects", params={"limit": 100})).json()["items"]
    (item,) = [each for each in projects if each["working_directory"] == str(directory)]
    command = "echo '<b>export</b> A=1' > .envrc && git init -q made && touch .new"
    desk.model.add(runs(command), Response("done"))
    async with aclosing(following(client, body("guarded", project_id=item["id"]))) as events:
        asked = await asked_for(events)
        await decide(client, asked["tool_call_id"], True)
        await the_rest(events)
    await client.delete("/api/v1/conversations/guarded")  # its sandbox ends

    await page.get_by_role("link", name="Projects").click()
    table = page.get_by_role("table", name="Quarantined files")
    await expect(table).to_contain_text(".envrc")
    await expect(table).to_contain_text("direnv")
    await expect(table).to_contain_text("a program that reads hidden files")
    await table.get_by_role("button", name="Show .envrc").click()
    content = page.get_by_role("dialog", name=".envrc")
    await expect(content).to_contain_text("<b>export</b> A=1")
    await content.get_by_role("button", name="Close").click()
    await table.get_by_role("button", name="Show made/.git").click()
    content = page.get_by_role("dialog", name="made/.git")
    await content.get_by_role("button", name="HEAD", exact=True).click()
    await expect(content).to_contain_text("ref: refs/heads/")
    await content.get_by_role("button", name="Close").click()

    assert not (directory / ".envrc").exists()
    await table.get_by_role("button", name="Restore .envrc").click()
    ask = page.get_by_role("alertdialog", name="Restore file?")
    await expect(ask).to_contain_text("direnv will obey")
    await ask.get_by_role("button", name="Restore").click()
    await expect(table).not_to_contain_text(".envrc")
    assert (directory / ".envrc").read_text() == "<b>export</b> A=1\n"
    for name in (".new", "made/.git"):
        await table.get_by_role("button", name=f"Delete {name}").click()
        await page.get_by_role("alertdialog").get_by_role("button", name="Delete").click()
        await expect(table.get_by_role("button", name=f"Delete {name}")).not_to_be_visible()
    await expect(page.get_by_text("No file is in quarantine.")).to_be_visible()


async def test_an_operator_revokes_keys_and_tokens(page: Page, client: httpx.AsyncClient) -> None:
    key = (await client.post("/v1/admin/keys", json={"owner": "bot", "name": "robot"})).json()
    body = {"user_id": "visitor", "agent_id": "helper"}
    await client.post("/v1/admin/tokens", json=body)
    await page.get_by_role("link", name="Settings").click()
    await expect(page.get_by_role("table", name="Keys")).to_contain_text("robot")
    await expect(page.get_by_text(key["key"])).to_have_count(0)
    for name in ("robot", "visitor"):
        await page.get_by_role("button", name=f"Revoke {name}").click()
        ask = page.get_by_role("alertdialog", name="Revoke access?")
        await ask.get_by_role("button", name="Revoke").click()
        await expect(page.get_by_role("button", name=f"Revoke {name}")).to_have_count(0)
    bearer = {"Authorization": f"Bearer {key['key']}"}
    assert (await client.get("/api/v1/me", headers=bearer)).status_code == 401


async def test_a_policy_is_read_in_words(page: Page) -> None:
    await page.get_by_role("link", name="Policies").click()
    policy = page.locator("details").filter(has=page.get_by_text("strict", exact=True))
    await policy.locator("summary").click()
    await expect(policy.get_by_text("code may not start other programs")).to_be_visible()
    examples = policy.get_by_role("table", name="Examples")
    await expect(examples).to_contain_text("denied")


async def test_a_server_inside_is_previewed_in_a_tab(page: Page, client: httpx.AsyncClient) -> None:
    box = (await client.post("/v1/sandboxes", json={})).json()["id"]
    ran = await client.post(
        f"/v1/sandboxes/{box}/conversations/default/runs", json={"code": _SERVER}
    )
    assert ran.json()["status"] == "ok", ran.text
    await page.goto(page.url.replace("/conversations", "").rstrip("/") + f"/sandboxes/{box}")
    await page.get_by_text("Preview a server inside").click()
    await page.get_by_role("button", name="Make a link").click()
    async with page.context.expect_page() as opening:
        await page.get_by_role("link", name="Open the preview").click()
    preview = await opening.value
    await expect(preview).to_have_title("Inside!")
    assert preview.url.startswith(f"http://8000-{box}.localhost:")
    await client.delete(f"/v1/sandboxes/{box}")
