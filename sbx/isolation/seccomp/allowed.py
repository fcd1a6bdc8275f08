"""The names that a filter allows: the operations of calls that do many things, and the system calls
of `allowlist`.

Linux adds operations to ioctl, fcntl and prctl with each version, and no path hook of Landlock sees
many of them: `BTRFS_IOC_SNAP_CREATE` makes a directory without a mkdir, `FS_IOC_SETFLAGS` and
fs-verity lock a file that is open for reading, `PR_SET_MEMORY_MERGE` shares memory without madvise.
So only the operations of these lists exist, in each base filter. An operation of no list fails as
an unknown one does: ENOTTY for ioctl, EINVAL for fcntl and prctl. Programs handle both.

The lists contain the operations in traces of CPython, uvloop, node, npm, the JVM, javac, Go,
cargo, gcc, make, git, pip, numpy, pandas, matplotlib, duckdb, pyarrow, h5py, psutil, sqlite, ssh,
gpg, curl, ip, ifconfig, netstat, coreutils, tar, bash, vim, less, top, tmux and script, and those
of glibc, OpenJDK, V8 and Chromium that a trace on one machine does not show. All numbers are equal
on x86_64 and aarch64.
"""

from typing import NamedTuple

from sbx.isolation.seccomp.rules import AllowSyscalls


class Operation(NamedTuple):
    """One value of the argument that selects the operation of a call."""

    name: str
    number: int
    why: str


# The most frequent ones first: the filter compares in this order.
IOCTL = (
    Operation("TCGETS", 0x5401, "isatty(3), for each stream of nearly every program"),
    Operation("FIONBIO", 0x5421, "node, uvloop, cargo: non-blocking descriptors"),
    Operation("FIOCLEX", 0x5451, "os.set_inheritable of Python, libuv, Rust"),
    Operation("FIONCLEX", 0x5450, "the same, the other way"),
    Operation("FIONREAD", 0x541B, "bytes that can be read: java, tmux, inotify"),
    Operation("FIOASYNC", 0x5452, "signals for a descriptor: event loops of old programs"),
    Operation("TIOCGWINSZ", 0x5413, "the size of the terminal: less, top, vim, git, Python"),
    Operation("TIOCSWINSZ", 0x5414, "sbx resizes the terminals inside; tmux, script"),
    Operation("TCSETS", 0x5402, "tcsetattr(3): vim, node, script"),
    Operation("TCSETSW", 0x5403, "tcsetattr(3): bash, less, readline, getpass"),
    Operation("TCSETSF", 0x5404, "tcsetattr(3): top, script, tty.setraw"),
    Operation("TCGETA", 0x5405, "terminals of programs that predate POSIX"),
    Operation("TCSETA", 0x5406, "the same"),
    Operation("TCSETAW", 0x5407, "the same"),
    Operation("TCSETAF", 0x5408, "the same"),
    Operation("TCGETS2", 0x802C542A, "tcgetattr(3) of glibc 2.42, Go"),
    Operation("TCSETS2", 0x402C542B, "tcsetattr(3) of glibc 2.42"),
    Operation("TCSETSW2", 0x402C542C, "the same"),
    Operation("TCSETSF2", 0x402C542D, "the same"),
    Operation("TCSBRK", 0x5409, "tcdrain(3), tcsendbreak(3)"),
    Operation("TCSBRKP", 0x5425, "tcsendbreak(3) with a duration"),
    Operation("TCXONC", 0x540A, "tcflow(3)"),
    Operation("TCFLSH", 0x540B, "tcflush(3): tmux, readline"),
    Operation("TIOCSCTTY", 0x540E, "login_tty(3), pty.fork of Python, tmux, script"),
    Operation("TIOCNOTTY", 0x5422, "daemons leave their terminal"),
    Operation("TIOCGPGRP", 0x540F, "tcgetpgrp(3): job control of shells"),
    Operation("TIOCSPGRP", 0x5410, "tcsetpgrp(3): job control of shells"),
    Operation("TIOCGSID", 0x5429, "tcgetsid(3)"),
    Operation("TIOCOUTQ", 0x5411, "bytes that are not sent yet, also of a socket (SIOCOUTQ)"),
    Operation("TIOCPKT", 0x5420, "packet mode of a pty: expect, emacs, telnetd"),
    Operation("TIOCGPTN", 0x80045430, "ptsname(3): node, tmux, script"),
    Operation("TIOCSPTLCK", 0x40045431, "unlockpt(3): each new pty"),
    Operation("TIOCGPTPEER", 0x5441, "openpty(3) of glibc"),
    Operation("FICLONE", 0x40049409, "cp, shutil of Python 3.14, libuv: a copy that shares blocks"),
    Operation("FICLONERANGE", 0x4020940D, "the same for a part of a file"),
    Operation("FIDEDUPERANGE", 0xC0189436, "the same for equal parts; writes nothing new"),
    Operation("FS_IOC_GETFLAGS", 0x80086601, "reads the flags of a file: lsattr, the path guard"),
    Operation("SECCOMP_IOCTL_NOTIF_RECV", 0xC0502100, "the path guard takes a call"),
    Operation("SECCOMP_IOCTL_NOTIF_SEND", 0xC0182101, "the path guard answers it"),
    Operation("SECCOMP_IOCTL_NOTIF_ID_VALID", 0x40082102, "the path guard checks its caller"),
    Operation("SECCOMP_IOCTL_NOTIF_ADDFD", 0x40182103, "the path guard gives a descriptor"),
    Operation("SIOCATMARK", 0x8905, "sockatmark(3)"),
    Operation("SIOCGIFNAME", 0x8910, "if_indextoname(3)"),
    Operation("SIOCGIFINDEX", 0x8933, "if_nametoindex(3); java"),
    Operation("SIOCGIFCONF", 0x8912, "the interfaces: java, ifconfig"),
    Operation("SIOCGIFFLAGS", 0x8913, "the same: java, psutil"),
    Operation("SIOCGIFADDR", 0x8915, "the same: ifconfig, Python recipes for an own address"),
    Operation("SIOCGIFDSTADDR", 0x8917, "the same: ifconfig"),
    Operation("SIOCGIFBRDADDR", 0x8919, "the same: java, ifconfig"),
    Operation("SIOCGIFNETMASK", 0x891B, "the same: java, ifconfig"),
    Operation("SIOCGIFMETRIC", 0x891D, "the same: ifconfig"),
    Operation("SIOCGIFMTU", 0x8921, "the same: java, psutil"),
    Operation("SIOCGIFHWADDR", 0x8927, "the same: uuid.getnode, java"),
    Operation("SIOCGIFTXQLEN", 0x8942, "the same: ip"),
    Operation("SIOCGIFMAP", 0x8970, "the same: ifconfig"),
)

FCNTL = (
    Operation("F_GETFL", 3, "every event loop"),
    Operation("F_SETFL", 4, "every event loop"),
    Operation("F_GETFD", 1, "close-on-exec: every program that starts others"),
    Operation("F_SETFD", 2, "the same"),
    Operation("F_DUPFD", 0, "shells"),
    Operation("F_DUPFD_CLOEXEC", 1030, "os.dup of Python, Rust"),
    Operation("F_GETLK", 5, "POSIX locks: SQLite"),
    Operation("F_SETLK", 6, "the same; cargo"),
    Operation("F_SETLKW", 7, "the same"),
    Operation("F_OFD_GETLK", 36, "locks of an open file: browsers, gvfs"),
    Operation("F_OFD_SETLK", 37, "the same"),
    Operation("F_OFD_SETLKW", 38, "the same"),
    Operation("F_SETOWN", 8, "the receiver of SIGIO, which Linux limits to the jail's processes"),
    Operation("F_GETOWN", 9, "the same"),
    Operation("F_SETSIG", 10, "the same"),
    Operation("F_GETSIG", 11, "the same"),
    Operation("F_SETOWN_EX", 15, "the same"),
    Operation("F_GETOWN_EX", 16, "the same"),
    Operation("F_DUPFD_QUERY", 1027, "compares two descriptors of the caller: systemd, libdrm"),
    Operation("F_CREATED_QUERY", 1028, "whether open(2) created the file"),
    Operation("F_SETPIPE_SZ", 1031, "up to the size of a new pipe, see the table"),
    Operation("F_GETPIPE_SZ", 1032, "bash, subprocess of Python"),
    Operation("F_ADD_SEALS", 1033, "memfd of browsers, Arrow, Wayland"),
    Operation("F_GET_SEALS", 1034, "the same"),
)

PRCTL = (
    Operation("PR_SET_NAME", 15, "names of threads: every runtime"),
    Operation("PR_GET_NAME", 16, "the same"),
    Operation("PR_SET_VMA", 0x53564D41, "names of memory: glibc, Go, jemalloc, bash"),
    Operation("PR_CAPBSET_READ", 23, "ip, ps, libcap"),
    Operation("PR_CAPBSET_DROP", 24, "gives up rights: sbx, setpriv, browsers"),
    Operation("PR_CAP_AMBIENT", 47, "the same"),
    Operation("PR_SET_KEEPCAPS", 8, "the same"),
    Operation("PR_GET_KEEPCAPS", 7, "the same"),
    Operation("PR_GET_SECUREBITS", 27, "the same"),
    Operation("PR_SET_NO_NEW_PRIVS", 38, "the same"),
    Operation("PR_GET_NO_NEW_PRIVS", 39, "the same"),
    Operation("PR_SET_SECCOMP", 22, "further filters: browsers, file(1), OpenSSH"),
    Operation("PR_GET_SECCOMP", 21, "the same"),
    Operation("PR_SET_DUMPABLE", 4, "but never to 0, see the table"),
    Operation("PR_GET_DUMPABLE", 3, "browsers, ssh-agent"),
    Operation("PR_SET_PDEATHSIG", 1, "children that end with their parent"),
    Operation("PR_GET_PDEATHSIG", 2, "the same"),
    Operation("PR_SET_CHILD_SUBREAPER", 36, "process supervisors: sbx, tini, joblib"),
    Operation("PR_GET_CHILD_SUBREAPER", 37, "the same"),
    Operation("PR_SET_PTRACER", 0x59616D61, "crash handlers name their debugger (Yama)"),
    Operation("PR_SET_TIMERSLACK", 29, "timers of browsers and audio; delays the caller only"),
    Operation("PR_GET_TIMERSLACK", 30, "the same"),
    Operation("PR_GET_TIMING", 13, "the way of accounting, a constant"),
    Operation("PR_SET_TSC", 26, "forbids the caller the time-stamp counter: rr"),
    Operation("PR_GET_TSC", 25, "the same"),
    Operation("PR_SET_THP_DISABLE", 41, "huge pages of the caller: JVM, databases"),
    Operation("PR_GET_THP_DISABLE", 42, "the same"),
    Operation("PR_GET_SPECULATION_CTRL", 52, "mitigations of the caller: browsers"),
    Operation("PR_SET_SPECULATION_CTRL", 53, "the same"),
    Operation("PR_SET_MDWE", 65, "forbids the caller memory that is writable and executable"),
    Operation("PR_GET_MDWE", 66, "the same"),
    Operation("PR_GET_AUXV", 0x41555856, "the auxiliary vector without /proc"),
    Operation("PR_SVE_SET_VL", 50, "aarch64, vectors: glibc, OpenBLAS"),
    Operation("PR_SVE_GET_VL", 51, "the same; JVM"),
    Operation("PR_SME_SET_VL", 63, "the same"),
    Operation("PR_SME_GET_VL", 64, "the same"),
    Operation("PR_PAC_RESET_KEYS", 54, "aarch64, keys of pointers: JVM"),
    Operation("PR_PAC_SET_ENABLED_KEYS", 60, "the same"),
    Operation("PR_PAC_GET_ENABLED_KEYS", 61, "the same"),
    Operation("PR_SET_TAGGED_ADDR_CTRL", 55, "aarch64, memory tags: glibc"),
    Operation("PR_GET_TAGGED_ADDR_CTRL", 56, "the same"),
    Operation("PR_GET_SHADOW_STACK_STATUS", 74, "aarch64, shadow stacks: glibc"),
    Operation("PR_SET_SHADOW_STACK_STATUS", 75, "the same"),
    Operation("PR_LOCK_SHADOW_STACK_STATUS", 76, "the same"),
)

# Levels of setsockopt: the families and protocols that a jail has. Others belong to modules.
SOCKET_LEVELS = (
    Operation("SOL_SOCKET", 1, "options of every socket"),
    Operation("IPPROTO_TCP", 6, "TCP_NODELAY, keep-alive"),
    Operation("IPPROTO_IP", 0, "type of service, multicast"),
    Operation("IPPROTO_IPV6", 41, "IPV6_V6ONLY"),
    Operation("IPPROTO_UDP", 17, "UDP_SEGMENT of QUIC"),
    Operation("SOL_NETLINK", 270, "ip: strict checks and extended errors"),
)

OPERATIONS = {"ioctl": IOCTL, "fcntl": FCNTL, "prctl": PRCTL, "setsockopt": SOCKET_LEVELS}


def numbers(operations: tuple[Operation, ...]) -> tuple[int, ...]:
    return tuple(operation.number for operation in operations)


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
        "further restrictions: those of sbx after this filter, and filters of browsers",
    ),
)
