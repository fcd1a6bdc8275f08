"""sched(7): the scheduling policy of a process. Neither call needs a privilege."""

import os

_PRIORITY = os.sched_param(0)  # the only priority of these two policies


def batch() -> None:
    """Mark this process as background work: when it wakes up, it preempts no process (SCHED_BATCH).

    Its share of a CPU stays the same. Processes that it starts inherit the policy.
    """
    os.sched_setscheduler(0, os.SCHED_BATCH, _PRIORITY)


def normal() -> None:
    """Return this process to the policy with which processes start (SCHED_OTHER).

    Use it before work that a caller waits for.
    """
    os.sched_setscheduler(0, os.SCHED_OTHER, _PRIORITY)
