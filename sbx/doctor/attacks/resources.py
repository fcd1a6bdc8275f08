"""resources: the memory, files and processes of the host. Each attack bounds its own usage."""

from sbx.doctor.attacks.attack import Attack, Class, attacks

TAKEN = attacks(
    Class.RESOURCES,
    "rlimits",
    {
        "open files without end": """
held = []
try:
    for _ in range(LIMITS["open_files"] + 64):
        held.append(os.dup(0))
except OSError as error:
    held_if(error.errno == errno.EMFILE)
    raise
finally:
    for fd in held:
        os.close(fd)
""",
        "make a file larger than allowed": """
fd = os.open(f"{WORK}/attack-large-{os.getpid()}", os.O_RDWR | os.O_CREAT)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
try:
    os.ftruncate(fd, LIMITS["file_size"] + 4096)
finally:
    os.unlink(os.readlink(f"/proc/self/fd/{fd}"))
    os.close(fd)
""",
        "queue timers without end": """
made = []
try:
    for _ in range(2000):
        timer = ctypes.c_int()
        call("timer_create", 1, None, ctypes.byref(timer))
        made.append(timer.value)
except OSError as error:
    held_if(error.errno == errno.EAGAIN)
    raise
finally:
    for timer in made:
        call("timer_delete", timer)
""",
        "pin memory": """
memory = mmap.mmap(-1, 16 << 20)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
result_of(libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(16 << 20)), "mlock")
""",
        "have cores dumped": ("held_if(resource.getrlimit(resource.RLIMIT_CORE)[1] in (0, 1))"),
    },
    ("EFBIG", "EMFILE", "ENOMEM", "EPERM"),
) + attacks(
    Class.RESOURCES,
    "privileges",
    {
        f"raise the limit {name}": f"""
soft, hard = resource.getrlimit(resource.RLIMIT_{name})
held_if(hard == resource.RLIM_INFINITY and "{name}" == "NPROC")  # a cgroup counts instead
try:
    resource.setrlimit(resource.RLIMIT_{name}, (soft, hard + 1))
except ValueError:
    raise Held
"""
        for name in ("NOFILE", "NPROC", "FSIZE", "MEMLOCK", "CORE", "SIGPENDING")
    }
    | {
        "go before others": "os.setpriority(os.PRIO_PROCESS, 0, -5)",
        "have a larger pipe": (
            "fcntl.fcntl(os.pipe()[0], 1031, 1 + int(read('/proc/sys/fs/pipe-max-size')))"
        ),
        "pin all memory": "call('mlockall', 1)",
        "take large pages": """
libc.mmap.restype = ctypes.c_long
result_of(libc.mmap(None, ctypes.c_size_t(2 << 20), 3, 0x40022, -1, ctypes.c_long(0)), "mmap")
""",
    },
    ("ENOMEM", "EINVAL"),
    lone=True,
)

# Linux counts these for a user or for the machine. Each attack takes more than one sandbox may
# have, and less than a host has.
SHARED = (
    attacks(
        Class.RESOURCES,
        "namespaces",
        {
            "take the inotify instances of the user": """
taken = []
try:
    for _ in range(64):
        taken.append(result_of(libc.inotify_init1(0), "inotify_init1"))
finally:
    for fd in taken:
        os.close(fd)
""",
        },
        ("EMFILE",),
    )
    + attacks(
        Class.RESOURCES,
        "mounts",
        {
            "take the terminals of the machine": """
taken = []
try:
    for _ in range(96):
        taken.append(os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY))
finally:
    for fd in taken:
        os.close(fd)
""",
        },
        ("ENOSPC",),
    )
    + attacks(
        Class.RESOURCES,
        "seccomp",
        {"take the pages of pipes of the user": "fcntl.fcntl(os.pipe()[0], 1031, 1 << 20)"},
    )
)

MOUNTED = attacks(
    Class.RESOURCES,
    "mounts",
    {
        f"fill {place}": f"""
fd = os.open("{place}/attack-{{os.getpid()}}", os.O_RDWR | os.O_CREAT)
try:
    os.posix_fallocate(fd, 0, 1 << 16)
    held_if(os.fstatvfs(fd).f_blocks * os.fstatvfs(fd).f_frsize <= LIMITS["{limit}"] <
            (os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")))
finally:
    os.unlink(os.readlink(f"/proc/self/fd/{{fd}}"))
    os.close(fd)
"""
        for place, limit in (("/tmp", "tmp_size"), ("/dev/shm", "shm_size"))  # noqa: S108
    },
    ("ENOSPC", "EDQUOT"),
)

TASKS = attacks(
    Class.RESOURCES,
    "limits",
    {
        "fork without end": """
children = []
try:
    for _ in range(LIMITS["tasks"] + 32):
        child = os.fork()
        if not child:
            signal.alarm(20)
            signal.pause()
            os._exit(0)
        children.append(child)
except OSError as error:
    held_if(error.errno in (errno.EAGAIN, errno.EPERM))
    raise
finally:
    for child in children:
        os.kill(child, signal.SIGKILL)
    for child in children:
        os.waitpid(child, 0)
""",
        "start threads without end": """
gate, threads = threading.Event(), []
threading.stack_size(65536)
try:
    for _ in range(LIMITS["tasks"] + 32):
        thread = threading.Thread(target=gate.wait, args=(20,), daemon=True)
        thread.start()
        threads.append(thread)
except RuntimeError:
    raise Held
finally:
    gate.set()
    for thread in threads:
        thread.join()
""",
        "leave zombies without end": """
children = []
try:
    for _ in range(LIMITS["tasks"] + 32):
        child = os.fork()
        if not child:
            os._exit(0)
        children.append(child)
except OSError as error:
    held_if(error.errno in (errno.EAGAIN, errno.EPERM))
    raise
finally:
    for child in children:
        os.waitpid(child, 0)
""",
    },
)

# Each in a separate sandbox, which is narrowed so that it takes little even of a small host. With
# CONTROL the same act stays within the limit.
RUNS = (
    Attack(
        "take more memory than memory_max",
        Class.RESOURCES,
        "limits",
        """
hoard = []
for _ in range(1 if CONTROL else 40):
    hoard.append(bytearray(b"x") * (8 << 20))
    time.sleep(0.02)
""",
        frozenset(("killed:memory", "MemoryError")),
        narrower={"limits": {"memory_max": "128MiB"}},
    ),
    Attack(
        "print more than output_max",
        Class.RESOURCES,
        "runtime",
        "for _ in range(1 if CONTROL else 48):\n    sys.stdout.write('x' * (1 << 16))",
        frozenset(("killed:output", "error:output")),
        narrower={"limits": {"output_max": "1MiB"}},
    ),
    Attack(
        "make the host hold 400,000 JSON values",
        Class.RESOURCES,
        "runtime",
        """
os, stat = sys.modules["os"], sys.modules["stat"]  # which a policy may let no cell import
def is_socket(fd):
    try:
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:
        return False
values = b"{}," * (4 if CONTROL else 400_000)
body = b'{"type":"display_data","content":{"data":{"a/b":[%b0]}}}' % values
frame = memoryview(len(body).to_bytes(4, "big") + body)
wire = next(filter(is_socket, range(3, 256)))
os.set_blocking(wire, True)
while frame:
    frame = frame[os.write(wire, frame):]
time.sleep(0 if CONTROL else 5)
""",
        frozenset(("killed:crashed",)),
    ),
    Attack(
        "run longer than wall_time and mind no interrupt",
        Class.RESOURCES,
        "runtime",
        """
end = time.monotonic() + (0.1 if CONTROL else 4)
while time.monotonic() < end:
    try:
        time.sleep(0.05)
    except BaseException:
        pass
""",
        frozenset(("timeout",)),
        narrower={"limits": {"wall_time": "1s"}},
    ),
)

RESOURCES = (*TAKEN, *SHARED, *MOUNTED, *TASKS)
