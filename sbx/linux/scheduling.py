"""sched(7): how urgent a process is. Both calls need no privilege, either way."""

import os

_PRIORITY = os.sched_param(0)  # the only one that these two policies have


def batch() -> None:
    """Work ahead: from now on this process, when it wakes up, preempts nobody (SCHED_BATCH).

    It has its full share of a CPU as before. What it starts inherits that.
    """
    os.sched_setscheduler(0, os.SCHED_BATCH, _PRIORITY)


def normal() -> None:
    """Be one that somebody waits for: the policy that processes start with (SCHED_OTHER)."""
    os.sched_setscheduler(0, os.SCHED_OTHER, _PRIORITY)
