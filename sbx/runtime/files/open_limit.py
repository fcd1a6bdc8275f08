"""How many conversations of a service hold their files open at once. An open one takes three
descriptors or more, of which a process has a bounded number, and whoever touches many must not
leave none for others: the least recently used one that nobody uses is closed, and opens again by
itself at its next use."""

import resource
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sbx.runtime.conversation import Conversation

_EACH = 4  # descriptors: of its files, of its uploads, of what is on its way in, of what is shared
_PART = 4  # of all descriptors, at most one in so many
_LEAST = 16
_MOST = 4096


class OpenFilesLimit:
    """`most` conversations; more only while each of them has a kernel or a file on its way, whose
    numbers have limits of their own. `most` None: what the limit of descriptors leaves room for."""

    def __init__(self, most: int | None = None) -> None:
        self.most = _by_descriptors() if most is None else most
        self._open: dict[Conversation, None] = {}  # the least recently used first

    def __len__(self) -> int:
        return len(self._open)

    def used(self, one: "Conversation") -> None:
        """Its files are open, and about to be used."""
        self._open.pop(one, None)
        self._open[one] = None
        if len(self._open) > self.most:
            self._close_others(one)

    def closed(self, one: "Conversation") -> None:
        self._open.pop(one, None)

    def _close_others(self, one: "Conversation") -> None:
        for other in list(self._open):
            if len(self._open) <= self.most:
                return
            if other is not one and other.close_if_idle():
                self._open.pop(other, None)


def _by_descriptors() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST
    return max(_LEAST, min(_MOST, soft // (_EACH * _PART)))
