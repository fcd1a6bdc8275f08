"""Contexts that are made, deleted, restarted and run in by several at once, while their sandbox is
stopped and their conversations are deleted: every call ends, nothing breaks, nothing is left."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest
from persistent_sandboxes import ME, open_service

from sbx.errors import Broken, SbxError
from sbx.runtime.run.contexts import Contexts
from sbx.service.run import RunRequest
from sbx.service.service import Service
from tests.tiers import rows

CONVERSATIONS = ("default", "second")
FOR_S = 3.0


async def _run(service: Service, box: str, talk: str, name: str) -> None:
    ask = RunRequest("python", "import time; time.sleep(0.01)", context=name)
    await (await service.runs.start(ME, box, talk, ask)).result()


async def _restart(contexts: Contexts, name: str) -> None:
    await (await contexts.get(name)).restart()


async def _given_up(contexts: Contexts, name: str) -> None:
    creating = asyncio.create_task(contexts.create(name))
    await asyncio.sleep(0.01)
    creating.cancel()
    with suppress(asyncio.CancelledError):
        await creating


OF_CONTEXTS: tuple[Callable[[Contexts, str], Awaitable[object]], ...] = (
    Contexts.create,
    Contexts.create,
    Contexts.delete,
    _restart,
    _given_up,
)


async def _act(service: Service, box: str, chance: random.Random) -> None:
    talk, name = chance.choice(CONVERSATIONS), chance.choice("abc")
    match chance.randrange(8):
        case 0:
            await service.sandboxes.stop(ME, box)
        case 1:
            await service.sandboxes.delete_conversation(ME, box, talk)
        case 2 | 3:
            await _run(service, box, talk, chance.choice((name, "default")))
        case _:
            async with service.sandboxes.using(ME, box, scope="execute") as use:
                await chance.choice(OF_CONTEXTS)(use.conversation(talk).contexts, name)


@pytest.mark.parametrize("seed", rows([1, 2], ci_tier=[1]))
async def test_whatever_is_done_at_once_nothing_breaks_and_nothing_is_left(
    tmp_path: Path, seed: int
) -> None:
    """Once, two that deleted a conversation while a third one used it made the store fail, and
    kernels start in directories that were gone."""
    chance = random.Random(seed)
    async with open_service(tmp_path / "data", kernels_max=4) as service:
        box = (await service.sandboxes.create(ME)).id
        end = time.monotonic() + FOR_S

        async def go_on() -> None:
            while time.monotonic() < end:
                async with asyncio.timeout(60):
                    try:
                        await _act(service, box, chance)
                    except Broken:
                        raise
                    except SbxError:
                        pass  # refused, or ended by somebody else

        await asyncio.gather(*(go_on() for _ in range(6)))
        async with service.sandboxes.using(ME, box, scope="execute") as use:
            known = {(talk, use.conversation(talk).contexts) for talk in CONVERSATIONS}
            names = {
                (talk, one.name)
                for talk, contexts in known
                for one in contexts.ending
                if one is not contexts.default
            }
            await service.store.write(lambda on: None)  # after all that was left to be written
            stored = await service.store.rows("SELECT conversation, name FROM contexts")
            assert {(row["conversation"], row["name"]) for row in stored} == names
            for talk in CONVERSATIONS:
                assert (await use.conversation(talk).run("1")).result == "1"
