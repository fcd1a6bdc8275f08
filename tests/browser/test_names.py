"""Each accessible name of section 8, in all languages."""

import pytest
from agent_calls import calls, runs
from playwright.async_api import Browser, expect

from sbx.agent.messages import Response
from tests.browser import names
from tests.browser.conftest import WIDE, Desk
from tests.browser.names import FIXED, LOCALES, Language, Named, text_of
from tests.tiers import rows

OUTPUTS = """
from IPython.display import HTML, SVG, display
display(SVG('<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>'))
display(HTML('<table><tr><th>a</th></tr><tr><td>1</td></tr></table>'))
display(HTML('<b>bold</b><script>1</script>'))
"""
CHANGES = "echo 2 > a.txt; echo 1 > b.txt; rm c.txt"


@pytest.mark.parametrize("language", ["zh", "ja"])
def test_the_fixed_names_are_kept(language: Language) -> None:
    for key, text in FIXED[language].items():
        assert text_of(language, key) == text, key


# In the CI tier, test_installed looks at Japanese pages.
@pytest.mark.timeout(180)
@pytest.mark.parametrize("language", rows(["en", "zh", "ja"], ["zh"]))
async def test_each_name_is_there(desk: Desk, browser: Browser, language: Language) -> None:
    context = await browser.new_context(viewport=WIDE, locale=LOCALES[language])  # type: ignore[arg-type]  # a TypedDict
    page = await context.new_page()
    desk.watch(page)
    code = await desk.console.code()
    await page.goto(f"{desk.console.origin}/console/#login={code}")
    named = Named(page, language)
    await names.check_frame_and_lists(named)
    await names.check_a_sandbox(named)

    project = f"names-{language}"
    await desk.project(project, a="1\n", c="gone\n")
    desk.model.add(
        calls(("run_code", {"code": OUTPUTS}), ("run_code", {"code": "1/0"})),
        runs(CHANGES),
        Response("all is changed"),
    )
    await named.open("conversations")
    await named.one("combobox", "conversations.project").select_option(label=project)
    await named.one("textbox", "conversations.message").fill(f"change the files ({language})")
    await named.one("button", "conversations.send").click()
    await names.check_a_question(named)
    await names.check_a_conversation(named, f"change the files ({language})")
    await names.check_projects(named, project)
    await named.one("button", "shell.logout").click()
    await expect(page.get_by_role("heading", level=1)).to_have_text(named.text("login.title"))
    await context.close()
