"""How much slower the cells of an innocent sandbox become while another one attacks the service.

In each round every attack of `attacks.py` goes on for a moment against a real `sbx serve`, with a
quiet moment before it. The figure of a round is the worst attack's: the median latency of `1+1`
during it, divided by the median of the quiet moments of that round. The baseline is what the
machine does to that figure by itself: the same with nobody attacking.
"""

import asyncio
import time
from statistics import median

from bench.attacks import ATTACKS, Attack, again_and_again
from bench.samples import Bench, NotMeasured, Progress, Samples, percentile
from bench.serving import served
from sbx.client import Client, RemoteSandbox

_QUIET_S = 0.5
_ATTACKED_S = 2.0
_BEGUN_S = 0.3  # in which an attack comes to what it is about
_WARM_UP = 50


async def _neighbour(rounds: int, progress: Progress) -> Samples:
    attacked: dict[str, list[float]] = {attack.name: [] for attack in ATTACKS}
    quiet: list[float] = []
    worst: list[float] = []
    by_itself: list[float] = []
    async with served() as client, await client.create() as innocent:
        for _ in range(_WARM_UP):
            await _cell_ms(innocent)
        for number in range(rounds):
            during, before = {}, []
            for attack in ATTACKS:
                before.append(await _cells_ms(innocent, _QUIET_S))
                during[attack.name] = await _attacked_ms(client, innocent, attack)
            usual = median(one for moment in before for one in moment)
            worst.append(max(median(moment) for moment in during.values()) / usual)
            by_itself.append(max(map(median, before)) / usual)
            for name, moment in during.items():
                attacked[name] += moment
            quiet += (one for moment in before for one in moment)
            progress(number + 1, rounds)
    usual = median(quiet)
    also = {name: median(moment) / usual for name, moment in attacked.items()}
    also["p99 while attacked"] = (
        percentile([one for moment in attacked.values() for one in moment], 99) / usual
    )
    also["quiet, in ms"] = usual
    return Samples(worst, by_itself, "the worst of as many quiet moments", also)


async def _attacked_ms(client: Client, innocent: RemoteSandbox, attack: Attack) -> list[float]:
    over = asyncio.Event()
    async with await client.create(narrower={"limits": dict(attack.narrower)}) as box:
        await box.run("1+1")
        attacking = asyncio.create_task(again_and_again(attack, box, over))
        try:
            await asyncio.sleep(_BEGUN_S)
            took = await _cells_ms(innocent, _ATTACKED_S)
        finally:
            over.set()
            outcomes = await attacking
    if not set(outcomes) <= attack.ends:
        raise NotMeasured(f"{attack.name} ended as {sorted(set(outcomes))}")
    return took


async def _cells_ms(box: RemoteSandbox, for_s: float) -> list[float]:
    took = []
    end = time.monotonic() + for_s
    while time.monotonic() < end:
        took.append(await _cell_ms(box))
    return took


async def _cell_ms(box: RemoteSandbox) -> float:
    began = time.perf_counter()
    run = await box.run("1+1")
    took = (time.perf_counter() - began) * 1000
    if run.result != "2":
        raise NotMeasured(f"1+1 gave {run}")
    return took


BENCHES = (Bench("neighbour", "times", 5.0, _neighbour, rounds=5),)
