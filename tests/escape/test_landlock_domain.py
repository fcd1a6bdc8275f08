"""One attack a test on a Landlock domain, each seen to succeed without it.

Without the seccomp filter, which would answer first to some, and as root where the tests are:
Landlock asks nobody for capabilities.
"""

from pathlib import Path

import pytest
from walled import attempt

from sbx.linux import landlock

pytestmark = pytest.mark.skipif(not landlock.supported(), reason="this linux has no Landlock")

NAMES = "from sbx.linux.landlock import FileRights, Tcp\n"
RESTRICT = (
    'rules = [("inside", FileRights.EDIT)]\n'
    'rules += [("/proc", FileRights.READ), ("/dev/urandom", FileRights.READ)]\n'
    "landlock.restrict(rules, scope_signals=True, scope_abstract_sockets=True)\n"
)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for name in ("inside", "outside"):
        (tmp_path / name / "directory").mkdir(parents=True)
        (tmp_path / name / "file").write_text("secret")
    return tmp_path


def stopped_only_by_landlock(place: Path, attack: str, answer: str, before: str = "") -> None:
    before = NAMES + before
    assert attempt(RESTRICT + attack, before=before, directory=place) == answer
    assert attempt(attack, before=before, directory=place) == "ok"


FILES = {
    "read": ('open("outside/file")', "EACCES"),
    "read through a symlink": (
        'os.symlink("../outside/file", l := f"inside/{os.getpid()}"); open(l)',
        "EACCES",
    ),
    "read through the root of a process": (
        'open(f"/proc/self/root{os.getcwd()}/outside/file")',
        "EACCES",
    ),
    "list": ('os.listdir("outside")', "EACCES"),
    "write": ('open("outside/file", "w")', "EACCES"),
    "append": ('os.open("outside/file", os.O_WRONLY | os.O_APPEND)', "EACCES"),
    "create": ('os.open("outside/new", os.O_CREAT)', "EACCES"),
    "create without a name": ('os.open("outside", os.O_TMPFILE | os.O_RDWR)', "EACCES"),
    "truncate": ('os.truncate("outside/file", 0)', "EACCES"),
    "remove": ('os.unlink("outside/file")', "EACCES"),
    "remove a directory": ('os.rmdir("outside/directory")', "EACCES"),
    "make a directory": ('os.mkdir("outside/new")', "EACCES"),
    "make a symlink": ('os.symlink("x", "outside/new")', "EACCES"),
    "make a fifo": ('os.mkfifo("outside/new")', "EACCES"),
    "rename within": ('os.rename("outside/file", "outside/new")', "EACCES"),
    "rename out": ('os.rename("inside/file", "outside/new")', "EACCES"),
    "rename in": ('os.rename("outside/file", "inside/new")', "EACCES"),
    "link in, to write it there": ('os.link("outside/file", "inside/new")', "EXDEV"),
    "link out": ('os.link("inside/file", "outside/new")', "EACCES"),
    "make a device inside": ('os.mknod("inside/new", 0o020600, 0)', "EACCES"),
    "ioctl on a device": (
        'libc.call("ioctl", os.open("/dev/urandom", os.O_RDONLY), 0x80045200, bytes(4))',
        "EACCES",
    ),
    "write a device that may be read": ('os.open("/dev/urandom", os.O_WRONLY)', "EACCES"),
}


@pytest.mark.parametrize("attack", FILES)
def test_domain_stops(attack: str, place: Path) -> None:
    stopped_only_by_landlock(place, *FILES[attack])


def test_domain_stops_execution_outside(place: Path) -> None:
    """Without the wall linux looks at the file, and finds no program."""
    attack = 'os.chmod("outside/file", 0o700); os.execv("outside/file", ["x"])'
    assert attempt(RESTRICT + attack, before=NAMES, directory=place) == "EACCES"
    assert attempt(attack, before=NAMES, directory=place) == "ENOEXEC"


def test_domain_leaves_what_the_rule_names(place: Path) -> None:
    code = (
        'open("inside/new", "w").write("x"); os.truncate("inside/new", 9)\n'
        'os.rename("inside/new", "inside/directory/new"); os.link("inside/file", "inside/l")\n'
        'os.symlink("l", "inside/s"); open("inside/s").read(); os.mkfifo("inside/p")\n'
        'os.unlink("inside/directory/new"); os.rmdir("inside/directory"); os.listdir("inside")\n'
        '__import__("socket").socket(1).bind("inside/socket")'
    )
    assert attempt("import socket\n" + RESTRICT + code, before=NAMES, directory=place) == "ok"


# Outside the domain; it waits until everybody who has the other end of the pipe is gone. Neither
# side has capabilities, as in a jail: with CAP_PERFMON linux lets one read environ without asking.
VICTIM = (
    "if capabilities.effective(): capabilities.drop_all()\n"
    "memory = ctypes.create_string_buffer(8)\n"
    "span = (ctypes.c_size_t * 2)(ctypes.addressof(memory), 8)\n"
    "held, kept = os.pipe()\n"
    "victim = os.fork()\n"
    "if not victim:\n"
    "    os.close(kept); os.read(held, 1); os._exit(0)\n"
    "pidfd = os.pidfd_open(victim)\n"
)


@pytest.mark.parametrize(
    ("attack", "answer"),
    [
        ('libc.call("ptrace", 0x4206, victim, 0, 0)', "EPERM"),  # PTRACE_SEIZE
        ('os.open(f"/proc/{victim}/mem", os.O_RDWR)', "EACCES"),
        ('open(f"/proc/{victim}/environ").read()', "EACCES"),
        ('os.readlink(f"/proc/{victim}/fd/0")', "EACCES"),
        ('os.stat(f"/proc/{victim}/root/")', "EACCES"),
        ('call("pidfd_getfd", pidfd, 0, 0)', "EPERM"),
        ('libc.call("process_vm_readv", victim, span, 1, span, 1, 0)', "EPERM"),
        ('libc.call("process_vm_writev", victim, span, 1, span, 1, 0)', "EPERM"),
        ("os.kill(victim, 0)", "EPERM"),
        ("os.kill(victim, 15)", "EPERM"),
        ('call("pidfd_send_signal", pidfd, 0, None, 0)', "EPERM"),
    ],
)
def test_process_outside_the_domain_is_out_of_reach(attack: str, answer: str, place: Path) -> None:
    pytest.importorskip("pyseccomp", reason="the numbers of the calls come from libseccomp")
    if "kill" in attack or "signal" in attack:
        _need(6)
    stopped_only_by_landlock(place, attack, answer, before=VICTIM)


def test_abstract_socket_outside_the_domain_is_out_of_reach(place: Path) -> None:
    _need(6)
    before = (
        "import socket\n"
        "listener = socket.socket(1); listener.bind('\\0sbx-%d' % os.getpid()); listener.listen()\n"
    )
    attack = "socket.socket(1).connect(listener.getsockname())"
    stopped_only_by_landlock(place, attack, "EPERM", before=before)


def test_new_mount_is_refused_within_the_domain(place: Path) -> None:
    attack = (
        'libc.call("unshare", 0x10020000)\n'  # CLONE_NEWUSER | CLONE_NEWNS
        'libc.call("mount", b"none", b"inside", b"tmpfs", 0, None)'
    )
    if attempt(attack, directory=place) != "ok":
        pytest.skip("nobody may mount here without the wall either")
    stopped_only_by_landlock(place, attack, "EPERM")


@pytest.mark.parametrize(
    "way",
    [
        'landlock.restrict([("/", FileRights.EDIT)])\n{attack}',
        "child = os.fork()\n"
        "if child == 0:\n"
        "    try: {attack}\n"
        "    except PermissionError: os._exit(1)\n"
        "    os._exit(0)\n"
        "if os.waitpid(child, 0)[1]: raise PermissionError(13, '')",
    ],
    ids=["a second domain", "a child"],
)
def test_domain_stays_through(way: str, place: Path) -> None:
    attack = way.format(attack='open("outside/file", "w")')
    stopped_only_by_landlock(place, attack, "EACCES")


def test_descriptor_held_before_keeps_what_it_could_do(place: Path) -> None:
    """Not a promise to like, but one to know: close what must not be had, before."""
    before = NAMES + 'held = open("outside/file", "w")\n'
    code = RESTRICT + 'held.write("x"); held.flush()'
    assert attempt(code, before=before, directory=place) == "ok"


PORTS = (
    "import encodings.idna, socket\n"  # nothing can be imported any more within the domain
    "a, b = (socket.create_server(('127.0.0.1', 0)) for _ in range(2))\n"
    "port, other = (s.getsockname()[1] for s in (a, b))\n"
)


def test_tcp_is_left_alone_unless_asked_for(place: Path) -> None:
    code = RESTRICT + "socket.create_connection(('127.0.0.1', port))"
    assert attempt(code, before=NAMES + PORTS, directory=place) == "ok"


@pytest.mark.parametrize(
    ("attack", "answer"),
    [
        ("socket.create_connection(('127.0.0.1', port))", "ok"),
        ("socket.create_connection(('127.0.0.1', other))", "EACCES"),
        ("socket.create_server(('127.0.0.1', 0))", "EACCES"),
    ],
)
def test_tcp_is_held_to_the_ports_named(attack: str, answer: str, place: Path) -> None:
    _need(4)
    restrict = "landlock.restrict([], tcp=[(port, Tcp.CONNECT)])\n"
    assert attempt(restrict + attack, before=NAMES + PORTS, directory=place) == answer
    assert attempt(attack, before=NAMES + PORTS, directory=place) == "ok"


def _need(abi: int) -> None:
    if landlock.abi() < abi:
        pytest.skip(f"Landlock ABI {abi} is needed, this linux has {landlock.abi()}")
