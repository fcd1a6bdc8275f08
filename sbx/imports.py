"""Imports of large modules, at their first use."""

import asyncio
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from sbx.aio import in_thread

_imported = set[str]()  # by `import_in_thread`, to the end


@contextmanager
def without_collections() -> Iterator[None]:
    """Collect no garbage during imports: they make 60,000 objects that stay, and collections would
    take 45 ms of the 300 of a first use.

    The first collection afterwards would look at all of these objects. So they become old objects,
    as after a collection. In a service, which keeps frozen objects, they are frozen as well: a full
    collection never looks at them. A cycle that exists then is never collected, but each module is
    imported once.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        is_service = gc.get_freeze_count() > 0
        gc.freeze()
        if not is_service:
            gc.unfreeze()  # into the oldest generation
        gc.enable()


async def import_in_thread(name: str) -> Any:
    """Import a module that is not imported yet, and return it. The tasks that wait to run begin
    before it: the import would slow them."""
    if name not in _imported:
        await asyncio.sleep(0)
        if name in sys.modules:  # perhaps another thread still imports it
            await in_thread(import_module, name)
        else:
            with without_collections():
                await in_thread(import_module, name)
        _imported.add(name)
    return sys.modules[name]
