"""The system calls that each filter refuses. Each filter but `allowlist` allows all other reviewed
calls; `allowlist` allows only those of ALLOWLIST.

`default` is a block list, because it must run numpy, pip, node, java, git and gcc. It refuses the
dangerous calls, and each call that a later Linux adds (ENOSYS) until a person has reviewed it and
extended REVIEWED. The errno is part of the design: ENOSYS makes libraries try an older call, EPERM
is for calls that no ordinary program needs, and some rules use the errno of a Linux without that
feature.

Every argument that a rule compares is an `int` or smaller in Linux, which ignores the high half of
the register. The rules ignore it, too. A filter cannot read memory, so a call that takes its flags
from memory (clone3, openat2) is refused with all flags.
"""

from errno import (
    EAFNOSUPPORT,
    EINVAL,
    ENOPROTOOPT,
    ENOSYS,
    ENOTTY,
    EOPNOTSUPP,
    EPERM,
    EPROTONOSUPPORT,
)

from sbx.isolation.seccomp.allowed import (
    ALLOWLIST,
    FCNTL,
    IOCTL,
    PRCTL,
    SOCKET_LEVELS,
    numbers,
)
from sbx.isolation.seccomp.rules import (
    AtLeast,
    HasAny,
    HasNone,
    In,
    Notify,
    NotIn,
    Refuse,
)

# The numbers of the reviewed calls; the newest is mseal (Linux 6.10). Numbers in the gaps count as
# new, because Linux fills them: 335 became uretprobe in 6.11, on x86_64 only, and since 6.14 it
# passes no filter. The numbers of x32 calls are far higher.
REVIEWED = {
    "x86_64": ((0, 334), (424, 462)),
    "aarch64": ((0, 243), (260, 294), (424, 462)),
}

# Not in the libseccomp of Debian 12. From 424 on, all architectures have the same numbers.
NEW_NUMBERS = {
    "cachestat": 451,
    "fchmodat2": 452,
    "futex_wake": 454,
    "futex_wait": 455,
    "futex_requeue": 456,
    "statmount": 457,
    "listmount": 458,
    "lsm_set_self_attr": 460,
}


# Bits and values of Linux's headers. They are equal on x86_64 and aarch64.
CLONE_THREAD = 0x00010000
CLONE_NEW_ANY = 0x7E020000  # NS CGROUP UTS IPC USER PID NET; TIME is unknown to clone(2)
O_CREAT, O_TMPFILE_BIT = 0o100, 0o20000000
O_WRITES = 0o1 | 0o2 | O_CREAT | 0o1000 | O_TMPFILE_BIT  # O_WRONLY O_RDWR O_TRUNC and these
SET_ID_BITS = 0o6000
S_IFMT, S_IFCHR, S_IFBLK = 0o170000, 0o020000, 0o060000
RENAME_WHITEOUT = 4
F_SETLEASE, F_SETDELEG, F_SETPIPE_SZ = 1024, 1040, 1031
PIPE_SIZE = 65536  # of a new pipe
TIOCSTI, TIOCLINUX, TIOCSETD = 0x5412, 0x541C, 0x5423
SIOCETHTOOL = 0x8946
AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16
SOCK_TYPE_MASK = 0xF
SOCK_STREAM, SOCK_DGRAM, SOCK_RAW, SOCK_SEQPACKET = 1, 2, 3, 5
IPPROTO_TCP, IPPROTO_UDP = 6, 17
NETLINK_ROUTE = 0
TCP_ULP = 31
SCHED_FIFO, SCHED_RR, SCHED_DEADLINE = 1, 2, 6
SCHED_RESET_ON_FORK = 0x40000000
MADV_MERGEABLE = 12
PR_SET_DUMPABLE, PR_SCHED_CORE = 4, 62
PUNCH_HOLE = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE is required with it
SOL_SOCKET, SO_SNDBUF, SO_RCVBUF = 1, 7, 8
MSG_OOB = 1
NO_EFFECT = 0  # as an errno: the call returns 0, and Linux does nothing

DEFAULT = (
    # ── New namespaces and mounts: they give capabilities, which make bugs of Linux reachable ──
    Refuse("unshare setns", EPERM, "enters a user namespace with all capabilities"),
    Refuse("clone", EPERM, "the same, by a flag", (HasAny(0, CLONE_NEW_ANY),)),
    Refuse("clone3", ENOSYS, "has its flags in memory (CVE-2021-41133); libc falls back"),
    Refuse("mount umount2 pivot_root chroot", EPERM, "changes the mounts that bubblewrap made"),
    Refuse(
        "open_tree move_mount fsopen fsconfig fsmount fspick mount_setattr",
        ENOSYS,
        "the new mount interface, for the same reason",
    ),
    Refuse("statmount listmount", ENOSYS, "shows mounts of the host"),
    # ── Other processes ──
    Refuse("ptrace", EPERM, "runs code in a process with fewer filters, such as PID 1"),
    Refuse("process_vm_readv process_vm_writev", EPERM, "the same, without stopping the process"),
    Refuse("pidfd_getfd kcmp", EPERM, "takes or compares descriptors of other processes"),
    Refuse("process_madvise process_mrelease", EPERM, "acts on the memory of other processes"),
    Refuse(
        "prlimit64",
        EPERM,
        "a limit ends PID 1 or the kernel, which Landlock keeps signals from; pid 0 is the caller",
        (NotIn(0, (0,)),),
    ),
    # sftp-server and browsers end if they get an error.
    Refuse(
        "prctl",
        NO_EFFECT,
        "hides the files and the memory of a process from the watchers of a host without cgroups",
        (In(0, (PR_SET_DUMPABLE,)), In(1, (0,))),
    ),
    # ── io_uring performs refused operations without a system call ──
    Refuse("io_uring_setup io_uring_enter io_uring_register", ENOSYS, "opens files and connects"),
    # ── Set-id files: the user of the jail owns them, and a person on the host may run them ──
    Refuse("chmod fchmod", EPERM, "makes a file set-id", (HasAny(1, SET_ID_BITS),)),
    Refuse("fchmodat fchmodat2", EPERM, "makes a file set-id", (HasAny(2, SET_ID_BITS),)),
    # Without one of the two flags Linux ignores the mode, and many callers do not set it.
    Refuse(
        "open",
        EPERM,
        "creates a file set-id",
        (HasAny(1, O_CREAT | O_TMPFILE_BIT), HasAny(2, SET_ID_BITS)),
    ),
    Refuse(
        "openat",
        EPERM,
        "creates a file set-id",
        (HasAny(2, O_CREAT | O_TMPFILE_BIT), HasAny(3, SET_ID_BITS)),
    ),
    Refuse("creat", EPERM, "creates a file set-id", (HasAny(1, SET_ID_BITS),)),
    Refuse("openat2", ENOSYS, "has its mode in memory; callers fall back"),
    Refuse("mknod", EPERM, "creates a set-id file, too", (HasAny(1, SET_ID_BITS),)),
    Refuse("mknodat", EPERM, "creates a set-id file, too", (HasAny(2, SET_ID_BITS),)),
    Refuse("mq_open", EPERM, "the same, on another file system", (HasAny(2, SET_ID_BITS),)),
    # mkdir and mkdirat need no rule, because Linux drops these bits of their mode. Nor does umask,
    # which only removes bits. Each other call that sets a mode has a rule above.
    # ── Device nodes: 0:0 (a whiteout) needs no capability, and breaks copies of the tree ──
    Refuse("mknod", EPERM, "a device; FIFOs stay", (In(1, (S_IFCHR, S_IFBLK), S_IFMT),)),
    Refuse("mknodat", EPERM, "a device; FIFOs stay", (In(2, (S_IFCHR, S_IFBLK), S_IFMT),)),
    Refuse("renameat2", EINVAL, "leaves a whiteout device", (HasAny(4, RENAME_WHITEOUT),)),
    # ── Files that are not reached by a path inside ──
    Refuse("name_to_handle_at open_by_handle_at", EPERM, "opens files outside of a mount"),
    Refuse("fanotify_init fanotify_mark", EPERM, "observes and delays the opens of others"),
    Refuse(
        "fcntl",
        EPERM,
        "a lease delays a process of the host that opens the file, by 45 s",
        (In(1, (F_SETLEASE, F_SETDELEG)),),
    ),
    Refuse(
        "fallocate",
        EOPNOTSUPP,
        "reserves 50 GB before a watcher of the disk looks; libc writes instead, at the pace of the"
        " disk; holes free space, and stay",
        (NotIn(1, (PUNCH_HOLE,)),),
    ),
    Refuse("quotactl quotactl_fd", EPERM, "acts on the file system of the host"),
    # ── Sockets: allowed are UNIX, INET, INET6, and the netlink that getaddrinfo needs ──
    Refuse(
        "socket",
        EAFNOSUPPORT,
        "vsock reaches the hypervisor; AF_ALG and rare families load modules of Linux",
        (NotIn(0, (AF_UNIX, AF_INET, AF_INET6, AF_NETLINK)),),
    ),
    Refuse(
        "socket",
        EAFNOSUPPORT,
        "the other netlinks: audit, netfilter, crypto, uevents",
        (In(0, (AF_NETLINK,)), NotIn(2, (NETLINK_ROUTE,))),
    ),
    Refuse(
        "socket",
        EPERM,
        "raw sockets; SOCK_PACKET, which Linux treats as AF_PACKET; DCCP",
        (
            In(0, (AF_INET, AF_INET6)),
            NotIn(1, (SOCK_STREAM, SOCK_DGRAM, SOCK_SEQPACKET), SOCK_TYPE_MASK),
        ),
    ),
    Refuse(
        "socket",
        EPROTONOSUPPORT,
        "SCTP, MPTCP, L2TP, UDP-Lite, SMC: modules of Linux that firewall rules rarely cover",
        (In(0, (AF_INET, AF_INET6)), AtLeast(2, IPPROTO_UDP + 1)),
    ),
    Refuse("socketpair", EAFNOSUPPORT, "other families than UNIX (TIPC)", (NotIn(0, (AF_UNIX,)),)),
    Refuse(
        "setsockopt",
        ENOPROTOOPT,
        "TLS of Linux: it loads a module, and has had many bugs",
        (In(1, (IPPROTO_TCP,)), In(2, (TCP_ULP,))),
    ),
    Refuse(
        "setsockopt",
        ENOPROTOOPT,
        "options of families that no socket here has",
        (NotIn(1, numbers(SOCKET_LEVELS)),),
    ),
    # Linux itself reduces larger values without an error, so callers expect no certain size.
    Refuse(
        "setsockopt",
        NO_EFFECT,
        "larger buffers, which cgroup v1 does not count: up to rmem_max, for each socket",
        (In(1, (SOL_SOCKET,)), In(2, (SO_SNDBUF, SO_RCVBUF))),
    ),
    Refuse(
        "sendto recvfrom sendmmsg recvmmsg",
        EOPNOTSUPP,
        "urgent data: bugs in Unix sockets (CVE-2025-38236); for TCP, the abort of FTP uses it",
        (HasAny(3, MSG_OOB),),
    ),
    Refuse("sendmsg recvmsg", EOPNOTSUPP, "the same", (HasAny(2, MSG_OOB),)),
    # ── Terminals ──
    Refuse(
        "ioctl",
        EPERM,
        "input for a terminal of the host (CVE-2017-5226, CVE-2023-28100); line disciplines",
        (In(1, (TIOCSTI, TIOCLINUX, TIOCSETD)),),
    ),
    # psutil expects this errno of `lo`.
    Refuse("ioctl", EOPNOTSUPP, "settings of network devices", (In(1, (SIOCETHTOOL,)),)),
    Refuse(
        "ioctl",
        ENOTTY,
        "acts on files and devices where neither Landlock nor the path guard sees it: btrfs makes"
        " directories, and inode flags, fs-verity and encryption lock files",
        (NotIn(1, numbers(IOCTL)),),
    ),
    Refuse("vhangup", EPERM, "hangs up a terminal"),
    # ── Linux itself: large attack surfaces, and calls for administrators of the machine ──
    Refuse("bpf perf_event_open userfaultfd", EPERM, "used by most exploits of Linux"),
    Refuse("keyctl add_key request_key", EPERM, "namespaces do not separate keyrings"),
    Refuse("init_module finit_module delete_module", EPERM, "modules of Linux"),
    Refuse("create_module query_module get_kernel_syms", EPERM, "the same, by old calls"),
    Refuse("kexec_load kexec_file_load reboot", EPERM, "ends or replaces Linux"),
    Refuse("swapon swapoff acct syslog", EPERM, "acts on the whole machine"),
    Refuse("settimeofday clock_settime clock_adjtime adjtimex", EPERM, "sets the host's clock"),
    Refuse("sethostname setdomainname", EPERM, "changes a name that bubblewrap set"),
    Refuse("iopl ioperm", EPERM, "ports of the hardware"),
    Refuse("modify_ldt", EPERM, "16-bit segments, which only exploits and Wine use"),
    Refuse("lsm_set_self_attr", EPERM, "changes the AppArmor or SELinux label"),
    Refuse(
        "personality",
        EPERM,
        "turns off ASLR, makes readable pages executable; 0 and the query stay",
        (NotIn(0, (0, 0xFFFFFFFF)),),
    ),
    # ── Resources that the whole machine shares: counters, caches, processors ──
    Refuse("io_setup", ENOSYS, "one call uses up fs.aio-max-nr, which counts the whole host"),
    Refuse(
        "fcntl",
        EPERM,
        "a larger pipe: 64 of 1 MiB use up fs.pipe-user-pages-soft, which counts per user",
        (In(1, (F_SETPIPE_SZ,)), AtLeast(2, PIPE_SIZE + 1)),
    ),
    Refuse("fcntl", EINVAL, "operations that no program needs", (NotIn(1, numbers(FCNTL)),)),
    Refuse("cachestat", EPERM, "shows which pages of shared files other processes have read"),
    Refuse(
        "madvise",
        EINVAL,
        "the timing of merged pages (KSM) shows the memory of other processes",
        (In(2, (MADV_MERGEABLE,)),),
    ),
    Refuse("memfd_secret mlockall", EPERM, "memory that cannot be reclaimed"),
    Refuse("vmsplice", EPERM, "shares pages with pipes of others; no program needs it"),
    Refuse("move_pages migrate_pages", EPERM, "moves shared pages, and shows their places"),
    Refuse("ioprio_set sched_setattr", EPERM, "gets precedence over other jails"),
    # libzmq sets SCHED_OTHER at its start, and aborts on EPERM.
    Refuse(
        "sched_setscheduler",
        EPERM,
        "real-time processes starve all others",
        (In(1, (SCHED_FIFO, SCHED_RR, SCHED_DEADLINE), 0xFFFFFFFF ^ SCHED_RESET_ON_FORK),),
    ),
    Refuse(
        "prctl",
        EPERM,
        "core scheduling keeps the other hyperthread idle, which no CPU limit counts",
        (In(0, (PR_SCHED_CORE,)),),
    ),
    Refuse(
        "prctl",
        EINVAL,
        "operations that no program needs; PR_SET_MEMORY_MERGE is madvise(MADV_MERGEABLE)",
        (NotIn(0, numbers(PRCTL)),),
    ),
    # ── Obsolete calls, which are rarely tested ──
    Refuse("uselib ustat sysfs _sysctl nfsservctl lookup_dcookie vserver", EPERM, "obsolete"),
    Refuse("remap_file_pages", ENOSYS, "obsolete, and emulated by code without another use"),
)

# A socket of a connected pair of datagram sockets can send to any path.
_NO_DATAGRAM_PAIR = Refuse(
    "socketpair",
    EPERM,
    "a datagram socket sends to any path; pairs of stream and packet sockets stay",
    (NotIn(1, (SOCK_STREAM, SOCK_SEQPACKET), SOCK_TYPE_MASK),),
)

STRICT = (
    # ── One process, which executes no other program ──
    Refuse("execve execveat", EPERM, "executes another program"),
    Refuse("fork vfork", EPERM, "starts a process"),
    Refuse("clone", EPERM, "starts a process; threads stay", (HasNone(0, CLONE_THREAD),)),
    Refuse("clone3", ENOSYS, "has its flags in memory; libc falls back to clone"),
    Refuse("memfd_create", EPERM, "makes a program without a file"),
    Refuse("pidfd_open", EPERM, "has no use with one process"),
    # ── No new communication; accept stays, because libzmq aborts without it ──
    Refuse("socket connect bind listen", EPERM, "makes or connects a socket"),
    _NO_DATAGRAM_PAIR,
    Refuse("shmget shmat shmdt shmctl", EPERM, "System V shared memory"),
    Refuse("semget semop semtimedop semctl", EPERM, "System V semaphores"),
    Refuse("msgget msgsnd msgrcv msgctl", EPERM, "System V messages"),
    Refuse(
        "mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr",
        EPERM,
        "POSIX messages",
    ),
    # ── No links: the path of a file is its place ──
    Refuse("symlink symlinkat link linkat", EPERM, "makes a link"),
)

# In addition to the others, for the kernel and the commands, after their last Landlock domain. sbx
# needs these calls after the filter of the jail.
LAST = (
    Refuse(
        "landlock_create_ruleset landlock_add_rule landlock_restrict_self",
        EOPNOTSUPP,
        "a rule keeps a file that was removed, which no watcher of the disk sees, and any number of"
        " rules is memory of Linux; programs go on as without Landlock",
    ),
)

# The same for a policy with unix_sockets = "none".
# A filter cannot read an address in memory, so this one refuses each socket that can have a path.
# PID 1 and its relay do not get it: the relay connects to the socket of the proxy.
NO_UNIX = (
    *LAST,
    Refuse("socket", EPERM, "makes a Unix socket", (In(0, (AF_UNIX,)),)),
    _NO_DATAGRAM_PAIR,
)

# For the process of `sbx serve` that parses HTTP, if its broker is root. It may change owners and
# modes, so it must not make set-id files. openat2 stays, because sbx opens files with it: its new
# files belong to the uid of the service, and chown removes set-id bits. fallocate keeps the reserve
# of the service.
SERVE = tuple(rule for rule in DEFAULT if rule.calls not in ("openat2", "fallocate"))

# In a directory of the host, Landlock only allows reading. These calls go to the path guard
# (`sbx.guest.path_guard`), which performs them if the table of host executables permits it.
GUARD: tuple[Refuse | Notify, ...] = (
    Notify("open", "opens for writing, or creates", (HasAny(1, O_WRITES),)),
    Notify("openat", "opens for writing, or creates", (HasAny(2, O_WRITES),)),
    Notify("creat truncate", "writes to a file by its path"),
    Notify("mkdir mkdirat mknod mknodat symlink symlinkat link linkat", "creates a name"),
    Notify("rename renameat renameat2", "creates a name and removes another one"),
    Notify("unlink unlinkat rmdir", "removes a name"),
    Notify("chmod fchmod fchmodat fchmodat2", "makes a file executable, a hook for example"),
    Refuse(
        "setxattr lsetxattr fsetxattr removexattr lremovexattr fremovexattr",
        EOPNOTSUPP,
        "an access list changes the mode, and Landlock has no right for it",
    ),
)

TABLES: dict[str, tuple[Refuse | Notify, ...]] = {
    "default": DEFAULT,
    "strict": STRICT,
    "serve": SERVE,
    "allowlist": DEFAULT,
    "guard": GUARD,
    "last": LAST,
    "no_unix": NO_UNIX,
}
ONLY = {"allowlist": ALLOWLIST}  # of the calls that its table allows
