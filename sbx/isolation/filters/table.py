"""What the filters refuse. A call that is not named here, and was reviewed, is allowed.

`default` is a block list with a ceiling: it must run numpy, pip, node, java, git and gcc, so it
names what is dangerous; and whatever a later linux adds is ENOSYS until somebody has looked at it
and moved REVIEWED. The errno is part of the design: ENOSYS where libraries then try the older call,
EPERM where nothing legitimate asks, and linux's own answer for "not built in" where there is one.

Every argument looked at here is an `int` or smaller in linux, which ignores the high word of the
register; so do the tests. What a pointer leads to cannot be seen by a filter at all: calls that
take their flags from memory (clone3, openat2) can only be refused whole.
"""

from dataclasses import dataclass
from errno import EAFNOSUPPORT, EINVAL, ENOPROTOOPT, ENOSYS, EPERM, EPROTONOSUPPORT

# The calls that were looked at, newest mseal (linux 6.10). Numbers in the gaps count as new: linux
# does fill them (335 became uretprobe in 6.11, on x86_64 only; since 6.14 linux asks no filter
# about it). x32 calls lie far above.
REVIEWED = {
    "x86_64": ((0, 334), (424, 462)),
    "aarch64": ((0, 243), (260, 294), (424, 462)),
}

# Too new for the libseccomp of Debian 12; since 424 every architecture has the same numbers.
NEW_NUMBERS = {
    "cachestat": 451,
    "fchmodat2": 452,
    "statmount": 457,
    "listmount": 458,
    "lsm_set_self_attr": 460,
}


@dataclass(frozen=True)
class HasAny:
    """The argument has at least one of these bits."""

    argument: int
    bits: int


@dataclass(frozen=True)
class HasNone:
    """The argument has none of these bits."""

    argument: int
    bits: int


@dataclass(frozen=True)
class In:
    """The argument, as far as `mask` shows it, is one of these."""

    argument: int
    values: tuple[int, ...]
    mask: int = 0xFFFFFFFF


@dataclass(frozen=True)
class NotIn:
    """The argument, as far as `mask` shows it, is none of these."""

    argument: int
    values: tuple[int, ...]
    mask: int = 0xFFFFFFFF


@dataclass(frozen=True)
class AtLeast:
    """The argument, taken as unsigned, is this or more."""

    argument: int
    value: int


Test = HasAny | HasNone | In | NotIn | AtLeast


@dataclass(frozen=True)
class Refuse:
    """These calls (names separated by blanks) fail with `errno` when all tests hold."""

    calls: str
    errno: int
    why: str
    when: tuple[Test, ...] = ()


# Names of bits and values, as in linux's own headers; equal on x86_64 and aarch64.
CLONE_THREAD = 0x00010000
CLONE_NEW_ANY = 0x7E020000  # NS CGROUP UTS IPC USER PID NET; TIME is unknown to clone(2)
O_CREAT, O_TMPFILE_BIT = 0o100, 0o20000000
SET_ID_BITS = 0o6000
S_IFMT, S_IFCHR, S_IFBLK = 0o170000, 0o020000, 0o060000
RENAME_WHITEOUT = 4
F_SETLEASE, F_SETDELEG = 1024, 1040
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
    # Without one of the two flags linux ignores the mode, and plain callers leave garbage there.
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
    # mkdir and mkdirat need no rule: linux drops these bits of their mode. Neither does umask,
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

# The process of `sbx serve` that parses HTTP, when its broker is root. It keeps the right to change
# owners and modes, so a set-id file must be out of its reach. openat2 stays, with which files are
# opened: what it makes belongs to the service's own uid, and chown takes set-id bits away.
SERVE = tuple(rule for rule in DEFAULT if rule.calls != "openat2")

TABLES = {"default": DEFAULT, "strict": STRICT, "serve": SERVE}
