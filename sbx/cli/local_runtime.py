"""The runtime of a command that runs code in this process."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sbx.runtime.runtime import Runtime


@asynccontextmanager
async def local_runtime(policy: str, workspace: Path | None = None) -> "AsyncIterator[Runtime]":
    """Yield a runtime. Its broker and its zygote start while this process imports it.

    The zygote is that of a sandbox with this policy and workspace. The runtime takes others, too.
    """
    from sbx.isolation.broker.spawned import label_of, spawn_broker

    with closing(spawn_broker(label_of(policy, workspace))) as broker:
        from sbx.runtime.runtime import Runtime
        from sbx.runtime.settings import Settings

        async with Runtime(Settings(), broker=broker) as runtime:
            yield runtime
