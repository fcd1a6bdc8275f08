"""kernel: system calls that no code inside needs. Each was a way out of some sandbox."""

from sbx.doctor.attacks.attack import Class, attacks

# With these arguments, Linux does nothing and answers EBADF, EFAULT or EINVAL, also to root.
_CALLS = {
    "set up a ring of asynchronous calls": "'io_uring_setup', 1, None",
    "enter a ring of asynchronous calls": "'io_uring_enter', -1, 0, 0, 0, None, 0",
    "register with a ring of asynchronous calls": "'io_uring_register', -1, 0, None, 0",
    "load a program into Linux": "'bpf', 5, None, 0",
    "measure the activity of Linux": "'perf_event_open', None, 0, -1, -1, 0",
    "handle page faults of Linux": "'userfaultfd', 0x7FFFFFFF",
    "handle page faults of the own program": "'userfaultfd', 1 | 0o2000000 | 0x40000000",
    "load a module": "'init_module', None, 0, None",
    "load a module from a file": "'finit_module', -1, None, 0",
    "remove a module": "'delete_module', None, 0",
    "load another Linux": "'kexec_load', 0, 17, None, 0xFFFF",
    "load another Linux from a file": "'kexec_file_load', -1, -1, 0, None, 0xFFFF",
    "restart the machine": "'reboot', 0, 0, 0, None",
    "swap to a file": "'swapon', None, 0",
    "stop swapping": "'swapoff', None",
    "write the accounts of processes": "'acct', b'/proc/sbx-attack'",
    "set the clock": "'settimeofday', b'\\xff' * 16, None",
    "set a clock": "'clock_settime', 0, b'\\xff' * 16",
    "tune the clock": "'adjtimex', struct.pack('I', 0x8000) + b'\\xff' * 252",
    "rename the machine": "'sethostname', None, 1",
    "rename the domain of the machine": "'setdomainname', None, 1",
    "reach the ports of the machine": "'iopl', 9",
    "reach one port of the machine": "'ioperm', 0xFFFFFF, 1, 1",
    "change the segments of the processor": "'modify_ldt', 1, None, 0",
    "read the log of Linux": "'syslog', 3, None, 0",
    "ask for a kept directory": "'lookup_dcookie', 1 << 60, None, 0",
    "change quotas": "'quotactl', 0, None, 0, None",
    "change quotas by a descriptor": "'quotactl_fd', -1, 0, 0, None",
    "mount something": "'mount', None, None, None, 0, None",
    "mount a file system in memory": "'mount', b'none', b'/tmp', b'sbx-attack', 0, None",
    "make all mounts shared": "'mount', None, b'/sbx-attack', None, 1 << 20, None",
    "mount the uploads again, to be written": (
        "'mount', None, HOST['upload'].encode(), None, 0x20 | 0x1000, None"
    ),
    "unmount something": "'umount2', b'/sbx-attack', 0",
    "unmount the uploads": "'umount2', HOST['upload'].encode(), 8",
    "exchange the root": "'pivot_root', b'/sbx-attack', b'/sbx-attack'",
    "take a mount apart": "'open_tree', -1, b'', 0",
    "clone a mount": "'open_tree', -1, b'', 1",
    "put a mount elsewhere": "'move_mount', -1, b'', -1, b'', 0",
    "open a file system": "'fsopen', b'sbx-attack', 0",
    "set up a file system": "'fsconfig', -1, 0, None, None, 0",
    "mount an open file system": "'fsmount', -1, 0, 0",
    "pick a file system": "'fspick', -1, b'', 0",
    "change how something is mounted": "'mount_setattr', -1, b'', 0, None, 0",
    "ask about a mount": "'statmount', None, None, 0, 0",
    "list mounts by number": "'listmount', None, None, 0, 0",
    "keep a key": "'add_key', None, None, None, 0, 0",
    "ask for a key": "'request_key', None, None, None, 0",
    "join a ring of keys": "'keyctl', 1, b'sbx-attack'",
    "read the ring of keys of the user": "'keyctl', 0, -4, 0",
    "move pages of a process": "'migrate_pages', -1, 0, None, None",
    "ask where pages of a process lie": "'move_pages', 1, 0, None, None, None, 0",
    "give pages to a pipe": "'vmsplice', -1, None, 0, 0",
    "hide memory from Linux": "'memfd_secret', 0x7FFFFFFF",
    "load a library by the old call": "'uselib', None",
    "ask about a file system by the old call": "'ustat', 0xFFFF, None",
    "ask for file systems by number": "'sysfs', 9, 0, 0",
    "serve files by the old call": "'nfsservctl', 0, None, None",
    "set a value by the old call": "'_sysctl', None",
    "watch accesses of a mount": "'fanotify_mark', -1, 0, 0, 0, None",
    "change the security of the own process": "'lsm_set_self_attr', 0, None, 0, 0",
    "schedule by a deadline": "'sched_setattr', 0, None, 0",
    "take the disk before others": "'ioprio_set', 1, 0, 1 << 13",
}

REFUSED = attacks(
    Class.KERNEL,
    "seccomp",
    {name: f"call({words})" for name, words in _CALLS.items()},
)

OTHERS = attacks(
    Class.KERNEL,
    "seccomp",
    {
        "switch the randomness of addresses off": "call('personality', 0x0040000)",
        "run programs of another system": "call('personality', 0x0000008)",
        "schedule in real time": "call('sched_setscheduler', 0, 1, struct.pack('i', 1))",
        "schedule in real time by turns": "call('sched_setscheduler', 0, 2, struct.pack('i', 1))",
        "put a filter of the own before the other": """
libc.prctl(38, 1, 0, 0, 0)
allow = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000))
filter = struct.pack("HxxxxxxQ", 1, ctypes.addressof(allow))
call("seccomp", 1, 0, filter)
call("unshare", 0)
""",
        "a call that is newer than the filter": "call(463, -1, None, 0, None, None, 0)",
        "a call that is much newer than the filter": "call(468, -1, None, None, 0, 0)",
        "a call of the table for x32": "call(0x40000000 | 39)",
    },
    lone=True,
) + attacks(
    Class.KERNEL,
    "seccomp",
    {
        "a call by the gate of 32 bits": """
if os.uname().machine != "x86_64":
    raise Absent
page = libc.mmap(None, ctypes.c_size_t(4096), 7, 0x22, -1, ctypes.c_long(0))
ctypes.memmove(page, bytes.fromhex("53b814000000cd805bc3"), 10)
ctypes.CFUNCTYPE(ctypes.c_int)(page)()
""",
    },
    ("SIGSYS",),
    lone=True,
)

CALLS = (*REFUSED, *OTHERS)
