"""The process of the project server: how a service starts it, and how it drops its rights.

Root starts it together with the service. It gets a broker that maps projects. Then it keeps the
rights that the service keeps (privileges.py), with two differences: it has its own account, and it
may change the files below `project_dirs`. The service cannot write to its data directory.
"""

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import uvloop
from msgspec.structs import replace

from sbx.api.server import privileges
from sbx.api.server.privileges import Account
from sbx.api.server.settings import ServiceSettings
from sbx.errors import SbxError
from sbx.isolation.broker.process import start_broker
from sbx.isolation.broker.watchdog import Watchdog
from sbx.linux.descriptors import raise_nofile_limit
from sbx.runtime.runtime import Runtime
from sbx.service.projects import calls
from sbx.service.projects.link import ProjectProcess
from sbx.service.projects.server import ProjectServer
from sbx.telemetry import logs
from sbx.workspace.allowed_paths import AllowedProjects

_FILES_MAX = 1 << 16
_NO_VARIABLES = ("SBX_API_KEY", "BAY_API_KEY")  # it does not need the key


def start(settings: ServiceSettings) -> ProjectProcess:
    """Start it as root, for a service that has not dropped its own rights yet."""
    ours, its = socket.socketpair()
    with its:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", "from sbx.api.server.project_process import main; main()"],
            stdin=its.fileno(),
            stdout=subprocess.DEVNULL,
            env={name: value for name, value in os.environ.items() if name not in _NO_VARIABLES},
            cwd="/",
            start_new_session=True,
        )
    ours.sendall(calls.framed(settings.model_dump(mode="json", exclude={"api_key"})))
    ours.setblocking(False)
    return ProjectProcess(process, ours, Watchdog(process))


def main() -> None:
    """Read the settings from the socket at standard input, then serve calls until its end."""
    with socket.socket(fileno=os.dup(0)) as sock:
        body = _received(sock, int.from_bytes(_received(sock, calls.LENGTH)))
        service = ServiceSettings(**msgspec.msgpack.decode(body))
        logs.configure(form=service.log_format, level=service.log_level)
        try:
            _serve(service, sock)
        except SbxError as error:
            sock.setblocking(True)
            sock.sendall(calls.framed(calls.CallReply(0, **calls.error_of(error))))
            sys.exit(3)


def _serve(service: ServiceSettings, sock: socket.socket) -> None:
    settings = service.model_copy(update={"data_dir": service.projects_data})
    account = _account(settings)
    raise_nofile_limit(_FILES_MAX)
    privileges.prepare_data(settings.data, account)
    broker = start_broker(
        bwrap=str(settings.bwrap) if settings.bwrap else None,
        uids=settings.uid_range,
        groups=settings.cgroups,
    )
    try:
        writable = [settings.data]
        projects = [Path(os.path.realpath(path)) for path in settings.project_dirs]
        shown = privileges.confine(
            broker, settings, account, writable=writable, private=service.private
        )
        privileges.drop(settings, account, writable=writable, shown=shown, projects=projects)
    except BaseException:
        broker.close()
        raise
    own = settings.own_paths
    directories = AllowedProjects(
        settings.project_dirs,
        replace(own, private=(*own.private, service.data)),
        settings.project_owners,
        mapped_only=True,
    )
    sock.setblocking(False)

    async def serve() -> None:
        async with Runtime(settings, broker=broker) as runtime:
            await ProjectServer(runtime, directories).serve(sock.dup())

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())


def _account(settings: ServiceSettings) -> Account:
    """Return a uid that no account has, and that is not the uid of the service, because neither
    may write to the data of the other."""
    below = settings.uid_range[0] - 2
    return Account(below, below)


def _received(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = sock.recv(size - len(data))
        if not piece:
            sys.exit(0)  # the service ended before it sent its settings
        data += piece
    return bytes(data)
