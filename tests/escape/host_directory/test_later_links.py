"""The user works on while a kernel lives: what a new configuration names is protected too."""

from pathlib import Path

import pytest
from planting import make_place, sandbox

from sbx import Runtime
from sbx.errors import Denied
from sbx.runtime.run import context_kernel
from tests.tiers import rows

pytestmark = [
    pytest.mark.parametrize(
        "started_by", rows(["fork", "cold"], ["fork"]), indirect=True, scope="module"
    ),
]
PLANT = """
mkdir -p tools/hooks
printf '#!/bin/sh\\ntouch {marker}\\n' > tools/hooks/pre-commit && chmod +x tools/hooks/pre-commit
"""


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_kernel, "LINKS_PERIOD_S", 0.1)


@pytest.mark.parametrize("linked", [False, True], ids=["named by git", "a link"])
async def test_a_target_that_the_user_names_later_is_protected(
    runtime: Runtime, own_temporary_directory: Path, started_by: str, linked: bool
) -> None:
    place = make_place(own_temporary_directory / f"later-{started_by}-{linked}")
    place.user("git", "init", "-q", ".")
    harmless = str(place.directory.parent / "home" / "made-by-the-hook-of-before")
    async with sandbox(runtime, place) as box:
        assert (await box.shell(PLANT.replace("{marker}", harmless))).ok  # free until now
        if linked:
            place.user("ln", "-s", "../../tools/hooks/pre-commit", ".git/hooks/pre-commit")
        else:
            place.user("git", "config", "core.hooksPath", "tools/hooks")
        while (await box.shell("sleep 0.05; echo >> tools/hooks/pre-commit")).ok:
            pass  # until the next look of the watch
        planted = await box.shell(PLANT.replace("{marker}", str(place.marker)))
        assert "Read-only file system" in planted.stderr
    place.user("git", "add", ".")
    place.user("git", "-c", "user.name=u", "-c", "user.email=u@x", "commit", "-qm", "x")
    assert not place.executed


async def test_a_call_of_the_host_sees_it_too(
    runtime: Runtime,
    own_temporary_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    started_by: str,
) -> None:
    monkeypatch.setattr("sbx.workspace.host_directory._FRESH_S", 0.0)
    place = make_place(own_temporary_directory / f"later-call-{started_by}")
    place.user("git", "init", "-q", ".")
    async with sandbox(runtime, place) as box:
        await box.files.write("tools/hooks/pre-commit", "free until now")
        place.user("git", "config", "core.hooksPath", "tools/hooks")
        with pytest.raises(Denied):
            await box.files.write("tools/hooks/pre-commit", "#!/bin/sh")


async def test_code_inside_cannot_change_the_rules(
    runtime: Runtime, own_temporary_directory: Path, started_by: str
) -> None:
    place = make_place(own_temporary_directory / f"rules-{started_by}")
    async with sandbox(runtime, place) as box:
        answer = await box.shell(
            "cd /.sbx-quarantine; cat rules.json | head -c 9; echo x > rules.json; rm rules.json;"
            " mv rules.json items/; touch other; ln rules.json items/r; chmod 777 rules.json"
        )
        assert answer.stdout == '{"rules":'
        assert (
            answer.stderr.count("denied")
            + answer.stderr.count("not permitted")
            + answer.stderr.count("cross-device")
            >= 6
        ), answer.stderr
        assert (await box.shell("ls /.sbx-quarantine")).stdout.split() == [
            *("items", "records", "rules.json")
        ]
