"""Nobody inside has, or gets, more rights than an ordinary user of nothing."""

# ruff: noqa: ASYNC240  # a look at /proc blocks nothing that matters to a test

import os
from pathlib import Path

import pytest
from attacking import Fresh, Without, attack, attack_by_shell, tell

from sbx.runtime.sandbox import AsyncSandbox

pytestmark = pytest.mark.core

STATUS = "{k: v.strip() for k, _, v in (line.partition(':') for line in open('/proc/self/status'))}"


@pytest.mark.unprivileged
async def test_kernel_and_commands_have_no_capability_and_cannot_gain_one(
    box: AsyncSandbox,
) -> None:
    for field in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(await tell(box, f"{STATUS}['{field}']"), 16) == 0
    assert (await box.shell("grep -c 'Cap.*:.0*$' /proc/self/status")).stdout.strip() == "5"
    assert await tell(box, f"{STATUS}['NoNewPrivs']") == "1"


@pytest.mark.unprivileged
async def test_both_filters_or_one_are_on_every_process(box: AsyncSandbox) -> None:
    assert await tell(box, f"{STATUS}['Seccomp']") == "2"
    assert "Seccomp:\t2" in (await box.shell("cat /proc/self/status")).stdout


@pytest.mark.parametrize(
    "become", ["os.setuid(0)", "os.setgid(0)", "os.setgroups([0])", "os.setresuid(0, 0, 0)"]
)
@pytest.mark.unprivileged
async def test_nobody_becomes_root(box: AsyncSandbox, become: str) -> None:
    assert await attack(box, become) in ("EPERM", "EINVAL")
    assert await attack_by_shell(box, become) in ("EPERM", "EINVAL")


@pytest.mark.unprivileged
async def test_a_file_made_inside_belongs_to_nobody_special_outside(
    box: AsyncSandbox, fresh: Fresh
) -> None:
    """Looked at from the host, as /proc inside shows a namespace in between."""
    other = await fresh()
    owners = []
    for sandbox in (box, other):
        await attack(sandbox, "open('/workspace/mine', 'w').close()")
        opened = await sandbox._default.opened()
        owners.append((opened.files_path / "mine").stat().st_uid)
    assert 0 not in owners
    if os.geteuid() == 0:
        assert owners[0] != owners[1]  # each sandbox has a uid of its own
    else:
        assert set(owners) == {os.geteuid()}


@pytest.mark.unprivileged
async def test_no_process_of_a_jail_is_root_outside(box: AsyncSandbox) -> None:
    receipt = await box.start()
    status = Path(f"/proc/{box._default.contexts.default._kernel.jail.pid}/status").read_text()  # type: ignore[union-attr]
    uids = next(line for line in status.splitlines() if line.startswith("Uid:")).split()[1:]
    assert set(uids) == {str(receipt.host_uid)} != {"0"}


# -- set-id files: whoever on the host runs one becomes its owner ----------------------------------

SET_ID = {
    "chmod": "os.chmod('t', 0o4755)",
    "chmod setgid": "os.chmod('t', 0o2755)",
    "fchmod": "os.fchmod(os.open('t', os.O_RDWR), 0o4755)",
    "fchmodat": "os.chmod('t', 0o4755, dir_fd=os.open('.', os.O_RDONLY))",
    "fchmodat2": "call('fchmodat2', -100, b't', 0o4755, 0)",
    "open": "os.open('new', os.O_CREAT | os.O_WRONLY, 0o4755)",
    "O_TMPFILE": "os.open('.', os.O_TMPFILE | os.O_RDWR, 0o6755)",
    "openat2": "call('openat2', -100, b'new', struct.pack('QQQ', 0o101, 0o4755, 0), 24)",
    "mknod": "os.mknod('new', 0o104755)",
    "install": "subprocess.run(['install', '-m', '4755', 't', 'new'], check=True)",
}


@pytest.mark.parametrize("how", SET_ID)
@pytest.mark.unprivileged
async def test_no_set_id_file_can_be_made(box: AsyncSandbox, without: Without, how: str) -> None:
    prepare = """
os.makedirs('/workspace/set-id', exist_ok=True)
os.chdir('/workspace/set-id')
for name in ('new', 't'):
    if os.path.exists(name):
        os.remove(name)
open('t', 'w').close()
os.umask(0)
try:
    subject = names_of(lambda: exec(ATTACK, globals()))
except subprocess.CalledProcessError:
    subject = 'refused'
os.chdir('/workspace')
(subject, sorted(n for n in os.listdir('set-id') if os.stat(f'set-id/{n}').st_mode & 0o6000))
"""
    code = f"ATTACK = {SET_ID[how]!r}\n{prepare}"
    said, found = await tell(box, code)
    assert said in ("EPERM", "ENOSYS", "refused")
    assert found == []
    said, found = await tell(await without("seccomp"), code)
    assert said == "ok"
    assert found or how in ("O_TMPFILE",)


async def test_a_copy_of_a_set_id_program_is_not_one(box: AsyncSandbox) -> None:
    copy = """
source = next((p for p in ('/usr/bin/su', '/usr/bin/passwd', '/usr/bin/mount')
               if os.path.exists(p)), '/usr/bin/env')
subprocess.run(['cp', '-p', source, '/workspace/copy'], check=False)
oct(os.stat('/workspace/copy').st_mode & 0o6000)
"""
    assert await tell(box, copy) == "0o0"


@pytest.mark.unprivileged
async def test_a_set_id_program_of_the_host_gives_nothing(box: AsyncSandbox) -> None:
    """nosuid mounts, and no_new_privs behind them."""
    gain = """
programs = [p for p in glob.glob('/usr/bin/*') if os.stat(p).st_mode & 0o4000]
told = [subprocess.run([p, '-c', 'id -u'], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                       timeout=10).stdout for p in programs if p.endswith('/su')]
flags = {line.split()[4]: line.split()[5] for line in open('/proc/self/mountinfo')}
(told, sorted(where for where, how in flags.items() if 'nosuid' not in how.split(',')))
"""
    answer, without_nosuid = await tell(box, gain)
    assert "0\n" not in answer
    assert without_nosuid == []


@pytest.mark.parametrize("name", ["security.capability", "trusted.x"])
@pytest.mark.unprivileged
async def test_no_capability_can_be_put_on_a_file(box: AsyncSandbox, name: str) -> None:
    """Linux asks for CAP_SETFCAP in the namespace of the file system: no wall of ours to remove."""
    value = "struct.pack('<5I', 0x2000001, 1, 0, 0, 0)"
    put = f"open('f', 'w').close(); os.setxattr('f', {name!r}, {value})"
    assert await attack(box, put) in ("EPERM", "ENOTSUP", "EOPNOTSUPP")


@pytest.mark.unprivileged
async def test_no_device_can_be_made(box: AsyncSandbox) -> None:
    for kind in ("S_IFCHR", "S_IFBLK"):
        make = f"os.mknod('/workspace/dev', stat.{kind} | 0o666, os.makedev(1, 3))"
        assert await attack(box, make) == "EPERM"
    assert await attack(box, "os.mkfifo('/workspace/fifo'); os.remove('/workspace/fifo')") == "ok"


# -- namespaces, mounts and linux's big doors ------------------------------------------------------

NEWUSER, NEWNS = 0x10000000, 0x20000
DOORS = {
    "unshare user": f"call('unshare', {NEWUSER})",
    "unshare mount": f"call('unshare', {NEWNS})",
    "clone user": f"call('clone', {NEWUSER} | 17, 0, 0, 0, 0) or os._exit(0)",
    "clone3": "call('clone3', struct.pack('8Q', 1 << 28, 0, 0, 0, 17, 0, 0, 0), 64) or os._exit(0)",
    "setns": "call('setns', os.open('/proc/self/ns/user', os.O_RDONLY), 0)",
    "mount": "call('mount', b'none', b'/tmp', b'tmpfs', 0, 0)",
    "umount": "call('umount2', b'/tmp', 2)",
    "remount writable": "call('mount', b'none', b'/usr', None, 0x20 | 0x1000, 0)",
    "mount_setattr": "call(442, -100, b'/usr', 0, struct.pack('4Q', 0, 1, 0, 0), 32)",
    "move_mount": "call(429, -100, b'/dev/shm', -100, b'/tmp', 0)",
    "file_setattr": "call(469, -100, b'.', bytes(32), 32, 0)",
    "fsopen": "call('fsopen', b'tmpfs', 0)",
    "open_tree": "call('open_tree', -100, b'/', 1)",
    "pivot_root": "call('pivot_root', b'/tmp', b'/tmp')",
    "keyctl": "call('keyctl', 0, -3, 1)",
    "add_key": "call('add_key', b'user', b'x', b'y', 1, -3)",
    "request_key": "call('request_key', b'user', b'x', 0, -3)",
    "io_uring": "call('io_uring_setup', 4, ctypes.create_string_buffer(120))",
    "bpf": "call('bpf', 0, ctypes.create_string_buffer(64), 64)",
    "perf": "call('perf_event_open', struct.pack('IIQ', 1, 112, 0) + bytes(96), 0, -1, -1, 0)",
    "userfaultfd": "call('userfaultfd', 1)",
    "name_to_handle": "call('name_to_handle_at', -100, b'/', ctypes.create_string_buffer("
    "struct.pack('I', 128) + bytes(132)), ctypes.create_string_buffer(8), 0)",
    "open_by_handle": "call('open_by_handle_at', -100, struct.pack('Ii', 8, 1) + bytes(8), 0)",
    "kcmp": "call('kcmp', os.getpid(), os.getpid(), 0, 0, 0)",
    "syslog": "call('syslog', 10, 0, 0)",
    "module": "call('init_module', b'', 0, b'')",
}
# What an ordinary user may do on a plain linux: there the filter alone is seen to say no. The
# others need capabilities as well, and a jail without the filter still has none.
OPEN_TO_ALL = {
    "clone3", "keyctl", "add_key", "request_key", "io_uring", "userfaultfd", "kcmp",
    "name_to_handle", "file_setattr",
}  # fmt: skip


@pytest.mark.parametrize("door", DOORS)
async def test_a_door_of_linux_is_shut(box: AsyncSandbox, without: Without, door: str) -> None:
    assert await attack(box, DOORS[door]) in ("EPERM", "ENOSYS")
    assert await attack_by_shell(box, DOORS[door]) in ("EPERM", "ENOSYS")
    control = await attack(await without("seccomp"), DOORS[door])
    if door in OPEN_TO_ALL:
        assert control not in ("EPERM", "EACCES") or door == "clone3"
    else:
        assert control != "ok" or door in ("unshare user", "clone user", "setns")


@pytest.mark.unprivileged
async def test_a_user_namespace_is_refused_by_two_walls(
    box: AsyncSandbox, without: Without
) -> None:
    """The filter, and bwrap's --disable-userns where it has that option (0.8)."""
    unshare = f"call('unshare', {NEWUSER})"
    bare = await without("seccomp", "disable-userns")
    in_child = f"""
pid = os.fork()
if not pid:
    os._exit(names_of(call, 'unshare', {NEWUSER}) != 'ok')
os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""
    assert await attack(box, unshare) == "EPERM"
    assert await tell(await without("seccomp"), in_child) == 1
    assert await tell(bare, in_child) == 0


async def test_nothing_is_typed_into_a_terminal(box: AsyncSandbox, without: Without) -> None:
    """CVE-2017-5226, also with high bits set, which linux ignores (CVE-2019-10063)."""
    push = """
import fcntl, pty
master, slave = pty.openpty()
pid = os.fork()
if not pid:
    os.setsid()
    fcntl.ioctl(slave, 0x540E, 0)  # TIOCSCTTY
    letter = ctypes.create_string_buffer(b'x')
    number = 16 if os.uname().machine == 'x86_64' else 29  # ioctl, with all 64 bits of REQUEST
    said = names_of(lambda: call(number, slave, REQUEST, letter))
    os._exit({'ok': 0, 'EPERM': 1}.get(said, 2))
os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""
    for request in (0x5412, 0x5412 | 1 << 40):
        code = f"REQUEST = {request}\n{push}"
        assert await tell(box, code) == 1
        if Path("/proc/sys/dev/tty/legacy_tiocsti").exists():
            legacy = Path("/proc/sys/dev/tty/legacy_tiocsti").read_text().strip() == "1"
            assert await tell(await without("seccomp"), code) == (0 if legacy else 2)


async def test_no_terminal_of_the_host_is_inherited(box: AsyncSandbox) -> None:
    assert await attack(box, "os.open('/dev/tty', os.O_RDWR)") == "ENXIO"
    assert await attack_by_shell(box, "os.open('/dev/tty', os.O_RDWR)") == "ENXIO"


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the second tables are of x86-64")
async def test_the_second_tables_of_system_calls_are_shut(fresh: Fresh, without: Without) -> None:
    """x32 is ENOSYS; a 32-bit call ends the process, whichever it is."""
    box = await fresh()
    x32 = "call(0x40000000 + 39)"  # getpid
    ia32 = """
import mmap
code = bytes([0xB8, 20, 0, 0, 0, 0xCD, 0x80, 0xC3])  # mov eax, getpid; int 0x80; ret
page = mmap.mmap(-1, 4096, prot=7)
page.write(code)
address = ctypes.addressof(ctypes.c_char.from_buffer(page))
pid = os.fork()
if not pid:
    ctypes.CFUNCTYPE(ctypes.c_int)(address)()
    os._exit(0)
os.waitpid(pid, 0)[1]
"""
    assert await attack(box, x32) == "ENOSYS"
    assert await tell(box, ia32) & 0x7F == 31  # SIGSYS
    assert await tell(await without("seccomp"), ia32) & 0x7F != 31


async def test_a_filter_of_the_own_cannot_take_one_away(box: AsyncSandbox) -> None:
    """Linux only ever adds filters, and the strictest answer counts."""
    allow_all = """
program = ctypes.create_string_buffer(struct.pack('HBBI', 0x06, 0, 0, 0x7FFF0000))
filters = struct.pack('HxxxxxxQ', 1, ctypes.addressof(program))
pid = os.fork()
if not pid:
    loaded = names_of(lambda: call('seccomp', 1, 0, filters))
    os._exit(loaded == 'ok' and names_of(lambda: call('bpf', 0, None, 0)) == 'EPERM')
os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""
    assert await tell(box, allow_all) == 1


async def test_a_core_dump_starts_no_program_of_the_host(box: AsyncSandbox) -> None:
    """RLIMIT_CORE 0 keeps no pipe of core_pattern from starting its program, as root, on the host;
    1 does: linux takes it as "this is the dumper itself" and gives up (core(5)). Seen by hand with
    a core_pattern of ours, which is one for the whole host: so no control here."""
    crash = "subprocess.run(['/bin/bash', '-c', 'kill -SEGV $$']).returncode"
    assert await tell(box, crash) == -11
    assert await tell(box, "import resource; resource.getrlimit(resource.RLIMIT_CORE)") == (1, 1)
    assert await tell(box, "os.path.exists('core')") is False
