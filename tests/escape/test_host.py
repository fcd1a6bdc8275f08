"""Nothing of the host is there to be found: no path, no descriptor, no magic link leads out."""

# ruff: noqa: ASYNC240  # a look at /proc blocks nothing that matters to a test

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from attacking import Fresh, Without, altered, attack, attack_by_shell, by, tell

from sbx.linux import libc
from sbx.linux.seccomp import syscall_number
from sbx.policy import load
from sbx.runtime.sandbox import AsyncSandbox

pytestmark = pytest.mark.core
SECRET = "host secret"
REFUSED = ("EACCES", "EROFS", "ENOENT")


@pytest.fixture
def secret() -> Iterator[Path]:
    """A file of the host that every user there may read."""
    with tempfile.TemporaryDirectory(prefix="host-") as directory:
        os.chmod(directory, 0o755)
        path = Path(directory) / "secret"
        path.write_text(SECRET)
        path.chmod(0o644)
        yield path


@pytest.mark.unprivileged
async def test_a_file_that_everybody_on_the_host_may_read_is_not_there(
    box: AsyncSandbox, secret: Path
) -> None:
    for prefix in ("", "/proc/self/root", "/proc/1/root", "/proc/self/cwd/../.."):
        assert await attack(box, f"open({prefix + str(secret)!r}).read()") in ("ENOENT", "EACCES")


async def test_the_same_file_is_read_where_its_directory_is_shown(
    fresh: Fresh, secret: Path
) -> None:
    """The control of the test before: only the view stands between code and host."""
    policy = load("default")
    shown = {"source": str(secret.parent), "target": "/opt/mounted"}
    filesystem = policy.filesystem.model_validate({"mount": [shown]})
    box = await fresh(policy.model_copy(update={"filesystem": filesystem}))
    assert await tell(box, "open('/opt/mounted/secret').read()") == SECRET


@pytest.mark.unprivileged
async def test_the_keys_of_the_user_are_not_listed(box: AsyncSandbox) -> None:
    """Without an own uid, /proc/keys named the keys of the user (holes 13)."""
    pytest.importorskip("pyseccomp", reason="the number of the call comes from libseccomp")
    number = syscall_number("add_key", os.uname().machine)
    assert number is not None
    libc.syscall("add_key", number, b"user", b"sbx-test-key", b"x", 1, -4)  # the user's keyring
    assert "sbx-test-key" in Path("/proc/keys").read_text()
    assert await tell(box, "open('/proc/keys').read()") == ""
    assert await tell(box, "subprocess.getoutput('cat /proc/self/root/proc/keys')") == ""
    assert await tell(box, "open('/proc/key-users').read()") == ""


@pytest.mark.parametrize("path", ["/etc/shadow", "/etc/ssh", "/var/log", "/run", "/sys/kernel"])
@pytest.mark.unprivileged
async def test_system_files_of_the_host_are_not_there(box: AsyncSandbox, path: str) -> None:
    assert await attack(box, f"os.stat({path!r})") == "ENOENT"


@pytest.mark.unprivileged
async def test_the_homes_of_the_host_are_not_there(box: AsyncSandbox) -> None:
    """/home has a name of the workspace, and otherwise only the way to the interpreter."""
    below = {Path(path) for path in (sys.prefix, sys.base_prefix, sys.executable)}
    ways = {path.parts[2] for path in below if path.parts[1:2] == ("home",)}
    assert set(await tell(box, "os.listdir('/home')")) <= {"user", *ways}
    assert await tell(box, "os.path.realpath('/home/user/x')") == "/workspace/x"


@pytest.mark.unprivileged
async def test_a_home_of_the_host_shows_nothing_but_the_way_to_the_interpreter(
    box: AsyncSandbox,
) -> None:
    """An empty parent of a mount point exists inside; what else lies beside it does not."""
    parents = {str(parent) for parent in Path(sys.base_prefix).parents} - {"/"}
    parents |= {str(parent) for parent in Path(sys.prefix).parents} - {"/"}
    shown = {Path(sys.prefix), Path(sys.base_prefix)}
    for parent in parents:
        if parent.startswith("/usr"):
            continue
        expected = {
            path.relative_to(parent).parts[0] for path in shown if path.is_relative_to(parent)
        }
        expected |= {"user"} if parent == "/home" else set()  # a name of the workspace
        assert set(await tell(box, f"os.listdir({parent!r})")) == expected


async def test_accounts_inside_are_three_and_none_is_of_the_host(box: AsyncSandbox) -> None:
    found = await tell(box, "import pwd; [entry.pw_name for entry in pwd.getpwall()]")
    assert found == ["root", "sandbox", "nobody"]


async def test_the_root_directory_holds_only_what_the_plan_put_there(box: AsyncSandbox) -> None:
    planned = [
        "bin",
        "dev",
        "etc",
        "home",
        "lib",
        "lib32",
        "lib64",
        "libx32",
        "mnt",  # where directories that are mounted later come
        "opt",
        "proc",
        "sandbox",
        "sbin",
        "sys",  # the limits of the jail: `sbx.guest.machine`
        "tmp",
        "usr",
        "workspace",
    ]
    ways = {path.split("/")[1] for path in (sys.prefix, sys.base_prefix, sys.executable)}
    assert set(await tell(box, "os.listdir('/')")) <= {*planned, *ways}
    assert await tell(box, "os.listdir('/mnt')") == []


@pytest.mark.parametrize(
    "name", ["root", "cwd", "exe", "environ", "mem", "maps", "fd/3", "ns/user"]
)
@pytest.mark.unprivileged
async def test_pid_1_cannot_be_looked_into(box: AsyncSandbox, without: Without, name: str) -> None:
    """By Landlock: a process cannot trace one outside its domain, and these files ask for that."""
    look = f"os.readlink('/proc/1/{name}')"
    if name in ("environ", "mem", "maps"):
        look = f"open('/proc/1/{name}', 'rb', 0).read(0 if '{name}' == 'mem' else 1)"
    assert await attack(box, look) == "EACCES"
    assert await attack_by_shell(box, look) == "EACCES"
    assert await attack(await without("landlock"), look) == "ok"


async def test_pid_1_cannot_be_written_to(box: AsyncSandbox, without: Without) -> None:
    write = "open('/proc/1/mem', 'r+b', 0).close()"
    assert await attack(box, write) == "EACCES"
    assert await attack(await without("landlock"), write) == "ok"


async def test_the_command_line_of_pid_1_tells_no_path_of_the_host(
    box: AsyncSandbox, started_by: str
) -> None:
    """bwrap would stay as PID 1 with every bind on its command line: it does not."""
    words = await tell(box, "open('/proc/1/cmdline').read().split(chr(0))[:-1]")
    script = "cold" if started_by == "cold" else "zygote"
    assert words == [sys.executable, "-I", f"/opt/sbx/sbx/guest/start/{script}.py"]


@pytest.mark.unprivileged
async def test_no_variable_of_the_programs_environment_is_inside(fresh: Fresh) -> None:
    """Also not in what PID 1 was started with, which `bwrap --clearenv` would leave readable."""
    os.environ["SBX_TEST_SECRET"] = SECRET
    try:
        box = await fresh()
        await box.start()
    finally:
        del os.environ["SBX_TEST_SECRET"]
    assert not await tell(box, f"any({SECRET!r} in value for value in os.environ.values())")
    assert SECRET not in (await box.shell("env; cat /proc/self/environ")).stdout
    pid1 = box._default.contexts.default._kernel.jail.pid  # type: ignore[union-attr]
    started_with = Path(f"/proc/{pid1}/environ").read_text()
    assert "PATH=" in started_with
    assert SECRET not in started_with
    assert "SBX_" not in started_with


ALLOWED = re.compile(
    r"0 /dev/null|[12] pipe:|\d+ (pipe:|socket:|anon_inode:\[(eventfd|eventpoll|timerfd)\])"
)
DESCRIPTORS = """
def target(fd):
    try:
        return os.readlink(f'/proc/self/fd/{fd}')
    except OSError:
        return None
{fd: target(fd) for fd in map(int, os.listdir('/proc/self/fd')) if target(fd)}
"""


@pytest.mark.unprivileged
async def test_the_kernel_has_no_descriptor_but_its_own(fresh: Fresh) -> None:
    """Its socket, pipes of its output, its event loop. The directory handle of the look itself is
    gone by the time that it is asked about. That the look sees: a file we open is in the list."""
    box = await fresh()
    found = await tell(box, DESCRIPTORS)
    assert sorted(found)[:3] == [0, 1, 2]
    strange = [f"{fd} {name}" for fd, name in found.items() if not ALLOWED.match(f"{fd} {name}")]
    assert not strange
    sockets = [fd for fd, name in found.items() if name.startswith("socket:")]
    assert len(sockets) <= 3  # the kernel's own, and the pair by which asyncio wakes itself
    assert "/etc/passwd" in (await tell(box, f"held = open('/etc/passwd'){DESCRIPTORS}")).values()


async def test_a_command_has_no_descriptor_but_its_three(box: AsyncSandbox) -> None:
    command = f"exec {sys.executable} -I -"
    done = await box.shell(
        command,
        stdin=f"import os\n{DESCRIPTORS[:-1]}".replace("{fd:", "found = {fd:") + "\nprint(found)",
    )
    assert eval(done.stdout).keys() == {0, 1, 2}


async def test_pid_1_holds_no_descriptor_but_its_own(box: AsyncSandbox) -> None:
    """Seen from the host. What bwrap was started with (arguments, filter, stderr) is closed."""
    await box.start()
    pid1 = box._default.contexts.default._kernel.jail.pid  # type: ignore[union-attr]
    links = Path(f"/proc/{pid1}/fd").iterdir()
    held = sorted(os.readlink(link).split(":")[0] for link in links)
    assert held.count("/dev/null") == 3
    assert held.count("socket") == 1
    rest = [name for name in held if name not in ("/dev/null", "socket", "pipe", "anon_inode")]
    assert len(rest) == 1
    assert rest[0].endswith("/oom_score_adj")


async def test_a_directory_held_open_before_a_restart_leads_nowhere_new(fresh: Fresh) -> None:
    """A descriptor that survives in no process cannot be used by the next kernel."""
    box = await fresh()
    await attack(box, "held = os.open('/proc/self/root', os.O_PATH)")
    await box.stop()
    assert await attack(box, "held") == "NameError"


@pytest.mark.parametrize(
    "path",
    [
        "/usr/bin/planted",
        "/usr/lib/planted",
        "/etc/planted",
        "/etc/passwd",
        "/opt/planted",
        "/opt/sbx/sbx/guest/start/lockdown.py",
        "/opt/sbx/planted",
        "/planted",
        "/dev/planted",
        "/sandbox/planted",
        "/proc/planted",
        f"{sys.prefix}/planted",
        f"{os.path.dirname(os.__file__)}/json/__init__.py",
        f"{os.path.dirname(os.__file__)}/site-packages/planted.pth",
    ],
)
@pytest.mark.unprivileged
async def test_nothing_that_a_later_kernel_runs_can_be_written(
    box: AsyncSandbox, without: Without, path: str
) -> None:
    """Twice: read-only mounts hold without Landlock as well. A control without both would write
    to this host's own interpreter; the next test shows the mount alone on a folder of ours."""
    write = f"os.open({path!r}, os.O_WRONLY | os.O_CREAT, 0o644)"
    assert await attack(box, write) in REFUSED
    assert await attack(await without("landlock"), write) in REFUSED


async def test_a_mounted_folder_is_read_only_by_its_mount(
    fresh: Fresh, secret: Path, started_by: str
) -> None:
    """A zygote has it mounted already, and from no plan of ours: so the controls start cold."""
    secret.parent.chmod(0o777)
    policy = load("default")
    shown = {"source": str(secret.parent), "target": "/opt/mounted"}
    filesystem = policy.filesystem.model_validate({"mount": [shown]})
    policy = policy.model_copy(update={"filesystem": filesystem})
    write = "open('/opt/mounted/planted', 'w').close()"
    outcomes = []
    for walls in (("landlock",), ("read-only",), ("landlock", "read-only")):
        box = await fresh(policy)
        with altered(*walls), by(started_by if walls == ("landlock",) else "cold"):
            outcomes.append(await attack(box, write))
    assert outcomes == ["EROFS", "EACCES", "ok"]


@pytest.mark.parametrize("path", ["/proc/self/exe", "/proc/1/exe", "/bin/bash", sys.executable])
async def test_no_program_opens_for_writing(box: AsyncSandbox, path: str) -> None:
    """CVE-2019-5736. Not even ETXTBSY, which would mean that only its being in use forbids it."""
    assert await attack(box, f"os.open({path!r}, os.O_WRONLY)") in ("EACCES", "EROFS")
    assert await attack_by_shell(box, f"os.open({path!r}, os.O_RDWR)") in ("EACCES", "EROFS")


@pytest.mark.parametrize(
    "path",
    [
        "/proc/sys/kernel/core_pattern",
        "/proc/sys/kernel/hostname",
        "/proc/sys/fs/mqueue/msg_max",
        "/proc/sys/net/ipv4/ping_group_range",
        "/proc/self/oom_score_adj",
        "/proc/self/uid_map",
        "/proc/self/attr/current",
        "/proc/sysrq-trigger",
    ],
)
@pytest.mark.unprivileged
async def test_nothing_below_proc_opens_for_writing(box: AsyncSandbox, path: str) -> None:
    assert await attack(box, f"os.open({path!r}, os.O_WRONLY)") in REFUSED
    assert await attack_by_shell(box, f"os.open({path!r}, os.O_WRONLY)") in REFUSED


async def test_landlock_alone_keeps_the_own_oom_score(box: AsyncSandbox, without: Without) -> None:
    """The kernel is to die before PID 1 does, and a command before the kernel."""
    write = "open('/proc/self/oom_score_adj', 'w').write('0')"
    assert await attack(box, write) == "EACCES"
    assert await attack(await without("landlock"), write) == "ok"


async def test_no_file_of_all_proc_and_dev_can_be_written_but_known_devices(
    box: AsyncSandbox,
) -> None:
    walk = """
found = set()
for top in ('/proc/sys', '/dev', '/proc/self'):
    for directory, names, files in os.walk(top):
        if '/shm' in directory or '/task/' in directory or '/fd' in directory:
            continue
        for name in files:
            path = f'{directory}/{name}'
            if os.path.islink(path):
                continue
            try:
                os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
                found.add(path)
            except OSError:
                pass
sorted(found)
"""
    devices = {"full", "null", "ptmx", "random", "tty", "urandom", "zero"}
    found = set(await tell(box, walk))
    assert {path for path in found if not path.startswith("/dev/pts/")} <= {
        f"/dev/{name}" for name in devices
    }


async def test_cgroups_of_the_host_are_not_told(box: AsyncSandbox, without: Without) -> None:
    paths = "{line.split(':')[2].strip() for line in open('/proc/self/cgroup')}"
    assert await tell(box, paths) == {"/"}


async def test_a_mount_tells_no_name_that_a_caller_chose(fresh: Fresh) -> None:
    """mountinfo shows where on its file system the workspace lies: opaque names only."""
    box = await fresh()
    lines = await tell(box, "open('/proc/self/mountinfo').read()")
    (root,) = {line.split()[3] for line in lines.splitlines() if line.split()[4] == "/workspace"}
    assert box.id not in root
    assert "default" not in Path(root).parts


async def test_only_processes_of_the_jail_are_seen(box: AsyncSandbox) -> None:
    """Without a PID namespace there is no jail to start (`--as-pid-1`), so no control."""
    script = (
        "[(int(p), open(f'/proc/{p}/comm').read()) for p in os.listdir('/proc') if p.isdigit()]"
    )
    found = await tell(box, script)
    assert {pid for pid, _ in found} <= set(range(1, 200))
    assert len(found) < 8
    assert str(os.getpid()) not in await tell(box, "os.listdir('/proc')") or os.getpid() < 200
