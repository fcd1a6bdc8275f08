"""Which fault strikes when. The same seed gives the same plan."""

from dataclasses import dataclass
from random import Random

# The faults that end the service, and those that it has to survive.
ENDING = ("kill", "terminate", "broker_kill", "broker_silent")
PASSING = (
    "broker_pause",
    "jails_kill",
    "jails_pause",
    "disk_full",
    "store_locked",
    "silent_connections",
    "few_descriptors",
)
_LONGEST_S = {"store_locked": (2.0, 8.0), "broker_pause": (0.5, 4.0)}
_USUAL_S = (1.0, 4.0)
_GAP_S = (0.5, 3.0)
_AFTER_END_S = 4.0  # for a new process to come and to do some work
_OVERLAP = 0.25  # how often a fault strikes while another one lasts
_LONG_LIFE_S = 360.0  # a run as long as this has a part in which nothing ends the service


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault to come: `at` seconds after the begin, lasting `for_s` seconds."""

    kind: str
    at: float
    for_s: float


def is_calm(at: float, seconds: float) -> bool:
    """Return whether `at` is in the part of a run in which nothing ends the service."""
    return seconds >= _LONG_LIFE_S and seconds / 3 <= at < seconds * 2 / 3


def plan(seed: int, seconds: float) -> list[Fault]:
    """Return the faults of a run, each kind as often as the others; at most two last at once.

    In the middle third of a long run only faults strike that the service survives: memory and
    descriptors are compared within one life.
    """
    random = Random(seed)
    at, before, faults = 1.0, 0.0, list[Fault]()
    deck: list[str] = []
    while True:
        deck = deck or random.sample((*ENDING, *PASSING), len(ENDING) + len(PASSING))
        kind = deck.pop()
        if kind in ENDING and is_calm(at, seconds):
            continue
        for_s = random.uniform(*_LONGEST_S.get(kind, _USUAL_S))
        if at + for_s > seconds:
            return faults
        faults.append(Fault(kind, round(at, 2), round(for_s, 2)))
        end = at + for_s + (_AFTER_END_S if kind in ENDING else 0.0)
        alone = kind in ENDING or before > at  # a third one has to wait for this one
        overlaps = not alone and random.random() < _OVERLAP
        gap = random.uniform(*_GAP_S)
        before, at = max(before, end), at + for_s / 2 if overlaps else max(before, end) + gap
