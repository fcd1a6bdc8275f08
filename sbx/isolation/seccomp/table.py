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
    EOPNOTSUPP,
    EPERM,
    EPROTONOSUPPORT,
)

from sbx.isolation.seccomp.rules import (
    AllowSyscalls,
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
AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16
SOCK_TYPE_MASK = 0xF
SOCK_STREAM, SOCK_DGRAM, SOCK_RAW, SOCK_SEQPACKET = 1, 2, 3, 5
IPPROTO_TCP, IPPROTO_UDP = 6, 17
NETLINK_ROUTE = 0
TCP_ULP = 31
SCHED_FIFO, SCHED_RR, SCHED_DEADLINE = 1, 2, 6
SCHED_RESET_ON_FORK = 0x40000000
MADV_MERGEABLE = 12
PR_SCHED_CORE = 62

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
    # ── Terminals ──
    Refuse(
        "ioctl",
        EPERM,
        "input for a terminal of the host (CVE-2017-5226, CVE-2023-28100); line disciplines",
        (In(1, (TIOCSTI, TIOCLINUX, TIOCSETD)),),
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

# In addition to the others, for the kernel and the commands of a policy with unix_sockets = "none".
# A filter cannot read an address in memory, so this one refuses each socket that can have a path.
# PID 1 and its relay do not get it: the relay connects to the socket of the proxy.
NO_UNIX = (
    Refuse("socket", EPERM, "makes a Unix socket", (In(0, (AF_UNIX,)),)),
    _NO_DATAGRAM_PAIR,
)

# For the process of `sbx serve` that parses HTTP, if its broker is root. It may change owners and
# modes, so it must not make set-id files. openat2 stays, because sbx opens files with it: its new
# files belong to the uid of the service, and chown removes set-id bits.
SERVE = tuple(rule for rule in DEFAULT if rule.calls != "openat2")

# `allowlist` refuses the calls of DEFAULT, and each call that is not listed here (ENOSYS). The list
# has the 133 calls that IPython with numpy, pandas and matplotlib, and pip, git, gcc, node and java
# made in a trace. A trace is incomplete, so the list also has the older, the newer and the vectored
# form of each call, which allow nothing else.
ALLOWLIST = (
    AllowSyscalls(
        "brk mmap munmap mremap mprotect madvise msync mincore mlock mlock2 munlock munlockall"
        " memfd_create membarrier pkey_alloc pkey_free pkey_mprotect",
        "memory; V8 uses the keys, and the JVM uses mincore",
    ),
    AllowSyscalls("get_mempolicy set_mempolicy mbind", "OpenBLAS and the JVM place their memory"),
    AllowSyscalls(
        "open openat creat close close_range dup dup2 dup3 fcntl flock ioctl umask",
        "descriptors",
    ),
    AllowSyscalls(
        "read readv pread64 preadv preadv2 write writev pwrite64 pwritev pwritev2 lseek sendfile"
        " copy_file_range splice tee truncate ftruncate fallocate",
        "bytes",
    ),
    AllowSyscalls(
        "fsync fdatasync sync_file_range fadvise64 readahead",
        "for one file; sync and syncfs write the data of the whole host",
    ),
    AllowSyscalls(
        "stat fstat lstat newfstatat statx access faccessat faccessat2 readlink readlinkat statfs"
        " fstatfs getdents getdents64 getcwd chdir fchdir",
        "the attributes of files, and directories",
    ),
    AllowSyscalls(
        "mkdir mkdirat rmdir unlink unlinkat rename renameat renameat2 link linkat symlink"
        " symlinkat mknod mknodat",
        "names; mknod makes FIFOs",
    ),
    AllowSyscalls(
        "chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat utime utimes utimensat"
        " futimesat getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr setxattr lsetxattr"
        " fsetxattr removexattr lremovexattr fremovexattr",
        "metadata, which tar, cp and shutil.copystat restore",
    ),
    AllowSyscalls(
        "inotify_init inotify_init1 inotify_add_watch inotify_rm_watch", "node and tail -f use it"
    ),
    AllowSyscalls(
        "poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait"
        " epoll_pwait2 eventfd eventfd2 signalfd signalfd4 timerfd_create timerfd_settime"
        " timerfd_gettime pause",
        "waiting: every event loop",
    ),
    AllowSyscalls(
        "pipe pipe2 socket socketpair connect bind listen accept accept4 shutdown sendto recvfrom"
        " sendmsg recvmsg sendmmsg recvmmsg getsockname getpeername getsockopt setsockopt",
        "communication, in the network of the jail",
    ),
    AllowSyscalls(
        "time gettimeofday times clock_gettime clock_getres nanosleep clock_nanosleep alarm"
        " getitimer setitimer timer_create timer_settime timer_gettime timer_getoverrun"
        " timer_delete",
        "the time, if the vDSO does not provide it, and timers of the caller",
    ),
    AllowSyscalls(
        "clone fork vfork execve execveat exit exit_group wait4 waitid set_tid_address arch_prctl"
        " prctl prlimit64 getrlimit setrlimit getrusage getpriority setpriority",
        "processes: shells, make and gcc start many",
    ),
    AllowSyscalls(
        "futex futex_waitv futex_wake futex_wait futex_requeue set_robust_list get_robust_list rseq"
        " sched_yield getcpu sched_getaffinity sched_setaffinity sched_getparam sched_setparam"
        " sched_getscheduler sched_setscheduler sched_get_priority_max sched_get_priority_min"
        " sched_rr_get_interval restart_syscall",
        "threads",
    ),
    AllowSyscalls(
        "kill tkill tgkill pidfd_open pidfd_send_signal rt_sigaction rt_sigprocmask rt_sigreturn"
        " rt_sigpending rt_sigtimedwait rt_sigsuspend rt_sigqueueinfo rt_tgsigqueueinfo"
        " sigaltstack",
        "signals, which Landlock limits to the jail",
    ),
    AllowSyscalls(
        "getpid getppid gettid getpgid getpgrp setpgid getsid setsid getuid geteuid getgid getegid"
        " getgroups getresuid getresgid setuid setgid setreuid setregid setresuid setresgid capget"
        " personality",
        "ids; shells and Perl set the one id that the jail has",
    ),
    AllowSyscalls("uname sysinfo getrandom", "every program calls them at its start"),
    AllowSyscalls(
        "seccomp landlock_create_ruleset landlock_add_rule landlock_restrict_self",
        "further restrictions: those of sbx after this filter, and those of browsers",
    ),
)

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
    "no_unix": NO_UNIX,
}
ONLY = {"allowlist": ALLOWLIST}  # of the calls that its table allows
