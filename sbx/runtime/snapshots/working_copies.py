"""The copies of a project for one conversation: one with the kernel, and spare ones for commands
that run at the same time. A spare copy exists for one transaction."""

from collections.abc import Callable

from sbx import errors
from sbx.aio import run_to_completion
from sbx.protocol.changes import TRIALS_MAX
from sbx.runtime.run.context import Context
from sbx.runtime.snapshots.working_copy import Transaction, WorkingCopy


class WorkingCopies:
    """`make(is_spare)` returns a new copy."""

    def __init__(self, make: Callable[[bool], WorkingCopy]) -> None:
        self._make = make
        self._main = make(False)
        self._spare: list[WorkingCopy] = []
        self.python = self._main.python

    @property
    def contexts(self) -> list[Context]:
        return [context for copy in self._open for context in copy.contexts]

    @property
    def busy(self) -> bool:
        return any(copy.busy for copy in self._open)

    async def begin(self, *, needs_kernel: bool) -> Transaction:
        """Lend a copy to the caller: the one with the kernel if the call needs it or the copy is
        free, otherwise a spare one. If there can be no further copy, wait for the first.

        Raise as `WorkingCopy.begin`.
        """
        if not needs_kernel and self._main.lent and len(self._open) < TRIALS_MAX:
            spare = self._make(True)
            self._spare.append(spare)
            try:
                return await spare.begin()
            except BaseException as error:
                await run_to_completion(spare.close())
                if not isinstance(error, errors.TooLarge | errors.Unavailable):
                    raise
        return await self._main.begin()

    async def close(self) -> None:
        """End all runs on the copies, and remove them finally."""
        for copy in self._open:
            await copy.close()

    @property
    def _open(self) -> list[WorkingCopy]:
        self._spare = [copy for copy in self._spare if not copy.closed]
        return [*self._spare, self._main]
