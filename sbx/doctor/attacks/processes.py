"""proc: PID 1, processes of the host, namespaces, users."""

from sbx.doctor.attacks.attack import Class, attacks

_GONE = ("ESRCH", "ENOENT")
_SPAN = "struct.pack('QQ', ctypes.addressof(_page := ctypes.create_string_buffer(8)), 8)"

HOST = attacks(
    Class.PROC,
    "namespaces",
    {
        "signal a process of the host": "os.kill(bait(), 0)",
        "open a process of the host": "os.close(os.pidfd_open(bait()))",
        "read the variables of a process of the host": "read(f'/proc/{bait()}/environ')",
        "find a process of the host by its number": "os.stat(f'/proc/{bait()}')",
        "find a process of the host among all": """
for path in glob.glob("/proc/[0-9]*/environ"):
    try:
        if HOST["token"].encode() in read(path):
            break
    except OSError:
        pass
else:
    raise Held
""",
        "slow a process of the host down": (
            "pid = bait(); os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(0, pid))"
        ),
        "pin a process of the host": "pid = bait(); os.sched_setaffinity(pid,"
        " os.sched_getaffinity(pid))",
        "read the limits of a process of the host": "resource.prlimit(bait(), 7)",
        "trace a process of the host": "call('ptrace', 0x4206, bait(), 0, 0)",
        "signal a thread of the host": "call('tgkill', (pid := bait()), pid, 0)",
        "enter a namespace of a process of the host": "opens(f'/proc/{bait()}/ns/net')",
        "read the robust futexes of a process of the host": (
            "call('get_robust_list', bait(), bytes(8), bytes(8))"
        ),
    },
    _GONE,
)

PID_1 = (
    attacks(
        Class.PROC,
        "landlock",
        {
            "write to the memory of PID 1": "opens('/proc/1/mem', os.O_RDWR)",
            "read the memory of PID 1": "opens('/proc/1/mem')",
            "read the variables of PID 1": "read('/proc/1/environ')",
            "read the addresses of PID 1": "held_if(not read('/proc/1/maps'))",
            "open a descriptor of PID 1": "opens('/proc/1/fd/0')",
            "follow the root of PID 1": "os.readlink('/proc/1/root')",
            "follow the program of PID 1": "opens('/proc/1/exe')",
            "open the user namespace of PID 1": "opens('/proc/1/ns/user')",
            "open the mounts of PID 1": "opens('/proc/1/ns/mnt')",
            "open the memory of a thread of PID 1": "opens('/proc/1/task/1/mem', os.O_RDWR)",
            "see a mapped file of PID 1": "os.listdir('/proc/1/map_files')",
            "ask what PID 1 waits for": "held_if(not read('/proc/1/syscall').strip())",
            "clear the page marks of PID 1": "opens('/proc/1/clear_refs', os.O_WRONLY)",
            "change the memory dump of PID 1": "opens('/proc/1/coredump_filter', os.O_WRONLY)",
        },
        _GONE,
    )
    + attacks(
        Class.PROC,
        "seccomp",
        {
            "trace PID 1": "call('ptrace', 0x4206, 1, 0, 0)",
            "take a descriptor of PID 1": "call('pidfd_getfd', os.pidfd_open(1), 0, 0)",
            "read PID 1 from its memory": f"call('process_vm_readv', 1, {_SPAN}, 1, {_SPAN}, 1, 0)",
            "write PID 1 into its memory": (
                f"call('process_vm_writev', 1, {_SPAN}, 0, {_SPAN}, 0, 0)"
            ),
            "compare descriptors with PID 1": "call('kcmp', os.getpid(), 1, 0, 0, 0)",
            "read the limits of PID 1": "resource.prlimit(1, resource.RLIMIT_NOFILE)",
            "reap the memory of PID 1": "call('process_mrelease', os.pidfd_open(1), 0)",
            "read the memory of the own parent": (
                f"call('process_vm_readv', os.getppid(), {_SPAN}, 1, {_SPAN}, 1, 0)"
            ),
            "trace the own parent": (
                "held_if(os.getppid() < 2); call('ptrace', 0x4206, os.getppid(), 0, 0)"
            ),
            "become traced": "call('ptrace', 0, 0, 0, 0)",
            "compare the own descriptors": "call('kcmp', os.getpid(), os.getpid(), 0, 0, 0)",
        },
        (),
        lone=True,
    )
    + attacks(
        Class.PROC,
        "landlock",
        {
            "ask whether PID 1 can be signalled": "os.kill(1, 0)",
            "signal PID 1 by its descriptor": (
                "call('pidfd_send_signal', os.pidfd_open(1), 0, None, 0)"
            ),
            "queue a signal for PID 1": (
                "call('rt_sigqueueinfo', 1, signal.SIGURG,"
                " struct.pack('iii', signal.SIGURG, 0, -1) + bytes(116))"
            ),
        },
        _GONE,
    )
)

_FLAGS = {
    "user": 0x10000000,
    "mount": 0x20000,
    "process": 0x20000000,
    "network": 0x40000000,
    "ipc": 0x08000000,
    "name": 0x04000000,
    "cgroup": 0x02000000,
    "time": 0x80,
}
NAMESPACES = attacks(
    Class.PROC,
    "seccomp",
    {f"leave the {name} namespace": f"call('unshare', {flag})" for name, flag in _FLAGS.items()}
    | {
        f"fork into a new {name} namespace": f"""
child = call("clone", {flag | 17}, None, None, None, None)
if not child:
    os._exit(0)
os.waitpid(child, 0)
"""
        for name, flag in _FLAGS.items()
        if name in ("user", "mount", "network")
    }
    | {
        "fork by a call whose flags no filter can see": """
arguments = struct.pack("8Q", 0x10000000, 0, 0, 0, 17, 0, 0, 0)
child = call("clone3", arguments, 64)
if not child:
    os._exit(0)
os.waitpid(child, 0)
""",
        "enter a namespace by its descriptor": (
            "call('setns', os.open('/proc/self/ns/user', os.O_RDONLY), 0)"
        ),
        "enter the namespaces of PID 1": "call('setns', os.pidfd_open(1), 0x20000)",
        "enter the namespaces of the own parent": (
            "call('setns', os.pidfd_open(os.getppid()), 0x20000)"
        ),
    },
    (),
    lone=True,
)

USERS = attacks(
    Class.PROC,
    "privileges",
    {
        "become root": "os.setuid(0)",
        "become the group of root": "os.setgid(0)",
        "become root in all ids": "os.setresuid(0, 0, 0)",
        "join the group of root": "os.setgroups([0])",
        "become root for files": "call('setfsuid', 0); held_if(call('setfsuid', -1) != 0)",
        "take a capability": (
            "call('capset', struct.pack('Ii', 0x20080522, 0), struct.pack('6I', 1 << 21, 1 << 21,"
            " 0, 0, 0, 0))"
        ),
        "take a capability for those to come": """
call("capset", struct.pack("Ii", 0x20080522, 0), struct.pack("6I", *[1 << 21] * 3, 0, 0, 0))
result_of(libc.prctl(47, 2, ctypes.c_long(21), 0, 0), "prctl")
""",
        "run a set-id program": """
for path in glob.glob("/usr/bin/*"):
    found = os.stat(path)
    if found.st_mode & stat.S_ISUID:
        break
else:
    raise Absent
held_if(os.statvfs(path).f_flag & os.ST_NOSUID or status("NoNewPrivs") == "1")
""",
    },
    ("EINVAL",),
    lone=True,
)

TERMINALS = attacks(
    Class.PROC,
    "seccomp",
    {
        "type into a terminal": """
import pty
os.setsid()
keeper, terminal = os.openpty()
fcntl.ioctl(terminal, 0x540E, 0)
fcntl.ioctl(terminal, 0x5412, b"x")
""",
        "paste into the console": "fcntl.ioctl(os.openpty()[1], 0x541C, b'\\x03')",
        "change the line discipline": (
            "fcntl.ioctl(os.openpty()[1], 0x5423, array.array('i', [3]))"
        ),
        "hang the terminal up": "call('vhangup')",
    },
    (),
    lone=True,
)

PROCESSES = (*HOST, *PID_1, *NAMESPACES, *USERS, *TERMINALS)
