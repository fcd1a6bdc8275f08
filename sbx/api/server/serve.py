"""`sbx serve`: one process from its start to its end.

    sockets      open them first, as the user who started the process
    privileges   as root: start the broker, and the project server if the settings name owners of
                 projects; then drop the rights that they need
    service      inside the event loop: store, sandboxes, runs
    ready        notify systemd, and log the addresses
    drain        SIGTERM, SIGINT: stop accepting connections, end the agents, wait for requests and
                 runs until a deadline
    end          close the service: kernels end, files stay; remove the socket

The order matters: capabilities and Landlock belong to a thread, and the event loop starts threads,
so it comes after the drop.
"""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import uvicorn
import uvloop
from fastapi import FastAPI

from sbx.agent.settings import AgentSettings, ignored_here, read_agent_settings
from sbx.api.agent_v1 import agents_of
from sbx.api.app import create_app
from sbx.api.console.listener import ConsoleListener, address_of
from sbx.api.server import privileges, project_process
from sbx.api.server.http_protocol import KEEP_ALIVE_S, HttpProtocol
from sbx.api.server.preload import preload
from sbx.api.server.settings import ServiceSettings
from sbx.api.server.sockets import Listener, described, listen_on_tcp, listen_on_unix
from sbx.api.server.systemd import Notifier, inherited_sockets
from sbx.api.sse import FOLLOWING
from sbx.errors import BadRequest, Broken, SbxError
from sbx.isolation.broker.process import BrokerProcess, start_broker
from sbx.isolation.cgroups import move_to_leaf_cgroup
from sbx.linux.descriptors import raise_nofile_limit
from sbx.protocol.sdks import SDKS, sdk_variables
from sbx.service.agents import Agents
from sbx.service.projects.link import ProjectProcess
from sbx.service.service import Service
from sbx.telemetry import logs, metrics, spans

_log = logging.getLogger(__name__)
_REPLIES_S = 5.0
_LOOK_S = 0.2  # seconds until a second signal takes effect
_LOOPBACK = ("127.", "::1")
_FAILURES = {
    "broker_died": "the broker died, so the service could no longer start kernels",
    "broker_silent": "the broker did not answer, so the service could no longer start kernels",
    "project_server_died": "the project server died, so the service could no longer open projects",
    "project_server_silent": "the project server did not answer: no project could be opened",
}
FILES_MAX = 1 << 20  # more are useless, and some programs close every number up to the limit
# TCP and the Unix socket have as many places each: half are for connections, and the rest for the
# files that requests open.
_FILES_A_CONNECTION = 4
# New objects before the youngest are collected. In `bench/soak.py`, with the 50,000 of a short
# command, deleted sandboxes, which are cycles, took 20 MiB more in each minute. With Python's 700,
# full collections stopped the event loop for 0.3 s, every 8 s.
_COLLECTED_AFTER = 5_000
# Seconds until a busy thread gives the interpreter lock to the event loop, which takes it several
# times in each turn. With Python's 5 ms, a thread at work delayed each turn by 20 to 40 ms.
_SWITCH_S = 0.001

OnKey = Callable[[str, Path], None]


def serve(
    settings: ServiceSettings,
    on_first_key: OnKey,
    *,
    config: Path | None = None,
    env_file: Path | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, and return when everything has ended.

    `on_first_key` gets the key of the first start, once, and its file. Call this with one thread
    and no event loop. Raise the errors of the start: Conflict (`already_running`,
    `data_dir_in_use`), Unavailable, Denied, BadRequest; Broken with a code of `_FAILURES` if a
    process failed. `config`, `env_file`: the files of these options, for the settings of agents.
    """
    logs.configure(form=settings.log_format, level=settings.log_level)
    metrics.enable()
    root = os.geteuid() == 0
    agent_settings = _agent_settings(config, env_file)
    with ExitStack() as ending:
        notifier = Notifier()
        ending.callback(notifier.close)
        files = raise_nofile_limit(FILES_MAX)
        if (limit := max(1, files // _FILES_A_CONNECTION)) < settings.connections_max:
            _log.warning("only %d files may be open, so only %d connections", files, limit)
            settings = settings.model_copy(update={"connections_max": limit})
        if settings.cgroups:
            move_to_leaf_cgroup()
        if root:
            account = privileges.account_of(settings)
            privileges.prepare_data(settings.data, account)
        listeners = _listeners(settings)
        consoles = _console_listeners(settings)
        for listener in (*listeners, *consoles):
            ending.callback(listener.close)
        broker = project_server = None
        if root:
            undo = ending.enter_context(ExitStack())
            if settings.project_dirs and settings.project_owners:
                project_server = project_process.start(settings)
                undo.callback(project_server.close)
            broker = start_broker(
                bwrap=str(settings.bwrap) if settings.bwrap else None,
                uids=settings.uid_range,
                groups=settings.cgroups,
            )
            undo.callback(broker.close)
            sockets = (*listeners, *consoles)
            parents = {each.path.parent for each in sockets if each.path is not None}
            writable = [settings.data, *sorted(parents)]
            # It maps no project: the broker of the project server does that.
            mine = settings.model_copy(update={"project_owners": ()})
            shown = privileges.confine(broker, mine, account, writable=writable)
            privileges.drop(settings, account, writable=writable, shown=shown)
            undo.pop_all()  # from here on the service ends it
        gc.freeze()  # a full collection would stop the loop for 140 ms, to walk all modules
        gc.set_threshold(_COLLECTED_AFTER, 10, 10)
        sys.setswitchinterval(_SWITCH_S)
        ending.enter_context(spans.exporting())  # its thread has no more rights than the service
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(
                _serve(
                    settings,
                    agent_settings,
                    listeners,
                    consoles,
                    (broker, project_server),
                    notifier,
                    on_first_key,
                )
            )


def _agent_settings(config: Path | None, env_file: Path | None) -> AgentSettings | SbxError:
    """Return the settings or their error. Only chats need a model, and report the error."""
    try:
        settings = read_agent_settings(config=config, env_file=env_file)
        if env_file is None and (ignored := ignored_here()):
            _log.warning(".env of the working directory does not set %s", ", ".join(ignored))
        if (server := settings.other_server) is not None:
            _log.info("the model's server is %s", server)
        return settings
    except SbxError as error:
        _log.warning("no agent can run: %s", error.message)
        return error


async def _serve(
    settings: ServiceSettings,
    agent_settings: AgentSettings | SbxError,
    listeners: Sequence[Listener],
    consoles: Sequence[Listener],
    started: tuple[BrokerProcess | None, ProjectProcess | None],
    notifier: Notifier,
    on_first_key: OnKey,
) -> None:
    broker, project_server = started
    async with Service(settings, broker=broker, project_server=project_server) as service:
        chosen = settings.api_key.get_secret_value() if settings.api_key else None
        key = await service.access.first_key(chosen, settings.credentials_path)
        if key is not None and chosen is None:
            on_first_key(key, settings.credentials_path)
        shown = [listener.shown for listener in listeners]

        def ready() -> None:
            notifier.ready(f"listening on {', '.join(shown)}")
            _log.info("listening on %s", ", ".join(shown))
            for line in _sdk_exports(shown):
                _log.info("%s", line)
            if console is not None:
                _log.info("the console: %s", console.url or "sbx console opens it")

        console = await _console(service, settings, consoles)
        app = create_app(service, settings, agent_settings, console)
        agents = agents_of(app)
        await agents.start()
        server = _Server(service, app, agents, settings, ready, notifier)
        await server.serve(sockets=[each.sock for each in (*listeners, *consoles)])
        if (failure := service.failure) is not None:
            raise Broken(
                _FAILURES.get(failure.code, failure.message),
                code=failure.code,
                hint="start the service again: sandboxes, projects and their files are kept",
            )


def _listeners(settings: ServiceSettings) -> list[Listener]:
    """Return the listeners from systemd, else the Unix socket, and TCP if the settings name it."""
    with ExitStack() as undo:
        listeners = [described(sock) for sock in inherited_sockets()]
        if not listeners:
            listeners = [listen_on_unix(settings)]
        for listener in listeners:
            undo.callback(listener.close)
        if settings.listen is not None:
            listeners.append(listen_on_tcp(settings.listen))
            host = listeners[-1].sock.getsockname()[0]
            if not host.startswith(_LOOPBACK):
                _log.warning("keys travel unencrypted to %s: put TLS before it", host)
        if not listeners:
            raise BadRequest("there is nothing to listen on", code="invalid_settings")
        undo.pop_all()
    return listeners


def _console_listeners(settings: ServiceSettings) -> list[Listener]:
    """Return the listeners for browsers: a Unix socket, and TCP if the settings name it."""
    listeners = []
    with ExitStack() as undo:
        if settings.console_path is not None:
            try:
                listeners.append(listen_on_unix(settings, settings.console_path))
                undo.callback(listeners[-1].close)
            except SbxError as error:  # such as in a directory that systemd made for its socket
                _log.warning("sbx console cannot be used: %s", error.message)
        if settings.console is not None:
            listeners.append(listen_on_tcp(settings.console))
            if not listeners[-1].sock.getsockname()[0].startswith(_LOOPBACK):
                _log.warning("the console is not encrypted: put TLS before it")
        undo.pop_all()
    return listeners


async def _console(
    service: Service, settings: ServiceSettings, listeners: Sequence[Listener]
) -> ConsoleListener | None:
    if not listeners:
        return None
    urls = settings.console_url, settings.console_frames_url
    return ConsoleListener(
        await service.console.name(),
        path=next((str(each.path) for each in listeners if each.path is not None), None),
        address=next((address_of(each.sock) for each in listeners if each.path is None), None),
        urls=(urls[0], urls[1]) if urls[0] is not None and urls[1] is not None else None,
    )


class _Server(uvicorn.Server):
    """uvicorn's, with signals that end the service as well, and the deadline of a drain."""

    def __init__(
        self,
        service: Service,
        app: FastAPI,
        agents: Agents,
        settings: ServiceSettings,
        ready: Callable[[], None],
        notifier: Notifier,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=HttpProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,  # any client could claim any address
                timeout_keep_alive=KEEP_ALIVE_S,
                limit_concurrency=settings.connections_max,
                timeout_graceful_shutdown=None,  # `shutdown` has its deadline
            )
        )
        self._service = service
        self._agents = agents
        self._drain_s = settings.drain_timeout
        self._ready = ready
        self._notifier = notifier
        self._until = 0.0
        self._preloading: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()
        gc.freeze()  # the app, too
        self._preloading = asyncio.create_task(preload())

    async def on_tick(self, counter: int) -> bool:
        """Return whether to end, also if kernels can no longer start, so that systemd (Restart=)
        restarts the service."""
        return await super().on_tick(counter) or self._service.failure is not None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting connections and runs, wait for the current ones, and cut off the rest."""
        self._until = time.monotonic() + self._drain_s
        self._notifier.stopping()
        _log.info("draining, for %g s at most; a second signal ends it at once", self._drain_s)
        if self._preloading is not None:
            self._preloading.cancel()
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await self._agents.close()  # they could start runs for minutes
        runs = asyncio.create_task(self._service.runs.drain(self._drain_s))
        while (pending := self._pending(runs)) and (left_s := self._left_s()):
            await asyncio.wait(pending, timeout=min(_LOOK_S, left_s))
            if runs.done():
                self._close_followers()
        await self._cut_off(runs)
        for connection in list(self.server_state.connections):
            connection.transport.close()

    def _pending(self, runs: "asyncio.Task[bool]") -> "set[asyncio.Task[Any]]":
        return {*self.server_state.tasks, *(() if runs.done() else (runs,))}

    def _left_s(self) -> float:
        return 0.0 if self.force_exit else max(0.0, self._until - time.monotonic())

    def _close_followers(self) -> None:
        """Close the streams of sandbox events, which do not end by themselves."""
        for connection in list(self.server_state.connections):
            cycle = getattr(connection, "answering", None)
            if cycle is not None and cycle.scope.get(FOLLOWING):
                connection.transport.close()

    async def _cut_off(self, runs: "asyncio.Task[bool]") -> None:
        """End the kernels first, so that a request that waits for a run gets its outcome."""
        if pending := self._pending(runs):
            _log.warning("%d runs and requests did not end in time", len(pending))
            await self._service.sandboxes.close()
            await asyncio.wait(pending, timeout=_REPLIES_S)
        for task in (left := self._pending(runs)):
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=_REPLIES_S)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Start a drain at the first signal, and end it at the second. Do not raise the signals
        again, because the service is still to be closed."""
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGTERM, signal.SIGINT)
        for number in numbers:
            loop.add_signal_handler(number, self._on_signal)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_IGN)  # the remaining steps have deadlines

    def _on_signal(self) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True


def _sdk_exports(shown: Iterable[str]) -> list[str]:
    """Return a line for each SDK of another product, if the service listens on TCP."""
    host = next((each.removeprefix("http://") for each in shown if "://" in each), None)
    if host is None:
        return []
    lines = []
    for sdk in SDKS:
        variables = sdk_variables(sdk, host, "KEY")
        lines.append(f"for {sdk}: export {' '.join(f'{k}={v}' for k, v in variables.items())}")
    return lines
