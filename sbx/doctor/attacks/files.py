"""fs: files of the host, read-only mounts, uploads, set-id and device files."""

from sbx.doctor.attacks.attack import Class, attacks

_HIDDEN = ("ENOENT", "ENOTDIR", "EXDEV")
_READ_ONLY = ("EROFS", "ENOENT")
_PINNED = ("EBUSY", "EROFS", "ENOTEMPTY", "EEXIST", "EXDEV", "ENOTDIR", "EISDIR")
_DEVICE = "os.mknod(path := f'{WORK}/attack-node', %s); opens(path); os.unlink(path)"
_PIECES = "HOST['file'].lstrip('/')"

READ = attacks(
    Class.FS,
    "namespaces",
    {
        "read a file of the host by its path": "read(HOST['file'])",
        "list a directory of the host": "os.listdir(os.path.dirname(HOST['file']))",
        "read the password hashes of the host": "read('/etc/shadow')",
        "read the private keys of the host": "os.listdir('/etc/ssh')",
        "list the logs of the host": "os.listdir('/var/log')",
        "list the boot files of the host": "os.listdir('/boot')",
        "list the devices of the host": "os.listdir('/sys/block')",
        "list the sockets of the host": (
            "held_if(set(os.listdir('/run')) <= {'sbx'})"  # with the proxy socket of `networked`
        ),
        "read the host's file system table": "read('/etc/fstab')",
        "read the shell settings of root": "read('/root/.bashrc')",
        "climb above the root": f"read(WORK + '/' + '../' * 64 + {_PIECES})",
        "climb above the root by descriptors": f"""
fd = os.open(WORK, os.O_PATH)
for _ in range(64):
    up = os.open("..", os.O_PATH, dir_fd=fd)
    os.close(fd)
    fd = up
try:
    os.close(os.open({_PIECES}, os.O_RDONLY, dir_fd=fd))
finally:
    os.close(fd)
""",
        "climb by the root of the own process": f"read('/proc/self/root/../../' + {_PIECES})",
        "climb by the directory of the own process": (
            f"read('/proc/self/cwd/' + '../' * 64 + {_PIECES})"
        ),
        "open from a descriptor that was left open": f"""
for name in os.listdir("/proc/self/fd"):
    try:
        os.close(os.open("../" * 32 + {_PIECES}, os.O_RDONLY, dir_fd=int(name)))
        break
    except OSError:
        pass
else:
    raise Held
""",
        "follow a link to a file of the host": """
os.symlink(HOST["file"], path := f"{WORK}/attack-link-{os.getpid()}")
try:
    read(path)
finally:
    os.unlink(path)
""",
        "watch a file of the host": """
fd = result_of(libc.inotify_init1(0o2000000), "inotify_init1")
try:
    result_of(libc.inotify_add_watch(fd, HOST["file"].encode(), 2), "inotify_add_watch")
finally:
    os.close(fd)
""",
    },
    _HIDDEN,
) + attacks(
    Class.FS,
    "landlock",
    {
        "list the root of PID 1": "os.listdir('/proc/1/root')",
        "list the directory of PID 1": "os.listdir('/proc/1/cwd')",
        "read by the root of the bait": f"read(f'/proc/{{bait()}}/root/' + {_PIECES})",
    },
    _HIDDEN,
)

WRITE = attacks(
    Class.FS,
    "mounts",
    {
        "plant a program in /usr/bin": "plant('/usr/bin/sbx-attack')",
        "plant a library in /usr/lib": "plant('/usr/lib/sbx-attack.so')",
        "plant a module in the standard library": (
            "plant(os.path.dirname(os.__file__) + '/sbx_attack.py')"
        ),
        "plant compiled code in the standard library": (
            "plant(os.path.dirname(os.__file__) + '/__pycache__/sbx_attack.pyc')"
        ),
        "plant a .pth next to the packages": "plant(HOST['packages'] + '/sbx_attack.pth')",
        "plant a sitecustomize": "plant(HOST['packages'] + '/sitecustomize.sbx-attack')",
        "open the interpreter for writing": "opens('/proc/self/exe', os.O_WRONLY)",
        "open the C library for writing": (
            "opens(next(line.split()[-1] for line in open('/proc/self/maps') if '/libc.so' in line"
            " or '/libc-' in line), os.O_WRONLY)"
        ),
        "open the accounts for writing": "opens('/etc/passwd', os.O_WRONLY)",
        "plant a preload of the loader": "plant('/etc/ld.so.preload.sbx-attack')",
        "make a directory in the root": "os.mkdir('/sbx-attack'); os.rmdir('/sbx-attack')",
        "plant a device directory": "os.mkdir('/dev/sbx-attack'); os.rmdir('/dev/sbx-attack')",
        "plant a file in the home of another": "plant('/root/.sbx-attack')",
        "write the interpreter by a mapping": """
with open(os.__file__, "rb+") as file:
    mmap.mmap(file.fileno(), 0).close()
""",
        "change the times of a library": "os.utime(os.__file__, ns=((s := os.stat(os.__file__))"
        ".st_atime_ns, s.st_mtime_ns))",
        "change the mode of a library": "os.chmod(os.__file__, os.stat(os.__file__).st_mode)",
        "link a program into the workspace": """
os.link("/usr/bin/env", path := f"{WORK}/attack-env"); os.unlink(path)
""",
        "link a program by its descriptor": """
fd = os.open("/usr/bin/env", os.O_PATH)
path = f"{WORK}/attack-env-fd"
call("linkat", fd, b"", -100, path.encode(), 0x1000)
os.unlink(path)
""",
        "link a program by a magic link": """
fd = os.open("/usr/bin/env", os.O_PATH)
path = f"{WORK}/attack-env-magic"
call("linkat", -100, f"/proc/self/fd/{fd}".encode(), -100, path.encode(), 0x400)
os.unlink(path)
""",
        "link a nameless file into /usr/bin": """
fd = os.open(WORK, os.O_TMPFILE | os.O_RDWR, 0o600)
path = b"/usr/bin/sbx-attack-nameless"
call("linkat", -100, f"/proc/self/fd/{fd}".encode(), -100, path, 0x400)
os.unlink(path)
""",
        "rename a file over a program": """
os.rename(path := own("rename"), "/usr/bin/sbx-attack-renamed")
os.unlink("/usr/bin/sbx-attack-renamed")
""",
    },
    (*_READ_ONLY, "EXDEV", "EBUSY"),
)

PROC_AND_SYS = attacks(
    Class.FS,
    "landlock",
    {
        f"open /proc/sys/{name} for writing": f"opens('/proc/sys/{name}', os.O_WRONLY)"
        for name in (
            "kernel/core_pattern",
            "kernel/modprobe",
            "kernel/randomize_va_space",
            "kernel/ns_last_pid",
            "vm/drop_caches",
            "user/max_user_namespaces",
            "net/ipv4/ip_forward",
            "fs/mqueue/queues_max",
        )
    }
    | {
        "open sysrq-trigger for writing": "opens('/proc/sysrq-trigger', os.O_WRONLY)",
        "register a binary format": "opens('/proc/sys/fs/binfmt_misc/register', os.O_WRONLY)",
        "open the oom score of the own process": "opens('/proc/self/oom_score_adj', os.O_WRONLY)",
        "open the uid map of the own process": "opens('/proc/self/uid_map', os.O_WRONLY)",
        "open setgroups of the own process": "opens('/proc/self/setgroups', os.O_WRONLY)",
        "open the oom score of PID 1": "opens('/proc/1/oom_score_adj', os.O_WRONLY)",
    },
    _READ_ONLY,
) + attacks(
    Class.FS,
    "namespaces",
    {
        "open a release agent of cgroups": (
            "opens((glob.glob('/sys/fs/cgroup/**/release_agent') or"
            " ['/sys/fs/cgroup/cgroup.procs'])[0], os.O_WRONLY)"
        ),
        "open the uevent helper": "opens('/sys/kernel/uevent_helper', os.O_WRONLY)",
        "open the log of Linux": "opens('/dev/kmsg')",
        "open the memory of the machine": "opens('/dev/mem')",
        "open a disk": "opens(([p for p in glob.glob('/dev/[svn][dv][am]*')] or ['/dev/sda'])[0])",
        "open the memory of Linux": "opens('/proc/kcore')",
        "open the tunnel device": "opens('/dev/net/tun', os.O_RDWR)",
        "open the file system device": "opens('/dev/fuse', os.O_RDWR)",
        "open the loop devices": "opens('/dev/loop-control', os.O_RDWR)",
        "open the virtual machines": "opens('/dev/kvm', os.O_RDWR)",
        "open the page fault device": "opens('/dev/userfaultfd', os.O_RDWR)",
        "open the terminal that sbx runs in": "opens('/dev/tty', os.O_RDWR)",
    },
    ("ENOENT", "ENXIO", "EROFS", "ENODEV"),
)

UPLOADS = attacks(
    Class.FS,
    "mounts",
    {
        "write over an upload": "opens(HOST['upload'], os.O_WRONLY)",
        "shorten an upload": "os.truncate(HOST['upload'], os.stat(HOST['upload']).st_size)",
        "add to the uploads": "plant(os.path.dirname(HOST['upload']) + '/attack')",
        "take an upload away": (
            "os.rename(HOST['upload'], HOST['upload'] + '-attack');"
            " os.rename(HOST['upload'] + '-attack', HOST['upload'])"
        ),
        "move an upload to the workspace": (
            "os.rename(HOST['upload'], path := f'{WORK}/attack-moved');"
            " os.rename(path, HOST['upload'])"
        ),
        "change the mode of an upload": "os.chmod(HOST['upload'], 0o644)",
        "give an upload an attribute": (
            "os.setxattr(HOST['upload'], 'user.attack', b'');"
            " os.removexattr(HOST['upload'], 'user.attack')"
        ),
        "open an upload again by its descriptor": (
            "opens(f\"/proc/self/fd/{os.open(HOST['upload'], os.O_RDONLY)}\", os.O_RDWR)"
        ),
        "map an upload to write to it": """
fd = os.open(HOST["upload"], os.O_RDONLY)
libc.mmap.restype = ctypes.c_long
result_of(libc.mmap(None, ctypes.c_size_t(4096), 3, 1, fd, ctypes.c_long(0)), "mmap")
""",
        "link an upload out of its mount": (
            "os.link(HOST['upload'], path := f'{WORK}/attack-upload'); os.unlink(path)"
        ),
        "rename the uploads away": """
os.rename(f"{WORK}/uploads", f"{WORK}/attack-uploads")
os.rename(f"{WORK}/attack-uploads", f"{WORK}/uploads")
""",
        "rename the user's part of the uploads away": """
place = os.path.dirname(HOST["upload"])
os.rename(place, place + "-attack")
os.rename(place + "-attack", place)
""",
        "exchange the uploads with a directory": """
os.mkdir(other := f"{WORK}/attack-other")
try:
    for _ in range(2):
        call("renameat2", -100, f"{WORK}/uploads".encode(), -100, other.encode(), 2)
finally:
    os.rmdir(other)
""",
    },
    _PINNED,
)

_SET_ID = {
    "chmod": "os.chmod(path, 0o4755)",
    "chmod of the group's": "os.chmod(path, 0o2755)",
    "fchmod": "os.fchmod(os.open(path, os.O_RDWR), 0o4755)",
    "fchmodat": "os.chmod(os.path.basename(path), 0o4755, dir_fd=os.open(WORK, os.O_RDONLY))",
    "fchmodat2": "call('fchmodat2', -100, path.encode(), 0o4755, 0)",
    "chmod by a magic link": ("os.chmod(f'/proc/self/fd/{os.open(path, os.O_RDONLY)}', 0o4755)"),
}
_SET_ID_NEW = {
    "open": "os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o4755))",
    "creat": "os.close(result_of(libc.creat(path.encode(), 0o4755), 'creat'))",
    "mknod": "os.mknod(path, 0o104755)",
    "openat2": (
        "os.close(call('openat2', -100, path.encode(), struct.pack('QQQ', 0o301, 0o4755, 0), 24))"
    ),
    "a nameless file": (
        "fd = os.open(WORK, os.O_TMPFILE | os.O_RDWR, 0o4755);"
        " call('linkat', -100, f'/proc/self/fd/{fd}'.encode(), -100, path.encode(), 0x400)"
    ),
}

SET_ID = attacks(
    Class.FS,
    "seccomp",
    {
        f"make a file set-id by {how}": f"""
os.umask(0)
path = own("set-id")
try:
    {code}
finally:
    found = has_mode(path, 0o6000)
held_if(not found)
"""
        for how, code in _SET_ID.items()
    }
    | {
        f"make a set-id file by {how}": f"""
os.umask(0)
path = f"{{WORK}}/attack-new-{{os.getpid()}}"
{code}
held_if(not has_mode(path, 0o6000))
"""
        for how, code in _SET_ID_NEW.items()
    },
    ("ENOENT", "EOPNOTSUPP"),
)

SPECIAL = (
    attacks(
        Class.FS,
        "seccomp",
        {
            "leave a whiteout behind": """
path = own("whiteout")
call("renameat2", -100, path.encode(), -100, path.encode() + b"2", 4)
os.unlink(path); os.unlink(path + "2")
""",
        },
        ("EINVAL",),  # the filter answers as a file system without whiteouts would
    )
    + attacks(
        Class.FS,
        "seccomp",
        {
            "make a character device": _DEVICE % "0o020600, os.makedev(1, 1)",
            "make a block device": _DEVICE % "0o060600, os.makedev(7, 0)",
            "hold up the host by a lease": (
                "fcntl.fcntl(os.open(own('lease'), os.O_RDONLY), 1024, fcntl.F_RDLCK)"
            ),
            "open a file by its handle": (
                "call('open_by_handle_at', os.open(WORK, os.O_RDONLY),"
                " struct.pack('IiQ', 8, 1, 2), 0)"
            ),
            "ask for the handle of a file": (
                "call('name_to_handle_at', -100, WORK.encode(), struct.pack('Ii', 128, 0) +"
                " bytes(128), array.array('i', [0]).tobytes(), 0)"
            ),
            "open by flags that no filter can see": (
                "os.close(call('openat2', -100, b'/', struct.pack('QQQ', 0, 0, 0), 24))"
            ),
            "watch all files of a mount": "os.close(call('fanotify_init', 0x200, 0))",
            "ask who has read which page": (
                "call('cachestat', os.open(os.__file__, os.O_RDONLY), bytes(16), bytes(40), 0)"
            ),
            "leave the root by chroot": "call('chroot', b'/')",
        },
        ("EOPNOTSUPP",),
        lone=True,
    )
    + attacks(
        Class.FS,
        "privileges",
        {
            "give a file capabilities": (
                "os.setxattr(own('caps'), 'security.capability',"
                " struct.pack('<5I', 0x2000001, 1 << 21, 0, 0, 0))"
            ),
            "give a file a trusted attribute": "os.setxattr(own('trusted'), 'trusted.attack', b'')",
            "make a file that cannot be deleted": """
fd = os.open(own("immutable"), os.O_RDONLY)
flags = array.array("l", [0])
fcntl.ioctl(fd, 0x80086601, flags)
flags[0] |= 0x10
fcntl.ioctl(fd, 0x40086602, flags)
flags[0] &= ~0x10
fcntl.ioctl(fd, 0x40086602, flags)
""",
            "give a file to another user": "os.chown(own('gift'), 0, 0)",
            "give a file to a group": "os.chown(own('gift'), -1, 0)",
        },
        ("EINVAL", "EOPNOTSUPP", "ENOTTY"),
    )
)

FILES = (*READ, *WRITE, *PROC_AND_SYS, *UPLOADS, *SET_ID, *SPECIAL)
