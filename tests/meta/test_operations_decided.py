"""Each allowed call that selects its operation by an argument has a rule on that argument.

Linux adds operations to such calls, which no other wall may see: an ioctl of btrfs made `.git`.
"""

import pytest

from sbx.isolation.seccomp.rules import NotIn

# A call that selects its operation by a number, and the argument that holds it.
MULTIPLEXERS = {
    "ioctl": 1, "fcntl": 1, "prctl": 0, "arch_prctl": 0, "bpf": 0, "keyctl": 0, "quotactl": 0,
    "quotactl_fd": 1, "setsockopt": 1, "getsockopt": 1, "fsconfig": 1, "futex": 1, "madvise": 2,
    "process_madvise": 3, "fallocate": 1, "seccomp": 0, "shmctl": 1, "semctl": 2, "msgctl": 1,
    "epoll_ctl": 1, "ptrace": 0, "membarrier": 0, "personality": 0, "syslog": 0, "reboot": 2,
    "swapon": 1, "sysfs": 0, "landlock_add_rule": 1, "io_uring_register": 1, "kcmp": 2,
    "perf_event_open": 4, "move_mount": 4, "lsm_set_self_attr": 0, "lsm_get_self_attr": 0,
    "modify_ldt": 0, "mbind": 2, "set_mempolicy": 0, "fadvise64": 3, "rseq": 2, "ioprio_set": 0,
    "clock_adjtime": 0, "adjtimex": 0, "socket": 0, "socketpair": 0, "sched_setscheduler": 1,
    "prlimit64": 0, "mremap": 3, "flock": 1, "cachestat": 3, "map_shadow_stack": 2,
}  # fmt: skip

# Allowed with operations that no list decides, because each of them acts on the caller's own
# memory, threads, sockets or objects of its own IPC namespace only.
EXCEPTIONS = {
    "arch_prctl": "registers and CPU features of the caller",
    "getsockopt": "reads; the families are limited by socket",
    "futex": "waits and wakes by the caller's memory",
    "madvise": "the caller's memory; a rule refuses MERGEABLE, and no other advice crosses jails",
    "seccomp": "further filters, which only restrict",
    "shmctl": "objects of the own IPC namespace; SHM_LOCK is bounded by RLIMIT_MEMLOCK",
    "semctl": "objects of the own IPC namespace",
    "msgctl": "objects of the own IPC namespace",
    "epoll_ctl": "descriptors of the caller",
    "membarrier": "threads of the caller; the global command delays only the caller",
    "landlock_add_rule": "further rules, which only restrict",
    "lsm_get_self_attr": "reads the caller's label",
    "mbind": "places the caller's memory",
    "set_mempolicy": "places the caller's memory",
    "fadvise64": "advice about one open file",
    "rseq": "registers memory of the caller",
    "sched_setscheduler": "a rule refuses the real-time policies; the others yield to all",
    "mremap": "the caller's memory",
    "flock": "a lock of an open file; docs/security.md names its effect on the host",
    "map_shadow_stack": "memory of the caller",
}


@pytest.mark.parametrize("name", ["default", "allowlist", "serve"])
def test_every_operation_code_is_decided_by_a_list(name: str) -> None:
    pytest.importorskip("pyseccomp", reason="the numbers of the calls come from libseccomp")
    from sbx.isolation.seccomp.table import TABLES

    decided, refused = set(), set()
    for rule in TABLES[name]:
        for call in rule.calls.split():
            if not rule.when:
                refused.add(call)
            elif any(
                isinstance(test, NotIn) and test.argument == MULTIPLEXERS.get(call)
                for test in rule.when[:1]
            ):
                decided.add(call)
    if name == "serve":  # it has the rights of the service, which reserves space on the disk
        decided.add("fallocate")
    open_codes = MULTIPLEXERS.keys() - refused - decided
    assert open_codes == EXCEPTIONS.keys()


def test_table_of_multiplexers_names_each_call_with_a_rule_on_a_code() -> None:
    from sbx.isolation.seccomp.allowed import OPERATIONS

    for call, operations in OPERATIONS.items():
        assert call in MULTIPLEXERS
        numbers = [operation.number for operation in operations]
        assert len(numbers) == len(set(numbers)), call
        assert all(operation.why for operation in operations), call
