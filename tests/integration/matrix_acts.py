"""The acts of tests/data_matrix.py on one thing, and the comparison with its cell."""

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from matrix_agent_things import (
    ApprovalThing,
    ChatThing,
    ProjectThing,
    QuarantineThing,
    RuleThing,
    SubAgentThing,
)
from matrix_inner_things import (
    CommandThing,
    ContextThing,
    FileThing,
    GrantThing,
    LinkThing,
    RunThing,
    TerminalThing,
    TokenThing,
)
from matrix_places import Place, process
from matrix_sdk_things import (
    BayThing,
    ClientThing,
    E2bThing,
    OpenSandboxThing,
    WorkspaceThing,
)
from matrix_things import (
    ConversationThing,
    SessionThing,
    Thing,
    UploadThing,
)

from tests.data_matrix import ACTS, TABLE, Cell, cell_of

THINGS: dict[str, type[Thing]] = {
    "sandbox": ClientThing,
    "session": SessionThing,
    "conversation": ConversationThing,
    "context": ContextThing,
    "upload": UploadThing,
    "file": FileThing,
    "run": RunThing,
    "command": CommandThing,
    "terminal": TerminalThing,
    "grant": GrantThing,
    "token": TokenThing,
    "link": LinkThing,
    "project": ProjectThing,
    "chat": ChatThing,
    "approval": ApprovalThing,
    "rule": RuleThing,
    "quarantine item": QuarantineThing,
    "sub-agent": SubAgentThing,
    "workspace": WorkspaceThing,
    "Bay sandbox": BayThing,
    "E2B sandbox": E2bThing,
    "OpenSandbox sandbox": OpenSandboxThing,
}
Answers = list[str]


async def _use(thing: Thing) -> Answers:
    return [await thing.use()]


async def _idle(thing: Thing) -> Answers:
    await thing.idle()
    return []


async def _expire(thing: Thing) -> Answers:
    await thing.expire()
    return []


async def _restore(thing: Thing) -> Answers:
    await thing.expire_session()
    return [await thing.restore()]


async def _purge(thing: Thing) -> Answers:
    await thing.expire()
    await thing.purge()
    return []


async def _stop(thing: Thing) -> Answers:
    return [await thing.stop()]


async def _extend(thing: Thing) -> Answers:
    return [await thing.extend()]


async def _delete(thing: Thing) -> Answers:
    return [await thing.delete()]


async def _delete_running(thing: Thing) -> Answers:
    if not (answer := await thing.delete()).startswith(("20", "ok")):
        return [answer]
    return [answer, f"the code ends: {await thing.end()}"]


async def _forget(thing: Thing) -> Answers:
    return [await thing.ask("DELETE", f"/v1/admin/users/{thing.user}")]


_ACTS: dict[str, Callable[[Thing], Awaitable[Answers]]] = {
    "use": _use,
    "idle": _idle,
    "expire": _expire,
    "restore": _restore,
    "grace over": _purge,
    "stop": _stop,
    "extend": _extend,
    "delete": _delete,
    "delete while it runs": _delete_running,
    "forget the user": _forget,
}
LIVE = ("create", *_ACTS)


def cells(things: Iterable[str], acts: Iterable[str] = ACTS) -> list[tuple[str, str]]:
    """Return the cells that act, by thing and act."""
    pairs = itertools.product(things, acts)
    return [(thing, act) for thing, act in pairs if isinstance(TABLE[thing][act], Cell)]


async def made(place: Place, name: str, held: AsyncExitStack) -> Thing:
    """Return a new thing that was created and used."""
    thing = THINGS[name](place, held)
    await thing.prepare()
    await thing.ready()
    return thing


async def check_live(place: Place, name: str, act: str) -> None:
    """Do the act to a new thing in a service of this process; compare everything with the cell."""
    assert place.served is not None
    try:
        async with AsyncExitStack() as held:
            thing = THINGS[name](place, held)
            await thing.prepare()
            if act == "create":
                begin = place.audit.stat().st_size
                answers = [await thing.create()]
            else:
                await thing.ready()
                await thing.before(act)
                begin = place.audit.stat().st_size
                answers = await _ACTS[act](thing)
            await compare(place, thing, TABLE[name][act], answers, begin)
            if act == "forget the user":
                assert await place.where(thing.user, "nowhere") == "nowhere", thing.user
    finally:
        await place.served.empty()


@dataclass(frozen=True)
class Made:
    """A thing that was created before the service was restarted, or the error of its creation.
    `log`: the audit log then."""

    thing: Thing | None
    error: BaseException | None
    log: bytes


Restarted = tuple[Place, dict[str, Made]]


async def made_all(place: Place, act: str, held: AsyncExitStack) -> dict[str, Made]:
    """Create and use all things that have this act."""
    everything = {}
    for name, _ in cells(THINGS, (act,)):
        try:
            thing = await made(place, name, held)
            everything[name] = Made(thing, None, await place.log())
        except Exception as error:  # noqa: BLE001  # it fails the cell of this thing only
            everything[name] = Made(None, error, b"")
    return everything


@asynccontextmanager
async def killed(act: str) -> AsyncIterator[Restarted]:
    """Make all things, kill the service in the middle of their work, and start it again."""
    async with process() as running, AsyncExitStack() as held:
        made = await made_all(await running.start(), act, held)
        await _begin_all(made)
        running.kill()
        yield await running.start(), made


@asynccontextmanager
async def restored(act: str, *, older: bool) -> AsyncIterator[Restarted]:
    """Make all things, back up the store, and restore it. `older`: delete them in between."""
    async with process() as running, AsyncExitStack() as held:
        place = await running.start()
        made = await made_all(place, act, held)
        if not older:
            await _begin_all(made)
        for name, each in made.items():  # runs are recorded soon after their reply
            if each.thing is not None:
                await place.where(each.thing.mark, cell_of(name, "backup and restore").disk)
        running.store("backup", place.top / "kept")
        if older:
            await _delete_all(made)
        await running.end()
        running.store("restore", place.top / "kept")
        yield await running.start(), made


async def _begin_all(made: Mapping[str, Made]) -> None:
    """Begin all that is in progress when the service is killed or copied."""
    for each in made.values():
        if each.thing is not None:
            await each.thing.before_restart()


async def _delete_all(made: Mapping[str, Made]) -> None:
    for each in made.values():
        if each.thing is not None:
            await each.thing.before("delete")
            await each.thing.delete()


async def check_restarted(place: Place, made: Made, name: str, act: str) -> None:
    """Compare a thing with its cell after a restart: `place` is the new service."""
    if made.error is not None:
        raise made.error
    assert made.thing is not None
    made.thing.place = place
    await made.thing.moved()
    assert (await place.log()).startswith(made.log), "the audit log has lost lines"
    await compare(place, made.thing, TABLE[name][act], [], None)


async def compare(
    place: Place, thing: Thing, cell: object, answers: Answers, begin: int | None
) -> None:
    """`begin`: the byte of the audit log at which the act began."""
    assert isinstance(cell, Cell)
    log = cell.log if begin is None else await place.events(begin, thing.ids, cell.log)
    answers = [*answers, await thing.look()]
    places = await place.where(thing.mark, cell.disk)
    shown = Cell(", then ".join(answers), log, places, cell.note)
    if shown != cell:
        left = [*await place.rows(thing.mark), *place.paths(thing.mark)]
        raise AssertionError(f"\n  now   {shown[:3]}\n  table {cell[:3]}\n  left  {left}")
