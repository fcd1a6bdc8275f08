"""Repair the data directory before a service takes calls: `kill -9` at any moment loses nothing.

Kernels ended with the old broker, its cgroups and mounts are swept by the new one. The store is as
its last transaction left it. What remains is where the store and the disk differ, and what rows say
that only a living process can mean.
"""

import logging

from sbx.aio import Clock, in_thread
from sbx.errors import SbxError
from sbx.runtime.runtime import Runtime
from sbx.store import Store, agent_runs, runs
from sbx.store import sandboxes as rows
from sbx.workspace import DataDirectory

_TIDY_S = 5.0
_log = logging.getLogger(__name__)


async def recover(store: Store, clock: Clock, runtime: Runtime) -> None:
    """Mark interrupted runs, clear the kernels of all rows, remove partial files, and undo
    interrupted commits.

    `GarbageCollector.collect` removes what the store does not know, and finishes deletions.
    """
    interrupted = await runs.mark_interrupted(store, clock.now())
    agents = await agent_runs.mark_interrupted(store, clock.now())
    await store.write(rows.reset)
    if interrupted or agents:
        _log.warning(
            "%d runs, and %d of agents, were cut off by the end of an earlier service",
            interrupted,
            agents,
        )
    await in_thread(_tidy, runtime.data)


def _tidy(data: DataDirectory) -> None:
    for sandbox in data.sandboxes():
        for conversation in data.conversations(sandbox):
            try:
                data.tidy(sandbox, conversation, deadline_s=_TIDY_S)
            except (SbxError, OSError) as error:
                _log.warning("what was half written could not be seen to: %s", error)
