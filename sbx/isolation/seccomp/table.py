"""What the filters refuse. A call that is not named here, and was reviewed, is allowed; save by
`allowlist`, which knows only the calls of ALLOWLIST.

`default` is a block list with a ceiling: it must run numpy, pip, node, java, git and gcc, so it
names what is dangerous; and whatever a later Linux adds is ENOSYS until somebody has looked at it
and moved REVIEWED. The errno is part of the design: ENOSYS where libraries then try the older call,
EPERM where nothing legitimate asks, and Linux's own answer for "not built in" where there is one.

Every argument looked at here is an `int` or smaller in Linux, which ignores the high word of the
register; so do the tests. What a pointer leads to cannot be seen by a filter at all: calls that
take their flags from memory (clone3, openat2) can only be refused whole.
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

# The calls that were looked at, newest mseal (Linux 6.10). Numbers in the gaps count as new: Linux
# does fill them (335 became uretprobe in 6.11, on x86_64 only; since 6.14 Linux asks no filter
# about it). x32 calls lie far above.
REVIEWED = {
    "x86_64": ((0, 334), (424, 462)),
    "aarch64": ((0, 243), (260, 294), (424, 462)),
}

# Too new for the libseccomp of Debian 12; since 424 every architecture has the same numbers.
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


# Names of bits and values, as in Linux's own headers; equal on x86_64 and aarch64.
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
    # ── New namespaces and mounts: each gives capabilities over itself, and the bugs behind them ──
    Refuse("unshare setns", EPERM, "a way into a user namespace with all capabilities"),
    Refuse("clone", EPERM, "the same by a flag", (HasAny(0, CLONE_NEW_ANY),)),
    Refuse("clone3", ENOSYS, "flags in memory (CVE-2021-41133 of flatpak); libc falls back"),
    Refuse("mount umount2 pivot_root chroot", EPERM, "the view is bubblewrap's to make"),
    Refuse(
        "open_tree move_mount fsopen fsconfig fsmount fspick mount_setattr",
        ENOSYS,
        "the new mount interface, same reason",
    ),
    Refuse("statmount listmount", ENOSYS, "show mounts outside the view"),
    # ── Other processes ──
    Refuse("ptrace", EPERM, "code in a process with fewer filters, PID 1 first of all"),
    Refuse("process_vm_readv process_vm_writev", EPERM, "the same without stopping it"),
    Refuse("pidfd_getfd kcmp", EPERM, "takes, or compares, descriptors of others"),
    Refuse("process_madvise process_mrelease", EPERM, "act on the memory of others"),
    Refuse(
        "prlimit64",
        EPERM,
        "ends PID 1, or the kernel, by a limit, where Landlock lets no signal pass; one's own stay",
        (NotIn(0, (0,)),),
    ),
    # ── io_uring does whatever is refused here, without making the call ──
    Refuse(
        "io_uring_setup io_uring_enter io_uring_register", ENOSYS, "opens and connects by itself"
    ),
    # ── Set-id files: a jail owns the files it makes, and a person on the host may run them ──
    Refuse("chmod fchmod", EPERM, "makes a file set-id", (HasAny(1, SET_ID_BITS),)),
    Refuse("fchmodat fchmodat2", EPERM, "makes a file set-id", (HasAny(2, SET_ID_BITS),)),
    # Without one of the two flags Linux ignores the mode, and plain callers leave garbage there.
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
    Refuse("openat2", ENOSYS, "its mode is in memory, out of a filter's sight; callers fall back"),
    Refuse("mknod", EPERM, "makes a regular file too, set-id", (HasAny(1, SET_ID_BITS),)),
    Refuse("mknodat", EPERM, "makes a regular file too, set-id", (HasAny(2, SET_ID_BITS),)),
    Refuse("mq_open", EPERM, "creates a file, on another file system", (HasAny(2, SET_ID_BITS),)),
    # mkdir and mkdirat need no rule: Linux drops these bits of their mode. Neither does umask,
    # which only takes bits away; and every other call that sets a mode is one of the above.
    # ── Device nodes: 0:0 (a whiteout) needs no capability, and confuses who copies the tree ──
    Refuse("mknod", EPERM, "device; a FIFO is fine", (In(1, (S_IFCHR, S_IFBLK), S_IFMT),)),
    Refuse("mknodat", EPERM, "device; a FIFO is fine", (In(2, (S_IFCHR, S_IFBLK), S_IFMT),)),
    Refuse("renameat2", EINVAL, "leaves a whiteout device behind", (HasAny(4, RENAME_WHITEOUT),)),
    # ── Files by other ways than a path in the view ──
    Refuse("name_to_handle_at open_by_handle_at", EPERM, "walks out of a mount (shocker)"),
    Refuse("fanotify_init fanotify_mark", EPERM, "sees, and holds up, the opens of others"),
    Refuse(
        "fcntl",
        EPERM,
        "a lease holds up whoever opens the file, on the host, for 45 s",
        (In(1, (F_SETLEASE, F_SETDELEG)),),
    ),
    Refuse("quotactl quotactl_fd", EPERM, "of the host's file system"),
    # ── Sockets: UNIX, INET, INET6 and the netlink that getaddrinfo reads its addresses from ──
    Refuse(
        "socket",
        EAFNOSUPPORT,
        "vsock reaches the hypervisor, AF_ALG and the rare ones load modules of linux",
        (NotIn(0, (AF_UNIX, AF_INET, AF_INET6, AF_NETLINK)),),
    ),
    Refuse(
        "socket",
        EAFNOSUPPORT,
        "other netlinks: audit, netfilter, crypto, uevents",
        (In(0, (AF_NETLINK,)), NotIn(2, (NETLINK_ROUTE,))),
    ),
    Refuse(
        "socket",
        EPERM,
        "raw; and SOCK_PACKET, which linux turns into AF_PACKET; DCCP",
        (
            In(0, (AF_INET, AF_INET6)),
            NotIn(1, (SOCK_STREAM, SOCK_DGRAM, SOCK_SEQPACKET), SOCK_TYPE_MASK),
        ),
    ),
    Refuse(
        "socket",
        EPROTONOSUPPORT,
        "SCTP, MPTCP, L2TP, UDP-Lite, SMC: modules of linux, and no firewall rule thinks of them",
        (In(0, (AF_INET, AF_INET6)), AtLeast(2, IPPROTO_UDP + 1)),
    ),
    Refuse("socketpair", EAFNOSUPPORT, "others than UNIX (TIPC)", (NotIn(0, (AF_UNIX,)),)),
    Refuse(
        "setsockopt",
        ENOPROTOOPT,
        "TLS in linux: loads a module, and has a history of bugs",
        (In(1, (IPPROTO_TCP,)), In(2, (TCP_ULP,))),
    ),
    # ── Terminals ──
    Refuse(
        "ioctl",
        EPERM,
        "types into the terminal outside (CVE-2017-5226, CVE-2023-28100); line disciplines",
        (In(1, (TIOCSTI, TIOCLINUX, TIOCSETD)),),
    ),
    Refuse("vhangup", EPERM, "hangs up the terminal of others"),
    # ── Linux itself: big surfaces, and what only an administrator of the machine needs ──
    Refuse("bpf perf_event_open userfaultfd", EPERM, "the tools of most exploits of linux"),
    Refuse("keyctl add_key request_key", EPERM, "keyrings are not divided by namespace"),
    Refuse("init_module finit_module delete_module", EPERM, "modules of linux"),
    Refuse("create_module query_module get_kernel_syms", EPERM, "modules of linux, the old calls"),
    Refuse("kexec_load kexec_file_load reboot", EPERM, "ends this linux"),
    Refuse("swapon swapoff acct syslog", EPERM, "the machine's, not a program's"),
    Refuse("settimeofday clock_settime clock_adjtime adjtimex", EPERM, "one clock for everybody"),
    Refuse("sethostname setdomainname", EPERM, "the view is bubblewrap's to make"),
    Refuse("iopl ioperm", EPERM, "ports of the hardware"),
    Refuse("modify_ldt", EPERM, "16-bit segments: only exploits and Wine want them"),
    Refuse("lsm_set_self_attr", EPERM, "changes the AppArmor or SELinux label"),
    Refuse(
        "personality",
        EPERM,
        "no ASLR, readable means executable, old address layouts; 0 and the query stay",
        (NotIn(0, (0, 0xFFFFFFFF)),),
    ),
    # ── What is shared with the whole machine: counters, caches, processors ──
    Refuse("io_setup", ENOSYS, "fs.aio-max-nr is one for all: one call takes it from the host"),
    Refuse(
        "fcntl",
        EPERM,
        "a larger pipe: fs.pipe-user-pages-soft counts per user, and 64 of 1 MiB take it all",
        (In(1, (F_SETPIPE_SZ,)), AtLeast(2, PIPE_SIZE + 1)),
    ),
    Refuse("cachestat", EPERM, "shows which pages of shared files others have read"),
    Refuse(
        "madvise",
        EINVAL,
        "merging of equal pages (KSM) tells, by its timing, what others hold in memory",
        (In(2, (MADV_MERGEABLE,)),),
    ),
    Refuse("memfd_secret mlockall", EPERM, "memory that cannot be reclaimed"),
    Refuse("vmsplice", EPERM, "pages of others' pipes; nothing needs it"),
    Refuse("move_pages migrate_pages", EPERM, "moves shared pages about; tells where they are"),
    Refuse("ioprio_set sched_setattr", EPERM, "takes precedence over other jails"),
    # libzmq sets SCHED_OTHER at start, and dies when told EPERM.
    Refuse(
        "sched_setscheduler",
        EPERM,
        "real time starves the rest",
        (In(1, (SCHED_FIFO, SCHED_RR, SCHED_DEADLINE), 0xFFFFFFFF ^ SCHED_RESET_ON_FORK),),
    ),
    Refuse(
        "prctl",
        EPERM,
        "core scheduling: keeps the other hyperthread idle, beyond any cpu limit",
        (In(0, (PR_SCHED_CORE,)),),
    ),
    # ── Dead calls: nobody tests them any more ──
    Refuse("uselib ustat sysfs _sysctl nfsservctl lookup_dcookie vserver", EPERM, "dead"),
    Refuse("remap_file_pages", ENOSYS, "dead, and emulated by code that nothing else uses"),
)

# A socket of a connected pair of datagram sockets can still send to any path that it names.
_NO_DATAGRAM_PAIR = Refuse(
    "socketpair",
    EPERM,
    "a datagram socket sends to any path; pairs of streams and of packets stay",
    (NotIn(1, (SOCK_STREAM, SOCK_SEQPACKET), SOCK_TYPE_MASK),),
)

STRICT = (
    # ── One process, and only the code it came with ──
    Refuse("execve execveat", EPERM, "no other program"),
    Refuse("fork vfork", EPERM, "no other process"),
    Refuse("clone", EPERM, "no other process; threads stay", (HasNone(0, CLONE_THREAD),)),
    Refuse("clone3", ENOSYS, "its flags cannot be seen; libc falls back to clone"),
    Refuse("memfd_create", EPERM, "a program to execute without a file"),
    Refuse("pidfd_open", EPERM, "nothing to hold there"),
    # ── No new ways to talk; accept stays, for who listens already (libzmq aborts without it) ──
    Refuse("socket connect bind listen", EPERM, "no new socket"),
    _NO_DATAGRAM_PAIR,
    Refuse("shmget shmat shmdt shmctl", EPERM, "System V shared memory"),
    Refuse("semget semop semtimedop semctl", EPERM, "System V semaphores"),
    Refuse("msgget msgsnd msgrcv msgctl", EPERM, "System V messages"),
    Refuse(
        "mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr",
        EPERM,
        "POSIX messages",
    ),
    # ── No links: a name says where a file is ──
    Refuse("symlink symlinkat link linkat", EPERM, "no links"),
)

# For the kernel and the commands of a policy with unix_sockets = "none", on top of the others. An
# address is in memory, where no filter can see it: so no socket is made that could have a path.
# PID 1 and its relay go without: the relay connects to the proxy's socket.
NO_UNIX = (
    Refuse("socket", EPERM, "connects to, or is, a Unix socket", (In(0, (AF_UNIX,)),)),
    _NO_DATAGRAM_PAIR,
)

# The process of `sbx serve` that parses HTTP, when its broker is root. It keeps the right to change
# owners and modes, so a set-id file must be out of its reach. openat2 stays, with which files are
# opened: what it makes belongs to the service's own uid, and chown takes set-id bits away.
SERVE = tuple(rule for rule in DEFAULT if rule.calls != "openat2")

# Whoever takes `allowlist` gets DEFAULT, and of what that lets pass only this; the rest is ENOSYS.
# Measured were the calls of IPython with numpy, pandas and matplotlib, of pip, git, gcc, node and
# java (133 names); a trace is a lower bound, so each came with its kin: the older, the newer and
# the vectored form of a call that is here anyway opens nothing new.
ALLOWLIST = (
    AllowSyscalls(
        "brk mmap munmap mremap mprotect madvise msync mincore mlock mlock2 munlock munlockall"
        " memfd_create membarrier pkey_alloc pkey_free pkey_mprotect",
        "memory; the keys are V8's, mincore the JVM's",
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
        "of one file; sync and syncfs write out what all of this linux has",
    ),
    AllowSyscalls(
        "stat fstat lstat newfstatat statx access faccessat faccessat2 readlink readlinkat statfs"
        " fstatfs getdents getdents64 getcwd chdir fchdir",
        "looking about",
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
        "what belongs to a file: tar, cp and shutil.copystat put it back",
    ),
    AllowSyscalls(
        "inotify_init inotify_init1 inotify_add_watch inotify_rm_watch", "node and tail -f watch"
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
        "talking, within the jail's own network",
    ),
    AllowSyscalls(
        "time gettimeofday times clock_gettime clock_getres nanosleep clock_nanosleep alarm"
        " getitimer setitimer timer_create timer_settime timer_gettime timer_getoverrun"
        " timer_delete",
        "time, where the vDSO does not tell it, and timers of one's own",
    ),
    AllowSyscalls(
        "clone fork vfork execve execveat exit exit_group wait4 waitid set_tid_address arch_prctl"
        " prctl prlimit64 getrlimit setrlimit getrusage getpriority setpriority",
        "processes: shells, make and gcc start them by the dozen",
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
        "signals, as far as Landlock lets them reach",
    ),
    AllowSyscalls(
        "getpid getppid gettid getpgid getpgrp setpgid getsid setsid getuid geteuid getgid getegid"
        " getgroups getresuid getresgid setuid setgid setreuid setregid setresuid setresgid capget"
        " personality",
        "who one is; the setters know one id only, which shells and Perl set to itself",
    ),
    AllowSyscalls("uname sysinfo getrandom", "what every start-up asks"),
    AllowSyscalls(
        "seccomp landlock_create_ruleset landlock_add_rule landlock_restrict_self",
        "more walls: ours come on top of this one, and a browser puts up its own",
    ),
)

# In a directory of the host Landlock lets the jail read only. These calls go to the path guard
# (`sbx.guest.path_guard`), which performs them where the table of host executables permits it.
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
        "an access list is a mode by another name; Landlock has no right for it",
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
ONLY = {"allowlist": ALLOWLIST}  # of what its table lets pass
