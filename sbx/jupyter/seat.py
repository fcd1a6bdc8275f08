"""Which sandbox a notebook gets, and for how long: as its policy's `workspace` says.

    cwd   over the directory that the notebook lies in; the sandbox goes with the kernel, the files
          are the user's
    own   with a workspace of ours. Its files are there as long as whoever holds the seat; where the
          client says which notebook it is for, they wait for it until the process ends, so that a
          notebook which is shut down and opened again finds them

At most 32 seats wait; then the files go of the one that was left longest ago.
"""

import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakKeyDictionary

from sbx.errors import Denied
from sbx.isolation.patience import in_thread
from sbx.jupyter.directory import resolve
from sbx.policy import Policy, directories, reference
from sbx.runtime.context import Context
from sbx.runtime.runtime import Runtime
from sbx.runtime.sandbox import AsyncSandbox

_log = logging.getLogger(__name__)
_WAITING_MAX = 32


@dataclass(frozen=True, slots=True)
class Wanted:
    """For whom a seat is. `policy`: its name, or its file. `directory`: where the notebook lies.
    `notebook`: by which name the client knows it; any text. `private`: what no workspace may
    hold."""

    policy: str
    directory: Path
    notebook: str | None = None
    private: tuple[Path, ...] = ()

    @property
    def key(self) -> bytes | None:
        """By which its files are found again; of a bounded size, and no path."""
        if not self.notebook:
            return None
        said = repr((self.policy, str(self.directory), self.notebook))
        return hashlib.sha256(said.encode("utf-8", "backslashreplace")).digest()


@dataclass(frozen=True, slots=True, eq=False)
class Seat:
    """A sandbox for one kernel at a time. `directory` is its workspace on the host, where that is
    the user's own; `key` by which it waits."""

    box: AsyncSandbox
    directory: Path | None = None
    key: bytes | None = None

    @property
    def context(self) -> Context:
        return self.box.contexts.default

    @property
    def holds_files(self) -> bool:
        """Whether files go when it is left."""
        return self.directory is None and self.key is None


@dataclass(slots=True, eq=False)
class Seats:
    """Those of one runtime, on its event loop."""

    runtime: Runtime
    _waiting: dict[bytes, Seat] = field(default_factory=dict)  # the one left longest ago first
    _taken: set[bytes] = field(default_factory=set)

    async def take(self, wanted: Wanted) -> Seat:
        """One that nobody else sits in; the caller leaves it.

        Raises as `Runtime.create`, and as `directory.resolve`.
        """
        policy, _ = await self.runtime.decide(reference(wanted.policy))
        if policy.workspace == "cwd":
            return await self._over_directory(policy, wanted)
        if (key := wanted.key) is None or key in self._taken:
            return Seat(await self.runtime.create(policy))  # one kernel at a time has the files
        self._taken.add(key)
        try:
            return await self._found(key, policy) or Seat(
                await self.runtime.create(policy), key=key
            )
        except BaseException:
            self._taken.discard(key)
            raise

    async def leave(self, seat: Seat) -> None:
        """Nobody's kernel is in it. Files that nobody could find again go."""
        if seat.key is None:
            await seat.box.close()
            return
        self._taken.discard(seat.key)
        self._waiting[seat.key] = seat
        while len(self._waiting) > _WAITING_MAX:
            await self._waiting.pop(next(iter(self._waiting))).box.close()

    async def _found(self, key: bytes, policy: Policy) -> Seat | None:
        """The one that waits, by the policy as it is now."""
        seat = self._waiting.pop(key, None)
        if seat is not None and seat.box.policy != policy:
            _log.warning("policy %s has changed: files of a notebook go with it", policy.name)
            await seat.box.close()
            return None
        return seat

    async def _over_directory(self, policy: Policy, wanted: Wanted) -> Seat:
        private = (*wanted.private, *self._private(wanted.policy))
        directory = await in_thread(resolve, wanted.directory, private)
        box = await self.runtime.create(policy, workspace=directory)
        try:
            opened = await box.conversation("default").opened()
            if opened.host_directory is None or opened.host_directory.path != directory:
                raise Denied(
                    f"{directory} is not what it was: another one took its place",
                    code="not_granted",
                    hint="put it back, and start the kernel again",
                )
        except BaseException:
            await box.close()
            raise
        return Seat(box, directory)

    def _private(self, policy: str) -> Iterator[Path]:
        """What decides about the next kernel: policies and environments; and everybody's files."""
        settings = self.runtime.settings
        yield from directories(settings.policy_dirs)
        yield settings.environments
        yield self.runtime.data.path
        if isinstance(named := reference(policy), Path):
            yield named.absolute()


_of_runtime: WeakKeyDictionary[Runtime, Seats] = WeakKeyDictionary()


def seats_of(runtime: Runtime) -> Seats:
    """The same ones as long as it runs."""
    return _of_runtime.setdefault(runtime, Seats(runtime))
