"""Each kind of object that Linux keeps for the code inside has a limit with a name."""

import platform
import re
from contextlib import suppress

import pytest

from sbx.isolation.seccomp.rules import Refuse
from sbx.isolation.seccomp.table import REVIEWED, TABLES

# The calls that make an object which Linux keeps, by the limit of its number or memory. "cgroup,
# watcher": the two ways to keep `memory_max`; escape/test_uncounted.py
# tries the second one.
BOUNDS = {
    "the memory of the process": "brk mmap mremap",
    "descriptors: RLIMIT_NOFILE, and tasks_max processes": (
        "open openat openat2 creat dup dup2 dup3 eventfd eventfd2 signalfd signalfd4"
        " timerfd_create pidfd_open inotify_init inotify_init1 accept accept4"
    ),
    "inotify: 16 instances and 8,192 watches, test_shared_counters": "inotify_add_watch",
    "epoll: the watcher of descriptors, test_shared_counters": (
        "epoll_create epoll_create1 epoll_ctl epoll_ctl_old"
    ),
    "pipes: F_SETPIPE_SZ is refused; the watcher of descriptors": "pipe pipe2",
    "memory_max by cgroup, watcher: memfds": "memfd_create",
    "memory_max by cgroup, watcher: System V": "shmget shmat msgget msgsnd semget semop semtimedop",
    "RLIMIT_MSGQUEUE: test_limits": "mq_open mq_timedsend",
    "memory_max by cgroup, watcher: queues of sockets": "socket socketpair sendto sendmsg sendmmsg",
    "RLIMIT_SIGPENDING: test_limits": (
        "timer_create rt_sigqueueinfo rt_tgsigqueueinfo pidfd_send_signal"
    ),
    "tasks_max: test_limits": "clone clone3 fork vfork",
    "workspace_files, nr_inodes: test_disk, test_uncounted": (
        "mkdir mkdirat mknod mknodat symlink symlinkat link linkat setxattr lsetxattr fsetxattr"
    ),
    "small and one for each process, descriptor or lock; cgroup only": (
        "flock sched_setaffinity set_mempolicy set_mempolicy_home_node mbind setitimer alarm"
        " set_robust_list membarrier pkey_alloc getitimer landlock_create_ruleset"
        " landlock_add_rule seccomp rseq epoll_wait_old"
    ),
}
_MAKERS = re.compile(
    r"creat|_init|setup|^socket|^pipe|memfd|eventfd|signalfd|^mq_open|(shm|msg|sem|key)get|_alloc"
    r"|^add_key|^fork|^v?fork|^clone|^mk|link(at)?$|setxattr|^open|^dup|^accept|^flock|_add_|"
    r"mmap|mremap|brk|sendm|sendto|sigqueue|timerfd|userfault|fanotify|perf_event|^bpf|fsopen"
)


def test_each_call_that_makes_an_object_names_its_limit() -> None:
    """System V, memfds in flight and names of a tmpfs had no limit, because no list of kinds was
    ever compared with the calls."""
    pyseccomp = pytest.importorskip("pyseccomp")
    machine = platform.machine()
    architecture = {"x86_64": pyseccomp.Arch.X86_64, "aarch64": pyseccomp.Arch.AARCH64}[machine]
    names = set()
    for first, last in REVIEWED[machine]:
        for number in range(first, last + 1):
            with suppress(ValueError):  # newer than libseccomp
                names.add(pyseccomp.resolve_syscall(architecture, number).decode())
    refused = {
        name
        for rule in TABLES["default"]
        if isinstance(rule, Refuse) and not rule.when
        for name in rule.calls.split()
    }
    bounded = {name for calls in BOUNDS.values() for name in calls.split()}
    harmless = {
        "mq_unlink",
        "timerfd_gettime",
        "timerfd_settime",
        "unlink",
        "unlinkat",
        "readlink",
        "readlinkat",
        "open_by_handle_at",
    }
    makers = {name for name in names if _MAKERS.search(name)} - refused - harmless
    assert makers - bounded == set()
