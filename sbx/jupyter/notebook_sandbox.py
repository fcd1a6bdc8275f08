"""The sandbox of a notebook and its lifetime, as the policy's `workspace` decides.

    cwd   the sandbox works in the notebook's directory. It ends with the kernel, and the files
          belong to the user
    own   the sandbox has a workspace that sbx made. Its files live as long as the seat is held. If
          the client names the notebook, they are kept for it until the process ends, so that a
          notebook that is shut down and opened again finds them

At most 32 seats wait. After that, the files of the seat that was left longest ago are removed.
"""

import hashlib
import logging
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct, field

from sbx.aio import in_thread, kept_with
from sbx.errors import Denied
from sbx.jupyter.directory import resolve
from sbx.policy import Policy, directories, reference
from sbx.runtime.run.context import Context
from sbx.runtime.runtime import Runtime
from sbx.runtime.sandbox import AsyncSandbox

_log = logging.getLogger(__name__)
_WAITING_MAX = 32


class NotebookSpec(Struct, frozen=True):
    """A request for a seat. `policy`: its name, or its file. `directory`: the directory of the
    notebook. `notebook`: the client's name for it; any text. `private`: paths that no workspace may
    contain."""

    policy: str
    directory: Path
    notebook: str | None = None
    private: tuple[Path, ...] = ()

    @property
    def key(self) -> bytes | None:
        """The key under which its files are found again; of a limited size, and not a path."""
        if not self.notebook:
            return None
        text = repr((self.policy, str(self.directory), self.notebook))
        return hashlib.sha256(text.encode("utf-8", "backslashreplace")).digest()


class NotebookSandbox(Struct, frozen=True, eq=False):
    """A sandbox for one kernel at a time. `directory` is its workspace on the host if that belongs
    to the user. `key` is the name under which the seat waits."""

    box: AsyncSandbox
    directory: Path | None = None
    key: bytes | None = None

    @property
    def context(self) -> Context:
        return self.box.contexts.default

    @property
    def holds_files(self) -> bool:
        """Whether files are removed when the seat is left."""
        return self.directory is None and self.key is None


class NotebookSandboxes(Struct, eq=False):
    """The seats of one runtime, on its event loop."""

    runtime: Runtime
    _waiting: dict[bytes, NotebookSandbox] = field(
        default_factory=dict
    )  # in the order of their `leave`
    _taken: set[bytes] = field(default_factory=set)

    async def take(self, request: NotebookSpec) -> NotebookSandbox:
        """Return a seat that no other notebook holds. The caller must `leave` it.

        Raise like `Runtime.create` and like `directory.resolve`.
        """
        policy, _ = await self.runtime.decide(reference(request.policy))
        if policy.workspace == "cwd":
            return await self._over_directory(policy, request)
        if (key := request.key) is None or key in self._taken:
            return NotebookSandbox(
                await self.runtime.create(policy)
            )  # one kernel at a time has the files
        self._taken.add(key)
        try:
            return await self._waiting_seat(key, policy) or NotebookSandbox(
                await self.runtime.create(policy), key=key
            )
        except BaseException:
            self._taken.discard(key)
            raise

    async def leave(self, seat: NotebookSandbox) -> None:
        """Give a seat back. Remove its files if no notebook could find them again."""
        if seat.key is None:
            await seat.box.close()
            return
        self._taken.discard(seat.key)
        self._waiting[seat.key] = seat
        while len(self._waiting) > _WAITING_MAX:
            await self._waiting.pop(next(iter(self._waiting))).box.close()

    async def _waiting_seat(self, key: bytes, policy: Policy) -> NotebookSandbox | None:
        """Return the seat that waits under this key, if the policy has not changed."""
        seat = self._waiting.pop(key, None)
        if seat is not None and seat.box.policy != policy:
            _log.warning(
                "policy %s has changed: the kept files of a notebook are removed", policy.name
            )
            await seat.box.close()
            return None
        return seat

    async def _over_directory(self, policy: Policy, request: NotebookSpec) -> NotebookSandbox:
        private = (*request.private, *self._private(request.policy))
        directory = await in_thread(resolve, request.directory, private)
        box = await self.runtime.create(policy, workspace=directory)
        try:
            opened = await box.conversation("default").opened()
            if opened.host_directory is None or opened.host_directory.path != directory:
                raise Denied(
                    f"{directory} was replaced by another directory",
                    code="not_granted",
                    hint="put it back, and start the kernel again",
                )
        except BaseException:
            await box.close()
            raise
        return NotebookSandbox(box, directory)

    def _private(self, policy: str) -> Iterator[Path]:
        """Yield the paths that decide about the next kernel, and the data of all sandboxes."""
        settings = self.runtime.settings
        yield from directories(settings.policy_dirs)
        yield settings.environments
        yield self.runtime.data.path
        if isinstance(policy_or_path := reference(policy), Path):
            yield policy_or_path.absolute()


def seats_of(runtime: Runtime) -> NotebookSandboxes:
    """Return the seats of this runtime: the same object as long as it runs."""
    return kept_with(runtime, NotebookSandboxes, runtime)
