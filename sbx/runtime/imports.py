"""Imports of large modules, at their first use."""

import asyncio
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

from sbx.aio import in_thread


@contextmanager
def without_collections() -> Iterator[None]:
    """Collect no garbage during imports: they make 60,000 objects that stay, and collections would
    take 45 ms of the 300 of a first use.

    The first collection afterwards would look at all of these objects. So they become old objects,
    as after a collection. A program that keeps frozen objects pays for that collection.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count() == 0:
            gc.freeze()
            gc.unfreeze()  # into the oldest generation
        gc.enable()


async def import_in_thread(name: str) -> None:
    """Import a module that is not imported yet. The tasks that wait to run begin before it: the
    import would slow them."""
    if name not in sys.modules:
        await asyncio.sleep(0)
        with without_collections():
            await in_thread(import_module, name)
