"""Planted files have no effect before the seal, and none at all on a start.

A kernel runs and plants them, is stopped, and another one starts over the same workspace. Each
plant would record that it ran and how sealed it was; afterwards code that asks for it by name shows
that the plant works.
"""

# a look at /proc blocks nothing that matters to a test

import os
import sys
from pathlib import Path

import pytest
from attacking import Fresh, altered, attack, one_path, tell
from msgspec.structs import replace

from sbx import Runtime
from sbx.errors import InvalidPath, SbxError
from sbx.guest.start import lockdown
from sbx.runtime.sandbox import AsyncSandbox

MARK = r"""
import os
with open('/proc/self/status') as lines:
    sealed = [line.split()[1] for line in lines if line.startswith('Seccomp:')]
with open('/workspace/ran', 'a') as record:
    record.write(f'{__name__} {os.getpid()} {sealed}\n')
"""
SITE = f"python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
PLANTS = {
    "json": {"json.py": MARK},
    "other modules": dict.fromkeys(
        (
            "struct.py", "codecs.py", "socket.py", "resource.py", "IPython.py", "numpy.py",
            "traitlets/__init__.py", "encodings/__init__.py", "sbx/__init__.py",
            "sbx/guest/__init__.py", "asyncio/__init__.py", "sitecustomize.py",
            "usercustomize.py", "platform.py", "zoneinfo.py", "_virtualenv.py",
        ),
        MARK,
    ),
    ".pth": {
        f".local/lib/{SITE}/x.pth": f"import sys; exec({MARK!r})\n",
        f".local/lib/{SITE}/usercustomize.py": MARK,
        f".local/lib/{SITE}/sitecustomize.py": MARK,
    },
    "IPython": {
        ".ipython/profile_default/startup/00.py": MARK,
        ".ipython/profile_default/ipython_config.py": MARK,
        ".ipython/extensions/x.py": MARK,
        "ipython_config.py": MARK,
        ".jupyter/jupyter_config.py": MARK,
        ".config/ipython/profile_default/startup/00.py": MARK,
    },
    "Python itself": {
        "pyvenv.cfg": "home = /workspace\n",
        "pybuilddir.txt": "/workspace",
        "python311._pth": "/workspace",
        ".pythonrc.py": MARK,
        ".pystartup": MARK,
        "__main__.py": MARK,
        ".pdbrc": "import os; os._exit(1)",
    },
    "matplotlib": {
        "matplotlibrc": "backend: module://planted\nfont.size: 33\n",
        "planted.py": MARK,
        ".matplotlib/matplotlibrc": "backend: module://planted\n",
        ".config/matplotlib/matplotlibrc": "backend: module://planted\n",
    },
    "shell": {".bashrc": "echo ran >> /workspace/ran", ".inputrc": "", ".profile": "exit 1"},
}  # fmt: skip


async def plant(box: AsyncSandbox, files: dict[str, str]) -> None:
    code = """
for path, text in FILES.items():
    path = f'/workspace/{path}'
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, 'w') as file:
        file.write(text)
"""
    assert await attack(box, f"FILES = {files!r}\n{code}") == "ok"


@pytest.mark.parametrize(
    ("policy", "kind"),
    [*(("default", kind) for kind in PLANTS), ("data-science", "matplotlib")],
)
async def test_what_is_planted_in_the_workspace_runs_at_no_start(
    fresh: Fresh, kind: str, policy: str
) -> None:
    if policy == "data-science":
        pytest.importorskip("matplotlib")
    box = await fresh(policy)
    await plant(box, PLANTS[kind])
    await box.stop()
    await box.start()
    look = await box.run("import os; os.path.exists('/workspace/ran')")
    assert look.result == "False"
    assert (await box.shell("test ! -e /workspace/ran")).exit_code == 0


async def test_the_same_plants_run_when_code_asks_for_them(fresh: Fresh) -> None:
    """The control: they work, and what they run in is sealed."""
    box = await fresh()
    await plant(box, {"planted.py": MARK, **PLANTS[".pth"]})
    await box.stop()
    assert (await box.run("import planted")).ok
    await box.shell(f"{sys.executable} -c pass" if sys.prefix == sys.base_prefix else "true")
    marks = (await box.files.read("ran")).splitlines()
    assert any(line.startswith("planted ") for line in marks)
    assert all("['2']" in line for line in marks)


@pytest.mark.parametrize("name", ["matplotlibrc", ".fonts.conf"])
async def test_a_planted_pipe_does_not_hang_the_next_start(fresh: Fresh, name: str) -> None:
    """Whoever opens a FIFO waits for a writer, and the start for them: until its time is over."""
    pytest.importorskip("matplotlib")
    box = await fresh("data-science")
    assert await attack(box, f"os.mkfifo('/workspace/{name}')") == "ok"
    await box.stop()
    await box.start()


async def test_an_import_before_the_seal_raises() -> None:
    """Unless it is loaded already, whatever its name and wherever it lies."""
    with lockdown.forbid_imports(), pytest.raises(ImportError, match="before the seal"):
        import antigravity  # noqa: F401
    assert "antigravity" not in sys.modules


async def test_no_import_path_leads_to_the_workspace_before_user_code(fresh: Fresh) -> None:
    """Nor to a place in /tmp, save where this checkout or its interpreter lies there: that is
    mounted read-only, or an empty mount point in a /tmp that is new at every start."""
    box = await fresh()
    paths = await tell(box, "sys.path")
    assert paths[0] == ""
    ours = (str(Path(__file__).parents[2]), sys.prefix)
    open_to_all = [path for path in paths[1:] if path.startswith(("/workspace", "/tmp"))]
    assert not [path for path in open_to_all if not path.startswith(ours)]
    assert "/opt/sbx" in paths


async def test_the_variables_that_would_load_code_cannot_be_set_by_a_caller(
    fresh: Fresh,
) -> None:
    for name in ("LD_PRELOAD", "PYTHONPATH", "PYTHONSTARTUP", "IPYTHONDIR", "HOME", "SBX_X"):
        with pytest.raises(SbxError):
            await fresh(env={name: "/workspace/evil"})


@one_path()  # none starts
@pytest.mark.parametrize("zone", ["/workspace/x", ":/workspace/x", "../../../workspace/x"])
async def test_a_time_zone_cannot_be_a_file_of_the_workspace(fresh: Fresh, zone: str) -> None:
    """libc reads it before the seal: tzset(3). A pipe there hung every start."""
    for env in ({"TZ": zone}, {"TZDIR": zone}):
        with pytest.raises(SbxError):
            await fresh(env=env)
    for good in ("Europe/Berlin", "UTC", ":UTC", "CET-1CEST,M3.5.0,M10.5.0/3"):
        await fresh(env={"TZ": good})


async def test_environment_of_a_command_reaches_that_command_only(box: AsyncSandbox) -> None:
    """A command's own environment is its caller's affair: it is sealed before it is executed."""
    done = await box.shell("echo $LD_PRELOAD $X", env={"X": "1", "LD_PRELOAD": "/nowhere.so"})
    assert "/nowhere.so 1" in done.stdout
    assert await tell(box, "'X' in os.environ") is False
    assert "Seccomp:\t2" in (await box.shell("grep Seccomp /proc/self/status")).stdout


@pytest.mark.parametrize("cwd", ["/proc/1/root", "/proc/1/cwd", "../../..", "/nowhere", "x\0y"])
async def test_a_directory_for_a_command_is_looked_up_inside(box: AsyncSandbox, cwd: str) -> None:
    if "\0" in cwd:
        with pytest.raises(InvalidPath):
            await box.shell("pwd", cwd=cwd)
        return
    done = await box.shell("ls; pwd", cwd=cwd)
    assert done.exit_code != 0 or (done.stdout.splitlines()[-1] == "/" and "opt" in done.stdout)


async def test_a_program_with_a_narrow_umask_can_start_jails(started_by: str) -> None:
    """The broker inherits it, and a root one made places that no uid of a jail could reach."""
    before = os.umask(0o077)
    try:
        async with Runtime() as runtime, await runtime.create() as box:
            assert await tell(box, "6 * 7") == 42
            assert await attack(box, "open('/workspace/x', 'w').close()") == "ok"
    finally:
        os.umask(before)


async def test_a_command_that_looks_like_an_option_is_none(box: AsyncSandbox) -> None:
    """`-x` used to be an option of bash itself."""
    done = await box.shell("-x")
    assert done.exit_code == 127
    assert done.stderr.endswith("-x: command not found\n")


async def test_a_jail_that_cannot_be_sealed_starts_no_kernel(fresh: Fresh) -> None:

    box = await fresh()
    broken = lambda plan: replace(  # noqa: E731
        plan, seal=replace(plan.seal, rlimits=(("NO_SUCH_LIMIT", 1),))
    )
    with altered(change=broken), pytest.raises((SbxError, AttributeError)):
        await box.start()
    assert box.receipt is None


async def test_a_filter_that_linux_refuses_starts_no_kernel(fresh: Fresh) -> None:

    box = await fresh()
    bad = lambda plan: replace(plan, filter=plan.filter._replace(program=b"\xff" * 8))  # noqa: E731
    with altered(change=bad), pytest.raises(SbxError):
        await box.start()
    assert box.receipt is None


async def test_a_bind_whose_source_was_swapped_for_a_link_is_not_made(
    fresh: Fresh, own_temporary_directory: Path, started_by: str
) -> None:
    """The owner of a host directory swaps it between the check and the mount."""
    top = own_temporary_directory / f"swapped-{started_by}"
    top.mkdir()
    project, elsewhere = top / "project", top / "elsewhere"
    for directory in (project, elsewhere):
        directory.mkdir(exist_ok=True)
        os.chown(directory, 1000 if os.geteuid() == 0 else -1, -1)
    box = await fresh(workspace=project)
    project.rename(top / "gone")
    project.symlink_to(elsewhere)
    if os.geteuid() == 0:
        with pytest.raises(SbxError, match="replaced"):
            await box.start()
    else:
        await attack(box, "open('/workspace/x', 'w').close()")  # the user's own, either way
    assert os.geteuid() != 0 or not list(elsewhere.iterdir())
