"""The directory for generated files exists in each run of an own workspace, and in no other."""

import os
from pathlib import Path

import pytest

from sbx import Runtime
from sbx.agent.sandbox import one_of

GENERATED = "/workspace/uploads/generated"
REMOVE = f"import shutil; shutil.rmtree('{GENERATED}')"


@pytest.mark.unprivileged
@pytest.mark.parametrize(
    "policy", ["default", pytest.param("strict", marks=pytest.mark.needs("memory"))]
)
async def test_a_removed_directory_is_back_in_the_next_run(runtime: Runtime, policy: str) -> None:
    async with await runtime.create(policy) as box:
        for _ in range(2):
            assert (await box.run(REMOVE)).ok
            wrote = await box.run(f"open('{GENERATED}/ü.txt', 'w').write('a')")
            assert wrote.ok, wrote.error
        if policy == "default":
            assert (await box.run(REMOVE)).ok
            assert (await box.shell(f"echo a > {GENERATED}/b")).ok
            assert (await box.shell(f"rm -r {GENERATED}")).ok
            assert (await box.run_script(f"echo a > {GENERATED}/b", "bash")).ok
        assert (await box.run(f"{REMOVE}; open('{GENERATED}', 'w').close()")).ok
        assert (await box.run("1 + 1")).ok  # a file in its place stays until the next kernel


@pytest.mark.unprivileged
async def test_a_directory_of_the_user_gets_none(runtime: Runtime, tmp_path: Path) -> None:
    work = tmp_path / "work"
    (work / "uploads").mkdir(parents=True)
    if os.geteuid() == 0:
        for path in (work, work / "uploads"):
            os.chown(path, 4242, 4242)
    async with await runtime.create("default", workspace=work) as box:
        async for _ in one_of(box).start_run("1").events():
            pass
        assert (await box.shell("true")).ok
    assert os.listdir(work / "uploads") == []
