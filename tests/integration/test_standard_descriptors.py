"""Descriptors 0, 1 and 2 inside: a program may open them by name, in whichever way it started.

Linux opens /dev/stdout by the owner and the mode of the file behind the descriptor.
"""

from pathlib import Path
from shlex import quote

import pytest

from sbx import Runtime
from sbx.policy import load

START = ["fork", "cold"]
STRICT = pytest.param("strict", marks=pytest.mark.needs("root"))  # it demands a memory wall
NAMES = ("/dev/stdout", "/dev/stderr", "/dev/fd/1", "/proc/self/fd/2", "/proc/thread-self/fd/1")
STATUS = """
import os
for fd in (0, 1, 2):
    at = os.fstat(fd)
    print(fd, oct(at.st_mode), at.st_uid, at.st_gid)
"""
OPEN = f"""
for name in {NAMES}:
    with open(name, 'w') as file:
        file.write(name + ';')
print(repr(open('/dev/stdin').read()))
"""
PIPE = "0o10600 1000 1000"

pytestmark = pytest.mark.unprivileged


@pytest.mark.parametrize("start", START)
@pytest.mark.parametrize("name", ["default", STRICT])
@pytest.mark.parametrize("guarded", [False, True])
async def test_code_opens_its_descriptors_by_name(
    own_temporary_directory: Path, start: str, name: str, guarded: bool
) -> None:
    directory = own_temporary_directory / "project"
    directory.mkdir(exist_ok=True)
    policy = load(name)
    pool = policy.pool.model_copy(update={"start": start})
    policy = policy.model_copy(update={"pool": pool})
    workspace = directory if guarded else None
    async with Runtime() as runtime, await runtime.create(policy, workspace=workspace) as box:
        kernel = await box.run(STATUS)
        assert kernel.stdout.splitlines()[1:] == [f"1 {PIPE}", f"2 {PIPE}"]
        opened = await box.run(OPEN)
        assert opened.ok, opened.error
        assert opened.stdout == "/dev/stdout;/dev/fd/1;/proc/thread-self/fd/1;''\n"
        assert opened.stderr == "/dev/stderr;/proc/self/fd/2;"
        if name == "strict":  # no processes
            return
        command = await box.shell(f"python3 -c {quote(STATUS)}; python3 -c {quote(OPEN)}")
        assert command.ok, command.stderr
        assert command.stdout.splitlines()[1:3] == kernel.stdout.splitlines()[1:]
        script = await box.run_script(f"python3 -c {quote(STATUS)}; tee /dev/stderr <<< it", "bash")
        assert script.stdout.splitlines()[1:] == [*kernel.stdout.splitlines()[1:], "it"]
        assert script.stderr == "it\n"
        child = await box.run("!echo out > /dev/stdout; echo err > /dev/stderr")
        assert "out" in child.text
        assert "err" in child.text
        logger = await box.run("import logging; logging.FileHandler('/dev/stderr')")
        assert logger.ok, logger.error


async def test_a_prewarmed_kernel_opens_its_descriptors_by_name(own_runtime: Runtime) -> None:
    """Its pipes exist before it gets a uid."""
    async with await own_runtime.create() as first:
        await first.run("1")
    async with await own_runtime.create() as box:
        assert (await box.run("open('/dev/stdout', 'w').write('x')")).ok
