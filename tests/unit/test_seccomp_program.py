"""The shipped programs, run on paper: so the one for the other architecture is tested as well."""

from errno import EAFNOSUPPORT, EINVAL, ENOPROTOOPT, ENOSYS, EPERM, EPROTONOSUPPORT
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
    ("fcntl", 72, 25, (0, 1024), EPERM),
    ("fcntl", 72, 25, (0, 1030), 0),
    ("personality", 135, 92, (0,), 0),
    ("personality", 135, 92, (0xFFFFFFFF,), 0),
    ("personality", 135, 92, (8,), EPERM),
    ("madvise", 28, 233, (0, 0, 4), 0),
    ("madvise", 28, 233, (0, 0, 12), EINVAL),
    ("sched_setscheduler", 144, 119, (0, 3), 0),
    ("sched_setscheduler", 144, 119, (0, 0x40000001), EPERM),
    ("prctl", 157, 167, (15,), 0),
    ("prctl", 157, 167, (62,), EPERM),
]


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

    for call in NEEDED.split():
        number = number_of(call, machine)
        for name in ("default", "allowlist"):
            assert number is None or decide(name, machine, number) == bpf.ALLOW, (name, call)


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
    (62,),
]


@pytest.mark.parametrize("machine", MACHINES)
def test_the_allowlist_is_what_default_leaves_of_it(machine: str) -> None:
    """Every number, also where no name is known: as default says, or it does not exist."""
    pytest.importorskip("pyseccomp", reason="the numbers of the calls come from libseccomp")
    from sbx.isolation.seccomp.compiler import allowed_numbers
    from sbx.isolation.seccomp.table import ALLOWLIST

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
    from sbx.isolation.seccomp.table import ALLOWLIST, DEFAULT, TABLES

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
