"""A service with all that the things of tests/data_matrix.py need, and a walk over its data.

live_place     a service in this process, with a clock that the test moves
Process        `sbx serve` as a process, which the test ends and starts again
Place.where    the places with a marker: file names and contents, bytes of the store, a backup
"""

import asyncio
import itertools
import json
import os
import secrets
import socket
import sqlite3
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import serving as serving_process
from agent_calls import PERSON
from command import in_process
from live_app import Served, live, serving
from model_server import KEY, Asked, ModelServer, model_server
from places import short_directory
from pydantic import SecretStr
from sessions_calls import until
from test_agent_http_service import environment as model_environment

from sbx.agent.messages import Response
from sbx.agent.settings import AgentSettings
from sbx.service.maintenance.backup import backup
from sbx.store import FILE_NAME
from tests.fake_clock import FakeClock

TTL_S = 7200.0
IDLE_S = 1800.0
GRACE_S = 7 * 86_400.0
PATIENCE_S = 30.0
_LOOK_S = 0.02
_FILE_MAX = 8 << 20  # larger ones are the reserve of the disk
GRANTING = (
    'schema = 1\nextends = "networked"\n'
    '[[grant]]\nnetwork = ["*.example.org"]\nlongest = "conversation"\n'
)
DELEGATING = "[delegate]\nat_once = 2\n"
_STORE = Path(FILE_NAME).stem
_NOT_OF_ACTS = ("kernel.", "gc.")
_numbers = itertools.count(1)


def error_of(reply: httpx.Response) -> str:
    """Return the status of a reply, and the code of its error."""
    if reply.status_code < 400:
        return str(reply.status_code)
    return f"{reply.status_code} {reply.json()['error']['code']}"


class Scripts:
    """The answers of the model, by a word that is in the conversation."""

    def __init__(self) -> None:
        self._answers: dict[str, deque[Response]] = {}

    def add(self, word: str, *answers: Response) -> None:
        self._answers.setdefault(word, deque()).extend(answers)

    def answer(self, asked: Asked) -> Response:
        (answers,) = [each for word, each in self._answers.items() if word in asked.text]
        return answers.popleft()


@dataclass
class Place:
    """A running service. `http` is its operator, `url` its address over TCP."""

    http: httpx.AsyncClient
    model: "Scripts"
    top: Path
    data: Path
    socket: Path
    url: str
    sdk_key: str
    served: Served | None = None  # only in this process
    clock: FakeClock | None = None
    projects: list[Path] = field(default_factory=list)

    def browser(self) -> httpx.AsyncClient:
        """A client over TCP, without credentials."""
        return httpx.AsyncClient(base_url=self.url, timeout=60)

    @property
    def audit(self) -> Path:
        return self.data / "audit.jsonl"

    def directory(self, name: str) -> Path:
        """Make a directory that a project may have."""
        directory = self.top / "projects" / name
        directory.mkdir()
        if os.geteuid() == 0:
            os.chown(directory, PERSON, PERSON)
        return directory

    async def at_rest(self) -> None:
        """Wait until no request uses a sandbox: the service ends the use after its reply."""

        async def unused() -> bool:
            served = self.served
            return served is None or not any(
                each.users for each in served.service.sandboxes.every()
            )

        await until(unused)

    async def later(self, seconds: float, *, collect: bool = False) -> None:
        """Move the clock, and do the periodic work that is due then."""
        assert self.clock is not None
        assert self.served is not None
        self.clock.advance(seconds)
        await self.served.service.reaper.round()
        if collect:
            reply = await self.http.post("/v1/admin/gc/run")
            assert reply.status_code == 200, reply.text

    async def log(self) -> bytes:
        """Return the audit log with its complete files: a month may end in a cell."""
        complete = sorted(self.data.glob("audit-*.jsonl"))
        return await asyncio.to_thread(
            lambda: b"".join(path.read_bytes() for path in (*complete, self.audit))
        )

    async def events(self, since: int, ids: set[str], expected: str) -> str:
        """Return the events of the audit log from this byte on that name one of these ids, without
        those of kernels, once all expected ones are there: some are written soon after the act."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            lines = (await self.log())[since:].decode().splitlines()
            entries = [json.loads(line) for line in lines if any(each in line for each in ids)]
            names = [str(entry["what"]) for entry in entries]
            names = [name for name in names if not name.startswith(_NOT_OF_ACTS)]
            if set(expected.split()) <= set(names) or time.monotonic() > deadline:
                return " ".join(names)
            await asyncio.sleep(_LOOK_S)

    async def where(self, mark: str, expected: str) -> str:
        """Return the places with the marker, once all expected places have it: records of runs are
        written soon after the reply. A place that must not have it is looked at only once."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            places = await asyncio.to_thread(self._where, mark.encode())
            missing = set(expected.split()) - {*places, "nowhere"}
            if not missing or time.monotonic() > deadline:
                return " ".join(places) or "nowhere"
            await asyncio.sleep(_LOOK_S)

    def _where(self, mark: bytes) -> list[str]:
        copy = self.top / "copy"
        backup(self.data, copy, force=True)
        looks: dict[str, Callable[[], bool]] = {
            "files": lambda: any(has(path, mark) for path in self._files()),
            "store": lambda: any(_contains(path, mark) for path in self._store()),
            "backup": lambda: _contains(copy, mark),
            "directory": lambda: any(has(path, mark) for path in below(self.top / "projects")),
        }
        return [name for name, look in looks.items() if look()]

    async def rows(self, mark: str) -> list[str]:
        """Return the columns of the store with the marker, for the message of a failed test."""
        return await asyncio.to_thread(self._rows, mark)

    def paths(self, mark: str) -> list[str]:
        """Return the paths with the marker, likewise."""
        return [
            str(path.relative_to(self.top)) for path in self._files() if has(path, mark.encode())
        ]

    def _rows(self, mark: str) -> list[str]:
        columns = []
        with closing(sqlite3.connect(self.top / "copy")) as copy:
            names = "SELECT name FROM sqlite_master WHERE type = 'table'"
            for (table,) in copy.execute(names).fetchall():
                for column in [row[1] for row in copy.execute(f"PRAGMA table_info({table})")]:
                    match = f"SELECT count(*) FROM {table} WHERE instr(CAST({column} AS TEXT), ?)"
                    if count := copy.execute(match, (mark,)).fetchone()[0]:
                        columns.append(f"{table}.{column}: {count}")
        return columns

    def _store(self) -> list[Path]:
        """Return the store, its log, and the store that a restoration has replaced."""
        names = self.data.glob(f"{_STORE}*")
        return [path for path in names if not path.name.endswith("-shm")]

    def _files(self) -> list[Path]:
        tops = [self.data, self.data.with_name(f"{self.data.name}-projects")]
        return [
            path
            for top in tops
            for path in below(top)
            if not path.name.startswith((_STORE, "audit"))
        ]


def below(top: Path) -> list[Path]:
    return [Path(parent, name) for parent, dirs, files in os.walk(top) for name in [*dirs, *files]]


def has(path: Path, mark: bytes) -> bool:
    """Return whether the name, the target of a link or the content has the marker."""
    if mark in os.fsencode(path.name):
        return True
    if path.is_symlink():
        return mark in os.fsencode(os.readlink(path))
    return path.is_file() and _contains(path, mark)


def _contains(path: Path, mark: bytes) -> bool:
    try:
        return path.stat().st_size <= _FILE_MAX and mark in path.read_bytes()
    except FileNotFoundError:  # removed meanwhile
        return False


def new_mark() -> str:
    """Return a word that nothing else has."""
    return f"mark{secrets.token_hex(6)}"


def new_number() -> int:
    return next(_numbers)


def prepare(top: Path) -> dict[str, Any]:
    """Write the files of an operator below `top`; return the settings that name them."""
    for name in ("projects", "policies", "agents"):
        (top / name).mkdir(exist_ok=True)
    (top / "policies" / "granting.toml").write_text(GRANTING)
    (top / "agents" / "delegating.toml").write_text(DELEGATING)
    return {
        "project_dirs": (top / "projects",),
        "policy_dirs": (top / "policies",),
        "agents_dir": top / "agents",
        "sessions_ttl": int(TTL_S),
        "idle_timeout": IDLE_S,
        "files_grace": GRACE_S,
        "gc_interval": 0.0,
        "audit_rotation": "never",
    }


class Process:
    """`sbx serve` with its data below `top`."""

    def __init__(self, top: Path, model: ModelServer, scripts: Scripts) -> None:
        self._held = AsyncExitStack()
        self._top = top
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._address = "{}:{}".format(*free.getsockname()[:2])
        settings = prepare(top)
        self._environment = {
            **model_environment(model),
            **{f"SBX_{name.upper()}": _text(value) for name, value in settings.items()},
            "SBX_PROJECT_OWNERS": str(PERSON if os.geteuid() == 0 else os.geteuid()),
            "SBX_LISTEN": self._address,
            "SBX_DRAIN_TIMEOUT": "1",
        }
        self._scripts = scripts
        self._sdk_key = ""

    async def start(self) -> Place:
        running = serving_process.service(top=self._top, env=self._environment)
        self.service = self._held.enter_context(running)
        transport = httpx.AsyncHTTPTransport(uds=str(self.service.socket))
        http = httpx.AsyncClient(transport=transport, base_url="http://sbx", timeout=60)
        await self._held.enter_async_context(http)
        if not self._sdk_key:
            reply = await http.post("/v1/admin/keys", json={"owner": "sdk"})
            self._sdk_key = reply.json()["key"]
        data = self.service.data
        url = f"http://{self._address}"
        sock = self.service.socket
        return Place(http, self._scripts, self._top, data, sock, url, self._sdk_key)

    def kill(self) -> None:
        self.service.process.kill()
        self.service.process.wait(PATIENCE_S)

    async def end(self) -> None:
        """End it as systemd does."""
        await self.close()

    def store(self, word: str, file: Path) -> None:
        """Execute `sbx store` on its data directory."""
        done = in_process("store", word, file, "--data-dir", self.service.data)
        assert done.returncode == 0, done.stderr

    async def close(self) -> None:
        await self._held.aclose()


def _text(value: Any) -> str:
    return os.pathsep.join(map(str, value)) if isinstance(value, tuple) else str(value)


@asynccontextmanager
async def process() -> AsyncIterator[Process]:
    scripts = Scripts()
    with serving_process.open_directory() as top, model_server(by=scripts.answer) as model:
        running = Process(top, model, scripts)
        try:
            yield running
        finally:
            await running.close()


@asynccontextmanager
async def live_place() -> AsyncIterator[Place]:
    scripts = Scripts()
    with short_directory() as top, model_server(by=scripts.answer) as model:
        agent = AgentSettings(
            base_url=model.openai_url, api_key=SecretStr(KEY), model_name="scripted"
        )
        clock = FakeClock(time.time())
        async with live(top, clock=clock, agent=agent, **prepare(top)) as served:
            with socket.create_server(("127.0.0.1", 0)) as listening:
                listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                host, port = listening.getsockname()[:2]
                async with serving(served.app, sockets=[listening]), served.client() as http:
                    yield Place(
                        http,
                        scripts,
                        top,
                        served.service.data_dir,
                        served.socket,
                        f"http://{host}:{port}",
                        await served.key_of("sdk"),
                        served=served,
                        clock=clock,
                    )
