"""The shipped programs, run on paper: so the one for the other architecture is tested as well."""

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
from functools import cache

import pytest

from sbx.isolation.seccomp import MACHINES, NAMES, load_filter
from sbx.linux import bpf

ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
I386, ARM = 0x40000003, 0x40000028

BOTH = [(name, machine) for name in NAMES for machine in MACHINES]


@cache
def program_of(name: str, machine: str) -> bpf.Block:
    return bpf.unpack(load_filter(name, machine).program)


def decide(name: str, machine: str, number: int, *arguments: int) -> int:
    return bpf.decide(
        program_of(name, machine),
        architecture=ARCHITECTURE[machine],
        number=number,
        arguments=arguments,
    )


def refusal(errno: int) -> int:
    return bpf.errno_action(errno)


@pytest.mark.parametrize(("name", "machine"), BOTH)
@pytest.mark.parametrize("foreign", [I386, ARM, 0, 0x4000003E])
def test_a_foreign_architecture_is_killed(name: str, machine: str, foreign: int) -> None:
    program = bpf.unpack(load_filter(name, machine).program)
    for number in (0, 20, 462, 1000):
        assert bpf.decide(program, architecture=foreign, number=number) == bpf.KILL_PROCESS


@pytest.mark.parametrize(("name", "machine"), BOTH)
def test_what_nobody_reviewed_does_not_exist(name: str, machine: str) -> None:
    gap = range(335, 424) if machine == "x86_64" else [*range(244, 260), *range(295, 424)]
    x32 = [0x40000000 | n for n in (0, 1, 59, 512, 547)]
    for number in [*gap, *range(463, 700), *x32, 2**31, 2**32 - 1, -1]:
        assert decide(name, machine, number) == refusal(ENOSYS)


# BTRFS_IOC_SUBVOL_CREATE and _V2, SNAP_CREATE and _V2, SNAP_DESTROY, SUBVOL_SETFLAGS; of bcachefs;
# FS_IOC_SETFLAGS and FSSETXATTR, verity and encryption; EXT4_IOC_SWAP_BOOT; FIEMAP; NS_GET_USERNS.
FILE_SYSTEM_IOCTLS = (
    0x5000940E, 0x50009418, 0x50009401, 0x50009417, 0x5000940F, 0x4008941A, 0x4028BC10, 0x4028BC11,
    0x40086602, 0x401C5820, 0x40806685, 0x800C6613, 0xC0506617, 0x6611, 0xC020660B, 0xB701,
)  # fmt: skip

# call, number on x86_64 (None: has none), on aarch64, arguments, errno (0: allowed)
DECISIONS = [
    ("read", 0, 63, (0, 0, 0), 0),
    ("clone3", 435, 435, (), ENOSYS),
    ("openat2", 437, 437, (), ENOSYS),
    ("io_uring_setup", 425, 425, (), ENOSYS),
    ("ptrace", 101, 117, (), EPERM),
    ("mount", 165, 40, (), EPERM),
    ("bpf", 321, 280, (), EPERM),
    ("prlimit64", 302, 261, (0, 7), 0),
    ("prlimit64", 302, 261, (1, 7), EPERM),
    ("cachestat", 451, 451, (), EPERM),
    ("statmount", 457, 457, (), ENOSYS),
    ("mseal", 462, 462, (), 0),
    # pthread_create and fork, and the same into a namespace
    ("clone", 56, 220, (0x3D0F00,), 0),
    ("clone", 56, 220, (0x1200011,), 0),
    ("clone", 56, 220, (0x10000011,), EPERM),
    ("clone", 56, 220, (0x20011,), EPERM),
    # modes
    ("chmod", 90, None, (0, 0o1777), 0),
    ("chmod", 90, None, (0, 0o2755), EPERM),
    ("fchmod", 91, 52, (0, 0o4755), EPERM),
    ("fchmodat", 268, 53, (0, 0, 0o4755), EPERM),
    ("fchmodat2", 452, 452, (0, 0, 0o4755), EPERM),
    ("fchmodat2", 452, 452, (0, 0, 0o755), 0),
    ("openat", 257, 56, (0, 0, 0o100, 0o4755), EPERM),
    ("openat", 257, 56, (0, 0, 0o20200000, 0o4755), EPERM),
    ("openat", 257, 56, (0, 0, 0, 0o4755), 0),
    ("openat", 257, 56, (0, 0, 0o100, 0o644), 0),
    ("creat", 85, None, (0, 0o4755), EPERM),
    ("mknodat", 259, 33, (0, 0, 0o104755), EPERM),
    ("mknodat", 259, 33, (0, 0, 0o020600), EPERM),
    ("mknodat", 259, 33, (0, 0, 0o010600), 0),
    ("renameat2", 316, 276, (0, 0, 0, 0, 4), EINVAL),
    ("renameat2", 316, 276, (0, 0, 0, 0, 2), 0),
    # sockets
    ("socket", 41, 198, (1, 1, 0), 0),
    ("socket", 41, 198, (2, 0o2004002, 17), 0),
    ("socket", 41, 198, (2, 1, 6), 0),
    ("socket", 41, 198, (16, 0o2000003, 0), 0),
    ("socket", 41, 198, (16, 3, 9), EAFNOSUPPORT),
    ("socket", 41, 198, (40, 1, 0), EAFNOSUPPORT),
    ("socket", 41, 198, (2**32 - 1, 1, 0), EAFNOSUPPORT),
    ("socket", 41, 198, (2, 3, 0), EPERM),
    ("socket", 41, 198, (10, 10, 0), EPERM),
    ("socket", 41, 198, (2, 1, 262), EPROTONOSUPPORT),
    ("socket", 41, 198, (2, 1, 2**32 - 1), EPROTONOSUPPORT),
    ("socketpair", 53, 199, (1, 1, 0), 0),
    ("setsockopt", 54, 208, (0, 6, 31), ENOPROTOOPT),
    ("setsockopt", 54, 208, (0, 6, 1), 0),
    ("setsockopt", 54, 208, (0, 1, 31), 0),
    # the rest that looks at arguments
    ("ioctl", 16, 29, (0, 0x5401), 0),
    ("ioctl", 16, 29, (0, 0x5412), EPERM),
    ("ioctl", 16, 29, (0, 0x5412 | 7 << 32), EPERM),
    ("ioctl", 16, 29, (0, 0x8946), EOPNOTSUPP),
    ("ioctl", 16, 29, (0, 0x802C542A), 0),
    ("ioctl", 16, 29, (0, 0x40049409 | 7 << 32), 0),  # FICLONE; Linux ignores the high word
    *[("ioctl", 16, 29, (0, number), ENOTTY) for number in FILE_SYSTEM_IOCTLS],
    *[("ioctl", 16, 29, (0, number | 1 << 32), ENOTTY) for number in FILE_SYSTEM_IOCTLS],
    ("fcntl", 72, 25, (0, 1024), EPERM),
    ("fcntl", 72, 25, (0, 1030), 0),
    ("fcntl", 72, 25, (0, 1026), EINVAL),  # F_NOTIFY
    ("fcntl", 72, 25, (0, 1036 | 1 << 32), EINVAL),  # F_SET_RW_HINT
    ("personality", 135, 92, (0,), 0),
    ("personality", 135, 92, (0xFFFFFFFF,), 0),
    ("personality", 135, 92, (8,), EPERM),
    ("madvise", 28, 233, (0, 0, 4), 0),
    ("madvise", 28, 233, (0, 0, 12), EINVAL),
    ("sched_setscheduler", 144, 119, (0, 3), 0),
    ("sched_setscheduler", 144, 119, (0, 0x40000001), EPERM),
    ("prctl", 157, 167, (15,), 0),
    ("prctl", 157, 167, (62,), EPERM),
    ("prctl", 157, 167, (35,), EINVAL),  # PR_SET_MM
    ("prctl", 157, 167, (67 | 1 << 32, 1), EINVAL),  # PR_SET_MEMORY_MERGE
    ("prctl", 157, 167, (4, 1), 0),
    ("setsockopt", 54, 208, (0, 282, 1), ENOPROTOOPT),  # SOL_TLS
    ("fallocate", 285, 47, (0, 0, 0, 1 << 40), EOPNOTSUPP),
    ("fallocate", 285, 47, (0, 1, 0, 1 << 40), EOPNOTSUPP),  # KEEP_SIZE
    ("fallocate", 285, 47, (0, 0x10 | 1 << 32), EOPNOTSUPP),  # ZERO_RANGE
    ("fallocate", 285, 47, (0, 3), 0),  # PUNCH_HOLE
    ("sendto", 44, 206, (0, 0, 0, 0x4001), EOPNOTSUPP),  # MSG_OOB | MSG_NOSIGNAL
    ("sendto", 44, 206, (0, 0, 0, 0x4000), 0),
    ("recvmsg", 47, 212, (0, 0, 1), EOPNOTSUPP),
]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    ("on_x86_64", "on_aarch64", "arguments"),
    [(157, 167, (4, 0)), (54, 208, (0, 1, 7)), (54, 208, (0, 1, 8 | 1 << 32))],
    ids=["PR_SET_DUMPABLE 0", "SO_SNDBUF", "SO_RCVBUF"],
)
def test_calls_without_effect_return_zero(
    machine: str, on_x86_64: int, on_aarch64: int, arguments: tuple[int, ...]
) -> None:
    number = on_x86_64 if machine == "x86_64" else on_aarch64
    for name in ("default", "allowlist", "serve"):
        assert decide(name, machine, number, *arguments) == refusal(0)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(("call", "on_x86_64", "on_aarch64", "arguments", "errno"), DECISIONS)
def test_default_decides(
    machine: str,
    call: str,
    on_x86_64: int,
    on_aarch64: int | None,
    arguments: tuple[int, ...],
    errno: int,
) -> None:
    number = on_x86_64 if machine == "x86_64" else on_aarch64
    if number is not None:
        expected = refusal(errno) if errno else bpf.ALLOW
        assert decide("default", machine, number, *arguments) == expected


@pytest.mark.parametrize(
    ("machine", "clone", "execve", "socket", "accept"),
    [("x86_64", 56, 59, 41, 43), ("aarch64", 220, 221, 198, 202)],
)
def test_strict_leaves_threads_and_accept(
    machine: str, clone: int, execve: int, socket: int, accept: int
) -> None:
    assert decide("strict", machine, clone, 0x3D0F00) == bpf.ALLOW
    assert decide("strict", machine, accept) == bpf.ALLOW
    assert decide("strict", machine, clone, 0x1200011) == refusal(EPERM)
    assert decide("strict", machine, clone, 17, 0x10000) == refusal(EPERM)
    assert decide("strict", machine, execve) == refusal(EPERM)
    assert decide("strict", machine, socket, 1, 1, 0) == refusal(EPERM)


@pytest.mark.parametrize("machine", MACHINES)
def test_calls_of_a_kernel_with_its_shell_are_allowed(machine: str) -> None:
    """Traced from IPython with numpy and pandas, pip, node, java, git and gcc."""
    pytest.importorskip("pyseccomp", reason="the numbers come from libseccomp")
    from sbx.isolation.seccomp.compiler import number_of

    arguments = {"ioctl": (0, 0x5401), "fcntl": (0, 3), "prctl": (15,), "setsockopt": (0, 1, 2)}
    for call in NEEDED.split():
        number = number_of(call, machine)
        for name in ("default", "allowlist"):
            usual = arguments.get(call, ())
            assert number is None or decide(name, machine, number, *usual) == bpf.ALLOW, (
                name,
                call,
            )


# What an argument can be that a rule looks at: harmless, and of each kind that is refused.
ARGUMENTS = [
    (0,) * 6,
    (2**64 - 1,) * 6,
    (0x10000000,) * 6,
    (1, 0o4755, 0o4755, 0o4755),
    (0, 0o100, 0o100, 0o4755),
    (1, 1024, 12, 0, 4),
    (2, 3, 0),
    (16, 3, 9),
    (0, 6, 31),
    (0, 0x5412),
    (0, 0x5000940E),
    (62,),
    (4, 0),
    (0, 0, 1, 1),
]


@pytest.mark.parametrize("machine", MACHINES)
def test_the_allowlist_is_what_default_leaves_of_it(machine: str) -> None:
    """Every number, also where no name is known: as default says, or it does not exist."""
    pytest.importorskip("pyseccomp", reason="the numbers of the calls come from libseccomp")
    from sbx.isolation.seccomp.allowed import ALLOWLIST
    from sbx.isolation.seccomp.compiler import allowed_numbers

    named = {number for number, _ in allowed_numbers(ALLOWLIST, machine)}
    for number in range(700):
        for arguments in ARGUMENTS:
            by_default = decide("default", machine, number, *arguments)
            answer = decide("allowlist", machine, number, *arguments)
            if number in named:
                assert answer == by_default, number
            else:
                assert answer in {by_default, refusal(ENOSYS)} - {bpf.ALLOW}, number


def test_every_line_of_the_tables_has_its_reason_and_no_call_two_places() -> None:
    from sbx.isolation.seccomp.allowed import ALLOWLIST
    from sbx.isolation.seccomp.table import DEFAULT, TABLES

    refusals = [rule for table in TABLES.values() for rule in table]
    said = [(one.calls, one.why) for one in refusals] + [(one.calls, one.why) for one in ALLOWLIST]
    for calls, why in said:
        assert why.strip(), calls
        assert calls == " ".join(calls.split()) != ""
    listed = [call for group in ALLOWLIST for call in group.calls.split()]
    refused = {call for rule in DEFAULT if not rule.when for call in rule.calls.split()}
    assert len(listed) == len(set(listed))
    assert not refused & set(listed)


NEEDED = """
accept accept4 access arch_prctl bind brk chdir chmod clock_getres clock_nanosleep clone close
close_range connect copy_file_range creat dup dup2 epoll_create1 epoll_ctl epoll_pwait epoll_wait
eventfd2 execve exit exit_group faccessat2 fadvise64 fchdir fchmod fchmodat fchown fcntl fdatasync
flock fstat fstatfs fsync ftruncate futex get_mempolicy getcwd getdents64 getegid geteuid getgid
getgroups getpeername getpgid getpgrp getpid getppid getrandom getrusage getsockname getsockopt
gettid getuid getxattr inotify_add_watch inotify_init1 inotify_rm_watch ioctl kill lgetxattr link
listen listxattr lseek madvise mbind membarrier mkdir mmap mprotect mremap munmap newfstatat open
openat pipe2 pkey_alloc pkey_mprotect poll prctl pread64 preadv2 prlimit64 pselect6 pwrite64 read
readlink recvfrom recvmsg rename renameat2 rmdir rseq rt_sigaction rt_sigprocmask rt_sigreturn
sched_getaffinity sched_getparam sched_getscheduler sched_setscheduler sched_yield sendfile sendmmsg
sendto set_mempolicy set_robust_list set_tid_address setitimer setsid setsockopt shutdown
sigaltstack signalfd4 splice statfs statx symlink symlinkat sysinfo timerfd_create umask uname
unlink unlinkat utimensat vfork wait4 waitid write writev
"""
