"""The accessible names of the console (section 8 of its contract), in the language of a page."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from playwright.async_api import Locator, Page, expect

SOURCE = Path(__file__).resolve().parents[2] / "sbx" / "console" / "source"
Language = Literal["en", "zh", "ja"]
LOCALES: dict[Language, str] = {"en": "en-GB", "zh": "zh-CN", "ja": "ja-JP"}
TEXTS: dict[str, Any] = {
    name: json.loads((SOURCE / "i18n" / f"{name}.json").read_text()) for name in LOCALES
}
# What the contract fixes to the letter, besides English.
FIXED: dict[Language, dict[str, str]] = {
    "zh": {"nav.conversations": "会话", "nav.approvals": "审批", "nav.sandboxes": "沙箱",
           "nav.projects": "项目", "nav.templates": "模板", "nav.policies": "策略",
           "nav.settings": "设置", "conversations.new": "新建会话", "conversations.message": "消息",
           "conversations.send": "发送", "conversations.stop": "停止", "approval.allow": "允许",
           "approval.deny": "拒绝", "project.sandbox_mode": "沙箱模式",
           "settings.language": "语言"},
    "ja": {"nav.conversations": "会話", "nav.approvals": "承認", "nav.sandboxes": "サンドボックス",
           "nav.projects": "プロジェクト", "nav.templates": "テンプレート",
           "nav.policies": "ポリシー", "nav.settings": "設定",
           "conversations.new": "新しい会話", "conversations.message": "メッセージ",
           "conversations.send": "送信", "conversations.stop": "停止", "approval.allow": "許可",
           "approval.deny": "拒否", "project.sandbox_mode": "サンドボックスモード",
           "settings.language": "言語"},
}  # fmt: skip


def text_of(language: Language, key: str, **values: object) -> str:
    found: Any = TEXTS[language]
    for part in key.split("."):
        found = found[part]
    for name, value in values.items():
        found = found.replace("{{" + name + "}}", str(value))
    return str(found)


@dataclass(frozen=True)
class Named:
    """Finds elements of a page by role and the key of their name."""

    page: Page
    language: Language

    def text(self, key: str, **values: object) -> str:
        return text_of(self.language, key, **values)

    def one(self, role: Any, key: str, within: Locator | None = None, **values: object) -> Locator:
        at = within if within is not None else self.page
        return at.get_by_role(role, name=self.text(key, **values), exact=True).first

    async def shows(self, *pairs: str, within: Locator | None = None) -> None:
        """`pairs` such as "button conversations.send"."""
        for pair in pairs:
            role, _, key = pair.partition(" ")
            await expect(self.one(role, key, within)).to_be_attached()

    async def open(self, page: str) -> None:
        await self.one("link", f"nav.{page}").click()
        heading = "conversations.new" if page == "conversations" else f"nav.{page}"
        await expect(self.page.get_by_role("heading", level=1)).to_have_text(self.text(heading))
        shown = await self.page.locator("main").inner_text()
        keys = re.findall(r"\b[a-z_]+\.[a-z_.]+\b", shown)
        assert [key for key in keys if key.partition(".")[0] in TEXTS["en"]] == []  # no bare keys


async def check_frame_and_lists(named: Named) -> None:
    """Every page that needs no agent and no sandbox."""
    page = named.page
    assert await page.evaluate("document.documentElement.lang") == named.language
    names = ("conversations", "approvals", "sandboxes", "projects", "templates", "policies")
    await named.shows(
        "link shell.skip", "navigation shell.main", "status connection.label",
        "button shell.logout", *(f"link nav.{name}" for name in (*names, "settings")),
    )  # fmt: skip
    await expect(named.one("status", "connection.label")).to_have_text(
        named.text("connection.connected")
    )
    await named.open("conversations")
    await named.shows(
        "region conversations.list", "searchbox conversations.search",
        "button conversations.new", "combobox conversations.project",
        "textbox conversations.agent", "textbox conversations.message",
        "button conversations.send", "button conversations.attach",
        "complementary files.title", "tab files.uploads", "tab files.workspace",
        "button files.choose",
    )  # fmt: skip
    options = named.one("combobox", "conversations.project").locator("option")
    await expect(options.first).to_have_text(named.text("conversations.temporary"))
    await expect(page.get_by_text(named.text("files.empty"), exact=True)).to_be_visible()
    await named.open("approvals")
    await expect(page.get_by_text(named.text("approval.none"), exact=True)).to_be_visible()
    await named.open("projects")
    await named.open("templates")
    await named.open("policies")
    await named.open("settings")
    await named.shows(
        "combobox settings.language", "combobox settings.theme", "checkbox settings.enter",
        "table settings.logins",
    )  # fmt: skip
    languages = named.one("combobox", "settings.language").locator("option")
    assert await languages.all_inner_texts() == ["English", "中文", "日本語"]
    themes = named.one("combobox", "settings.theme").locator("option")
    assert await themes.all_inner_texts() == [
        named.text(f"settings.{theme}") for theme in ("system", "light", "dark")
    ]


async def check_a_sandbox(named: Named) -> None:
    """Create a sandbox, and run a cell and a terminal in it."""
    page = named.page
    await named.open("sandboxes")
    await named.one("button", "sandboxes.new").click()
    dialog = named.one("dialog", "sandboxes.new")
    await named.shows("combobox sandboxes.policy", "button action.create", within=dialog)
    await expect(named.one("combobox", "sandboxes.policy", dialog)).to_contain_text("strict")
    await named.one("button", "action.create", dialog).click()
    await named.shows(
        "tablist sandboxes.one", "button action.stop", "button action.resume",
        "button action.extend", "button action.delete",
    )  # fmt: skip
    await named.one("button", "action.extend").click()
    extend = named.one("dialog", "action.extend")
    await named.shows("combobox sandboxes.by", "button action.extend", within=extend)
    await page.keyboard.press("Escape")
    await expect(named.one("button", "action.extend")).to_be_focused()

    await named.one("tab", "sandboxes.tabs.cells").click()
    cell = named.one("group", "cells.cell", number=1)
    await named.shows("textbox cells.code", "button cells.run", within=cell)
    await named.shows(
        "button cells.add", "button cells.interrupt", "button cells.restart",
        "combobox cells.context",
    )  # fmt: skip
    await expect(cell.locator(".cm-content")).to_be_visible()
    await named.one("textbox", "cells.code", cell).fill("print(int(input('n ')) * 7)")
    await page.keyboard.press("Shift+Enter")
    await named.one("textbox", "cells.input", cell, prompt="n ").fill("6")
    await named.one("button", "cells.send_input", cell).click()
    await expect(named.one("region", "tool.output", cell)).to_contain_text("42")

    await named.one("tab", "sandboxes.tabs.overview").click()
    await named.shows("meter sandboxes.memory", "meter sandboxes.disk")
    await named.one("tab", "sandboxes.tabs.terminals").click()
    await named.one("button", "terminals.new").click()
    await expect(named.one("group", "terminals.one")).to_contain_text("$")
    for tab in ("files", "history"):
        await named.one("tab", f"sandboxes.tabs.{tab}").click()
    await named.one("tab", "sandboxes.tabs.events").click()
    await named.shows("table events.table")
    await named.one("tab", "sandboxes.tabs.network").click()
    await expect(page.get_by_text(named.text("network.none"), exact=True)).to_be_visible()
    await named.one("tab", "sandboxes.tabs.walls").click()
    await named.shows("table sandboxes.tabs.walls", "button walls.again")
    await named.one("button", "action.delete").click()
    ask = named.one("alertdialog", "sandboxes.delete_title")
    await named.one("button", "action.delete", ask).click()
    await expect(page.get_by_role("heading", level=1)).to_have_text(named.text("nav.sandboxes"))


async def check_a_question(named: Named) -> None:
    """A call that waits for an approval, in its conversation and in the inbox. It is allowed for
    always."""
    page = named.page
    asked = page.get_by_role(
        "group", name=f"execute_command: {named.text('tool.status.pending_approval')}"
    )
    await expect(asked).to_have_attribute("data-status", "pending_approval")
    await named.shows(
        "region approval.changes", "button approval.allow", "button approval.deny",
        "button approval.always", "timer approval.time_left", "button tool.details",
        within=asked,
    )  # fmt: skip
    for key, path in (("added", "b.txt"), ("changed", "a.txt"), ("removed", "c.txt")):
        await expect(
            named.one("group", f"approval.{key}", asked, path=f"/workspace/{path}")
        ).to_be_visible()
    await expect(named.one("status", "run.label")).to_contain_text(named.text("run.waiting"))
    waiting = named.text("nav.approvals_waiting", name=named.text("nav.approvals"), count=1)
    await page.get_by_role("link", name=waiting, exact=True).click()
    await named.shows("list approval.waiting")
    await named.one("button", "approval.always").click()
    dialog = named.one("dialog", "approval.always_title")
    await named.shows(
        "radio approval.exact", "radio approval.prefix", "textbox approval.prefix_field",
        within=dialog,
    )  # fmt: skip
    await named.one("button", "approval.allow_always", dialog).click()
    rules = named.one("table", "approval.rules")
    await rules.get_by_role("button").first.click()  # revoke
    await expect(rules).to_have_count(0)
    await expect(page.get_by_text(named.text("approval.none"), exact=True)).to_be_visible()


async def check_a_conversation(named: Named, title: str) -> None:
    """A conversation whose calls have ended: one with each kind of output, and one that failed."""
    page = named.page
    await named.open("conversations")
    await page.get_by_role("link", name=title).click()
    log = named.one("log", "conversations.messages")
    await named.shows("article conversations.you", "article conversations.agent", within=log)
    done = page.get_by_role("group", name=f"run_code: {named.text('tool.status.done')}")
    await named.shows("button tool.details", within=done)
    await named.one("button", "tool.details", done).click()
    await named.shows("region tool.arguments", "region tool.result", within=done)
    for role, key in (("img", "output.figure"), ("table", "output.table")):
        await expect(named.one(role, key, done, number=1)).to_be_visible()
    html = named.text("output.html", number=1)
    await expect(done.locator(f"iframe[title='{html}']")).to_be_visible()
    await named.shows("button output.run_scripts", within=done)
    failed = page.get_by_role("group", name=f"run_code: {named.text('tool.status.error')}")
    await expect(failed).to_have_attribute("data-status", "error")

    chooser = page.locator("aside input[type=file]")
    await chooser.set_input_files({"name": "p.csv", "mimeType": "text/csv", "buffer": b"a\n1\n"})
    uploads = named.one("table", "files.table")
    await expect(uploads).to_contain_text("p.csv")
    headings = await uploads.get_by_role("columnheader").all_inner_texts()
    assert headings == [
        named.text(f"files.columns.{name}") for name in ("name", "size", "uploaded")
    ]
    await expect(named.one("link", "files.download", uploads, name="p.csv")).to_be_visible()
    await expect(named.one("button", "files.delete", uploads, name="p.csv")).to_be_visible()

    await named.one("button", "conversations.rename").click()
    await named.one("textbox", "conversations.title").fill(f"{title} 2")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("heading", level=1)).to_have_text(f"{title} 2")
    await named.one("button", "conversations.delete").click()
    ask = named.one("alertdialog", "conversations.delete_title")
    await expect(ask).to_contain_text(named.text("conversation.delete_ask"))
    await named.one("button", "action.delete", ask).click()
    await expect(page.get_by_role("heading", level=1)).to_have_text(named.text("conversations.new"))


async def check_projects(named: Named, name: str) -> None:
    await named.open("projects")
    await named.shows("table nav.projects", "button projects.new")
    await named.one("button", "projects.edit", name=name).click()
    dialog = named.one("dialog", "projects.edit_title")
    await named.shows(
        "textbox projects.name", "textbox projects.directory", "switch project.sandbox_mode",
        "button action.save", "button action.cancel", within=dialog,
    )  # fmt: skip
    await expect(named.one("switch", "project.sandbox_mode", dialog)).to_be_checked()
    await close_dialog(named, dialog)
    await named.one("button", "projects.new").click()
    dialog = named.one("dialog", "projects.new")
    await named.shows("button action.create", within=dialog)
    await close_dialog(named, dialog)
    await expect(named.one("button", "projects.delete", name=name)).to_be_visible()


async def close_dialog(named: Named, dialog: Locator) -> None:
    await named.page.keyboard.press("Escape")
    await expect(dialog).to_have_count(0)
