"""Cells: the editor, contexts, what a reload keeps, and the file of Jupyter."""

import json
from collections.abc import AsyncIterator

import httpx
import pytest_asyncio
from playwright.async_api import BrowserContext, Locator, Page, expect

from tests.browser.conftest import Desk


@pytest_asyncio.fixture
async def box(client: httpx.AsyncClient) -> AsyncIterator[str]:
    box: str = (await client.post("/v1/sandboxes", json={})).json()["id"]
    yield box
    await client.delete(f"/v1/sandboxes/{box}")


@pytest_asyncio.fixture
async def cells(desk: Desk, context: BrowserContext, box: str) -> Page:
    page = await desk.opened(context, f"/console/sandboxes/{box}")
    await page.get_by_role("tab", name="Cells").click()
    return page


async def _code(page: Page, number: int) -> Locator:
    """The editor of a cell, once it is loaded."""
    cell = page.get_by_role("group", name=f"Cell {number}", exact=True)
    await expect(cell.locator(".cm-content")).to_be_visible()
    return cell.get_by_role("textbox", name="Code")


def _output(page: Page, number: int) -> Locator:
    cell = page.get_by_role("group", name=f"Cell {number}", exact=True)
    return cell.get_by_role("region", name="Output")


async def test_a_reload_keeps_outputs_and_follows_a_run_that_goes_on(
    cells: Page, client: httpx.AsyncClient, box: str
) -> None:
    await (await _code(cells, 1)).fill("print('first'); 1 / 0")
    await cells.keyboard.press("Shift+Enter")
    await expect(_output(cells, 1)).to_contain_text("ZeroDivisionError")
    await cells.get_by_role("button", name="Add cell").click()
    waits = (
        "import pathlib, time\nprint('begun', flush=True)\n"
        "while not pathlib.Path('go').exists(): time.sleep(.02)\nprint('over')"
    )
    await (await _code(cells, 2)).fill(waits)
    await cells.keyboard.press("Shift+Enter")
    await expect(_output(cells, 2)).to_contain_text("begun")

    await cells.reload()
    await cells.get_by_role("tab", name="Cells").click()
    await expect(_output(cells, 1)).to_contain_text("first")
    await expect(_output(cells, 1)).to_contain_text("ZeroDivisionError")
    await expect(_output(cells, 2)).to_contain_text("begun")
    await expect(_output(cells, 2)).to_have_attribute("aria-busy", "true")
    await client.put(
        f"/v1/sandboxes/{box}/conversations/default/files", params={"path": "go"}, content=b""
    )
    await expect(_output(cells, 2)).to_contain_text("over")
    await expect(_output(cells, 2)).to_have_attribute("aria-busy", "false")


async def test_cells_are_saved_as_a_notebook(
    cells: Page, client: httpx.AsyncClient, box: str
) -> None:
    await (await _code(cells, 1)).fill("print('one')\n6 * 7")
    await cells.keyboard.press("Shift+Enter")
    await expect(_output(cells, 1)).to_contain_text("42")
    await cells.get_by_role("button", name="Save as notebook").click()
    dialog = cells.get_by_role("dialog", name="Save as notebook")
    await dialog.get_by_role("textbox").fill("work/cells.ipynb")
    await dialog.get_by_role("button", name="Save").click()
    await expect(dialog).to_have_count(0)
    place = f"/v1/sandboxes/{box}/conversations/default"
    file = await client.get(f"{place}/files", params={"path": "work/cells.ipynb"})
    (cell,) = json.loads(file.content)["cells"]
    assert cell["source"] == ["print('one')\n", "6 * 7"]
    assert [output["output_type"] for output in cell["outputs"]] == ["stream", "display_data"]
    # Jupyter's own reader accepts it.
    code = "import nbformat; nbformat.validate(nbformat.read('work/cells.ipynb', 4))"
    run = await client.post(f"{place}/runs", json={"code": code})
    assert run.json()["status"] == "ok" or "No module named" in run.json()["error"]["value"]


async def test_a_context_is_a_kernel_of_its_own(cells: Page) -> None:
    await (await _code(cells, 1)).fill("x = 'here'")
    await cells.keyboard.press("Shift+Enter")
    await expect(_output(cells, 1)).to_have_attribute("aria-busy", "false")
    await cells.get_by_role("button", name="New context").click()
    dialog = cells.get_by_role("dialog", name="New context")
    await dialog.get_by_role("textbox").fill("second")
    await dialog.get_by_role("button", name="Create").click()
    await expect(dialog).to_have_count(0)
    await expect(cells.get_by_role("combobox", name="Context")).to_have_value("second")
    await (await _code(cells, 1)).fill("x")
    await cells.keyboard.press("Shift+Enter")
    await expect(_output(cells, 1)).to_contain_text("NameError")
    await cells.get_by_role("button", name="New context").click()
    await dialog.get_by_role("textbox").fill("second")
    await dialog.get_by_role("button", name="Create").click()
    await expect(dialog.get_by_role("alert")).to_have_text("This context exists already.")


async def test_the_keyboard_completes_indents_and_leaves_the_editor(cells: Page) -> None:
    code = await _code(cells, 1)
    await code.fill("'😀' + 'b'.jo")
    await cells.keyboard.press("Shift+Enter")
    await expect(_output(cells, 1)).to_contain_text("AttributeError")
    await code.press("Control+Space")
    await expect(cells.get_by_role("option", name="join")).to_be_visible()
    await cells.keyboard.press("Enter")
    await expect(code).to_have_text("'😀' + 'b'.join")  # the kernel counts characters, not units
    await cells.get_by_role("button", name="Add cell").click()
    second = await _code(cells, 2)
    await second.press("Tab")  # it indents
    await expect(second).to_be_focused()
    await second.press("Escape")
    await cells.keyboard.press("Tab")
    run = cells.get_by_role("group", name="Cell 2").get_by_role("button", name="Run", exact=True)
    await expect(run).to_be_focused()


async def test_an_image_of_the_workspace_is_shown(
    cells: Page, client: httpx.AsyncClient, box: str
) -> None:
    svg = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>'
    path = f"/v1/sandboxes/{box}/conversations/default/files"
    await client.put(path, params={"path": "chart.svg"}, content=svg)
    await cells.get_by_role("tab", name="Files").click()
    await cells.get_by_role("button", name="Preview chart.svg").click()
    await expect(cells.get_by_role("img", name="Figure 1")).to_be_visible()


async def test_a_csv_is_a_table_and_json_a_tree(
    cells: Page, client: httpx.AsyncClient, box: str
) -> None:
    files = {
        "a.csv": b'name;note\nx;"1;\n2"\n' + b"y;z\n" * 300,
        "wide.csv": b"," * 900_000,
        "a.json": b'{"shape": [2, 3], "name": "<b>x</b>"}',
        "broken.json": b'{"shape": ',
    }
    for name, content in files.items():
        path = f"/v1/sandboxes/{box}/conversations/default/files"
        await client.put(path, params={"path": name}, content=content)
    await cells.get_by_role("tab", name="Files").click()
    shown = cells.get_by_role("region", name="Preview")
    await cells.get_by_role("button", name="Preview a.csv").click()
    table = shown.get_by_role("table", name="Table 1")
    await expect(table.get_by_role("columnheader")).to_have_text(["name", "note"])
    await expect(table.get_by_role("cell").nth(1)).to_have_text("1;\n2")
    await expect(table.get_by_role("row")).to_have_count(201)
    await expect(shown).to_contain_text("The first 200 rows are shown.")
    await cells.get_by_role("button", name="Preview wide.csv").click()
    await expect(shown.get_by_role("columnheader")).to_have_count(100)
    await cells.get_by_role("button", name="Preview a.json").click()
    await expect(shown.get_by_text('name: "<b>x</b>"')).to_be_visible()
    await shown.get_by_text("shape: [ ] 2").click()
    await expect(shown.get_by_text("1: 3")).to_be_visible()
    await cells.get_by_role("button", name="Preview broken.json").click()
    await expect(shown.locator("pre")).to_have_text('{"shape": ')


async def test_a_run_of_the_history_runs_again_in_a_fresh_sandbox(
    cells: Page, client: httpx.AsyncClient, box: str
) -> None:
    for code in ("print('the same')", "open('n', 'a').write('x'); print(len(open('n').read()))"):
        run = f"/v1/sandboxes/{box}/conversations/default/runs"
        (await client.post(run, json={"code": code})).raise_for_status()
    await cells.get_by_role("tab", name="History").click()
    for code, status, text in (
        ("print('the same')", "The second result is the same.", "the same"),
        ("open(", "The results differ: stdout, text", "2"),
    ):
        entry = cells.get_by_role("listitem").filter(has_text=code)
        await entry.locator("summary").click()
        await entry.get_by_role("button", name="Run again in a fresh sandbox").click()
        await expect(entry.get_by_role("status")).to_contain_text(status)
        await expect(entry.get_by_role("status")).to_contain_text(text)
