"""Start kernels for jupyter_client, if the kernelspec names the provisioner `sbx`.

    pre_launch      prepare the policy, the directory and the sandbox. Every refusal happens here.
                    Then bind the sockets, and write the ports that Linux chose to the file
    launch_kernel   start the kernel, from the pool
    cleanup         close the sockets. Leave the seat as well, unless files would be removed with it

Everything runs on the loop of the runtime that this process shares; jupyter_client may call from
another loop each time. No process can be signalled: SIGINT interrupts the cell, and a signal that
would end a process ends the kernel.
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

if TYPE_CHECKING:  # the import takes half a second: done in a thread, with the first kernel
    from sbx.jupyter.connection import ConnectionInfo
    from sbx.jupyter.notebook import Notebook
    from sbx.jupyter.notebook_sandbox import NotebookSpec
    from sbx.runtime.shared import SharedRuntime

T = TypeVar("T")
_GONE_S = 1.0  # a kernel ends some ms after a shutdown request
_ENDING = {signal.SIGTERM, signal.SIGKILL, signal.SIGHUP, signal.SIGQUIT, signal.SIGABRT}


class SandboxProvisioner(KernelProvisionerBase):
    """See the module. It raises errors of `sbx.errors`, whose text includes the hint."""

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
        """Whether there is a kernel, or one that ended and was not waited for yet."""
        return self._ended is not None

    async def poll(self) -> int | None:
        """Return None while it lives, else its exit code: 0 for a requested end, 137 otherwise."""
        if self._ended is None:
            return 0
        return self._ended.result() if self._ended.done() else None

    async def wait(self) -> int | None:
        """Wait for its end without polling. Afterwards `has_process` is false."""
        ended = self._ended
        if ended is None:
            return 0
        code = await asyncio.wrap_future(ended)
        if self._ended is ended:  # and not the end of a kernel that was started in the meantime
            self._ended = None
        return code

    async def send_signal(self, signum: int) -> None:
        """Interrupt the running cell on SIGINT. End the kernel on a signal that ends processes.

        Ignore other signals: their receiver would be a process inside the sandbox.
        """
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
        """End the kernel in any state. Files stay."""
        await self.send_signal(signal.SIGKILL)

    async def terminate(self, restart: bool = False) -> None:
        """End the kernel like `kill`: from outside there is only one way to end a jail."""
        await self.send_signal(signal.SIGTERM)

    async def shutdown_requested(self, restart: bool = False) -> None:
        """Wait for the end of the kernel; the shutdown request is on its way to the bridge.

        jupyter_client polls ten times a second, so its first poll then sees the end.
        """
        if self._ended is not None and not self._ended.done():
            await asyncio.wait([asyncio.wrap_future(self._ended)], timeout=_GONE_S)

    async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:
        """Take the seat, bind the sockets and write the connection file.

        Raise the error that prevents this kernel: NotFound, PolicyError, CannotEnforce, Denied
        `directory_forbidden`, `connection_in_workspace` and similar ones.
        """
        kwargs.pop("transport_encryption", None)  # the manager already has it
        extra = kwargs.pop("extra_arguments", [])
        env = kwargs.get("env") or {}
        async with self._leave_on_error():
            notebook = await self._open_notebook()
            request = _seat_request(self.policy, self.kernel_spec, kwargs.get("cwd"), env)
            seat = await self._there(notebook.sit(request))
            self._directory = seat.directory
            await self._bind(notebook, self.parent, env)
        self.connection_info = self.parent.get_connection_info()
        command = self.parent.format_kernel_cmd(extra_arguments=extra)
        return await super().pre_launch(cmd=command, **kwargs)

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> KernelConnectionInfo:
        """Start the kernel. `cmd` is only for programs that know no provisioners.

        Raise the error that prevents the start.
        """
        assert self._notebook is not None
        async with self._leave_on_error():
            self._ended = await self._there(self._notebook.start())
        return self.connection_info

    async def cleanup(self, restart: bool = False) -> None:
        """Close the sockets, except for a restart. A workspace that sbx made stays to be reused."""
        if not restart:
            await self._leave()

    def resolve_path(self, path: str) -> str | None:
        """Return the host file for a path of code inside, in the notebook's directory."""
        if self._directory is None:
            return None
        inside = os.path.normpath(os.path.join("/workspace", path))
        path_on_host = self._directory / os.path.relpath(inside, "/workspace")
        real = Path(os.path.realpath(path_on_host))
        return str(real) if real.is_relative_to(self._directory) and real.exists() else None

    # -- on the runtime's loop ------------------------------------------------------------------

    async def _open_notebook(self) -> "Notebook":
        if self._notebook is not None and self._shared is not None and self._shared.alive:
            return self._notebook
        shared, notebook = await asyncio.to_thread(_new_notebook, self.policy)
        end = weakref.finalize(self, _let_go, shared, notebook)
        end.atexit = False  # at exit the runtime ends by itself, with everything on its loop
        self._shared, self._notebook = shared, notebook
        return notebook

    @asynccontextmanager
    async def _leave_on_error(self) -> AsyncIterator[None]:
        """Clean up if a start fails. Only a workspace that sbx made stays."""
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

    # -- the values of the manager --------------------------------------------------------------

    async def _bind(self, notebook: "Notebook", manager: Any, env: Mapping[str, str]) -> None:
        """Bind the sockets and write the connection file.

        With tcp, bind free ports first and write them to the file, so that no process can take a
        port in between. With ipc, jupyter_client chooses the names in its own directory.
        """
        session = {"jupyter_session": env.get("JPY_SESSION_NAME", "")}
        _prepare(manager, self.kernel_id)
        if manager.transport == "ipc":
            manager.write_connection_file(**session)
        bound = await self._there(notebook.bind(_connection_of(manager)))
        if manager.transport == "tcp":
            manager._record_random_port_names()  # first: a restart may need others
            for name in port_names:
                setattr(manager, name, getattr(bound, name))
            manager.write_connection_file(**session)
        if self._directory is not None:
            _check_apart(self._directory, manager, bound)


def _new_notebook(policy: str) -> "tuple[SharedRuntime, Notebook]":
    """Make a notebook. Call it in a thread: the first import and start take a second."""
    from sbx.runtime.shared import shared_runtime

    shared = shared_runtime(policy)  # first: its broker starts while it imports the runtime
    from sbx.jupyter.notebook import Notebook
    from sbx.jupyter.notebook_sandbox import seats_of

    return shared, Notebook(seats_of(shared.runtime))


def _let_go(shared: "SharedRuntime", notebook: "Notebook") -> None:
    """Close the notebook of a provisioner that was garbage-collected, in any thread."""
    shared.begin(notebook.close())


def _seat_request(
    policy: str, spec: KernelSpec, cwd: Any, env: Mapping[str, str]
) -> "NotebookSpec":
    from sbx.jupyter.notebook_sandbox import NotebookSpec

    notebook = env.get("JPY_SESSION_NAME")
    if notebook == os.environ.get("JPY_SESSION_NAME"):
        notebook = None  # the notebook in which this program was started
    private = (Path(spec.resource_dir),) if spec.resource_dir else ()
    return NotebookSpec(policy, Path(cwd or os.getcwd()), notebook, private)


def _prepare(manager: Any, kernel_id: str) -> None:
    """Make keys if the client wants encrypted channels. Choose a directory for ipc sockets: the
    default is the current directory, which may be the workspace."""
    if manager.transport == "ipc" and manager.ip == "kernel-ipc":
        ensure_dir_exists(jupyter_runtime_dir(), 0o700)
        # A part of the id only: the path of a socket has 107 characters at most.
        manager.ip = os.path.join(jupyter_runtime_dir(), f"sbx-{kernel_id[:8]}-ipc")
    if getattr(manager, "transport_encryption", "disabled") == "disabled":
        return
    if manager.curve_publickey is None:
        import zmq

        manager.curve_publickey, manager.curve_secretkey = zmq.curve_keypair()


def _connection_of(manager: Any) -> "ConnectionInfo":
    from sbx.jupyter.connection import ConnectionInfo

    return ConnectionInfo(
        key=manager.session.key,
        transport=manager.transport,
        ip=manager.ip,
        **{name: getattr(manager, name) for name in port_names},
        signature_scheme=manager.session.signature_scheme,
        curve_publickey=getattr(manager, "curve_publickey", None),
        curve_secretkey=getattr(manager, "curve_secretkey", None),
    )


def _check_apart(directory: Path, manager: Any, bound: "ConnectionInfo") -> None:
    from sbx.jupyter.directory import check_apart

    try:
        check_apart(directory, Path(manager.connection_file), bound)
    except errors.Denied:
        manager.cleanup_connection_file()
        raise


def _as_shown(error: errors.SbxError) -> errors.SbxError:
    """Return the error with its hint in the text: a notebook shows only an exception's text."""
    text = f"{error.message}; {error.hint}" if error.hint else error.message
    return type(error)(text, code=error.code, hint=error.hint, details=error.details)
