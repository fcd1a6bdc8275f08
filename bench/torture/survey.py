"""The state at the end: over HTTP everything that the replies promised, from the host leftovers."""

import asyncio
import os
import sqlite3
from collections import Counter
from collections.abc import Awaitable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import psutil

from bench.torture.clients import Credentials, over_tcp, session, talk_of
from bench.torture.ledger import SURVEY, Act
from bench.torture.looks import counters, history, read_file, use
from bench.torture.service_process import ServiceUnderTest
from bench.torture.wire import Wire

_AT_ONCE = 8
_FINAL_RUNS = 4
_PAGE = 200
_TRIES = 3
_SETTLE_S = 20.0
_FDS_SLACK = 40  # the pool, the zygotes and the store of a service that has worked


async def survey(service: ServiceUnderTest, clients: int, credentials: Credentials) -> None:
    """Read everything back. The records are those of client SURVEY."""
    async with service.client() as unix, service.client(tcp=True) as tcp:
        wires = {False: Wire(service, unix, SURVEY), True: Wire(service, tcp, SURVEY)}
        acts = list(service.ledger.acts)
        boxes = {
            act.seen: wires[over_tcp(act.client)]
            for act in acts
            if act.kind == "sandbox.create" and act.outcome == "done" and act.client != SURVEY
        }
        gate = asyncio.Semaphore(_AT_ONCE)

        async def at_once(look: Awaitable[object]) -> None:
            async with gate:
                await look

        looks: list[Awaitable[object]] = [
            _box(wire, box, _paths_of(acts, box)) for box, wire in boxes.items()
        ]
        looks += [use(wires[False], credential) for credential in credentials.all]
        looks += [_chat(wires[over_tcp(number)], number) for number in range(clients)]
        await asyncio.gather(*(at_once(look) for look in looks))
        sessions = {
            act.seen
            for act in service.ledger.acts
            if act.kind == "session.get" and act.outcome == "done"
        }
        await _sandboxes(sessions, wires[False], wires[True])


async def _box(wire: Wire, box: str, paths: set[str]) -> None:
    top = f"/v1/sandboxes/{box}"
    there = await wire.call("sandbox.get", box, "GET", top)
    if there.status != 200:
        return
    for path in sorted(paths):
        await read_file(wire, box, path)
    await counters(wire, box, f"{box}/conversations/default")
    await history(wire, box)
    await wire.call(
        "terminal.list",
        box,
        "GET",
        f"{top}/conversations/default/terminals",
        seen=lambda reply: [item["id"] for item in reply.json()["items"] if item["running"]],
    )


async def _chat(wire: Wire, number: int) -> None:
    """The answers in the messages of a conversation, and the counters of its code."""
    conversation, target = session(number)[2], talk_of(number)
    if not any(act.kind == "chat" and act.target == target for act in wire.service.ledger.acts):
        return
    name = target.partition("/")[0]
    path = f"/v1/sandboxes/{name}"
    await wire.call("session.get", name, "GET", path, seen=lambda reply: reply.json()["id"])
    await counters(wire, target, target)
    texts, params = list[str](), {"limit": _PAGE}
    while True:
        page = await wire.call(
            "messages.page",
            target,
            "GET",
            f"/api/v1/conversations/{conversation}/messages",
            seen=lambda reply: reply.json(),
            params=params,
        )
        if page.status != 200:
            break
        texts += [str(message.get("content")) for message in page.seen["items"]]
        if (cursor := page.seen["next_cursor"]) is None:
            break
        params = {"limit": _PAGE, "cursor": cursor}
    wire.service.ledger.acts.append(
        Act("messages", target, SURVEY, page.began, page.ended, page.status, page.code, seen=texts)
    )


async def _sandboxes(sessions: set[str], *wires: Wire) -> None:
    """Every sandbox of the clients, but for the sessions of their chats."""
    for wire in wires:
        ids, params = list[str](), {"limit": "100"}
        while True:
            page = await wire.call(
                "sandboxes.page",
                "",
                "GET",
                "/v1/sandboxes",
                seen=lambda reply: reply.json(),
                params=params,
            )
            if page.status != 200:
                break
            ids += [sandbox["id"] for sandbox in page.seen["items"]]
            if page.seen["next_cursor"] is None:
                break
            params = {"limit": "100", "cursor": page.seen["next_cursor"]}
        ids = [sandbox for sandbox in ids if sandbox not in sessions]
        record = Act("sandboxes", "", SURVEY, page.began, page.ended, page.status, seen=ids)
        wire.service.ledger.acts.append(record)


async def works_again(service: ServiceUnderTest) -> None:
    """Run a cell in new sandboxes: a service that has healed does it at the first try."""
    async with service.client() as http:
        wire = Wire(service, http, SURVEY)
        for number in range(_FINAL_RUNS):
            key = f"survey{number}-{service.pid}"
            box = await wire.call(
                "sandbox.create",
                f"?{key}",
                "POST",
                "/v1/sandboxes",
                key=key,
                seen=lambda reply: reply.json()["id"],
                json={},
            )
            if box.outcome != "done":
                continue
            top = f"/v1/sandboxes/{box.seen}"
            await wire.call(
                "run",
                box.seen,
                "POST",
                f"{top}/python/exec",
                key=key,
                seen=lambda reply: {
                    "id": reply.json()["execution_id"],
                    "success": reply.json()["success"],
                    "output": reply.json()["output"],
                },
                json={"code": "print(1)"},
            )
            await wire.call("sandbox.delete", box.seen, "DELETE", top)


async def descriptors_left(service: ServiceUnderTest) -> list[str]:
    """Descriptors of the service that remain after every sandbox was deleted."""
    async with service.client() as unix, service.client(tcp=True) as tcp:
        for http in (unix, tcp):
            while items := (await http.get("/v1/sandboxes")).json()["items"]:
                for sandbox in items:
                    (await http.delete(f"/v1/sandboxes/{sandbox['id']}")).raise_for_status()
    most, end = service.first_fds + _FDS_SLACK, service.now() + _SETTLE_S
    while len(_fds(service.pid)) > most and service.now() < end:  # noqa: ASYNC110
        await asyncio.sleep(0.2)
    if len(targets := _fds(service.pid)) <= most:
        return []
    kinds = Counter(map(_kind, targets)).most_common(5)
    return [f"{len(targets)} descriptors, {service.first_fds} at the start: {kinds}"]


def _kind(target: str) -> str:
    """`socket:[1]` is a socket, and a path is known by its first directories."""
    return target.partition(":[")[0] if target[0] != "/" else "/".join(target.split("/")[:6])


def _fds(pid: int) -> list[str]:
    """What the descriptors of a process lead to."""
    targets = []
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):
            targets.append(os.readlink(entry.path))
    return targets


def _paths_of(acts: list[Act], box: str) -> set[str]:
    prefix = f"{box}/"
    targets = {act.target for act in acts if act.kind == "file.write"}
    return {target.removeprefix(prefix) for target in targets if target.startswith(prefix)}


# -- the host, when the service has ended ----------------------------------------------------------


async def left_behind(service: ServiceUnderTest, before: "Traces") -> list[str]:
    """Whatever of the service is still on the host a while after its end."""
    end = service.now() + _SETTLE_S
    while True:
        left = [*Traces.now(service).since(before), *_unknown(service.disk.data)]
        if not left or service.now() > end:
            return left
        await asyncio.sleep(0.2)


class Traces:
    """Processes, mounts and cgroups, each with words to name it by."""

    def __init__(self, lines: set[str]) -> None:
        self._lines = lines

    @classmethod
    def now(cls, service: ServiceUnderTest) -> "Traces":
        """Those there are now. Processes that lost their parent are this one's: it reaps them."""
        return cls({*_processes(), *_mounts(), *_cgroups(service.brokers)})

    def since(self, before: "Traces") -> list[str]:
        return sorted(self._lines - before._lines)


def _processes() -> Iterator[str]:
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess, ChildProcessError):
            if process.status() == psutil.STATUS_ZOMBIE and process.ppid() == os.getpid():
                os.waitpid(process.pid, os.WNOHANG)
            else:
                yield f"process {process.pid}: {' '.join(process.cmdline())[:100]}"


def _mounts() -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [f"mount {line.split()[4]}" for line in lines]


def _cgroups(brokers: set[str]) -> Iterator[str]:
    for mount in psutil.disk_partitions(all=True):
        if mount.fstype in ("cgroup", "cgroup2"):
            for path, _, _ in os.walk(mount.mountpoint):
                name = os.path.basename(path)
                if name.startswith("sbx-") and any(map(name.endswith, brokers)):
                    yield f"cgroup {path}"


def _unknown(data: Path) -> list[str]:
    """Directories of sandboxes that no row of the store knows, or knew at a start."""
    with closing(sqlite3.connect(f"file:{data / 'store.sqlite'}?mode=ro", uri=True)) as on:
        named = {
            row[0]
            for row in on.execute("SELECT directory FROM workspaces WHERE deleted_at IS NULL")
        }
        pending = on.execute(
            "SELECT w.directory FROM workspaces AS w JOIN sandboxes ON workspace_id = w.id"
            " WHERE sandboxes.deleted_at IS NOT NULL AND files_removed = 0"
        )
        named |= {row[0] for row in pending}
    there = {path.name for path in (data / "sandboxes").iterdir()}
    apart = data / "unclaimed"
    set_apart = sorted(path.name for path in apart.iterdir()) if apart.exists() else []
    return [
        *(f"directory sandboxes/{name}, which no row knows" for name in sorted(there - named)),
        *(f"directory unclaimed/{name}, which no row knew" for name in set_apart),
    ]
