"""What jupyter_client asks to start a kernel, wherever the kernelspec names the provisioner `sbx`.

    pre_launch      the policy, the directory, the sandbox: whatever may be refused is refused here;
                    then the sockets are bound, and the ports that linux gave written to the file
    launch_kernel   the kernel, from the pool
    cleanup         the sockets; the seat as well, unless files would go with it

Everything happens on the loop of the runtime that this process shares; jupyter_client may ask from
another loop each time. There is no process to be signalled: SIGINT interrupts, what would end a
process ends the kernel.
"""

import asyncio
import os
import signal
import weakref
from collections.abc import AsyncIterator, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from jupyter_client.connect import KernelConnectionInfo, port_names
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.provisioning.provisioner_base import KernelProvisionerBase
from jupyter_core.paths import jupyter_runtime_dir
from jupyter_core.utils import ensure_dir_exists
from traitlets import Unicode

from sbx import errors
from sbx.jupyter import DEFAULT_POLICY

if TYPE_CHECKING:  # it takes half a second to import: in a thread, with the first kernel
    from sbx.jupyter.connection import Connection
    from sbx.jupyter.notebook import Notebook
    from sbx.jupyter.seat import Wanted
    from sbx.runtime.blocking import SharedRuntime

T = TypeVar("T")
_GONE_S = 1.0  # a kernel that was asked to shut down is gone in some ms
_ENDING = {signal.SIGTERM, signal.SIGKILL, signal.SIGHUP, signal.SIGQUIT, signal.SIGABRT}


class SandboxProvisioner(KernelProvisionerBase):
    """See the module. What it raises is one of `sbx.errors`, and its text has the hint."""

    policy = Unicode(DEFAULT_POLICY, help="The policy of its kernels: a name, or a file.").tag(
        config=True
    )

    parent: Any  # the kernel's manager
    _shared: "SharedRuntime | None" = None
    _notebook: "Notebook | None" = None
    _ended: "Future[int] | None" = None
    _directory: Path | None = None

    @property
    def has_process(self) -> bool:
        """Whether there is a kernel, or the end of one that nobody has waited for."""
        return self._ended is not None

    async def poll(self) -> int | None:
        """None while it lives, else its exit code: 0 where that was asked for, 137 where not."""
        if self._ended is None:
            return 0
        return self._ended.result() if self._ended.done() else None

    async def wait(self) -> int | None:
        """Wait for its end, which is told and not looked for; then there is no process any more."""
        ended = self._ended
        if ended is None:
            return 0
        code = await asyncio.wrap_future(ended)
        if self._ended is ended:  # and not that of a kernel which was started meanwhile
            self._ended = None
        return code

    async def send_signal(self, signum: int) -> None:
        """SIGINT interrupts the cell that runs, an ending signal ends the kernel; others, which a
        process would get to know, do nothing: the one that they are meant for is inside."""
        if self._notebook is None or self._ended is None:
            return
        with suppress(errors.Closed):  # the runtime ended, and the kernel with it
            if signum == signal.SIGINT:
                await self._there(self._notebook.interrupt())
            elif signum in _ENDING:
                await self._there(self._notebook.stop())
            elif signum:
                self.log.warning("sbx sends no signal %d into a sandbox", signum)

    async def kill(self, restart: bool = False) -> None:
        """End the kernel, whatever it does. Files stay."""
        await self.send_signal(signal.SIGKILL)

    async def terminate(self, restart: bool = False) -> None:
        """The same: from outside there is one way to end a jail."""
        await self.send_signal(signal.SIGTERM)

    async def shutdown_requested(self, restart: bool = False) -> None:
        """The request is on its way to the bridge. jupyter_client looks for the end ten times a
        second: with the first look it is there."""
        if self._ended is not None and not self._ended.done():
            await asyncio.wait([asyncio.wrap_future(self._ended)], timeout=_GONE_S)

    async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:
        """Take the seat, bind the sockets and write the connection file.

        Raises what says that this kernel is not to be had: NotFound, PolicyError, CannotEnforce,
        Denied `directory_forbidden`, `connection_in_workspace` and their like.
        """
        kwargs.pop("transport_encryption", None)  # which the manager knows by now
        extra = kwargs.pop("extra_arguments", [])
        env = kwargs.get("env") or {}
        async with self._begun():
            notebook = await self._opened()
            wanted = _wanted(self.policy, self.kernel_spec, kwargs.get("cwd"), env)
            seat = await self._there(notebook.sit(wanted))
            self._directory = seat.directory
            await self._bind(notebook, self.parent, env)
        self.connection_info = self.parent.get_connection_info()
        command = self.parent.format_kernel_cmd(extra_arguments=extra)
        return await super().pre_launch(cmd=command, **kwargs)

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> KernelConnectionInfo:
        """Start the kernel; `cmd` is for those who know no provisioner. Raises what says why none
        could be started."""
        assert self._notebook is not None
        async with self._begun():
            self._ended = await self._there(self._notebook.start())
        return self.connection_info

    async def cleanup(self, restart: bool = False) -> None:
        """Let go of the sockets, but for a restart; a workspace of ours stays to be found again."""
        if not restart:
            await self._leave()

    def resolve_path(self, path: str) -> str | None:
        """The file of the host that code inside means, in the notebook's own directory."""
        if self._directory is None:
            return None
        inside = os.path.normpath(os.path.join("/workspace", path))
        found = self._directory / os.path.relpath(inside, "/workspace")
        real = Path(os.path.realpath(found))
        return str(real) if real.is_relative_to(self._directory) and real.exists() else None

    # -- on the runtime's loop ------------------------------------------------------------------

    async def _opened(self) -> "Notebook":
        if self._notebook is not None and self._shared is not None and self._shared.alive:
            return self._notebook
        shared, notebook = await asyncio.to_thread(_new_notebook)
        end = weakref.finalize(self, _let_go, shared, notebook)
        end.atexit = False  # the runtime ends by itself then, with all that is on its loop
        self._shared, self._notebook = shared, notebook
        return notebook

    @asynccontextmanager
    async def _begun(self) -> AsyncIterator[None]:
        """A start, of which nothing is left where it fails but a workspace of ours."""
        try:
            yield
        except errors.SbxError as error:
            await self._leave()
            raise _as_shown(error) from None
        except BaseException:
            await self._leave()
            raise

    async def _there(self, work: Coroutine[Any, Any, T]) -> T:
        assert self._shared is not None
        return await self._shared.awaited(work)

    async def _leave(self) -> None:
        if self._notebook is not None:
            with suppress(errors.Closed):
                await self._there(self._notebook.leave())

    # -- what the manager says ------------------------------------------------------------------

    async def _bind(self, notebook: "Notebook", manager: Any, env: Mapping[str, str]) -> None:
        """tcp: what is not fixed is bound first and named after, so nobody can take a port in
        between. ipc: jupyter_client chooses the names, which lie in a directory of its own."""
        session = {"jupyter_session": env.get("JPY_SESSION_NAME", "")}
        _prepare(manager, self.kernel_id)
        if manager.transport == "ipc":
            manager.write_connection_file(**session)
        bound = await self._there(notebook.bind(_asked(manager)))
        if manager.transport == "tcp":
            manager._record_random_port_names()  # before they are known: a restart may want others
            for name in port_names:
                setattr(manager, name, getattr(bound, name))
            manager.write_connection_file(**session)
        if self._directory is not None:
            _check_apart(self._directory, manager, bound)


def _new_notebook() -> "tuple[SharedRuntime, Notebook]":
    """In a thread: importing the runtime and starting it take a second, once."""
    from sbx.jupyter.notebook import Notebook
    from sbx.jupyter.seat import seats_of
    from sbx.runtime.blocking import shared_runtime

    shared = shared_runtime()
    return shared, Notebook(seats_of(shared.runtime))


def _let_go(shared: "SharedRuntime", notebook: "Notebook") -> None:
    """Of what a provisioner held that nobody holds any more; whichever thread collects it."""
    shared.begin(notebook.close())


def _wanted(policy: str, spec: KernelSpec, cwd: Any, env: Mapping[str, str]) -> "Wanted":
    from sbx.jupyter.seat import Wanted

    notebook = env.get("JPY_SESSION_NAME")
    if notebook == os.environ.get("JPY_SESSION_NAME"):
        notebook = None  # that in which this very program was started
    private = (Path(spec.resource_dir),) if spec.resource_dir else ()
    return Wanted(policy, Path(cwd or os.getcwd()), notebook, private)


def _prepare(manager: Any, kernel_id: str) -> None:
    """Keys where the client wants the channels encrypted, and a place for sockets of ipc: the
    default is the current directory, which may be the workspace."""
    if manager.transport == "ipc" and manager.ip == "kernel-ipc":
        ensure_dir_exists(jupyter_runtime_dir(), 0o700)
        # Not the whole id: the path of a socket has 107 characters at most.
        manager.ip = os.path.join(jupyter_runtime_dir(), f"sbx-{kernel_id[:8]}-ipc")
    if getattr(manager, "transport_encryption", "disabled") == "disabled":
        return
    if manager.curve_publickey is None:
        import zmq

        manager.curve_publickey, manager.curve_secretkey = zmq.curve_keypair()


def _asked(manager: Any) -> "Connection":
    from sbx.jupyter.connection import Connection

    return Connection(
        key=manager.session.key,
        transport=manager.transport,
        ip=manager.ip,
        **{name: getattr(manager, name) for name in port_names},
        signature_scheme=manager.session.signature_scheme,
        curve_publickey=getattr(manager, "curve_publickey", None),
        curve_secretkey=getattr(manager, "curve_secretkey", None),
    )


def _check_apart(directory: Path, manager: Any, bound: "Connection") -> None:
    from sbx.jupyter.directory import check_apart

    try:
        check_apart(directory, Path(manager.connection_file), bound)
    except errors.Denied:
        manager.cleanup_connection_file()
        raise


def _as_shown(error: errors.SbxError) -> errors.SbxError:
    """What a notebook shows is the text of an exception and nothing else of it."""
    text = f"{error.message}; {error.hint}" if error.hint else error.message
    return type(error)(text, code=error.code, hint=error.hint, details=error.details)
